"""The transcript of a conversation: an append-only log of events, and the surface that they lead to.

    conversation   the first: id, version, info
    append         nodes at the end of the surface; "release": the pending slot is empty from here on
    replace        the new surface: numbers of nodes that stay, nodes that are new or rendered anew
    rewind         back to what the surface was behind event "to" (an undo is one)
    hold, release  the pending slot
    others         records: brackets and notes, which change nothing

Events are numbered without a gap (`seq`), nodes too (`number`, never used again, also after a rewind). A rewind takes
nothing away: the log is a tree whose branches are all there, and the *present line* is the path from its root to where
the surface is now. Nothing counts positions across a replace: it names nodes by number.

What an event does is written once, in `State.apply`; a transcript in use and one that is read again both go through it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from .errors import ArgumentError, FileFormatError
from .files.base import quote
from .interrupts import uninterrupted
from .node_json import MAX_ID, MAX_NUMBER, clean, from_json, to_json, whole
from .nodes import Node, size_of, tokens_of
from .sealed import plain
from .spill import Entry
from .store import MemoryStore, Store
from .tokenizer.base import characters

_RECORD = re.compile(r"[a-z][a-z0-9_]{0,63}")
_RESERVED = {"conversation", "append", "replace", "rewind", "hold", "release", "continue", "spill"}


@dataclass(frozen=True)
class Held:
    """What waits to be appended: a "user" text, or a "tool" result of the call `call`, the index-th of `count`."""

    kind: str
    text: str
    call: str = ""
    index: int = 0
    count: int = 1


class _Step:
    """A place in the history of the surface: what came since `parent`. `surface` is all of it where one was put in
    place, else None; `seq` is its event's."""

    __slots__ = ("checkpoint", "parent", "seq", "surface", "nodes")

    def __init__(self, parent: _Step | None, seq: int, nodes: tuple[Node, ...], surface: tuple[Node, ...] | None):
        self.parent, self.seq, self.nodes, self.surface = parent, seq, nodes, surface
        self.checkpoint = surface is not None and any(node.kind == "checkpoint" for node in nodes)


