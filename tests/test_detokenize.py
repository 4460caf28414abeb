"""Incremental detokenising: never half a character, never a stall, and the whole equals `decode` (fault F10)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizer import QWEN, tiny

from ds4.tokenizer.bpe import BYTE_OF

TINY = tiny(rows=320, user=QWEN)
ID_OF_BYTE = {TINY.token_bytes(i)[0]: i for i in range(3, 3 + len(BYTE_OF))}


def pieces(data: bytes) -> list[str]:
    """What a stream gives for data of one byte a token, the flush last."""
    stream = TINY.stream()
    return [*(stream.feed(ID_OF_BYTE[byte]) for byte in data), stream.flush()]


@pytest.mark.parametrize("character", ["é", "€", "漢", "😀", "\U0010ffff"])
def test_a_character_appears_with_its_last_byte(character):
    n = len(character.encode())
    assert pieces(character.encode()) == [""] * (n - 1) + [character, ""]
    assert pieces(f"a{character}b".encode()) == ["a", *[""] * (n - 1), character, "b", ""]


@pytest.mark.parametrize("character", ["é", "€", "😀"])
def test_every_way_to_split_a_character_over_tokens(character):
    """One vocabulary for each split: its tokens are the parts."""
    raw = character.encode()
    spelled = {byte: char for char, byte in BYTE_OF.items()}
    for cuts in range(1 << (len(raw) - 1)):
        edges = [0, *(i + 1 for i in range(len(raw) - 1) if cuts >> i & 1), len(raw)]
        parts = [raw[a:b] for a, b in zip(edges, edges[1:], strict=False)]
        tokens = ["".join(spelled[byte] for byte in part) for part in parts]
        tokenizer = tiny(
            tokens=tokens, token_type=np.ones(len(tokens), np.int32), merges=[], bos_token_id=None, eos_token_id=None
        )
        stream = tokenizer.stream()
        assert [stream.feed(i) for i in range(len(parts))] == [""] * (len(parts) - 1) + [character]


@pytest.mark.parametrize(
    "raw", ["é".encode()[:1], "€".encode()[:1], "€".encode()[:2], *(b"\xf0\x9f\x98"[:n] for n in (1, 2, 3))]
)
def test_a_cut_tail_comes_with_the_flush(raw):
    assert pieces(b"x" + raw) == ["x", *[""] * len(raw), "\ufffd"]
    stream = TINY.stream()
    for byte in raw:
        stream.feed(ID_OF_BYTE[byte])
    assert (stream.flush(), stream.flush()) == ("\ufffd", "")
    assert stream.feed(ID_OF_BYTE[ord("y")]) == "y"


@pytest.mark.parametrize(
    "raw", [b"\xff", b"\x80", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\xe2\x28\xa1", b"\xfe\xff"]
)
def test_invalid_bytes_do_not_stall(raw):
    text = "".join(pieces(raw + b"ok"))
    assert text == (raw + b"ok").decode("utf-8", "replace") and text.endswith("ok") and "\ufffd" in text
    # a hundred in a row: at no moment are more than three bytes held back
    stream, given, shown = TINY.stream(), b"", ""
    for byte in raw * 100:
        given += bytes([byte])
        shown += stream.feed(ID_OF_BYTE[byte])
        assert shown in (given[: len(given) - held].decode("utf-8", "replace") for held in range(4))


def test_control_tokens_and_padding_in_a_stream():
    stream = TINY.stream()
    ids = [*TINY.encode("a"), TINY.control["<think>"], 319, *TINY.encode("b")]
    assert [stream.feed(i) for i in ids] == ["a", "<think>", "", "b"]
    assert TINY.decode(ids) == "a<think>b"


def test_a_character_cut_by_a_control_token_is_replaced_at_once():
    stream = TINY.stream()
    assert [stream.feed(i) for i in (ID_OF_BYTE[0xE2], TINY.control["<|im_end|>"])] == ["", "\ufffd<|im_end|>"]


@given(st.lists(st.integers(0, 319), max_size=80))
def test_any_ids_equal_the_whole_decode(ids):
    stream = TINY.stream()
    parts = [stream.feed(i) for i in ids]
    whole = TINY.decode(ids)
    assert "".join(parts) + stream.flush() == whole
    assert whole == b"".join(map(TINY.token_bytes, ids)).decode("utf-8", "replace")


@given(st.binary(max_size=60))
def test_any_bytes_equal_the_whole_decode(data):
    parts = pieces(data)
    assert "".join(parts) == data.decode("utf-8", "replace")


@given(st.text(max_size=60))
def test_valid_text_never_shows_a_replacement(text):
    text = text.replace("\ufffd", "")
    stream, shown = TINY.stream(), ""
    for i in TINY.encode(text):
        shown += stream.feed(i)
        assert text.startswith(shown)
    assert shown == text and stream.flush() == ""


@pytest.mark.model
@given(ids=st.lists(st.integers(0, 49151), max_size=60))
def test_any_ids_of_smollm2(real, ids):
    stream = real.stream()
    assert "".join(map(stream.feed, ids)) + stream.flush() == real.decode(ids)


@pytest.fixture(scope="module")
def real(smollm2_path):
    from ds4 import tokenizer as tokenizers
    from ds4.files import open_checkpoint

    with open_checkpoint(smollm2_path) as checkpoint:
        yield tokenizers.load(checkpoint)
