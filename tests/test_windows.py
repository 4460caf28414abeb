"""Streams with a window: what stays exact and what is refused when it was left, and the marks that make it exact for
ever."""

from __future__ import annotations

import numpy as np
import pytest
from oracle import KV_DTYPES, TOYS, WINDOWED, assert_same, feed, fresh_logits, some_tokens, visible

from ds4.errors import InexactError, MarkError, NoLogits

every_toy = pytest.mark.parametrize("toy", TOYS)
every_kv = pytest.mark.parametrize("kv_dtype", KV_DTYPES)


# ---- windows -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("toy", WINDOWED)
def test_a_window_that_was_left_is_refused_and_nothing_changes(engine_of, toy):
    """A1, A5, K3: one stream cannot go back, so nothing does; the refusal says where it could."""
    engine, tokens = engine_of(toy=toy, reach_slack=16), some_tokens(300)
    with engine.session() as session:
        feed(session, tokens)
        before = visible(session)
        reach = max(stream.reach or 0 for stream in engine.streams)
        for pos in range(1, 300):
            nearest = session.nearest_exact(pos)
            assert nearest == pos if pos >= 300 - 16 else nearest in (0, pos)
            if pos < 300 - 16 - 64 and pos > reach:
                assert nearest == 0
            if nearest == pos:
                continue
            for call in (session.truncate, session.fork):
                with pytest.raises(InexactError) as caught:
                    call(pos)
                assert (caught.value.wanted, caught.value.nearest) == (pos, nearest)
                assert str(pos) in str(caught.value) and str(nearest) in str(caught.value)
        assert visible(session) == before
        assert_same(session, tokens)
        session.truncate(0)
        session.eval(tokens[:50])
        assert_same(session, tokens[:50])


@pytest.mark.parametrize("toy", WINDOWED)
def test_every_answer_of_nearest_exact_is_true(engine_of, toy):
    """B16: for each position that is said to be exact, truncate and fork there and compare."""
    engine, tokens = engine_of(toy=toy, reach_slack=16, pool_tokens=20000), some_tokens(400)
    with engine.session() as parent:
        parent.eval(tokens[:100], chunk=50)
        mark = parent.mark()
        parent.eval(tokens[100:])
        checked = 0
        for pos in range(0, 401, 7 if toy == "wide" else 1):
            nearest = parent.nearest_exact(pos)
            assert nearest <= pos and parent.nearest_exact(nearest) == nearest
            if nearest != pos or (checked := checked + 1) % 3:
                continue
            with parent.fork(pos) as child:
                assert_same(child, tokens[:pos])
                child.eval(tokens[pos : pos + 30], chunk=7)
                assert_same(child, tokens[: pos + 30])
        assert parent.nearest_exact(100) == 100 and checked > 16
        parent.rollback(mark)
        assert_same(parent, tokens[:100])


@pytest.mark.parametrize("toy", WINDOWED)
@pytest.mark.parametrize("slack", [0, 16])
def test_windows_crossed_left_and_entered_again(engine_of, toy, slack):
    """B2, B13, B16: eval far past the window, back as far as it goes, forward, again and again."""
    engine, rng, tokens = engine_of(toy=toy, reach_slack=slack), np.random.default_rng(5), []
    with engine.session() as session:
        for step in range(60):
            new = rng.integers(0, 512, int(rng.integers(1, 90))).tolist()
            session.eval(new, chunk=int(rng.choice([1, 7, 64, 512])))
            tokens += new
            pos = session.nearest_exact(int(rng.integers(max(0, session.pos - 120), session.pos + 1)))
            session.truncate(pos)
            del tokens[pos:]
            if step % 6 == 5:
                assert_same(session, tokens)
        assert_same(session, tokens)


