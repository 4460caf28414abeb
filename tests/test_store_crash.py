"""Killed at every write boundary: a conversation that is opened again is as it was before the operation, or as after.

A process of its own forks a child for every step: the child works on a conversation until, before its k-th call that
changes a file, or with half of a write done, it kills itself; then the conversation is opened and compared. Run as a
script this file is that process.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from test_transcript import answer, checkpoint, state_of, talk, user

from ds4 import conversations
from ds4.log import referred
from ds4.nodes import Node
from ds4.spill import Spill
from ds4.store import Store
from ds4.transcript import Held, Transcript

CALLS = ("write", "pwrite", "fsync", "link", "unlink", "rename", "mkdir", "rmdir", "chmod", "ftruncate", "open")
HERE = Path(__file__).parent
WRITE = os.write


def arm(kill_at: int, half: bool) -> None:
    """From now on the kill_at-th changing call is the last one of this process."""
    seen = 0

    def armed(name, real):
        def call(*args, **options):
            nonlocal seen
            if name != "open" or args[1] & os.O_CREAT:
                seen += 1
                if seen == kill_at:
                    if half and name == "write":
                        real(args[0], bytes(args[1])[: len(args[1]) // 2])
                    if not half or name == "write":
                        os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)

        return call

    for name in CALLS:
        setattr(os, name, armed(name, getattr(os, name)))


# ---- what the children do: each `yield` acknowledges an operation --------------------------------------------------


def life(path):
    """A new conversation: appends, the slot, two spilled compactions, a discarded one, an undo."""
    t = Transcript(Store.create(path / "c", {"model": "m"}))
    yield t
    t.append(Node("system", (1, 2), "be brief"))
    yield t
    t.append(user("one"), answer("first"))
    yield t
    t.hold(Held("user", "two"))
    yield t
    for text in ("sum", "more"):
        t.record("compaction_started", reason=text)
        yield t
        archive, preview = (t.store.spill.prepare(t.surface[1:], reason=text) for _ in range(2))
        t.replace([t.surface[0], checkpoint(text), answer(preview.locator[-12:])], spills=[archive, preview])
        yield t
    t.append(user("two"), release=True)
    yield t
    t.store.spill.prepare(t.surface).discard()
    t.undo()
    yield t
    t.undo()
    yield t
    t.store.close()


def torn(path):
    """A log that ends in half a line."""
    t = talk(Store.create(path / "c", {"model": "m"}))
    t.store.close()
    with open(path / "c" / "log-000001.jsonl", "ab") as file:
        file.write(b'{"seq":7,"type":"app')


def unfinished(path):
    """Killed behind the event, before the first of two spill files had its name."""
    t = talk(Store.create(path / "c", {"model": "m"}))
    entries = [t.store.spill.prepare(t.surface[i:]) for i in (1, 2)]
    t.store.append({
        "seq": 7, "type": "replace", "surface": [1], "info": {},
        "spills": [{"number": entry.number, "sum": entry.sum} for entry in entries],
    })  # fmt: skip
    t.store.close()
    Spill(t.store.spill.folder).prepare(t.surface)  # and another one, that nothing refers to


def resume(path):
    """A conversation that is opened again, twice, and goes on."""
    for text in ("three", "four"):
        t = Transcript(Store.open(path / "c"))
        yield t
        t.append(user(text))
        yield t
        t.append(answer(text))
        yield t
        t.store.close()


SCENARIOS = {"life": (lambda path: None, life), "torn": (torn, resume), "unfinished": (unfinished, resume)}


def expected(name):
    """The state behind every operation."""
    prepare, work = SCENARIOS[name]
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        return [state_of(t._state) for t in work(Path(folder))]


def check(path, states, done):
    """The conversation is one of two, its files are those that it speaks of, and it can go on."""
    around = [state for state in (states[done - 1] if done else None, states[min(done, len(states) - 1)]) if state]
    if not Store.exists(path):
        assert done == 0, "an acknowledged conversation is gone"
        assert conversations.conversations(path.parent) == []
        Store.create(path).close()
        return "none"
    with Store.open(path) as store:
        t = Transcript(store)
        found = state_of(t._state)
        assert found in around, f"{t.seq} events after {done} operations"
        assert store.failed is None and (store.damage is None or store.damage.cut)
        assert store.spill.numbers() == sorted(referred(list(store.events()))), "a spill file too many, or too few"
        for number in store.spill.numbers():
            store.spill.read(number)
        left = [file for file in path.rglob("*") if file.name.endswith(".tmp")]
        assert not left, left
        t.append(user("goes on"))
        after = state_of(t._state)
    with Store.open(path) as store:
        assert state_of(Transcript(store)._state) == after and store.damage is None
    assert all(damage.cut for damage in conversations.verify(path))
    return "before" if found == around[0] and around[0] != around[-1] else "after"


def child(path, work, kill_at, half, ready):
    arm(kill_at, half)
    for _ in work(path):
        WRITE(ready, b".")


def forked(work):
    """Runs `work(ready)` in a child that may be killed: how many bytes it wrote to `ready`, one for each operation, and
    whether it ended by itself."""
    acknowledged, ready = os.pipe()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.close(acknowledged)
            work(ready)
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(ready)
    done = 0
    while data := os.read(acknowledged, 1000):
        done += len(data)
    os.close(acknowledged)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, -signal.SIGKILL), f"the child ended with {code}"
    return done, code == 0


def killed(folder, work, kill_at, half):
    """Runs `work` in a child until it is killed; as `forked`."""
    return forked(lambda ready: child(folder, work, kill_at, half, ready))


def sweep(name):
    """Every step, whole and half, of a scenario; prints how many there were and what was found."""
    prepare, work = SCENARIOS[name]
    states = expected(name)
    steps = 0
    for half in (False, True):
        found, k = [], 0
        while not half or k < steps:
            k += 1
            with tempfile.TemporaryDirectory() as folder:
                prepare(Path(folder))
                done, ended = killed(Path(folder), work, k, half)
                found.append(check(Path(folder, "c"), states, done))
            if ended and not half:
                assert done == len(states)
                steps = k
                break
        print(name, "half" if half else "whole", steps, *sorted(set(found)))


def forks(path):
    t = talk(Store.create(path / "c"))
    for i in (1, 2):
        t.replace(t.surface, spills=[t.store.spill.prepare(t.surface[i:])])
    t.store.close()


def fork(path):
    t = Transcript(Store.open(path / "c"))
    yield t
    child = t.fork(path / "f")
    yield t
    child.store.close(), t.store.close()


def sweep_fork():
    """A fork is there, with all its events and spill files, or it is not, and can be made again."""
    with tempfile.TemporaryDirectory() as folder:
        forks(Path(folder))
        parent, _ = (state_of(t._state) for t in fork(Path(folder)))
        with Store.open(Path(folder, "f")) as store:
            whole = {**state_of(Transcript(store)._state), "origins": None}  # the parent's id is another in each run
    found, steps = [], 0
    for half in (False, True):
        k = 0
        while not half or k < steps:
            k += 1
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder)
                forks(path)
                done, ended = killed(path, fork, k, half)
                found.append(Store.exists(path / "f"))
                assert found[-1] or done < 2, "an acknowledged fork is gone"
                if not found[-1]:
                    assert [one.id for one in conversations.conversations(path)] == ["c"]
                    with Store.open(path / "c") as store:
                        Transcript(store).fork(path / "f").store.close()
                with Store.open(path / "f") as store, Store.open(path / "c") as other:
                    assert {**state_of(Transcript(store)._state), "origins": None} == whole
                    assert state_of(Transcript(other)._state) == parent
                    assert store.spill.numbers() == [1, 2]
                    assert [store.spill.read(i) for i in (1, 2)] == [other.spill.read(i) for i in (1, 2)]
                assert conversations.verify(path / "f") == conversations.verify(path / "c") == []
                assert not list(path.rglob("*.tmp"))
            if ended and not half:
                steps = k
                break
    print("fork", "both", len(found), *sorted(map(str, set(found))))


def sweep_delete():
    """A conversation that is being deleted is there, whole, or it is gone from every list."""

    def delete(path):
        conversations.delete(path / "c")
        yield

    found = []
    for k in range(1, 100):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder)
            forks(path)
            shutil.copytree(path / "c", path / "d")
            with Store.open(path / "d") as store:
                state = state_of(Transcript(store)._state)
            done, ended = killed(path, delete, k, False)
            names = [one.id for one in conversations.conversations(path)]
            found.append(names)
            if names != ["d"]:
                assert sorted(names) == ["c", "d"] and not done
                with Store.open(path / "c") as store:
                    assert state_of(Transcript(store)._state) == state
                assert conversations.verify(path / "c") == []
            conversations.delete(path / "d")
            assert not [file for file in path.iterdir() if file.name.startswith(".")], "the next one sweeps up"
            if ended:
                break
    print("delete", "whole", len(found), *sorted({str(len(names)) for names in found}))


def run(what):
    path = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, __file__, what], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.nosanitize
@pytest.mark.parametrize(("name", "steps"), [("life", 60), ("torn", 12), ("unfinished", 15)])
def test_killed_at_every_step(name, steps):
    whole, half = run(name)
    assert int(whole[2]) > steps and whole[3:] in (["after", "before"], ["after", "before", "none"])
    assert half[3:] in (["after", "before"], ["after", "before", "none"])


@pytest.mark.slow
@pytest.mark.nosanitize
def test_killed_while_it_forks():
    [fork] = run("fork")
    assert int(fork[2]) > 30 and fork[3:] == ["False", "True"]


@pytest.mark.slow
@pytest.mark.nosanitize
def test_killed_while_it_deletes():
    [delete] = run("delete")
    assert int(delete[2]) > 8 and delete[3:] == ["1", "2"]


if __name__ == "__main__":
    {"fork": sweep_fork, "delete": sweep_delete}.get(sys.argv[1], lambda: sweep(sys.argv[1]))()
