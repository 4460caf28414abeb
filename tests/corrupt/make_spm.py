"""Broken SentencePiece models, as tokenizer.model and inside a GGUF file. The protocol buffer is written here byte by
byte, so that the project's own writer is not what its reader is tested with."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
PIECES = (("<unk>", 0.0, UNKNOWN), ("a", -2.0, NORMAL), ("b", -3.0, NORMAL), ("ab", -1.0, NORMAL))
BYTES = tuple((f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256))
BPE = {3: 2}


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def span(field: int, content: bytes, size: int | None = None) -> bytes:
    return varint(field << 3 | 2) + varint(len(content) if size is None else size) + content


def piece(text: str | bytes, score: float, kind: int) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return span(1, span(1, raw) + varint(2 << 3 | 5) + struct.pack("<f", score) + number(3, kind))


def model(
    pieces: tuple[tuple[str | bytes, float, int], ...] = PIECES,
    trainer: dict[int, int] = BPE,
    normalizer: dict[int, int] = {3: 0, 4: 0},  # noqa: B006
    more: bytes = b"",
) -> bytes:
    """A tokenizer.model; the defaults are a good one."""
    options = [b"".join(number(*item) for item in table.items()) for table in (trainer, normalizer)]
    return b"".join(piece(*p) for p in pieces) + span(2, options[0]) + span(3, options[1]) + more


def gguf_keys(change: dict[str, Any] = {}) -> dict[str, Any]:  # noqa: B006
    """tokenizer.ggml.* values of the same model: (type, value) as `make.key` takes them."""
    from tests.corrupt.make import ARRAY, BOOL, F32, I32, STRING, U32

    texts, scores, types = zip(*PIECES, strict=True)
    return {
        "model": (STRING, "llama"), "tokens": (ARRAY, (STRING, list(texts))), "scores": (ARRAY, (F32, list(scores))),
        "token_type": (ARRAY, (I32, list(types))), "unknown_token_id": (U32, 0), "add_bos_token": (BOOL, 0),
        "add_space_prefix": (BOOL, 0), **change,
    }  # fmt: skip


def proto_cases(case: Callable[[str, bytes, str], None]) -> None:
    good = model()

    def with_piece(name: str, words: str, text: str | bytes, score: float = 0.0, kind: int = NORMAL) -> None:
        case(name, model((*PIECES[:3], (text, score, kind))), words)

    case("empty", b"", "no pieces")
    case("tiktoken", b"IQ== 0\nIg== 1\nIw== 2\n", "is no SentencePiece model")
    case("cut", good[:30], "longer than what is left")
    case("cut_number", b"\x0a", "a number is cut")
    case("endless_number", b"\x0a" + b"\xff" * 20, "a number is cut")
    case("length_max", span(1, b"a", 2**64 - 1), "longer than what is left")
    case("length_2_63", good + span(7, b"", 2**63), "longer than what is left")
    case("inner_length", span(1, span(1, b"a", 100)), "longer than what is left")
    case("group", b"\x0b\x0c" + good, "wire type 3")
    case("wire_7", good + b"\x0f", "wire type 7")
    case("pieces_number", number(1, 3), "field 1 is no message")
    case("score_number", span(1, span(1, b"a") + number(2, 1)), "field 2 of a piece")
    case("text_number", span(1, number(1, 1)), "field 1 of a piece")
    case("type_0", span(1, span(1, b"a") + number(3, 0)), "type 0")
    case("type_7", span(1, span(1, b"a") + number(3, 7)), "type 7")
    case("type_max", span(1, span(1, b"a") + number(3, 2**64 - 1)), f"type {2**64 - 1}")
    with_piece("not_utf8", "no UTF-8", b"\xff\xfe")
    with_piece("surrogate", "no UTF-8", b"\xed\xa0\x80")
    with_piece("nul", "cannot keep", "a\0b")
    with_piece("reserved", "cannot keep", "\ufdd01")
    with_piece("long", "too long", "a" * 2000)
    with_piece("twice", "'b' has two ids", "b")
    with_piece("user_twice", "'b' has two ids", "b", kind=BYTE)
    with_piece("score_nan", "a score", "c", float("nan"))
    with_piece("score_inf", "a score", "c", float("-inf"))
    with_piece("score_huge", "a score", "c", 3e38)
    with_piece("two_unknown", "2 unknown tokens", "<u>", kind=UNKNOWN)
    case("no_unknown", model(PIECES[1:]), "neither byte tokens nor an unknown token")
    with_piece("bytes_incomplete", "1 byte tokens", "<0x41>", kind=BYTE)
    with_piece("byte_misspelled", "1 byte tokens", "<0xZZ>", kind=BYTE)
    case("more_than_rows", model((*PIECES, ("c", 0.0, NORMAL))), "the model 4 rows")
    for kind, words in ((3, "a word"), (4, "a character"), (5, "an unknown kind"), (2**63, "an unknown kind")):
        case(f"kind_{kind}", model(trainer={3: kind}), words)
    case("space_at_the_end", model(trainer={3: 2, 24: 1}), "treat_whitespace_as_suffix")
    case("extra_spaces", model(normalizer={3: 0}), "remove_extra_whitespaces")
    case("no_escape", model(normalizer={4: 0, 5: 0}), "escape_whitespaces")
    case("charsmap", good + span(3, span(2, b"\0" * 16)), "precompiled_charsmap")
    case("charsmap_back", good + span(5, span(2, b"\xff" * 16)), "precompiled_charsmap")
    case("charsmap_number", good + span(3, number(2, 1)), "precompiled_charsmap")
    case("option_text", good + span(2, span(3, b"\x02")), "option 3 is no number")
    case("trainer_number", good + number(2, 1), "field 2 is no message")


def gguf_cases(case: Callable[[str, dict[str, Any], str], None]) -> None:
    from tests.corrupt.make import ARRAY, BOOL, F32, I32, STRING, U8, U32

    for name, words, key, value in (
        ("no_scores", "scores is missing", "scores", None),
        ("scores_whole", "scores is missing, or no array", "scores", (ARRAY, (I32, [0, 1, 2, 3]))),
        ("scores_text", "scores is missing, or no array", "scores", (ARRAY, (STRING, ["0"] * 4))),
        ("scores_one", "scores is missing, or no array", "scores", (F32, 0.5)),
        ("scores_too_few", "but 2 scores", "scores", (ARRAY, (F32, [0.0, 1.0]))),
        ("scores_nan", "a score", "scores", (ARRAY, (F32, [0.0, float("nan"), 0.0, 0.0]))),
        ("scores_inf", "a score", "scores", (ARRAY, (F32, [0.0, float("inf"), 0.0, 0.0]))),
        ("tokens_twice", "'a' has two ids", "tokens", (ARRAY, (STRING, ["<unk>", "a", "a", "ab"]))),
        ("tokens_nul", "cannot keep", "tokens", (ARRAY, (STRING, ["<unk>", "a\0", "b", "ab"]))),
        ("tokens_long", "too long", "tokens", (ARRAY, (STRING, ["<unk>", "a" * 2000, "b", "ab"]))),
        ("tokens_empty", "unknown_token_id is 0", "tokens", (ARRAY, (STRING, [""] * 4))),
        ("bytes_incomplete", "1 byte tokens", "token_type", (ARRAY, (I32, [2, 1, 1, 6]))),
        ("unknown_out_of_range", "unknown_token_id is 4", "unknown_token_id", (U32, 4)),
        ("unknown_normal", "neither byte tokens", "unknown_token_id", (U32, 1)),
        ("prefix_number", "add_space_prefix is 1", "add_space_prefix", (U32, 1)),
        ("charsmap", "precompiled_charsmap", "precompiled_charsmap", (ARRAY, (U8, [1, 2, 3]))),
        ("extra_spaces", "remove_extra_whitespaces", "remove_extra_whitespaces", (BOOL, 1)),
        ("no_escape", "escape_whitespaces", "escape_whitespaces", (BOOL, 0)),
        ("bos_missing", "names none (bos_token_id)", "add_bos_token", (BOOL, 1)),
    ):
        case(name, gguf_keys({key: value}), words)