@pytest.mark.parametrize("toy", WINDOWED)
@pytest.mark.parametrize("slack", [0, 1, 16])
def test_slack_is_kept(engine_of, toy, slack):
    """Within the slack every position is exact, whatever the chunks were; the memory of a windowed stream does not
    grow."""
    engine, tokens = engine_of(toy=toy, reach_slack=slack, pool_tokens=700), some_tokens(500)
    with engine.session() as session:
        for n in range(0, 500, 25):
            session.eval(tokens[n : n + 25], logits=None, chunk=9)
            for back in range(0, min(slack, session.pos) + 1):
                assert session.nearest_exact(session.pos - back) == session.pos - back
        windows = [stream for stream in engine.streams if stream.reach]
        most = sum(((w.reach + slack) // w.page_rows + 2) * w.page_bytes for w in windows)
        unlimited = sum(-(-500 // s.stride // s.page_rows) * s.page_bytes for s in engine.streams if not s.reach)
        assert session.bytes_held <= most + unlimited
        session.truncate(session.pos - slack)
        session.eval(tokens[500 - slack :])
        assert_same(session, tokens)


@pytest.mark.parametrize("toy", WINDOWED)
def test_sync_near_the_end_costs_little(engine_of, toy):
    """B1, B3, F5: a difference three tokens before the end is not a full prefill."""
    engine, tokens = engine_of(toy=toy), some_tokens(1000)
    with engine.session() as session:
        session.eval(tokens)
        edited = [*tokens[:997], (tokens[997] + 1) % 512, 4, 5]
        result = session.sync(edited)
        assert (result.reused, result.evaluated) == (997, 3)
        assert_same(session, edited)
        shorter = edited[:900] + edited[940:]  # a span was removed
        result = session.sync(shorter)
        assert result.evaluated <= 60 + 64
        assert_same(session, shorter)


# ---- marks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "toy, kv_dtype", [*((toy, "f16") for toy in TOYS), ("both", "f32"), ("both", "q8_0"), ("wide", "q8_0")]
)
def test_a_mark_far_outside_the_window(engine_of, toy, kv_dtype):
    """The page ranges of many marks overlap, are left far behind and are rolled back to, newest first."""
    engine, tokens = engine_of(toy=toy, kv_dtype=kv_dtype, reach_slack=16), some_tokens(1500)
    session, marks = engine.session(), []
    for n in (1, 20, 21, 64, 100, 128, 400, 405, 1000):
        session.eval(tokens[session.pos : n])
        marks.append((n, session.mark()))
    session.eval(tokens[1000:])
    assert all(session.nearest_exact(n) == n and mark.pos == n for n, mark in marks)
    for n, mark in reversed(marks):
        session.rollback(mark)
        assert session.logits_valid
        assert_same(session, tokens[:n])
        session.eval(tokens[n : n + 90], chunk=64)
        assert_same(session, tokens[: n + 90])
    n, mark = marks[0]
    session.rollback(mark)
    assert [m.alive for _, m in marks] == [True] + [False] * 8
    with pytest.raises(MarkError):
        session.rollback(marks[1][1])
    assert_same(session, tokens[:1])


@pytest.mark.parametrize("toy", WINDOWED)
def test_releasing_a_mark_gives_its_pages_back(engine_of, toy):
    engine, tokens = engine_of(toy=toy, reach_slack=16, pool_tokens=700), some_tokens(600)
    with engine.session() as session:
        feed(session, tokens)
        alone = engine.ledger()["bytes_used"]
        session.clear()
        feed(session, tokens[:300])
        marks = [session.mark() for _ in range(3)]
        feed(session, tokens[300:])
        pinned = engine.ledger()["bytes_used"] - alone
        assert 0 < pinned <= engine.mark_bytes
        for mark in marks[:2]:
            mark.release()
            assert engine.ledger()["bytes_used"] - alone == pinned
        with marks[2]:
            assert session.nearest_exact(300) == 300
        assert engine.ledger()["bytes_used"] == alone
        assert session.nearest_exact(300) == 0
        assert_same(session, tokens)


def test_marks_live_and_die_with_the_prefix(engine_of):
    """A mark is on one timeline: truncate below it and sync with a shorter prefix kill it; at or before the prefix it
    survives."""
    engine, tokens = engine_of(toy="window"), some_tokens(200)
    with engine.session() as session, engine.session() as other:
        session.eval(tokens[:50])
        early = session.mark()
        session.eval(tokens[50:100])
        late = session.mark()
        session.sync([*tokens[:100], 1, 2])
        assert early.alive and late.alive
        session.sync([*tokens[:99], 500, 2])
        assert early.alive and not late.alive
        session.truncate(50)
        assert early.alive
        child = session.fork()
        for wrong in (child, other):
            with pytest.raises(MarkError):
                wrong.rollback(early)
        session.eval(tokens[50:60])
        session.rollback(early)
        assert_same(session, tokens[:50])
        session.truncate(49)
        with pytest.raises(MarkError):
            session.rollback(early)
        with pytest.raises(MarkError):
            early.pos  # noqa: B018
        assert session.pos == 49
        end = session.mark()
        session.close()
        assert not end.alive
        assert_same(child, tokens[:50])


def test_a_mark_brings_its_logits_back(engine_of):
    engine, tokens = engine_of(), some_tokens(80)
    with engine.session() as session:
        session.eval(tokens[:40])
        with_logits = session.mark()
        session.eval(tokens[40:60], logits=None)
        without = session.mark()
        session.eval(tokens[60:])
        session.rollback(without)
        with pytest.raises(NoLogits):
            session.logits  # noqa: B018
        session.rollback(with_logits)
        assert session.logits.tobytes() == fresh_logits(engine, tokens[:40])


@pytest.mark.parametrize("toy", ["window", "both"])
@pytest.mark.slow
def test_automatic_marks_are_set_thinned_and_bounded(engine_of, toy):
    """After evals of 64 tokens and more, and every 2048 positions; older ones lie farther apart; all of them hold an
    eighth of the pool at most."""
    engine, tokens = engine_of(toy=toy, reach_slack=16, pool_tokens=30000), some_tokens(4090)
    with engine.session() as session:
        session.eval(tokens[:63])
        assert session.auto_marks == 0
        session.eval(tokens[63:127])
        assert session.auto_marks == 1 and session.nearest_exact(127) == 127
        session.eval(tokens[127:4000], chunk=512)
        assert session.nearest_exact(2048) == 2048
        assert session.nearest_exact(2060) == 2048
        assert_same(session, tokens[:4000])
        with session.fork(2048) as child:
            assert child.auto_marks >= 1
            child.eval(tokens[2048:2100])
            assert_same(child, tokens[:2100])
    with engine.session() as session:
        for n in range(0, 4000, 64):
            session.eval(tokens[n : n + 64])
            assert engine.ledger()["auto_mark_bytes"] <= engine.pool_bytes // 8
        exact = [n for n in range(0, 4001, 64) if session.nearest_exact(min(n, session.pos)) == n]
        gaps = [b - a for a, b in zip(exact, exact[1:], strict=False)]
        assert 6 <= session.auto_marks <= 30, "about the logarithm of the position"
        assert all(a + 64 >= b for a, b in zip(gaps, gaps[1:], strict=False)), (
            f"older marks lie closer together: {exact}"
        )
        session.truncate(session.nearest_exact(2000))
        assert session.pos >= 1000
        assert_same(session, tokens[: session.pos])


def test_a_pinned_mark_goes_last(engine_of):
    """The end of a system prompt outlives all other automatic marks."""
    engine, tokens = engine_of(toy="window", reach_slack=16, pool_tokens=4096), some_tokens(4000)
    with engine.session() as session:
        session.eval(tokens[:100])
        session.mark_auto(pinned=True)
        for n in range(100, 3900, 100):
            session.eval(tokens[n : n + 100])
        assert session.nearest_exact(100) == 100
        result = session.sync([*tokens[:150], 1])
        assert (
            100 <= result.reused < 108 and result.reused + result.evaluated == 151
        )  # pages are whole: some more positions are exact
        assert_same(session, [*tokens[:150], 1])