class State:
    """What a log leads to. `info`: what the first event says; `last`: the highest number of a node; `nodes`: all nodes
    ever, as they first came; `held`, `checkpoints`: as in Transcript; `origins`: whose spill locators are ours too."""

    def __init__(self) -> None:
        self.id = ""
        self.info: dict[str, Any] = {}
        self.seq = self.last = self.checkpoints = self.size = 0
        self.held: Held | None = None
        self.origins: tuple[str, ...] = ()
        self.nodes: dict[int, Node] = {}
        self.surface: list[Node] = []
        self._head: _Step | None = None
        self._heads: list[_Step | None] = [None]  # by seq

    def apply(self, event: Mapping[str, Any]) -> None:
        """Takes one more event. Raises FileFormatError, and stays as it was, when it cannot come next."""
        if event.get("seq") != self.seq + 1 or type(event.get("seq")) is not int:
            raise FileFormatError(f"the event has the number {quote(event.get('seq'))} instead of {self.seq + 1}")
        type_ = event.get("type")
        if (type_ == "conversation") != (self.seq == 0) or not isinstance(type_, str) or not _RECORD.fullmatch(type_):
            raise FileFormatError(f"an event {quote(type_)} cannot stand here")
        if type_ in _RESERVED:
            if type_ in ("continue", "spill"):
                raise FileFormatError(f"{type_} is no event")
            getattr(self, f"_{type_}")(event)
        elif type_ == "forked":
            self.origins = _origins(event)
        self.seq += 1
        self._heads.append(self._head)

    def apply_all(self, events: Iterable[Mapping[str, Any]]) -> str | None:
        """Takes events up to the first that cannot come next; says what is wrong with that one."""
        for event in events:
            try:
                self.apply(event)
            except FileFormatError as error:
                return str(error)
        return None

    def _conversation(self, event: Mapping[str, Any]) -> None:
        if not isinstance(event.get("id"), str) or not isinstance(event.get("info"), dict):
            raise FileFormatError("the first event has no id or no info")
        self.id, self.info = event["id"], event["info"]

    def _append(self, event: Mapping[str, Any]) -> None:
        listed, release = event.get("nodes"), event.get("release", False)
        if not isinstance(listed, list) or not isinstance(release, bool):
            raise FileFormatError("nodes or release of an append do not fit")
        nodes = self._new([from_json(value) for value in listed])
        self._take(nodes)
        self.held = None if release else self.held
        self._head = _Step(self._head, self.seq + 1, tuple(nodes), None)
        self.surface += nodes
        self.size += size_of(nodes)

    def _replace(self, event: Mapping[str, Any]) -> None:
        listed = event.get("surface")
        if not isinstance(listed, list):
            raise FileFormatError("the surface of a replace is no list")
        there = {node.number: node for node in self.surface}
        surface: list[Node] = []
        for value in listed:
            if isinstance(value, dict):
                surface.append(from_json(value))
            elif type(value) is int and value in there:
                surface.append(there[value])
            else:
                raise FileFormatError(f"node {quote(value)} is not on the surface that is replaced")
        if len({node.number for node in surface}) != len(surface):
            raise FileFormatError("a node stands twice on the surface")
        for node in surface:
            if node.number <= self.last and (node.number not in there or there[node.number].role != node.role):
                raise FileFormatError(f"node {node.number} is not on the surface that is replaced, or had another role")
        new = self._new([node for node in surface if node.number > self.last])
        self._take(new)
        self._head = _Step(self._head, self.seq + 1, tuple(new), tuple(surface))
        self.surface, self.size = surface, size_of(surface)

    def _rewind(self, event: Mapping[str, Any]) -> None:
        to = whole(event.get("to"), "the target of a rewind", 1, self.seq)
        self._head = self._heads[to]
        self.surface = self.surface_of(self._head)
        self.size = size_of(self.surface)

    def _hold(self, event: Mapping[str, Any]) -> None:
        value = event.get("held")
        if not isinstance(value, dict) or set(value) != {"kind", "text", "call", "index", "count"}:
            raise FileFormatError("a hold has not the fields that it needs")
        if value["kind"] not in ("user", "tool") or not all(isinstance(value[name], str) for name in ("text", "call")):
            raise FileFormatError("kind, text or call of a hold do not fit")
        count = whole(value["count"], "count", 1, MAX_ID)
        self.held = Held(
            value["kind"], value["text"], value["call"], whole(value["index"], "index", 0, count - 1), count
        )

    def _release(self, event: Mapping[str, Any]) -> None:
        self.held = None

    def _new(self, nodes: list[Node]) -> list[Node]:
        """The nodes, when their numbers are the next ones. An order is not asked for: a surface has its own."""
        numbers = sorted(node.number for node in nodes)
        if numbers != list(range(self.last + 1, self.last + 1 + len(nodes))) or self.last + len(nodes) > MAX_NUMBER:
            raise FileFormatError(f"new nodes have to be numbered from {self.last + 1} on")
        return nodes

    def _take(self, nodes: list[Node]) -> None:
        self.nodes.update((node.number, node) for node in nodes)
        self.last += len(nodes)
        self.checkpoints += sum(node.kind == "checkpoint" for node in nodes)

    def line(self) -> Iterator[_Step]:
        """The steps of the present line, newest first."""
        step = self._head
        while step is not None:
            yield step
            step = step.parent

    @staticmethod
    def surface_of(step: _Step | None) -> list[Node]:
        """What the surface was at a step."""
        parts: list[tuple[Node, ...]] = []
        while step is not None:
            if step.surface is not None:
                parts.append(step.surface)
                break
            parts.append(step.nodes)
            step = step.parent
        return [node for part in reversed(parts) for node in part]

    def history(self) -> list[Node]:
        """Every node of the present line as it first came, in order."""
        return [node for step in reversed(list(self.line())) for node in sorted(step.nodes, key=lambda n: n.number)]


