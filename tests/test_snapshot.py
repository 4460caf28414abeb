"""Snapshots (K9): the loaded session equals the saved one bit for bit; whatever is damaged, foreign or cut off half-way is refused or leaves the old file."""

from __future__ import annotations

import errno
import fcntl
import gc
import hashlib
import json
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

import numpy as np
import pytest
from corrupt import snapshot as layout

import ds4
from ds4.errors import (
    Busy, Cancelled, ContextFull, Ds4Error, IdentityError, InexactError, NoLogits, Poisoned, PoolFull, SnapshotError,
    SystemResourceError,
)  # fmt: skip

TINY = Path(__file__).parent / "data" / "llama"
TOYS = {"toy_window": 24, "toy_stride": 4}
TOKENS = [int(t) for t in np.random.default_rng(3).integers(0, 512, 3000)]
DTYPES = ("f32", "f16", "q8_0")
HEAD = layout.HEAD

needs_test_core = pytest.mark.skipif(os.environ.get("DS4_CORE") != "test", reason="needs the test build: DS4_CORE=test")
pytestmark = needs_test_core


def open_engine(model=TINY, toys=True, **options):
    options = {"threads": 1, "pool_tokens": 16384, "reach_slack": 16, "kv_dtype": "f16", **options}
    return ds4.Engine(model, test_options=TOYS if toys is True else toys or None, **options)


@pytest.fixture(scope="module")
def engine():
    """Windows, strides and f16 rows."""
    with open_engine() as e:
        yield e


@pytest.fixture(autouse=True)
def ledger(request):
    """K7: a test gives back all it took from the shared engine."""
    e = request.getfixturevalue("engine") if "engine" in request.fixturenames else None
    before = counts(e) if e else None
    yield
    if e:
        e.fault("read", 0), e.fault("write", 0), e.fault("alloc", 0)
        for session in list(e._sessions):
            session.close()
            del session
        gc.collect()  # a session and its mark hold each other
        assert counts(e) == before


def counts(e):
    return {name: n for name, n in e.ledger().items() if name != "bytes_system"}


def row(s, stream, i):
    try:
        return s.rows(stream, i, 1)
    except InexactError:
        return None


def logits(s):
    try:
        return s.logits.tobytes()
    except NoLogits:
        return None


