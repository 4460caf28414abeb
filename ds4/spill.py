"""Spill: the raw nodes that a compaction replaced, one file each, never overwritten.

    <store>/spill/session-<12 hex of SHA-256 of the conversation's id>/000001.jsonl

A file is made in two steps, because its name stands in the text of the checkpoint before that is final: `prepare` takes
the number and writes the file, durable, under a temporary name; `commit` gives it its own. What was prepared and not
committed when the process died is finished by the next opening when the log refers to it, else removed (`recover`).

The lines are sealed (ds4.sealed). The first says what the file is, then comes one node a line, with every field.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from .errors import ArgumentError, FileFormatError
from .node_json import MAX_NUMBER, clean, from_json, to_json, whole
from .nodes import Node
from .sealed import Damage, Reader, make_folder, place, plain, seal, write_temporary

_FILE = re.compile(r"([0-9]{6,18})\.jsonl")
_TEMPORARY = re.compile(r"\.([0-9]{6,18})-[0-9a-f]{8}\.tmp")
_LOCATOR = re.compile(r"(?:.*/)?(session-[0-9a-f]{12})/([0-9]{6,18})\.jsonl|memory:([0-9]{6,18})|#?([0-9]{1,30})")


def folder_name(id: str) -> str:
    """The folder of a conversation inside its store's spill."""
    return f"session-{hashlib.sha256(id.encode()).hexdigest()[:12]}"


def file_name(number: int) -> str:
    return f"{number:06d}.jsonl"


class Entry:
    """A spill file in the making. `number` and `locator` are its own unless it is discarded; `sum` seals it."""

    def __init__(self, spill: Spill, number: int, lines: list[bytes], sum: str) -> None:
        self.number, self.sum = number, sum
        self._spill, self._lines = spill, lines
        self._temporary: Path | None = None
        self.locator = spill.locator(number)

    def commit(self) -> None:
        """Puts the file in its place. Raises OSError when the system refuses; nothing is overwritten."""
        if self._temporary is None:
            self._spill._keep(self)
        else:
            path = self._temporary.parent / file_name(self.number)
            place(self._temporary, path)
        self._spill._pending.discard(self.number)

    def keep(self) -> None:
        """Keeps the contents in memory, under the same locator: for a store that cannot be written any more. A file
        that is already written under its temporary name stays, so that the next opening can finish it."""
        self._spill._keep(self)
        self._spill._pending.discard(self.number)

    def discard(self) -> None:
        """As if it had never been prepared."""
        if self._temporary is not None:
            with suppress(OSError):
                os.unlink(self._temporary)
                for folder in (self._temporary.parent, self._temporary.parent.parent):
                    os.rmdir(folder)  # fails, and ends the loop, when there is anything else in it
        self._spill._give_back(self.number)


