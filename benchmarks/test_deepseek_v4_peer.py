"""A tiny DeepSeek V4 in GGUF against llama-cpp-python, where the extra `bench` is installed: `make bench PEERS=1`."""

from __future__ import annotations

from pathlib import Path

import pytest

WHY = (
    "llama-cpp-python (extra `bench`) is not installed: 0.3.36 and later know deepseek4, but come as source, and their "
    "build had not ended after 20 minutes on two busy cores"
)


def test_the_logits_are_those_of_llama_cpp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("llama_cpp", reason=WHY)
    pytest.importorskip("gguf", reason="needs the gguf library (extra `test`)")
    from deepseek_v4_gguf import compare, text_of

    found = compare(tmp_path)
    with capsys.disabled():
        print("\n" + text_of(found))
    assert found.difference < 1e-3 and found.same_choice == 1.0
