"""Killed at every write of a turn that compacts itself: the conversation that is opened again is as it was after one of
its events, its files are those that it speaks of, and it goes on with the bits of a fresh session.

A process of its own forks a child for every step; the child works until, before its k-th call that changes a file, or
with half of a write done, it kills itself. Run as a script this file is that process.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from compacting import chat_on, fill, folder_of, same_bits, sync, whole_surface
from test_store_crash import arm, forked

import ds4
from ds4 import conversations
from ds4.agent.chat import Chat
from ds4.log import referred, scan
from ds4.store import Store

HERE = Path(__file__).parent
KIND = "window"


def engine_at(folder: Path) -> ds4.Engine:
    return ds4.Engine(folder_of("plain", folder), threads=1, pool_tokens=16384)


def prepare(folder: Path) -> None:
    """A conversation that is nearly full, with its snapshot."""
    with engine_at(folder) as engine, chat_on(engine, store=folder / "first") as chat:
        fill(chat)
        chat.save()


def life(chat: Chat) -> Iterator[None]:
    """A turn that has to compact first (append, hold, bracket, spill, commit), a compaction that is asked for, a
    snapshot."""
    yield
    list(chat.send("and what now?"))
    yield
    chat.save()
    yield
    chat.append(*(chat.writer.assistant(f"more {i} " * 20) for i in range(2)))
    yield
    list(chat.compact())
    yield


def child(folder: Path, kill_at: int, half: bool, ready: int) -> None:
    write = os.write
    with engine_at(folder) as engine, chat_on(engine, store=folder / "c", max_tokens=3) as chat:
        arm(kill_at, half)
        for _ in life(chat):
            write(ready, b".")
        arm(10**9, False)


def killed(folder: Path, kill_at: int, half: bool) -> tuple[int, bool]:
    """(operations acknowledged, whether it ended by itself) of a child that is killed at a step."""
    shutil.rmtree(folder / "c", ignore_errors=True)
    shutil.copytree(folder / "first", folder / "c")
    return forked(lambda ready: child(folder, kill_at, half, ready))


def check(folder: Path, events: list[dict], least: int, deep: bool) -> int:
    """The conversation is a beginning of the events that it would have had; returns how many of them."""
    path = folder / "c"
    found = scan(path).events
    n = len(found)
    assert [strip(event) for event in found] == events[:n] and n >= least, f"{n} events, {least} were acknowledged"
    with Store.open(path) as store:
        assert store.spill.numbers() == sorted(referred(found))
        for number in store.spill.numbers():
            assert store.spill.read(number)
        assert not list(path.rglob("*.tmp"))
    assert all(damage.cut for damage in conversations.verify(path))
    if deep:
        with engine_at(folder) as engine:
            with chat_on(engine, store=path, max_tokens=3) as chat:
                assert not chat.compactor.busy, "an open bracket of a dead process is ignored"
                whole_surface(chat)
                same_bits(chat)
                list(chat.send(chat.held.text if chat.held is not None else "go on"))
                assert chat.held is None
                list(chat.compact())
                same_bits(chat)
                surface = chat.transcript.surface
            with chat_on(engine, store=path) as chat:
                assert chat.transcript.surface == surface
    return n


def strip(event: dict) -> dict:
    return {name: value for name, value in event.items() if name not in ("sum", "spills")}


def reference(folder: Path) -> tuple[list[dict], list[int]]:
    """The events of a life that nothing ends, and how many there are at each acknowledgement."""
    shutil.copytree(folder / "first", folder / "c")
    with engine_at(folder) as engine, chat_on(engine, store=folder / "c", max_tokens=3) as chat:
        counts = [chat.transcript.seq for _ in life(chat)]
    return [strip(event) for event in scan(folder / "c").events], counts


def sweep(step: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        in_child(lambda: prepare(folder))
        where = folder / "reference"
        in_child(lambda: dump(where, reference(folder)))
        events, counts = load(where)
        shutil.rmtree(folder / "c")
        found: list[int] = []
        k = random.Random(5).randint(1, step)
        while True:
            half = k % 2 == 0
            done, ended = killed(folder, k, half)
            if ended and half:  # the call is no write, or there is none
                done, ended = killed(folder, k, False)
            least = counts[done - 1] if done else counts[0]
            in_child(lambda: dump(where, (check(folder, events, least, deep=k % 3 == 0), 0)))  # noqa: B023
            found.append(load(where)[0])
            if ended:
                assert done == len(counts)
                break
            k += step
        print(k, len(set(found)), len(events), max(found))


def in_child(work) -> None:
    """Runs something that makes an engine in a process of its own: this one goes on forking."""
    assert forked(lambda ready: work()) == (0, True)


def dump(path: Path, value) -> None:
    import json

    path.write_text(json.dumps(value))


def load(path: Path):
    import json

    return json.loads(path.read_text())


def kill_snapshots() -> None:
    """A process that saves again and again is killed at any time: the snapshot is whole, of one of its states."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        in_child(lambda: prepare(folder))
        evaluated = []
        for i in range(6):
            shutil.rmtree(folder / "c", ignore_errors=True)
            shutil.copytree(folder / "first", folder / "c")
            acknowledged, ready = os.pipe()
            pid = os.fork()
            if not pid:
                os.close(acknowledged)
                with engine_at(folder) as engine, chat_on(engine, store=folder / "c", max_tokens=3) as chat:
                    list(chat.compact())
                    os.write(ready, b".")
                    while True:
                        chat.save()
            os.close(ready)
            os.read(acknowledged, 1)
            time.sleep(0.003 * i)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(acknowledged)
            in_child(lambda: dump(folder / "found", reopened(folder)))
            evaluated.append(load(folder / "found"))
        print(*evaluated)


def reopened(folder: Path) -> int:
    """How many tokens an opened conversation evaluates."""
    with engine_at(folder) as engine, chat_on(engine, store=folder / "c") as chat:
        assert chat.snapshot_refused is None
        assert any(node.kind == "checkpoint" for node in chat.transcript.surface)
        evaluated = sync(chat)[1]
        same_bits(chat)
        return evaluated


def run(*what: str) -> list[str]:
    path = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, __file__, *what], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.split()


@pytest.mark.nosanitize
@pytest.mark.parametrize("step", [13, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_every_step(step):
    """L54, L57, L66: append, hold, the bracket, spill and commit, the answer, a second compaction."""
    steps, states, events, most = map(int, run("sweep", str(step)))
    assert most == events and steps > 30 and states >= (2 if step > 1 else 8)


@pytest.mark.slow
@pytest.mark.nosanitize
def test_killed_while_it_saves():
    assert len(run("snapshots")) == 6


if __name__ == "__main__":
    if sys.argv[1] == "sweep":
        sweep(int(sys.argv[2]))
    else:
        kill_snapshots()
