"""K6: what is left of a session when a call is refused, cancelled or fails at any place."""

from __future__ import annotations

import numpy as np
import pytest
from oracle import (
    NEEDS_TEST_BUILD,
    TEST_BUILD,
    TOYS,
    assert_same,
    cancel_at,
    make_engine,
    settled,
    some_tokens,
)

from ds4.errors import (
    ArgumentError,
    Cancelled,
    ComputeError,
    ContextFull,
    Ds4Error,
    NoLogits,
    Poisoned,
    PoolFull,
    SystemResourceError,
)

every_toy = pytest.mark.parametrize("toy", TOYS)
injected = pytest.mark.skipif(not TEST_BUILD, reason=NEEDS_TEST_BUILD)
BASE = some_tokens(100)
MORE = some_tokens(30, 2)


class Boom(Exception):
    pass


# ---- K6: refused before anything ---------------------------------------------------------------------------------


BAD_TOKENS = [
    [512],
    [-1],
    [1, 2, 2**31],
    [2**40],
    [1.5],
    ["a"],
    [[1, 2]],
    [None],
    "abc",
    5,
    np.array([1.0]),
    np.array([[1]]),
    [1, -(2**63)],
]


@pytest.mark.parametrize("tokens", BAD_TOKENS, ids=str)
def test_bad_tokens_change_nothing(engine_of, tokens):
    engine = engine_of()
    with engine.session() as session, engine.session() as other:
        session.eval(BASE)
        calls = (
            lambda: session.eval(tokens),
            lambda: session.eval(tokens, logits="all"),
            lambda: session.score(tokens),
            lambda: session.sync(tokens),
            lambda: engine.eval_batch([(other, [1]), (session, tokens)]),
        )
        for call in calls:
            with pytest.raises((ArgumentError, TypeError)):
                call()
            assert (session.pos, other.pos, session.logits_valid) == (100, 0, True)
        assert_same(session, BASE)


def test_every_kind_of_token_list(engine_of):
    with engine_of().session() as session:
        for tokens in (
            MORE,
            tuple(MORE),
            iter(MORE),
            np.array(MORE),
            np.array(MORE, np.uint16),
            np.array(MORE * 2)[::2],
            (t for t in MORE),
        ):
            session.clear()
            session.eval(tokens)
            assert session.pos == 30


def test_bad_arguments_change_nothing(engine_of):
    engine = engine_of()
    with engine.session() as session:
        session.eval(BASE)
        child = session.fork()
        calls = (
            lambda: session.eval([1], logits="first"),
            lambda: session.eval([1], chunk=-1),
            lambda: session.eval([1], chunk=0),
            lambda: session.eval([1], chunk=1.5),
            lambda: session.eval([0] * 600_000, logits="all"),
            lambda: engine.eval_batch([(session, [1]), (session, [2])]),
            lambda: engine.session(ctx=-5),
            lambda: engine.session(ctx=0.5),
            lambda: session.reserve(-1),
        )
        for call in calls:
            with pytest.raises(ArgumentError) as caught:
                call()
            assert caught.value.pos in (None, 100) and caught.value.positions in (None, [100], [100, 100])
        assert_same(session, BASE)
        assert_same(child, BASE)
        engine.eval_batch([])


def test_context_is_a_bound(engine_of):
    """J1, J3, C13: ctx - 1, ctx, ctx + 1; both numbers; and the next call works."""
    engine = engine_of()
    for n in (99, 100, 101):
        with engine.session(ctx=100) as session:
            if n <= 100:
                session.eval(some_tokens(n))
                assert_same(session, some_tokens(n))
                session.clear()
            for call in (
                session.eval,
                session.score,
                session.sync,
                lambda tokens: engine.eval_batch([(session, tokens)]),
            ):
                with pytest.raises(ContextFull) as caught:
                    call(some_tokens(101))
                assert (caught.value.wanted, caught.value.ctx, session.pos) == (101, 100, 0)
                assert "101" in str(caught.value) and "100" in str(caught.value)
            session.eval(some_tokens(100))
            with pytest.raises(ContextFull):
                session.eval([1])
            with pytest.raises(ContextFull):
                session.fork().eval([1])
            with engine.session() as other:
                other.eval(some_tokens(101))
                assert_same(other, some_tokens(101))
            assert_same(session, some_tokens(100))
    with pytest.raises(ContextFull) as caught:
        engine.session(ctx=engine.ctx + 1)
    assert (caught.value.wanted, caught.value.ctx) == (4097, 4096)


# ---- K6: cut short -----------------------------------------------------------------------------------------------


