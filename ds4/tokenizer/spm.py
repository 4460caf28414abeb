"""SentencePiece: pieces of text with scores, U+2581 for a space, bytes for what no piece spells.

The `sentencepiece` library does the work. It is given a model that is written here from checked parts: it recurses over
the length of a piece, builds tries of C strings, and compares scores without a thought of NaN. Control tokens are not
in it at all, so that no text can become one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
from sentencepiece import SentencePieceProcessor

from ds4.errors import FileFormatError
from ds4.files.base import quote
from ds4.tokenizer import proto
from ds4.tokenizer.base import Tokenizer
from ds4.tokenizer.proto import BYTE, CONTROL, UNKNOWN, Model
from ds4.tokenizer.vocabulary import Vocabulary

MAX_PIECE = 1024  # characters; the longest of Gemma has 31
MAX_SCORE = 1e9  # sums over a long text must stay finite
SPACE = "\u2581"
NOWHERE = "\ufdd0"  # stands for no character; begins the names of pieces that no text may become
BYTE_TEXTS = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}


class SpacedTokenizer(Tokenizer):
    """What SentencePiece's tokenizers have in common: U+2581 and bytes.

    Where the model has a dummy prefix (Llama 2, not Gemma) a text is encoded as if a space stood before it, and so is
    what follows a control token; `decode` leaves these spaces out again. Streams show them: the text of a model goes on
    behind other text.
    """

    def __init__(
        self, vocabulary: Vocabulary, vocab_size: int, prefix: bool, has_bytes: bool, unknown: int = -1
    ) -> None:
        super().__init__(vocabulary, vocab_size, b"")
        self._prefix = prefix
        self._bytes = BYTE_TEXTS if has_bytes else {}
        self._whole = set(self.control.values())
        # without bytes the unknown token stands for text
        self._begins = self._whole if has_bytes else self._whole - {unknown}

    def decode(self, ids: Iterable[int]) -> str:
        if not self._prefix:
            return super().decode(ids)
        parts, begins = [], True
        for token in ids:
            part = self.token_bytes(token)
            parts.append(part[1:] if begins and part[:1] == b" " else part)
            begins = token in self._begins
        return b"".join(parts).decode("utf-8", "replace")

    def _entry_bytes(self, text: str) -> bytes:
        return self._bytes.get(text) or text.replace(SPACE, " ").encode("utf-8")


class SpmTokenizer(SpacedTokenizer):
    """SentencePiece, unigram or BPE."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int, model: Model) -> None:
        """`vocabulary.added` names all control tokens of `model` and more. Raises FileFormatError when the parts do not
        make a model."""
        unknown = np.flatnonzero(model.types == UNKNOWN).tolist()
        super().__init__(vocabulary, vocab_size, model.dummy_prefix, BYTE in model.types, *unknown[:1])
        data = proto.write(_checked(model, vocabulary))
        digest = hashlib.sha256(f"ds4 spm 1 {sorted(map(str, vocabulary.added.items()))}".encode())
        digest.update(data)
        self._fingerprint = digest.digest()
        self._library = SentencePieceProcessor()
        try:
            self._library.LoadFromSerializedProto(data)
        except (OSError, RuntimeError, ValueError) as error:
            raise FileFormatError(
                f"{vocabulary.where}: the sentencepiece library cannot work with this tokenizer ({quote(str(error))})."
            ) from None

    def compare(self, entries: dict[str, Any], where: str) -> None:
        """Raises FileFormatError when a vocabulary gives one of the tokens another id."""
        for i, text in enumerate(self._tokens):
            if text is not None and entries.get(text, i) != i:
                raise FileFormatError(
                    f"{where}: token {quote(text)} has the id {quote(entries[text])}, in tokenizer.model {i}; "
                    "they do not belong together."
                )

    def _encode_text(self, text: str) -> list[int]:
        ids: list[int] = self._library.EncodeAsIds(text)
        return ids


def _checked(model: Model, vocabulary: Vocabulary) -> Model:
    """The model for the library: tokens that text must not become are CONTROL pieces of texts that do not occur."""
    where, texts, types, scores = vocabulary.where, list(model.texts), model.types.copy(), model.scores
    added = np.array([a.id for a in vocabulary.added.values() if a.id < len(types)], np.int64)
    types[added[types[added] != UNKNOWN]] = CONTROL
    for i in np.flatnonzero((types == CONTROL) | (types == UNKNOWN)).tolist():
        texts[i] = ""
    _check_texts(texts, types, where)
    for i in (i for i, text in enumerate(texts) if not text):
        texts[i] = f"{NOWHERE}{i}"
        types[i] = UNKNOWN if types[i] == UNKNOWN else CONTROL
    if not np.all(np.abs(scores) <= MAX_SCORE):
        raise FileFormatError(f"{where}: a score is no number of at most {MAX_SCORE:g}; download the file again.")
    unknown = np.count_nonzero(types == UNKNOWN)
    if unknown > 1:
        raise FileFormatError(f"{where}: has {unknown} unknown tokens; there is one for all that no piece spells.")
    if not unknown:
        if BYTE not in types:
            raise FileFormatError(f"{where}: has neither byte tokens nor an unknown token for what no piece spells.")
        texts.append(NOWHERE)  # the library wants one; with bytes it is never used
        types, scores = np.append(types, np.uint8(UNKNOWN)), np.append(scores, np.float32(0))
    return Model(model.kind, texts, scores, types, model.dummy_prefix)


def _check_texts(texts: list[str], types: np.ndarray[Any, Any], where: str) -> None:
    """Raises FileFormatError for pieces that are too long, hold a character that is not possible, come twice, and for
    an incomplete set of bytes."""
    longest = max(texts, key=len)
    if len(longest) > MAX_PIECE:
        raise FileFormatError(
            f"{where}: the token {quote(longest)} is too long; at most {MAX_PIECE} characters are read."
        )
    every = "".join(texts)
    if "\0" in every or NOWHERE in every:
        bad = next(text for text in texts if "\0" in text or NOWHERE in text)
        raise FileFormatError(f"{where}: the token {quote(bad)} holds a character that SentencePiece cannot keep.")
    if len(set(texts) - {""}) != len(texts) - texts.count(""):
        seen: set[str] = set()
        twice = next(text for text in texts if text and (text in seen or seen.add(text)))  # type: ignore[func-returns-value]
        raise FileFormatError(f"{where}: token {quote(twice)} has two ids; download the file again.")
    found = sorted(texts[i] for i in np.flatnonzero(types == BYTE).tolist())
    if found and found != list(BYTE_TEXTS):
        raise FileFormatError(f"{where}: has {len(found)} byte tokens; they must be the 256 from <0x00> to <0xFF>.")
