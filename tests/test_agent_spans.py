"""Span compaction (spec/span.md) end to end: through the tool on a live session, and through the calls of a program."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from agents import assert_same_bits, assert_whole, begin, call, engine, kinds, last, nodes, scripted
from oracle import settled

from ds4.agent.chat import Chat
from ds4.chat_formats import ToolCall
from ds4.compaction import spantool
from ds4.compaction.live import common
from ds4.errors import ArgumentError, Busy
from ds4.events import CompactionDone, CompactionFailed, Notice, ToolResult
from ds4.nodes import tokens_of

SUMMARY = "The parser was looked at: all is well."
_bases: dict[str, Chat] = {}


def words(name: str, n: int = 40) -> str:
    return " ".join(f"{name}{i}" for i in range(n))


def say(text: str) -> str:
    """Say it again."""
    return f"said {text}"


def talked(chat: Chat) -> Chat:
    """#1 system, #2 to #6 a finished step with a pair, #7 #8 another one, #9 the newest instruction."""
    write = chat.writer
    calls = [ToolCall("say", {"text": "a"}, "c1"), ToolCall("say", {"text": "b"}, "c2")]
    chat.append(chat._question("Look at the parser. " + words("p")))
    chat.append(write.assistant("I look at it. " + words("q"), calls))
    chat.append(write.result("c1", "result a " + words("r"), 0, 2), write.result("c2", "result b " + words("s"), 1, 2))
    chat.append(write.assistant("The parser is fine. " + words("t")))
    chat.append(chat._question("Look at the lexer. " + words("u")))
    chat.append(write.assistant("The lexer is fine. " + words("v")))
    chat.append(chat._question("Now write the report."))
    assert [node.number for node in chat.transcript.surface] == list(range(1, 10))
    for _ in chat.live.sync():
        pass
    return chat


@pytest.fixture(params=["tags", "window", pytest.param("text", marks=pytest.mark.slow)])
def chat(request) -> Iterator[Chat]:
    """A conversation in memory whose model has the tools; its front is evaluated once for all tests."""
    kind = request.param
    if kind not in _bases:
        _bases[kind] = talked(begin(kind, ctx=6144, span_tools=True, tools=[say]))
    start = settled(engine(kind).ledger())
    with _bases[kind].fork() as made:
        yield made
    assert settled(engine(kind).ledger()) == start, "pages, marks or sessions were left behind"


@pytest.fixture
def plain(request) -> Iterator[Chat]:
    if "tags" not in _bases:
        _bases["tags"] = talked(begin("tags", ctx=6144, span_tools=True, tools=[say]))
    with _bases["tags"].fork() as made:
        yield made


@pytest.fixture(scope="module", autouse=True)
def _close() -> Iterator[None]:
    yield
    for made in _bases.values():
        made.close()
    _bases.clear()


def asks(chat: Chat, *calls: ToolCall, text: str = "") -> list[Any]:
    """The model's next answer has these calls; the events of the turn, which goes on with the newest instruction."""
    chat.force(text, calls)
    scripted(chat)
    return list(chat.send("Go on."))


def compact(end: str, summary: str = SUMMARY, start: str | None = None, **more: Any) -> ToolCall:
    given = {"startAnchor": start, "endAnchor": end, "summary": summary, **more}
    return call("context_compact", **{name: value for name, value in given.items() if value is not None})


def answers(chat: Chat) -> list[str]:
    """The results of the calls that a test has made."""
    return [node.text for node in chat.transcript.surface if node.role == "tool" and node.number > 9]


def count(chat: Chat, text: str) -> int:
    """How often a text stands in what the model sees."""
    return chat.engine.tokenizer.decode(chat.transcript.tokens).count(text)


def logged(chat: Chat, after: int = 0) -> list[str]:
    return [event["type"] for event in chat.transcript.store.events() if event["seq"] > after]


