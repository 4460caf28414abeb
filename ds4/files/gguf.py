"""The GGUF container, versions 2 and 3, little-endian (format: ggml's docs/gguf.md).

    "GGUF" | version u32 | n_tensors u64 | n_kv u64 | n_kv x (key, type u32, value) | n_tensors x (name, n_dims u32,
    dims u64[], type u32, offset u64) | padding to the alignment | the tensors' bytes, each at its offset

A string is a u64 length and UTF-8 bytes; an array is an element type u32, a u64 count and the elements.
"""

from __future__ import annotations

import mmap
import struct
from typing import Any

import numpy as np

from ds4.errors import FileFormatError, UnsupportedError
from ds4.files.base import Tensor, quote

MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_KEY_BYTES = 65535  # these two are the format's own limits
MAX_NAME_BYTES = 64
MAX_STRINGS = 1 << 22  # in all arrays together; the largest vocabularies have 2^18 tokens and as many merges
MAX_METADATA = 256 << 20

# ggml type number -> name, weights per block, bytes per block
TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 28: ("F64", 1, 8), 30: ("BF16", 1, 2),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 36), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip
# numbers that ggml has given up; their layouts are no longer defined
REMOVED = {
    4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8",
    36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8",
}  # fmt: skip

_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8"}
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 10: "<Q", 11: "<q", 12: "<d"}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


