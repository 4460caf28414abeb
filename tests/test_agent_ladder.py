"""The ladder of spec/compaction.md section 2: what fits is appended, else the context is compacted, else a preview and
the spill, else an error text, else ContextFull; and nothing of a result is lost at any rung."""

from __future__ import annotations

import dataclasses
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
    nodes,
    results,
    scripted,
)
from compacting import scripted as summarised

from ds4.agent.chat import Chat
from ds4.compaction.policy import CompactionPolicy
from ds4.errors import ContextFull
from ds4.events import CompactionStarted, Notice, ToolResult

CTX = 2048
POLICY = CompactionPolicy(
    soft_fraction=0.6, summary_max=64, summary_min_room=16, tail_fraction=0.05, request="short", generation_reserve=64
)


class Tool:
    """A tool whose result has `over` tokens more than fit when it is called."""

    def __init__(self, over: int = 0) -> None:
        self.over, self.text = over, ""
        self.chat: Chat | None = None

    def load(self) -> str:
        """Load it."""
        assert self.chat is not None
        self.text = letters(room(self.chat, len(self.chat.writer.result("x", "G")) - 1) + self.over)
        return self.text


def letters(n: int) -> str:
    """A text of n tokens in which every place can be told from the others."""
    text = "".join(f"{i:x}." for i in range(n // 2 + 1)).translate(
        str.maketrans("0123456789abcdef", "GHJKLMNPQRSTUVWX")
    )[:n]
    assert len(engine().tokenizer.encode(text)) == n
    return text


def room(chat: Chat, around: int) -> int:
    """The tokens of the largest text that fits, with `around` tokens around it: from the spec's formulas."""
    limits = chat.live.limits
    if limits is None:
        return chat.live.ctx - 1 - len(chat.format.generation_prefix()) - chat.closing - chat.live.used - around
    return chat.live.ctx - 1 - max(limits.tool_result, limits.generation) - chat.live.used - around


def filled(chat: Chat, tokens: int) -> None:
    """Turns in front of what the test is about."""
    while chat.live.used < tokens:
        i = chat.transcript.seq
        chat.append(chat._question(f"{i}: " + f"word{i} " * 12), chat.writer.assistant(f"said{i} " * 12))


def with_tool(over: int, **options: Any) -> tuple[Chat, Tool]:
    tool = Tool(over)
    chat = begin(tools=[tool.load], **{"ctx": CTX, "policy": POLICY, **options})
    tool.chat = chat
    chat.force("", [call("load")])
    return chat, tool


def kept(chat: Chat, text: str) -> list[str]:
    """All places where the whole of a result is: the surface as it is or was, the slot, the spill."""
    found = ["surface" for node in chat.transcript.history() if node.text == text]
    found += ["slot"] if chat.held is not None and chat.held.text == text else []
    spill = chat.transcript.store.spill
    return found + ["spill" for n in spill.numbers() for line in spill.read(n) if line["text"] == text]


def reasons(events: Any) -> list[str]:
    return [event.reason for event in events if isinstance(event, CompactionStarted)]


# ---- results


def test_a_result_fits_at_the_last_token(monkeypatch):
    """But fires the soft trigger: it waits in the slot for the compaction, which would make a preview of it."""
    summarised(monkeypatch, engine())
    chat, tool = with_tool(0)
    with chat:
        filled(chat, 700)
        events = list(chat.send("go"))
        assert reasons(events) == ["the context is nearly full"]
        assert kinds(events)[:3] == ["tool_call", "tool_result", "compaction_started"]
        log = [e["type"] for e in chat.transcript.store.events()]
        assert log[log.index("hold") + 1] == "compaction_started"
        assert results(chat) == [tool.text] and kept(chat, tool.text) == ["surface"] and chat.held is None
        assert len(chat.writer.result("x", tool.text)) > 2 * chat.live.limits.tail
        assert_whole(chat)
        assert_same_bits(chat)


def loading(*sizes: Any, **options: Any) -> tuple[Chat, list[str]]:
    """A chat whose next answer calls a tool once for each size; and the texts that the tool has given. A size is that
    of a result in tokens, or a function that says it when the tool runs."""
    texts: list[str] = []

    def load(which: int) -> str:
        size = sizes[which] if isinstance(sizes[which], int) else sizes[which]()
        texts.append(letters(size - around))
        return texts[-1]

    chat = begin(tools=[load], **{"ctx": CTX, "policy": POLICY, **options})
    around = len(chat.writer.result("x", "G")) - 1
    chat.force("", [call("load", which=i) for i in range(len(sizes))])
    return chat, texts


@pytest.mark.parametrize("short", [1, 0])
def test_the_soft_trigger_counts_the_result_that_comes(monkeypatch, short):
    summarised(monkeypatch, engine())
    chat, texts = loading(lambda: chat.live.limits.soft - short - chat.live.used)
    with chat:
        filled(chat, 700)
        turn, seen = chat.send("go"), []
        for event in turn:
            seen.append(event)
            if event.type == "text":
                turn.close()
        assert reasons(seen) == ([] if short else ["the context is nearly full"])
        assert results(chat) == texts
        assert_whole(chat)
        assert_same_bits(chat)


def test_results_of_one_message_are_no_preview_before_the_model_has_seen_them(monkeypatch):
    """The first one is far larger than what a compaction keeps whole, and the second one fires the soft trigger."""
    summarised(monkeypatch, engine())
    chat, texts = loading(500, 300, 20)
    with chat:
        filled(chat, 400)
        events = list(chat.send("go"))
        assert chat.live.limits.soft < chat.live.used
        assert results(chat) == texts and not reasons(events)
        assert_whole(chat)
        scripted(chat)
        assert reasons(chat.send("and now?")) == ["the context is nearly full"]  # the model has seen them
        assert_whole(chat)
        assert_same_bits(chat)


def test_small_results_stay_whole_in_a_compaction_for_the_next_one(monkeypatch):
    summarised(monkeypatch, engine())
    chat, texts = loading(25, 400, policy=dataclasses.replace(POLICY, tail_fraction=0.06))
    with chat:
        filled(chat, 700)
        events = list(chat.send("go"))
        assert reasons(events) == ["the context is nearly full"]
        assert results(chat) == texts
        assert_whole(chat)
        assert_same_bits(chat)


@pytest.mark.parametrize("why", ["asked", "queued"])
def test_nothing_makes_a_preview_of_a_result_that_the_model_has_not_seen(monkeypatch, why):
    """Not a compaction that was asked for while the tool ran, nor one that a queued message needs."""
    summarised(monkeypatch, engine())

    def size() -> int:
        chat.compact_soon() if why == "asked" else chat.queue("and this")
        return chat.live.limits.soft - chat.live.used - 1

    chat, texts = loading(size)
    with chat:
        filled(chat, 500)
        seen: list[Any] = []
        for event in chat.send("go"):
            seen.append(event)
            if event.type == "text" and "text" not in kinds(seen[:-1]):
                assert results(chat) == texts and not reasons(seen)
        assert reasons(seen) == (["asked for"] if why == "asked" else [])
        assert ("user", "and this") in nodes(chat) or why == "asked"
        assert_whole(chat)
        assert_same_bits(chat)


def test_a_result_that_is_cancelled_out_of_a_soft_compaction_waits(monkeypatch):
    summarised(monkeypatch, engine())
    chat, tool = with_tool(0)
    with chat:
        filled(chat, 700)
        for event in chat.send("go"):
            if event.type == "compaction_started":
                chat.cancel()
        assert kept(chat, tool.text) == ["slot"]
        assert_whole(chat, waiting=True)
        scripted(chat)
        list(chat.send("go on"))
        assert kept(chat, tool.text) and chat.held is None and ("user", "go on") in nodes(chat)
        assert_whole(chat)
        assert_same_bits(chat)


def test_a_result_that_fits_comes_in_where_the_soft_compaction_fails(monkeypatch):
    chat, texts = loading(lambda: chat.live.limits.soft - chat.live.used + 50)
    monkeypatch.setattr(chat.compactor, "allowed", lambda: False)
    with chat:
        filled(chat, 700)
        list(chat.send("go"))
        assert results(chat) == texts and chat.held is None
        assert_whole(chat)
        assert_same_bits(chat)


def test_one_token_more_is_compacted_for(monkeypatch):
    """And then it fits, whole."""
    summarised(monkeypatch, engine())
    chat, tool = with_tool(1)
    with chat:
        filled(chat, 900)
        events = list(chat.send("go"))
        assert reasons(events)[0] == "a tool result does not fit"
        assert kinds(events)[:3] == ["tool_call", "tool_result", "compaction_started"]
        assert kinds(events)[kinds(events).index("compaction_started") :].count("compaction_done") >= 1
        appended = next(n for n in chat.transcript.history() if n.role == "tool" and n.text == tool.text)
        assert appended.text == tool.text and chat.held is None
        assert not [e for e in events if isinstance(e, Notice) and "too large" in e.text]
        assert_whole(chat)
        assert_same_bits(chat)


def previewed(chat: Chat, text: str, events: list[Any]) -> str:
    """The preview of a result, which must be its two ends and name the spill that has all of it."""
    node = next(n for n in chat.transcript.history() if n.role == "tool")
    first, _, rest = node.text.partition("\n[... the middle is left out; the whole text is in ")
    locator, _, end = rest.partition(" ...]\n")
    assert first and text.startswith(first)
    assert end and text.endswith(end.partition("\n[`expand`")[0])
    [line] = chat.transcript.store.spill.read(locator)
    assert line["text"] == text and line["role"] == "tool"
    assert any(locator in e.text and "two ends" in e.text for e in events if isinstance(e, Notice))
    return locator


@pytest.mark.parametrize("stored", [False, True])
def test_what_does_not_fit_behind_a_compaction_is_a_preview(monkeypatch, tmp_path, stored):
    summarised(monkeypatch, engine())
    chat, tool = with_tool(700, store=tmp_path / "chat" if stored else None)
    with chat:
        events = list(chat.send("go"))
        locator = previewed(chat, tool.text, events)
        assert locator == (str(chat.transcript.store.spill.folder / "000001.jsonl") if stored else "memory:000001")
        assert next(e for e in events if isinstance(e, ToolResult)).text == tool.text
        assert "spill" in kept(chat, tool.text) and chat.held is None
        assert_whole(chat)
        assert_same_bits(chat)


@pytest.mark.parametrize("over", [0, 1, 5000])
def test_without_a_policy_there_is_no_compaction(over):
    with chatting(tools=[(tool := Tool(over)).load], ctx=1024) as chat:
        tool.chat = chat
        chat.force("", [call("load")])
        events = list(chat.send("go"))
        assert not reasons(events)
        if not over:
            assert results(chat) == [tool.text] and end_of(events).generated > 1
            return
        previewed(chat, tool.text, events)
        assert_whole(chat)
        assert_same_bits(chat)


def test_the_model_is_told_how_to_read_the_rest_and_can():
    tool = Tool(3000)
    with chatting(tools=[tool.load], ctx=3072, span_tools=True) as chat:
        tool.chat = chat
        chat.force("", [call("load")])
        chat.force("", [call("expand", locator="memory:000001")])
        list(chat.send("go"))
        first, second = results(chat)
        assert "[`expand` with this locator shows it]" in first
        assert tool.text[:400] in second and "go on with offset" in second and "left out" not in second
        assert_whole(chat)


def blocked(file: Any) -> None:
    """No spill file can be made: also root cannot make a folder where a file is."""
    file.write_text("in the way")


@pytest.mark.parametrize("policy", [POLICY, None])
def test_a_spill_that_cannot_be_written_loses_nothing(monkeypatch, tmp_path, policy):
    summarised(monkeypatch, engine())
    chat, tool = with_tool(700, store=tmp_path / "chat", policy=policy, ctx=CTX if policy else 1024)
    with chat:
        blocked(tmp_path / "chat" / "spill")
        events = list(chat.send("go"))
        node = next(n for n in chat.transcript.history() if n.role == "tool")
        assert "\n[... the middle is left out ...]\n" in node.text
        assert any("in the log of the conversation" in e.text for e in events if isinstance(e, Notice))
        logged = [e["held"]["text"] for e in chat.transcript.store.events() if e["type"] == "hold"]
        assert tool.text in logged and chat.transcript.store.failed is None
        assert_whole(chat)
        assert_same_bits(chat)


class Stuck:
    """A chat with a policy whose compactions are not tried, nearly full, that calls a tool."""

    def __init__(self, monkeypatch: Any, free: int, calls: int = 1) -> None:
        self.chat, self.tool = with_tool(1000)
        chat = self.chat
        chat.forced.clear()
        monkeypatch.setattr(chat.compactor, "allowed", lambda: False)
        assert chat.live.limits is not None
        chat.live.limits = dataclasses.replace(chat.live.limits, generation=8)  # or the forced answer would be cut
        filled(chat, 1300)
        question = len(chat._question("go"))
        asked = chat.writer.assistant("", [call("load")] * calls)
        rest = CTX - free - chat.live.used - question - len(asked) - 1
        chat.force(letters(rest), [call("load")] * calls)


def test_an_error_text_has_the_numbers(monkeypatch):
    stuck = Stuck(monkeypatch, 300)
    with stuck.chat as chat:
        list(chat.send("go"))
        [text] = results(chat)
        reserve = max(chat.live.limits.tool_result, chat.live.limits.generation)
        used = sum(len(node) for node in chat.transcript.surface[:-2])
        whole = len(chat.writer.result("x", stuck.tool.text, 0, 1))
        assert text.startswith("error: the result does not fit")
        assert f"{used + whole} tokens" in text and f"ctx is {CTX}" in text and f"{reserve} must stay free" in text
        assert "smaller range" in text
        assert kept(chat, stuck.tool.text) == ["spill"] and chat.held is None
        assert_whole(chat)


def test_an_error_text_fits_at_the_last_token(monkeypatch):
    """used + error + the error reserve < ctx, and one token less of room is too little."""
    stuck = Stuck(monkeypatch, 300)
    with stuck.chat as chat:
        list(chat.send("go"))
        text = next(text for text in results(chat))
        size = len(chat.writer.result("x", text, 0, 1))
        error = chat.live.limits.error
    for spare, fits in ((1, True), (0, False)):
        stuck = Stuck(monkeypatch, size + error + spare)
        with stuck.chat as chat:
            if fits:
                list(chat.send("go"))
                text = next(node.text for node in chat.transcript.history() if node.role == "tool")
                assert text.startswith("error: the result does not fit")
                continue
            with pytest.raises(ContextFull, match="It is kept: undo a turn, compact, or use a larger ctx") as caught:
                list(chat.send("go"))
            assert kept(chat, stuck.tool.text) == ["slot"]
            assert caught.value.ctx == CTX and caught.value.wanted > CTX
            assert not chat.transcript.store.spill.numbers()
            assert_whole(chat, waiting=True)


def test_a_result_that_waits_comes_in_when_there_is_room(monkeypatch):
    stuck = Stuck(monkeypatch, 30)
    with stuck.chat as chat:
        with pytest.raises(ContextFull):
            list(chat.send("go"))
        with pytest.raises(ContextFull):  # it stands before everything else
            list(chat.send("and now?"))
        assert kept(chat, stuck.tool.text) == ["slot"] and nodes(chat)[-1][0] == "assistant"
        monkeypatch.undo()
        summarised(monkeypatch, engine())
        scripted(chat)
        list(chat.send("and now?"))
        assert kept(chat, stuck.tool.text) and chat.held is None
        assert ("user", "and now?") in nodes(chat)
        assert_whole(chat)
        assert_same_bits(chat)


def test_undo_lets_go_of_a_result_whose_call_is_gone(monkeypatch):
    stuck = Stuck(monkeypatch, 30)
    with stuck.chat as chat:
        with pytest.raises(ContextFull):
            list(chat.send("go"))
        chat.undo()
        assert chat.held is None
        assert_whole(chat)
        assert_same_bits(chat)


@pytest.mark.parametrize("way", ["close", "cancel"])
def test_whatever_interrupts_the_ladder_the_result_is_somewhere(monkeypatch, way):
    summarised(monkeypatch, engine())
    chat, _ = with_tool(700)
    with chat:
        total = len(list(chat.send("go")))
    starts = [0, 1, 2, 3, 5, 8, total - 12, total - 4, total - 2]
    for at in starts:
        chat, tool = with_tool(700)
        with chat:
            seen = 0
            turn = chat.send("go")
            for _ in turn:
                seen += 1
                if seen == at:
                    turn.close() if way == "close" else chat.cancel()
            if not tool.text:
                continue
            assert kept(chat, tool.text), f"lost when interrupted at event {at}"
            assert_whole(chat, waiting=True)
            scripted(chat)
            list(chat.send("go on"))
            assert kept(chat, tool.text), f"lost behind an interrupt at event {at}"
            assert chat.held is None and ("user", "go on") in nodes(chat)
            numbers = chat.transcript.store.spill.numbers()
            assert numbers == list(range(1, len(numbers) + 1)), "the numbers of the spill have a gap"
            assert_whole(chat)
            assert_same_bits(chat)


# ---- messages of the user


def longest(chat: Chat) -> int:
    return room(chat, len(chat._question("")))


def test_a_message_fits_at_the_last_token_and_is_compacted_for_behind_that(monkeypatch):
    summarised(monkeypatch, engine())
    for over in (0, 1):
        with chatting(policy=POLICY, ctx=CTX) as chat:
            filled(chat, 800)
            text = letters(longest(chat) + over)
            events = list(chat.send(text))
            assert ("the message does not fit" in reasons(events)) == bool(over)
            assert "note" not in [role for role, _ in nodes(chat)]  # no answer was cut
            assert ("user", text) in [(n.role, n.text) for n in chat.transcript.history()]
            assert chat.held is None
            assert_same_bits(chat)


def test_the_soft_trigger_is_looked_at_before_a_message(monkeypatch):
    summarised(monkeypatch, engine())
    for short in (1, 0):
        with chatting(policy=POLICY, ctx=CTX) as chat:
            soft = chat.live.limits.soft
            filled(chat, soft - 400)
            around = len(chat.writer.assistant(""))
            chat.append(chat.writer.assistant(letters(soft - chat.live.used - around - short)))
            assert chat.live.used == soft - short
            turn = chat.send("go")
            found = []
            for event in turn:
                found.append(event)
                if event.type == "text":
                    turn.close()
            assert bool(reasons(found)) == (not short)
            assert nodes(chat)[-2][1] == "go"


def test_a_message_that_is_too_long_for_everything_waits_with_the_three_numbers(monkeypatch):
    summarised(monkeypatch, engine())
    with chatting(policy=POLICY, ctx=CTX) as chat:
        filled(chat, 800)
        text = letters(CTX)
        events = []
        with pytest.raises(ContextFull) as caught:
            for event in chat.send(text):
                events.append(event)
        message = len(chat._question(text))
        assert reasons(events) == ["the message does not fit"]
        for number in (message, chat.live.used, CTX, chat.live.limits.reserve):
            assert str(number) in str(caught.value)
        assert chat.held.text == text and chat.held.kind == "user"
        assert_same_bits(chat)
        scripted(chat)
        assert chat.ask("shorter") == "end" and chat.held is None


def test_a_message_whose_compaction_is_cancelled_waits(monkeypatch):
    summarised(monkeypatch, engine())
    with chatting(policy=POLICY, ctx=CTX) as chat:
        filled(chat, chat.live.limits.soft)
        before, events = chat.transcript.surface, []
        for event in chat.send("wait for me"):
            events.append(event)
            if event.type == "compaction_started":
                chat.cancel()
        assert kinds(events) == ["compaction_started", "compaction_failed", "turn_end"]
        assert end_of(events).finish == "cancelled"
        assert chat.held.text == "wait for me" and chat.transcript.surface == before
        assert_same_bits(chat)


def test_a_message_behind_a_result_that_waits_is_queued_when_cancelled(monkeypatch):
    summarised(monkeypatch, engine())
    chat, tool = with_tool(700)
    with chat:
        filled(chat, 800)
        turn = chat.send("go")
        for event in turn:
            if event.type == "compaction_started":
                turn.close()
        for event in chat.send("and this"):
            if event.type == "compaction_started":
                chat.cancel()
        assert chat.held.text == tool.text and list(chat.queued) == ["and this"]
        scripted(chat)
        list(chat.send("last"))
        assert [n.text for n in chat.transcript.history() if n.human][-3:] == ["go", "last", "and this"]
        assert_whole(chat)


def test_a_queued_message_that_does_not_fit_ends_the_turn_and_waits():
    with chatting(ctx=300) as chat:
        chat.queue("x" * 400)
        with pytest.raises(ContextFull):
            scripted(chat)
            list(chat.send("go"))
        assert chat.held.text == "x" * 400 and not chat.queued
        assert chat.ask("once more")
        assert chat.held is None
        assert_same_bits(chat)


def test_ctx_that_a_system_prompt_fills_is_refused_with_the_numbers():
    with pytest.raises(ContextFull, match="begins with [0-9]+ tokens, which is too much for ctx 64"):
        begin(system="x" * 100, ctx=64)
