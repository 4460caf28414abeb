"""The built-in tools: reading files of a root folder and, where the user allows it, changing them and running commands.

Descriptions are short on purpose: all reading tools together have to fit a small model with a context of 4096.
"""

from __future__ import annotations

import codecs
import os
import re
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, BinaryIO

from ds4.agent.bash import Jobs, bash_tools
from ds4.agent.sandbox import FOLDER, KINDS, Root, need_file
from ds4.agent.search import Found, search
from ds4.agent.tools import Tool, tool, visible
from ds4.errors import ArgumentError, Cancelled
from ds4.memory import size_text

MAX_LINE = 2000  # bytes shown of one line
MAX_READ = 1 << 30  # bytes of a file whose lines are counted
MAX_EDIT = 16 << 20  # bytes of a file that is edited
MIN_BYTES = 256
MAX_ENTRIES = 200
MAX_DEPTH = 8
MAX_SCAN = 100_000  # names of one folder that are sorted
_SNIFF = 8192  # a NUL byte in so many first bytes: a binary file


def builtin_tools(
    root: str | Path | Root,
    *,
    write: bool = False,
    bash: bool = False,
    jobs: Jobs | None = None,
    max_lines: int = 200,
    max_bytes: int = 16_000,
    search_seconds: float = 10,
    bash_seconds: float = 60,
) -> list[Tool]:
    """The tools `read`, `more`, `list`, `search`; with `write` also `write` and `edit`, with `bash` also `bash` and
    `job`. These need permission for each call, `job` excepted.

    `root`: the folder that no path leads out of. `max_lines`, `max_bytes` bound a result of `read`, `max_bytes` also
    one of `search` and what is kept of a command's output. `jobs`: where background jobs are kept, by default a list
    of their own that ends with the tools. Raises ArgumentError when the root is no folder.
    """
    if max_lines < 1 or max_bytes < MIN_BYTES:
        raise ArgumentError(
            f"max_lines is at least 1 and max_bytes at least {MIN_BYTES}, not {max_lines} and {max_bytes}."
        )
    root = root if isinstance(root, Root) else Root(root)
    files = _Files(root, max_lines, max_bytes, search_seconds)
    tools = [
        tool(files.read, describe=lambda a: f"read {a['path']}"),
        tool(files.more, describe=lambda a: "read more"),
        tool(files.list_folder, name="list", describe=lambda a: f"list {a.get('path', '.')}"),
        tool(files.search, describe=lambda a: f"search {a['pattern']} in {a.get('path', '.')}"),
    ]
    if write:
        tools += [
            tool(files.write, needs_permission=True, describe=_describe_write),
            tool(files.edit, needs_permission=True, describe=_describe_edit),
        ]
    if bash:
        tools += bash_tools(jobs if jobs is not None else Jobs(root, max_bytes), bash_seconds)
    return tools


@dataclass
class _Last:
    """Where `more` goes on, and what the file looked like."""

    path: str
    next: int
    lines: int
    stamp: tuple[int, ...]


