"""Saving a snapshot (K9): where it cannot be written, where it is cut short, and while other calls go on."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import resource
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import saved
from corrupt import snapshot as layout
from saved import HERE, TOKENS, counts, leftovers, make, needs_test_core, state

import ds4
from ds4.errors import Busy, Cancelled, Ds4Error, Poisoned, SystemResourceError

CC = shlex.split(os.environ.get("CC", "cc"))
pytestmark = needs_test_core
engine, ledger = saved.engine, saved.ledger  # fixtures


# ---- places that cannot be read or written -------------------------------------------------------------------------


def test_paths(engine, tmp_path):
    s = make(engine, 70)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    os.symlink("/dev/null", tmp_path / "null")
    before = sorted(p.name for p in tmp_path.iterdir())
    for path, text in (
        (tmp_path / "none" / "s", os.strerror(errno.ENOENT)), (tmp_path / "pipe" / "s", os.strerror(errno.ENOTDIR)),
        (tmp_path / "folder", "a folder"), (f"{tmp_path}/folder/", "a folder"), (f"{tmp_path}/folder/..", "a folder"),
        (tmp_path / "pipe", "a device or a pipe"), (tmp_path / "null", "a device or a pipe"), ("", "a folder"),
        (tmp_path / ("x" * 300), os.strerror(errno.ENAMETOOLONG)),
    ):  # fmt: skip
        with pytest.raises(SystemResourceError) as error:
            s.save(path)
        assert text in str(error.value), path
        if path:
            with pytest.raises(SystemResourceError):
                engine.load(path)
    with pytest.raises(SystemResourceError, match=os.strerror(errno.ENOENT)):
        engine.load(tmp_path / "missing")
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    assert os.stat("/dev/null").st_rdev and state(s)


@pytest.mark.skipif(os.geteuid() == 0 and not os.path.isdir("/sys/kernel"), reason="root may write anywhere here")
def test_read_only_folder(engine, tmp_path):
    s = engine.session()
    folder = Path("/sys/kernel") if os.geteuid() == 0 else tmp_path / "locked"
    if os.geteuid():
        folder.mkdir(mode=0o500)
    with pytest.raises(SystemResourceError):
        s.save(folder / "s")


def test_disk_full(engine, tmp_path):
    """Stands for every write that the system refuses half-way: the limit is inside the rows."""
    s = make(engine)
    s.save(tmp_path / "s")
    old = (tmp_path / "s").read_bytes()
    s.eval([1])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in (0, 100, 4096, len(old) - 1):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            with pytest.raises(SystemResourceError, match=os.strerror(errno.EFBIG)):
                s.save(tmp_path / "s")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert (tmp_path / "s").read_bytes() == old and not leftovers(tmp_path)
    s.save(tmp_path / "s")
    assert engine.load(tmp_path / "s").pos == s.pos


def test_only_the_owner_reads_it(engine, tmp_path):
    s = make(engine, 70)
    (tmp_path / "s").touch(mode=0o644)
    os.symlink("s", tmp_path / "link")
    here = os.getcwd()
    os.chdir(tmp_path)
    try:
        s.save("s")
        s.save("./link")
        assert engine.load("link").pos == 70
    finally:
        os.chdir(here)
    assert stat.S_IMODE(os.stat(tmp_path / "s").st_mode) == 0o600
    assert not os.path.islink(tmp_path / "link")


def test_long_names(engine, tmp_path):
    s = make(engine, 70)
    for name in ("x" * 255, "\udcff\udc80", "ein Name\nmit Umbruch"):
        s.save(tmp_path / name)
        assert engine.load(tmp_path / name).pos == 70


# ---- failures in the middle ----------------------------------------------------------------------------------------


def sweep(e, kind, call, after, most=400):
    """Lets the 1st, 2nd, ... operation of `kind` fail until `call` needs fewer; returns how many there were."""
    for k in range(1, most):
        e.fault(kind, k)
        try:
            call()
        except Ds4Error as error:
            e.fault(kind, 0)
            after(k, error)
        else:
            e.fault(kind, 0)
            return k - 1
    raise AssertionError("the sweep does not end")


def test_every_failing_write(engine, tmp_path):
    s = make(engine)
    s.save(tmp_path / "s")
    old = (tmp_path / "s").read_bytes()
    s.eval([7])
    s.save(tmp_path / "new")
    new, before, held = (tmp_path / "new").read_bytes(), counts(engine), state(s)
    found = []

    def after(k, error):
        assert isinstance(error, SystemResourceError) and os.strerror(errno.EIO) in str(error)
        found.append((tmp_path / "s").read_bytes())
        assert found[-1] in (old, new) and not leftovers(tmp_path)
        assert counts(engine) == before and s.state == "LIVE"

    n = sweep(engine, "write", lambda: s.save(tmp_path / "s"), after)
    assert n >= 6  # folder, temporary file, rows, header, fsync, rename, fsync of the folder
    assert found.index(new) == n - 1  # only the last comes after the rename
    assert state(s) == held


@pytest.mark.parametrize("call", ["save", "load"])
def test_every_failing_allocation(engine, tmp_path, call):
    s = make(engine)
    s.save(tmp_path / "s")
    data, held, before = (tmp_path / "s").read_bytes(), state(s), counts(engine)

    def after(k, error):
        assert isinstance(error, SystemResourceError)
        assert counts(engine) == before and not leftovers(tmp_path)

    n = sweep(
        engine,
        "alloc",
        lambda: s.save(tmp_path / "s") if call == "save" else engine.load(tmp_path / "s").close(),
        after,
    )
    assert n >= 5
    assert state(s) == held and (tmp_path / "s").read_bytes() == data


def test_every_failing_read(engine, tmp_path):
    s = make(engine)
    s.save(tmp_path / "s")
    before = counts(engine)

    def after(k, error):
        assert isinstance(error, SystemResourceError) and os.strerror(errno.EIO) in str(error)
        assert counts(engine) == before

    assert sweep(engine, "read", lambda: engine.load(tmp_path / "s").close(), after) >= 8


SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>
static int armed, seen;
void arm(int at) { armed = at; seen = 0; }
static void step(const char *name) {
  if (armed < 0) usleep(-armed);
  if (armed > 0 && write(2, name, strlen(name)) && ++seen == armed) kill(getpid(), SIGKILL);
}
#define REAL(type, name) type (*real)() = (type (*)())dlsym(RTLD_NEXT, name); step(name " ")
ssize_t pwrite(int fd, const void *p, size_t n, off_t at) {
  REAL(ssize_t, "pwrite64");
  if (n > 30000) n /= 2; /* a short write, so that there is a half-written file to die with */
  return ((ssize_t (*)(int, const void *, size_t, off_t))real)(fd, p, n, at);
}
ssize_t pwrite64(int fd, const void *p, size_t n, off_t at) { return pwrite(fd, p, n, at); }
int fsync(int fd) { REAL(int, "fsync"); return ((int (*)(int))real)(fd); }
int flock(int fd, int how) { REAL(int, "flock"); return ((int (*)(int, int))real)(fd, how); }
int renameat(int a, const char *b, int c, const char *d) {
  REAL(int, "renameat");
  int result = ((int (*)(int, const char *, int, const char *))real)(a, b, c, d);
  step("renamed ");
  return result;
}
"""
KILLED = """
import ctypes, sys
import saved as t
arm = ctypes.CDLL(sys.argv[1]).arm
with t.open_engine() as e, t.make(e, 200) as s:
    print("ready", flush=True)
    arm(int(sys.argv[2]))
    s.save(sys.argv[3])
    arm(0)
    print("saved", flush=True)
"""


