"""The page pool: one budget in bytes, a typed error with both numbers when it is full, reserves that hold, a ledger
that returns."""

from __future__ import annotations

import gc

import pytest
from oracle import KV_DTYPES, TOYS, WINDOWED, assert_same, feed, make_engine, room, settled, some_tokens, visible

import ds4
from ds4.errors import ArgumentError, ContextFull, PoolFull

every_toy = pytest.mark.parametrize("toy", TOYS)


def free_bytes(engine):
    led = engine.ledger()
    return led["bytes_budget"] - led["bytes_used"] - led["bytes_reserved"]


def page_bytes(engine):
    return {stream.name: stream.page_bytes for stream in engine.streams}


def fill(engine):
    """Takes every page of the pool, the small ones of windowed streams too. Returns what holds them."""
    seeds = [engine.session() for _ in range(12)]
    for seed in seeds:
        seed.eval([1], logits=None)
    held = list(seeds)
    for n in (200, 64, 1):
        try:
            while True:
                session = engine.session()
                feed(session, some_tokens(n))
                held.append(session)
        except PoolFull:
            session.close()
    marks = []
    try:
        for seed in seeds:  # marks in the page that is there already pin windowed pages and nothing else
            while seed.pos < 57:
                seed.eval(some_tokens(8), logits=None)
                marks.append(seed.mark())
    except PoolFull:
        pass
    smallest = min(page_bytes(engine).values())
    assert free_bytes(engine) < smallest * (1 if len(engine.streams) == 1 else 12)
    return held, marks


# ---- full --------------------------------------------------------------------------------------------------------


@every_toy
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_full_pool_is_refused_at_every_size(toy, kv_dtype):
    """PoolFull at each pool size until it fits: both numbers are right, nothing has changed, and at the first size that
    fits it works."""
    tokens = some_tokens(200)
    probe = make_engine(toy=toy, kv_dtype=kv_dtype, reach_slack=16)
    with probe.session() as session:
        feed(session, tokens[:70])
        start = probe.ledger()["bytes_used"]
        step = min(page_bytes(probe).values())
        least = start
    probe.close()
    refused = 0
    for call in ("eval", "sync", "batch"):
        for extra in range(0, 400, 1 if toy == "plain" else 3):
            engine = make_engine(toy=toy, kv_dtype=kv_dtype, reach_slack=16, pool_bytes=least + extra * step)
            session = engine.session()
            try:
                feed(session, tokens[:70])
            except PoolFull as error:
                assert error.needed > error.free, "not even the first tokens fit: windows need room for a chunk"
                engine.close()
                continue
            before, ledger = visible(session), settled(engine.ledger())
            try:
                if call == "eval":
                    session.eval(tokens[70:], chunk=8)
                elif call == "sync":
                    session.sync(tokens, chunk=8)
                else:
                    engine.eval_batch([(session, tokens[70:])], chunk=8)
            except PoolFull as error:
                refused += 1
                assert error.free == ledger["bytes_budget"] - ledger["bytes_used"] - ledger["bytes_reserved"]
                assert error.needed > error.free and str(error.needed) in str(error) and str(error.free) in str(error)
                assert visible(session) == before and settled(engine.ledger()) == ledger
                assert_same(session, tokens[:70])
                engine.close()
                continue
            assert_same(session, tokens)
            assert engine.ledger()["bytes_used"] <= engine.pool_bytes
            engine.close()
            break
        else:
            pytest.fail("it never fits")
    assert refused >= 3


