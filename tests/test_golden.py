"""Golden hashes: notice when a commit changes a bit.

A snapshot holds rows, so an engine whose arithmetic differs in one bit must not accept it. When this test fails and
the change is meant: raise DS4_NUMERICS in csrc/internal.h, then `python tests/test_golden.py --write`.
"""

from __future__ import annotations

import hashlib
import json
import sys

import numpy as np
import pytest
from oracle import DATA, ISAS, KV_DTYPES, TEST_BUILD, TOYS, make_engine, some_tokens

import ds4
from ds4.errors import UnsupportedError

GOLDEN = DATA / "golden.json"
N = 700  # over a page, a split of 512 keys and the toy windows
CASES = [(model, toy, kv) for model in ("llama", "llama3rope") for toy in ("plain", "both") for kv in KV_DTYPES]
CASES += [(model, "plain", kv) for model in ("qwen3", "qwen3_moe", "gemma3", "deepseek_v4") for kv in KV_DTYPES]


def hashes(engine: ds4.Engine) -> dict[str, str]:
    """SHA-256 of the logits of all positions, and of the rows that are held, per stream."""
    with engine.session() as s:
        found = {"logits": s.eval(some_tokens(N), logits="all").tobytes()}
        for i, stream in enumerate(engine.streams):
            end = s.pos // stream.stride
            first = max(0, end - (stream.reach or end))
            found[stream.name] = s.rows(i, first, end - first)
    return {name: hashlib.sha256(data).hexdigest()[:32] for name, data in found.items()}


def case_name(model: str, toy: str, kv: str) -> str:
    return f"{model} {toy} {kv}"


@pytest.mark.parametrize("model, toy, kv", CASES)
def test_bits_are_those_of_this_numerics_number(model: str, toy: str, kv: str, engine_of) -> None:
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    engine = engine_of(model, toy, kv_dtype=kv, threads=2)
    assert engine.numerics == golden["numerics"], (
        "DS4_NUMERICS was raised: run `python tests/test_golden.py --write` with DS4_CORE=test"
    )
    assert hashes(engine) == golden[case_name(model, toy, kv)], (
        "a bit has changed: if that is meant, raise DS4_NUMERICS in csrc/internal.h and write the hashes again"
    )


@pytest.mark.slow
@pytest.mark.parametrize("isa", ("ref", *ISAS))
def test_every_kernel_gives_these_bits(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    monkeypatch.setenv("DS4_ISA", isa)
    for model, toy, kv in CASES:
        try:
            engine = make_engine(model, toy, kv_dtype=kv, threads=2)
        except UnsupportedError as error:
            pytest.skip(f"this processor lacks {isa}: {error}")
        with engine:
            assert isa == (engine.backend if isa == "ref" else engine.isa)
            assert hashes(engine) == golden[case_name(model, toy, kv)], f"{isa}, {case_name(model, toy, kv)}"


def test_hashes_notice_one_bit(engine_of) -> None:
    engine = engine_of("llama")
    with engine.session() as s:
        logits = s.eval(some_tokens(N), logits="all")
    changed = logits.copy()
    changed.view(np.uint32)[3, 5] ^= 1
    assert hashlib.sha256(changed.tobytes()).digest() != hashlib.sha256(logits.tobytes()).digest()


def write() -> None:
    old, golden = json.loads(GOLDEN.read_text(encoding="utf-8")), {}
    for case in CASES:
        with make_engine(case[0], case[1], kv_dtype=case[2]) as engine:
            golden["numerics"] = engine.numerics
            golden[case_name(*case)] = hashes(engine)
    changed = [name for name, value in golden.items() if name in old and old[name] != value]
    if changed and golden["numerics"] == old["numerics"]:
        sys.exit(
            f"bits have changed in {changed[0]}: raise DS4_NUMERICS in csrc/internal.h first, build, and write again"
        )
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"] or not TEST_BUILD:
        sys.exit(f"usage: DS4_CORE=test python {sys.argv[0]} --write ({len(CASES)} cases, toys {sorted(TOYS)})")
    write()
