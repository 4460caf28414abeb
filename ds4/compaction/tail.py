"""Which nodes stay as they are at the end: spec section 4.

A node is never cut and a call is never parted from its results: nodes are taken by *units*, an assistant node with
calls up to its last result, every other node alone.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..chat_formats import ToolCall
from ..nodes import Node, Writer, size_of
from . import prompts
from .policy import Limits

LEAST_PREVIEW = 32  # tokens


@dataclass(frozen=True)
class Unit:
    """Nodes that stay or go together. `broken`: with a call that has no result, or a result that has no call.
    `waiting`: with a call whose result is still to come."""

    nodes: tuple[Node, ...]
    broken: bool = False
    waiting: bool = False


@dataclass(frozen=True)
class Kept:
    """What stays of a surface: the units of the `tail`, and `newest`, the newest human message, also when it stands
    before them. `cut`: the nodes that stay as a preview, each (preview, whole)."""

    newest: Node | None
    tail: tuple[Unit, ...]
    cut: tuple[tuple[Node, Node], ...] = ()

    @property
    def pinned(self) -> Node | None:
        """The newest human message when it stands before the tail."""
        return None if any(node is self.newest for unit in self.tail for node in unit.nodes) else self.newest

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes that stay, in order."""
        pinned = self.pinned
        return (*([] if pinned is None else [pinned]), *(node for unit in self.tail for node in unit.nodes))

    @property
    def previews(self) -> tuple[tuple[Node, Node], ...]:
        """(preview, whole) of the nodes that really stay."""
        here = {id(node) for node in self.nodes}
        return tuple(pair for pair in self.cut if id(pair[0]) in here)

    def without(self, tokens: int) -> Kept | None:
        """Without as many units at the front of the tail as have `tokens` tokens together; the newest human message
        stays, and so does a unit whose result is still to come. None when there is nothing that could go."""
        gone = n = 0
        while n < len(self.tail) and gone < tokens and not self.tail[n].waiting:
            gone += size_of(node for node in self.tail[n].nodes if node is not self.newest)
            n += 1
        return replace(self, tail=_aligned(self.tail[n:])) if gone else None


def units(nodes: Sequence[Node], waiting: Collection[str] = ()) -> list[Unit]:
    """Nodes as units. `waiting`: ids of calls whose results are still to come; they count as paired, and so do the
    other open calls of their message.

    A result belongs to the nearest call of its id before it that has none yet, so an id that occurs twice makes two
    pairs; what stands between a call and its result belongs to the unit as well.
    """
    end = list(range(len(nodes)))  # of the unit that begins here
    caller: dict[int, int] = {}  # of the result here
    open_calls: dict[str, list[int]] = {}
    for i, node in enumerate(nodes):
        for call in node.calls:
            open_calls.setdefault(call.id, []).append(i)
        if node.role == "tool" and open_calls.get(node.result_of):
            caller[i] = open_calls[node.result_of].pop()
            end[caller[i]] = i
    waits = {found[-1] for name, found in open_calls.items() if found and name in waiting}
    broken = {i for found in open_calls.values() for i in found} - waits
    broken |= {i for i, node in enumerate(nodes) if node.role == "tool" and i not in caller}

    found: list[Unit] = []
    i = 0
    while i < len(nodes):
        stop = j = i
        while j <= stop:  # units that overlap are one
            stop, j = max(stop, end[j]), j + 1
        inside = range(i, stop + 1)
        some_broken, some_wait = not broken.isdisjoint(inside), not waits.isdisjoint(inside)
        if some_broken and some_wait:  # only the waiting calls with their results can stay
            inside_kept = [k for k in inside if k in waits or caller.get(k) in waits]
            found.append(Unit(tuple(nodes[k] for k in inside_kept), waiting=True))
        else:
            found.append(Unit(tuple(nodes[i : stop + 1]), some_broken, some_wait))
        i = stop + 1
    return found


def keep(
    nodes: Sequence[Node], writer: Writer, limits: Limits, waiting: Collection[str] = (), locator: str | None = None
) -> Kept:
    """What stays of the nodes above the system prompt. `locator`: the place in the spill that previews name.

    The newest human message stays in any case and takes nothing of the tail's budget. A broken pair ends the tail:
    nothing that reaches back over it could be sent again. Nodes of the kind "note" go, except one that an alternating
    format needs between two assistant turns.
    """
    nodes = _without_notes(nodes, writer)
    place = next((i for i in reversed(range(len(nodes))) if nodes[i].human), None)
    newest, cut = None, []
    if place is not None:
        newest = whole = nodes[place]
        if own_size(whole, writer) > limits.human_keep:
            newest = preview(whole, writer, limits.human_keep, locator)
            cut.append((newest, whole))
            nodes[place] = newest

    tail: list[Unit] = []
    left = limits.tail
    found = units(nodes, waiting)
    for i in reversed(range(len(found))):
        unit, needed = found[i], any(unit.waiting for unit in found[: i + 1])
        if unit.broken:
            if needed:
                continue
            break
        size = _size(unit, newest)
        if size > left:
            alone = not any(_size(kept, newest) for kept in tail)
            if not alone and not needed:
                break
            if size > 2 * limits.tail:
                unit, pairs = _previewed(unit, newest, writer, limits.tail, locator)
                size = _size(unit, newest)
                if size > 2 * limits.tail and not needed:
                    break
                cut += pairs
        tail.insert(0, unit)
        left -= size
    return Kept(newest, _aligned(tail), tuple(cut))