def needs_shim(test):
    """Marks a test that puts its own library between the core and the system."""
    missing = sys.platform != "linux" or not shutil.which(CC[0])
    return pytest.mark.nosanitize(pytest.mark.skipif(missing, reason="needs Linux and a C compiler")(test))


def run_with_shim(folder, code, *arguments):
    library = folder / "shim.so"
    if not library.exists():
        (folder / "shim.c").write_text(SHIM)
        subprocess.run([*CC, "-shared", "-fPIC", "-w", "shim.c", "-o", library, "-ldl"], cwd=folder, check=True)
    path = os.pathsep.join([str(Path(ds4.__file__).parent.parent), str(HERE)])
    return subprocess.run(
        [sys.executable, "-c", code, str(library), *map(str, arguments)], cwd=HERE, capture_output=True, text=True,
        env={**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": path},
    )  # fmt: skip


@pytest.mark.slow
@needs_shim
def test_killed_at_every_step(engine, tmp_path):
    """H9: kill -9 at every write, short ones too, lock, fsync and rename: the old file or the new one, never a mix."""
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / "s"
    with make(engine, 100) as s:
        s.save(path)
    old = path.read_bytes()
    with make(engine, 200) as s:
        s.save(tmp_path / "new")
    new = (tmp_path / "new").read_bytes()
    outcomes = []
    for k in range(1, 100):
        path.write_bytes(old)
        done = run_with_shim(tmp_path, KILLED, k, path)
        assert done.stdout.startswith("ready"), done.stderr
        outcomes.append(path.read_bytes())
        assert outcomes[-1] in (old, new), f"step {k} left a mix"
        assert len(leftovers(folder)) <= 1, "the next save removes what a dead one left"
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL
        engine.load(path).close()
    assert outcomes[-1] == new and not leftovers(folder)
    steps = done.stderr.split()
    assert (
        steps[0] == "flock"
        and steps[-4:] == ["fsync", "renameat", "renamed", "fsync"]
        and set(steps[1:-4]) == {"pwrite64"}
    )  # H14
    assert (
        outcomes.index(new) == len(steps) - 1
    )  # where a leftover is found there is one lock more: "renamed" is last but one


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(engine, tmp_path):
    """A save removes what a killed one left for the same path; a lock says that the writer lives."""
    s = make(engine, 70)
    seen = []
    thread = threading.Thread(target=lambda: [seen.extend(leftovers(tmp_path)) for _ in range(3000)])
    thread.start()
    while thread.is_alive():
        s.save(tmp_path / "s")
    assert seen and not leftovers(tmp_path)
    prefix = seen[0][: seen[0].index("-", 6)]
    dead, alive, other = (
        tmp_path / f"{prefix}-1-1-0.tmp",
        tmp_path / f"{prefix}-2-2-0.tmp",
        tmp_path / ".ds4-0000000000000000-1-1-0.tmp",
    )
    for p in (dead, alive, other):
        p.write_bytes(b"x")
    os.mkfifo(tmp_path / f"{prefix}-3-3-0.tmp")  # not a file: left alone, and nothing waits for it
    with open(alive, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        s.save(tmp_path / "s")
        assert not dead.exists() and alive.exists() and other.exists()
    s.save(tmp_path / "s")
    assert not alive.exists() and other.exists()
    assert engine.load(tmp_path / "s").pos == 70


# ---- other calls meanwhile -----------------------------------------------------------------------------------------


def test_busy_and_poisoned(engine, tmp_path):
    s, seen = make(engine), []

    def save(done, total):
        with pytest.raises(Busy):
            s.save(tmp_path / "s")
        seen.append(done)

    s.eval(TOKENS[:40], chunk=10, progress=save)
    assert len(seen) >= 4 and not (tmp_path / "s").exists()
    engine.fault("device", 3)
    with pytest.raises(Ds4Error):
        s.eval([1])
    with pytest.raises(Poisoned):
        s.save(tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_save_while_others_compute(engine, tmp_path):
    """Forks write, marks come and go, others evaluate; every file holds the one state that was saved."""
    s = make(engine)
    held, before = state(s), s.auto_marks
    child, stop, faults = s.fork(), threading.Event(), []

    def work():
        rng = random.Random(5)
        try:
            while not stop.is_set():
                child.eval(TOKENS[: rng.randrange(1, 90)], chunk=16)
                child.truncate(child.nearest_exact(min(child.pos, rng.choice((60, 140, 333)))))
                try:
                    m = s.mark()
                    if rng.random() < 0.5:
                        time.sleep(rng.random() / 500)
                    m.release()
                except Busy:
                    pass
        except BaseException as error:
            faults.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        files = set()
        for i in range(60):
            while True:
                try:
                    s.save(tmp_path / "s")
                    break
                except Busy:
                    time.sleep(0)
            with engine.load(tmp_path / "s") as t:
                assert t.tokens == s.tokens and t.logits.tobytes() == s.logits.tobytes()
                if i % 20 == 0:
                    assert state(t)[2] == held[2]
            data = (tmp_path / "s").read_bytes()
            files.add(
                tuple(
                    data[at : at + n]
                    for kind, stream, at, n, _ in layout.sections(data)
                    if kind == "rows" and stream != 1
                )
            )
    finally:
        stop.set()
        thread.join()
    assert not faults and len(files) == 1
    assert s.auto_marks == before and state(s) == held


LET_GO = """
import ctypes, sys, threading
import saved as t
with t.open_engine() as e, e.session() as s:
    s.eval(t.TOKENS[:60])
    mark, child = s.mark(), s.fork()
    s.eval(t.TOKENS[60:400])
    rows = [t.row(s, 1, r) for r in range(40, 60)]
    assert None not in rows
    file, begun = sys.argv[2], threading.Event()
    def save():
        begun.set()
        s.save(file)
    ctypes.CDLL(sys.argv[1]).arm(-30_000)
    thread = threading.Thread(target=save)
    thread.start()
    begun.wait()
    while s.state != "BUSY":
        pass
    mark.release()
    child.truncate(50)  # into a page that both hold
    child.eval([1] * 7)
    s.check(), child.check()
    assert s.state == "BUSY", "the save was over too soon"
    thread.join()
    s.check(), child.check()
    with e.load(file) as loaded:
        loaded.check()
        assert [t.row(loaded, 1, r) for r in range(40, 60)] == rows
        loaded.truncate(60)
    child.close()
    assert s.nearest_exact(60) < 60 and e.ledger()["marks"] == 0
"""


@needs_shim
def test_a_mark_let_go_while_it_saves(engine, tmp_path):
    """Its pages are still in the file, and a fork that shared them does not write into them meanwhile. (Every write
    takes 30 ms here.)"""
    done = run_with_shim(tmp_path, LET_GO, tmp_path / "s")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_cancelled_or_closed_while_it_saves(engine, tmp_path, how):
    """The file is there whole, or not at all; the pages come back."""
    outcomes, path, gate = set(), tmp_path / "s", threading.Lock()

    def stop(s, seen, delay):
        while not seen:
            with gate:
                seen += [1] if s.state == "BUSY" else []
        time.sleep(delay)
        getattr(s, how)()

    def save_until(s, seen):
        while True:
            s.save(path)
            with gate:
                if seen:
                    return
            path.unlink()

    with engine.session() as parent:
        parent.eval(TOKENS)
        for i in range(400):
            s, seen = parent.fork(), []
            thread = threading.Thread(target=stop, args=(s, seen, i % 40 / 40_000))
            thread.start()
            try:
                save_until(s, seen)
                outcomes.add("saved")
                engine.load(path).close()
                path.unlink()
            except Cancelled:
                outcomes.add("cancelled")
                assert not path.exists()
            thread.join()
            s.close()
            if i >= 40 and "cancelled" in outcomes:
                break
    assert "cancelled" in outcomes and not leftovers(tmp_path)


def test_two_saves_to_one_path(engine, tmp_path):
    sessions, faults = [make(engine, n) for n in (100, 200, 300)], []

    def work(s):
        try:
            for _ in range(20):
                s.save(tmp_path / "s")
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(s,)) for s in sessions]
    [t.start() for t in threads]
    for _ in range(20):
        if (tmp_path / "s").exists():
            with engine.load(tmp_path / "s") as t:
                assert t.pos in (100, 200, 300)
    [t.join() for t in threads]
    assert not faults and not leftovers(tmp_path)
