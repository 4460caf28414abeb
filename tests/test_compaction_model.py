"""The four validations of the specification on SmolLM2. Turns of the assistant are forced where a model of 135M cannot
act; the summary pass and all work on the KV rows are real."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from compacting import drain, run, sync, whole_surface
from oracle import settled

import ds4
from ds4.agent.chat import Chat
from ds4.chat_formats import ToolCall
from ds4.compaction.policy import CompactionPolicy
from ds4.engine import Session
from ds4.events import CompactionDone, CompactionFailed, CompactionPlanned, Prefill, Summary, TurnEnd
from ds4.nodes import Node
from ds4.sampling import Sampling
from ds4.transcript import Held

pytestmark = [pytest.mark.model, pytest.mark.slow]
SYSTEM = "You read files for the user and answer in one sentence."
RULE = "Do not change any file, deadline Friday 14:00."
LINES = [f"{i}. Near rock {i} the crew saw {i * 7 % 13} whales and {i * 3 % 11} gulls." for i in range(1, 201)]
POLICY = CompactionPolicy(summary_max=96, summary_min_room=64)


@pytest.fixture(scope="module")
def engine(smollm2: Path) -> Iterator[ds4.Engine]:
    with ds4.Engine(smollm2, threads=1, pool_tokens=12288) as made:
        yield made
        assert not settled(made.ledger())["pages_used"], "pages are left"


class Reader:
    """The tool `read`: numbered lines of one file, and what it was asked for."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def tool(self) -> Any:
        def read(path: str, start: int, end: int) -> str:
            """Read lines of a file."""
            self.seen.append((start, end))
            return part(path, start, end)

        return read


def part(path: str, start: int, end: int) -> str:
    return f"{path} lines {start}-{end} of {len(LINES)}\n" + "\n".join(LINES[start - 1 : end])


def reads(start: int, end: int) -> ToolCall:
    return ToolCall("read", {"path": "log.txt", "start": start, "end": end})


def chat_on(engine: ds4.Engine, **options: Any) -> Chat:
    given = {"ctx": 2048, "system": SYSTEM, "sampling": Sampling(), "max_tokens": 12, "policy": POLICY, **options}
    return Chat(engine, **given)


def fresh(engine: ds4.Engine, tokens: list[int]) -> tuple[bytes, bytes]:
    """The logits of a session that never saw anything else, and those behind one more token."""
    with engine.session() as session:
        session.eval(tokens)
        logits = session.logits.tobytes()
        session.eval([tokens[0]])
        return logits, session.logits.tobytes()


def bits(chat: Chat) -> tuple[bytes, bytes]:
    """The same of the conversation."""
    sync(chat)
    with chat.session.fork() as child:
        child.eval([chat.transcript.tokens[0]])
        return chat.session.logits.tobytes(), child.logits.tobytes()


def checkpoint(chat: Chat) -> Node:
    [node] = [node for node in chat.transcript.surface if node.kind == "checkpoint"]
    return node


