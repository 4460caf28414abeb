"""A tiny DeepSeek V4 in GGUF against llama-cpp-python, where the extra `bench` is installed: `make bench PEERS=1`."""

from __future__ import annotations

from pathlib import Path

import pytest

WHY = "llama-cpp-python (extra `bench`) is not installed: 0.3.36 and later know deepseek4; pip builds it in minutes"


def test_the_logits_are_those_of_llama_cpp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """F32 weights differ by the order of sums: 2.6e-4 of logits whose standard deviation is 6.5 was seen. MXFP4 is read
    here without loss."""
    pytest.importorskip("llama_cpp", reason=WHY)
    pytest.importorskip("gguf", reason="needs the gguf library (extra `test`)")
    from deepseek_v4_gguf import Compared, both

    plain = Compared(*both(tmp_path))
    mxfp4 = Compared(both(tmp_path, "mxfp4")[0], both(tmp_path, "mxfp4", plain=True)[1])
    with capsys.disabled():
        print(f"\nF32: {plain}\nMXFP4 here, its numbers as F32 there: {mxfp4}")
    for found in (plain, mxfp4):
        assert found.most < 1e-3 and found.same_choice == 1.0
