"""The real model: accuracy against the reference, the contract in a shorter run, load time and memory."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from real import behind_greedy, divergence, loading, log_softmax

import ds4

pytestmark = pytest.mark.model

KL_OF_LLAMA_CPP = 0.00267
PAGE = 64


@pytest.fixture(scope="module")
def engine(smollm2_path: Path):
    with ds4.Engine(smollm2_path, threads=2, pool_tokens=8192) as engine:
        yield engine


@pytest.fixture(scope="module")
def tokens(engine: ds4.Engine) -> list[int]:
    text = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    return engine.tokenizer.encode(text)[:700]


def test_divergence_from_the_reference(engine: ds4.Engine) -> None:
    kl, among, same = divergence(engine, "smollm2_q4_1")
    print(f"\nmean KL {kl:.5f}, among the 20 {among:.5f} (llama.cpp {KL_OF_LLAMA_CPP}), best token agrees {same:.3f}")
    assert max(kl, among) <= KL_OF_LLAMA_CPP * 1.03
    assert same >= 0.97


def test_greedy_tokens_of_the_reference(engine: ds4.Engine) -> None:
    """The reference's token is our best one, or nearly as likely (activations are quantised here)."""
    for name, behind in behind_greedy(engine, "smollm2_q4_1").items():
        assert (behind == 0).mean() >= 0.9 and behind.max() < 0.5, f"{name}: {behind.round(3)}"


def fresh(engine: ds4.Engine, tokens: list[int]) -> tuple[bytes, bytes]:
    with engine.session() as s:
        s.eval(tokens)
        return s.logits.tobytes(), s.rows(0, 0, len(tokens))


def same_as_fresh(engine: ds4.Engine, s: ds4.Session, tokens: list[int]) -> None:
    assert s.tokens == tokens
    logits, rows = fresh(engine, tokens)
    assert s.rows(0, 0, len(tokens)) == rows
    assert s.logits.tobytes() == logits
    s.check()


@pytest.mark.parametrize("chunk", (1, 7, 64, PAGE - 1, PAGE + 1, 700))
def test_chunks(engine: ds4.Engine, tokens: list[int], chunk: int) -> None:
    n = 70 if chunk == 1 else 200
    with engine.session() as s:
        s.eval(tokens[:n], chunk=chunk)
        same_as_fresh(engine, s, tokens[:n])


@pytest.mark.parametrize("kv_dtype", ("f32", "q8_0"))
@pytest.mark.slow
def test_other_kv_dtypes(smollm2_path: Path, tokens: list[int], kv_dtype: str) -> None:
    with ds4.Engine(smollm2_path, threads=1, kv_dtype=kv_dtype, pool_tokens=2048) as engine, engine.session() as s:
        s.eval(tokens[:150], chunk=33)
        s.truncate(90)
        s.eval(tokens[200:240], chunk=9)
        same_as_fresh(engine, s, tokens[:90] + tokens[200:240])


@pytest.mark.slow
def test_moves(engine: ds4.Engine, tokens: list[int], tmp_path: Path) -> None:
    with engine.session() as s, engine.session() as mate:
        s.eval(tokens[:300])
        for pos in (299, 257, 256, 255, 65, 64, 63, 1, 0):
            s.truncate(pos)
            s.eval(tokens[300:320])
            same_as_fresh(engine, s, tokens[:pos] + tokens[300:320])
            s.sync(tokens[:300])
        mark = s.mark()
        list(s.generate(ds4.Sampling(temperature=1, seed=3), max_tokens=40, stop_ids=()))
        s.rollback(mark)
        child = s.fork(130)
        mate.eval(tokens[400:500])
        engine.eval_batch([(s, tokens[300:310]), (child, tokens[500:570]), (mate, tokens[1:2])])
        same_as_fresh(engine, s, tokens[:310])
        same_as_fresh(engine, child, tokens[:130] + tokens[500:570])
        same_as_fresh(engine, mate, tokens[400:500] + tokens[1:2])
        child.save(tmp_path / "child.ds4")
        with engine.load(tmp_path / "child.ds4") as loaded:
            same_as_fresh(engine, loaded, child.tokens)
        child.close()


def test_cancel_and_failure(engine: ds4.Engine, tokens: list[int]) -> None:
    def stop(done: int, total: int) -> None:
        if done >= 100:
            s.cancel()

    with engine.session() as s:
        with pytest.raises(ds4.errors.Cancelled) as caught:
            s.eval(tokens[:600], chunk=50, progress=stop)
        pos = caught.value.pos
        assert pos is not None and pos % 50 == 0 and 100 <= pos < 600
        s.refresh()
        same_as_fresh(engine, s, tokens[:pos])


def test_score_equals_the_logits(engine: ds4.Engine, tokens: list[int]) -> None:
    with engine.session() as s:
        all_logits = s.eval(tokens[:120], logits="all")
    with engine.session() as s:
        got = s.score(tokens[:120], chunk=50)
    want = log_softmax(all_logits)[np.arange(119), tokens[1:120]]
    assert got[0] == 0
    np.testing.assert_allclose(got[1:], want, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.nosanitize
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="resident memory is read from /proc, as on Linux")
def test_memory_is_the_file_and_the_rows(smollm2_path: Path) -> None:
    seconds, resident, held = loading(smollm2_path)
    print(f"\nloaded in {seconds:.2f} s; {resident / 1e6:.0f} MB, of them {held / 1e6:.0f} MB rows")
    assert resident <= os.path.getsize(smollm2_path) + held + 200e6
