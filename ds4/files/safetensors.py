"""The safetensors container (format: https://github.com/huggingface/safetensors): 8 bytes header length, a JSON header,
the tensors' bytes.

The header maps each tensor name to dtype, shape and the two ends of its bytes. The tensors must fill the rest of the
file exactly: no hole, no overlap, no byte behind the last one.
"""

from __future__ import annotations

import mmap
from typing import Any

from ds4.errors import FileFormatError, UnsupportedError
from ds4.files.base import MAX_DIMENSIONS, Tensor, quote
from ds4.files.jsonfile import parse_object

MAX_HEADER = 16 << 20  # the largest public models have 91,000 tensors in all their shards: 11 MB
MAX_TENSORS = 1 << 17

# bits per element
DTYPES = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
}  # fmt: skip


def parse(buffer: mmap.mmap | bytes, path: str) -> dict[str, Tensor]:
    """The tensors of a file by name, in the file's order. Raises FileFormatError, or UnsupportedError for an unknown
    dtype."""
    header, start = _header(buffer, path)
    metadata = header.pop("__metadata__", {})
    if len(header) > MAX_TENSORS:
        raise FileFormatError(f"{path}: holds {len(header)} tensors; at most {MAX_TENSORS} are read.")
    if not isinstance(metadata, dict):
        raise FileFormatError(
            f"{path}: `__metadata__` is {quote(metadata)}; the format allows only an object of texts there."
        )
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise FileFormatError(
                f"{path}: `__metadata__` holds {quote(value)} under {quote(key)}; the format allows only text there. "
                "Write the file again with that value as text."
            )
    data = memoryview(buffer)[start:]
    tensors = {name: _tensor(name, entry, data, path) for name, entry in header.items()}
    _check_filled(header, len(data), path)
    return tensors


def _header(buffer: mmap.mmap | bytes, path: str) -> tuple[dict[str, Any], int]:
    """The JSON header and the offset of the first tensor byte."""
    size = len(buffer)
    if size < 8:
        raise FileFormatError(f"{path}: has {size} bytes, less than a safetensors header; download it again.")
    length = int.from_bytes(buffer[:8], "little")
    if length > MAX_HEADER:
        raise FileFormatError(
            f"{path}: claims a header of {length} bytes, more than {MAX_HEADER}: this is no safetensors file."
        )
    if length > size - 8:
        raise FileFormatError(
            f"{path}: claims a header of {length} bytes, but {size - 8} follow: the file is cut or no safetensors "
            "file; download it again."
        )
    if buffer[8:9] != b"{" or length < 2:
        raise FileFormatError(
            f"{path}: the header (of {length} bytes) does not begin with '{{': this is no safetensors file."
        )
    return parse_object(bytes(buffer[8 : 8 + length]), f"{path}, header"), 8 + length


def _tensor(name: str, entry: Any, data: memoryview, path: str) -> Tensor:
    where = f"{path}: tensor {quote(name)}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise FileFormatError(f"{where} must be described by exactly dtype, shape and data_offsets.")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        raise FileFormatError(f"{where} has {quote(dtype)} as its dtype, where a name is expected.")
    if dtype not in DTYPES:
        raise UnsupportedError(f"{where} has the dtype {quote(dtype)}, which this version does not know.")
    if not _is_list_of_counts(shape) or len(shape) > MAX_DIMENSIONS:
        raise FileFormatError(
            f"{where}: the shape must be a list of at most {MAX_DIMENSIONS} whole numbers from 0 to 2^63 - 1."
        )
    if not _is_list_of_counts(offsets) or len(offsets) != 2:
        raise FileFormatError(f"{where}: data_offsets must be two whole numbers from 0 to 2^63 - 1.")
    begin, end = offsets
    if begin > end:
        raise FileFormatError(
            f"{where} begins at byte {begin} and ends before that, at {end}: the offsets are reversed."
        )
    if end > len(data):
        raise FileFormatError(
            f"{where} ends at byte {end} of the data, but the file holds {len(data)}; it is cut: download it again."
        )
    bits = DTYPES[dtype]
    for count in shape:
        bits *= count
    if bits != 8 * (end - begin):
        raise FileFormatError(
            f"{where}: {dtype} {shape} takes {-(-bits // 8)} bytes, but the offsets give {end - begin}."
        )
    return Tensor(name, dtype, tuple(shape), data[begin:end])


def _is_list_of_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in value)


def _check_filled(header: dict[str, Any], size: int, path: str) -> None:
    """The tensors' bytes must follow each other without holes or overlaps and end with the file."""
    spans = sorted((entry["data_offsets"], name) for name, entry in header.items())
    end, before = 0, "the header"
    for (first, last), name in spans:
        if first != end:
            fault = "overlap" if first < end else f"leave a hole of {first - end} bytes"
            raise FileFormatError(
                f"{path}: tensor {quote(name)} and {before} {fault} at byte {min(first, end)} of the data."
            )
        end, before = last, f"tensor {quote(name)}"
    if end != size:
        raise FileFormatError(
            f"{path}: the last tensor ends at byte {end} of the data, but the file holds {size}; download it again."
        )
