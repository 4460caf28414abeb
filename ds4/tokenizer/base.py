"""What every tokenizer has in common: control tokens, whole texts and single tokens as bytes, the end ids.

A subclass says how a text without such tokens is cut (`_encode_text`) and which bytes a vocabulary entry stands for
(`_entry_bytes`).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable

from ds4.errors import ArgumentError, FileFormatError
from ds4.files.base import quote
from ds4.tokenizer.stream import Detokenizer
from ds4.tokenizer.vocabulary import Added, Vocabulary

MAX_ADDED = 256  # characters; every place in a text may be compared with all lengths that occur
_SPACE = re.compile(r"\s*")


class Tokenizer:
    """Text to token ids and back.

    `vocab_size`: ids are 0 .. vocab_size - 1, as many as the model has rows; ids without a token decode to nothing.
    `bos_id`, `add_bos`: the token that begins a text, and whether this model wants it; `encode` never adds it.
    `eos_ids`: tokens after which nothing more comes. `control`: the control tokens by their text.
    """

    def __init__(self, vocabulary: Vocabulary, vocab_size: int, fingerprint: bytes) -> None:
        """Raises FileFormatError when an added token is too long to be looked for."""
        longest = max(vocabulary.added, key=len, default="")
        if len(longest) > MAX_ADDED:
            raise FileFormatError(
                f"{vocabulary.where}: the added token {quote(longest)} is too long; at most {MAX_ADDED} characters are "
                "looked for in a text."
            )
        self.vocab_size = vocab_size
        self.bos_id, self.add_bos, self.eos_ids = vocabulary.bos_id, vocabulary.add_bos, vocabulary.eos_ids
        self.control = {text: added.id for text, added in vocabulary.added.items() if added.control}
        self._fingerprint = fingerprint
        self._tokens = vocabulary.tokens
        self._whole = {added.id for added in vocabulary.added.values()}
        self._all = _Finder(vocabulary.added)
        self._ordinary = _Finder({text: added for text, added in vocabulary.added.items() if not added.control})

    def fingerprint(self) -> bytes:
        """32 bytes that name it: equal when the same texts give the same ids, as far as the file's data decide it."""
        return self._fingerprint

    def encode(self, text: str, special: bool = False) -> list[int]:
        """The ids of a text, without BOS. A control token that is spelled in it stays text, unless `special`.

        A lone surrogate, which is no character, is encoded as U+FFFD. A byte that the vocabulary has no token for (a
        few control characters in some models) is left out, as the reference tokenizers do. Raises ArgumentError when
        `text` is no str.
        """
        if not isinstance(text, str):
            raise ArgumentError(f"encode takes text, not {type(text).__name__}; decode bytes to a str first.")
        text = characters(text)
        ids: list[int] = []
        for piece in (self._all if special else self._ordinary).cut(text):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids += self._encode_text(piece)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of all ids, control tokens spelled out; bytes that are no character become U+FFFD.

        Raises ArgumentError for an id outside the vocabulary.
        """
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes one token adds to a text, b"" for an id without a token.

        Raises ArgumentError for an id outside the vocabulary.
        """
        try:
            index = operator.index(token)
        except TypeError:
            raise ArgumentError(f"a token id is a whole number, not {type(token).__name__}.") from None
        if not 0 <= index < self.vocab_size:
            raise ArgumentError(f"token id {index} is outside the vocabulary; ids are 0 to {self.vocab_size - 1}.")
        text = self._tokens[index] if index < len(self._tokens) else None
        if text is None:
            return b""
        return text.encode("utf-8") if index in self._whole else self._entry_bytes(text)

    def stream(self) -> Detokenizer:
        """A new incremental decoder: never half a character."""
        return Detokenizer(self)

    def _encode_text(self, text: str) -> list[int]:
        raise NotImplementedError

    def _entry_bytes(self, text: str) -> bytes:
        raise NotImplementedError


def characters(text: str) -> str:
    """The text with each lone surrogate replaced by U+FFFD (a pair of them is the character it means)."""
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


class _Finder:
    """Finds added tokens in a text: the leftmost, and of several there the longest.

    Not one large alternation: that takes minutes to compile for a file that declares a million control tokens.
    """

    def __init__(self, added: dict[str, Added]) -> None:
        self._added = added
        lengths: dict[str, set[int]] = {}
        for text in added:
            lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = {first: sorted(found, reverse=True) for first, found in lengths.items()}
        self._first = re.compile("[" + "".join(map(re.escape, lengths)) + "]") if lengths else None

    def cut(self, text: str) -> list[str | int]:
        """The text as pieces of ordinary text (never empty) and ids of the tokens found in it."""
        if self._first is None:
            return [text] if text else []
        pieces: list[str | int] = []
        begin = pos = 0
        while match := self._first.search(text, pos):
            pos = match.start()
            found = self._at(text, pos)
            if found is None:
                pos += 1
                continue
            length, token = found
            before, end = text[begin:pos], pos + length
            if token.lstrip:
                before = before.rstrip()
            if token.rstrip:
                end = _SPACE.match(text, end).end()  # type: ignore[union-attr]
            if before:
                pieces.append(before)
            pieces.append(token.id)
            begin = pos = end
        if begin < len(text):
            pieces.append(text[begin:])
        return pieces

    def _at(self, text: str, pos: int) -> tuple[int, Added] | None:
        for length in self._lengths[text[pos]]:
            token = self._added.get(text[pos : pos + length])
            if token is None or (token.word and _inside_word(text, pos, pos + length)):
                continue
            return length, token
        return None


def _inside_word(text: str, begin: int, end: int) -> bool:
    return (begin > 0 and (text[begin - 1].isalnum() or text[begin - 1] == "_")) or (
        end < len(text) and (text[end].isalnum() or text[end] == "_")
    )