def archive(chat: Chat, locator: str) -> list[int]:
    """The numbers of an archive, whose lines are the nodes as they first came, with every field."""
    lines = chat.transcript.store.spill.read(locator)
    for line in lines:
        node = chat.transcript.find(line["number"])
        assert (line["role"], line["text"], line["ids"]) == (node.role, node.text, list(node.ids))
        assert [c["id"] for c in line.get("calls", ())] == [c.id for c in node.calls]
        assert line.get("result_of", "") == node.result_of
    return [line["number"] for line in lines]


# ---- the surface after it


def test_the_call_becomes_a_note(chat):
    events = asks(chat, compact("The parser is fine"))
    found = [kind for kind in kinds(events) if kind != "compaction_planned"]
    assert found == ["tool_call", "compaction_started", "compaction_done", "tool_result", "text", "turn_end"]
    told = json.loads(next(e for e in events if isinstance(e, ToolResult)).text)
    assert told["ok"] and told["covered"]["first"] == 2 and told["covered"]["last"] == 6
    assert told["checkpoint"] == 1 and told["archived"]["locator"] == "memory:000001"
    assert [role for role, _ in nodes(chat)] == ["checkpoint", "user", "assistant", "user", "user", "note", "assistant"]
    done = next(e for e in events if isinstance(e, CompactionDone))
    note = nodes(chat)[5][1]
    assert note.startswith("context_compact: done. #2 to #6 are now checkpoint 1") and "memory:000001" in note
    assert f"freed {told['covered']['tokens'] - len(chat.transcript.surface[1])} tokens" in note
    assert count(chat, SUMMARY) == 1 and done.after < done.before
    assert archive(chat, "memory:000001") == [2, 3, 4, 5, 6]
    assert [node.number for node in chat.transcript.surface[2:5]] == [7, 8, 9]
    assert_whole(chat)
    assert_same_bits(chat)


@pytest.mark.parametrize("beside", ["text", "call", "both"])
def test_of_a_message_that_holds_more_only_the_argument_goes(chat, beside):
    others = [call("say", text="x")] if beside != "text" else []
    asks(chat, compact("The parser is fine"), *others, text="I tidy up." if beside != "call" else "")
    asked = next(node for node in chat.transcript.surface if node.calls)
    assert asked.calls[0].arguments["summary"] == "stored as checkpoint 1"
    assert len(asked.calls) == 1 + len(others) and asked.text == ("I tidy up." if beside != "call" else "")
    told = json.loads(answers(chat)[0])
    assert told["ok"] and answers(chat)[1:] == ["said x"] * len(others)
    assert count(chat, SUMMARY) == 1 and "note" not in [role for role, _ in nodes(chat)]
    assert_whole(chat)
    assert_same_bits(chat)


def test_rows_before_the_span_are_reused(chat):
    """Everything behind the nearest exact position is evaluated once, and nothing before it."""
    for start, end in (("The parser is fine", "The parser is fine"), ("Look at the lexer", "The lexer is fine")):
        before = list(chat.transcript.tokens)
        index = next(i for i, node in enumerate(chat.transcript.surface) if node.text.startswith(start))
        first = len(tokens_of(chat.transcript.surface[:index]))
        for _ in chat.live.sync():
            pass
        exact = chat.session.nearest_exact
        plan = chat.plan_span(start=start, end=end, summary="Fine.")
        places = {n: exact(n) for n in range(first, first + 20)}
        evaluated = chat.live.evaluated
        chat.compact_span(start=start, end=end, summary="Fine.")
        evaluated = chat.live.evaluated - evaluated
        after = chat.transcript.tokens
        same = common(before, after)
        assert first <= same < first + 20  # a checkpoint may begin as the span did
        assert evaluated == len(after) - places[same] <= len(after) - places[first]
        assert plan["evaluated"] == evaluated and plan["reused"] == places[same] and plan["after"] == len(after)
        if all(stream.reach is None for stream in chat.engine.streams):
            assert places[first] == first
        assert chat.session.tokens == after
        assert_same_bits(chat)


def test_the_event_and_the_log_say_what_was_reused(plain):
    before = list(plain.transcript.tokens)
    events = asks(plain, compact("The parser is fine", start="I look at it"))
    done = next(e for e in events if isinstance(e, CompactionDone))
    info = next(e["info"] for e in plain.transcript.store.events() if e["type"] == "replace")
    assert (info["reused"], info["evaluated"]) == (done.reused, done.evaluated)
    assert done.step == "agent" and done.reused + done.evaluated == done.after
    assert done.reused == common(before, plain.transcript.tokens)