@every_toy
@pytest.mark.parametrize("chunk", [1, 7, 10])
@pytest.mark.parametrize("at", [0, 1, 9, 14, 19])
def test_a_cancelled_call_leaves_whole_chunks(engine_of, toy, chunk, at):
    """E1, E2: after 0, 1, k tokens; log and rows have one length, the error says it, and the next sync goes on from
    there."""
    done = -(-max(at, 1) // chunk) * chunk
    if done >= 30:
        return  # the last chunk: nothing is left to cancel
    with engine_of(toy=toy).session() as session:
        session.eval(BASE)
        with pytest.raises(Cancelled) as caught:
            session.eval(MORE, chunk=chunk, progress=cancel_at(session, at))
        assert caught.value.pos == session.pos == 100 + done
        assert_same(session, BASE + MORE[:done])
        result = session.sync(BASE + MORE)
        assert result.reused == 100 + done
        assert_same(session, BASE + MORE)
        with pytest.raises(Cancelled) as caught:
            session.sync(BASE[:50] + MORE, chunk=chunk, progress=cancel_at(session, at))
        assert caught.value.pos == session.pos == 50 + done
        assert_same(session, BASE[:50] + MORE[:done])


@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_a_callback_raises_comes_out(engine_of, error):
    """Ctrl-C reaches a call that sits in C; it ends at a whole chunk."""
    engine = engine_of()

    def fail(done, total):
        if done >= 20:
            raise error("stop")

    with engine.session() as session, engine.session() as other:
        for call in (
            lambda: session.eval(MORE, chunk=10, progress=fail),
            lambda: session.sync(MORE, chunk=10, progress=fail),
        ):
            session.clear()
            with pytest.raises(error, match="stop"):
                call()
            assert_same(session, MORE[:20])
        session.clear()
        with pytest.raises(error):
            engine.eval_batch([(session, MORE), (other, BASE)], chunk=20, progress=fail)
        assert_same(session, MORE[:20])
        assert other.pos == 0


def test_progress_tells_the_truth(engine_of):
    with engine_of().session() as session, session.engine.session() as other:
        seen = []
        session.eval(BASE, chunk=9, progress=lambda done, total: seen.append((done, total)))
        assert [done for done, _ in seen if done % 9 == 0] == list(range(9, 100, 9)) and seen[-1] == (100, 100)
        seen.clear()
        session.sync(BASE[:40] + MORE, progress=lambda done, total: seen.append((done, total)))
        assert seen[-1] == (30, 30)
        seen.clear()
        session.engine.eval_batch(
            [(session, MORE), (other, BASE)], chunk=64, progress=lambda done, total: seen.append((done, total))
        )
        assert seen[-1] == (130, 130) and seen == sorted(seen)


def test_a_batch_that_was_cut_short_says_where_each_session_stands(engine_of):
    """The same rounds for all its sessions."""
    engine = engine_of()
    a, b, c = (engine.session() for _ in range(3))
    a.eval([1, 2, 3])
    with pytest.raises(Cancelled) as caught:
        engine.eval_batch([(a, MORE), (b, BASE), (c, MORE)], chunk=50, progress=cancel_at(b, 100))
    assert caught.value.positions == [a.pos, b.pos, c.pos] == [33, 70, 0] and caught.value.pos is None
    assert_same(a, [1, 2, 3, *MORE])
    assert_same(b, BASE[:70])
    assert_same(c, [])
    assert (a.logits_valid, b.logits_valid, c.logits_valid) == (True, False, False)


# ---- K6: failing at every place ----------------------------------------------------------------------------------


def places(limit):
    """1, 2, 3, ... and then in larger steps."""
    k = 1
    while k < limit:
        yield k
        k += 1 + k // 5


def setup(engine):
    """A session whose last pages and tables are shared with two others, which must stay as they are."""
    parent = engine.session()
    parent.eval(BASE[:90])
    mark_free = parent.fork()
    session = mark_free.fork()
    session.eval(BASE[90:])
    twin = session.fork()
    return session, [(parent, BASE[:90]), (mark_free, BASE[:90]), (twin, BASE)]


def rolled_back(session):
    mark = session.mark()
    session.truncate(100)
    session.rollback(mark)


def batch(session):
    with session.engine.session() as other:
        session.engine.eval_batch([(other, MORE), (session, MORE)], chunk=20)


CALLS = {
    "eval": lambda s: s.eval(MORE, chunk=10),
    "eval all": lambda s: s.eval(MORE, chunk=10, logits="all"),
    "score": lambda s: s.score(MORE, chunk=10),
    "eval_batch": batch,
    "sync": lambda s: s.sync(BASE[:95] + MORE, chunk=10),
    "sync shorter": lambda s: s.sync(BASE[:66]),
    "refresh": lambda s: (s.truncate(99), s.refresh()),
    "fork": lambda s: s.fork().close(),
    "fork below": lambda s: s.fork(60).close(),
    "mark": lambda s: s.mark().release(),
    "truncate": lambda s: s.truncate(60),
    "rollback": rolled_back,
    "clear": lambda s: s.clear(),
    "reserve": lambda s: s.reserve(300),
}
KINDS = {"alloc": (SystemResourceError,), "kernel": (ComputeError,), "device": (ComputeError,)}


@injected
@pytest.mark.parametrize("toy", ["plain", "both"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CALLS)
def test_failing_at_every_place(toy, kind, name):
    """The k-th allocation, op or device call fails, for k = 1, 2, ... until the call gets through. Afterwards the
    session is, bit for bit, one that holds the tokens that it says it holds; its relatives are untouched; the ledger
    returns; and the call works when it is tried again."""
    engine = make_engine(toy=toy, reach_slack=64)
    engine.session().eval(BASE)  # buffers are there: they are grown once
    start, failed, hit = settled(engine.ledger()), 0, True
    for k in places(1500):
        session, relatives = setup(engine)
        engine.fault(kind, k)
        try:
            CALLS[name](session)
        except KINDS[kind] as error:
            failed += 1
            assert error.pos in (None, session.pos) or name == "eval_batch" and error.positions[1] == session.pos
        except PoolFull:
            pytest.fail("the pool has room")
        hit = engine.fault(kind, 0) >= k
        tokens = session.tokens
        expected = {"sync": BASE[:95] + MORE, "sync shorter": BASE[:66]}.get(name, BASE + MORE)
        assert tokens == expected[: len(tokens)] or tokens == BASE[: len(tokens)]
        if name in ("fork", "fork below", "mark", "rollback", "reserve"):
            assert tokens == BASE
        if name == "refresh":
            assert len(tokens) in (99, 100)
        if kind == "device" and hit and session.state == "POISONED":
            with pytest.raises(Poisoned):
                session.eval([1])
            with pytest.raises((Poisoned, NoLogits)):
                session.logits  # noqa: B018
            session.check()
            if k % 2:
                session.clear()
            session.sync(BASE[:80])
            assert_same(session, BASE[:80])
        elif k < 40 or failed % 5 == 0:
            assert_same(session, tokens)
            session.sync(BASE + MORE)
            assert_same(session, BASE + MORE)
        for relative, text in relatives:
            assert relative.tokens == text
        if k < 10 or k % 7 == 0:
            assert_same(relatives[k % 3][0], relatives[k % 3][1])
        for other in [session, *[relative for relative, _ in relatives]]:
            other.close()
        assert settled(engine.ledger()) == start, f"something leaked at {k}"
        if not hit:
            break
    assert not hit, "the call never got through"
    computes = name in ("eval", "eval all", "score", "eval_batch", "sync", "sync shorter", "refresh")
    assert failed > 0 if computes else kind == "alloc" or failed == 0
    engine.close()


@injected
@pytest.mark.parametrize("toy", ["window", "both", "wide"])
@pytest.mark.parametrize("slack", [0, 16])
def test_a_failed_refresh_keeps_the_last_token(toy, slack):
    """Its row is written a second time: a kernel that fails half-way must not spoil it, and the row that falls out of
    the window then is still needed."""
    engine, tokens = make_engine(toy=toy, reach_slack=slack), some_tokens(130)
    for n in (24, 48, 56, 57, 104, 128, 130):
        for k in (1, 8, 12, 20, 40):
            with engine.session() as session:
                session.eval(tokens[:n], logits=None, chunk=1)
                for kind, again in (
                    ("kernel", session.refresh),
                    ("kernel", lambda n=n: session.sync(tokens[:n])),
                    ("kernel", lambda: session.score([1])),
                ):
                    engine.fault(kind, k)
                    with pytest.raises(ComputeError) as caught:
                        again()
                    engine.fault(kind, 0)
                    assert caught.value.pos == session.pos == n
                    session.check()
                session.refresh()
                assert_same(session, tokens[:n])
    engine.close()


@injected
def test_a_failed_device_poisons_all_sessions_of_the_round():
    engine = make_engine()
    a, b, c = (engine.session() for _ in range(3))
    for session in (a, b, c):
        session.eval(BASE)
    keep = a.mark()
    engine.fault("device", 5)
    with pytest.raises(ComputeError):
        engine.eval_batch([(a, [1]), (b, [2])])
    assert (a.state, b.state, c.state) == ("POISONED", "POISONED", "LIVE")
    for session in (a, b):
        for call in (
            session.fork,
            session.mark,
            session.refresh,
            session.mark_auto,
            lambda s=session: s.truncate(5),
            lambda s=session: s.eval([1]),
        ):
            with pytest.raises(Poisoned):
                call()
    with pytest.raises(Poisoned):
        a.rollback(keep)
    a.sync(BASE)
    b.clear()
    b.eval(BASE)
    assert not keep.alive
    for session in (a, b, c):
        assert_same(session, BASE)
    engine.close()


def test_errors_have_one_base():
    assert issubclass(Boom, Exception) and all(
        issubclass(error, Ds4Error)
        for error in (
            ArgumentError,
            Cancelled,
            ComputeError,
            ContextFull,
            NoLogits,
            Poisoned,
            PoolFull,
            SystemResourceError,
        )
    )