def parse(buffer: mmap.mmap | bytes, path: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(key-values, tensors by name in the file's order).

    Values are int, float, bool, str, list of str, or a read-only numpy array with the element type that the file
    declares. Raises FileFormatError; UnsupportedError for version 1, big-endian files and type numbers that ggml does
    not have.
    """
    reader = _Reader(buffer, path)
    n_tensors, n_keys = _counts(reader)
    metadata: dict[str, Any] = {}
    for _ in range(n_keys):
        key = reader.string("a key", MAX_KEY_BYTES)
        if key in metadata:
            raise FileFormatError(f"{path}: duplicate key {quote(key)}: which of the two counts is not defined.")
        metadata[key] = reader.value(f"key {quote(key)}")
        if reader.pos > MAX_METADATA:
            raise FileFormatError(f"{path}: the key-values take more than {MAX_METADATA} bytes.")
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise FileFormatError(
            f"{path}: general.alignment is {quote(alignment)}; it must be a power of two from 8 to 2^20."
        )
    entries: dict[str, tuple[int, tuple[int, ...], int]] = {}
    for _ in range(n_tensors):
        name = reader.string("a tensor name", MAX_NAME_BYTES)
        if name in entries:
            raise FileFormatError(
                f"{path}: duplicate tensor name {quote(name)}: which of the two counts is not defined."
            )
        entries[name] = _entry(reader, f"tensor {quote(name)}")
    start = -(-reader.pos // alignment) * alignment
    return metadata, _tensors(entries, memoryview(buffer), start, alignment, path)


class _Reader:
    """A position in the file; every read is checked against the end."""

    def __init__(self, buffer: mmap.mmap | bytes, path: str) -> None:
        self.buffer, self.size, self.path, self.pos = buffer, len(buffer), path, 0
        self.strings = 0

    def fail(self, what: str) -> FileFormatError:
        return FileFormatError(f"{self.path}: {what}")

    def take(self, n: int, what: str) -> int:
        """Moves n bytes on and returns where they begin."""
        begin = self.pos
        if n > self.size - begin:
            raise self.fail(
                f"{what} takes {n} bytes at byte {begin}, but the file ends at {self.size}; it is cut: download it "
                "again."
            )
        self.pos = begin + n
        return begin

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.buffer, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.buffer, self.take(8, what))[0])

    def string(self, what: str, limit: int = MAX_METADATA) -> str:
        length = self.u64(what)
        if length > limit:
            raise self.fail(f"{what} at byte {self.pos} claims {length} bytes; at most {limit} are allowed.")
        begin = self.take(length, what)
        try:
            return str(self.buffer[begin : self.pos], "utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} at byte {begin} is not UTF-8 from byte {begin + error.start} on.") from None

    def value(self, what: str) -> Any:
        kind = self.u32(what)
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self.array(what)
        if kind == _BOOL:
            byte = self.buffer[self.take(1, what)]
            if byte > 1:
                raise self.fail(f"{what} is a bool with the value {byte}; only 0 and 1 are allowed.")
            return byte == 1
        if kind not in _SCALARS:
            raise self.fail(f"{what} has the value type {kind}; the format has types 0 to 12.")
        code = _SCALARS[kind]
        return struct.unpack_from(code, self.buffer, self.take(struct.calcsize(code), what))[0]

    def array(self, what: str) -> Any:
        kind, count = self.u32(what), self.u64(what)
        if kind == _STRING:
            return self.string_array(count, what)
        if kind == _ARRAY:
            raise self.fail(f"{what} is an array of arrays, which no model uses and this version does not read.")
        if kind != _BOOL and kind not in _NUMBERS:
            raise self.fail(f"{what} is an array of the value type {kind}; the format has types 0 to 12.")
        dtype = np.dtype(_NUMBERS.get(kind, "<u1"))
        size = count * dtype.itemsize
        begin = self.take(size, what)
        if size > MAX_METADATA:
            raise self.fail(f"{what} takes {size} bytes; at most {MAX_METADATA} are read.")
        values = np.frombuffer(self.buffer[begin : self.pos], dtype)
        if kind == _BOOL:
            if count and values.max() > 1:
                raise self.fail(f"{what} is an array of bools that holds {values.max()}; only 0 and 1 are allowed.")
            values = values.view(np.bool_)
        return values

    def string_array(self, count: int, what: str) -> list[str]:
        """One tight loop: vocabularies have 10^5 entries, and a model must open in a fraction of a second."""
        if count > (self.size - self.pos) // 8:
            raise self.fail(
                f"{what} claims {count} strings, more than the {self.size - self.pos} bytes left can hold; download it "
                "again."
            )
        self.strings += count
        if self.strings > MAX_STRINGS:
            raise self.fail(
                f"{what} brings the file to {self.strings} strings in arrays; at most {MAX_STRINGS} are read."
            )
        buffer, size, pos, unpack = self.buffer, self.size, self.pos, _U64.unpack_from
        found: list[str] = []
        try:
            for _ in range(count):
                end = pos + 8 + unpack(buffer, pos)[0]
                if end > size or end > MAX_METADATA:
                    break
                found.append(str(buffer[pos + 8 : end], "utf-8"))
                pos = end
        except UnicodeDecodeError:
            raise self.fail(f"{what}: string {len(found)} at byte {pos} is not UTF-8.") from None
        except struct.error:
            pass
        if len(found) < count:
            raise self.fail(
                f"{what}: string {len(found)} of {count} at byte {pos} passes the end of the file or of the "
                f"{MAX_METADATA} bytes that are read; download it again."
            )
        self.pos = pos
        return found


def _counts(reader: _Reader) -> tuple[int, int]:
    """Reads the fixed header: (tensors, key-values)."""
    magic = bytes(reader.buffer[:4])
    if magic != b"GGUF":
        raise reader.fail(f"is not a GGUF file: it begins with {ascii(magic)[1:]}, not 'GGUF'.")
    reader.pos = 4
    version = reader.u32("the version")
    if version and version & 0xFFFF == 0:
        raise UnsupportedError(
            f"{reader.path}: is a big-endian GGUF file; only little-endian ones are read. Convert it again."
        )
    if version not in (2, 3):
        raise UnsupportedError(
            f"{reader.path}: has GGUF version {version}; versions 2 and 3 are read. Convert it again."
        )
    n_tensors, n_keys = reader.u64("the tensor count"), reader.u64("the key count")
    left = reader.size - reader.pos
    # the smallest key-value has 13 bytes, the smallest tensor entry 32
    for count, what, smallest, limit in ((n_keys, "key-values", 13, MAX_KEYS), (n_tensors, "tensors", 32, MAX_TENSORS)):
        if count > limit or count * smallest > left:
            raise reader.fail(
                f"claims {count} {what}, but at most {min(limit, left // smallest)} can follow: the file is cut or "
                "damaged; download it again."
            )
    return n_tensors, n_keys


def _entry(reader: _Reader, what: str) -> tuple[int, tuple[int, ...], int]:
    """Reads what follows a tensor's name: (type number, shape with the outermost dimension first, offset)."""
    n_dims = reader.u32(what)
    if not 1 <= n_dims <= 4:
        raise reader.fail(f"{what} has {n_dims} dimensions; the format has 1 to 4.")
    dims = [reader.u64(what) for _ in range(n_dims)]
    if not all(0 < n < 1 << 63 for n in dims):
        raise reader.fail(f"{what} has the dimensions {dims}; each must be from 1 to 2^63 - 1.")
    kind = reader.u32(what)
    if kind not in TYPES:
        name = (
            f"{REMOVED[kind]} (number {kind}), which ggml has given up"
            if kind in REMOVED
            else f"number {kind}, which is unknown"
        )
        raise UnsupportedError(
            f"{reader.path}: {what} has the ggml type {name}; convert the model again in a current type."
        )
    return kind, tuple(reversed(dims)), reader.u64(what)


def _tensors(
    entries: dict[str, tuple[int, tuple[int, ...], int]], view: memoryview, start: int, alignment: int, path: str
) -> dict[str, Tensor]:
    """Turns the entries into views; they must be aligned, inside the file, and must not overlap."""
    tensors: dict[str, Tensor] = {}
    spans: list[tuple[int, int, str]] = []
    for name, (kind, shape, offset) in entries.items():
        what = f"{path}: tensor {quote(name)}"
        format, block, block_bytes = TYPES[kind]
        if shape[-1] % block:
            raise FileFormatError(
                f"{what} has rows of {shape[-1]} weights, no multiple of the {block} of a {format} block."
            )
        size = block_bytes
        for n in (*shape[:-1], shape[-1] // block):
            size *= n
        if offset % alignment:
            raise FileFormatError(f"{what} lies at offset {offset}, no multiple of the alignment {alignment}.")
        begin, end = start + offset, start + offset + size
        if end > len(view):
            raise FileFormatError(
                f"{what} ends at byte {end}, but the file has {len(view)}; it is cut: download it again."
            )
        tensors[name] = Tensor(name, format, shape, view[begin:end])
        spans.append((begin, end, name))
    spans.sort()
    for (_, end, before), (begin, _, name) in zip(spans, spans[1:], strict=False):
        if begin < end:
            raise FileFormatError(f"{path}: tensors {quote(before)} and {quote(name)} overlap at byte {begin}.")
    return tensors