# ---- anchors, edges, pairs


@pytest.mark.parametrize(("start", "end", "first", "last_one"), [
    (None, "Look at the parser", 2, 2),
    (None, "I look at it", 2, 5),  # the results of its calls come along
    ("I look at it", "I look at it", 3, 5),
    ("#5", "The parser", 3, 6),  # a result snaps back to its call
    ("#4", "#4", 3, 5),
    ("  The   parser\u00a0is  ", "The lexer is fine", 6, 8),
    ("#2", "#8", 2, 8),
])  # fmt: skip
def test_what_a_span_covers(plain, start, end, first, last_one):
    asks(plain, compact(end, "Short.", start), text="Tidy.")
    told = json.loads(answers(plain)[-1])
    assert (told["covered"]["first"], told["covered"]["last"]) == (first, last_one)
    assert told["covered"]["nodes"] == last_one - first + 1
    assert archive(plain, told["archived"]["locator"]) == list(range(first, last_one + 1))
    assert_whole(plain)
    assert_same_bits(plain)


@pytest.mark.parametrize(("start", "end", "part"), [
    (None, "", "endAnchor is needed"),
    (None, "Nothing like that", 'The end anchor "Nothing like that" is not the opening'),
    ("the parser, fine", "The lexer", "Closest are these"),
    (None, "Look at the", "AMBIGUOUS: 2 messages"),
    ("The lexer", "The parser", "The start #8 stands after the end #6"),
    (None, "#77", "names no node"),
    ("#1", "The parser", "the system prompt"),
    (None, "Now write the report", "Go on."),
    (None, "Go on.", "includeActive"),
    (None, "#11", "#11"),
])  # fmt: skip
def test_what_is_refused_changes_nothing_and_says_what_would_work(plain, start, end, part):
    before, size = plain.transcript.surface, plain.transcript.seq
    summary = "A summary that would do. " * 4
    if end == "Now write the report":  # the newest message is behind it: that one may go
        asks(plain, compact(end, summary, start))
        assert nodes(plain)[1] == ("user", part)
        return
    events = asks(plain, compact(end, summary, start))
    [text] = answers(plain)
    assert text.startswith("context_compact failed and nothing has changed.") and part in text
    assert plain.transcript.surface[: len(before)] == before
    assert not {"compaction_started", "compaction_failed"} & {e.type for e in events}
    assert not {"compaction_started", "compaction_failed"} & set(logged(plain, size))
    assert not plain.transcript.store.spill.numbers()
    assert_whole(plain)


@pytest.mark.parametrize(("arguments", "part"), [
    ({"endAnchor": "#6"}, "summary is needed"),
    ({"endAnchor": "#6", "summary": 3}, "summary is text"),
    ({"endAnchor": "#6", "summary": "s", "more": 1}, "no argument 'more'"),
    ({"endAnchor": "#6", "summary": "  "}, "The summary is empty"),
    ({"endAnchor": "#6", "summary": "draft 3"}, "no draft 3"),
    ({"endAnchor": "#6", "summary": "stored as checkpoint 1"}, "only marks where"),
])  # fmt: skip
def test_wrong_arguments_are_an_error_result(plain, arguments, part):
    asks(plain, ToolCall("context_compact", arguments))
    assert part in answers(plain)[0]
    assert_whole(plain)


def test_the_newest_instruction_may_be_included_when_it_is_done(plain):
    asks(plain, compact("Go on.", "All done.", includeActive=True))
    assert [role for role, _ in nodes(plain)] == ["checkpoint", "note", "assistant"]
    assert_same_bits(plain)


# ---- the shrink rule and drafts


