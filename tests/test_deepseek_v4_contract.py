"""The contract on DeepSeek V4, bit for bit, at the places where its state is not a plain list of rows: the edges of
windows of 4 and 128 tokens, positions far behind the raw window, and what going back costs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from oracle import DATA, assert_same, feed, held_rows, settled, some_tokens

import ds4

EDGES = (127, 128, 129, 130, 255, 256, 257, 383, 384, 385, 511, 512, 513)
MODELS = ("tiny", "tiny-fp8", "reference", "reference_fp")


@pytest.fixture(scope="module", params=MODELS)
def engine(request):
    """The committed tiny model, with plain and with rounded rows; and both reference models where they are there."""
    options = {"threads": 1, "pool_tokens": 60000}
    if request.param.startswith("tiny"):
        folder = DATA / "deepseek_v4"
        options |= {"kv_dtype": "fp8", "rounding": True} if request.param == "tiny-fp8" else {"mtp": True}
    else:
        folder = request.getfixturevalue("reference") / request.param.replace("reference", "deepseek_v4")
        options["kv_dtype"] = "f32"
    with ds4.Engine(folder, **options) as one:
        start = settled(one.ledger())
        yield one
        assert settled(one.ledger()) == start


def is_tiny(engine: ds4.Engine) -> bool:
    """The committed model goes further in every restore."""
    return Path(engine.model).parent == DATA


def other_tokens(n: int) -> list[int]:
    return some_tokens(n, seed=77)


def test_chunk_sizes(engine):
    tokens, results = some_tokens(300), []
    for chunk in (2048, 1, 3, 7, 50, 127, 128, 129, 130):
        with engine.session() as session:
            logits = session.eval(tokens, logits="all", chunk=chunk)
            results.append((logits.tobytes(), [held_rows(session, i) for i in range(len(engine.streams))]))
    for logits, rows in results[1:]:
        assert logits == results[0][0]
        for mine, whole in zip(rows, results[0][1], strict=True):
            assert {row: data for row, data in mine.items() if row in whole and whole[row] != data} == {}


@pytest.mark.slow
def test_truncate_to_every_position_and_go_on_with_other_tokens(engine):
    """From 300 to 299 .. 140, then over the next edge of 4 and of 128."""
    tokens = some_tokens(300)
    with engine.session() as session:
        feed(session, tokens)
        for pos in range(299, 139, -1):
            other = other_tokens(128 - pos % 128 + 5)
            with session.fork() as child, engine.session() as fresh:
                child.truncate(pos)
                wanted = fresh.eval(tokens[:pos] + other, logits="all", chunk=2048)[pos:]
                assert child.eval(other[:5], logits="all").tobytes() == wanted[:5].tobytes(), f"truncated to {pos}"
                assert child.eval(other[5:], logits="all").tobytes() == wanted[5:].tobytes(), f"truncated to {pos}"
        assert_same(session, tokens)


def test_marks_far_outside_the_window(engine):
    """Every edge is marked and left behind by more than a thousand tokens."""
    tokens, marks = some_tokens(1700), []
    session = engine.session()
    for n in EDGES:
        feed(session, tokens[session.pos : n])
        marks.append((n, session.mark()))
    feed(session, tokens[session.pos :])
    for n, mark in reversed(marks):
        session.rollback(mark)
        assert_same(session, tokens[:n])
        session.eval(other_tokens(130))
        assert_same(session, tokens[:n] + other_tokens(130))
        mark.release()
    session.close()


def test_forks_at_the_edges(engine):
    tokens = some_tokens(520)
    with engine.session() as session:
        feed(session, tokens)
        for n in (n for n in EDGES if n >= 520 - engine.reach_slack):
            with session.fork(n) as child:
                assert_same(child, tokens[:n])
                child.eval(other_tokens(9))
                assert_same(child, tokens[:n] + other_tokens(9))
        session.eval(other_tokens(140))
        assert_same(session, tokens + other_tokens(140))


def test_snapshots_at_the_edges(engine, tmp_path):
    tokens = some_tokens(520)
    with engine.session() as session:
        for n in EDGES:
            session.eval(tokens[session.pos : n], logits=None)
            session.save(tmp_path / "one.ds4")
            with engine.load(tmp_path / "one.ds4") as loaded:
                assert_same(loaded, tokens[:n])
                loaded.eval(other_tokens(6))
                assert_same(loaded, tokens[:n] + other_tokens(6))


def test_a_hundred_restores(engine):
    tokens, rng = some_tokens(383), np.random.default_rng(9)
    with engine.session() as session:
        session.eval(tokens)
        mark, logits, most = session.mark(), session.logits.tobytes(), engine.ledger()["pages_used"]
        longest = 150 if is_tiny(engine) else 12
        for _ in range(100):
            session.eval(
                rng.integers(0, engine.vocab, int(rng.integers(1, longest))).tolist(), chunk=int(rng.integers(1, 60))
            )
            session.rollback(mark)
            assert session.logits.tobytes() == logits
            assert engine.ledger()["pages_used"] <= most  # fewer where it had gone far: what the slack held is gone
        assert_same(session, tokens)
        mark.release()


def test_going_back_costs_the_same_at_any_length(engine):
    """Counts of the ledger, no clock: marks and forks take no page and copy none, truncate gives some back; the first
    token behind a fork copies one page of each stream at most."""
    costs = []
    for n in (700, 2700):
        with engine.session() as session:
            feed(session, some_tokens(n))
            before = settled(engine.ledger())
            mark = session.mark()
            marked = settled(engine.ledger())
            assert {k: v for k, v in marked.items() if v != before[k]} == {"marks": before["marks"] + 1}
            with session.fork() as child:
                forked = settled(engine.ledger())
                child.eval([1])
                written = settled(engine.ledger())
            session.truncate(n - 100)
            cut = settled(engine.ledger())
            costs.append(
                (
                    forked["pages_used"] - marked["pages_used"],
                    written["pages_used"] - forked["pages_used"] <= len(engine.streams),
                    cut["pages_used"] <= marked["pages_used"],
                )
            )
            mark.release()
    assert costs == [(0, True, True)] * 2