class _Files:
    """The tools on files, and the one thing they remember: the last read."""

    def __init__(self, root: Root, max_lines: int, max_bytes: int, search_seconds: float) -> None:
        self._root = root
        self._max_lines, self._max_bytes, self._search_seconds = max_lines, max_bytes, search_seconds
        self._last: _Last | None = None

    # -- reading

    def read(self, path: str, cancel: threading.Event, start: int = 1, lines: int | None = None) -> str:
        """Read lines of a text file.

        start: first line
        lines: how many
        """
        if start < 1 or (lines is not None and lines < 1):
            raise ArgumentError("start and lines count from 1.")
        return self._read(path, start, min(lines or self._max_lines, self._max_lines), cancel)

    def more(self, cancel: threading.Event) -> str:
        """Read the next part of the file read last."""
        if self._last is None:
            raise ArgumentError("nothing has been read yet; call read with a path.")
        return self._read(self._last.path, self._last.next, self._last.lines, cancel, self._last.stamp)

    def _read(
        self, path: str, start: int, count: int, cancel: threading.Event, stamp: tuple[int, ...] | None = None
    ) -> str:
        file, name = self._root.open(path)
        with file:
            _refuse_binary(file, name)
            info = os.fstat(file.fileno())
            if info.st_size > MAX_READ:
                raise ArgumentError(f"{name} is too large to read ({size_text(info.st_size)}); search it instead.")
            total, offset = _find_line(file, start, cancel)
            now = (info.st_ino, info.st_size, info.st_mtime_ns)
            if not total:
                return f"{name} is empty."
            if start > total:
                if stamp is not None:
                    return f"{name} was read to its end, {total} lines."
                raise ArgumentError(f"{name} has {total} lines; start at one of them.")
            file.seek(offset)
            shown, whole = self._lines(file, start, min(count, total - start + 1))
        last = start + len(shown) - 1
        self._last = _Last(name, last + 1, count, now)
        head = f"{name} lines {start}-{last} of {total}"
        head += " (the file has changed since the last part)" * (stamp not in (None, now))
        head += " (\ufffd stands for bytes that are no UTF-8)" * (not whole)
        foot = [f"(goes on to line {total}: call more, or read with start={last + 1})"] if last < total else []
        return "\n".join([head, *shown, *foot])

    def _lines(self, file: BinaryIO, start: int, count: int) -> tuple[list[str], bool]:
        """(numbered lines from here on, at least one and as many as fit, whether all bytes were UTF-8)."""
        shown: list[str] = []
        room, whole = self._max_bytes, True
        for number in range(start, start + count):
            text, is_whole = _line(file, min(MAX_LINE, self._max_bytes))
            if number == 1:
                text = text.removeprefix("\ufeff")
            line = f"{number}\t{text}"
            room -= len(line.encode("utf-8")) + 1
            if shown and room < 0:
                break
            shown.append(line)
            whole = whole and is_whole
        return shown, whole

    def list_folder(self, path: str = ".", depth: Annotated[int, "levels of folders"] = 1) -> str:
        """List the files of a folder."""
        with self._root.walk(path) as place:
            if place.name:
                what = "does not exist" if place.info is None else "is no folder; read it"
                raise ArgumentError(f"{place.path} {what}.")
            entries = list(islice(_entries(place.folder, "", min(depth, MAX_DEPTH)), MAX_ENTRIES + 1))
        if not entries:
            return f"{place.path} is empty."
        if len(entries) > MAX_ENTRIES:
            entries[-1] = f"(only the first {MAX_ENTRIES} are shown; list a folder below, or search)"
        return "\n".join([f"{place.path}:", *entries])

    def search(
        self,
        pattern: Annotated[str, "regular expression"],
        cancel: threading.Event,
        path: str = ".",
        files: Annotated[str, "file names, such as *.py"] = "*",
    ) -> str:
        """Find lines in files."""
        with self._root.walk(path) as place:
            if place.name:
                need_file(place)
            found = search(place.folder, place.name, pattern, files, self._search_seconds, cancel)
        if found.error:
            raise ArgumentError(
                f"the pattern {pattern!r:.100} cannot be used: {found.error}. Write \\ before ( ) [ ] {{ }} . * + ? to "
                "find the character itself."
            )
        if found.stopped == "cancel":
            raise Cancelled("cancelled.")
        base = place.path if not place.name else os.path.dirname(place.path)
        return self._found(found, "" if base in ("", ".") else f"{base}/", pattern)

    def _found(self, found: Found, base: str, pattern: str) -> str:
        shown: list[str] = []
        room = self._max_bytes
        for path, number, text in found.matches:
            line = f"{visible(base + path)}:{number}: {text}"
            room -= len(line.encode("utf-8", "replace")) + 1
            if shown and room < 0:
                found.stopped = "matches"
                break
            shown.append(line)
        if found.stopped == "time":
            shown.append(f"(stopped after {self._search_seconds:g} s: simplify the pattern, or name a path)")
        elif found.stopped == "matches":
            shown.append(f"(stopped at {len(shown)} matches: narrow the pattern, path or files)")
        return "\n".join(shown) or f"no match for {pattern!r:.100} in {found.files} files."

    # -- writing

    def write(self, path: str, text: str) -> str:
        """Write a file; what it held is replaced."""
        data = text.encode("utf-8")
        name, is_new = self._root.replace(path, data)
        return f"{name} written: {_count(data)} lines, {size_text(len(data))}{' (new)' if is_new else ''}"

    def edit(self, path: str, old: Annotated[str, "text that occurs once, exactly as in the file"], new: str) -> str:
        """Replace a text in a file."""
        if not old or old == new:
            raise ArgumentError("old is empty; use write." if not old else "old and new are the same text.")
        file, name = self._root.open(path)
        with file:
            _refuse_binary(file, name)
            data = file.read(MAX_EDIT + 1)
        if len(data) > MAX_EDIT:
            raise ArgumentError(f"{name} is larger than {size_text(MAX_EDIT)}; it cannot be edited.")
        before, after = old.encode("utf-8"), new.encode("utf-8")
        if data.count(b"\n") == data.count(b"\r\n") > 0:  # a model sees and writes plain line ends
            before, after = (re.sub(rb"\r?\n", b"\r\n", one) for one in (before, after))
        places = _places(data, before)
        if len(places) != 1:
            raise ArgumentError(f"old {_why_not_once(data, old, places)} {name}; nothing was changed.")
        self._root.replace(name, data[: places[0]] + after + data[places[0] + len(before) :])
        return f"{name} edited at line {_line_at(data, places[0])}: -{_count(before)} +{_count(after)} lines"


