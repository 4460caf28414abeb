"""Span compaction: which nodes a span covers, and the surface after it. The agent wrote the summary; nothing is changed
here."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ds4.errors import ArgumentError
from ds4.nodes import Node, Writer, size_of, tokens_of

from . import anchors, ledger, prompts
from .live import common
from .plan import Plan, checkpoint_data
from .policy import Limits

_STORED = "stored as checkpoint"
STUB = re.compile(f"{_STORED} [0-9]+")
"""What stands in a call for the summary that its checkpoint holds."""


class NotSmaller(ArgumentError):
    """The checkpoint would not be smaller than the span. `checkpoint` and `span` are their tokens, `room` those of the
    largest summary that would fit, 0 when none would."""

    checkpoint: int
    span: int
    room: int


@dataclass(frozen=True)
class Span:
    """Whole nodes in a row: those of a surface from index `start` to before `stop`. Good for that surface only."""

    start: int
    stop: int
    nodes: tuple[Node, ...]

    @property
    def first(self) -> int:
        """The number of its first node."""
        return self.nodes[0].number

    @property
    def last(self) -> int:
        """The number of its last node."""
        return self.nodes[-1].number

    @property
    def tokens(self) -> int:
        return size_of(self.nodes)


def resolve(
    surface: Sequence[Node],
    start: str | None,
    end: str | None,
    *,
    running: Collection[str] = (),
    include_active: bool = False,
) -> Span:
    """The span from the node that `start` names (None: the first after the system prompt) to the one that `end` names,
    widened until no call in it is without its result and no result without its call. `running`: ids of the calls that
    have no result yet. `include_active`: the newest message of the user may be inside.

    Raises ArgumentError that says what would work: spec/span.md sections 2 and 3.
    """
    busy = {i for i, node in enumerate(surface) if any(call.id in running for call in node.calls)}
    there = [i for i, node in enumerate(surface) if node.role != "system" and node.kind != "filler" and i not in busy]
    if not there:
        raise ArgumentError("There is nothing to compact: the context holds no message besides the system prompt.")
    if end is None or not anchors.normalise(end):
        raise ArgumentError(
            "endAnchor is needed: the verbatim opening, or the number #N, of the last message of the span. That "
            "message itself is replaced too."
        )
    named = start is not None and anchors.normalise(start)
    first = anchors.find(surface, start or "", "start", busy) if named else there[0]
    last = anchors.find(surface, end, "end", busy)
    for i in (first, last):
        if surface[i].role == "system":
            raise ArgumentError(
                f"#{surface[i].number} is the system prompt, which is never replaced; name a message after it."
            )
    if first > last:
        raise ArgumentError(
            f"The start #{surface[first].number} stands after the end #{surface[last].number}; name them in the order "
            "of the conversation."
        )
    first, last = _Pairs(surface, running).snap(first, last)
    newest = max((i for i, node in enumerate(surface) if node.human), default=-1)
    if first <= newest <= last and not include_active:
        raise ArgumentError(
            f"The span #{surface[first].number} to #{surface[last].number} holds #{surface[newest].number}, the newest "
            "message of the user. End it before that message, or begin it after; set includeActive only when that "
            "instruction has been carried out."
        )
    return Span(first, last + 1, tuple(surface[first : last + 1]))


class _Pairs:
    """Calls and results of a surface by id."""

    def __init__(self, surface: Sequence[Node], running: Collection[str]) -> None:
        self.surface, self.running = surface, running
        self.calls: dict[str, list[int]] = {}
        self.results: dict[str, list[int]] = {}
        for i, node in enumerate(surface):
            for call in node.calls:
                self.calls.setdefault(call.id, []).append(i)
            if node.role == "tool":
                self.results.setdefault(node.result_of, []).append(i)

    def snap(self, first: int, last: int) -> tuple[int, int]:
        """The smallest range around first..last that tears no pair. Looks at every node once."""
        todo: Sequence[int] = range(first, last + 1)
        low, high = first, last
        while todo:
            reach = [j for i in todo for j in self._partners(i)]
            new_low, new_high = min([low, *reach]), max([high, *reach])
            todo = [*range(new_low, low), *range(high + 1, new_high + 1)]
            low, high = new_low, new_high
        return low, high

    def _partners(self, i: int) -> list[int]:
        """Where the other halves of a node's pairs stand. Raises ArgumentError when one is not whole."""
        node = self.surface[i]
        for call in node.calls:
            if call.id in self.running:
                raise ArgumentError(
                    f"#{node.number} holds the call {call.id}, which is running: neither that message nor the results "
                    "of its other calls can be inside a span. End the span before it."
                )
        ids = [node.result_of] if node.role == "tool" else [call.id for call in node.calls]
        found = []
        for id in ids:
            calls, results = self.calls.get(id, []), self.results.get(id, [])
            if len(calls) > 1 or len(results) > 1:
                places = ", ".join(f"#{self.surface[j].number}" for j in sorted({*calls, *results}))
                raise ArgumentError(
                    f"The call id {id} occurs more than once ({places}); choose a span without these messages."
                )
            if not calls or (results and results[0] < calls[0]):
                raise ArgumentError(
                    f"#{self.surface[results[0]].number} is the result of the call {id}, which does not stand before "
                    "it; choose a span without that message."
                )
            if not results:
                raise ArgumentError(
                    f"The call {id} in #{node.number} has no result; end the span before that message, or "
                    "begin it after."
                )
            found += [calls[0], results[0]]
        return found


