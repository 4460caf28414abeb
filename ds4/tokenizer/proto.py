"""The model file of SentencePiece (tokenizer.model), a protocol buffer: the fields that decide ids, read and written.

    ModelProto      1 pieces (many)   2 TrainerSpec   3 NormalizerSpec   5 denormaliser, a NormalizerSpec
    SentencePiece   1 text   2 score (float)   3 type
    TrainerSpec     3 kind of model   24 spaces at the end of words   35 byte fallback   41 BOS   42 EOS
    NormalizerSpec  2 character map   3 dummy prefix   4 remove extra spaces   5 spell spaces as U+2581

A field is a varint `number << 3 | wire`, then a varint (wire 0), 8 bytes (1), a varint length and so many bytes (2), or
4 bytes (5). Bytes of a stranger are never given to the C++ library: a model is read here and written anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ds4.errors import FileFormatError, UnsupportedError
from ds4.tokenizer.vocabulary import MAX_TOKENS

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
UNIGRAM, BPE = 1, 2
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_WIRES = {1: _BYTES, 2: _FIXED32, 3: _VARINT}  # of a piece's fields
_KINDS = {3: "a word", 4: "a character"}


@dataclass
class Model:
    """`kind`: UNIGRAM or BPE. Of every piece its text, score (float32) and type (uint8). `dummy_prefix`: a text begins
    as if a space stood before it. `bos_id`, `eos_id`: None where the model says it has none."""

    kind: int
    texts: list[str]
    scores: np.ndarray[Any, np.dtype[np.float32]]
    types: np.ndarray[Any, np.dtype[np.uint8]]
    dummy_prefix: bool
    bos_id: int | None = None
    eos_id: int | None = None


# ---- reading ----


def read(data: bytes, where: str) -> Model:
    """The model in the bytes of a file. Raises FileFormatError when they are none, UnsupportedError, by name, for an
    option that would change ids and is not known here."""
    reader = _Reader(data, where)
    texts: list[str] = []
    scores: list[bytes] = []
    types = bytearray()
    specs: dict[int, list[tuple[int, int]]] = {2: [], 3: [], 5: []}
    for number, begin, end in reader.messages(0, len(data), (1, *specs)):
        if number != 1:
            specs[number].append((begin, end))
            continue
        if len(texts) == MAX_TOKENS:
            raise FileFormatError(f"{where}: has more than {MAX_TOKENS} pieces.")
        text, score, kind = reader.piece(begin, end)
        texts.append(text)
        scores.append(score)
        types.append(kind)
    if not texts:
        raise FileFormatError(f"{where}: is no SentencePiece model: it has no pieces; download it again.")
    trainer = reader.options(specs[2], {3: UNIGRAM, 24: 0, 35: 0, 41: 1, 42: 2})
    normal = reader.options(specs[3], {3: 1, 4: 1, 5: 1}, charsmap=2)
    reader.options(specs[5], {}, charsmap=2)
    if trainer[3] not in (UNIGRAM, BPE):
        raise UnsupportedError(f"{where}: is {_KINDS.get(trainer[3], 'an unknown kind of')} model of SentencePiece; "
                               "unigram and BPE are read.")  # fmt: skip
    for found, refused in ((trainer[24], "treat_whitespace_as_suffix"), (normal[4], "remove_extra_whitespaces"),
                           (not normal[5], "escape_whitespaces = false")):  # fmt: skip
        if found:
            raise UnsupportedError(
                f"{where}: uses the SentencePiece option {refused}, which this version does not know."
            )
    return Model(
        trainer[3], texts, np.frombuffer(b"".join(scores), "<f4"), np.frombuffer(bytes(types), np.uint8),
        bool(normal[3]), *(i if i < len(texts) else None for i in (trainer[41], trainer[42])),
    )  # fmt: skip


class _Reader:
    """Reads fields between two offsets; nothing is believed about a length before it is compared with the end."""

    def __init__(self, data: bytes, where: str) -> None:
        self.data, self.where = data, where

    def error(self, pos: int, what: str) -> FileFormatError:
        return FileFormatError(f"{self.where}: is no SentencePiece model: {what} at byte {pos}; download it again.")

    def varint(self, pos: int, end: int) -> tuple[int, int]:
        """(value of 64 bits, where it ends)."""
        value = 0
        for i in range(10):
            if pos + i >= end:
                break
            byte = self.data[pos + i]
            value |= (byte & 0x7F) << 7 * i
            if byte < 0x80:
                return value & (1 << 64) - 1, pos + i + 1
        raise self.error(pos, "a number is cut")

    def fields(self, pos: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """(number, wire, value, 0), and (number, wire, begin, end) for all that is no varint."""
        while pos < end:
            tag, at = self.varint(pos, end)
            number, wire = tag >> 3, tag & 7
            if wire == _VARINT:
                value, pos = self.varint(at, end)
                yield number, wire, value, 0
                continue
            if wire == _BYTES:
                size, at = self.varint(at, end)
            elif wire in (_FIXED64, _FIXED32):
                size = 8 if wire == _FIXED64 else 4
            else:
                raise self.error(pos, f"field {number} has the unknown wire type {wire}")
            if size > end - at:
                raise self.error(pos, f"field {number} is longer than what is left")
            pos = at + size
            yield number, wire, at, pos

    def messages(self, pos: int, end: int, numbers: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
        """(number, begin, end) of those fields that are messages of these numbers; others are passed over."""
        for number, wire, begin, stop in self.fields(pos, end):
            if number not in numbers:
                continue
            if wire != _BYTES:
                raise self.error(pos, f"field {number} is no message")
            yield number, begin, stop

    def piece(self, begin: int, end: int) -> tuple[str, bytes, int]:
        """(text, score as 4 bytes, type)."""
        data = self.data
        text, score, kind = b"", b"\0\0\0\0", NORMAL
        # all writers put the fields in this order, and 262144 pieces are to be read in a moment
        size = data[begin + 1] if end - begin > 7 else 0xFF
        at = begin + 2 + size
        if data[begin : begin + 1] == b"\n" and size < 0x80 and at + 5 <= end and data[at] == 0x15:
            text, score = data[begin + 2 : at], data[at + 1 : at + 5]
            begin = at + 5
        for number, wire, first, last in self.fields(begin, end):
            if wire != _WIRES.get(number, wire):
                raise self.error(begin, f"field {number} of a piece has the wire type {wire}")
            if number == 1:
                text = data[first:last]
            elif number == 2:
                score = data[first:last]
            elif number == 3:
                kind = first
        if not NORMAL <= kind <= BYTE:
            raise self.error(begin, f"a piece has the type {kind}")
        try:
            return text.decode("utf-8"), score, kind
        except UnicodeDecodeError:
            raise self.error(begin, "a piece is no UTF-8") from None

    def options(self, spans: list[tuple[int, int]], wanted: dict[int, int], charsmap: int = 0) -> dict[int, int]:
        """The varints of a message by number over their defaults; the last of several wins. `charsmap`: a field of
        bytes that must be empty."""
        found = dict(wanted)
        for begin, end in spans:
            for number, wire, value, stop in self.fields(begin, end):
                if number in found:
                    if wire != _VARINT:
                        raise self.error(begin, f"option {number} is no number")
                    found[number] = value
                elif number == charsmap and (wire != _BYTES or stop > value):
                    raise UnsupportedError(
                        f"{self.where}: changes characters before it cuts (precompiled_charsmap), which this version "
                        "does not do."
                    )
        return found


# ---- writing ----


def write(model: Model) -> bytes:
    """The model as the library reads it."""
    raws = [text.encode("utf-8") for text in model.texts]
    tails = np.empty((len(raws), 7), np.uint8)
    tails[:, 0], tails[:, 5], tails[:, 6] = 2 << 3 | _FIXED32, 3 << 3 | _VARINT, model.types
    tails[:, 1:5] = model.scores.astype("<f4").view(np.uint8).reshape(-1, 4)
    tail = tails.tobytes()
    heads = [_head(n) for n in range(max(map(len, raws), default=0) + 1)]
    pieces = [heads[len(raw)] + raw + tail[at : at + 7] for raw, at in zip(raws, range(0, len(tail), 7), strict=True)]
    full = BYTE in model.types
    trainer = b"".join(map(_number, (3, 35), (model.kind, full)))
    normal = b"".join(map(_number, (3, 4, 5), (model.dummy_prefix, 0, 1)))
    return b"".join((*pieces, _tag(2), _varint(len(trainer)), trainer, _tag(3), _varint(len(normal)), normal))


def _head(size: int) -> bytes:
    """What stands before the text of a piece: the two tags and lengths."""
    inner = _tag(1) + _varint(size)
    return _tag(1) + _varint(len(inner) + size + 7) + inner


def _tag(number: int, wire: int = _BYTES) -> bytes:
    return _varint(number << 3 | wire)


def _number(number: int, value: int) -> bytes:
    return _tag(number, _VARINT) + _varint(value)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))
