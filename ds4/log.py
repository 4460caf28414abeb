"""The log files of a conversation's folder, read together: which of their lines count, and what is wrong with others.

    log-000001.jsonl    conversation, events ...
    log-000002.jsonl    {"type": "continue", "after": "log-000001.jsonl", "lines": 7, ...}, events ...

A later file goes on behind a line of an earlier one; what stands behind that line there counts no more. The first line
of a file is sealed with the sum of the line that it goes on behind, so the chain holds across files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .errors import FileFormatError
from .files.jsonfile import parse_object
from .sealed import CUT, Damage, Reader, open_regular

MAX_FILES = 999_999_999
LOG = re.compile(r"log-([0-9]{6,9})\.jsonl")


@dataclass(frozen=True)
class Place:
    """A good line: its file, its number there, its sum, and how many events there are up to and with it."""

    file: str
    line: int
    sum: str
    events: int


@dataclass
class Scan:
    """What the log files of a folder hold. `live`: the first damage that no later file has gone on behind; `damages`:
    all. `tail`: the file that the next event is appended to, None when it opens the next file."""

    events: list[dict[str, Any]] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    damages: list[Damage] = field(default_factory=list)
    live: Damage | None = None
    tail: str | None = None
    next_file: int = 1

    def cut(self, index: int, what: str) -> Damage:
        """Leaves out the events from `index` on; says where the first of them stands."""
        at = next(i for i, spot in enumerate(self.places) if spot.events == index + 1)
        damage = Damage(self.places[at].file, self.places[at].line, what)
        del self.places[at:], self.events[index:]
        self.tail, self.live = None, damage
        self.damages.append(damage)
        return damage


def log_name(number: int) -> str:
    return f"log-{number:06d}.jsonl"


def log_files(path: Path) -> list[str]:
    """The names of the log files in a folder, in order."""
    try:
        names = os.listdir(path)
    except OSError:
        return []
    numbers = sorted(int(match[1]) for name in names if (match := LOG.fullmatch(name)))
    return [log_name(number) for number in numbers if number and log_name(number) in names]


def scan(path: Path) -> Scan:
    """Reads all log files of a folder; changes nothing."""
    found = Scan()
    for name in log_files(path):
        match = LOG.fullmatch(name)
        assert match is not None
        found.next_file, found.tail = int(match[1]) + 1, None
        if name == log_name(1):
            reader = Reader(path / name)
            lines = iter(reader)
        else:
            at = _behind(path / name, found.places)
            if isinstance(at, Damage):
                _damaged(found, at)
                continue
            reader = Reader(path / name, found.places[at].sum)
            lines = iter(reader)
            if next(lines, None) is None:
                _damaged(found, reader.damage or Damage(name, 1, "empty"))
                continue
            del found.places[at + 1 :], found.events[found.places[at].events :]
            found.places.append(Place(name, 1, reader.sum, len(found.events)))
            found.live = None
            found.damages = [replace(damage, passed=True) for damage in found.damages]
        for event in lines:
            found.events.append(event)
            found.places.append(Place(name, reader.lines, reader.sum, len(found.events)))
        if reader.damage is not None:
            _damaged(found, reader.damage)
        elif found.places and found.places[-1].file == name:
            found.tail = name
    return found


def _damaged(found: Scan, damage: Damage) -> None:
    found.damages.append(damage)
    found.live = found.live or damage


def _behind(path: Path, places: Sequence[Place]) -> int | Damage:
    """Behind which of the places a log file goes on, by its first line."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            line = file.readline(4096)
        if len(line) < 4096 and not line.endswith(b"\n"):
            return Damage(path.name, 1, CUT)
        first = parse_object(line, "it")
    except (OSError, FileFormatError):
        return Damage(path.name, 1, "it does not say which line of the log it goes on behind")
    after, lines = first.get("after"), first.get("lines") if first.get("type") == "continue" else None
    for i in range(len(places) - 1, -1, -1):
        if places[i].file == after and places[i].line == lines and type(lines) is int:
            return i
    return Damage(path.name, 1, "it goes on behind a line that cannot be read any more")


def referred(events: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """The spill files that events refer to: number -> sum."""
    found: dict[int, str] = {}
    for event in events:
        spills = event.get("spills")
        for item in spills if isinstance(spills, list) else ():
            if isinstance(item, dict) and type(item.get("number")) is int and isinstance(item.get("sum"), str):
                found[item["number"]] = item["sum"]
    return found
