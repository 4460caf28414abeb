"""Forked processes, ends of processes, Ctrl-C, memory over time, CPUs."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap

import pytest
from oracle import DATA, assert_same, fresh_logits, make_engine, some_tokens

import ds4

TOKENS = some_tokens(200)


# ---- forked processes --------------------------------------------------------------------------------------------


def run_script(text, code=0, timeout=90, **environment):
    """Runs Python in a process of its own; `CORE` names the build that this one uses."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "TINY": str(DATA / "llama"),
        **environment,
    }
    text = (
        "import atexit, gc, os, sys, threading, time\nimport ds4\nfrom ds4.errors import *\nTINY = os.environ['TINY']\n"
        + textwrap.dedent(text)
    )
    done = subprocess.run([sys.executable, "-c", text], env=env, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def test_a_forked_child_is_told_so():
    """It raises instead of hanging on threads that are gone, or answering with zeros; the parent goes on; the child can
    make an engine of its own."""
    run_script(
        """
        eng = ds4.Engine(TINY, threads=2, pool_tokens=4096)
        s = eng.session()
        s.eval(list(range(100)))
        m, wanted = s.mark(), s.logits.tobytes()
        busy = eng.session()
        t = threading.Thread(target=lambda: busy.eval(list(range(500)) * 6, chunk=8), daemon=True)
        t.start()
        while busy.pos == 0:
            time.sleep(0.001)
        pid = os.fork()
        if pid == 0:
            code = 0
            calls = dict(
                eval=lambda: s.eval([1]), sync=lambda: s.sync([1]),
                truncate=lambda: s.truncate(1), fork=lambda: s.fork(),
                mark=lambda: s.mark(), rollback=lambda: s.rollback(m), pos=lambda: s.pos, tokens=lambda: s.tokens,
                logits=lambda: s.logits, check=lambda: s.check(),
                session=lambda: eng.session(), ledger=lambda: eng.ledger(),
                clear=lambda: s.clear(), state=lambda: s.state, valid=lambda: s.logits_valid, mark_pos=lambda: m.pos,
                nearest=lambda: s.nearest_exact(1), rows=lambda: s.rows(0, 0, 1), reserve=lambda: s.reserve(1),
                refresh=lambda: s.refresh(), score=lambda: s.score([1]), save=lambda: s.save("/nonexistent/x"),
                batch=lambda: eng.eval_batch([(s, [1])]),
            )
            for name, call in calls.items():
                try:
                    call()
                    print("no error:", name)
                    code = 1
                except ForkedError as error:
                    if "after the fork" not in str(error) or error.pos not in (None, 100):
                        print(name, error, error.pos)
                        code = 1
            own = ds4.Engine(TINY, threads=2, pool_tokens=4096)
            o = own.session()
            o.eval(list(range(100)))
            if o.logits.tobytes() != wanted:
                code = 2
            m.release(); s.close(); busy.close(); eng.close()
            del s, m, eng, busy, o, own
            gc.collect()
            sys.stdout.flush()
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        s.truncate(99)
        s.eval([99])
        assert s.logits.tobytes() == wanted
        busy.cancel()
        t.join()
        """
    )


def test_a_forked_child_that_exits_normally_does_not_hang():
    """Its finalizers run on copies of the parent's objects; logits that outlive their engine are the last to hold
    it."""
    run_script(
        """
        eng = ds4.Engine(TINY, threads=2, pool_tokens=4096)
        s = eng.session()
        s.eval([1, 2, 3])
        array = s.logits
        s.close()
        eng.close()
        del s, eng
        gc.collect()
        pid = os.fork()
        if pid == 0:
            del array
            gc.collect()
            sys.exit(0)
        for _ in range(100):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                break
            time.sleep(0.1)
        else:
            os.kill(pid, 9)
            sys.exit("the child hangs")
        assert os.waitstatus_to_exitcode(status) == 0
        """
    )


# ---- ends of processes -------------------------------------------------------------------------------------------


IN_A_THREAD = (
    "t = threading.Thread(target=lambda: eng.session().eval([1] * 4000, {}), daemon=True); t.start(); time.sleep(0.05)"
)
ENDINGS = {
    "live objects": "",
    "engine first": "del eng",
    "reference cycles": "class C: pass\nc = C(); c.me = c; c.s = s; c.m = m; c.e = eng; c.a = s.logits; del s, m, eng",
    "cycle with a callback": "def cb(d, t): s.pos, m\ncb.me = cb\ns.eval([4], progress=cb)",
    "at exit": "atexit.register(lambda: (s.eval([5]), s.truncate(1), m.alive, s.close(), eng.close()))",
    "at exit, engine first": "atexit.register(lambda: (eng.close(), s.close(), m.release()))",
    "in a module": "sys.modules['kept'] = (s, m, eng, s.logits)",
    "an exception": "try:\n    s.eval([1] * 5000)\nexcept ContextFull as e:\n    kept = e",
    "a thread in a call": IN_A_THREAD.format("chunk=8"),
    "a thread in a callback": IN_A_THREAD.format("chunk=1, progress=lambda d, t: time.sleep(0.001)"),
    "a generator": "g = s.generate(max_tokens=50); next(g); kept = g",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_end_of_a_process(ending):
    """J7: exit with live objects, in cycles, from atexit, with a thread inside the core: no traceback, no crash, no
    hang."""
    script = "eng = ds4.Engine(TINY, threads=2, pool_tokens=8192)\ns = eng.session()\ns.eval([1, 2, 3])\nm = s.mark()\n"
    done = run_script(script + ENDINGS[ending])
    assert (done.stdout, done.stderr) == ("", "")


def test_an_interrupt_reaches_a_call():
    """Ctrl-C in the main thread while it sits in C: KeyboardInterrupt, and the session is usable."""
    run_script(
        """
        import signal
        eng = ds4.Engine(TINY, backend="ref", pool_tokens=8192)
        s = eng.session()
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        try:
            s.eval([1] * 4000, chunk=2000)
            sys.exit("not interrupted")
        except KeyboardInterrupt:
            pass
        assert s.pos in (0, 2000) and s.state in ("EMPTY", "LIVE")
        s.check()
        s.sync([1, 2, 3])
        """
    )


# ---- memory and CPUs over time -----------------------------------------------------------------------------------


def resident():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads the resident memory from /proc")


@pytest.mark.nosanitize
@needs_proc
@pytest.mark.slow
def test_memory_is_flat_over_engines():
    """J6: open and close 50 times."""
    sizes = []
    for i in range(60):
        with make_engine(threads=2) as engine, engine.session() as session:
            session.eval(TOKENS[:31])
            child, mark = session.fork(30), session.mark()
            child.eval([1])
            assert mark.alive
        if i >= 10:
            gc.collect()
            sizes.append(resident())
    assert max(sizes[-10:]) - max(sizes[:10]) < 1 << 20


@pytest.mark.nosanitize
@needs_proc
def test_memory_is_flat_over_marks_and_forks(engine_of):
    """J9, D6: a thousand of each, and chunks of every size around a border."""
    engine = engine_of(toy="window")
    session = engine.session()
    session.eval(TOKENS)

    def use(n):
        for i in range(n):
            with session.mark() as mark, session.fork() as child:
                child.eval([i % 512], logits=None)
                session.eval([1, 2], logits=None)
                session.rollback(mark)

    use(200)
    gc.collect()
    before = resident()
    use(1000)
    gc.collect()
    assert resident() - before < 1 << 20
    assert_same(session, TOKENS)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs CPU affinity masks")
def test_threads_default_to_the_cpus_this_process_may_use():
    """J10: the affinity mask counts, not the machine's cores."""
    run_script(
        """
        cpus = sorted(os.sched_getaffinity(0))
        for n in sorted({1, len(cpus)}):
            os.sched_setaffinity(0, cpus[:n])
            eng = ds4.Engine(TINY, pool_tokens=1000)
            assert 1 <= eng.threads <= n, (eng.threads, n)
            assert n == 1 or eng.threads > 1 or len(cpus) == 1
            s = eng.session()
            s.eval([1, 2, 3])
        """
    )


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_more_threads_than_cpus_finish(engine_of, threads):
    engine = engine_of(threads=threads)
    assert engine.threads == threads
    with engine.session() as session:
        session.eval(TOKENS)
        assert session.logits.tobytes() == fresh_logits(engine, TOKENS)


@pytest.mark.parametrize("threads", [0, -1, 257, 10**6, 1.5, "2"])
def test_impossible_thread_counts_are_refused(threads):
    with pytest.raises(ds4.errors.ArgumentError):
        make_engine(threads=threads)
