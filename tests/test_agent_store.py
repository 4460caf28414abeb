"""A conversation that is kept: whatever ends the process, the next one goes on from the same surface with the same bits;
and random walks through everything that a chat can do."""

from __future__ import annotations

import errno
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from agents import assert_same_bits, assert_whole, begin, call, chatting, engine, kinds, nodes, scripted
from compacting import scripted as summarised
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import fresh_logits, settled

from ds4.agent.chat import Chat
from ds4.compaction.policy import CompactionPolicy
from ds4.errors import ArgumentError, ContextFull, Ds4Error, StoreBusy
from ds4.events import Notice, ToolCall
from ds4.store import Store
from ds4.transcript import Transcript

POLICY = CompactionPolicy(
    soft_fraction=0.5, summary_max=64, summary_min_room=16, tail_fraction=0.05, request="short", generation_reserve=64
)


def say(text: str) -> str:
    """Say it again."""
    return f"said {text}"


def talk(chat: Chat) -> None:
    """A turn with a tool and one without."""
    chat.force("I look.", [call("say", text="a")])
    list(chat.send("First, look."))
    list(chat.send("Then, think."))


def opened(path: Path, **options: Any) -> Chat:
    return begin(store=path, tools=[say], **options)


def next_bits(chat: Chat) -> bytes:
    """The logits at the end of the surface."""
    for _ in chat.live.sync():
        pass
    return chat.session.logits.tobytes()


# ---- close and open again


