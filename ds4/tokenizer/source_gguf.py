"""The tokenizer that a GGUF file describes in its tokenizer.ggml.* keys."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ds4.errors import FileFormatError, UnsupportedError
from ds4.files.base import quote
from ds4.tokenizer.base import Tokenizer
from ds4.tokenizer.bpe import BpeTokenizer, Merges
from ds4.tokenizer.pre import PRE_TOKENIZERS, PreTokenizer, steps_of
from ds4.tokenizer.vocabulary import MAX_TOKENS, Added, Vocabulary, is_marker, model_rows

if TYPE_CHECKING:
    from ds4.files.checkpoint import Checkpoint

T = TypeVar("T")

# token types of the format; the others are 1 normal and 6 byte
_UNKNOWN, _CONTROL, _USER, _UNUSED = 2, 3, 4, 5


def load(checkpoint: Checkpoint) -> Tokenizer | None:
    """The file's tokenizer, None when it has none. Raises FileFormatError or UnsupportedError, naming file and key."""
    keys = _Keys(checkpoint)
    model = keys.get("model", str)
    if model is None:
        return None
    if model != "gpt2":
        raise UnsupportedError(
            f"{keys.where}: is of the kind {quote(model)}; this version reads 'gpt2' (byte-level BPE)."
        )
    pre = _pre_tokenizer(keys)
    merges = _merges(keys)
    vocabulary = _vocabulary(keys, merges.made, pre)
    rows = model_rows(checkpoint, len(vocabulary.tokens), keys.where)
    return BpeTokenizer(vocabulary, rows, merges, steps_of(pre), [], pre.ignore_merges)


class _Keys:
    """The tokenizer.ggml.* keys of a file, with their types checked."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.where, self._metadata = f"{checkpoint.path}: tokenizer", checkpoint.metadata

    def get(self, name: str, kind: type[T]) -> T | None:
        value = self._metadata.get(f"tokenizer.ggml.{name}")
        if value is None or type(value) is kind:
            return value
        words = {str: "text", bool: "true or false", int: "a whole number", list: "an array of strings"}
        raise FileFormatError(f"{self.where}.ggml.{name} is {quote(value)}; it must be {words[kind]}.")

    def strings(self, name: str) -> list[str]:
        found = self.get(name, list)
        if found is None:
            raise FileFormatError(f"{self.where}.ggml.{name} is missing; download the file again.")
        return found

    def types(self, n: int) -> np.ndarray[Any, Any]:
        """The type of each token; all are normal when the file does not say."""
        value = self._metadata.get("tokenizer.ggml.token_type")
        types = np.ones(n, np.int32) if value is None else np.asarray(value)
        if types.ndim != 1 or types.dtype.kind not in "iu":
            raise FileFormatError(f"{self.where}.ggml.token_type must be an array of whole numbers.")
        if len(types) != n:
            raise FileFormatError(f"{self.where}: there are {n} tokens but {len(types)} token types.")
        if n and not 1 <= types.min() <= types.max() <= 6:
            raise FileFormatError(
                f"{self.where}: token types go from {types.min()} to {types.max()}; the format has 1 to 6."
            )
        return types


def _pre_tokenizer(keys: _Keys) -> PreTokenizer:
    name = keys.get("pre", str)
    if name is None:
        warnings.warn(
            f"{keys.where}: does not name its pre-tokeniser (tokenizer.ggml.pre); 'default' is used and may cut words "
            "otherwise than in training. A newer conversion of the model has the name.",
            stacklevel=4,
        )
        name = "default"
    if name not in PRE_TOKENIZERS:
        raise UnsupportedError(
            f"{keys.where}: has the pre-tokeniser {quote(name)}; this version knows {', '.join(PRE_TOKENIZERS)}."
        )
    return PRE_TOKENIZERS[name]


def _merges(keys: _Keys) -> Merges:
    pairs: list[tuple[str, str]] = []
    for line in keys.strings("merges"):
        pair = line.split(" ")
        if len(pair) != 2:
            raise FileFormatError(
                f"{keys.where}: merge {len(pairs)} is {quote(line)}; it must be two tokens with one space between."
            )
        pairs.append((pair[0], pair[1]))
    return Merges(pairs)


def _vocabulary(keys: _Keys, made: set[str], pre: PreTokenizer) -> Vocabulary:
    """The tokens and their roles; `made` are the texts that merges make."""
    texts = keys.strings("tokens")
    if not 0 < len(texts) <= MAX_TOKENS:
        raise FileFormatError(f"{keys.where}: has {len(texts)} tokens; a vocabulary has 1 to {MAX_TOKENS}.")
    types = keys.types(len(texts))
    tokens: list[str | None] = [text or None for text in texts]
    for i in np.flatnonzero(types == _UNUSED).tolist():
        tokens[i] = None
    vocabulary = Vocabulary(keys.where, tokens)
    named = {
        name: vocabulary.token_id(keys.get(f"{name}_token_id", int), f"tokenizer.ggml.{name}_token_id")
        for name in ("bos", "eos", "eot", "eom", "unknown")
    }
    control = set(np.flatnonzero((types == _CONTROL) | (types == _UNKNOWN)).tolist())
    user = set(np.flatnonzero(types == _USER).tolist())
    # some files call every token normal: what no merge makes, and is spelled or used as a control token, is one
    control |= {
        i for i, text in enumerate(texts)
        if text[:2] in ("<|", "<｜") and text[-2:] in ("|>", "｜>") and i not in user and text not in made
    }  # fmt: skip
    control |= {i for i in named.values() if i is not None and len(texts[i]) > 1 and texts[i] not in made}
    for i in sorted(control | user):
        text = tokens[i]
        if text is not None:
            vocabulary.added[text] = Added(i, i in control or is_marker(text, made))
    vocabulary.bos_id = named["bos"]
    vocabulary.add_bos = _add_bos(keys, vocabulary.bos_id, pre)
    vocabulary.set_ends((named["eos"], named["eot"], named["eom"]))
    return vocabulary


def _add_bos(keys: _Keys, bos: int | None, pre: PreTokenizer) -> bool:
    said = keys.get("add_bos_token", bool)
    if said and bos is None:
        raise FileFormatError(f"{keys.where}: wants a BOS token (add_bos_token) but names none (bos_token_id).")
    return bos is not None and (pre.add_bos if said is None else said)
