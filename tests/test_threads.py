"""Threads: one writer a session, one call at a time an engine; cancel and close from elsewhere."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from oracle import DATA, assert_same, make_engine, settled, some_tokens

from ds4.errors import Busy, Cancelled, Ds4Error

TOKENS = some_tokens(200)
LONG = 60.0  # seconds after which something hangs


class Call(threading.Thread):
    """A call in another thread that stops after its first chunk until `go`; `error` is what it raised."""

    def __init__(self, call, hold=True):
        super().__init__(daemon=True)
        self.call, self.error, self.inside, self.go = call, None, threading.Event(), threading.Event()
        if not hold:
            self.go.set()
        self.start()
        if hold:
            assert self.inside.wait(LONG)

    def progress(self, done, total):
        self.inside.set()
        assert self.go.wait(LONG)

    def run(self):
        try:
            self.call(self.progress)
        except BaseException as error:
            self.error = error.with_traceback(None)

    def end(self):
        self.go.set()
        self.join(LONG)
        assert not self.is_alive(), "the call hangs"
        return self.error


# ---- one writer --------------------------------------------------------------------------------------------------


def test_a_second_writer_is_refused_and_readers_see_the_last_chunk(engine_of, tmp_path):
    """E10: BUSY for every call that would change the session, no crash, and nothing changes."""
    engine = engine_of(toy="both")
    session = engine.session()
    session.eval(TOKENS[:50])
    mark = session.mark()
    call = Call(lambda progress: session.eval(TOKENS[50:], chunk=10, progress=progress))
    refused = [
        lambda: session.eval([1]),
        lambda: session.sync([1]),
        lambda: session.score([1]),
        lambda: session.refresh(),
        lambda: session.truncate(10),
        lambda: session.truncate(session.pos),
        lambda: session.fork(),
        lambda: session.fork(10),
        lambda: session.mark(),
        lambda: session.mark_auto(),
        lambda: session.rollback(mark),
        lambda: session.clear(),
        lambda: session.reserve(10),
        lambda: session.save(tmp_path / "busy"),
        lambda: session.logits,
        lambda: engine.eval_batch([(session, [1])]),
        lambda: session.eval([]),
    ]
    for other in refused:
        with pytest.raises(Busy):
            other()
    assert (session.state, session.pos, session.logits_valid, session.tokens) == ("BUSY", 60, False, TOKENS[:60])
    assert session.nearest_exact(20) == 20 and mark.pos == 50
    session.check()
    with engine.session() as free:
        with pytest.raises(Busy):
            engine.eval_batch([(free, [1, 2]), (session, [1])])
        assert free.pos == 0 and free.state == "EMPTY"
    assert list(tmp_path.iterdir()) == []
    assert call.end() is None
    assert_same(session, TOKENS)
    session.rollback(mark)
    assert_same(session, TOKENS[:50])


def test_a_mark_can_be_released_while_a_call_works(engine_of):
    """Its pages go back, and the call still has all that it reads."""
    engine = engine_of(toy="window", reach_slack=0)
    session = engine.session()
    session.eval(TOKENS[:40], chunk=8)
    mark = session.mark()
    session.eval(TOKENS[40:60], chunk=8)
    call = Call(lambda progress: session.eval(TOKENS[60:], chunk=7, progress=progress))
    mark.release()
    session.check()
    assert call.end() is None
    assert_same(session, TOKENS)


def test_other_sessions_enter_between_chunks(engine_of):
    """E6: a second client neither interrupts the first nor waits for its end."""
    engine = engine_of()
    first, second = engine.session(), engine.session()
    call = Call(lambda progress: first.eval(TOKENS, chunk=10, progress=progress))
    second.eval(TOKENS[:70])
    child = second.fork()
    second.truncate(5)
    engine.eval_batch([(second, [1]), (child, [2])])
    assert first.pos == 10 and call.is_alive()
    assert call.end() is None
    assert_same(first, TOKENS)
    assert_same(second, [*TOKENS[:5], 1])
    assert_same(child, [*TOKENS[:70], 2])


@pytest.mark.parametrize("backend", ["cpu", "ref"])
def test_short_calls_get_their_turn_while_a_long_one_works(engine_of, backend):
    engine = engine_of(backend=backend, threads=2)
    long, short = engine.session(), engine.session()
    call = Call(lambda progress: long.eval(some_tokens(4000), chunk=16, logits=None), hold=False)
    while long.pos == 0 and call.is_alive():
        time.sleep(0.001)
    turns = 0
    while call.is_alive() and turns < 10:
        short.eval([turns])
        turns += 1
    assert turns >= 5, "one turn between two chunks is enough for a short call"
    long.cancel()
    assert call.end() is None or isinstance(call.error, Cancelled)
    assert_same(short, list(range(turns)))
    assert_same(long, some_tokens(4000)[: long.pos])


def test_calls_are_served_in_order_of_arrival(engine_of):
    """Those that came while a chunk was computed go before its session's next chunk, first come, first served. (Each
    takes long enough for its callback to come before the next one's.)"""
    engine, order = engine_of(backend="ref"), []
    sessions = [engine.session() for _ in range(5)]

    def note(name):
        return lambda done, total: order.append((name, done, total))

    calls = [Call(lambda progress: sessions[0].eval(some_tokens(1400), chunk=700, progress=note(0)), hold=False)]
    while sessions[0].state != "BUSY":
        time.sleep(0.001)
    for i in range(1, 5):
        calls.append(Call(lambda progress, i=i: sessions[i].eval(TOKENS, progress=note(i)), hold=False))
        while sessions[i].state != "BUSY" and calls[i].is_alive():
            time.sleep(0.001)
    for call in calls:
        assert call.end() is None
    for i in range(5):
        done = [d for name, d, _ in order if name == i]
        assert done == sorted(done), f"the progress of call {i} goes back"
    assert list(dict.fromkeys(name for name, done, total in order if done == total)) == [1, 2, 3, 4, 0]


