"""What the container parsers share: `Tensor`, the read-only mapping of a file, and how a name from a file is quoted in
an error.

Every byte of a model file is hostile. The rules that all parsers here keep:

1. a length, count or offset is compared with the file's size before it is used; sums and products are Python ints,
   which cannot overflow;
2. memory grows with bytes that are really in the file, under a fixed limit, never with a number that the file claims;
3. text from a file reaches an error message only through `quote`, which is short and printable.

A file that is cut *while it is mapped* cannot be defended against: the system then stops the process with SIGBUS.
Replace model files by renaming, do not rewrite them in place.
"""

from __future__ import annotations

import mmap
import os
import stat
from dataclasses import dataclass

from ds4.errors import ArgumentError, FileFormatError, SystemResourceError

MAX_DIMENSIONS = 8


@dataclass(frozen=True, eq=False)
class Tensor:
    """One tensor of a checkpoint, its bytes still in the mapped file.

    `format` is a ggml or safetensors type name as read ("F32", "BF16", "Q4_K"); whether it can be computed with is
    decided later. `shape` has the outermost dimension first: (rows, cols). `data` is read-only and holds exactly the
    tensor's bytes; it is not aligned to anything. `scales`: E8M0 bytes that belong to it, where a family has joined the
    two (formats "FP8" and "FP4").
    """

    name: str
    format: str
    shape: tuple[int, ...]
    data: memoryview
    scales: memoryview | None = None

    def bytes(self) -> int:
        """Size, scales included."""
        return len(self.data) + (len(self.scales) if self.scales is not None else 0)


def quote(value: object) -> str:
    """A value from a file for an error message: printable, at most about 80 characters; containers only by their
    type."""
    if isinstance(value, str):
        shown = ascii(value[:70])
        return shown if len(value) <= 70 else f"{shown}... ({len(value)} characters)"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, int):
        return str(value) if abs(value) < 10**30 else "a number of more than 30 digits"
    return {"dict": "an object", "list": "a list", "ndarray": "an array"}.get(
        type(value).__name__, "a value of an unknown kind"
    )


def open_regular(path: str) -> tuple[int, int]:
    """Opens a regular file for reading: (descriptor, bytes). Pipes and devices are refused, they could block for ever.

    Raises ArgumentError when there is no such file, SystemResourceError when the system refuses it.
    """
    try:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    except (FileNotFoundError, NotADirectoryError):
        raise ArgumentError(f"{path}: there is no such file; check the path.") from None
    except (OSError, ValueError) as error:
        raise SystemResourceError(
            f"{path}: cannot be opened ({_reason(error)}); check its name and permissions."
        ) from None
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        os.close(fd)
        raise FileFormatError(f"{path}: is not a regular file; give the path of a file.")
    return fd, info.st_size


def read_file(path: str, limit: int) -> bytes:
    """The bytes of a file of at most `limit` bytes. Raises FileFormatError when it is larger."""
    fd, size = open_regular(path)
    with os.fdopen(fd, "rb") as file:
        if size > limit:
            raise FileFormatError(f"{path}: has {size} bytes, more than the {limit} that such a file may have.")
        try:
            return file.read(limit)
        except OSError as error:
            raise SystemResourceError(f"{path}: cannot be read ({_reason(error)}).") from None


def map_file(path: str) -> mmap.mmap:
    """A read-only mapping of a whole file. Raises FileFormatError when it is empty."""
    fd, size = open_regular(path)
    try:
        if size == 0:
            raise FileFormatError(f"{path}: is empty; download it again.")
        return mmap.mmap(fd, size, access=mmap.ACCESS_READ)
    except (OSError, ValueError, OverflowError) as error:
        if isinstance(error, FileFormatError):
            raise
        raise SystemResourceError(f"{path}: cannot be mapped into memory ({_reason(error)}).") from None
    finally:
        os.close(fd)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