def of(kind: type, events: list[Any]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def test_hard(engine):
    """The second read does not fit: compaction, the delayed result is appended, the model goes on with it. Nothing is
    read again."""
    reader = Reader()
    with chat_on(engine, tools=[reader.tool()]) as chat:
        chat.force("I read the first part.", [reads(1, 40)])
        chat.force("Now the second part.", [reads(41, 70)])
        reasons, events = [], []
        for event in chat.send(f"{RULE} Read log.txt and tell me about rock 40."):
            events.append(event)
            if event.type == "compaction_started":
                reasons.append(event.reason)
                assert chat.held == Held("tool", part("log.txt", 41, 70), chat.held.call)
        assert reasons == ["a tool result does not fit"] and chat.held is None
        [planned], [done] = of(CompactionPlanned, events), of(CompactionDone, events)
        assert reader.seen == [(1, 40), (41, 70)]
        assert done.reused == planned.reused >= len(chat.writer.opening()[0])
        assert done.evaluated == done.after - done.reused and done.after < done.before
        surface = chat.transcript.surface
        assert [n.text for n in surface if n.role == "tool"] == [part("log.txt", 41, 70)]
        assert surface[-1].role == "assistant" and isinstance(events[-1], TurnEnd) and not chat.forced
        assert "lines 1-40 of 200" in checkpoint(chat).text and RULE in "".join(n.text for n in surface)
        whole_surface(chat)
        assert bits(chat) == fresh(engine, chat.transcript.tokens)
        print(f"\nhard: {done}")


@pytest.mark.parametrize("snapshot", [True, False])
def test_soft(engine, tmp_path, snapshot):
    """Near full, saved, opened again, a follow-up question: compaction runs before the turn, and the checkpoint says
    that only the first part was read."""
    reader = Reader()
    with chat_on(engine, tools=[reader.tool()], store=tmp_path / "c") as chat:
        chat.force("I read the first part.", [reads(1, 55)])
        chat.force(
            "I have read lines 1 to 55 of log.txt: the crew counts whales and gulls near each of the rocks. " * 3
        )
        events = list(chat.send(f"{RULE} What does log.txt say?"))
        assert not of(CompactionDone, events) and chat.live.limits.soft_fires(chat.live.used)
        before = bits(chat)
        if snapshot:
            chat.save()
    with chat_on(engine, tools=[reader.tool()], store=tmp_path / "c") as chat:
        assert sync(chat)[1] == (0 if snapshot else chat.live.used)
        assert bits(chat) == before
        events = list(chat.send("And what about rock 90?"))
        [done] = of(CompactionDone, events)
        types = [e.type for e in events]
        assert types.index("compaction_done") < types.index("text")
        assert reader.seen == [(1, 55)]
        text = checkpoint(chat).text
        assert "log.txt lines 1-55 of 200" in text and "56-" not in text
        assert [n.text for n in chat.transcript.surface if n.human][-1] == "And what about rock 90?"
        assert any(RULE in node.text for node in chat.transcript.surface)
        whole_surface(chat)
        assert bits(chat) == fresh(engine, chat.transcript.tokens)
        print(f"\nsoft: {done}")


def talk(chat: Chat, i: int) -> None:
    """A turn that is there already: a question, and an answer of some length."""
    said = " ".join(LINES[5 * i : 5 * i + 3])
    chat.append(chat._question(f"Question {i}: what is near rock {5 * i}?" if i else f"{RULE} I will ask about rocks."))
    chat.append(chat.writer.assistant(f"Answer {i}: {said}"))


def test_interrupt(engine):
    """At each phase, by every way: the next logits are those of a session that never tried, and no token is evaluated
    again. The same compaction then succeeds."""
    with chat_on(engine) as chat:
        for i in range(7):
            talk(chat, i)
        chat.transcript.hold(Held("user", "and now?"))
        surface, expected = chat.transcript.surface, fresh(engine, chat.transcript.tokens)
        sync(chat)
        tried: dict[str, int] = {}
        ways = [("cancel", k) for k in (1, 2, 3, 5, 9)] + [("close", 4), ("throw", 4), ("throw", 12), ("close", 2)]
        for how, k in ways:
            events, reached = run(chat.compact(), k, how, chat.cancel)
            assert reached and not of(CompactionDone, events)
            unchanged(chat, surface, expected, f"{how} at event {k}")
            tried[events[k - 1].type] = tried.get(events[k - 1].type, 0) + 1
        for k in range(1, 5):  # each piece of the rebuild, and the plan before it
            seen = 0
            events = []
            for event in chat.compact():
                events.append(event)
                seen += bool(of(CompactionPlanned, events))
                if seen == k and not isinstance(event, CompactionDone):
                    chat.cancel()
            if of(CompactionDone, events):
                break
            assert of(CompactionFailed, events)
            unchanged(chat, surface, expected, f"piece {k} of the rebuild")
        assert k >= 3 and tried["summary"] >= 3
        if chat.transcript.surface == surface:
            drain(chat.compact())
        assert checkpoint(chat) and bits(chat) == fresh(engine, chat.transcript.tokens)
        assert chat.held == Held("user", "and now?")
        print(f"\ninterrupt: {tried}")


def unchanged(chat: Chat, surface: Any, expected: tuple[bytes, bytes], what: str) -> None:
    assert chat.transcript.surface == surface and chat.held == Held("user", "and now?")
    chat.session.check()
    assert sync(chat)[1] == 0, f"{what}: tokens were evaluated again"
    assert bits(chat) == expected, what


def test_interrupt_inside_of_the_core(engine, monkeypatch):
    """The user cancels while an op of the request, of the summary or of the rebuild is computed."""
    real = {name: getattr(Session, name) for name in ("eval", "sync")}
    with chat_on(engine) as chat:
        for i in range(6):
            talk(chat, i)
        chat.transcript.hold(Held("user", "and now?"))
        surface, expected = chat.transcript.surface, fresh(engine, chat.transcript.tokens)
        sync(chat)
        for name, k in (("eval", 1), ("eval", 2), ("eval", 7), ("sync", 1), ("sync", 2)):
            seen = 0

            def call(session: Session, tokens: Any, **options: Any) -> Any:
                nonlocal seen
                seen += 1
                if seen == k:  # noqa: B023
                    options["progress"] = lambda done, total: chat.cancel()
                return real[name](session, tokens, **options)  # noqa: B023

            with monkeypatch.context() as patch:
                patch.setattr(Session, name, call)
                *_, last = chat.compact()
            assert isinstance(last, CompactionFailed) and seen >= k
            unchanged(chat, surface, expected, f"{name} {k}")


def test_ten_in_a_row(engine):
    """The checkpoint stays bounded, no human message is lost, the ledger is whole, and what the first message demands
    stands word for word in the context after each of the ten."""
    reader = Reader()
    with chat_on(engine, tools=[reader.tool()]) as chat:
        limits, sizes, steps, said = chat.live.limits, [], [], []
        for i in range(10):
            text = f"{RULE} I will ask about rocks." if not i else f"Question {i}: what is near rock {i}?"
            said.append(text)
            chat.append(chat._question(text))
            call = ToolCall("read", {"path": f"rock{i}.txt", "start": i + 1, "end": i + 2}, f"call-{i}")
            result = part(f"rock{i}.txt", i + 1, i + 2)
            chat.append(chat.writer.assistant("I look.", [call]), chat.writer.result(call.id, result))
            chat.append(chat.writer.assistant(f"{i} whales. " + " ".join(LINES[9 * i : 9 * i + 9])))
            events = list(chat.compact())
            [done] = of(CompactionDone, events)
            sizes.append(len(checkpoint(chat)))
            steps.append(done.step)
            context = "\n".join(node.text for node in chat.transcript.surface)
            assert RULE in context, f"after compaction {i + 1}"
            assert text in context, "the newest human message stays word for word"
            assert checkpoint(chat).text.count("=== checkpoint") == 1
            whole_surface(chat)
            assert of(Prefill, events) and (done.step == "ledger" or of(Summary, events))
        most = limits.summary + limits.ledger + limits.human + 100
        assert max(sizes) <= most
        ledger = checkpoint(chat).data["ledger"]
        assert any("rock9.txt lines 10-11 of 200" in e["text"] for e in ledger) or any(
            "rock8.txt" in e["text"] for e in ledger
        )
        assert [e["kind"] for e in ledger if e["kind"] == "human"]
        history = [node.text for node in chat.transcript.history() if node.human]
        assert history == said, "no human message is lost"
        spilled = {
            line["number"]
            for n in chat.transcript.store.spill.numbers()
            for line in chat.transcript.store.spill.read(n)
        }
        there = {node.number for node in chat.transcript.surface}
        assert all(n.number in spilled | there for n in chat.transcript.history() if n.kind != "filler")
        assert chat.transcript.checkpoints == 10
        assert bits(chat) == fresh(engine, chat.transcript.tokens)
        print(f"\nten in a row: checkpoints of {sizes} tokens (at most {most}), written by {steps}")