def state(s):
    """Everything that can be seen of a session."""
    s.check()
    rows = [[row(s, i, r) for r in range(s.pos // st.stride)] for i, st in enumerate(s.engine.streams)]
    return s.tokens, logits(s), rows, [s.nearest_exact(p) for p in range(s.pos + 1)]


def make(e, n=333, ctx=1024):
    """A session with a past: marks of each kind, pages dropped between them."""
    s = e.session(ctx=ctx)
    s.eval(TOKENS[:60])
    s.kept = s.mark()
    s.eval(TOKENS[60 : min(n, 140)])
    s.mark_auto(pinned=True)
    s.eval(TOKENS[140:n])
    return s


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """The bytes of a small snapshot with a window, two marks and logits."""
    with open_engine() as e, make(e, 200) as s:
        path = tmp_path_factory.mktemp("sound") / "s"
        s.save(path)
        return path.read_bytes()


def refused(e, data, tmp_path, error=SnapshotError):
    """The text with which a file is refused; nothing may have changed."""
    path = tmp_path / "broken"
    path.write_bytes(data)
    before = counts(e)
    with pytest.raises(error) as caught:
        e.load(path)
    assert counts(e) == before
    assert str(caught.value).startswith(str(path)) and str(caught.value).isprintable()
    return str(caught.value)


def leftovers(folder):
    return [p.name for p in Path(folder).iterdir() if p.name.startswith(".ds4-")]


# ---- the loaded session equals the saved one ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("toys", [True, None], ids=["toys", "plain"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trip(dtype, toys, tmp_path):
    with open_engine(kv_dtype=dtype, toys=toys) as e:
        for n in (1, 2, 7, 8, 9, 23, 24, 25, 63, 64, 65, 128, 200):
            with e.session(ctx=512) as s:
                s.eval(TOKENS[:n])
                s.save(tmp_path / "s")
                with e.load(tmp_path / "s") as t:
                    assert state(t) == state(s) and t.ctx == 512
                    s.eval(TOKENS[n : n + 70], chunk=7)
                    t.eval(TOKENS[n : n + 70])
                    assert state(t) == state(s)
                with e.session() as fresh:  # O1
                    fresh.eval(TOKENS[: n + 70])
                    assert fresh.logits.tobytes() == s.logits.tobytes()
        assert counts(e)["pages_used"] == 0


def test_the_file_is_a_function_of_the_state(engine, tmp_path):
    """Saving what was loaded gives the same bytes: tokens, rows, marks with their flags, logits; nothing else is in it."""
    s = make(engine)
    s.save(tmp_path / "a")
    t = engine.load(tmp_path / "a")
    assert t.auto_marks == s.auto_marks + 1  # the handle's mark
    assert state(t) == state(s)
    t.save(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_checksums_are_crc32c(sound):
    """Against the definition in Python."""
    assert layout.seal(sound) == sound
    assert layout.crc32c(b"123456789") == 0xE3069283


def test_unwritten_memory_never_leaves(tmp_path):
    """Rows behind the end, which hold NaN or what was cut off, are zero in the file: the past of a session does not show."""
    with open_engine(toys=None, kv_dtype="f32") as e, e.session() as s, e.session() as t:
        s.eval(TOKENS[:100])
        t.eval(TOKENS[:90])
        t.eval([1] * 200)
        t.truncate(90)
        t.eval(TOKENS[90:100])
        s.save(tmp_path / "s")
        t.save(tmp_path / "t")
        data = (tmp_path / "s").read_bytes()
        _, _, at, _, pages = next(c for c in layout.sections(data) if c[0] == "rows")
        page_bytes = e.streams[0].page_bytes
        last = np.frombuffer(data, np.float32, offset=at + (pages - 1) * page_bytes).reshape(3, 2, 2, -1)  # layer, part, head
        keys, values = last[:, 0].reshape(3, 2, 8, 64), last[:, 1].reshape(3, 2, 64, 8)
        assert not keys[..., 36:].any() and not values[:, :, 36:].any()
        assert keys[..., :36].all() and values[:, :, :36].all()
        assert data == (tmp_path / "t").read_bytes()


def test_without_logits(engine, tmp_path):
    s = make(engine)
    s.truncate(320)
    s.save(tmp_path / "s")
    t = engine.load(tmp_path / "s")
    with pytest.raises(NoLogits):
        t.logits  # noqa: B018
    t.refresh(), s.refresh()
    assert state(t) == state(s)


def test_empty(engine, tmp_path):
    s = engine.session(ctx=100)
    s.save(tmp_path / "s")
    t = engine.load(tmp_path / "s")
    assert (t.pos, t.state, t.ctx) == (0, "EMPTY", 100)
    for x in (s, t):
        x.eval(TOKENS[:70])
    assert state(s) == state(t)


def test_cleared_and_forked_sessions(engine, tmp_path):
    s = make(engine)
    child = s.fork(s.nearest_exact(300))
    child.eval(TOKENS[1000:1100])
    child.save(tmp_path / "child")
    s.clear()
    s.save(tmp_path / "s")
    assert engine.load(tmp_path / "s").pos == 0
    assert state(engine.load(tmp_path / "child")) == state(child)


def test_a_new_process_continues(engine, tmp_path):
    s = make(engine)
    s.save(tmp_path / "s")
    code = """
import hashlib, json, sys
import test_snapshot as t
with t.open_engine() as e, e.load(sys.argv[1]) as s:
    s.check()
    first = [s.pos, s.tokens, hashlib.sha256(s.logits).hexdigest(), [s.nearest_exact(p) for p in range(s.pos + 1)]]
    synced = s.sync(t.TOKENS[:400])
    print(json.dumps([*first, [synced.reused, synced.evaluated], hashlib.sha256(s.logits).hexdigest()]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "s")], capture_output=True, text=True, cwd=Path(__file__).parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(ds4.__file__).parent.parent), str(Path(__file__).parent)])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    pos, tokens, first, exact, synced, second = json.loads(done.stdout)
    assert (pos, tokens, first) == (s.pos, s.tokens, hashlib.sha256(s.logits).hexdigest())
    assert exact == [s.nearest_exact(p) for p in range(s.pos + 1)]
    assert synced == [333, 67]
    s.eval(TOKENS[333:400])
    assert second == hashlib.sha256(s.logits).hexdigest()


@pytest.mark.parametrize("mark", [60, 140])
def test_marks_survive(engine, tmp_path, mark):
    """B9: behind the window, the positions of a handle's mark and of a pinned one are exact as before."""
    s = make(engine)
    with pytest.raises(InexactError):
        s.fork(100)
    s.save(tmp_path / "s")
    t = engine.load(tmp_path / "s")
    for x in (s, t):
        x.truncate(mark)
        x.eval(TOKENS[2000:2050])
    assert state(t) == state(s)
    fresh = engine.session()
    fresh.eval(TOKENS[:mark] + TOKENS[2000:2050])
    assert fresh.logits.tobytes() == t.logits.tobytes()


def test_seeded_generation_goes_on_alike(engine, tmp_path):
    """I13: from the middle of a seeded text, twice."""
    options = ds4.Sampling(temperature=1.0, top_k=50, repetition=1.1, seed=11)

    def say(x, n):
        return [t.id for t in x.generate(options, max_tokens=n)]

    s = engine.session()
    s.eval(TOKENS[:50])
    say(s, 9)
    s.save(tmp_path / "s")
    text = say(s, 20)
    assert [say(engine.load(tmp_path / "s"), 20) for _ in range(2)] == [text, text]


def test_ctx(engine, tmp_path):
    s = make(engine, 200, ctx=300)
    s.save(tmp_path / "s")
    assert engine.load(tmp_path / "s").ctx == 300
    assert engine.load(tmp_path / "s", ctx=200).ctx == 200
    assert engine.load(tmp_path / "s", ctx=4096).ctx == 4096
    for ctx, numbers in ((199, (200, 199)), (4097, (4097, 4096))):
        with pytest.raises(ContextFull) as error:
            engine.load(tmp_path / "s", ctx=ctx)
        assert (error.value.wanted, error.value.ctx) == numbers


# ---- foreign files ------------------------------------------------------------------------------------------------------------------


def other_weights(folder):
    """The tiny model with one weight changed: all shapes equal."""
    shutil.copytree(TINY, folder)
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-3] ^= 0x10
    (folder / "model.safetensors").write_bytes(data)
    return folder


def test_another_model_of_equal_shape(sound, tmp_path):
    with open_engine(other_weights(tmp_path / "other")) as e:
        assert "another model" in refused(e, sound, tmp_path, IdentityError)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"kv_dtype": "q8_0"}, "rows of kv_dtype f16, the engine's is q8_0"),
        ({"toys": None}, "other options"),
        ({"toys": {**TOYS, "toy_window": 25}}, "other options"),
        ({"toys": {**TOYS, "toy_stride": 5}}, "other options"),
    ],
)
def test_another_dtype_or_option(sound, tmp_path, options, text):
    with open_engine(**options) as e:
        assert text in refused(e, sound, tmp_path, IdentityError)


