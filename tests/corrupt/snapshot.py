"""The byte layout of docs/snapshot.md a second time, in Python: reads snapshots, gives changed ones true checksums, and
makes the corpus of broken ones from a sound one. They hold the identity of a model, so none is committed."""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator

HEAD, ENTRY, LINE = 136, 32, 32
KINDS = {1: "tokens", 2: "marks", 3: "logits", 4: "pages", 5: "rows"}
EXTREMES = (0, 1, 2**7, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1)


def _table() -> list[int]:
    table = []
    for i in range(256):
        for _ in range(8):
            i = (i >> 1) ^ (0x82F63B78 if i & 1 else 0)
        table.append(i)
    return table


_TABLE = _table()


@functools.lru_cache(maxsize=256)  # most sections stay as they were
def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 255] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def u32(data: bytes, at: int) -> int:
    return struct.unpack_from("<I", data, at)[0]


def sections(data: bytes) -> list[tuple[str, int, int, int, int]]:
    """(kind, stream, offset, bytes, count) of every section."""
    found = []
    for i in range(u32(data, 128)):
        kind, stream, at, size, count, _ = struct.unpack_from("<IIQQII", data, HEAD + i * ENTRY)
        found.append((KINDS[kind], stream, at, size, count))
    return found


def seal(data: bytes, all_sections: bool = True) -> bytes:
    """With true checksums wherever the table still points into the file: what a careful forger would write."""
    out = bytearray(data)
    for i in range(min(u32(data, 128), 64) if all_sections and len(out) >= HEAD else 0):
        entry = HEAD + i * ENTRY
        if entry + ENTRY <= len(out):
            at, size = struct.unpack_from("<QQ", out, entry + 8)
            if at + size <= len(out):
                struct.pack_into("<I", out, entry + 28, crc32c(bytes(out[at : at + size])))
    bytes_ = u32(out, 16) if len(out) >= 24 else 0
    if 24 <= bytes_ <= len(out):
        struct.pack_into("<I", out, 20, 0)
        struct.pack_into("<I", out, 20, crc32c(bytes(out[:bytes_])))
    return bytes(out)


def put(data: bytes, at: int, code: str, *values: int) -> bytes:
    out = bytearray(data)
    struct.pack_into("<" + code, out, at, *values)
    return bytes(out)


def edges(data: bytes) -> list[int]:
    """Where a section, the header or its table begins or ends."""
    table = range(HEAD, u32(data, 16) + 1, ENTRY)
    return sorted({0, 8, 16, 24, 32, *table, *(at for _, _, at, _, _ in sections(data)), len(data)})


def fields(data: bytes) -> Iterator[tuple[str, int, str]]:
    """(name, offset, struct code) of every integer of the header, its table, and the lists of marks and pages."""
    names = ("order", "version", "header bytes", "crc")
    yield from ((name, 8 + 4 * i, "I") for i, name in enumerate(names))
    yield from (("file bytes", 24, "Q"), ("settings", 104, "Q"))
    names = ("numerics", "vocab", "pos", "ctx", "sections", "reserved")
    yield from ((name, 112 + 4 * i, "I") for i, name in enumerate(names))
    for i, (kind, stream, at, size, _) in enumerate(sections(data)):
        entry, name = HEAD + i * ENTRY, f"{kind}.{stream}"
        for k, (field, code) in enumerate((("kind", "I"), ("stream", "I"), ("offset", "Q"), ("bytes", "Q"))):
            yield f"{name} {field}", entry + (0, 4, 8, 16)[k], code
        yield f"{name} count", entry + 24, "I"
        if kind in ("marks", "pages"):
            yield from ((f"{name}[{k}]", at + k, "I") for k in range(0, size, 4))


