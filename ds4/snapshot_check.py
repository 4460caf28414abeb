"""Whether a snapshot is whole, without an engine: header, sizes and checksums after docs/snapshot.md.

Whether it belongs to a model only the engine can say; `Engine.load` checks both.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from .sealed import open_regular

_MAGIC, _ORDER, _VERSION = b"\x89DS4SNP\n", 0x01020304, 1
_HEAD, _ENTRY, _MAX_SECTIONS = 136, 32, 4096
_LANES, _WIDTH = (
    1 << 14,
    1 << 8,
)  # a block: strings of so many bytes, computed side by side


def fault(path: Path) -> str | None:
    """What is wrong with a snapshot file, or None."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            return _fault(file, os.fstat(file.fileno()).st_size)
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _fault(file: BinaryIO, size: int) -> str | None:
    head = file.read(_HEAD)
    if len(head) < _HEAD or head[:8] != _MAGIC:
        return "does not begin like a snapshot"
    order, version, front, crc, whole = struct.unpack_from("<IIIIQ", head, 8)
    (sections,) = struct.unpack_from("<I", head, 128)
    if order != _ORDER or version != _VERSION:
        return f"has the layout version {version}, and only {_VERSION} is known here"
    if whole != size:
        return f"has {size} bytes and was written with {whole}: it was cut or added to"
    if sections > _MAX_SECTIONS or front != _HEAD + sections * _ENTRY or front > size:
        return "the size of its header does not fit"
    table = file.read(front - _HEAD)
    if _Crc().add(head[:20] + bytes(4) + head[24:] + table).value() != crc:
        return "the checksum of its header does not fit"
    end = front
    for i in range(sections):
        _, _, at, n, _, crc = struct.unpack_from("<IIQQII", table, i * _ENTRY)
        if at != end or at + n > size:
            return f"section {i + 1} of {sections} does not lie where it should"
        checksum = _Crc()
        for left in range(n, 0, -_LANES * _WIDTH):
            checksum.add(file.read(min(left, _LANES * _WIDTH)))
        if checksum.value() != crc:
            return f"the checksum of section {i + 1} of {sections} does not fit"
        end = at + n
    return None if end == size else "bytes follow behind its last section"


def _table() -> npt.NDArray[np.uint32]:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = (table >> np.uint32(1)) ^ np.where(table & 1, np.uint32(0x82F63B78), np.uint32(0))
    return table


_TABLE = _table()
Words = npt.NDArray[np.uint32]


def _step(crc: Words, byte: Words) -> Words:
    return _TABLE[(crc ^ byte) & np.uint32(255)] ^ (crc >> np.uint32(8))


class _Shift:
    """What n zero bytes do to a checksum: a linear map, kept as what becomes of each of its 32 bits."""

    def __init__(self, columns: Words) -> None:
        self.columns = columns

    def __call__(self, crc: Words) -> Words:
        bits = (crc[..., None] >> np.arange(32, dtype=np.uint32)) & np.uint32(1)
        return np.bitwise_xor.reduce(np.where(bits, self.columns, np.uint32(0)), axis=-1)

    @classmethod
    def zeros(cls, n: int) -> _Shift:
        bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
        found, power = cls(bits), cls(_step(bits, np.zeros(32, np.uint32)))
        while n:
            if n & 1:
                found = cls(power(found.columns))
            power, n = cls(power(power.columns)), n >> 1
        return found


_LEVELS = [_Shift.zeros(_WIDTH << i) for i in range(_LANES.bit_length() - 1)]


class _Crc:
    """CRC-32C (Castagnoli) of bytes that come in pieces of at most a block."""

    def __init__(self) -> None:
        self._crc = np.array(0xFFFFFFFF, np.uint32)

    def add(self, data: bytes) -> _Crc:
        # zeros in front leave a checksum that begins at 0 as it is, so the strings may be as long as they like
        levels = max(0, -(-len(data) // _WIDTH) - 1).bit_length()
        block = np.zeros(_WIDTH << levels, np.uint8)
        block[len(block) - len(data) :] = np.frombuffer(data, np.uint8)
        lanes = np.zeros(1 << levels, np.uint32)
        for column in block.reshape(1 << levels, _WIDTH).T.astype(np.uint32):
            lanes = _step(lanes, column)
        for shift in _LEVELS[:levels]:
            lanes = shift(lanes[0::2]) ^ lanes[1::2]
        self._crc = _Shift.zeros(len(data))(self._crc) ^ lanes[0]
        return self

    def value(self) -> int:
        return int(self._crc) ^ 0xFFFFFFFF
