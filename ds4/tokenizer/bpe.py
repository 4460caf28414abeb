"""Byte-level BPE: the vocabulary spells every byte as one printable character, merges join them.

The `tokenizers` library does the work; it is given only what was checked here: an unchecked vocabulary makes it panic,
and a panic is a BaseException that no caller expects.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from itertools import chain
from typing import Any, TypeVar

import numpy as np
from tokenizers import Tokenizer as Library
from tokenizers import models

from ds4.errors import FileFormatError
from ds4.files.base import quote
from ds4.tokenizer.base import Tokenizer
from ds4.tokenizer.vocabulary import Vocabulary

T = TypeVar("T")


def _byte_of_character() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 stands for itself, the other bytes for U+0100 and on, in ascending order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {**{chr(b): b for b in printable}, **{chr(256 + i): b for i, b in enumerate(others)}}


BYTE_OF = _byte_of_character()


class Merges:
    """The merges in their order; `made`: the texts they make."""

    def __init__(self, pairs: list[tuple[str, str]]) -> None:
        self.pairs = pairs
        self.made = {left + right for left, right in pairs}


class BpeTokenizer(Tokenizer):
    """Byte-level BPE. `pre` and `normalizer` are steps of the library's JSON, see ds4.tokenizer.pre."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        vocab_size: int,
        merges: Merges,
        pre: list[dict[str, Any]],
        normalizer: list[dict[str, Any]],
        ignore_merges: bool,
    ) -> None:
        """Raises FileFormatError when the merges do not fit the vocabulary."""
        where = self._where = vocabulary.where
        entries = mergeable(vocabulary)
        check_merges(merges, entries, where)
        options = [pre, normalizer, ignore_merges, sorted(map(str, vocabulary.added.values()))]
        super().__init__(vocabulary, vocab_size, digest(vocabulary, merges, options))
        # steps can only be made from JSON; the vocabulary is large and goes in as it is
        shell = {
            "model": {"type": "BPE", "vocab": {}, "merges": []},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": pre},
            "normalizer": {"type": "Sequence", "normalizers": normalizer} if normalizer else None,
        }
        self._library = guard(where, lambda: Library.from_str(json.dumps(shell)))
        self._library.model = guard(
            where, lambda: models.BPE(vocab=entries, merges=merges.pairs, ignore_merges=ignore_merges)
        )

    def _encode_text(self, text: str) -> list[int]:
        ids: list[int] = guard(self._where, lambda: self._library.encode(text, add_special_tokens=False).ids)
        return ids

    def _entry_bytes(self, text: str) -> bytes:
        try:
            return bytes([BYTE_OF[c] for c in text])
        except KeyError:
            return text.encode("utf-8")


def mergeable(vocabulary: Vocabulary) -> dict[str, int]:
    """What merges may make: every token but the control tokens, so that no text can ever become one of those."""
    entries = {text: i for i, text in enumerate(vocabulary.tokens) if text is not None}
    if len(entries) != len(vocabulary.tokens) - vocabulary.tokens.count(None):
        seen: set[str | None] = {None}
        twice = next(t for t in vocabulary.tokens if t is not None and (t in seen or seen.add(t)))  # type: ignore[func-returns-value]
        raise FileFormatError(f"{vocabulary.where}: token {quote(twice)} has two ids; download the file again.")
    for text, added in vocabulary.added.items():
        if added.control:
            del entries[text]
    return entries


def check_merges(merges: Merges, entries: dict[str, int], where: str) -> None:
    """Raises FileFormatError unless every merge joins two entries to a third, once."""
    unknown = (set(chain.from_iterable(merges.pairs)) | merges.made) - entries.keys()
    if unknown:
        raise FileFormatError(
            f"{where}: a merge uses or makes {quote(min(unknown))}, which is no ordinary token of the vocabulary; "
            "vocabulary and merges do not belong together."
        )
    twice = len(merges.pairs) - len(set(merges.pairs))
    if twice:
        raise FileFormatError(f"{where}: {twice} merges come twice, so their rank is not defined.")


def digest(vocabulary: Vocabulary, merges: Merges, options: object) -> bytes:
    """SHA-256 over all that decides which ids a text gets."""
    found = hashlib.sha256(b"ds4 bpe 1" + json.dumps(options).encode())
    for texts in ([text or "" for text in vocabulary.tokens], list(chain.from_iterable(merges.pairs))):
        found.update(np.array([len(texts), *map(len, texts)], "<u4").tobytes())
        found.update("".join(texts).encode("utf-8"))
    return found.digest()


def guard(where: str, call: Callable[[], T]) -> T:
    """Runs the library; whatever it fails with, a Rust panic too, is the file's fault and becomes a FileFormatError."""
    try:
        return call()
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise FileFormatError(
            f"{where}: the tokenizers library cannot work with this tokenizer ({quote(str(error))})."
        ) from None
