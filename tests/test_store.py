"""The store of a conversation: damage, what goes on behind it, disks that refuse, and one process at a time."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import stat
import subprocess
import sys
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from test_spill import tree
from test_transcript import answer, checkpoint, fold, state_of, talk, texts, user

from ds4 import conversations
from ds4.errors import StoreBusy, StoreError
from ds4.sealed import MAX_LINE, Reader, seal
from ds4.store import MemoryStore, Store, in_use
from ds4.transcript import Held, Transcript

LOG = "log-000001.jsonl"


@pytest.fixture
def path(tmp_path):
    """A conversation of seven events and one spill file, closed."""
    t = talk(Store.create(tmp_path / "c", {"model": "m"}))
    entry = t.store.spill.prepare(t.surface[1:3])
    t.replace([t.surface[0], checkpoint("sum"), *t.surface[3:]], spills=[entry])
    t.store.close()
    return tmp_path / "c"


def lines_of(path, name=LOG):
    return (path / name).read_bytes().splitlines(keepends=True)


def states(path):
    """The state behind each event of a sound conversation."""
    with Store.open(path) as store:
        events = list(store.events())
    return [None, *(state_of(fold(events[: i + 1])) for i in range(len(events)))]


def resealed(values, before=""):
    """Lines with true sums: what a careful forger would write."""
    out = []
    for value in values:
        line, before = seal(value, before)
        out.append(line)
    return out


def contents(path):
    return {name: (path / name).read_bytes() for name in tree(path) if (path / name).is_file() and name != "lock"}


# ---- opening -------------------------------------------------------------------------------------------------------


def test_modes_and_names(path):
    mode = lambda p: stat.S_IMODE(os.stat(p).st_mode)  # noqa: E731
    assert tree(path)[:3] == ["lock", LOG, "spill"]
    assert mode(path) == 0o700 and mode(path / LOG) == 0o600 and mode(path / "lock") == 0o600
    assert Store.exists(path) and not Store.exists(path / "spill") and not Store.exists(path / "none")
    with Store.open(path) as store:
        assert store.info == {"model": "m"} and store.persistent and store.failed is None and store.damage is None
        assert store.snapshot == path / "kv.ds4" and store.path == path


def test_only_new_or_empty_folders_become_conversations(tmp_path, path):
    before = contents(tmp_path)
    with pytest.raises(StoreError, match="holds a conversation already"):
        Store.create(path)
    (tmp_path / "foreign").mkdir(mode=0o755)
    (tmp_path / "foreign" / "thesis.txt").write_text("x")
    with pytest.raises(StoreError, match="not empty and holds no conversation"):
        Store.create(tmp_path / "foreign")
    assert stat.S_IMODE(os.stat(tmp_path / "foreign").st_mode) == 0o755
    for empty in (tmp_path / "none", tmp_path / "foreign", tmp_path / "foreign" / "thesis.txt"):
        with pytest.raises(StoreError, match="holds no conversation: check the path"):
            Store.open(empty)
    (tmp_path / "foreign" / "lock").unlink()
    (tmp_path / "foreign" / "thesis.txt").unlink()
    with Store.create(tmp_path / "foreign") as store:
        assert store.persistent
    (tmp_path / "foreign" / LOG).unlink(), (tmp_path / "foreign" / "lock").unlink(), (tmp_path / "foreign").rmdir()
    assert contents(tmp_path) == before


def test_memory(path):
    store = MemoryStore({"a": 1})
    assert (store.persistent, store.path, store.snapshot, store.failed, store.damage) == (False, None, None, None, None)
    t = talk(store)
    entry = store.spill.prepare(t.surface[1:2])
    t.replace([checkpoint("sum")], spills=[entry])
    assert entry.locator == "memory:000001" and store.spill.read(entry.locator)[0]["text"] == "one"
    assert state_of(Transcript(store)._state) == state_of(t._state)
    with store:
        pass
    store.close()


def test_opening_changes_nothing_and_appending_goes_on(path):
    before, lock = contents(path), os.stat(path / "lock").st_ino
    for _ in range(2):
        with Store.open(path) as store:
            surface = Transcript(store).surface
    assert contents(path) == before and os.stat(path / "lock").st_ino == lock
    with Store.open(path) as store:
        t = Transcript(store)
        t.append(user("more"))
    assert lines_of(path)[:7] == before[LOG].splitlines(keepends=True) and len(lines_of(path)) == 8
    with Store.open(path) as store:
        assert Transcript(store).surface == (*surface, *t.surface[-1:])
        store.close()
        store.close()
        with pytest.raises(StoreError, match="closed"):
            t.append(user("x")), store.append({"seq": 9, "type": "x"})


def test_another_version_is_refused(path):
    [first, *others] = [json.loads(line) for line in lines_of(path)]
    for value in (first, *others):
        del value["sum"]
    for change, message in (
        ({"version": 2}, "another version of ds4"),
        ({"version": None}, "another version of ds4"),
        ({"type": "append"}, "does not begin as the log of a conversation"),
        ({"id": 4}, "does not begin"),
        ({"info": []}, "does not say what"),
    ):
        (path / LOG).write_bytes(b"".join(resealed([{**first, **change}, *others])))
        with pytest.raises(StoreError, match=message):
            Store.open(path)
        assert not in_use(path)


# ---- damage --------------------------------------------------------------------------------------------------------


def damaged_logs(lines):
    """(name, the log's bytes, line of the damage)"""
    for i, line in enumerate(lines):
        for at in (0, 1, len(line) // 3, len(line) - 5, len(line) - 1):
            for bit in (0, 7):
                flipped = line[:at] + bytes([line[at] ^ (1 << bit)]) + line[at + 1 :]
                yield f"bit {bit} of {at} in {i + 1}", b"".join([*lines[:i], flipped, *lines[i + 1 :]]), i + 1
        for cut in (1, len(line) // 2, len(line) - 1):
            yield f"cut {i + 1} at {cut}", b"".join([*lines[:i], line[:cut]]), i + 1
            yield f"hole in {i + 1} at {cut}", b"".join([*lines[:i], line[:cut], *lines[i + 1 :]]), i + 1
        yield f"twice {i + 1}", b"".join([*lines[: i + 1], line, *lines[i + 1 :]]), i + 2
        yield f"empty line before {i + 1}", b"".join([*lines[:i], b"\n", *lines[i:]]), i + 1
        yield f"zeros in {i + 1}", b"".join([*lines[:i], bytes(len(line)), *lines[i + 1 :]]), i + 1
    for i in range(len(lines) - 1):
        yield f"missing {i + 1}", b"".join([*lines[:i], *lines[i + 1 :]]), i + 1
        yield f"swapped {i + 1}", b"".join([*lines[:i], lines[i + 1], lines[i], *lines[i + 2 :]]), i + 1


def check_damage(path, name, line, expected):
    """A log whose first damage is at that line: everything before it opens, it is named, and the conversation goes on in
    the next file without a byte of the old one being changed."""
    before = contents(path)
    if line == 1:
        with pytest.raises(StoreError) as error:
            Store.open(path)
        assert f"{LOG}, line 1: " in str(error.value), name
        assert not in_use(path) and contents(path) == before
        return
    with Store.open(path) as store:
        assert store.damage is not None and (store.damage.file, store.damage.line) == (LOG, line), name
        t = Transcript(store)
        assert state_of(t._state) == expected[line - 1], name
        assert contents(path) == before, "opening changes nothing"
        found = [d for d in conversations.verify(path) if not d.file.startswith("spill")]
        assert found == ([store.damage] if not store.damage.cut else []), name
        t.append(user("after"))
        t.append(answer("that"))
        state = state_of(t._state)
    assert contents(path) == {**before, "log-000002.jsonl": (path / "log-000002.jsonl").read_bytes()}, name
    first = json.loads(lines_of(path, "log-000002.jsonl")[0])
    assert (first["type"], first["after"], first["lines"]) == ("continue", LOG, line - 1)
    with Store.open(path) as store:
        assert store.damage is None and state_of(Transcript(store)._state) == state, name
    # once more, now at the end of the second file
    with open(path / "log-000002.jsonl", "ab") as file:
        file.write(b'{"seq":')
    with Store.open(path) as store:
        assert (store.damage.file, store.damage.line) == ("log-000002.jsonl", 4)
        t = Transcript(store)
        t.append(user("third"))
        state = state_of(t._state)
    with Store.open(path) as store:
        assert store.damage is None and state_of(Transcript(store)._state) == state
    damages = [(d.file, d.line) for d in conversations.verify(path) if not d.file.startswith("spill")]
    assert damages == [(LOG, line), ("log-000002.jsonl", 4)], "verify goes on naming them"


def test_every_damage_is_named_and_survived(path):
    expected, sound = states(path), lines_of(path)
    count = 0
    for name, data, line in damaged_logs(sound):
        for file in path.glob("log-*"):
            file.unlink()
        (path / LOG).write_bytes(data)
        check_damage(path, name, line, expected)
        count += 1
    assert count > 100


FORGED = {
    "no JSON": b'{"seq":8,"type":}',
    "a list": b"[1,2,3]",
    "twice the same key": b'{"seq":8,"seq":8,"type":"note"}',
    "NaN": b'{"seq":8,"type":"note","x":NaN}',
    "infinite": b'{"seq":8,"type":"note","x":1e999}',
    "not UTF-8": b'{"seq":8,"type":"note","x":"\xff"}',
    "half a pair": b'{"seq":8,"type":"note","x":"\\ud800"}',
    "deep": b'{"seq":8,"type":"note","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "many values": b'{"seq":8,"type":"note","x":[' + b"0," * (9 << 20) + b"0]}",
    "giant number": b'{"seq":8,"type":"note","x":' + b"9" * 100_000 + b"}",
    "seq jumps": b'{"seq":9,"type":"note"}',
    "seq again": b'{"seq":7,"type":"note"}',
    "no type": b'{"seq":8}',
    "negative id": b'{"seq":8,"type":"append","nodes":[{"number":7,"role":"user","kind":"","text":"","thinking":"","ids":[-1],"calls":[],'
    b'"result_of":"","index":0,"count":1,"headed":false,"finish":"","data":{}}]}',
    "rewind to nowhere": b'{"seq":8,"type":"rewind","to":99}',
    "a file's first line": b'{"type":"continue","after":"log-000001.jsonl","lines":7}',
}  # fmt: skip


@pytest.mark.parametrize("name", FORGED)
def test_forged_lines_with_true_sums(path, name):
    """Their sums are right, so it is what they say that is refused; they are named like other damage."""
    import hashlib

    expected, body = states(path), FORGED[name]
    last = json.loads(lines_of(path)[-1])["sum"]
    line, sum = seal({"seq": 8, "type": "note"}, last)
    sum = hashlib.sha256(last.encode() + body).hexdigest()[:16]
    forged = body[:-1] + f',"sum":"{sum}"}}\n'.encode()
    good, _ = seal({"seq": 8, "type": "note"}, sum)
    with open(path / LOG, "ab") as file:
        file.write(forged + good)
    before = contents(path)
    with Store.open(path) as store:
        t = Transcript(store)
        assert state_of(t._state) == expected[7] and (store.damage.file, store.damage.line) == (LOG, 8)
        assert conversations.verify(path) == [store.damage] and str(store.damage).isprintable()
        assert conversations.read(path).state.surface == list(t.surface)
        t.append(user("after"))
    assert contents(path)[LOG] == before[LOG]
    with Store.open(path) as store:
        assert texts(Transcript(store).surface)[-1] == "after" and store.damage is None


def test_a_huge_line(path):
    expected = states(path)
    with open(path / LOG, "ab") as file:
        file.truncate(os.path.getsize(path / LOG) + MAX_LINE + 5)  # a hole: zeros without an end
    with Store.open(path) as store:
        assert (store.damage.line, store.damage.what) == (8, f"longer than {MAX_LINE} bytes")
        assert state_of(Transcript(store)._state) == expected[7]


def test_files_that_do_not_go_on_behind_another(path):
    with open(path / LOG, "ab") as file:
        file.write(b"torn")
    with Store.open(path) as store:
        Transcript(store).append(user("second file"))
    expected, second = states(path), (path / "log-000002.jsonl").read_bytes()
    first = (path / LOG).read_bytes()
    for name, data in {
        "empty": b"", "no JSON": b"x\n", "cut": second[:20], "its first line changed": second.replace(b'"lines":7', b'"lines":6'),
        "a line that is none": second.replace(b'"lines":7', b'"lines":99'), "a file that is none": second.replace(b"000001", b"000009"),
        "no object": b"[]\n", "lines as text": second.replace(b'"lines":7', b'"lines":"7"'), "only zeros": bytes(5000),
    }.items():  # fmt: skip
        (path / "log-000002.jsonl").write_bytes(data)
        with Store.open(path) as store:
            assert state_of(Transcript(store)._state) == expected[7], name
            assert (store.damage.file, store.damage.line) == (LOG, 8), "the first damage that counts"
        assert [(d.file, d.line) for d in conversations.verify(path)] == [(LOG, 8), ("log-000002.jsonl", 1)], name
    (path / "log-000002.jsonl").write_bytes(second)
    # damage before the line that the second file goes on behind: it cannot be read any more, and the third goes on
    (path / LOG).write_bytes(first.replace(b'"first"', b'"forst"'))
    with Store.open(path) as store:
        t = Transcript(store)
        assert state_of(t._state) == expected[3] and (store.damage.file, store.damage.line) == (LOG, 4)
        t.append(user("third file"))
        state = state_of(t._state)
    assert (path / "log-000002.jsonl").read_bytes() == second
    with Store.open(path) as store:
        assert state_of(Transcript(store)._state) == state and store.damage is None
    (path / LOG).write_bytes(first)  # whoever mends the first file gets what the third one says: it is the newest
    with Store.open(path) as store:
        assert state_of(Transcript(store)._state) == state
    (path / LOG).unlink()
    with pytest.raises(StoreError, match="cannot be opened"):
        Store.open(path)


def test_foreign_log_names_are_ignored(path):
    expected = states(path)
    for name in ("log-1.jsonl", "log-000000.jsonl", "log-0000002.jsonl", "log-000002.json", "xlog-000002.jsonl", "log-00000٢.jsonl",
                 "log-9999999999.jsonl"):  # fmt: skip
        (path / name).write_text("x")
    with Store.open(path) as store:
        assert state_of(Transcript(store)._state) == expected[7] and store.damage is None
    (path / "log-999999999.jsonl").write_text("x")
    with Store.open(path) as store:
        t = Transcript(store)
        t.append(user("in memory"))
        assert "no log file can follow" in store.failed and texts(t.surface)[-1] == "in memory"


@pytest.mark.parametrize("what", ["link", "pipe", "folder", "unreadable"])
def test_a_log_that_is_no_file(path, what, tmp_path):
    (path / LOG).rename(tmp_path / "log")
    if what == "link":
        (path / LOG).symlink_to(tmp_path / "log")
    elif what == "pipe":
        os.mkfifo(path / LOG)
    elif what == "folder":
        (path / LOG).mkdir()
    else:
        (path / LOG).touch(mode=0)
        if os.geteuid() == 0:
            pytest.skip("root may read everything")
    with pytest.raises(StoreError, match=f"{LOG}: cannot be read"):
        Store.open(path)


def test_the_reader_stops_at_the_last_good_line(path):
    with open(path / LOG, "ab") as file:
        file.write(b"torn")
    reader = Reader(path / LOG)
    lines = list(reader)
    assert reader.lines == len(lines) == 7 and reader.sum == json.loads(lines_of(path)[6])["sum"]
    assert str(reader.damage) == f"{LOG}, line 8: cut before its end" and reader.damage.cut
    missing = Reader(path / "none")
    assert list(missing) == [] and str(missing.damage) == "none: cannot be read (No such file or directory)"


# ---- systems that refuse -------------------------------------------------------------------------------------------


def goes_on(t, path, reason):
    """After a write was refused: everything works, in memory, and says so."""
    store, seq = t.store, t.seq
    assert not store.persistent and str(path) in store.failed and reason in store.failed
    assert "goes on in memory only" in store.failed and store.failed.isprintable()
    t.append(answer("later"))
    t.hold(Held("user", "held"))
    entry = store.spill.prepare(t.surface[-2:])
    assert entry.locator.startswith("memory:")
    t.replace([checkpoint("sum"), *t.surface[-1:]], spills=[entry])
    assert [line["text"] for line in store.spill.read(entry.locator)] == texts(t.history())[-3:-1]
    assert t.undo() == "compaction" and t.seq == seq + 4
    assert state_of(fold(store.events())) == state_of(t._state)
    fork = t.fork()
    assert fork.surface == t.surface and fork.store.spill.read(entry.locator.replace("memory:", ""))


def test_disk_full(path):
    """Every write that the system refuses half-way: the limit is inside the line."""
    expected, size = states(path), os.path.getsize(path / LOG)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        for room in (0, 1, 50, 100):
            with Store.open(path) as store:
                t = Transcript(store)
                resource.setrlimit(resource.RLIMIT_FSIZE, (size + room, hard))
                t.append(user("lost" * 10))
                assert texts(t.surface)[-1] == "lost" * 10
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
                goes_on(t, path, os.strerror(errno.EFBIG))
            with Store.open(path) as store:
                assert state_of(Transcript(store)._state) == expected[7], "what was saved is there"
                assert (store.damage is not None) == (room > 0)
            for file in sorted(path.glob("log-*"))[1:]:
                file.unlink()
            os.truncate(path / LOG, size)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 kB of its own."""
    (tmp_path / "disk").mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path / "disk")]
    if sys.platform != "linux" or os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    yield tmp_path / "disk"
    subprocess.run(["umount", str(tmp_path / "disk")], check=True)


def test_a_disk_that_is_really_full(small_disk):
    t = talk(Store.create(small_disk / "c"))
    state = state_of(t._state)
    (small_disk / "filler").write_bytes(bytes(40_000))
    big = user("x" * 60_000)
    with pytest.raises(OSError, match="No space left"):
        t.store.spill.prepare([big])
    assert not [name for name in tree(small_disk / "c") if "spill" in name and name.endswith((".tmp", ".jsonl"))]
    assert t.store.persistent, "an archive that failed blocks nothing"
    entry = t.store.spill.prepare(t.surface[:1])
    t.append(big, spills=[entry])
    assert t.surface[-1].text == big.text and "No space left" in t.store.failed
    assert t.store.spill.read(entry.locator)[0]["text"] == "be brief", (
        "its locator stands in the text, so it can be read"
    )
    goes_on(t, small_disk / "c", "No space left")
    t.store.close()
    with Store.open(small_disk / "c") as store:
        assert state_of(Transcript(store)._state) == state and store.damage.cut
        assert store.spill.numbers() == []
    with suppress(OSError), open(small_disk / "more", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    t = talk(Store.create(small_disk / "second"))
    goes_on(t, small_disk / "second", "No space left")
    assert not (small_disk / "second").exists(), "an empty folder is left behind"
    with pytest.raises(StoreError, match="holds no conversation"):
        Store.open(small_disk / "second")
    t.store.close()


def test_a_disk_that_became_read_only(small_disk):
    with Store.create(small_disk / "c") as store:
        state = state_of(talk(store)._state)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    before = contents(small_disk)
    with Store.open(small_disk / "c") as store:
        t = Transcript(store)
        assert state_of(t._state) == state
        with pytest.raises(StoreBusy):
            Store.open(small_disk / "c")
        goes_on(t, small_disk / "c", "Read-only file system")
    t = talk(Store.create(small_disk / "new"))
    goes_on(t, small_disk / "new", "Read-only file system")
    t.store.close()
    assert contents(small_disk) == before and conversations.verify(small_disk / "c") == []


@contextmanager
def as_nobody():
    """Root may write anywhere, so it becomes somebody else for a while."""
    if os.geteuid():
        yield
        return
    os.setegid(65534), os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0), os.setegid(0)


def test_a_folder_that_may_not_be_written():
    with tempfile.TemporaryDirectory() as folder:  # pytest's own belongs to its user only
        path = Path(folder, "c")
        os.chmod(folder, 0o755)
        with Store.create(path) as store:
            state = state_of(talk(store)._state)
        os.chmod(path, 0o555), os.chmod(path / LOG, 0o444), os.chmod(path / "lock", 0o444)
        os.chmod(folder, 0o555)
        before = contents(Path(folder))
        with as_nobody():
            with Store.open(path) as store:
                t = Transcript(store)
                assert state_of(t._state) == state
                goes_on(t, path, "Permission denied")
                with pytest.raises(StoreBusy):
                    Store.open(path)
            t = talk(Store.create(Path(folder, "new")))
            goes_on(t, Path(folder, "new"), "Permission denied")
            with pytest.raises(PermissionError):
                conversations.delete(path)
        assert contents(Path(folder)) == before
        os.chmod(folder, 0o700), os.chmod(path, 0o700)


def test_a_file_where_the_folder_should_be(tmp_path):
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "c"):
        t = talk(Store.create(path))
        goes_on(t, path, "Not a directory" if path.name == "file" else "exists")
        t.store.close()
    assert (tmp_path / "file").read_text() == "mine" and tree(tmp_path) == ["file"]


def test_a_line_that_is_too_long_is_not_half_written(path, monkeypatch):
    monkeypatch.setattr("ds4.store.MAX_LINE", 2000)
    before = contents(path)
    with Store.open(path) as store:
        t = Transcript(store)
        t.append(user("x" * 3000))
        goes_on(t, path, "larger than a line of the log may be")
    assert contents(path) == before


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_every_failing_call(path, tmp_path, monkeypatch, call):
    """Each k-th write or fsync fails: nothing is raised, memory goes on, and what is on disk is the state before or
    after the event."""
    real, calls = getattr(os, call), 0

    def failing(*args):
        nonlocal calls
        calls += 1
        if calls == k:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*args)

    for k in range(1, 30):
        target, calls = tmp_path / f"c{k}", 0
        monkeypatch.setattr(os, call, failing)
        t = Transcript(Store.create(target))
        seen = [state_of(t._state)]
        for text in ("a", "b", "c"):
            t.append(user(text))
            seen.append(state_of(t._state))
        monkeypatch.undo()
        assert texts(t.surface) == ["a", "b", "c"] and state_of(fold(t.store.events())) == seen[-1]
        failed = t.store.failed
        t.store.close()
        if Store.exists(target):
            with Store.open(target) as store:
                found = state_of(Transcript(store)._state)
                assert found in seen and (failed is not None) == (calls >= k)
        else:
            assert failed is not None and not target.exists(), "an empty folder is left behind"
        if calls < k:
            break
    assert k > 4


# ---- one process at a time -----------------------------------------------------------------------------------------

HOLDER = """
import sys
from ds4.store import Store
store = Store.open(sys.argv[1])
print("open", flush=True)
sys.stdin.read()
"""


def test_two_at_once(path):
    store = Store.open(path)
    with pytest.raises(StoreBusy, match=f"in use by process {os.getpid()}: close it there first"):
        Store.open(path)
    with pytest.raises(StoreBusy):
        Store.create(path)
    with pytest.raises(StoreBusy):
        conversations.delete(path)
    assert in_use(path) and state_of(conversations.read(path).state) == state_of(Transcript(store)._state)
    store.close()
    assert not in_use(path)
    Store.open(path).close()


def test_the_lock_dies_with_its_process(path):
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "open\n"
        with pytest.raises(StoreBusy, match=f"process {holder.pid}"):
            Store.open(path)
        assert in_use(path) and [one.in_use for one in conversations.conversations(path.parent)] == [True]
        holder.kill()
        holder.wait()
        with Store.open(path) as store:
            assert store.persistent


def test_a_forked_child_does_not_write(path):
    """os.fork: the conversation stays the parent's; the child goes on in memory, and its end unlocks nothing."""
    store = Store.open(path)
    t = Transcript(store)
    t.append(user("both"))
    child = os.fork()
    if not child:
        code = 1
        try:
            t.append(user("child"))
            code = 0 if "forked from" in store.failed and texts(t.surface)[-1] == "child" else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with pytest.raises(StoreBusy):
        Store.open(path)
    t.append(user("parent"))
    store.close()
    with Store.open(path) as store:
        assert texts(Transcript(store).surface)[-2:] == ["both", "parent"]


@pytest.mark.parametrize("what", ["link", "folder", "pipe"])
def test_a_lock_that_is_no_file(path, tmp_path, what):
    (path / "lock").unlink()
    (tmp_path / "mine").write_text("mine")
    if what == "link":
        (path / "lock").symlink_to(tmp_path / "mine")
    elif what == "folder":
        (path / "lock").mkdir()
    else:
        os.mkfifo(path / "lock")
    with Store.open(path) as store:
        assert len(Transcript(store).surface) == 4
        assert store.failed is not None
    assert (tmp_path / "mine").read_text() == "mine"
    assert not in_use(Path(path))