def plan_span(
    surface: Sequence[Node],
    span: Span,
    writer: Writer,
    limits: Limits | None,
    summary: str,
    *,
    number: int,
    locator: str | None,
    running_call: str | None = None,
) -> Plan:
    """The surface on which `span` has given way to checkpoint `number` with the agent's summary. `locator`: where the
    span is archived, None where it is not. `running_call`: the call that asked for it; when its message holds nothing
    else it becomes a note that says what was done, else it loses its summary and waits for a result. All other nodes
    keep their ids and numbers. `limits` bound the ledger.

    Raises ArgumentError when the summary is empty, NotSmaller when the checkpoint would not be smaller than the span.
    """
    if not anchors.normalise(summary) or not summary.strip():
        raise ArgumentError("The summary is empty; write the complete Markdown text that stands in for the span.")
    if [node.number for node in surface[span.start : span.stop]] != [node.number for node in span.nodes]:
        raise ArgumentError("The span was resolved on another surface; resolve it again.")
    before, after = list(surface[: span.start]), list(surface[span.stop :])
    checkpoint, size = _Drawer(before, span, after, writer, summary, number, locator).checkpoint(limits)
    if running_call is not None:
        words = _note(span, number, span.tokens - size, locator)
        before, after = (_answered(nodes, running_call, words, number, writer) for nodes in (before, after))
    arranged = _arranged([*before, checkpoint, *after], writer)
    at = next(i for i, node in enumerate(arranged) if node.kind == "checkpoint" and not node.number)
    return Plan(tuple(arranged), arranged[at], span.nodes, size_of(arranged[at + 1 :]))


def stubbed(nodes: Sequence[Node], call: str, words: str, writer: Writer) -> list[Node]:
    """The nodes with `words` for the summary of that call, where this is shorter: the call's message is written anew
    under its number, with its text, thinking and other calls."""
    return [_stub(node, call, words, writer) if any(c.id == call for c in node.calls) else node for node in nodes]


@dataclass(frozen=True)
class Estimate:
    """What a plan comes to, in tokens. `first`, `last`, `nodes`: what is covered. `checkpoint`: what would stand in the
    place of the span. `reused`: rows of the session that stay, `evaluated`: what is computed behind them, in `seconds`
    (None while no prefill has been measured)."""

    first: int
    last: int
    nodes: int
    span: int
    checkpoint: int
    freed: int
    before: int
    after: int
    reused: int
    evaluated: int
    seconds: float | None


def estimate(
    surface: Sequence[Node], span: Span, plan: Plan, nearest_exact: Callable[[int], int], speed: float = 0.0
) -> Estimate:
    """What a plan costs and brings; nothing is changed. `nearest_exact`: from a position to the nearest one up to it
    that the session, which holds the surface, can go back to. `speed`: tokens a second of its prefill, 0 = unknown."""
    before, after = tokens_of(surface), tokens_of(plan.surface)
    reused = nearest_exact(common(before, after))
    evaluated = len(after) - reused
    return Estimate(
        first=span.first,
        last=span.last,
        nodes=len(span.nodes),
        span=span.tokens,
        checkpoint=len(plan.checkpoint),
        freed=len(before) - len(after),
        before=len(before),
        after=len(after),
        reused=reused,
        evaluated=evaluated,
        seconds=evaluated / speed if speed > 0 else None,
    )


