"""Generated surfaces for the tests of compaction, and what must hold of every surface that a compaction makes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from hypothesis import strategies as st
from tiny_tokenizer import QWEN, tiny

from ds4 import chat_formats
from ds4.chat_formats import ToolCall
from ds4.chat_formats.chatml import ChatML
from ds4.compaction import prompts
from ds4.compaction.plan import checkpoint_data
from ds4.nodes import Node, Writer


class Alternating(ChatML):
    """A format that has tools and demands turns that alternate, as DeepSeek V4's does."""

    alternating = True


WRITERS = {
    "tags are text": Writer(ChatML(tiny()), "Be brief."),
    "tags are tokens": Writer(ChatML(tiny(user=QWEN)), "Be brief."),
    "alternating": Writer(Alternating(tiny()), "Be brief."),
    "gemma": Writer(
        chat_formats.get("gemma", tiny(control=["<eos>", "<start_of_turn>", "<end_of_turn>"], user=[])), "Be brief."
    ),
    "no system": Writer(ChatML(tiny())),
}
CHATML = WRITERS["tags are text"]


@dataclass(frozen=True)
class Surface:
    """Nodes with numbers from 1 on; `waiting`: ids of calls whose results are still to come."""

    writer: Writer
    nodes: tuple[Node, ...]
    waiting: tuple[str, ...] = ()


def numbered(nodes: Sequence[Node], start: int = 1) -> list[Node]:
    """Nodes with numbers, as a transcript gives them to those that have none."""
    given, following = [], max([start - 1, *(node.number for node in nodes)]) + 1
    for node in nodes:
        given.append(node if node.number else replace(node, number=following))
        following += not node.number
    return given


def words(n: int, name: str = "word") -> str:
    """n different words: a text that is no loop."""
    return " ".join(f"{name}{i}" for i in range(n))


@st.composite
def surfaces(
    draw: st.DrawFn,
    writers: Sequence[str] = tuple(WRITERS),
    turns: int = 6,
    long: int = 120,
    broken: bool = True,
    waits: bool = True,
) -> Surface:
    """System prompt, checkpoints, human turns, assistant turns with up to three calls, results, notes. `long`: words of
    the longest texts. `broken`: also calls without a result, results without a call, human turns between the two.
    `waits`: the last calls may still wait for results."""
    writer = WRITERS[draw(st.sampled_from(list(writers)))]
    sizes = st.sampled_from([1, 2, 3, 5, 8, long // 4, long])
    nodes: list[Node] = writer.opening()
    ids = iter(range(1, 1000))

    def human(kind: str = "") -> None:
        text = words(draw(sizes), "ask")
        data = None
        if kind == "checkpoint":
            number = next(ids)
            data = checkpoint_data(number, text, [{"kind": "file", "text": f"read f{number}.c", "node": 1}], None)
            text = prompts.checkpoint_text(number, text, f"- read f{number}.c")
        first = not any(node.role == "user" for node in nodes)
        nodes.append(writer.user(text, first=first, kind=kind, data=data))

    def assistant(calls: Sequence[ToolCall] = ()) -> None:
        thinking = "hm" if writer.format.writes_thinking and draw(st.booleans()) else ""
        nodes.append(writer.assistant(words(draw(sizes), "say"), calls, thinking))

    if draw(st.booleans()):
        human("checkpoint")
    for _ in range(draw(st.integers(0, turns))):
        human(draw(st.sampled_from(["", "", "", "", "note", "checkpoint"])))
        for _ in range(draw(st.integers(0, 2)) if writer.format.tools else 0):
            n = draw(st.integers(1, 3))
            calls = [
                ToolCall("read", {"path": f"src/{i}.c", "start": i}, f"c{i}")
                for i, _ in zip(ids, range(n), strict=False)
            ]
            assistant(calls)
            for index, call in enumerate(calls):
                fate = draw(st.sampled_from(["", "", "", "", "", "aborted", "said", "orphan"])) if broken else ""
                if fate == "said":
                    human()
                if fate == "orphan":
                    nodes.append(writer.result(f"lost{next(ids)}", "nobody asked"))
                if fate != "aborted":
                    nodes.append(writer.result(call.id, words(draw(sizes), "out"), index, n))
        if draw(st.booleans()):
            assistant()
    waiting: tuple[str, ...] = ()
    if waits and writer.format.tools and draw(st.booleans()):
        calls = [ToolCall("read", {"path": "last.c"}, f"c{next(ids)}") for _ in range(draw(st.integers(1, 3)))]
        assistant(calls)
        for index, call in enumerate(calls[: draw(st.integers(0, len(calls) - 1))]):
            nodes.append(writer.result(call.id, words(draw(sizes), "out"), index, len(calls)))
        waiting = tuple(call.id for call in calls)
    return Surface(writer, tuple(numbered(writer.arrange(nodes))), waiting)


def assert_paired(nodes: Sequence[Node], waiting: Collection[str] = ()) -> None:
    """Every call has its result behind it, unless it waits for it, and every result its call before it."""
    open_calls: list[str] = []
    for node in nodes:
        open_calls += [call.id for call in node.calls]
        if node.role == "tool":
            assert node.result_of in open_calls, f"#{node.number} is the result of no call"
            open_calls.remove(node.result_of)
    assert set(open_calls) <= set(waiting), f"calls without a result: {open_calls}"


def assert_alternating(writer: Writer, nodes: Sequence[Node]) -> None:
    """No two turns of the user follow one another where the format forbids it."""
    if not writer.format.alternating:
        return
    for a, b in zip(nodes, nodes[1:], strict=False):
        assert not (a.user_level and b.user_level) or (b.role == "tool" and b.index)