def cases(data: bytes) -> dict[str, tuple[bytes, str]]:
    """name -> (broken snapshot with true checksums, a part of the error). `data` has a window, two marks and logits."""
    place = {
        f"{kind}.{stream}": (HEAD + i * ENTRY, at, count)
        for i, (kind, stream, at, _, count) in enumerate(sections(data))
    }
    (tokens, tokens_at, n), (marks, marks_at, n_marks) = place["tokens.0"], place["marks.0"]
    logits, rows, pages_at = place["logits.0"][0], place["rows.0"][0], place["pages.1"][1]
    first, last = pages_at + LINE, pages_at + LINE + 4 * (place["pages.1"][2] - 1)
    damaged = {
        "magic": (0, "Q", 0, "does not begin like a snapshot"),
        "order_mark": (8, "I", 0x04030201, "byte order"),
        "header_bytes_0": (16, "I", 0, "size of the header"),
        "header_bytes_24": (16, "I", 24, "size of the header"),
        "header_bytes_max": (16, "I", 2**32 - 1, "size of the header"),
        "header_bytes_more": (16, "I", u32(data, 16) + 32, "number of sections"),
        "file_bytes_3_GiB": (24, "Q", 3 << 30, "it was cut or added to"),
        "pos_above_ctx": (120, "I", u32(data, 124) + 1, "impossible"),
        "pos_less": (120, "I", u32(data, 120) - 1, "count in the table"),
        "ctx_above_model": (124, "I", 4097, "impossible"),
        "sections_0": (128, "I", 0, "number of sections"),
        "sections_max": (128, "I", 2**32 - 1, "number of sections"),
        "reserved": (132, "I", 1, "reserved"),
        "kind_0": (tokens, "I", 0, "does not fit its count"),
        "kind_rows_first": (tokens, "I", 5, "does not fit its count"),
        "stream_max": (rows + 4, "I", 2**32 - 1, "does not fit its count"),
        "offset_in_header": (tokens + 8, "Q", 0, "does not fit its count"),
        "offset_max": (tokens + 8, "Q", 2**64 - 1, "does not fit its count"),
        "bytes_3_GiB": (rows + 16, "Q", 3 << 30, "does not fit its count"),
        "bytes_max": (rows + 16, "Q", 2**64 - 1, "does not fit its count"),
        "tokens_count": (tokens + 24, "I", n + 1, "count in the table"),
        "marks_count_max": (marks + 24, "I", 2**32 - 1, "count in the table"),
        "logits_count_1": (logits + 24, "I", 1, "count in the table"),
        "rows_count_max": (rows + 24, "I", 2**32 - 1, "count in the table"),
        "token_negative": (tokens_at, "i", -1, "outside the vocabulary"),
        "token_vocab": (tokens_at + 4 * (n - 1), "I", u32(data, 116), "outside the vocabulary"),
        "mark_0": (marks_at, "I", 0, "a mark is impossible"),
        "mark_above_pos": (marks_at + 8 * (n_marks - 1), "I", n + 1, "a mark is impossible"),
        "mark_flags": (marks_at + 4, "I", 2, "a mark is impossible"),
        "mark_without_pages": (marks_at, "I", 1, "the pages do not fit the marks"),
        "marks_reversed": (marks_at, "I", n, "a mark is impossible"),
        "shape_stride": (pages_at + 4, "I", 0, "shape"),
        "shape_page_bytes": (pages_at + 16, "Q", 2**64 - 1, "shape"),
        "floor_above_window": (pages_at + 24, "I", 2**32 - 1, "pages inside the window are missing"),
        "floor_0": (pages_at + 24, "I", 0, "pages inside the window are missing"),
        "page_max": (last, "I", 2**32 - 1, "a page is impossible"),
        "page_twice": (first + 4, "I", u32(data, first), "a page is impossible"),
        "page_of_no_mark": (first, "I", 0, "the pages do not fit the marks"),
    }
    made = {name: (seal(put(data, at, code, value)), text) for name, (at, code, value, text) in damaged.items()}
    for i, (kind, stream, at, size, _) in enumerate(sections(data)):
        name, last, crc = f"checksum_{kind}_{stream}", at + size - 1, HEAD + i * ENTRY + 28
        if size:
            made[name] = (put(data, last, "B", data[last] ^ 1), "checksum of a section")
            made[name + "_stored"] = (seal(put(data, crc, "I", u32(data, crc) ^ 1), False), "checksum of a section")
    for at in edges(data)[:-1]:
        made[f"cut_{at}"] = (data[:at], "")
        made[f"cut_behind_{at}"] = (data[: at + 1], "")
    made["cut_last_byte"] = (data[:-1], "it was cut or added to")
    made["byte_more"] = (data + b"\0", "it was cut or added to")
    return made
