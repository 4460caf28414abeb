"""A compaction that is cut short at any place: the conversation is as it was, with nothing to evaluate again, or, behind
the commit, as after; and the next try works."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from compacting import (
    KINDS,
    Stand,
    chat_on,
    checkpoint,
    compact,
    ended,
    fill,
    leaving_nothing,
    run,
    same_bits,
    scripted,
    sync,
    whole_surface,
)
from oracle import NEEDS_TEST_BUILD, TEST_BUILD

import ds4
from ds4.agent.chat import Chat
from ds4.compaction import transaction
from ds4.engine import Session
from ds4.errors import Ds4Error
from ds4.events import CompactionDone, CompactionFailed, CompactionStarted, Prefill, Summary
from ds4.store import Store
from ds4.transcript import Held

slow = [pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind in ("stride", "q8_0")]
every_kind = pytest.mark.parametrize("kind", [*(kind for kind in KINDS if kind not in ("stride", "q8_0")), *slow])
injected = pytest.mark.skipif(not TEST_BUILD, reason=NEEDS_TEST_BUILD)
PENDING = Held("user", "and what now?")


@contextmanager
def full(engine: ds4.Engine, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Iterator[tuple[Chat, Stand]]:
    """A conversation that has to be compacted, with a message that waits."""
    scripted(monkeypatch, engine)
    with leaving_nothing(engine), chat_on(engine, **options) as chat:
        fill(chat)
        chat.transcript.hold(PENDING)
        yield chat, Stand(chat)


def done_at_last(chat: Chat) -> None:
    """The same compaction, tried again, works; the pending text is still there."""
    compact(chat)
    whole_surface(chat)
    same_bits(chat)
    assert chat.held == PENDING


def after_or_before(chat: Chat, stand: Stand) -> str:
    """Whether the conversation has changed; both are whole."""
    if chat.transcript.surface == stand.surface:
        stand.check(chat)
        return "before"
    assert chat.held == PENDING and any(node.kind == "checkpoint" for node in chat.transcript.surface)
    chat.session.check()
    assert sync(chat)[1] == 0
    same_bits(chat)
    return "after"


def back(chat: Chat, stand: Stand) -> None:
    """Undoes a compaction that went through, so that the sweep can go on."""
    if chat.transcript.surface != stand.surface:
        assert chat.undo() == "compaction"
        sync(chat)
        stand.check(chat)


# ---- at every event


@every_kind
@pytest.mark.parametrize("how", ["cancel", "close", "throw"])
def test_at_every_event(tiny_engines, monkeypatch, kind, how):
    """Each k-th event: every token of the summary, every piece of the rebuild, the plan, the end."""
    with full(tiny_engines(kind), monkeypatch) as (chat, stand):
        types: list[str] = []
        for k in range(1, 100):
            events, reached = run(chat.compact(), k, how, chat.cancel)
            if not reached:
                break
            types.append(events[k - 1].type)
            found = after_or_before(chat, stand)
            over = types[-1] == "compaction_done"
            assert found == ("after" if over else "before"), f"{types[-1]}, event {k}"
            if how == "cancel" and not over:
                assert isinstance(events[-1], CompactionFailed) and ended(events) == "failed"
            back(chat, stand)
        assert {"compaction_started", "summary", "prefill", "compaction_planned", "compaction_done"} <= set(types)
        back(chat, stand)
        done_at_last(chat)


@every_kind
def test_from_another_thread(tiny_engines, monkeypatch, kind):
    """`cancel` while the core computes: inside the k-th call of it, from a thread of its own."""
    with full(tiny_engines(kind), monkeypatch) as (chat, stand):
        for name in ("eval", "sync"):
            real, calls = getattr(Session, name), 0
            for k in range(1, 60):
                seen = 0

                def call(session: Session, *args: Any, **options: Any) -> Any:
                    nonlocal seen
                    seen += 1
                    if seen == k:  # noqa: B023
                        other = threading.Thread(target=chat.cancel)
                        other.start()
                        other.join()
                    return real(session, *args, **options)  # noqa: B023

                with monkeypatch.context() as patch:
                    patch.setattr(Session, name, call)
                    *_, last = chat.compact()
                if seen < k:
                    break
                calls += 1
                assert isinstance(last, CompactionFailed)
                stand.check(chat)
            assert calls >= 2
            back(chat, stand)
        done_at_last(chat)


@every_kind
@pytest.mark.parametrize("name", ["eval", "sync"])
@pytest.mark.parametrize("behind", [False, True])
def test_ctrl_c_in_every_call_of_the_core(tiny_engines, monkeypatch, kind, name, behind):
    """KeyboardInterrupt out of the k-th call that evaluates: before it began, or when it had ended."""
    with full(tiny_engines(kind), monkeypatch) as (chat, stand):
        real, calls = getattr(Session, name), 0
        for k in range(1, 60):
            seen = 0

            def call(session: Session, *args: Any, **options: Any) -> Any:
                nonlocal seen
                seen += 1
                if seen != k:  # noqa: B023
                    return real(session, *args, **options)
                if behind:
                    real(session, *args, **options)
                raise KeyboardInterrupt

            with monkeypatch.context() as patch:
                patch.setattr(Session, name, call)
                try:
                    list(chat.compact())
                except KeyboardInterrupt:
                    calls += 1
            if seen < k:
                break
            stand.check(chat)
        assert calls >= 2
        back(chat, stand)
        done_at_last(chat)


# ---- at every line


OURS = ("transaction.py", "live.py", "whole.py", "summary.py", "transcript.py", "spill.py", "interrupts.py")


def at_line(k: int, work: Callable[[], Any]) -> bool:
    """Ctrl-C before the k-th line of our own code; whether there were so many."""
    seen = 0

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal seen
        if not frame.f_code.co_filename.endswith(OURS):
            return trace if event == "call" else None
        if event == "line":
            seen += 1
            if seen == k:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return trace

    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return seen >= k


@pytest.mark.parametrize("kind", ["plain", pytest.param("window", marks=pytest.mark.slow)])
def test_ctrl_c_at_every_line(tiny_engines, monkeypatch, kind):
    """A real SIGINT before a line that runs between the start and the end: some of all, each one around the commit."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    found: dict[int, str] = {}

    def state(k: int) -> str:
        if k not in found:
            with chat.fork() as other:
                at_line(k, lambda: list(other.compact()))
                found[k] = after_or_before(other, stand)
        return found[k]

    try:
        with full(tiny_engines(kind), monkeypatch) as (chat, stand):
            first, last = 1, 1
            while state(last) == "before":
                first, last = last, 2 * last
            for k in range(1, first, max(1, first // 15)):
                assert state(k) == "before"
            while last - first > 1:
                middle = (first + last) // 2
                first, last = (middle, last) if state(middle) == "before" else (first, middle)
            for k in range(last - 20, last + 20):
                assert state(k) == ("before" if k < last else "after")
            done_at_last(chat)
    finally:
        signal.signal(signal.SIGINT, handler)


# ---- failures


@injected
@every_kind
@pytest.mark.parametrize("fault", ["alloc", "kernel"])
def test_the_engine_fails_at_every_place(tiny_engines, monkeypatch, kind, fault):
    engine = tiny_engines(kind)
    with full(engine, monkeypatch) as (chat, stand):
        k, failed = 1, 0
        while k < 40_000:
            engine.fault(fault, k)
            *_, last = chat.compact()
            hit = engine.fault(fault, 0) >= k
            if isinstance(last, CompactionFailed):
                assert hit
                failed += 1
                stand.check(chat)
            else:
                assert isinstance(last, CompactionDone)
                assert after_or_before(chat, stand) == "after"
                back(chat, stand)
                if not hit:
                    break
            k += 1 + k // (12 if fault == "alloc" else 5)
        assert failed > 2
        done_at_last(chat)


@injected
def test_a_device_that_fails_costs_an_evaluation_and_nothing_else(tiny_engines, monkeypatch):
    """POISONED: only `sync` brings the session back, from nothing."""
    engine = tiny_engines("plain")
    with full(engine, monkeypatch) as (chat, stand):
        for k in (1, 3, 40, 120, 400, 900):
            engine.fault("device", k)
            *_, last = chat.compact()
            engine.fault("device", 0)
            if isinstance(last, CompactionFailed):
                stand.check(chat, evaluated=None)
            else:
                back(chat, stand)
        done_at_last(chat)


@pytest.mark.parametrize("name", ["open", "write", "fsync", "link", "mkdir"])
def test_the_disk_refuses_at_every_call(tiny_engines, monkeypatch, tmp_path, name):
    """The k-th call of the system for log and spill is refused: the conversation goes on, in memory if need be."""
    engine = tiny_engines("plain")
    real, hits = getattr(os, name), 0
    for k in range(1, 12):
        with full(engine, monkeypatch, store=tmp_path / f"{name}{k}") as (chat, stand):
            seen = 0

            def call(*args: Any, **options: Any) -> Any:
                nonlocal seen
                seen += 1
                if seen == k:  # noqa: B023
                    raise OSError(errno.ENOSPC, "no space left on device")
                return real(*args, **options)

            with monkeypatch.context() as patch:
                patch.setattr(os, name, call)
                events = list(chat.compact())
            hits += seen >= k
            assert ended(events) == "done"
            assert after_or_before(chat, stand) == "after"
            store = chat.transcript.store
            told = any(event.type == "notice" for event in events)
            assert told == bool(store.failed or not checkpoint(chat).data["spills"])
            kept = [(place, store.spill.read(place)) for place in checkpoint(chat).data["spills"]]
        with Store.open(tmp_path / f"{name}{k}") as store:  # what had no name yet gets it now
            for place, nodes in kept if not told else ():
                assert store.spill.read(place) == nodes
        if seen < k:
            break
    assert hits


def test_what_notes_raise_comes_out_and_leaves_nothing(tiny_engines, monkeypatch, tmp_path):
    def notes() -> list[str]:
        raise RuntimeError("no")

    with full(tiny_engines("plain"), monkeypatch, store=tmp_path / "c", notes=notes) as (chat, stand):
        with pytest.raises(RuntimeError):
            list(chat.compact())
        stand.check(chat)
        assert not list(tmp_path.rglob("*.tmp"))
        chat.compactor.notes = list
        done_at_last(chat)
    assert [path.name for path in tmp_path.rglob("0*.jsonl")] == ["000001.jsonl"]


def test_a_chat_that_is_closed_inside_of_a_compaction(tiny_engines, monkeypatch):
    engine = tiny_engines("plain")
    scripted(monkeypatch, engine)
    with leaving_nothing(engine):
        for at in (CompactionStarted, Summary, Prefill):
            chat = chat_on(engine)
            fill(chat)
            events = chat.compact()
            for event in events:
                if isinstance(event, at):
                    break
            chat.close()
            try:
                events.close()
            except Ds4Error:
                pass


# ---- the slot and the turn around it


@pytest.mark.parametrize("how", ["cancel", "close", "throw"])
def test_a_message_waits_when_its_compaction_is_cut(tiny_engines, monkeypatch, how):
    """L59: whatever ends the compaction before a turn, the text is in the slot, and then in the conversation once."""
    engine = tiny_engines("plain")
    scripted(monkeypatch, engine)
    with leaving_nothing(engine), chat_on(engine) as chat:
        fill(chat)
        stand = Stand(chat)
        stand.held = PENDING
        k = 0
        while True:
            k += 1
            types = [e.type for e in run(chat.send(PENDING.text), k, how, chat.cancel)[0]]
            if chat.transcript.surface != stand.surface:
                break
            stand.check(chat)
            if how == "cancel":
                assert types[-1] == "turn_end"
            assert "text" not in types
        assert types[k - 1] == "compaction_done" and k > 20
        assert chat.held == PENDING, "the compaction was over, and the user stopped before the message came in"
        list(chat.send(PENDING.text))
        assert chat.held is None
        assert [n.text for n in chat.transcript.surface if n.human].count(PENDING.text) == 1
        same_bits(chat)


def test_an_interrupt_behind_the_commit_keeps_it(tiny_engines, monkeypatch):
    """The pages of the old context are gone, the new one is whole."""
    with full(tiny_engines("window"), monkeypatch) as (chat, stand):
        real = transaction.Compactor._commit

        def commit(self: Any, *args: Any) -> Any:
            real(self, *args)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(transaction.Compactor, "_commit", commit)
            with pytest.raises(KeyboardInterrupt):
                list(chat.compact())
        assert after_or_before(chat, stand) == "after"
        back(chat, stand)
        done_at_last(chat)


def test_nothing_is_left_in_a_folder_by_what_failed(tiny_engines, monkeypatch, tmp_path: Path):
    """L27: each failed attempt would otherwise leave an archive file."""
    with full(tiny_engines("plain"), monkeypatch, store=tmp_path / "c") as (chat, stand):
        k = 0
        while True:
            k += 1
            if run(chat.compact(), k, "close", chat.cancel)[0][-1].type == "compaction_done":
                break
            assert not list((tmp_path / "c").rglob("*.tmp")) and not list((tmp_path / "c" / "spill").rglob("*.jsonl"))
        assert k > 15 and len(list((tmp_path / "c" / "spill").rglob("*.jsonl"))) == 1
        back(chat, stand)
        done_at_last(chat)