@pytest.mark.parametrize(
    ("at", "code", "value", "text"),
    [
        (12, "I", 2, "layout version 2, this build reads 1"),
        (32, "B", 0, "another model"),
        (64, "4s", b"lime", "architecture limea, the engine's is llama"),
        (64, "4s", b"\x1b[2J", "architecture ?[2Ja"),
        (64, "32s", b"x" * 32, f"architecture {'x' * 32}, "),
        (96, "8s", b"f16_f16_", "kv_dtype f16_f16_"),
        (104, "Q", 7, "other options"),
        (112, "I", 9999, "numerics number 9999"),
        (116, "I", 511, "another model"),
    ],
)
def test_another_identity(engine, sound, tmp_path, at, code, value, text):
    data = layout.seal(layout.put(sound, at, code, value))
    assert text in refused(engine, data, tmp_path, IdentityError)


# ---- damaged files -----------------------------------------------------------------------------------------------------------------


def test_every_flipped_byte(engine, sound, tmp_path):
    """All of the header and of the lists, and a sample of the rest."""
    size = layout.u32(sound, 16)
    lists = [range(at, at + n) for kind, _, at, n, _ in layout.sections(sound) if kind in ("marks", "pages")]
    rng = random.Random(1)
    places = {*range(size), *(i for r in lists for i in r), *(rng.randrange(size, len(sound)) for _ in range(300))}
    for at in sorted(places):
        flipped = layout.put(sound, at, "B", sound[at] ^ 1 << rng.randrange(8))
        refused(engine, flipped, tmp_path)


