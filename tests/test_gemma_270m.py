"""Gemma 3 270M: accuracy against the reference, the contract beyond its window of 512, memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from oracle import assert_same
from real import behind_greedy, divergence, loading

import ds4

pytestmark = [pytest.mark.model, pytest.mark.slow]

KL_OF_LLAMA_CPP = 0.00336
WINDOW = 512


@pytest.fixture(scope="module")
def engine(gemma3_path: Path):
    with ds4.Engine(gemma3_path, threads=2, pool_tokens=32768, reach_slack=64) as engine:
        yield engine


@pytest.fixture(scope="module")
def tokens(engine: ds4.Engine) -> list[int]:
    folder = Path(__file__).parent.parent
    text = "".join((folder / name).read_text(encoding="utf-8") for name in ("README.md", "ARCHITECTURE.md"))
    return [engine.tokenizer.bos_id, *engine.tokenizer.encode(text)][:1500]


def test_divergence_from_the_reference(engine: ds4.Engine) -> None:
    kl, among, same = divergence(engine, "gemma3_270m_q4_k_m")
    print(f"\nmean KL {kl:.5f}, among the 20 {among:.5f} (llama.cpp {KL_OF_LLAMA_CPP}), best token agrees {same:.3f}")
    assert max(kl, among) <= KL_OF_LLAMA_CPP * 1.03
    assert same >= 0.97


def test_greedy_tokens_of_the_reference(engine: ds4.Engine) -> None:
    for name, behind in behind_greedy(engine, "gemma3_270m_q4_k_m").items():
        assert (behind == 0).mean() >= 0.9 and behind.max() < 0.5, f"{name}: {behind.round(3)}"


def test_streams_are_those_of_the_model(engine: ds4.Engine) -> None:
    assert [(s.name, s.n_layers, s.reach) for s in engine.streams] == [("kv", 3, None), ("window", 15, WINDOW)]


def test_beyond_the_window(engine: ds4.Engine, tokens: list[int]) -> None:
    """Truncate inside the slack, back to a mark far outside the window, and forward again with other tokens."""
    with engine.session() as s:
        s.eval(tokens[:600])
        mark = s.mark()
        s.eval(tokens[600:1400], chunk=100)
        s.truncate(1380)
        s.eval(tokens[1400:1420])
        assert_same(s, tokens[:1380] + tokens[1400:1420])
        with pytest.raises(ds4.errors.InexactError) as refused:
            s.truncate(700)
        assert s.pos == 1400 and refused.value.nearest < 700
        s.rollback(mark)
        assert_same(s, tokens[:600])
        s.eval(tokens[900:1000])
        assert_same(s, tokens[:600] + tokens[900:1000])
        mark.release()


def test_sync_evaluates_from_the_nearest_exact_position(engine: ds4.Engine, tokens: list[int]) -> None:
    with engine.session() as s:
        s.sync(tokens[:900])
        for edit in (890, 640):
            nearest = s.nearest_exact(edit)
            edited = tokens[:edit] + [tokens[edit] + 1] + tokens[edit + 1 : 900]
            done = s.sync(edited)
            assert (done.reused, done.evaluated) == (nearest, 900 - nearest)
            assert_same(s, edited)
            s.sync(tokens[:900])


def test_snapshot_keeps_what_is_exact(engine: ds4.Engine, tokens: list[int], tmp_path: Path) -> None:
    with engine.session() as s:
        s.eval(tokens[:300])
        s.eval(tokens[300:1100])
        before = [s.nearest_exact(p) for p in range(0, 1100, 50)]
        s.save(tmp_path / "s")
        logits = s.logits.tobytes()
    with engine.load(tmp_path / "s") as loaded:
        assert [loaded.nearest_exact(p) for p in range(0, 1100, 50)] == before
        assert loaded.logits.tobytes() == logits
        loaded.truncate(before[10])
        loaded.eval(tokens[1100:1110])
        assert_same(loaded, tokens[: before[10]] + tokens[1100:1110])


def test_score_at_262k_vocabulary_stays_small(engine: ds4.Engine, tokens: list[int]) -> None:
    """[n, vocab] of these tokens would take 1 GB; a chunk's tile takes 16 MB."""
    resource = pytest.importorskip("resource")
    with engine.session() as s:
        s.score(tokens[:50])
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found = s.score(tokens[50:1050])
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert len(found) == 1000 and (found < 0).all()
    assert grown * 1024 < 150e6


@pytest.mark.nosanitize
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="resident memory is read from /proc, as on Linux")
def test_memory_is_the_file_and_the_rows(gemma3_path: Path) -> None:
    seconds, resident, held = loading(gemma3_path)
    print(f"\nloaded in {seconds:.2f} s; {resident / 1e6:.0f} MB, of them {held / 1e6:.0f} MB rows")
    assert resident <= os.path.getsize(gemma3_path) + held + 200e6
