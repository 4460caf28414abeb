"""Sealed lines: JSON objects, one a line, each with a checksum over itself and the line before.

    {"seq":7,"type":"append", ... ,"sum":"9f86d081884c7d65"}

`sum` is the first 16 hex digits of SHA-256 over the sum of the line before (nothing for the first) and the line's bytes
without it. So a changed byte, a missing line and a swapped one are noticed, at the line where they are. It finds
accidents; who can write the file can seal it anew, so what a line holds is checked as well.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ArgumentError, FileFormatError
from .files.jsonfile import parse_object
from .tokenizer.base import characters

MAX_LINE = 64 << 20  # bytes; a million tokens take eight million
_MAX_DEPTH = 32
_MAX_NUMBER = 10**30
_SUM = re.compile(rb',"sum":"([0-9a-f]{16})"\}\n')
_SUM_BYTES = 27
CUT = "cut before its end"
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True)
class Damage:
    """What is wrong with a file; `line` is 0 where it has none. `passed`: a later file of a log goes on behind the line
    before it."""

    file: str
    line: int
    what: str
    passed: bool = False

    @property
    def cut(self) -> bool:
        """Whether the line only ends too early: its writer died, or is at work."""
        return self.what == CUT

    def __str__(self) -> str:
        what = f"{self.what}; a later file goes on behind the line before it" if self.passed else self.what
        return f"{self.file}, line {self.line}: {what}" if self.line else f"{self.file}: {what}"


def seal(value: Mapping[str, Any], before: str) -> tuple[bytes, str]:
    """The line for a value behind the line with the sum `before`, and its own sum."""
    body = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    found = _sum(before, body)
    return body[:-1] + b',"sum":"' + found.encode() + b'"}\n', found


def _sum(before: str, body: bytes) -> str:
    return hashlib.sha256(before.encode() + body).hexdigest()[:16]


def plain(value: Any, depth: int = 0) -> Any:
    """A value as it comes back from a line: what a reader would not take (half a surrogate pair, infinity, a giant
    number, very deep nesting) becomes text. Raises ArgumentError for what is no JSON at all."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return characters(value)
    if isinstance(value, int):
        return int(value) if abs(value) < _MAX_NUMBER else _digits(value)
    if isinstance(value, float):
        return float(value) if abs(value) < float("inf") else str(value)
    if isinstance(value, (Mapping, list, tuple)) and depth == _MAX_DEPTH:
        return "(nested too deeply)"
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise ArgumentError("the keys of what is logged have to be text.")
        return {characters(key): plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, depth + 1) for item in value]
    raise ArgumentError(f"a value of the type {type(value).__name__} cannot be logged: give what JSON can hold.")


def _digits(value: int) -> str:
    try:
        return str(value)
    except ValueError:  # Python refuses to write so many
        return hex(value)


def open_regular(path: Path) -> int:
    """A descriptor of a file for reading. Links, pipes and devices are refused with an OSError."""
    fd = os.open(path, READ)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return fd


class Reader:
    """Reads the sealed lines of a file until it ends or a line is damaged; then `damage` says which and why. `lines`,
    `sum` and `end` (an offset) tell where the good ones end."""

    def __init__(self, path: Path, before: str = "") -> None:
        self.path, self.sum, self.lines, self.end = path, before, 0, 0
        self.damage: Damage | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        try:
            with os.fdopen(open_regular(self.path), "rb") as file:
                while raw := file.readline(MAX_LINE + 1):
                    value = self._check(raw)
                    self.lines, self.end = self.lines + 1, self.end + len(raw)
                    yield value
        except FileFormatError as error:
            self.damage = Damage(self.path.name, self.lines + 1, str(error))
        except OSError as error:
            line = self.lines + 1 if self.lines else 0
            self.damage = Damage(self.path.name, line, f"cannot be read ({error.strerror})")

    def _check(self, raw: bytes) -> dict[str, Any]:
        if not raw.endswith(b"\n"):
            raise FileFormatError(f"longer than {MAX_LINE} bytes" if len(raw) > MAX_LINE else CUT)
        match = _SUM.fullmatch(raw, len(raw) - _SUM_BYTES) if len(raw) > _SUM_BYTES else None
        if match is None:
            raise FileFormatError("changed: it does not end with a checksum")
        found = _sum(self.sum, raw[:-_SUM_BYTES] + b"}")
        if found.encode() != match[1]:
            raise FileFormatError("its checksum does not fit: it was changed, or the line before it is another one")
        try:
            value = parse_object(raw[:-_SUM_BYTES] + b"}", "the line")
        except FileFormatError as error:
            raise FileFormatError(str(error).replace("; download it again.", ".")) from None
        self.sum = found
        return value


# ---- files and folders that last ------------------------------------------------------------------------------------


def write_temporary(folder: Path, stem: str, lines: Iterable[bytes]) -> Path:
    """A file `.<stem>-<8 hex>.tmp` with these lines, durable. Nothing is left when it fails."""
    path = folder / f".{stem}-{secrets.token_hex(4)}.tmp"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        write_all(fd, b"".join(lines))
        os.fsync(fd)
    except BaseException:
        with suppress(OSError):
            os.unlink(path)
        raise
    finally:
        os.close(fd)
    return path


def place(temporary: Path, path: Path) -> None:
    """Gives a file its name, which nobody may have: a link refuses to overwrite, a rename does not."""
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS) or os.path.lexists(path):
            raise
        os.rename(temporary, path)  # a file system without links
    else:
        os.unlink(temporary)
    sync_folder(path.parent)


def write_all(fd: int, data: bytes) -> None:
    """Writes all bytes, however few the system takes at a time."""
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


def make_folder(path: Path) -> None:
    """A folder for its owner only, durable. One that exists stays as it is."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        return
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Makes the names in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