def test_cut_anywhere(engine, sound, tmp_path):
    for at in sorted({at + d for at in layout.edges(sound) for d in (-1, 0, 1)} | set(range(0, len(sound), 997))):
        if 0 <= at < len(sound):
            refused(engine, sound[:at], tmp_path)


def test_corpus(engine, sound, tmp_path):
    """Broken on purpose, with true checksums: each is refused for its own fault."""
    cases = layout.cases(sound)
    assert len(cases) > 80
    for name, (data, text) in cases.items():
        assert data != sound, name
        assert text in refused(engine, data, tmp_path), name


def tried(e, data, path):
    """Loads a forged file: refused, or a session that holds together. Nothing may stay behind."""
    before = counts(e)
    path.write_bytes(data)
    try:
        with e.load(path) as s:
            s.check()
            s.sync(s.tokens[:-1] + [1, 2, 3])
            s.check()
    except (SnapshotError, ContextFull, PoolFull):
        pass
    assert counts(e) == before


def test_fuzzed_integers(engine, sound, tmp_path):
    """H6: every integer of header, table and lists takes extreme values; all checksums are true."""
    rng = random.Random(2)
    for _, at, code in layout.fields(sound):
        old = int.from_bytes(sound[at : at + (4 if code == "I" else 8)], "little")
        top = 2**32 if code == "I" else 2**64
        values = {0, 1, old - 1, old + 1, old * 2, top - 1, top // 2, 3 << 30, rng.randrange(top)}
        for value in sorted({v % top for v in values} - {old}):
            tried(engine, layout.seal(layout.put(sound, at, code, value)), tmp_path / "f")


def test_fuzzed_lists(engine, sound, tmp_path):
    """Marks and pages that are plausible but wrong."""
    rng = random.Random(3)
    lists = [(at, n) for kind, _, at, n, _ in layout.sections(sound) if kind in ("marks", "pages", "tokens")]
    for _ in range(300):
        data = sound
        for _ in range(rng.choice((1, 2, 4))):
            at, n = rng.choice(lists)
            data = layout.put(data, at + rng.randrange(0, n, 4), "I", rng.choice((rng.randrange(40), rng.randrange(600))))
        tried(engine, layout.seal(data), tmp_path / "f")


def test_huge_sparse_file(engine, sound, tmp_path):
    """H8: sizes above 2 GiB are numbers like others, and cost neither memory nor time."""
    with open(tmp_path / "huge", "wb") as file:
        file.write(layout.seal(layout.put(sound, 24, "Q", 3 << 30)))
        file.truncate(3 << 30)
    start = time.perf_counter()
    with pytest.raises(SnapshotError, match="3221225472 bytes"):
        engine.load(tmp_path / "huge")
    assert time.perf_counter() - start < 2


def test_a_file_of_another_kind(engine, tmp_path):
    assert "does not begin like a snapshot" in refused(engine, (TINY / "model.safetensors").read_bytes(), tmp_path)
    assert "too short" in refused(engine, b"", tmp_path)


# ---- places that cannot be read or written ----------------------------------------------------------------------------------------


def test_paths(engine, tmp_path):
    s = make(engine, 70)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    os.symlink("/dev/null", tmp_path / "null")
    before = sorted(p.name for p in tmp_path.iterdir())
    for path, text in (
        (tmp_path / "none" / "s", os.strerror(errno.ENOENT)), (tmp_path / "pipe" / "s", os.strerror(errno.ENOTDIR)),
        (tmp_path / "folder", "a folder"), (f"{tmp_path}/folder/", "a folder"), (tmp_path / "folder" / "..", "a folder"),
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


# ---- failures in the middle ------------------------------------------------------------------------------------------------------------


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

    n = sweep(engine, "alloc", lambda: s.save(tmp_path / "s") if call == "save" else engine.load(tmp_path / "s").close(), after)
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


KILL_AT = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>
static int armed, seen;
void arm(int at) { armed = at; seen = 0; }
static void step(void) { if (armed && ++seen == armed) kill(getpid(), SIGKILL); }
#define REAL(type, name) type (*real)() = (type (*)())dlsym(RTLD_NEXT, name); step()
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
  step();
  return result;
}
"""
KILLED = """
import ctypes, sys
import test_snapshot as t
arm = ctypes.CDLL(sys.argv[1]).arm
with t.open_engine() as e, t.make(e, 200) as s:
    print("ready", flush=True)
    arm(int(sys.argv[2]))
    s.save(sys.argv[3])
    arm(0)
    print("saved", flush=True)
"""


@pytest.mark.slow
@pytest.mark.nosanitize
@pytest.mark.skipif(sys.platform != "linux" or not shutil.which(shlex.split(os.environ.get("CC", "cc"))[0]), reason="needs Linux and a C compiler")
def test_killed_at_every_step(engine, tmp_path):
    """H9: kill -9 at every write, short ones too, lock, fsync and rename: the old file or the new one, and never a mix."""
    (tmp_path / "kill.c").write_text(KILL_AT)
    subprocess.run([*shlex.split(os.environ.get("CC", "cc")), "-shared", "-fPIC", "-w", "kill.c", "-o", "kill.so", "-ldl"], cwd=tmp_path, check=True)
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / "s"
    with make(engine, 100) as s:
        s.save(path)
    old = path.read_bytes()
    with make(engine, 200) as s:
        s.save(tmp_path / "new")
    new = (tmp_path / "new").read_bytes()
    here = Path(__file__).parent
    env = {
        **os.environ,
        "LD_PRELOAD": str(tmp_path / "kill.so"),
        "PYTHONPATH": os.pathsep.join([str(Path(ds4.__file__).parent.parent), str(here)]),
    }
    outcomes = []
    for k in range(1, 100):
        path.write_bytes(old)
        done = subprocess.run(
            [sys.executable, "-c", KILLED, str(tmp_path / "kill.so"), str(k), str(path)], env=env, cwd=here, capture_output=True, text=True
        )
        assert done.stdout.startswith("ready"), done.stderr
        outcomes.append(path.read_bytes())
        assert outcomes[-1] in (old, new), f"step {k} left a mix"
        assert len(leftovers(folder)) <= 1, "the next save removes what a dead one left"
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL
        engine.load(path).close()
    assert outcomes[-1] == new and not leftovers(folder)
    assert len(outcomes) > 10 and outcomes.index(new) >= len(outcomes) - 4  # after the rename: one step, the fsync of the folder, the end


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
    dead, alive, other = tmp_path / f"{prefix}-1-1-0.tmp", tmp_path / f"{prefix}-2-2-0.tmp", tmp_path / ".ds4-0000000000000000-1-1-0.tmp"
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


# ---- room -------------------------------------------------------------------------------------------------------------------------------


def test_pool_full(sound, tmp_path):
    (tmp_path / "s").write_bytes(sound)
    with open_engine(pool_bytes=20_000) as e:
        before = counts(e)
        with pytest.raises(PoolFull) as error:
            e.load(tmp_path / "s")
        assert error.value.needed > error.value.free == 20_000
        assert counts(e) == before


def pool_for(sound, tmp_path, spare):
    """An engine whose pool holds the snapshot and `spare` bytes more."""
    (tmp_path / "s").write_bytes(sound)
    with open_engine() as e, e.load(tmp_path / "s") as s:
        return open_engine(pool_bytes=s.bytes_held + spare)


def test_marks_of_the_file_make_room_too(sound, tmp_path):
    """As with an eval: automatic marks go before PoolFull is raised."""
    with pool_for(sound, tmp_path, -1000) as e:
        before = counts(e)
        with e.load(tmp_path / "s") as s:
            s.check()
            assert s.auto_marks < 3 and s.pos == 200 and s.nearest_exact(60) < 60
            s.sync(TOKENS[:200])
            with open_engine() as big, big.session() as fresh:
                fresh.eval(TOKENS[:200])
                assert fresh.logits.tobytes() == s.logits.tobytes()
        assert counts(e) == before


def test_a_damaged_file_takes_no_marks_of_others(sound, tmp_path):
    """When marks would have to go for it, the file is verified first."""
    with pool_for(sound, tmp_path, 60_000) as e, e.session() as s:
        s.eval(TOKENS[:100])
        s.eval(TOKENS[100:200])
        with e.session() as filler:
            while e.ledger()["bytes_budget"] - e.ledger()["bytes_used"] > len(sound):
                filler.eval(TOKENS[:8])
            before, held = counts(e), state(s)
            assert s.auto_marks >= 2
            data = layout.put(sound, len(sound) - 1, "B", sound[-1] ^ 1)
            refused(e, data, tmp_path)
            assert counts(e) == before and state(s) == held


def test_marks_above_the_budget_go(tmp_path):
    """Marks of handles come back as automatic ones, which may hold an eighth of the pool."""
    with open_engine(pool_bytes=600_000) as e, e.session() as s:
        handles = []
        for i in range(30):
            s.eval(TOKENS[i * 20 : i * 20 + 20])
            handles.append(s.mark())
        s.save(tmp_path / "s")
        with e.load(tmp_path / "s") as t:
            t.check()
            assert 0 < t.auto_marks < 30
            assert e.ledger()["auto_mark_bytes"] <= 600_000 / 8
            t.truncate(handles[-1].pos)
        assert all(h.alive for h in handles)


# ---- other calls meanwhile -----------------------------------------------------------------------------------------------------------------


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
            files.add(tuple(data[at : at + n] for kind, stream, at, n, _ in layout.sections(data) if kind == "rows" and stream != 1))
    finally:
        stop.set()
        thread.join()
    assert not faults and len(files) == 1
    assert s.auto_marks == before and state(s) == held


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_cancelled_or_closed_while_it_saves(engine, tmp_path, how):
    """The file is there whole, or not at all; the pages come back."""
    outcomes, path = set(), tmp_path / "s"
    with engine.session() as parent:
        parent.eval(TOKENS)
        for i in range(400):
            s = parent.fork()
            thread = threading.Thread(target=lambda s=s, i=i: (time.sleep(i % 40 / 20_000), getattr(s, how)()))
            thread.start()
            try:
                s.save(path)
                outcomes.add("saved")
            except Cancelled:
                outcomes.add("cancelled")
                assert not path.exists()
            except Ds4Error as error:
                assert "closed" in str(error) and how == "close"
            thread.join()
            s.close()
            if path.exists():
                engine.load(path).close()
                path.unlink()
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
