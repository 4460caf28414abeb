"""The tutorial: what ds4 does, on a model of 150,000 random weights. Every comparison is of bits."""

from pathlib import Path

import numpy as np
import pytest

import ds4

TINY = Path(__file__).parent / "data" / "llama"
TOKENS = [int(t) for t in np.random.default_rng(1).integers(0, 512, 200)]


@pytest.fixture
def engine():
    with ds4.Engine(TINY, threads=2, pool_tokens=4096) as engine:
        yield engine


def fresh(engine: ds4.Engine, tokens: list[int]) -> bytes:
    """The logits of a session that never saw anything else."""
    with engine.session() as s:
        s.eval(tokens)
        return s.logits.tobytes()


def test_tutorial(engine: ds4.Engine, tmp_path: Path) -> None:
    s = engine.session(ctx=1024)
    s.eval(TOKENS[:150])  # prefill
    assert (s.pos, s.logits.shape) == (150, (512,))

    s.truncate(70)  # back: as if the rest had never been; the old logits are gone too
    assert not s.logits_valid
    s.eval(TOKENS[70:100], chunk=7)  # and forward again, in any chunks
    assert s.logits.tobytes() == fresh(engine, TOKENS[:100])

    mark = s.mark()  # try something ...
    for token in s.generate(ds4.Sampling(temperature=1.0, seed=7), max_tokens=20):
        assert 0 <= token.id < 512
    s.rollback(mark)  # ... and it was never there
    assert s.tokens == TOKENS[:100] and s.logits.tobytes() == fresh(engine, TOKENS[:100])

    child = s.fork()  # shares every page, copies what it writes
    child.eval(TOKENS[150:])
    engine.eval_batch([(s, TOKENS[100:120]), (child, [1, 2, 3])])  # many sessions, one pass
    assert s.logits.tobytes() == fresh(engine, TOKENS[:120])
    assert child.logits.tobytes() == fresh(engine, TOKENS[:100] + TOKENS[150:] + [1, 2, 3])

    edited = TOKENS[:90] + [5] + TOKENS[91:120]
    synced = s.sync(edited)  # keeps the longest usable prefix, says what it cost
    assert (synced.reused, synced.evaluated) == (90, 30)
    assert s.logits.tobytes() == fresh(engine, edited)

    s.save(tmp_path / "context.ds4")  # one file, complete or refused
    loaded = engine.load(tmp_path / "context.ds4")
    assert loaded.tokens == edited and loaded.logits.tobytes() == s.logits.tobytes()
    s.check()
    for thing in (s, child, loaded, mark):
        thing.close()
    assert engine.ledger()["pages_used"] == 0