def test_a_summary_that_is_not_smaller_is_refused_before_anything_is_written(chat):
    seq = chat.transcript.seq
    long = "This is a very long summary. " * 14
    events = asks(chat, compact("#6", long, start="#6"))
    [text] = answers(chat)
    whole = len(chat.transcript.find(6))
    assert f"has {whole}" in text and "it must have fewer" in text and "write it in" in text
    assert '"summary": "draft 1"' in text
    assert "compaction_started" not in kinds(events) and "compaction_started" not in logged(chat, seq)
    assert not chat.transcript.store.spill.numbers()
    assert count(chat, "This is a very long summary") == 0
    asked = next(
        node for node in chat.transcript.surface if node.role == "assistant" and node.calls and node.number > 9
    )
    assert asked.calls[0].arguments["summary"] == "draft 1"
    assert_whole(chat)
    assert_same_bits(chat)


def test_a_draft_can_be_named_by_the_next_try(plain):
    long = "A summary that is too long for that. " * 5
    asks(plain, compact("#6", long, start="#6"))
    assert "draft 1" in answers(plain)[-1]
    events = asks(plain, compact("#6", "draft 1"))
    assert "compaction_done" in kinds(events)
    assert count(plain, long.strip()) == 1
    assert next(node for node in plain.transcript.surface if node.kind == "checkpoint").data["summary"] == long
    assert_same_bits(plain)


def test_a_summary_that_only_begins_like_a_draft_is_kept_as_well(plain):
    asks(plain, compact("Nothing like it", "Draft of a report: " + words("w", 30)))
    assert '"summary": "draft 1"' in answers(plain)[0] and count(plain, "Draft of a report") == 0


def test_the_largest_summary_that_the_error_names_fits(plain):
    with pytest.raises(ArgumentError) as caught:
        plain.compact_span(end="#6", summary="X" * 5000)
    room = caught.value.room
    with pytest.raises(ArgumentError):
        plain.plan_span(end="#6", summary="X" * (room + 1))
    plan = plain.plan_span(end="#6", summary="X" * room)
    assert plan["freed"] == 1
    assert plain.compact_span(end="#6", summary="X" * room)["ok"]
    assert_same_bits(plain)


# ---- the archive


def test_expand_shows_what_a_checkpoint_stands_for(plain):
    plain.compact_span(end="#6", summary=SUMMARY)
    seq = plain.transcript.seq
    asks(plain, call("expand", locator="memory:000001", first=4, last=5))
    assert "#4 tool to call c1\nresult a r0" in answers(plain)[0] and "#5 tool" in answers(plain)[0]
    assert "#6" not in answers(plain)[0].replace("#6 to", "")
    assert not {"replace"} & set(logged(plain, seq))
    for arguments, part in (({"locator": "memory:000009"}, "does not exist"), ({"locator": "/etc/passwd"}, "names no spill"),
                            ({}, "locator"), ({"locator": "memory:000001", "first": 99}, "no message #99")):  # fmt: skip
        asks(plain, call("expand", **arguments))
        assert part in answers(plain)[-1] and answers(plain)[-1].startswith("expand failed")
    assert_whole(plain)


def test_numbers_have_no_gap_and_refused_ones_take_none(plain, monkeypatch):
    plain.compact_span(end="#3", summary="One.")
    with pytest.raises(ArgumentError):
        plain.compact_span(end="#8", start="#8", summary="X" * 3000)
    with pytest.raises(ArgumentError):
        plain.compact_span(end="no such", summary="Two.")
    with monkeypatch.context() as broken:

        def fail(*args: Any, **options: Any) -> Any:
            raise OSError(5, "the disk is gone")

        broken.setattr(plain.engine.__class__, "session", fail)
        broken.setattr(type(plain.session), "fork", fail)
        with pytest.raises((ArgumentError, OSError)):
            plain.compact_span(end="#8", start="#7", summary="Two.")
    told = plain.compact_span(end="#8", start="#7", summary="Two.")
    assert told["archived"]["locator"] == "memory:000002" and plain.transcript.store.spill.numbers() == [1, 2]