def fold(events: Iterable[Mapping[str, Any]]) -> State:
    """The state that events lead to. Raises FileFormatError at the first that cannot be."""
    state = State()
    for event in events:
        state.apply(event)
    return state


class Transcript:
    """A conversation's log and surface. One writer at a time.

    >>> transcript = Transcript()                      # in memory; Transcript(Store.open(path)) reads what is there
    >>> [node] = transcript.append(writer.user("Hello", first=True))
    >>> transcript.undo()
    'turn'

    Where the store cannot be written, everything goes on in memory: see `store.failed`.
    """

    def __init__(self, store: MemoryStore | None = None) -> None:
        self.store = store if store is not None else MemoryStore()
        self._state = State()
        self._surface: tuple[Node, ...] | None = None
        self._tokens: list[int] | None = None
        if (fault := self._state.apply_all(self.store.events())) is not None:
            self.store.reject(self._state.seq, fault)
        self.store.spill.origins.update(self._state.origins)

    @classmethod
    def open(cls, store: MemoryStore) -> Transcript:
        """The transcript of a store's log."""
        return cls(store)

    @property
    def info(self) -> dict[str, Any]:
        """What the conversation was made with."""
        return self._state.info

    @property
    def surface(self) -> tuple[Node, ...]:
        """What the model sees now."""
        if self._surface is None:
            self._surface = tuple(self._state.surface)
        return self._surface

    @property
    def tokens(self) -> list[int]:
        """The ids of the surface; a new list after each change."""
        if self._tokens is None:
            self._tokens = tokens_of(self._state.surface)
        return self._tokens

    @property
    def size(self) -> int:
        """How many tokens the surface has."""
        return self._state.size

    @property
    def seq(self) -> int:
        """The number of the last event."""
        return self._state.seq

    @property
    def held(self) -> Held | None:
        """What waits to be appended. It is logged, so it survives a crash, and rewinds leave it alone."""
        return self._state.held

    @property
    def checkpoints(self) -> int:
        """How many checkpoints were ever made, undone ones too: the next has this number + 1."""
        return self._state.checkpoints

    def append(self, *nodes: Node, release: bool = False, spills: Sequence[Entry] = ()) -> list[Node]:
        """Appends nodes as one event; returns them as the log has them, with their numbers. `release`: the same event
        empties the pending slot. `spills` are committed with it."""
        if not nodes and not release:
            return []
        first = self._state.last + 1
        made = [self._numbered(node, first + i) for i, node in enumerate(nodes)]
        fields: dict[str, Any] = {"release": True} if release else {}
        self._do("append", {"nodes": [to_json(node) for node in made], **fields}, spills)
        return self._state.surface[len(self._state.surface) - len(made) :]

    def replace(self, surface: Sequence[Node], *, spills: Sequence[Entry] = (), **info: Any) -> None:
        """Puts a new surface in place, as one event. Nodes with a number have to be on the surface now: as they are,
        or rendered anew (the same role, other ids). Those without get one. `info` is logged, `spills` are committed
        with it.

        Raises ArgumentError, before anything is written, for any other node.
        """
        there = {node.number: node for node in self._state.surface}
        listed: list[Any] = []
        next_number = self._state.last + 1
        for node in surface:
            if not node.number:
                listed.append(to_json(self._numbered(node, next_number)))
                next_number += 1
                continue
            old = there.pop(node.number, None)
            if old is None:
                raise ArgumentError(f"node {node.number} is not on the surface, or stands twice in the new one.")
            if old is node or old == node:
                listed.append(node.number)
            elif old.role == node.role and old.ids != node.ids:
                listed.append(to_json(clean(node)))
            else:
                raise ArgumentError(f"node {node.number} was changed, and not rendered anew: its ids are the truth.")
        self._do("replace", {"surface": listed, "info": plain(info)}, spills)

    def hold(self, held: Held) -> None:
        """Puts something into the pending slot, in the place of what is there."""
        if held.kind not in ("user", "tool") or not 0 <= held.index < held.count <= MAX_ID:
            raise ArgumentError(f"only a user text or a tool result can be held, not {held.kind!r}.")
        held = replace(held, text=characters(held.text), call=characters(held.call))
        self._do("hold", {"held": asdict(held)})

    def release_held(self) -> None:
        """Empties the pending slot; with nothing in it this does nothing."""
        if self.held is not None:
            self._do("release", {})

    def record(self, type: str, **fields: Any) -> None:
        """Logs something that does not change the surface, like "compaction_started"."""
        if type in _RESERVED or type == "forked" or not _RECORD.fullmatch(type):
            raise ArgumentError(f"a record cannot be called {type!r}.")
        if taken := {"seq", "type", "sum", "spills"} & set(fields):
            raise ArgumentError(f"a record cannot have a field {min(taken)!r}.")
        self._do(type, plain(fields))

    def undo(self) -> str:
        """Takes back the newest of: the turn that began with the last human message ("turn"), the last compaction
        ("compaction"). What came with and behind it goes as well. Returns which it was; raises ArgumentError when there
        is neither."""
        for step in self._state.line():
            if step.checkpoint or (step.surface is None and any(node.human for node in step.nodes)):
                what = "compaction" if step.checkpoint else "turn"
                self._do("rewind", {"to": step.seq - 1, "undo": what})
                return what
        raise ArgumentError("there is nothing to undo: no message and no compaction.")

    def rewind_to_answer(self) -> None:
        """Back to right behind the last human message, so that it can be answered again. Raises ArgumentError when
        there is none."""
        for step in self._state.line():
            if step.surface is None and any(node.human for node in step.nodes):
                return self.rewind(step.seq)
        raise ArgumentError("there is no answer to try again; ask something first.")

    def rewind(self, seq: int) -> None:
        """Back to the surface behind event `seq`. Numbers go on, and the pending slot stays as it is."""
        if not 1 <= seq <= self.seq:
            raise ArgumentError(f"there is no event {seq}: the last one is {self.seq}.")
        self._do("rewind", {"to": int(seq)})

    def fork(self, path: str | os.PathLike[str] | None = None) -> Transcript:
        """A new conversation with the same history, spill files included; in a new folder, or in memory. Raises
        StoreError when the folder is not free."""
        first, *events = self.store.events()
        names = sorted({*self.store.spill.origins, *self._state.origins})
        events.append({"seq": self.seq + 1, "type": "forked", "of": self.store.id, "at": self.seq, "origins": names})
        store: MemoryStore
        if path is not None:
            store = Store.create(path, first["info"], events=events, spill=self.store.spill)
        else:
            store = MemoryStore(first["info"])
            store.spill = self.store.spill.copy()
            for event in events:
                store.append(event)
        return Transcript(store)

    def find(self, number: int) -> Node:
        """Any node there ever was, as it first came. Raises ArgumentError when there is none."""
        if number not in self._state.nodes:
            raise ArgumentError(f"there is no node #{number}: the last one is #{self._state.last}.")
        return self._state.nodes[number]

    def history(self) -> list[Node]:
        """Every node that led to the present surface, replaced ones too, as they first came, in order."""
        return self._state.history()

    def _numbered(self, node: Node, number: int) -> Node:
        if node.number:
            raise ArgumentError(f"node {node.number} has been taken already: give it without its number.")
        return replace(clean(node), number=number)

    def _do(self, type: str, fields: dict[str, Any], spills: Sequence[Entry] = ()) -> None:
        """The log first, then the files that it refers to (after a crash the next opening finishes them), then the
        state."""
        event = {"seq": self.seq + 1, "type": type, **fields}
        if spills:
            event["spills"] = [{"number": entry.number, "sum": entry.sum} for entry in spills]
        with uninterrupted():
            self.store.append(event)
            for entry in spills:
                try:
                    if self.store.failed is None:
                        entry.commit()
                    else:
                        entry.keep()
                except OSError:
                    entry.keep()
            self._state.apply(event)
            self._surface = self._tokens = None


def _origins(event: Mapping[str, Any]) -> tuple[str, ...]:
    names = event.get("origins")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise FileFormatError("the origins of a fork are no list of names")
    return tuple(names)
