"""Faults of other engines (spec/faults.md, section L) that no other file of tests names, on live conversations."""

from __future__ import annotations

import json

import pytest
from agents import chatting
from compacting import POLICY, chat_on, drain, fill, leaving_nothing, same_bits, scripted, sync, text_of, whole_surface

from ds4.chat_formats import ToolCall
from ds4.compaction.plan import Refusal
from ds4.compaction.whole import plan_whole
from ds4.errors import ArgumentError
from ds4.events import CompactionDone, SummaryDiscarded, ToolResult


def done(events) -> CompactionDone:
    return next(event for event in events if isinstance(event, CompactionDone))


def test_L17_sizes_are_the_models_own_tokens(tiny_engines, monkeypatch):
    """A span of CJK text, which costs a tokenizer of bytes three tokens a character: what is reported is what the
    session really holds."""
    engine = tiny_engines("plain")
    scripted(monkeypatch, engine)
    with leaving_nothing(engine), chat_on(engine) as chat:
        chat.append(chat._question("漢字" * 60), chat.writer.assistant("好" * 90), chat._question("下?"))
        chat.append(chat.writer.assistant("是"))
        fill(chat, 1000)
        sync(chat)
        before = chat.session.pos
        figures = done(chat.compact())
        assert figures.before == before == 1000
        assert figures.after == chat.live.used == len(chat.transcript.tokens) == chat.session.pos
        same_bits(chat)


def test_L32_L50_a_context_without_room_for_a_summary_drops_nothing_unseen(tiny_engines, monkeypatch):
    """The summariser reads the live context, so its input is never over a limit of its own; without room for an answer
    the checkpoint is the ledger, and what it stands for is in the spill to the last node."""
    engine = tiny_engines("plain")
    scripted(monkeypatch, engine)
    with leaving_nothing(engine), chat_on(engine, max_tokens=None) as chat:
        fill(chat, 2040)
        replaced = chat.transcript.surface
        events = list(chat.compact())
        assert done(events).step == "ledger"
        gone = [node.number for node in replaced if node.role != "system"]
        kept = {node.number for node in chat.transcript.surface}
        archived = {line["number"] for line in chat.transcript.store.spill.read(1)}
        assert archived | kept >= set(gone)
        same_bits(chat)


def test_L36_a_failed_summary_never_ends_in_a_deadlock(tiny_engines, monkeypatch):
    """No wall clock decides anything; when the model's text will not do, the ledger does, and the turn goes on."""
    engine = tiny_engines("plain")
    scripted(monkeypatch, engine, " ")
    with leaving_nothing(engine), chat_on(engine) as chat:
        fill(chat, 1400)
        events = list(chat.send("And now?"))
        assert any(isinstance(event, SummaryDiscarded) for event in events)
        assert done(events).step == "ledger" and events[-1].finish in ("stop", "length")
        assert any(node.text == "And now?" for node in chat.transcript.surface)
        same_bits(chat)


def test_L38_a_target_out_of_reach_ends_with_one_refusal(tiny_engines):
    """1000 small nodes and a system prompt that alone is above the landing: one answer, not a sweep."""
    engine = tiny_engines("plain")
    with leaving_nothing(engine), chat_on(engine, policy=None, ctx=None) as chat:
        nodes = [chat._question("q")]
        for i in range(500):
            nodes += [chat.writer.assistant(f"a{i}"), chat.writer.user(f"u{i}", first=False)]
        surface = [*chat.transcript.surface, *nodes]
        limits = POLICY.limits(2048, 200)
        tight = type(limits)(**{**limits.__dict__, "soft": 230})
        plan = plan_whole(surface, chat.writer, tight, "text", number=1)
        assert isinstance(plan, Refusal) and plan.kind == "landing"


def test_L71_of_two_equal_messages_each_can_be_named(tiny_engines):
    engine = tiny_engines("plain")
    with leaving_nothing(engine), chat_on(engine) as chat:
        chat.append(chat._question("go on"), chat.writer.assistant(text_of(1, 60)), chat._question("go on"))
        twin, answer, _ = chat.transcript.surface[1:]
        chat.append(chat.writer.assistant(text_of(2, 30)))
        with pytest.raises(ArgumentError, match=r"(?s)AMBIGUOUS.*#2.*#4"):
            chat.compact_span(start="go on", end=answer.text, summary="Both said.")
        result = chat.compact_span(start=f"#{twin.number}", end=f"#{answer.number}", summary="Both said.")
        assert result["covered"]["first"] == twin.number
        same_bits(chat)


def test_L74_a_message_of_the_same_turn_can_be_named():
    """The agent names its own words of a moment ago, in the turn in which it wrote them."""
    with chatting(tools=[lambda_read()], span_tools=True) as chat:
        chat.force("I read it: " + text_of(3, 20), [ToolCall("read", {"path": "a"})])
        anchors = {"startAnchor": "I read it:", "endAnchor": "I read it:"}
        chat.force("", [ToolCall("context_compact", {**anchors, "summary": "Read."})])
        chat.force("Done.")
        events = list(chat.send("Read a."))
        assert "failed" not in [event for event in events if isinstance(event, ToolResult)][-1].text
        assert done(events).step == "agent"
        whole_surface(chat)
        same_bits(chat)


def test_L79_a_result_names_what_was_really_covered(tiny_engines):
    """The end snaps to the result of the call that it holds."""
    engine = tiny_engines("plain")
    with leaving_nothing(engine), chat_on(engine, tools=[lambda_read()], ctx=4096) as chat:
        chat.force("Looking at it now, " + text_of(4, 20), [ToolCall("read", {"path": "a"})])
        chat.force("It is short.")
        drain(chat.send("Read a."))
        drain(chat.send("Thanks."))
        call = next(node for node in chat.transcript.surface if node.calls)
        answer = next(node for node in chat.transcript.surface if node.role == "tool")
        result = chat.compact_span(start="Looking", end="Looking", summary="Read a.")
        assert (result["covered"]["first"], result["covered"]["last"]) == (call.number, answer.number)
        same_bits(chat)


def test_L80_an_unknown_anchor_is_answered_with_candidates(tiny_engines):
    engine = tiny_engines("plain")
    with leaving_nothing(engine), chat_on(engine) as chat:
        chat.append(chat._question("Please read the second chapter"), chat.writer.assistant("The chapter is read."))
        with pytest.raises(ArgumentError, match=r"(?s)second chapters.*#2.*Please read"):
            chat.compact_span(end="second chapters", summary="x")


def test_L88_a_snapshot_of_another_surface_is_only_an_accelerator(tiny_engines, monkeypatch, tmp_path):
    """The same conversation saved, then changed: the old snapshot is a prefix at best."""
    engine = tiny_engines("plain")
    scripted(monkeypatch, engine)
    with leaving_nothing(engine):
        with chat_on(engine, store=tmp_path / "c") as chat:
            fill(chat, 1000)
            chat.save()
            done(chat.compact())
            expected = list(chat.transcript.tokens)
        with chat_on(engine, store=tmp_path / "c") as chat:
            assert chat.snapshot_refused is None and chat.session.pos == 1000
            assert chat.transcript.tokens == expected
            same_bits(chat)


def lambda_read():
    def read(path: str) -> str:
        """Read a file."""
        return json.dumps({"path": path, "text": text_of(5, 10)})

    return read
