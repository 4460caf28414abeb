"""The agent loop: whatever the model writes, the tools do and the user presses, every call has its result, and the
session holds exactly the conversation."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from agents import (
    assert_same_bits,
    assert_whole,
    begin,
    call,
    chatting,
    end_of,
    engine,
    kinds,
    last,
    nodes,
    results,
    scripted,
    text_of,
    written,
)
from compacting import scripted as summarised

from ds4 import models
from ds4.agent import turn as turn_module
from ds4.agent.tools import tool
from ds4.chat_formats import Message
from ds4.compaction.policy import CompactionPolicy
from ds4.errors import ArgumentError
from ds4.events import Notice, Prefill, Thinking, ToolCall, ToolResult

POLICY = CompactionPolicy(request="short")


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


def echo(text: str) -> str:
    """Say it again."""
    return f"echo {text}"


def fails(text: str) -> str:
    """Never works."""
    raise ValueError(f"no {text}")


async def later(text: str, seconds: float = 0.0) -> str:
    """Say it later."""
    await asyncio.sleep(seconds)
    return f"later {text}"


TOOLS = [add, echo, fails, later]


@pytest.fixture(params=["tags", "text"])
def kind(request) -> str:
    """Tool calls between tokens, and between tags that are text."""
    return request.param


# ---- whole turns


def test_a_forced_call_runs_and_the_model_goes_on(kind):
    with chatting(kind, tools=TOOLS) as chat:
        chat.force("I look.", [call("add", a=2, b=3)])
        events = list(chat.send("2 + 3?"))
        assert kinds(events)[:4] == ["text", "tool_call", "tool_result", "text"]
        assert text_of(events).startswith("I look.")
        [called] = [e for e in events if isinstance(e, ToolCall)]
        [answer] = [e for e in events if isinstance(e, ToolResult)]
        assert (called.name, called.arguments, answer.text) == ("add", {"a": 2, "b": 3}, "5")
        assert called.id == answer.id == chat.transcript.surface[2].calls[0].id
        assert nodes(chat)[:3] == [("user", "2 + 3?"), ("assistant", "I look."), ("tool", "5")]
        assert_whole(chat)
        assert_same_bits(chat)


def test_results_of_one_message_are_one_turn(kind):
    with chatting(kind, tools=TOOLS) as chat:
        calls = [call("echo", text="a"), call("later", text="b"), call("add", a=1, b=1)]
        chat.force("", calls)
        events = list(chat.send("go"))
        order = [(e.type, e.name if isinstance(e, ToolCall) else e.text) for e in events if e.type.startswith("tool")]
        assert order == [("tool_call", "echo"), ("tool_call", "later"), ("tool_call", "add"),
                         ("tool_result", "echo a"), ("tool_result", "later b"), ("tool_result", "2")]  # fmt: skip
        asked = chat.transcript.surface[2]
        format = chat.format
        assert list(asked.ids) == format.render(Message("assistant", tool_calls=asked.calls), "user")
        ids = [i for node in chat.transcript.surface if node.role == "tool" for i in node.ids]
        assert ids == format.render(Message("tool", ("echo a", "later b", "2")), "assistant")
        assert_same_bits(chat)


def test_what_the_model_samples_is_what_a_forced_answer_is(kind):
    found = []
    for forced in (True, False):
        with chatting(kind, tools=TOOLS, max_tokens=300) as chat:
            if forced:
                chat.force("I look.", [call("echo", text="x")])
            scripted(chat, *() if forced else (written(call("echo", text="x"), before="I look.\n"),))
            found.append((kinds(chat.send("go")), chat.transcript.tokens))
    assert found[0] == found[1]


def test_async_tools_of_one_message_run_at_once_and_answer_in_order():
    started = threading.Barrier(2, timeout=20)

    async def meet(name: str) -> str:
        """Waits for the other."""
        await asyncio.to_thread(started.wait)
        return name

    with chatting(tools=[meet]) as chat:
        chat.force("", [call("meet", name="a"), call("meet", name="b")])
        list(chat.send("go"))
        assert results(chat) == ["a", "b"]
        assert_whole(chat)


def test_a_tool_that_there_is_not_is_answered_with_all_that_there_are():
    with chatting(tools=[TOOLS[0]], span_tools=True) as chat:
        chat.force("", [call("nope")])
        list(chat.send("go"))
        assert results(chat)[0].endswith(f"The tools are: {TOOLS[0].__name__}, context_compact, expand.")


def test_the_registry_is_asked_once(monkeypatch):
    asked, describe = [], models.describe
    monkeypatch.setattr(models, "describe", lambda name: asked.append(name) or describe(name))
    with chatting():
        assert len(asked) == 1


@pytest.mark.parametrize("wanted, part", [
    (call("nothing", a=1), "There is no tool"),
    (call("add", a=1), "add was not run"),
    (call("add", a="x", b=1), "add was not run"),
    (call("fails", text="way"), "fails failed: ValueError: no way"),
])  # fmt: skip
def test_a_call_that_goes_wrong_has_a_result_that_says_so(wanted, part):
    with chatting(tools=TOOLS) as chat:
        chat.force("", [wanted, call("echo", text="still")])
        list(chat.send("go"))
        assert part in results(chat)[0] and results(chat)[1] == "echo still"
        assert_whole(chat)
        assert_same_bits(chat)


def test_a_tool_may_be_called_again_and_again_but_not_for_ever(monkeypatch):
    monkeypatch.setattr(turn_module, "MAX_STEPS", 4)
    with chatting(tools=TOOLS, max_tokens=200) as chat:
        scripted(chat, *[written(call("echo", text=str(i))) for i in range(9)])
        events = list(chat.send("go"))
        assert end_of(events).finish == "length"
        assert "4 times" in next(e.text for e in events if isinstance(e, Notice))
        assert results(chat) == [f"echo {i}" for i in range(4)]
        assert_whole(chat)
        scripted(chat)
        assert chat.ask("and now?") == "end"
        assert_same_bits(chat)


def test_two_tools_of_one_name_are_refused():
    def expand(x: int) -> int:
        return x

    with pytest.raises(ArgumentError, match="expand is a tool of the chat itself"):
        begin(tools=[expand], span_tools=True)


# ---- permission


def test_permission_is_asked_and_a_refused_call_is_not_run():
    ran: list[str] = []

    def erase(path: str) -> str:
        """Erase a file."""
        ran.append(path)
        return "gone"

    asked: list[tuple[str, str]] = []

    def allow(wanted: Any, line: str) -> bool:
        asked.append((wanted.name, line))
        return wanted.arguments["path"] == "b"

    tools = [tool(erase, needs_permission=True, describe=lambda arguments: f"erase {arguments['path']}"), echo]
    with chatting(tools=tools, allow=allow) as chat:
        chat.force("", [call("erase", path="a"), call("echo", text="x"), call("erase", path="b"), call("erase")])
        list(chat.send("go"))
        assert asked == [("erase", "erase a"), ("erase", "erase b")] and ran == ["b"]
        first, second, third, fourth = results(chat)
        assert "does not allow" in first and (second, third) == ("echo x", "gone") and "was not run" in fourth
        assert_whole(chat)
    with chatting(tools=tools) as chat:
        chat.force("", [call("erase", path="a")])
        list(chat.send("go"))
        assert ran == ["b"] and "not run" in results(chat)[0]


# ---- turns that are cut


ONE, TWO = written(call("echo", text="one")), written(call("echo", text="two"))


def ids_of(kind: str, text: str) -> list[int]:
    return engine(kind).tokenizer.encode(text, special=True)


@pytest.mark.parametrize("way", ["max_tokens", "cancel", "close"])
@pytest.mark.parametrize("inside", [11, 12, 30])
def test_a_call_that_is_cut_in_the_middle_never_was(kind, way, inside):
    text = "Let me see. "
    length = len(ids_of(kind, text + ONE + "\n")) + inside if way == "max_tokens" else 500
    with chatting(kind, tools=TOOLS, max_tokens=length) as chat:
        scripted(chat, text + ONE + "\n" + TWO)
        events, stop = [], chat.session.pos
        turn = chat.send("go")
        for event in turn:
            events.append(event)
            if isinstance(event, Prefill):
                stop = event.total + len(ids_of(kind, text)) + inside
            elif way != "max_tokens" and text_of(events) == text and chat.session.pos <= stop:
                chat.cancel() if way == "cancel" else turn.close()
        assert text_of(events) == text + "end" * (way == "max_tokens")
        assert_whole(chat)
        if way == "max_tokens":
            assert results(chat) == ["echo one"] and [c.arguments for c in chat.transcript.surface[2].calls] == [
                {"text": "one"}
            ]
        else:
            assert last(chat).text.strip() == text.strip() and not last(chat).calls and not results(chat)
            assert way == "close" or end_of(events).finish == "cancelled"
        scripted(chat)
        assert chat.ask("go on") == "end"
        assert_whole(chat)
        assert_same_bits(chat)


def test_an_answer_that_is_nothing_but_a_cut_call_leaves_the_question(kind):
    with chatting(kind, tools=TOOLS, max_tokens=15) as chat:
        scripted(chat, ONE)
        events = list(chat.send("go"))
        assert kinds(events) == ["turn_end"] and end_of(events).finish == "length"
        assert nodes(chat) == [("user", "go")]
        chat.max_tokens = 200
        chat.sampling = begin_script(chat)
        list(chat.retry())
        assert results(chat) == ["echo one"]
        assert_same_bits(chat)


def begin_script(chat) -> Any:
    scripted(chat, ONE)
    return chat.sampling


@pytest.mark.parametrize("text", [
    "a <tool_call> is a tag",  # no call at all
    'say {"name": "x"}',
    written(call("echo", text="say <tool_call> twice")),  # a tag inside of an argument
])  # fmt: skip
def test_what_is_no_open_call_is_kept_when_a_turn_is_cut(text):
    with chatting("text", tools=TOOLS) as chat:
        chat.max_tokens = len(ids_of("text", text)) + 3
        scripted(chat, text + " and more and more")
        events = list(chat.send("go"))
        if "echo" in text:
            assert results(chat) == ["echo say <tool_call> twice"]
        elif "<tool_call>" not in text:
            assert text_of(events) == last(chat).text and last(chat).text.startswith(text + " a")
        assert_whole(chat)


@pytest.mark.parametrize("at", ["text", "tool_call"])
def test_a_whole_call_of_a_cancelled_turn_is_not_run(kind, at):
    ran: list[str] = []

    def act(x: str) -> str:
        """Does it."""
        ran.append(x)
        return x

    with chatting(kind, tools=[act], max_tokens=300) as chat:
        scripted(chat, written(call("act", x="1"), call("act", x="2"), before="Doing it."))
        events = []
        for event in chat.send("go"):
            events.append(event)
            if event.type == at:
                if at == "text" and chat.session.pos:
                    continue
                chat.cancel()
        if at == "tool_call":
            assert not ran and end_of(events).finish == "cancelled"
            assert len(results(chat)) == 2 and all("cancelled" in text for text in results(chat))
        assert_whole(chat)


def test_a_whole_call_in_an_answer_that_is_cancelled_is_not_run(kind):
    """The model has written a call, and is cancelled before its answer ends."""
    with chatting(kind, tools=TOOLS, max_tokens=300) as chat:
        at = len(ids_of(kind, ONE)) + 3
        scripted(chat, ONE + " and then some text", press={at: chat.cancel})
        events = list(chat.send("go"))
        assert end_of(events).finish == "cancelled"
        assert results(chat) == ["cancelled by the user: this call was not run"]
        assert_whole(chat)
        assert_same_bits(chat)


class Gate:
    """A tool that says when it runs and waits for the user."""

    def __init__(self) -> None:
        self.running = threading.Event()
        self.ran: list[str] = []

    def wait(self, name: str, cancel: threading.Event) -> str:
        """Waits for the user."""
        self.ran.append(name)
        self.running.set()
        assert cancel.wait(20)
        return f"{name} was stopped"

    async def sleep(self, name: str) -> str:
        """Sleeps."""
        self.ran.append(name)
        await asyncio.sleep(60)
        return name

    def last(self, text: str) -> str:
        """Echoes, behind all that is sync."""
        while len(self.ran) < 1:
            time.sleep(0.001)
        self.running.set()
        return f"echo {text}"


@pytest.mark.parametrize("name", ["wait", "sleep"])
def test_cancel_while_a_tool_runs(name):
    gate = Gate()
    with chatting(tools=[gate.wait, gate.sleep, gate.last, echo]) as chat:
        chat.force("", [call("echo", text="first"), call(name, name="x"), call("last", text="never")])

        def press() -> None:
            assert gate.running.wait(20)
            chat.cancel()

        thread = threading.Thread(target=press)
        thread.start()
        events = list(chat.send("go"))
        thread.join()
        assert end_of(events).finish == "cancelled"
        assert results(chat)[0] == "echo first"
        # what is sync runs while an async one sleeps
        assert results(chat)[2] == ("cancelled by the user" if name == "wait" else "echo never")
        assert results(chat)[1] == ("x was stopped" if name == "wait" else "cancelled by the user")
        assert_whole(chat)
        scripted(chat)
        assert chat.ask("go on") == "end"
        assert_same_bits(chat)


@pytest.mark.parametrize("after", [1, 2])
def test_a_turn_that_is_closed_at_a_result_has_all_that_is_known(after):
    """Closing at a result: it is kept, and the others say that they never came."""
    with chatting(tools=TOOLS) as chat:
        chat.force("", [call("echo", text="a"), call("echo", text="b"), call("echo", text="c")])
        turn, seen = chat.send("go"), 0
        for event in turn:
            seen += isinstance(event, ToolResult)
            if seen == after:
                turn.close()
        known = ["echo a", "echo b", "echo c"][:after]
        assert results(chat)[:after] == known and len(results(chat)) == 3
        assert all("the turn was cut" in text for text in results(chat)[after:])
        assert_whole(chat)
        assert_same_bits(chat)


def test_a_result_that_came_out_of_order_is_kept_when_the_turn_is_closed():
    done = threading.Event()

    async def slow(x: int) -> int:
        """Slow."""
        while not done.is_set():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        return x

    async def quick(x: int) -> int:
        """Quick."""
        done.set()
        return x

    with chatting(tools=[slow, quick]) as chat:
        chat.force("", [call("slow", x=1), call("quick", x=2)])
        turn = chat.send("go")
        for event in turn:
            if isinstance(event, ToolResult):
                turn.close()
        assert results(chat) == ["1", "2"]
        assert_whole(chat)


def test_closed_at_a_call_the_next_message_settles_it():
    with chatting(tools=TOOLS) as chat:
        chat.force("", [call("echo", text="a"), call("echo", text="b")])
        turn = chat.send("go")
        for event in turn:
            if isinstance(event, ToolCall):
                turn.close()
        assert_whole(chat, waiting=True)
        scripted(chat)
        assert chat.ask("go on") == "end"
        assert ["the turn was cut" in text for text in results(chat)] == [True, True]
        assert_whole(chat)
        assert_same_bits(chat)


def test_a_keyboard_interrupt_in_a_tool_passes_through_and_leaves_the_chat_whole():
    def press(x: int) -> int:
        """Ctrl-C."""
        raise KeyboardInterrupt

    with chatting(tools=[press, echo]) as chat:
        chat.force("", [call("echo", text="a"), call("press", x=1), call("echo", text="b")])
        with pytest.raises(KeyboardInterrupt):
            list(chat.send("go"))
        assert results(chat)[0] == "echo a" and len(results(chat)) == 3
        assert_whole(chat)
        assert_same_bits(chat)


def test_cut_at_the_reserve_in_the_middle_of_a_call(kind, monkeypatch):
    """The call goes, the context is compacted, the model is asked to go on."""
    summarised(monkeypatch, engine(kind))
    with chatting(kind, tools=[echo], policy=small(0.6), ctx=2048, max_tokens=None) as chat:
        for i in range(4):
            chat.append(chat._question(f"{i}: " + f"word{i} " * 12), chat.writer.assistant(f"said{i} " * 12))
        room = chat.session.ctx - chat.live.limits.generation - chat.live.used
        scripted(chat, "Now: " + "x" * (room - 100) + written(call("echo", text="y" * 400)), "On it goes.")
        events = list(chat.send("go"))
        found = kinds(events)
        assert found[0] == "text" and found.index("compaction_started") == 1 and "compaction_done" in found
        assert "tool_call" not in found and "<tool_call>" not in text_of(events)
        assert text_of(events).endswith("xOn it goes.") and end_of(events).finish == "stop"
        assert [role for role, _ in nodes(chat)[-2:]] == ["note", "assistant"]
        assert not any("tool_call" in node.text for node in chat.transcript.history() if node.role == "assistant")
        assert_whole(chat)
        assert_same_bits(chat)


def small(soft: float = 0.5) -> CompactionPolicy:
    """A tokenizer of bytes makes every text long."""
    return CompactionPolicy(
        soft_fraction=soft,
        summary_max=64,
        summary_min_room=16,
        tail_fraction=0.05,
        request="short",
        generation_reserve=64,
    )


# ---- what comes in while the model works


def test_queued_messages_come_in_when_the_tools_have_run(kind):
    with chatting(kind, tools=TOOLS) as chat:

        def say(text: str) -> None:
            chat.queue(text)

        chat.force("", [call("echo", text="a")])
        turn = chat.send("go")
        for event in turn:
            if isinstance(event, ToolCall):
                say("and b"), say("and c")
        assert [role for role, _ in nodes(chat)] == ["user", "assistant", "tool", "user", "user", "assistant"]
        assert [text for role, text in nodes(chat) if role == "user"] == ["go", "and b", "and c"]
        assert not chat.queued
        assert_whole(chat)
        assert_same_bits(chat)


def test_a_message_queued_while_the_model_writes_is_answered_in_the_same_turn():
    with chatting(max_tokens=50) as chat:
        scripted(chat, "first answer", "second answer")
        events = []
        for event in chat.send("go"):
            if not any(e.type == "text" for e in events) and event.type == "text":
                chat.queue("more")
            events.append(event)
        assert [text for _, text in nodes(chat)] == ["go", "first answer", "more", "second answer"]
        assert kinds(events).count("turn_end") == 1


def test_a_message_queued_in_a_cancelled_turn_comes_with_the_next():
    with chatting(max_tokens=50) as chat:
        scripted(chat, "first answer", "second", "third")
        for event in chat.send("go"):
            if event.type == "text":
                chat.queue("more") if not chat.queued else None
                chat.cancel()
        assert list(chat.queued) == ["more"]
        scripted(chat, "second", "third")
        list(chat.send("next"))
        assert [text for role, text in nodes(chat) if role == "user"] == ["go", "next", "more"]
        assert not chat.queued


def test_compact_soon_waits_for_the_tools(monkeypatch):
    with chatting(tools=[echo], policy=small(), ctx=4096) as chat:
        for i in range(4):
            chat.append(chat._question(f"{i}: " + f"word{i} " * 12), chat.writer.assistant(f"said{i} " * 12))
        chat.force("", [call("echo", text="a"), call("echo", text="b")])
        events = []
        for event in chat.send("go"):
            events.append(event)
            if isinstance(event, ToolCall):
                chat.compact_soon()
        found = kinds(events)
        assert found.index("compaction_started") > max(i for i, k in enumerate(found) if k == "tool_result")
        assert found[-1] == "turn_end" and not chat.asked
        assert ("user", "go") in nodes(chat)
        assert_whole(chat)
        assert_same_bits(chat)


def test_compact_soon_with_no_tools_comes_when_the_model_stops():
    with chatting(policy=small(), ctx=2048) as chat:
        for i in range(4):
            chat.append(chat._question(f"{i}: " + f"word{i} " * 12), chat.writer.assistant(f"said{i} " * 12))
        found = []
        for event in chat.send("go"):
            if event.type == "text":
                chat.compact_soon()
            found.append(event)
        assert "compaction_started" in kinds(found) and kinds(found)[-1] == "turn_end" and not chat.asked
        assert_same_bits(chat)


# ---- thinking


def test_the_thinking_budget_closes_a_block_once():
    policy = CompactionPolicy(thinking_budget=5, **{k: getattr(small(), k) for k in (
        "soft_fraction", "summary_max", "summary_min_room", "tail_fraction", "request", "generation_reserve")})  # fmt: skip
    with chatting(policy=policy, ctx=2048, max_tokens=40) as chat:
        scripted(chat, "<think>" + "abcdefghijklmnop", "Yes, that is so.")
        events = list(chat.send("go"))
        assert "".join(e.text for e in events if isinstance(e, Thinking)) == "abcde"
        assert text_of(events) == "Yes, that is so." == last(chat).text and last(chat).thinking == "abcde"
        assert_same_bits(chat)


def test_drop_thinking_is_one_event_and_says_what_it_cost():
    with chatting(drop_thinking=True, max_tokens=60) as chat:
        scripted(chat, "<think>a long thought</think>Yes.", "No.")
        list(chat.send("first"))
        whole, seq = len(chat.session.tokens), chat.transcript.seq
        assert chat.transcript.surface[-1].thinking == "a long thought"
        events = list(chat.send("second"))
        dropped = [e for e in chat.transcript.store.events() if e["seq"] > seq]
        assert [e["type"] for e in dropped] == ["replace", "append", "append"] and dropped[0]["info"][
            "reason"
        ] == "thinking"
        assert not any(node.thinking for node in chat.transcript.surface)
        end = end_of(events)
        again = chat.format.render(Message("user", "second")) + chat.format.generation_prefix()
        assert end.reused < whole and end.prompt_tokens - end.reused > len(again)
        assert any(isinstance(e, Prefill) for e in events)
        assert_same_bits(chat)
        chat.undo()
        assert chat.undo() == "turn"


def test_without_thinking_tokens_nothing_is_dropped_and_nothing_logged():
    with chatting("text", drop_thinking=True, max_tokens=60) as chat:
        scripted(chat, "<think>hm</think>Yes.", "No.")
        list(chat.send("first"))
        list(chat.send("second"))
        assert "replace" not in [e["type"] for e in chat.transcript.store.events()]


def test_a_forced_answer_of_a_chat_that_may_not_think():
    with chatting(thinking=False, tools=TOOLS) as chat:
        chat.force("I look.", [call("echo", text="a")])
        list(chat.send("go"))
        assert chat.transcript.surface[2].text == "I look." and results(chat) == ["echo a"]
        assert_same_bits(chat)


def test_a_call_inside_of_thinking_is_a_thought():
    with chatting(tools=TOOLS, max_tokens=300) as chat:
        scripted(chat, f"<think>I could write {ONE} now</think>No.")
        events = list(chat.send("go"))
        assert text_of(events) == "No." and "tool_call" not in kinds(events) and not results(chat)
        chat.max_tokens = 30
        scripted(chat, f"<think>I could write {ONE} now</think>No.")
        list(chat.send("go"))
        assert last(chat).thinking and not last(chat).calls


# ---- what the user sees


@pytest.mark.parametrize("text, shown", [
    (written(call("echo", text="x"), before="Before. "), "Before. "),
    (written(call("echo", text="x"), before="A ", after=" B"), "A B"),
    ("1 < 2 and <b>bold</b>", "1 < 2 and <b>bold</b>"),
    ("a <tool_cal is no tag", "a <tool_cal is no tag"),
    ("the end is <tool_", "the end is <tool_"),
])  # fmt: skip
def test_raw_calls_are_never_shown_and_all_else_is(kind, text, shown):
    with chatting(kind, tools=TOOLS, max_tokens=300) as chat:
        scripted(chat, text)
        events = []
        for event in chat.send("go"):
            if event.type == "tool_result":
                break
            events.append(event)
        assert text_of(events).removesuffix("end") == shown


def test_without_tools_a_tag_is_text(kind):
    with chatting(kind, max_tokens=300) as chat:
        scripted(chat, f"Write {ONE}")
        assert text_of(chat.send("go")) == f"Write {ONE}"
        assert not last(chat).calls


# ---- calls that cannot be read

BROKEN = '<tool_call>\n{"name": "echo", "arguments": {"text": }}\n</tool_call>'


def test_a_call_that_cannot_be_read_is_shown_and_the_model_may_write_it_again(kind):
    with chatting(kind, tools=TOOLS, max_tokens=300) as chat:
        scripted(chat, f"Look: {BROKEN}", ONE, "Good.")
        events = list(chat.send("go"))
        assert text_of(events) == f"Look: {BROKEN}Good."
        assert kinds(events) == ["text", "notice", "tool_call", "tool_result", "text", "turn_end"]
        assert [role for role, _ in nodes(chat)] == ["user", "assistant", "note", "assistant", "tool", "assistant"]
        note = nodes(chat)[2][1]
        assert "Tool call 1 holds no complete JSON object" in note and "was not run" in note
        assert not chat.transcript.surface[3].human
        assert_whole(chat)
        assert_same_bits(chat)


def test_a_model_that_only_writes_broken_calls_is_told_once():
    with chatting(tools=TOOLS, max_tokens=300) as chat:
        scripted(chat, *[BROKEN] * 9)
        events = list(chat.send("go"))
        assert end_of(events).finish == "stop"
        assert [role for role, _ in nodes(chat)] == ["user", "assistant", "note", "assistant"]


def test_a_broken_call_beside_a_good_one():
    with chatting(tools=TOOLS, max_tokens=300) as chat:
        scripted(chat, f"{ONE}\n{BROKEN}", "Good.")
        events = list(chat.send("go"))
        assert kinds(events) == ["text", "tool_call", "tool_result", "notice", "text", "turn_end"]
        assert [role for role, _ in nodes(chat)] == ["user", "assistant", "tool", "note", "assistant"]
        assert_whole(chat)


def test_a_broken_call_that_was_cut_is_no_reason_to_ask():
    with chatting(tools=TOOLS, max_tokens=len(ids_of("tags", BROKEN))) as chat:
        scripted(chat, BROKEN + " more text")
        assert end_of(list(chat.send("go"))).finish == "length"
        assert "note" not in [role for role, _ in nodes(chat)]


def test_llama3_calls_are_bare_json():
    with chatting("llama3", tools=TOOLS, max_tokens=300) as chat:
        scripted(chat, '{"name": "echo", "parameters": {"text": "x"}}', 'As JSON: {"name": "echo"} it is.')
        events = list(chat.send("go"))
        assert results(chat) == ["echo x"] and text_of(events) == 'As JSON: {"name": "echo"} it is.'
        assert_whole(chat)
        assert_same_bits(chat)


# ---- back


def test_undo_and_retry_of_a_turn_with_tools(kind):
    with chatting(kind, tools=TOOLS) as chat:
        before = chat.transcript.surface
        chat.force("", [call("echo", text="a")])
        list(chat.send("go"))
        list(chat.retry(1))
        assert nodes(chat)[0] == ("user", "go") and not results(chat)
        assert_whole(chat)
        assert_same_bits(chat)
        assert chat.undo() == "turn" and chat.transcript.surface == before
        assert_same_bits(chat)


def test_a_fork_in_the_middle_of_a_turn_goes_its_own_way():
    with chatting(tools=TOOLS) as chat:
        chat.force("", [call("echo", text="a")])
        turn = chat.send("go")
        for event in turn:
            if isinstance(event, ToolCall):
                turn.close()
        with chat.fork() as other:
            for each in (chat, other):
                list(each.send("on"))
                assert "the turn was cut" in results(each)[0]
                assert_whole(each)
                assert_same_bits(each)
