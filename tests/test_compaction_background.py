"""The background pass: prepared while the model is idle, paused by the user, swapped in at the trigger, gone without a
trace when it cannot be used."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
from compacting import (
    POLICY,
    Stand,
    chat_on,
    checkpoint,
    compact,
    every_kind,
    fill,
    leaving_nothing,
    prefix,
    same_bits,
    scripted,
    sync,
    text_of,
    whole_surface,
)

from ds4.agent.chat import Chat
from ds4.compaction import summary as summary_module
from ds4.engine import Session
from ds4.errors import Ds4Error, PoolFull
from ds4.events import CompactionDone, CompactionFailed, CompactionStarted, Prefill, Summary

BACKGROUND = replace(POLICY, background=True)


def chat_with(engine: Any, **options: Any) -> Chat:
    return chat_on(engine, **{"policy": BACKGROUND, **options})


def prepared(chat: Chat, tokens: int = 900) -> None:
    """A conversation above the pre-trigger whose compaction is prepared."""
    fill(chat, tokens)
    chat.background.idle()
    assert chat.background.wait(60), chat.background.error


@every_kind
def test_the_swap_appends_what_came_since(tiny_engines, monkeypatch, kind):
    """Before the trigger the summary and the rebuild are done; at the trigger only the new turns are evaluated, and the
    bits are those of a compaction on the spot."""
    engine = tiny_engines(kind)
    scripted(monkeypatch, engine)
    with leaving_nothing(engine), chat_with(engine) as chat:
        fill(chat, 900)
        base = chat.transcript.surface
        with chat.fork() as other:
            other.live.policy = POLICY
            whole = compact(other)
            expected = other.transcript.surface
            chat.background.idle()
            assert chat.background.wait(60)
            same_bits(other)
        chat.append(chat._question(text_of(8, 10)), chat.writer.assistant(text_of(9, 10)))
        since = len(chat.transcript.tokens) - sum(map(len, base))
        sync(chat)
        before = chat.live.evaluated
        *events, done = chat.compact()
        assert isinstance(done, CompactionDone)
        assert not any(isinstance(e, Summary) for e in events)
        swap = chat.live.evaluated - before
        assert swap == since, "only what came since"
        assert swap < whole.evaluated
        assert done.evaluated == whole.evaluated + since and done.after == whole.after + since
        assert done.pause <= done.seconds
        surface = chat.transcript.surface
        assert [n.ids for n in surface[: len(expected)]] == [n.ids for n in expected]
        whole_surface(chat)
        same_bits(chat)
        assert chat.background._work is None


def test_what_comes_later_is_appended_when_the_model_is_idle_again(tiny_engines, monkeypatch):
    engine = tiny_engines("plain")
    scripted(monkeypatch, engine)
    with leaving_nothing(engine), chat_with(engine) as chat:
        prepared(chat)
        chat.append(chat._question(text_of(8, 10)), chat.writer.assistant(text_of(9, 10)))
        sync(chat)
        chat.background.idle()
        assert chat.background.wait(60)
        before = chat.live.evaluated
        compact(chat)
        assert chat.live.evaluated == before
        same_bits(chat)


def test_a_turn_at_the_soft_trigger_uses_it(tiny_engines, monkeypatch):
    engine = tiny_engines("plain")
    scripted(monkeypatch, engine)
    with leaving_nothing(engine), chat_with(engine) as chat:
        prepared(chat, 950)
        list(chat.send(text_of(5, 14)))
        chat.background.wait(60)
        assert chat.live.limits.soft_fires(chat.live.used)
        before = chat.live.evaluated
        events = list(chat.send("and now?"))
        assert [e.type for e in events if e.type.startswith("compaction")] == [
            "compaction_started", "compaction_planned", "compaction_done"
        ]  # fmt: skip
        assert not any(isinstance(e, Summary) for e in events)
        assert chat.live.evaluated - before < 250
        assert [n.text for n in chat.transcript.surface if n.human][-1] == "and now?"
        same_bits(chat)


@every_kind
def test_a_new_turn_pauses_it_and_it_goes_on(tiny_engines, monkeypatch, kind):
    """The user goes first at the next op, whatever the pass is doing; nothing that it has done is done again."""
    engine = tiny_engines(kind)
    scripted(monkeypatch, engine)
    real = {name: getattr(Session, name) for name in ("eval", "sync")}
    gate, reached = threading.Event(), threading.Event()
    state = {"at": 0, "calls": 0}

    def call(name: str) -> Any:
        def stand_in(session: Session, *args: Any, **options: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                state["calls"] += 1
                if state["calls"] == state["at"]:
                    reached.set()
                    gate.wait(30)
            return real[name](session, *args, **options)

        return stand_in

    for name in real:
        monkeypatch.setattr(Session, name, call(name))
    with leaving_nothing(engine), chat_with(engine) as chat:
        fill(chat, 900)
        paused = 0
        for at in (1, 2, 4, 5, 8):
            state.update(at=at, calls=0)
            gate.clear()
            reached.clear()
            chat.background.idle()
            while not reached.is_set() and chat.background._thread is not None and chat.background._thread.is_alive():
                reached.wait(0.01)
            if reached.is_set():
                opened = threading.Timer(0.02, gate.set)
                opened.start()
                chat.background.pause()
                opened.join()
                paused += 1
                assert not chat.background.ready and chat.live.working is None
                assert chat.session.tokens == chat.transcript.tokens
                chat.session.check()
            chat.background.pause()
        assert paused >= 2
        state["at"] = 0
        list(chat.send("a turn between"))
        same_bits(chat)
        assert chat.background.wait(60), chat.background.error
        compact(chat)
        whole_surface(chat)
        same_bits(chat)


def test_what_is_half_done_is_finished_at_the_trigger(tiny_engines, monkeypatch):
    engine = tiny_engines("window")
    scripted(monkeypatch, engine)
    with leaving_nothing(engine), chat_with(engine) as chat:
        fill(chat, 900)
        half(chat, monkeypatch)
        events = list(chat.compact())
        assert isinstance(events[0], CompactionStarted) and isinstance(events[-1], CompactionDone)
        assert any(isinstance(e, Prefill) for e in events)
        same_bits(chat)


def half(chat: Chat, monkeypatch: pytest.MonkeyPatch, tokens: int = 5) -> None:
    """The pass is paused in the middle of its summary."""
    real, n = summary_module.sample, 0

    def sample(*args: Any) -> Any:
        nonlocal n
        n += 1
        if n == tokens:
            chat.background._work.stop()
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(summary_module, "sample", sample)
        chat.background.idle()
        chat.background._thread.join()
        chat.background.pause()
    assert chat.background._work is not None and not chat.background.ready
    assert chat.background._work.summary.sampled >= tokens - 1


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_a_cancel_while_it_is_finished(tiny_engines, monkeypatch, how):
    """In the foreground it is a compaction like any other: nothing has changed, nothing is evaluated again."""
    engine = tiny_engines("window")
    scripted(monkeypatch, engine)
    with leaving_nothing(engine), chat_with(engine) as chat:
        fill(chat, 900)
        stand = Stand(chat)
        for k in range(1, 60):
            half(chat, monkeypatch)
            events, seen = chat.compact(), []
            for event in events:
                seen.append(event)
                if len(seen) == k:
                    chat.cancel() if how == "cancel" else events.close()
            over = isinstance(seen[k - 1], CompactionDone) if len(seen) >= k else True
            if over:
                break
            if how == "cancel":
                assert isinstance(seen[-1], CompactionFailed)
            chat.background.pause()
            chat.background._give_up()
            stand.check(chat)
        assert k > 8
        same_bits(chat)


@pytest.mark.parametrize("change", ["undo", "span", "rewind"])
def test_a_change_inside_of_the_base_discards_it(tiny_engines, monkeypatch, change):
    engine = tiny_engines("plain")
    scripted(monkeypatch, engine)
    with leaving_nothing(engine), chat_with(engine) as chat:
        seq = 0
        fill(chat, 800)
        seq = chat.transcript.seq
        chat.append(chat._question(text_of(3, 10)))
        chat.append(chat.writer.assistant(text_of(4, 10)))
        chat.append(chat._question("and?"), chat.writer.assistant("so."))
        sync(chat)
        chat.background.idle()
        assert chat.background.wait(60)
        if change == "undo":
            chat.undo()
        elif change == "rewind":
            chat.transcript.rewind(seq)
        else:
            human = [n for n in chat.transcript.surface if n.human]
            chat.compact_span(start=f"#{human[1].number}", end=f"#{human[2].number}", summary="Read two.")
        chat.background.pause()
        work = chat.background.take()
        assert work is None or work.base == chat.transcript.surface
        if work is not None:
            work.discard()
        done = compact(chat)
        assert done.step == "model"
        same_bits(chat)


def test_too_much_has_come_since(tiny_engines, monkeypatch):
    """The prepared context with all that came would be too near to the trigger: it is made on the spot."""
    engine = tiny_engines("plain")
    scripted(monkeypatch, engine)
    with leaving_nothing(engine), chat_with(engine) as chat:
        prepared(chat)
        for i in range(5):
            chat.append(chat._question(text_of(i, 12)), chat.writer.assistant(text_of(i, 12)))
        done = compact(chat)
        assert done.after <= chat.live.limits.landing and done.step in ("model", "ledger")
        same_bits(chat)


def test_below_its_trigger_and_with_something_in_the_slot_it_does_not_begin(tiny_engines, monkeypatch):
    engine = tiny_engines("plain")
    scripted(monkeypatch, engine)
    with leaving_nothing(engine), chat_with(engine) as chat:
        fill(chat, chat.live.limits.pre - 1)
        chat.background.idle()
        assert chat.background._work is None
        from ds4.transcript import Held

        fill(chat, 900)
        chat.transcript.hold(Held("user", "x"))
        chat.background.idle()
        assert chat.background._work is None
    with leaving_nothing(engine), chat_on(engine) as chat:
        fill(chat)
        chat.background.idle()
        assert chat.background._work is None, "it has to be asked for"


def test_without_room_it_does_not_start(tiny_engines, monkeypatch):
    engine = tiny_engines("plain", pool_tokens=2048)
    scripted(monkeypatch, engine)
    with leaving_nothing(engine), chat_with(engine) as chat:
        fill(chat, 900)
        with engine.session() as other:
            try:
                while True:
                    other.eval([5] * 64)
            except PoolFull:
                pass
            stand = Stand(chat)
            chat.background.idle()
            assert not chat.background.wait(60)
            assert isinstance(chat.background.error, PoolFull) and chat.background._work is None
            chat.background.idle()
            assert chat.background._thread is None, "the same failure is not tried again"
        stand.check(chat)
        compact(chat)
        same_bits(chat)


@pytest.mark.parametrize("tokens", [None, 2, 6])
def test_closing_leaves_nothing(tiny_engines, monkeypatch, tmp_path, tokens):
    """In the middle of the summary, or with everything prepared; no file either."""
    engine = tiny_engines("window")
    scripted(monkeypatch, engine)
    with leaving_nothing(engine):
        chat = chat_with(engine, store=tmp_path / "c")
        fill(chat, 900)
        if tokens is None:
            chat.background.idle()
            assert chat.background.wait(60)
        else:
            half(chat, monkeypatch, tokens)
            chat.background.idle()
        chat.close()
        assert chat.background._thread is None
        assert not list(tmp_path.rglob("*.tmp")) and not list((tmp_path / "c").rglob("0*.jsonl"))
        chat.background.idle()
        assert chat.background._thread is None
        chat.close()


def test_a_turn_that_is_closed_after_the_chat_starts_nothing(tiny_engines, monkeypatch):
    engine = tiny_engines("plain")
    scripted(monkeypatch, engine)
    with leaving_nothing(engine):
        chat = chat_with(engine)
        fill(chat, 900)
        events = chat.send("hello")
        next(events)
        chat.close()
        try:
            events.close()
        except Ds4Error:
            pass  # what it had said was in the session only
        assert chat.background._thread is None


def test_a_failure_in_it_is_no_failure_of_the_conversation(tiny_engines, monkeypatch):
    engine = tiny_engines("plain")
    scripted(monkeypatch, engine)

    def notes() -> list[str]:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("no")
        return []

    with leaving_nothing(engine), chat_with(engine, notes=notes) as chat:
        fill(chat, 900)
        chat.background.idle()
        assert not chat.background.wait(60)
        assert isinstance(chat.background.error, RuntimeError)
        compact(chat)
        same_bits(chat)


def test_notes_are_those_of_the_swap(tiny_engines, monkeypatch):
    """A job that has ended since is not said to be running."""
    engine, jobs = tiny_engines("window"), ["job 1 runs"]
    scripted(monkeypatch, engine)
    with leaving_nothing(engine), chat_with(engine, notes=lambda: list(jobs)) as chat:
        prepared(chat)
        jobs[:] = ["job 2 runs"]
        chat.append(chat._question("more"), chat.writer.assistant("yes"))
        sync(chat)
        compact(chat)
        assert [n.text for n in chat.transcript.surface if n.kind == "note"] == ["job 2 runs"]
        whole_surface(chat)
        same_bits(chat)


def test_two_in_a_row_and_undo(tiny_engines, monkeypatch):
    engine = tiny_engines("plain")
    scripted(monkeypatch, engine)
    with leaving_nothing(engine), chat_with(engine) as chat:
        for n in (1, 2):
            prepared(chat, 900)
            compact(chat)
            assert f"checkpoint {n}:" in checkpoint(chat).text
        assert chat.undo() == "compaction"
        same_bits(chat)
        assert prefix(chat.session.tokens, chat.transcript.tokens) == chat.live.used