def _refuse_binary(file: BinaryIO, name: str) -> None:
    if b"\0" in file.read(_SNIFF):
        size = size_text(os.fstat(file.fileno()).st_size)
        raise ArgumentError(f"{name} is a binary file of {size}; only text can be used.")
    file.seek(0)


def _find_line(file: BinaryIO, wanted: int, cancel: threading.Event) -> tuple[int, int]:
    """(number of lines in the file, offset at which the line `wanted` begins when there is one)."""
    ends = passed = offset = 0
    found, last = False, b""
    while chunk := file.read(1 << 20):
        if cancel.is_set():
            raise Cancelled("cancelled.")
        more = chunk.count(b"\n")
        if not found and ends + more >= wanted - 1:
            found, at = True, -1
            for _ in range(wanted - 1 - ends):
                at = chunk.index(b"\n", at + 1)
            offset = passed + at + 1
        ends, passed, last = ends + more, passed + len(chunk), chunk[-1:]
    return ends + (last not in (b"", b"\n")), offset


def _line(file: BinaryIO, limit: int) -> tuple[str, bool]:
    """(the next line, cut visibly behind `limit` bytes, whether it is UTF-8)."""
    raw = piece = file.readline(limit)
    rest = 0
    while piece and not piece.endswith(b"\n"):
        piece = file.readline(1 << 16)
        rest += len(piece)
    rest -= rest > 0 and piece.endswith(b"\n")
    raw = raw.rstrip(b"\r\n")
    try:
        text, whole = codecs.getincrementaldecoder("utf-8")().decode(raw, final=not rest), True
    except UnicodeDecodeError:
        text, whole = raw.decode("utf-8", "replace"), False
    return f"{text} [... {rest} bytes of this line left out]" if rest else text, whole


def _entries(folder: int, prefix: str, depth: int) -> Iterator[str]:
    """A line for each name in an open folder, and below those folders whose name does not begin with a dot."""
    with os.scandir(folder) as found:
        names = sorted(entry.name for entry in islice(found, MAX_SCAN))
    for name in names:
        shown = visible(prefix + name)
        try:
            info = os.stat(name, dir_fd=folder, follow_symlinks=False)
            kind = stat.S_IFMT(info.st_mode)
            if kind == stat.S_IFREG:
                yield f"{shown} {size_text(info.st_size)}"
            elif kind == stat.S_IFLNK:
                yield f"{shown} -> {visible(os.readlink(name, dir_fd=folder))}"
            elif kind != stat.S_IFDIR:
                yield f"{shown} ({KINDS.get(kind, 'no regular file')})"
            else:
                yield f"{shown}/"
                if depth > 1 and not name.startswith("."):
                    below = os.open(name, FOLDER, dir_fd=folder)
                    try:
                        yield from _entries(below, f"{prefix}{name}/", depth - 1)
                    finally:
                        os.close(below)
        except OSError as error:
            yield f"{shown} ({error.strerror})"


def _count(data: bytes) -> int:
    """Lines, the last one with or without its end."""
    return data.count(b"\n") + (not data.endswith(b"\n") and bool(data))


def _places(data: bytes, text: bytes) -> list[int]:
    """Where a text stands, overlapping ones too; a few of the places when there are many."""
    found: list[int] = []
    at = data.find(text)
    while at >= 0 and len(found) < 10:
        found.append(at)
        at = data.find(text, at + 1)
    return found


def _line_at(data: bytes, offset: int) -> int:
    return data.count(b"\n", 0, offset) + 1


def _why_not_once(data: bytes, old: str, places: list[int]) -> str:
    if places:
        lines = ", ".join(str(_line_at(data, place)) for place in places)
        return f"begins in lines {lines}: give more of the text around it, so that it occurs once in"
    first = next((line.strip() for line in old.splitlines() if line.strip()), "")
    at = data.find(first.encode("utf-8")) if first else -1
    if at >= 0:
        return f"begins like line {_line_at(data, at)}, but what follows differs; copy it exactly from"
    return "does not occur (copy it exactly, without line numbers) in"


def _describe_write(arguments: dict[str, str]) -> str:
    data = arguments["text"].encode("utf-8", "replace")
    return f"write {arguments['path']} ({_count(data)} lines, {size_text(len(data))})"


def _describe_edit(arguments: dict[str, str]) -> str:
    old, new = (_count(arguments[name].encode("utf-8", "replace")) for name in ("old", "new"))
    return f"edit {arguments['path']} ({old} lines become {new})"