@dataclass(frozen=True)
class _Drawer:
    """Draws up the checkpoint that stands for `span` between `before` and `after`."""

    before: list[Node]
    span: Span
    after: list[Node]
    writer: Writer
    summary: str
    number: int
    locator: str | None

    def checkpoint(self, limits: Limits | None) -> tuple[Node, int]:
        """The checkpoint, and how many tokens it takes in the place of the span: less than that has. The archives
        always stand in its ledger; all else there takes what room is left and is never why it would not fit. Raises
        NotSmaller."""
        archives = [entry for entry in self._collect(0) if entry.kind == "spill"]
        bounds = []
        if limits is not None:  # an archive that is left out stands in the newer one, in the checkpoint that names it
            archives = ledger.bounded(archives, limits.ledger // 2, 0, self._count)
            bounds.append((limits.ledger - self._count(ledger.render(archives)), limits.human))
        if self.locator:
            archives.append(ledger.Entry("spill", self.locator))
        least = self._node(archives)
        size = self._size(least)
        room = self.span.tokens - 1 - size
        if room < 0:
            raise self._not_smaller(size, archives)
        for others, human in [*bounds, (room // 2, room // 2)]:
            entries = [entry for entry in self._collect(human) if entry.kind != "spill"]
            node = self._node([*ledger.bounded(entries, others, human, self._count), *archives])
            if self._size(node) < self.span.tokens:
                return node, self._size(node)
        return least, size

    def _collect(self, human: int) -> list[ledger.Entry]:
        return ledger.collect(self.span.nodes, self.writer.format.tokenizer, human)

    def _count(self, text: str) -> int:
        return len(self.writer.format.tokenizer.encode(text))

    def _node(self, entries: Sequence[ledger.Entry]) -> Node:
        text = prompts.checkpoint_text(self.number, self.summary, ledger.render(entries))
        first = not any(node.role == "user" for node in self.before)
        data = checkpoint_data(self.number, self.summary, ledger.to_json(entries), self.locator)
        return self.writer.user(text, first=first, kind="checkpoint", data=data)

    def _size(self, node: Node) -> int:
        """What stands in the place of the span, with the fillers that the format wants around it."""
        arranged = _arranged([*self.before, node, *self.after], self.writer)
        return size_of(arranged) - size_of(self.before) - size_of(self.after)

    def _not_smaller(self, size: int, archives: Sequence[ledger.Entry]) -> NotSmaller:
        around = self._size(replace(self, summary="x")._node(archives)) - self._count("x")
        room = max(0, self.span.tokens - 1 - around)
        advice = (
            f"The summary has {size - around} tokens; write it in {room} at most, or choose a larger span."
            if room
            else "Not even an empty summary would fit; choose a larger span."
        )
        error = NotSmaller(
            f"The checkpoint would have {size} tokens and the span #{self.span.first} to #{self.span.last} has "
            f"{self.span.tokens}: it must have fewer. {advice}"
        )
        error.checkpoint, error.span, error.room = size, self.span.tokens, room
        return error


def _note(span: Span, number: int, freed: int, locator: str | None) -> str:
    """What stands for the call and its result. `freed` is what span and checkpoint differ by: the note's own length has
    no part in it."""
    covered = f"#{span.first} to #{span.last} are now checkpoint {number}"
    where = f"archived at {locator}" if locator else "not archived"
    return f"context_compact: done. {covered}, freed {freed} tokens, {where}."


def _answered(nodes: Sequence[Node], call: str, words: str, number: int, writer: Writer) -> list[Node]:
    """The nodes with the call that asked for the compaction, and its result, as one note; or without its summary."""
    asked = next((node for node in nodes if any(c.id == call for c in node.calls)), None)
    if asked is None:
        return list(nodes)
    if len(asked.calls) > 1 or anchors.normalise(asked.text):
        return stubbed(nodes, call, f"{_STORED} {number}", writer)
    note = writer.user(words, first=False, kind="note")
    return [note if node is asked else node for node in nodes if node.result_of != call]


def _stub(node: Node, call: str, words: str, writer: Writer) -> Node:
    calls = tuple(
        replace(c, arguments={**c.arguments, "summary": words}) if c.id == call and "summary" in c.arguments else c
        for c in node.calls
    )
    written = writer.assistant(node.text, calls, node.thinking, node.finish)
    shorter = len(written) < len(node)
    return replace(written, number=node.number, data=node.data) if shorter else node


def _arranged(nodes: Sequence[Node], writer: Writer) -> list[Node]:
    """The nodes as the format can hold them. Fillers that are still needed stay the nodes that they are."""
    fillers = {id(node): filler for filler, node in pairwise(nodes) if filler.kind == "filler"}
    arranged = writer.arrange(nodes)
    behind = [*arranged[1:], None]
    return [
        fillers.get(id(b), node) if node.kind == "filler" else node for node, b in zip(arranged, behind, strict=True)
    ]
