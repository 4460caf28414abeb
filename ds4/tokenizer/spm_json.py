"""SentencePiece BPE as a tokenizer.json has it: merges over a text whose spaces are U+2581, and bytes for the rest.

Read where the original tokenizer.model is not there. Its own file is the better source: it needs no merges, and older
conversions treat text behind control tokens in their own way.
"""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer as Library
from tokenizers import models

from ds4.errors import FileFormatError, UnsupportedError
from ds4.files.base import quote
from ds4.tokenizer.bpe import Merges, check_merges, digest, guard, mergeable
from ds4.tokenizer.pre import flatten
from ds4.tokenizer.spm import BYTE_TEXTS, SPACE, SpacedTokenizer
from ds4.tokenizer.vocabulary import Vocabulary

_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
_PREPEND = {"type": "Prepend", "prepend": SPACE}
# cut nothing: no space is left when they come
_IDLE: tuple[dict[str, Any], ...] = (
    {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
    {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "never", "split": False},
)


class SpmJsonTokenizer(SpacedTokenizer):
    """The `tokenizers` library's BPE with byte fallback; the spaces are put in here."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int, merges: Merges, prefix: bool) -> None:
        """Raises FileFormatError when merges, bytes and vocabulary do not fit each other."""
        where = self._where = vocabulary.where
        entries = mergeable(vocabulary)
        check_merges(merges, entries, where)
        missing = BYTE_TEXTS.keys() - entries.keys()
        if missing:
            raise FileFormatError(f"{where}: has byte_fallback but no token {min(missing)}.")
        super().__init__(vocabulary, vocab_size, prefix, has_bytes=True)
        self._fingerprint = digest(vocabulary, merges, ["spm", prefix, sorted(map(str, vocabulary.added.values()))])
        self._library = guard(
            where, lambda: Library(models.BPE(vocab=entries, merges=merges.pairs, byte_fallback=True))
        )

    def _encode_text(self, text: str) -> list[int]:
        text = SPACE * self._prefix + text.replace(" ", SPACE)
        ids: list[int] = guard(self._where, lambda: self._library.encode(text, add_special_tokens=False).ids)
        return ids


def read_prefix(data: dict[str, Any], where: str) -> bool:
    """Whether a tokenizer.json puts a space before a text. Raises UnsupportedError for steps that do anything else."""
    before = flatten(data.get("normalizer"), "normalizers", where)
    steps = before + flatten(data.get("pre_tokenizer"), "pretokenizers", where)
    if before in ([_PREPEND, _REPLACE], [_REPLACE]) and all(step in _IDLE for step in steps[len(before) :]):
        return len(before) == 2
    kinds = ", ".join(str(step.get("type")) for step in steps)
    raise UnsupportedError(
        f"{where}: was converted from SentencePiece and has the steps {quote(kinds or 'none')}, which are not known in "
        "this order; put the model's tokenizer.model, the original, beside it."
    )