@pytest.mark.parametrize("snapshot", ["none", "good", "older", "damaged", "other"])
def test_a_conversation_goes_on_where_it_stood(tmp_path, snapshot):
    path = tmp_path / "chat"
    with opened(path) as chat:
        talk(chat)
        if snapshot in ("good", "damaged"):
            chat.save()
        if snapshot == "older":
            chat.undo()
            chat.save()
            list(chat.send("Then, think again."))
        if snapshot == "other":
            with chatting("window") as foreign:
                foreign.ask("hello")
                foreign.session.save(path / "kv.ds4")
        surface, bits = chat.transcript.surface, next_bits(chat)
    if snapshot == "damaged":
        data = bytearray((path / "kv.ds4").read_bytes())
        data[len(data) // 2] ^= 1
        (path / "kv.ds4").write_bytes(data)
    with opened(path) as chat:
        assert chat.transcript.surface == surface
        if snapshot in ("damaged", "other"):
            assert "kv.ds4" in chat.snapshot_refused
        else:
            assert chat.snapshot_refused is None
        evaluated = chat.live.evaluated
        assert next_bits(chat) == bits == fresh_logits(chat.engine, chat.transcript.tokens)
        evaluated = chat.live.evaluated - evaluated
        # the answer's end is rendered, not sampled: it is not in a snapshot
        assert evaluated <= 2 if snapshot == "good" else evaluated > 2
        scripted(chat)
        assert chat.ask("And now?") == "end"
        assert_whole(chat)
        assert_same_bits(chat)


def test_opening_needs_what_the_conversation_was_begun_with(tmp_path):
    path = tmp_path / "chat"
    with opened(path) as chat:
        talk(chat)

    def other(text: str) -> str:
        return text

    for options, word in (
        ({"system": "Be long."}, "system"),
        ({"tools": [other]}, "tools"),
        ({"tools": []}, "tools"),
        ({"span_tools": True, "ctx": 4096}, "tools"),
    ):
        with pytest.raises(ArgumentError, match=f"was begun with another {word}; open it with the same"):
            begin(**{"store": path, "tools": [say], **options})
    with pytest.raises(ArgumentError, match="was begun with another tokenizer"):
        begin("text", store=path, tools=[say])
    with pytest.raises(ArgumentError, match="was begun with another chat format"):
        begin("llama3", store=path, tools=[say])
    with opened(path) as chat:  # nothing of that has left it locked or changed
        assert ("user", "Then, think.") in nodes(chat)
        with pytest.raises(StoreBusy, match="is in use by process"):
            opened(path)


def test_what_cannot_be_a_chat_leaves_nothing(tmp_path):
    start = settled(engine().ledger())
    with pytest.raises(ContextFull):
        opened(tmp_path / "chat", system="x" * 600, ctx=512)
    with pytest.raises(Ds4Error):
        opened(tmp_path / "chat", ctx=512, policy=POLICY)
    assert settled(engine().ledger()) == start
    with opened(tmp_path / "other") as chat:
        assert chat.ask("hello")


def test_an_open_call_is_settled_behind_a_crash(tmp_path):
    path, copy = tmp_path / "chat", tmp_path / "copy"
    with opened(path) as chat:
        chat.force("", [call("say", text="a"), call("say", text="b")])
        for event in chat.send("go"):
            if isinstance(event, ToolCall) and not copy.exists():
                shutil.copytree(path, copy)  # as the disk is when the process dies here
    with opened(copy) as chat:
        assert_whole(chat, waiting=True)
        scripted(chat)
        assert chat.ask("go on") == "end"
        assert ["the turn was cut" in text for role, text in nodes(chat) if role == "tool"] == [True, True]
        assert_whole(chat)
        assert_same_bits(chat)


def test_a_result_that_waits_survives_a_crash(tmp_path, monkeypatch):
    summarised(monkeypatch, engine())
    path, copy = tmp_path / "chat", tmp_path / "copy"
    big = "".join(f"{i:05} " for i in range(800))

    def load() -> str:
        """Load it."""
        return big

    options = {"tools": [load], "policy": POLICY, "ctx": 4096}
    with begin(store=path, **options) as chat:
        for i in range(5):
            chat.append(chat._question(f"{i}: " + f"word{i} " * 30), chat.writer.assistant(f"said{i} " * 20))
        chat.force("", [call("load")])
        for event in chat.send("go"):
            if event.type == "compaction_started" and not copy.exists():
                shutil.copytree(path, copy)
    with begin(store=copy, **options) as chat:
        assert chat.held.text == big
        scripted(chat)
        list(chat.send("go on"))
        assert chat.held is None
        spill = chat.transcript.store.spill
        assert big in [line["text"] for n in spill.numbers() for line in spill.read(n)]
        assert_whole(chat)
        assert_same_bits(chat)


def test_drafts_and_nudges_survive(tmp_path):
    options = {"span_tools": True, "ctx": 4096, "volume_nudge_tokens": 200}
    draft = "A summary that will be used later. " * 3
    with opened(tmp_path / "chat", **options) as chat:
        list(chat.send("Look at it. " + " ".join(map(str, range(160)))))
        chat.force("", [call("context_compact", endAnchor="nothing like it", summary=draft)])
        list(chat.send("Tidy up."))
    with opened(tmp_path / "chat", **options) as chat:
        chat.force("Tidy.", [call("context_compact", endAnchor="#3", summary="draft 1")])
        list(chat.send("Again."))
        [node] = [node for node in chat.transcript.surface if node.kind == "checkpoint"]
        assert node.data["summary"] == draft
        assert_same_bits(chat)
    with opened(tmp_path / "chat", **options) as chat:
        chat.force("", [call("say", text="x")])
        list(chat.send("go"))
        assert [text for role, text in nodes(chat) if role == "tool"][-1] == "said x"


# ---- a store that cannot be written


def test_a_full_disk_is_said_once_and_the_conversation_goes_on(tmp_path, monkeypatch):
    path = tmp_path / "chat"
    with opened(path) as chat:
        list(chat.send("first"))
        surface = chat.transcript.surface

        def full(*args: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr("ds4.store.write_all", full)
        chat.force("", [call("say", text="a")])
        events = [*chat.send("second"), *chat.send("third")]
        told = [e.text for e in events if isinstance(e, Notice)]
        assert len(told) == 1 and "No space left" in told[0] and "in memory only" in told[0]
        assert ("tool", "said a") in nodes(chat) and kinds(events).count("turn_end") == 2
        assert_whole(chat)
        assert_same_bits(chat)
    monkeypatch.undo()
    with opened(path) as chat:
        assert chat.transcript.surface == surface
        assert_same_bits(chat)


def test_saving_says_where_it_cannot(tmp_path):
    with chatting() as chat:
        with pytest.raises(ArgumentError, match="in memory only; give Chat a store= folder"):
            chat.save()
    with opened(tmp_path / "chat") as chat:
        chat.ask("hello")
        (tmp_path / "chat" / "kv.ds4").mkdir()
        with pytest.raises(Ds4Error, match="kv.ds4"):
            chat.save()
        assert_same_bits(chat)
    (tmp_path / "chat" / "kv.ds4").rmdir()
    with opened(tmp_path / "chat") as chat:
        assert chat.ask("again")


def test_a_fork_is_in_memory_and_takes_the_spill_along(tmp_path):
    with opened(tmp_path / "chat", span_tools=True, ctx=4096) as chat:
        list(chat.send("Look at it. " + " ".join(map(str, range(120)))))
        list(chat.send("Go on."))
        locator = chat.compact_span(end="#3", summary="It was looked at.")["archived"]["locator"]
        before = chat.transcript.surface
        with chat.fork() as other:
            assert other.transcript.store.path is None and other.transcript.surface == before
            with pytest.raises(ArgumentError, match="in memory only"):
                other.save()
            assert other.transcript.store.spill.read(locator) == chat.transcript.store.spill.read(locator)
            assert other.undo() == "compaction"
            other.ask("Elsewhere.")
            assert_same_bits(other)
        assert chat.transcript.surface == before
        assert_same_bits(chat)
    with opened(tmp_path / "chat", span_tools=True, ctx=4096) as chat:
        assert chat.transcript.surface == before


# ---- random walks

STEPS = st.one_of(
    st.tuples(st.just("say"), st.integers(1, 400)),
    st.tuples(st.just("call"), st.lists(st.sampled_from(["say", "load", "broken", "span"]), min_size=1, max_size=3)),
    st.tuples(st.just("cut"), st.sampled_from(["close", "cancel"]), st.integers(1, 12), st.lists(st.sampled_from(["say", "load"]), max_size=2)),
    st.tuples(st.just("compact")),
    st.tuples(st.just("span"), st.integers(0, 40), st.integers(0, 40)),
    st.tuples(st.just("undo")),
    st.tuples(st.just("retry")),
    st.tuples(st.just("fork")),
    st.tuples(st.just("reopen"), st.booleans()),
    st.tuples(st.just("queue")),
)  # fmt: skip


class Walk:
    """One chat in a folder, to which steps are done."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.kind, self.count = folder, kind, 0
        self.undone = False
        self.chat = self.open()

    def open(self) -> Chat:
        def load(size: int) -> str:
            """Load."""
            return " ".join(f"{self.count}.{i}" for i in range(size))

        options = {"tools": [load, say], "span_tools": True, "ctx": 4096, "volume_nudge_tokens": 900,
                   "policy": replace(POLICY, soft_fraction=0.68), "store": self.folder}  # fmt: skip
        return begin(self.kind, **options)

    def calls(self, names: list[str]) -> list[Any]:
        number = self.chat.transcript.surface[max(0, len(self.chat.transcript.surface) - 3)].number
        made = {
            "say": call("say", text=f"t{self.count}"),
            "load": call("load", size=300),
            "broken": call("say"),
            "span": call("context_compact", endAnchor=f"#{number}", summary=f"Summary {self.count}."),
        }
        return [made[name] for name in names]

    def do(self, step: tuple[Any, ...]) -> None:
        self.count += 1
        chat, (name, *rest) = self.chat, step
        self.undone = name == "undo" or (self.undone and name not in ("say", "call", "cut"))
        try:
            if name == "say":
                chat.force(f"answer {self.count}")
                list(chat.send(f"{self.count}: " + "abcde"[self.count % 5] * rest[0]))
            elif name == "call":
                chat.force("", self.calls(rest[0]))
                list(chat.send(f"call {self.count}"))
            elif name == "cut":
                chat.force("I cut.", self.calls(rest[2]))
                turn = chat.send(f"cut {self.count}")
                for n, event in enumerate(turn, 1):
                    if n == rest[1] and event.type != "turn_end":
                        turn.close() if rest[0] == "close" else chat.cancel()
            elif name == "compact":
                list(chat.compact())
            elif name == "span":
                surface = chat.transcript.surface
                ends = sorted(surface[n % len(surface)].number for n in rest)
                chat.compact_span(start=f"#{ends[0]}", end=f"#{ends[1]}", summary=f"Span {self.count}.")
            elif name == "retry":
                list(chat.retry(self.count))
            elif name == "queue":
                chat.queue(f"queued {self.count}")
            elif name == "undo":
                chat.undo()
            elif name == "fork":
                with chat.fork() as other:
                    other.forced.clear()
                    list(other.send(f"fork {self.count}"))
                    self.check(other)
            else:
                surface = chat.transcript.surface
                if rest[0]:
                    chat.save()
                chat.close()
                self.chat = self.open()
                assert self.chat.transcript.surface == surface
        except (ArgumentError, ContextFull):
            pass  # what cannot be done is refused, and changes nothing
        self.chat.forced.clear()
        self.check(self.chat)

    def check(self, chat: Chat) -> None:
        assert_whole(chat, waiting=True)
        surface = chat.transcript.surface
        humans = [node for node in chat.transcript.history() if node.human]
        if humans and not self.undone:
            assert humans[-1].number in {node.number for node in surface}, "the newest message of the user is gone"
        assert len({node.number for node in surface}) == len(surface)
        assert_same_bits(chat)


@pytest.fixture(scope="module")
def walks(tmp_path_factory):
    return tmp_path_factory.mktemp("walks")


def walk(folder: Path, kind: str, steps: list[tuple[Any, ...]]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    start = settled(engine(kind).ledger())
    one = Walk(folder, kind)
    try:
        for step in steps:
            one.do(step)
        copied = folder.with_name("copy")
        shutil.rmtree(copied, ignore_errors=True)
        surface = one.chat.transcript.surface
        shutil.copytree(folder, copied)
        with Store.open(copied) as store:
            assert Transcript.open(store).surface == surface
    finally:
        one.chat.close()
    assert settled(engine(kind).ledger()) == start


@pytest.mark.parametrize("kind", ["tags", pytest.param("window", marks=pytest.mark.slow)])
def test_a_random_walk(walks, monkeypatch, kind):
    summarised(monkeypatch, engine(kind))

    @settings(max_examples=4)
    @given(st.lists(STEPS, min_size=3, max_size=7))
    def run(steps: list[tuple[Any, ...]]) -> None:
        walk(walks / kind, kind, steps)

    run()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["tags", "text", "window"])
def test_long_random_walks(walks, monkeypatch, kind):
    summarised(monkeypatch, engine(kind))

    @settings(max_examples=12)
    @given(st.lists(STEPS, min_size=4, max_size=12))
    def run(steps: list[tuple[Any, ...]]) -> None:
        walk(walks / kind, kind, steps)

    run()