class Spill:
    """The spill of one conversation; `folder` is None for one in memory. `origins` are the names of the folders whose
    locators mean files of this one: a fork has copies of what its parent spilled."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.origins: set[str] = {folder.name} if folder is not None else set()
        self._memory: dict[int, list[bytes]] = {}
        self._pending: set[int] = set()
        self._returned: set[int] = set()  # discarded while a higher one was taken: the next one fills the gap
        self._files = folder  # where files are, also when new entries go to memory

    def prepare(self, nodes: Sequence[Node], **head: Any) -> Entry:
        """Takes the next number and writes the nodes under a temporary name, made durable. Raises OSError when the
        system refuses; nothing is left then."""
        number = self._next()
        self._returned.discard(number)
        self._pending.add(number)
        try:
            first = {"type": "spill", **plain(head), "file": number, "nodes": len(nodes)}
            lines, sum = _sealed([first, *(to_json(clean(node)) for node in nodes)])
            entry = Entry(self, number, lines, sum)
            if self.folder is not None:
                entry._temporary = _write(self.folder, number, lines)
            return entry
        except BaseException:
            self._give_back(number)
            raise

    def locator(self, number: int) -> str:
        """How the entry of that number is named, if it is made now."""
        return f"memory:{number:06d}" if self.folder is None else str(self.folder / file_name(number))

    def upcoming(self) -> str:
        """The locator that the next entry will have."""
        return self.locator(self._next())

    def read(self, which: str | int) -> list[dict[str, Any]]:
        """The nodes of a spill file, by its locator or number, as JSON objects with every field. Raises ArgumentError
        when there is none, FileFormatError (naming file and line) when it is damaged."""
        nodes, damage = self.load(which)
        if damage is not None:
            raise FileFormatError(f"{self._files or 'memory'}{os.sep}{damage}.")
        return nodes

    def load(self, which: str | int) -> tuple[list[dict[str, Any]], Damage | None]:
        """Like `read`, for a file that may be damaged: the nodes before the damage, and what it is."""
        number = self._number(which)
        if number in self._memory:
            return _check([json.loads(line) for line in self._memory[number]], number)
        if self._files is None or not os.path.lexists(self._files / file_name(number)):
            raise ArgumentError(f"spill {number} does not exist; there are {_listed(self.numbers())}.")
        nodes, damage, _ = _load(self._files / file_name(number), number)
        return nodes, damage

    def numbers(self) -> list[int]:
        """The numbers of all committed entries."""
        return sorted({*_numbers(self._files), *self._memory})

    def to_memory(self) -> None:
        """From now on new entries are kept in memory; files stay readable."""
        self.folder = None

    def copy_to(self, folder: Path) -> None:
        """Writes all entries into an empty folder, under their numbers: for a fork."""
        for number in self.numbers():
            place(_write(folder, number, self._raw(number)), folder / file_name(number))

    def copy(self) -> Spill:
        """All entries in memory: for a fork."""
        made = Spill()
        made._memory = {number: self._raw(number) for number in self.numbers()}
        return made

    def recover(self, referred: Mapping[int, str]) -> None:
        """After a crash: finishes the files that the log refers to (number -> sum) and removes other temporary ones."""
        if self.folder is None or not self.folder.is_dir():
            return
        for path in sorted(self.folder.iterdir()):
            match = _TEMPORARY.fullmatch(path.name)
            if match is None or path.is_symlink() or not path.is_file():
                continue
            number = int(match[1])
            final = self.folder / file_name(number)
            if number in referred and not os.path.lexists(final):
                _, damage, sum = _load(path, number)
                if damage is None and sum == referred[number]:
                    place(path, final)
                    continue
            os.unlink(path)

    def _raw(self, number: int) -> list[bytes]:
        if number in self._memory:
            return self._memory[number]
        assert self._files is not None
        return (self._files / file_name(number)).read_bytes().splitlines(keepends=True)

    def _next(self) -> int:
        taken = {*self.numbers(), *self._pending}
        gaps = self._returned - taken
        return min(gaps) if gaps else max(taken, default=0) + 1

    def _give_back(self, number: int) -> None:
        self._pending.discard(number)
        self._returned.add(number)
        highest = max({*self.numbers(), *self._pending}, default=0)
        self._returned = {n for n in self._returned if n < highest}

    def _keep(self, entry: Entry) -> None:
        self._memory[entry.number] = entry._lines

    def _number(self, which: str | int) -> int:
        match = _LOCATOR.fullmatch(str(which).strip()) if isinstance(which, (str, int)) else None
        if match is None or (match[1] and match[1] not in self.origins):
            raise ArgumentError(f"{str(which)[:200]!r} names no spill of this conversation.")
        return int(next(group for group in match.groups()[1:] if group))


def damages(folder: Path, referred: Mapping[int, str]) -> list[Damage]:
    """What is wrong with the files of a spill folder, and those that the log refers to and that are not there."""
    found = []
    for number in sorted({*_numbers(folder), *referred}):
        path = folder / file_name(number)
        if not os.path.lexists(path):
            found.append(Damage(path.name, 0, "the log refers to it, and it is missing"))
            continue
        _, damage, sum = _load(path, number)
        if damage is not None:
            found.append(damage)
        elif number in referred and sum != referred[number]:
            found.append(Damage(path.name, 0, "not the file that the log refers to"))
    return found


def _numbers(folder: Path | None) -> list[int]:
    """The numbers of the files in a folder; foreign names are ignored."""
    try:
        names = os.listdir(folder) if folder is not None else []
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = [int(match[1]) for name in names if (match := _FILE.fullmatch(name))]
    return [number for number in found if number > 0 and file_name(number) in names]


def _sealed(values: Iterable[Mapping[str, Any]]) -> tuple[list[bytes], str]:
    lines, sum = [], ""
    for value in values:
        line, sum = seal(value, sum)
        lines.append(line)
    return lines, sum


def _write(folder: Path, number: int, lines: Iterable[bytes]) -> Path:
    make_folder(folder.parent)
    make_folder(folder)
    return write_temporary(folder, f"{number:06d}", lines)


def _load(path: Path, number: int) -> tuple[list[dict[str, Any]], Damage | None, str]:
    reader = Reader(path)
    lines, damage = _check(list(reader), number)
    return lines, reader.damage or damage, reader.sum


def _check(lines: list[dict[str, Any]], number: int) -> tuple[list[dict[str, Any]], Damage | None]:
    """The nodes of a file's lines, and the first thing that is wrong with what they say."""
    name, nodes, expected = file_name(number), [], 0
    for i, line in enumerate(lines):
        line.pop("sum", None)
        try:
            if i:
                from_json(line, least=0)
                nodes.append(line)
            elif line.get("type") == "spill" and line.get("file") == number:
                expected = whole(line.get("nodes"), "nodes", 0, MAX_NUMBER)
            else:
                raise FileFormatError("not the first line of this spill file")
        except FileFormatError as error:
            return nodes, Damage(name, i + 1, str(error))
    if not lines or expected != len(nodes):
        at = min(len(lines), expected + 1) + 1
        return nodes[:expected], Damage(name, at, f"the file has {len(nodes)} nodes, and was written with {expected}")
    return nodes, None


def _listed(numbers: Sequence[int]) -> str:
    return f"{numbers[0]} to {numbers[-1]}" if numbers else "none"