def test_needed_is_exact_for_unlimited_streams():
    """The count is neither too small nor padded. (Windowed streams need room to roll in: there it is an upper
    bound.)"""
    page = make_engine().streams[0].page_bytes
    for n in (1, 63, 64, 65, 128, 129, 640):
        for call in ("eval", "sync"):
            engine = make_engine(pool_bytes=page * -(-n // 64))
            with engine.session() as session:
                getattr(session, call)(some_tokens(n))
                assert engine.ledger()["bytes_used"] == engine.pool_bytes
                with pytest.raises(PoolFull) as caught:
                    session.eval(some_tokens(65))
                assert caught.value.needed == page * (-(-(n + 65) // 64) - -(-n // 64)) and caught.value.free == 0
            engine.close()


def test_sync_in_a_full_pool_uses_what_it_cuts():
    """The pages that the cut frees count: a sync never needs more than the session that it makes."""
    page = make_engine().streams[0].page_bytes
    engine, tokens = make_engine(pool_bytes=page * 4), some_tokens(256)
    with engine.session() as session:
        session.sync(tokens)
        for keep in (0, 1, 63, 64, 65, 127, 128, 200, 255):
            wanted = tokens[:keep] + some_tokens(256 - keep, keep + 1)
            session.sync(wanted)
            assert_same(session, wanted)
            session.sync(tokens)
        with pytest.raises(PoolFull):
            session.sync(some_tokens(257, 5))
        assert_same(session, tokens)
        with session.fork(100) as child:  # pages 0 and 1 are shared now, and freed by nobody's cut
            before = settled(engine.ledger())
            with pytest.raises(PoolFull):
                session.sync([*tokens[:50], *some_tokens(206, 3)])
            assert session.tokens == tokens and settled(engine.ledger()) == before
            assert_same(child, tokens[:100])
    engine.close()


def test_copy_on_write_needs_a_page():
    """A fork in the last free pages: the write that would copy a shared page is refused, and works when the other side
    has gone."""
    page = make_engine().streams[0].page_bytes
    engine, tokens = make_engine(pool_bytes=page * 2), some_tokens(100)
    session = engine.session()
    session.eval(tokens)
    child = session.fork()
    for side in (session, child):
        for call in (
            lambda s: s.eval([1]),
            lambda s: s.sync([*tokens, 1]),
            lambda s: s.sync([*tokens[:90], 1]),
            lambda s: s.sync(tokens[:90]),
            lambda s: s.sync(tokens[:65]),
            lambda s: s.score([1]),
        ):
            with pytest.raises(PoolFull) as caught:
                call(side)
            assert (caught.value.needed, caught.value.free) == (page, 0)
            assert side.tokens == tokens and side.logits_valid
    for call in (lambda s: s.refresh(), lambda s: s.eval([1]), lambda s: s.score([1]), lambda s: s.sync(tokens)):
        with make_engine(pool_bytes=page * 3) as roomy, roomy.session() as other:  # room for the one copy is enough
            other.eval(tokens)
            with other.fork(99) as third:
                call(third)
    half = session.fork(70)
    with pytest.raises(PoolFull):
        half.refresh()
    half.close()
    child.close()
    session.eval([1])
    assert_same(session, [*tokens, 1])
    engine.close()


@every_toy
def test_a_batch_counts_the_pages_of_all_its_sessions(toy):
    """Each would fit alone; together they do not; nothing is computed for any of them, and they all keep what they
    had."""
    engine = make_engine(toy=toy, reach_slack=16, pool_tokens=room(toy, 2000))
    sessions = [engine.session() for _ in range(5)]
    for i, session in enumerate(sessions):
        session.eval(some_tokens(30, i))
    parts = [(session, some_tokens(500, i + 5)) for i, session in enumerate(sessions)]
    before, ledger = [visible(s) for s in sessions], settled(engine.ledger())
    with pytest.raises(PoolFull) as caught:
        engine.eval_batch(parts)
    assert caught.value.needed > caught.value.free and caught.value.positions == [30] * 5
    assert [visible(s) for s in sessions] == before and settled(engine.ledger()) == ledger
    for i, part in enumerate(parts[:2]):
        engine.eval_batch([part])
        assert_same(sessions[i], some_tokens(30, i) + some_tokens(500, i + 5))
    engine.close()


@every_toy
def test_the_budget_holds_with_marks_and_forks(toy):
    """B12: whatever is held, used and reserved bytes stay within the budget, and so does the memory taken from the
    system."""
    engine = make_engine(toy=toy, reach_slack=16, pool_tokens=1500)
    base, kept, refused = settled(engine.ledger()), [], 0
    for i in range(60):
        session = kept[-1][0].fork() if kept and i % 3 else engine.session()
        try:
            session.eval(some_tokens(90 + i, i))
            kept.append((session, session.mark(), session.tokens))
        except PoolFull:
            refused += 1
            session.close()
        led = engine.ledger()
        assert led["bytes_used"] + led["bytes_reserved"] <= led["bytes_budget"] == engine.pool_bytes
        assert led["bytes_system"] <= led["bytes_budget"] and led["auto_mark_bytes"] <= led["bytes_budget"] // 8
    assert refused and kept
    for session, mark, tokens in kept:
        session.rollback(mark)
        assert_same(session, tokens)
    for session, mark, _ in kept:
        mark.release()
        session.close()
    kept.clear()
    gc.collect()
    assert settled(engine.ledger()) == base
    engine.close()


@pytest.mark.parametrize("toy", WINDOWED)
def test_automatic_marks_make_room(toy):
    """They go before anything is refused, those of other sessions too; explicit marks stay."""
    engine = make_engine(toy=toy, reach_slack=0, pool_tokens=9000)
    keeper, others = engine.session(), []
    keeper.eval(some_tokens(100))
    mark = keeper.mark()
    for n in range(100, 3000, 100):
        keeper.eval(some_tokens(100, n))
    assert keeper.auto_marks > 3
    try:
        while True:
            others.append(engine.session())
            others[-1].eval(some_tokens(1000), logits=None)
    except PoolFull:
        pass
    assert keeper.auto_marks == 0 and engine.ledger()["auto_mark_bytes"] == 0
    keeper.rollback(mark)
    assert_same(keeper, some_tokens(100))
    engine.close()


def test_pages_move_between_streams():
    """One budget for all: memory of freed pages of one stream serves another."""
    engine = make_engine(toy="both", reach_slack=0, pool_tokens=2000)
    for round_ in range(3):
        sessions = [engine.session() for _ in range(40)]
        try:  # many short sessions: windowed pages
            for session in sessions:
                session.eval(some_tokens(20))
        except PoolFull:
            pass
        for session in sessions:
            session.close()
        with engine.session() as session:  # one long one: unlimited pages
            session.eval(some_tokens(1900, round_))
            assert_same(session, some_tokens(1900, round_))
        assert engine.ledger()["bytes_system"] <= engine.pool_bytes
    engine.close()


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@every_toy
def test_pool_tokens_is_room_for_that_many(toy, kv_dtype):
    for n in (1, 64, 100, 1000):
        engine = make_engine(toy=toy, kv_dtype=kv_dtype, pool_tokens=n)
        with engine.session() as session:
            session.eval(some_tokens(n))
            assert_same(session, some_tokens(n))
        engine.close()


@pytest.mark.parametrize(
    "options",
    [{"pool_tokens": -1}, {"pool_tokens": 0}, {"pool_tokens": 2**40}, {"pool_bytes": -1}, {"pool_bytes": 2**62}],
)
def test_impossible_pools_are_refused(options):
    with pytest.raises(ArgumentError):
        make_engine(**options)


# ---- reserve -----------------------------------------------------------------------------------------------------


def test_reserve_is_refused_with_numbers():
    engine = make_engine(pool_tokens=300)
    with engine.session(ctx=1000) as session:
        session.eval(some_tokens(10))
        before = settled(engine.ledger())
        with pytest.raises(PoolFull) as full:
            session.reserve(900)
        assert full.value.needed > full.value.free
        with pytest.raises(ContextFull) as context:
            session.reserve(991)
        assert (context.value.wanted, context.value.ctx) == (1001, 1000)
        with pytest.raises(ArgumentError):
            session.reserve(-1)
        assert settled(engine.ledger()) == before and session.reserved == 0
        session.reserve(200)
        assert session.reserved == 210 and engine.ledger()["bytes_reserved"] > 0
        with pytest.raises(PoolFull):
            session.reserve(900)
        assert session.reserved == 210, "a refused reserve leaves the old one"
        session.reserve(0)
        assert settled(engine.ledger()) == before and session.reserved == 0
    engine.close()


STEPS = {
    "one": lambda s, more: [s.eval([token], logits=None) for token in more],
    "seventy": lambda s, more: [s.eval(more[n : n + 70], logits=None) for n in range(0, len(more), 70)],
    "whole": lambda s, more: s.eval(more),
    "large chunks": lambda s, more: s.eval(more, chunk=2048),
    "sync": lambda s, more: s.sync(s.tokens + more),
    "batch": lambda s, more: s.engine.eval_batch([(s, more)]),
}


@pytest.mark.parametrize(
    "toy, steps, between",
    [(toy, steps, "mark") for toy in ("plain", "both") for steps in STEPS]
    + [
        (toy, "seventy", between)
        for toy in ("window", "wide")
        for between in ("nothing", "truncate", "rollback", "refresh")
    ],
)
def test_a_reserve_holds_in_a_full_pool(toy, steps, between):
    """The summary of a compaction must always fit: other sessions take all the rest, and still every reserved token can
    be appended. Automatic marks must go before a reserve does."""
    engine = make_engine(toy=toy, reach_slack=16, pool_tokens=3000)
    session, tokens, more = engine.session(), some_tokens(150), some_tokens(900, 2)
    session.eval(tokens[:100])
    early = session.mark()
    session.eval(tokens[100:])
    session.reserve(900)
    marks, length = [], 150
    if between == "mark":
        marks = [session.mark()]
    others = fill(engine)
    if between == "truncate":
        session.truncate(length := 120)
    elif between == "rollback":
        session.rollback(early)
        length = 100
    elif between == "refresh":
        session.truncate(149)
        session.refresh()
        length = 149
    assert session.reserved == 1050
    try:
        STEPS[steps](session, more)
    except PoolFull:
        pytest.fail(f"the reserve did not hold at {session.pos}, reserved up to {session.reserved}")
    assert session.pos == length + 900
    assert_same(session, tokens[:length] + more)
    assert all(mark.alive for mark in [*marks, early])
    assert others
    engine.close()


@every_toy
def test_a_reserve_is_not_given_away_in_between(toy):
    """Others take every page that comes free after each step: the promise is not kept by luck."""
    engine = make_engine(toy=toy, reach_slack=16, pool_tokens=room(toy, 2500))
    session, hogs = engine.session(), []
    session.eval(some_tokens(50))
    session.reserve(1000)
    mark = session.mark()
    for n in range(0, 1000, 10):
        try:
            while True:
                hogs.append(engine.session())
                hogs[-1].eval([7], logits=None)
        except PoolFull:
            pass
        assert session.reserved == 1050
        session.eval(some_tokens(1000, 4)[n : n + 10], logits=None)
    assert_same(session, some_tokens(50) + some_tokens(1000, 4))
    session.rollback(mark)
    session.eval(some_tokens(1000, 5))
    assert_same(session, some_tokens(50) + some_tokens(1000, 5))
    engine.close()


@every_toy
def test_a_fork_keeps_its_parents_reserve_or_is_refused(toy):
    engine = make_engine(toy=toy, reach_slack=16, pool_tokens=room(toy, 3000))
    session = engine.session()
    session.eval(some_tokens(100))
    session.reserve(1000)
    others = fill(engine)
    before = settled(engine.ledger())
    try:
        child = session.fork()
    except PoolFull as error:
        assert error.needed > error.free
        assert settled(engine.ledger()) == before
        child = None
    assert session.reserved == 1100
    session.eval(some_tokens(1000, 3))
    assert_same(session, some_tokens(100) + some_tokens(1000, 3))
    if child:
        assert_same(child, some_tokens(100))
    assert others
    engine.close()


def test_a_reserve_ends_with_its_session(engine_of):
    engine = engine_of()
    before = settled(engine.ledger())
    session = engine.session()
    session.reserve(500)
    child = session.fork()
    assert child.reserved == 0, "a fork has no reserve of its own"
    session.clear()
    assert session.reserved == 500
    session.close()
    child.close()
    assert settled(engine.ledger()) == before


def test_two_engines_do_not_share_anything(engine_of):
    """C12: engines with different windows in one process, step by step in turn."""
    engines = [engine_of(toy=toy) for toy in TOYS]
    sessions, tokens = [engine.session() for engine in engines], some_tokens(150)
    for n in range(0, 150, 10):
        for session in sessions:
            session.eval(tokens[n : n + 10])
    for session in sessions:
        assert_same(session, tokens)
    with pytest.raises(ds4.errors.ArgumentError):
        engines[0].eval_batch([(sessions[1], [1])])
    with pytest.raises(ds4.errors.MarkError):
        sessions[0].rollback(sessions[1].mark())