def test_many_threads_on_many_sessions(engine_of):
    """Each thread walks its own session; pages, forks and batches cross in the engine."""
    engine = engine_of(toy="both", threads=2, reach_slack=16)
    ready, errors, done = threading.Barrier(6), [], []

    def walk(number):
        try:
            session, tokens = engine.session(), []
            ready.wait(LONG)
            for step in range(25):
                new = some_tokens(1 + (number * 7 + step * 5) % 40, number * 100 + step)
                session.eval(new, chunk=3 + number)
                tokens += new
                if step % 3 == number % 3:
                    pos = session.nearest_exact(max(0, len(tokens) - 10))
                    session.truncate(pos)
                    del tokens[pos:]
                if step % 5 == 4:
                    old, session = session, session.fork()
                    mark = old.mark()
                    old.eval([1, 2, 3])
                    old.rollback(mark)
                    old.close()
                session.check()
            done.append((session, tokens))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=walk, args=(i,), daemon=True) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
        assert not thread.is_alive(), "a thread hangs"
    assert not errors
    for session, tokens in done:
        assert_same(session, tokens)
    done.clear()


def test_two_threads_on_one_session_never_mix(engine_of):
    """E10: whoever comes second gets Busy; the tokens of a call that was let in are all there, in one piece."""
    session, pieces, errors = engine_of(threads=2).session(), [], []

    def write(number):
        for step in range(60):
            piece = [number] * (1 + step % 5)
            try:
                session.eval(piece, chunk=2, logits=None)
                pieces.append(piece)
            except Busy:
                pass
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=write, args=(i,), daemon=True) for i in (3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert not errors and sum(map(len, pieces)) == session.pos
    assert sorted(token for piece in pieces for token in piece) == sorted(session.tokens)
    assert_same(session, session.tokens)


# ---- cancel and close --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["eval", "sync", "score", "eval_batch"])
def test_cancel_from_another_thread(engine_of, what):
    engine = engine_of()
    session, other = engine.session(), engine.session()
    calls = {
        "eval": lambda progress: session.eval(TOKENS, chunk=10, progress=progress),
        "sync": lambda progress: session.sync(TOKENS, chunk=10, progress=progress),
        "score": lambda progress: session.score(TOKENS, chunk=10, progress=progress),
        "eval_batch": lambda progress: engine.eval_batch(
            [(session, TOKENS), (other, [1])], chunk=10, progress=progress
        ),
    }
    call = Call(calls[what])
    session.cancel()
    error = call.end()
    assert isinstance(error, Cancelled) and (error.positions or [error.pos])[0] == session.pos == 10
    assert_same(session, TOKENS[:10])
    session.eval(TOKENS[10:])
    assert_same(session, TOKENS)


def test_cancel_with_nothing_to_cancel_does_nothing(engine_of):
    with engine_of().session() as session:
        session.cancel()
        session.eval(TOKENS)
        session.cancel()
        session.eval([1])
        assert_same(session, [*TOKENS, 1])


def test_a_call_that_waits_for_its_turn_can_be_cancelled(engine_of):
    """E4: it never starts."""
    engine = engine_of(backend="ref")
    long, waiting = engine.session(), engine.session()
    first = Call(lambda progress: long.eval(some_tokens(4000), chunk=2048), hold=False)
    while long.state != "BUSY" and first.is_alive():
        time.sleep(0.001)
    second = Call(lambda progress: waiting.eval(TOKENS), hold=False)
    while waiting.state != "BUSY" and second.is_alive():
        time.sleep(0.001)
    waiting.cancel()
    assert isinstance(second.end(), Cancelled) and waiting.pos == 0
    assert first.is_alive(), "the long call goes on"
    long.cancel()
    assert isinstance(first.end(), Cancelled) and long.pos in (0, 2048)
    assert_same(waiting, [])
    assert_same(long, some_tokens(4000)[: long.pos])


@pytest.mark.parametrize("what", ["session", "engine"])
def test_close_during_a_call(what):
    """E9, J7: the call ends with Cancelled; afterwards everything has been given back."""
    engine = make_engine()
    start = settled(engine.ledger())
    session, other = engine.session(), engine.session()
    other.eval(TOKENS[:5])
    call = Call(lambda progress: session.eval(TOKENS, chunk=10, progress=progress))
    if what == "session":
        session.close()
    else:
        engine.close()
    assert isinstance(call.end(), Cancelled)
    with pytest.raises(Ds4Error, match="closed"):
        session.eval([1])
    if what == "session":
        other.eval([1])
        assert_same(other, [*TOKENS[:5], 1])
        other.close()
        del call
        gc.collect()
        assert settled(engine.ledger()) == start
        engine.close()


def test_close_gives_back_at_once(engine_of):
    """Whatever still hangs on the session, an exception with its traceback for one."""
    engine = engine_of()
    before = settled(engine.ledger())
    session, kept = engine.session(), []
    mark = session.mark()
    for call in (
        lambda: session.eval(TOKENS, chunk=10, progress=lambda done, total: session.cancel()),
        lambda: session.sync(TOKENS, chunk=10, progress=lambda done, total: session.cancel()),
        lambda: session.score(TOKENS, chunk=10, progress=lambda done, total: session.cancel()),
        lambda: session.truncate(1000),
        lambda: session.eval([99999]),
        lambda: session.fork(-5),
        lambda: session.rows(0, 0, 1000),
    ):
        try:
            call()
        except Ds4Error as error:
            kept.append(error)
    assert len(kept) == 7
    session.close()
    assert not mark.alive
    mark.release()
    assert settled(engine.ledger()) == before
    assert kept


@pytest.mark.parametrize("use", ["cancel", "pos", "eval", "fork"])
def test_close_against_use_in_another_thread(engine_of, use):
    """`cancel` comes from any thread, also when the session is being closed: an error, never a crash."""
    engine = engine_of()
    uses = {
        "cancel": lambda s: s.cancel(),
        "pos": lambda s: s.pos,
        "eval": lambda s: s.eval([1], logits=None),
        "fork": lambda s: s.fork().close(),
    }
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for i in range(80):
            session, ends, started = engine.session(), [], threading.Event()

            def run(session=session, ends=ends, started=started):
                try:
                    while True:
                        started.set()
                        uses[use](session)
                except Ds4Error as error:
                    ends.append(type(error))

            threads = [threading.Thread(target=run, daemon=True) for _ in range(2)]
            for thread in threads:
                thread.start()
            started.wait(LONG)
            for _ in range(i):
                pass
            session.close()
            for thread in threads:
                thread.join(LONG)
                assert not thread.is_alive()
            assert len(ends) == 2
    finally:
        sys.setswitchinterval(interval)


def test_a_callback_cannot_wait_for_itself(engine_of):
    """A progress callback that computes on the same engine would wait for its own call: refused at every place, also
    inside a chunk, and before anything is touched. What computes nothing is allowed."""
    for backend, chunk in (("ref", 2048), ("ref", 16), ("cpu", 8)):
        engine = engine_of(backend=backend)
        session, other = engine.session(), engine.session()
        other.eval(TOKENS[:50])
        child = other.fork(40)
        seen = []

        def compute(done, total, session=session, other=other, child=child, seen=seen):
            calls = (
                lambda: other.eval([1]),
                lambda: session.eval([1]),
                lambda: other.sync([2, 3]),
                lambda: child.score([1]),
                lambda: child.refresh(),
                lambda: other.engine.eval_batch([(other, [1]), (child, [1])]),
            )
            for call in calls:
                try:
                    call()
                    seen.append(None)
                except Busy:
                    seen.append(Busy)
            assert other.nearest_exact(20) == 20 and other.tokens == TOKENS[:50]
            other.fork(10).close()

        session.eval(some_tokens(900 if chunk == 2048 else 100), chunk=chunk, progress=compute)
        assert set(seen) == {Busy}
        assert other.logits_valid and not child.logits_valid
        assert_same(other, TOKENS[:50])
        assert_same(child, TOKENS[:40])


# ---- the pool of threads -----------------------------------------------------------------------------------------


def test_idle_threads_use_no_processor():
    """CPU time, which other processes have no part in: a thread that spins for ever uses all of every window. The first
    windows may still see the end of the work."""
    with make_engine(threads=4) as engine, engine.session() as session:
        session.eval(TOKENS[:100])
        for token in TOKENS[100:110]:
            session.eval([token])
        used = []
        for _ in range(10):
            wall, cpu = time.perf_counter(), time.process_time()
            time.sleep(0.5)
            used.append((time.process_time() - cpu) / (time.perf_counter() - wall))
            if used[-1] < 0.05:
                return
    pytest.fail(f"an idle engine used these shares of a processor: {used}")


POOL = """
import os, sys
import ds4
from ds4.memory import usable_cpus
tasks = lambda: len(os.listdir("/proc/self/task"))
if len(sys.argv) > 2:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
before = tasks()
with ds4.Engine(sys.argv[1], pool_tokens=1024) as engine:
    assert engine.threads == usable_cpus(), (engine.threads, usable_cpus())
    assert tasks() - before == engine.threads - 1, "the calling thread is one of them"
    print(engine.threads)
assert tasks() == before
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc and an affinity mask")
@pytest.mark.parametrize("pinned", [(), ("pinned",)])
def test_as_many_threads_as_usable_cpus_and_no_more(pinned):
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    command = [sys.executable, "-c", POOL, str(DATA / "llama"), *pinned]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not pinned or done.stdout == "1\n"
