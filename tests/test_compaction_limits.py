"""What keeps compactions within bounds: the breaker, and the pages that are set aside."""

from __future__ import annotations

from typing import Any

import pytest
from compacting import (
    CTX,
    WIDE,
    call,
    chat_on,
    closing,
    compact,
    ended,
    fill,
    kinds,
    leaving_nothing,
    same_bits,
    scripted,
    text_of,
    tool_chat,
    whole_surface,
)

from ds4.errors import PoolFull
from ds4.events import CompactionDone, CompactionPlanned, SummaryDiscarded, TurnEnd
from ds4.sampling import Sampling

# ---- the breaker


def breaking(chat: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every compaction of the chat is refused, as one that would not shrink; the list has one entry per attempt."""
    from ds4.compaction.plan import Refusal

    tried: list[int] = []

    def planner(*args: Any) -> Any:
        tried.append(chat.live.used)
        return lambda locator: Refusal("shrink", "the checkpoint would not be smaller")

    monkeypatch.setattr(chat.compactor, "planner", planner)
    return tried


def test_L19_L27_the_same_failure_is_not_tried_again(tiny_engines, monkeypatch):
    engine = tiny_engines("plain")
    scripted(monkeypatch, engine)
    with leaving_nothing(engine), chat_on(engine) as chat:
        fill(chat, calls=False)
        tried = breaking(chat, monkeypatch)
        start = chat.live.used
        for i in range(12):
            events = list(chat.send(f"q{i}"))
            assert isinstance(events[-1], TurnEnd) and events[-1].finish == "length"
        assert tried[0] == start and len(tried) > 1
        assert all(b - a >= CTX // 50 for a, b in zip(tried, tried[1:], strict=False)), "2 % of ctx between"
        assert chat.transcript.store.spill.numbers() == []
        n = len(tried)
        assert ended(list(chat.compact())) == "failed" and len(tried) == n + 1, "who forces it gets it"
        monkeypatch.undo()
        scripted(monkeypatch, engine)
        compact(chat)
        assert chat.compactor.allowed()


def test_L29_a_failure_inside_of_a_turn_does_not_loop(tiny_engines, monkeypatch):
    engine = tiny_engines("plain")
    scripted(monkeypatch, engine)
    chat, seen = tool_chat(engine, {"a.c": "x"})
    with closing(chat):
        fill(chat, chat.live.limits.soft + 5)
        tried = breaking(chat, monkeypatch)
        for _ in range(4):
            chat.force("Again.", [call("a.c")])
        chat.force("Done.")
        events = list(chat.send("go"))
        assert events[-1].finish == "stop" and len(seen) == 4
        assert len(tried) <= 1 + (chat.live.used - tried[0]) // (WIDE // 50)
        whole_surface(chat)


def test_the_breaker_forgets_when_the_surface_shrinks(tiny_engines, monkeypatch):
    engine = tiny_engines("plain")
    scripted(monkeypatch, engine)
    with leaving_nothing(engine), chat_on(engine) as chat:
        fill(chat, calls=False)
        with monkeypatch.context() as patch:
            breaking(chat, patch)
            assert ended(list(chat.compact())) == "failed"
        assert not chat.compactor.allowed()
        chat.undo()
        assert chat.compactor.allowed()


def test_L20_L23_after_a_compaction_the_trigger_is_off(tiny_engines, monkeypatch):
    """The landing is a tenth of ctx below the trigger, and what is used is measured again."""
    engine = tiny_engines("plain")
    scripted(monkeypatch, engine)
    with leaving_nothing(engine), chat_on(engine) as chat:
        fill(chat)
        done = compact(chat)
        assert done.after == chat.live.used == len(chat.transcript.tokens) <= chat.live.limits.landing
        assert "compaction_started" not in kinds(list(chat.send("hello")))


# ---- pools


def test_a_full_pool_while_generating_is_a_trigger(tiny_engines, monkeypatch):
    """PoolFull is a trigger: cut, compaction in the pages that were set aside, and the task goes on."""
    engine = tiny_engines("plain", pool_tokens=4096)
    scripted(monkeypatch, engine)
    sampling = Sampling(mask=lambda sampled: range(20, 100))
    with leaving_nothing(engine), chat_on(engine, max_tokens=200, sampling=sampling) as chat:
        fill(chat, 950, calls=False)
        eaters: list[Any] = []
        events = []
        for event in chat.send("write"):
            events.append(event)
            if len(eaters) < 1 and event.type == "text":
                eaters.append(eat(engine))
        assert "compaction_done" in kinds(events), kinds(events)
        assert events[-1].finish in ("length", "stop")
        for session in eaters:
            session.close()
        whole_surface(chat)
        same_bits(chat)


def eat(engine: Any) -> Any:
    """A session that takes all that is free of a pool."""
    session = engine.session(4096)
    try:
        while session.pos < 4096 - 64:
            session.eval([7] * 64)
    except PoolFull:
        pass
    return session


@pytest.mark.parametrize("kind", ["plain", "window"])
def test_another_session_cannot_make_a_compaction_impossible(tiny_engines, monkeypatch, kind):
    """The pages of the summary and of the rebuild are set aside."""
    engine = tiny_engines(kind, pool_tokens=6144)
    scripted(monkeypatch, engine)
    with leaving_nothing(engine), chat_on(engine) as chat:
        fill(chat, calls=False)
        chat.live.secure(64)
        with eat(engine):
            with pytest.raises(PoolFull), engine.session(64) as other:
                other.eval([1] * 60)
            done = compact(chat)
            assert done.step in ("model", "ledger")
            if kind == "plain":
                assert done.step == "model"
        same_bits(chat)


def test_while_it_works_nobody_takes_the_pages(tiny_engines, monkeypatch):
    """Between its events others may take all that is free: the rebuild has its pages from its start on."""
    engine = tiny_engines("plain", pool_tokens=6144)
    scripted(monkeypatch, engine)
    with leaving_nothing(engine), chat_on(engine) as chat:
        fill(chat)
        chat.live.secure(64)
        eaters, rebuilding, last = [], False, None
        for last in chat.compact():
            rebuilding = rebuilding or isinstance(last, CompactionPlanned)
            if not rebuilding or last.type == "prefill":
                eaters.append(eat(engine))
        assert isinstance(last, CompactionDone)
        for session in eaters:
            session.close()
        same_bits(chat)


def test_a_pool_without_room_for_a_summary_gives_the_ledger(tiny_engines, monkeypatch):
    """What the session lacks cannot be evaluated any more: the checkpoint is made without the model."""
    engine = tiny_engines("plain", pool_tokens=6144)
    scripted(monkeypatch, engine)
    with leaving_nothing(engine), chat_on(engine) as chat:
        fill(chat, calls=False)
        chat.live.secure(1)
        chat.session.reserve(0)
        chat.append(chat._question(text_of(3, 40)), chat.writer.assistant(text_of(4, 60)))
        with eat(engine):
            events = list(chat.compact())
            assert isinstance(events[-1], CompactionDone) and events[-1].step == "ledger"
            assert any(isinstance(e, SummaryDiscarded) and "pool" in e.reason for e in events)
        same_bits(chat)