def test_an_archive_that_cannot_be_written_is_no_reason_not_to_compact(plain, monkeypatch):
    def fail(*args: Any, **options: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(plain.transcript.store.spill, "prepare", fail)
    events = asks(plain, compact("#6"), text="Tidy.")
    told = json.loads(answers(plain)[-1])
    assert told["ok"] and told["archived"] is None and "No space left" in told["archiveError"]
    assert any("No space left" in e.text for e in events if isinstance(e, Notice))
    assert_same_bits(plain)


def test_without_auto_archive_nothing_is_kept_aside():
    with begin(ctx=4096, auto_archive=False) as chat:
        talked(chat)
        told = chat.compact_span(end="#6", summary=SUMMARY)
        assert told["archived"] is None and "archiveError" not in told
        assert not chat.transcript.store.spill.numbers()


def test_nested_checkpoints_carry_the_paths(chat):
    chat.compact_span(end="#3", summary="One.")
    asks(chat, compact("The lexer is fine", "One and two."), text="Tidy.")
    [outer] = [node for node in chat.transcript.surface if node.kind == "checkpoint"]
    assert "memory:000001" in outer.text and "memory:000002" in outer.text
    assert archive(chat, "memory:000001") == [2, 3, 4, 5]
    inner = chat.transcript.store.spill.read("memory:000002")
    assert [line["kind"] for line in inner if line.get("kind")] == ["checkpoint"]
    assert_same_bits(chat)


# ---- one at a time


def test_two_calls_in_one_message_run_in_order(chat):
    asks(chat, compact("The parser is fine", "One."), compact("The lexer is fine", "Two.", start="Look at the lexer"))
    first, second = (json.loads(text) for text in answers(chat))
    assert (first["covered"]["first"], first["covered"]["last"]) == (2, 6)
    assert (second["covered"]["first"], second["covered"]["last"]) == (7, 8)
    assert [role for role, _ in nodes(chat)][:2] == ["checkpoint", "checkpoint"]
    assert_whole(chat)
    assert_same_bits(chat)


def test_the_second_call_finds_the_surface_of_the_first(plain):
    """What the first has taken is gone; its checkpoint can be named."""
    asks(plain, compact("#6", "One thing."), compact("#6", "Two."), compact("One thing", "3."))
    first, second, third = answers(plain)
    assert json.loads(first)["ok"] and "names no node" in second
    assert json.loads(third)["covered"]["nodes"] == 1 if third.startswith("{") else "must have fewer" in third
    assert_whole(plain)
    assert_same_bits(plain)


def test_the_running_call_and_its_siblings_are_never_inside(plain):
    asks(plain, call("say", text="x"), compact("I do two things", "All.", includeActive=True), text="I do two things.")
    assert answers(plain)[0] == "said x" and answers(plain)[1].startswith("context_compact failed")
    assert_whole(plain)


def test_busy(plain):
    seen = []
    plain.force("", [compact("#6")])
    scripted(plain)
    for event in plain.send("Go on."):
        if event.type == "compaction_started":
            for work in (lambda: plain.compact_span(end="#8", summary="x"), lambda: list(plain.compact()), plain.undo):
                with pytest.raises(Busy):
                    work()
                seen.append(event)
    assert len(seen) == 3 and plain.transcript.checkpoints == 1
    plain.compactor.busy = True
    with pytest.raises(Busy):
        plain.compact_span(end="#8", start="#7", summary="x")
    events = asks(plain, compact("#8", "Two.", start="#7"))
    assert "is running" in answers(plain)[-1] and "compaction_started" not in kinds(events)
    plain.compactor.busy = False
    assert plain.transcript.checkpoints == 1
    assert_whole(plain)
    assert_same_bits(plain)


def test_messages_that_arrive_meanwhile_come_behind_it(plain):
    plain.force("", [compact("#6")])
    scripted(plain)
    for event in plain.send("Go on."):
        if event.type == "compaction_started":
            plain.queue("And this.")
    assert [text for role, text in nodes(plain) if role == "user"][-2:] == ["Go on.", "And this."]
    assert [role for role, _ in nodes(plain)][-4:] == ["user", "note", "user", "assistant"]
    assert_same_bits(plain)


@pytest.mark.parametrize("at", ["compaction_started", "prefill"])
def test_a_cancelled_call_has_a_result_and_nothing_has_changed(plain, at):
    before = plain.transcript.surface
    plain.force("", [compact("#6"), compact("#8", start="#7")])
    started, events = False, []
    for event in plain.send("Go on."):
        events.append(event)
        started = started or event.type == "compaction_started"
        if started and event.type == at:
            plain.cancel()
    assert plain.transcript.surface[: len(before)] == before and not plain.transcript.checkpoints
    assert len(answers(plain)) == 2 and any(isinstance(e, CompactionFailed) for e in events)
    assert "not run" in answers(plain)[1]
    assert not plain.transcript.store.spill.numbers()
    assert_whole(plain)
    assert_same_bits(plain)


# ---- plans, nudges, undo


def test_a_plan_changes_nothing_and_comes_true(chat):
    for options in ({"end": "The parser is fine"}, {"start": "Look at the lexer", "end": "The lexer is fine"}):
        seq, tokens = chat.transcript.seq, list(chat.session.tokens)
        plan = chat.plan_span(summary="Fine.", **options)
        assert chat.plan_span(summary="Fine.", **options) == plan
        assert (chat.transcript.seq, chat.session.tokens) == (seq, tokens)
        assert not set(chat.transcript.store.spill.numbers()) - {1}
        for _ in chat.live.sync():
            pass
        evaluated, before = chat.live.evaluated, chat.live.used
        told = chat.compact_span(summary="Fine.", **options)
        assert plan["evaluated"] == chat.live.evaluated - evaluated
        assert (plan["before"], plan["after"], plan["freed"]) == (before, chat.live.used, before - chat.live.used)
        assert (plan["first"], plan["last"], plan["nodes"], plan["span"]) == tuple(
            told["covered"][k] for k in ("first", "last", "nodes", "tokens")
        )
    with pytest.raises(ArgumentError, match="not the opening"):
        chat.plan_span(end="nothing", summary="x")


def test_a_plan_where_the_session_has_left_the_surface(plain):
    """After an undo the session may hold less; a plan counts what is the same."""
    plain.ask("More.")
    plain.undo()
    plan = plain.plan_span(end="#6", summary="Fine.")
    assert plan["reused"] <= len(plain.session.tokens)


def test_the_nudge_comes_once_for_each_bucket():
    with begin(ctx=6144, span_tools=True, tools=[say], volume_nudge_tokens=600) as chat:
        scripted(chat)
        base, found = chat.live.used, []

        def another(text: str) -> str:
            chat.force("", [call("say", text=text)])
            list(chat.send("go"))
            node = next(node for node in reversed(chat.transcript.surface) if node.role == "tool")
            before = chat.transcript.surface[: chat.transcript.surface.index(node)]
            found.append((sum(len(n) for n in before), node.text.removeprefix(f"said {text}").strip()))
            return found[-1][1]

        while chat.live.used < base + 2000:
            another(words(f"n{len(found)}x", 15))
        told = ""
        for size, text in found:
            due = spantool.nudge(size, base, 600) or ""
            assert text == (due if due != told else "")
            told = due
        assert "grown by 1800 tokens" in told and [text for _, text in found].count("") > 3
        newest = max(i for i, node in enumerate(chat.transcript.surface) if node.human)
        chat.compact_span(end=f"#{chat.transcript.surface[newest - 1].number}", summary="All was said.")
        assert another("short") == ""


def test_undo_takes_a_span_back(chat):
    before = chat.transcript.surface
    chat.compact_span(end="#6", summary=SUMMARY)
    assert chat.undo() == "compaction" and chat.transcript.surface == before
    assert_same_bits(chat)
    told = chat.compact_span(end="#6", summary=SUMMARY)
    assert told["checkpoint"] == 2 and told["archived"]["locator"] == "memory:000002"


def test_a_failed_draft_is_no_step_of_undo(plain):
    plain.compact_span(end="#3", summary="One.")
    before = plain.transcript.surface
    asks(plain, compact("nothing", "A long summary for nothing. " * 4))
    assert "draft 1" in str(last(plain).text) or "draft 1" in answers(plain)[-1]
    assert plain.undo() == "turn" and plain.transcript.surface == before
    assert_same_bits(plain)