def preview(node: Node, writer: Writer, tokens: int, locator: str | None = None) -> Node:
    """The node with its text, and the texts of its calls, shortened to head and tail: about `tokens` tokens in all. Its
    number stays; a thinking block is left out, for it is never cut."""
    tokenizer = writer.format.tokenizer
    pieces = 1 + sum(len(call.arguments) for call in node.calls)
    data = {**node.data, **({"spill": locator} if locator else {})}
    room = tokens
    while True:
        each = max(8, room // pieces)
        text = prompts.shortened(tokenizer, node.text, each, node.number, locator) if node.text else ""
        if node.role == "tool":
            short = writer.result(node.result_of, text, node.index, node.count, **data)
        elif node.role == "user":
            short = writer.user(text, first=False, kind=node.kind, data=data)
        else:
            calls = [replace(call, arguments=_short_arguments(call, writer, each, node.number)) for call in node.calls]
            short = replace(writer.assistant(text, calls, finish=node.finish), data=data)
        short = replace(short, number=node.number)
        if len(short) <= tokens or room <= LEAST_PREVIEW:
            return short
        room -= max(1, max(len(short) - tokens, room // 8))


def _short_arguments(call: ToolCall, writer: Writer, tokens: int, number: int) -> dict[str, Any]:
    """A call's arguments; long texts and structures as a preview."""
    found: dict[str, Any] = {}
    for name, value in call.arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        short = prompts.shortened(writer.format.tokenizer, text, tokens, number)
        found[name] = value if short == text else short
    return found


def _without_notes(nodes: Sequence[Node], writer: Writer) -> list[Node]:
    """Nodes without fillers, which the writer puts where they belong, and without notes."""
    nodes = [node for node in nodes if node.kind != "filler"]
    told = [node.role for node in nodes if node.kind != "note"]
    found, n = [], 0  # n: nodes that are no notes so far
    for node in nodes:
        if node.kind != "note":
            found.append(node)
            n += 1
        elif writer.format.alternating and told[max(0, n - 1) : n + 1] == ["assistant", "assistant"]:
            if found[-1].kind != "note":
                found.append(node)
    return found


def own_size(node: Node, writer: Writer) -> int:
    """The tokens of a node without the system prompt that it may have at its head."""
    return len(writer.user(node.text, first=False, kind=node.kind)) if node.headed else len(node)


def _size(unit: Unit, newest: Node | None) -> int:
    return size_of(node for node in unit.nodes if node is not newest)


def _previewed(
    unit: Unit, newest: Node | None, writer: Writer, budget: int, locator: str | None
) -> tuple[Unit, list[tuple[Node, Node]]]:
    """The unit with previews of its largest nodes, as many as it takes to bring it to twice the budget. A checkpoint is
    no text to be cut."""
    nodes, pairs = list(unit.nodes), []
    each = max(LEAST_PREVIEW, budget // len(nodes))
    largest = sorted((i for i in range(len(nodes)) if nodes[i].kind != "checkpoint"), key=lambda i: -len(nodes[i]))
    for i in largest:
        if size_of(node for node in nodes if node is not newest) <= 2 * budget or len(nodes[i]) <= each:
            break
        if nodes[i] is not newest:
            short = preview(nodes[i], writer, each, locator)
            pairs.append((short, nodes[i]))
            nodes[i] = short
    return replace(unit, nodes=tuple(nodes)), pairs


def _aligned(tail: Sequence[Unit]) -> tuple[Unit, ...]:
    """From the first human turn on, else from the first assistant turn on; never behind a unit whose result is still to
    come."""
    last = next((i for i, unit in enumerate(tail) if unit.waiting), len(tail) - 1)
    first = [unit.nodes[0] for unit in tail[: last + 1]]
    starts = [i for i, node in enumerate(first) if node.human] or [
        i for i, node in enumerate(first) if node.role == "assistant"
    ]
    return tuple(tail[starts[0] :]) if starts else ()
