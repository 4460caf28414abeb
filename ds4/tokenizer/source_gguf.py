"""The tokenizer that a GGUF file describes in its tokenizer.ggml.* keys."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ds4.errors import FileFormatError, UnsupportedError
from ds4.files.base import quote
from ds4.tokenizer import proto
from ds4.tokenizer.base import Tokenizer
from ds4.tokenizer.bpe import BpeTokenizer, Merges
from ds4.tokenizer.pre import PRE_TOKENIZERS, PreTokenizer, steps_of
from ds4.tokenizer.spm import BYTE_TEXTS, SPACE, SpmTokenizer
from ds4.tokenizer.vocabulary import MAX_TOKENS, Added, Vocabulary, is_marker, is_tag, model_rows

if TYPE_CHECKING:
    from ds4.files.checkpoint import Checkpoint

T = TypeVar("T")

# token types of the format, those of SentencePiece; the others are 1 normal and 6 byte
_UNKNOWN, _CONTROL, _USER, _UNUSED = 2, 3, 4, 5


def load(checkpoint: Checkpoint) -> Tokenizer | None:
    """The file's tokenizer, None when it has none. Raises FileFormatError or UnsupportedError, naming file and key."""
    keys = _Keys(checkpoint)
    model = keys.get("model", str)
    if model is None:
        return None
    if model == "llama":
        return _sentencepiece(keys, checkpoint)
    if model != "gpt2":
        raise UnsupportedError(
            f"{keys.where}: is of the kind {quote(model)}; this version reads 'gpt2' (byte-level BPE) and 'llama' "
            "(SentencePiece)."
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

    def tokens(self) -> list[str]:
        texts = self.strings("tokens")
        if not 0 < len(texts) <= MAX_TOKENS:
            raise FileFormatError(f"{self.where}: has {len(texts)} tokens; a vocabulary has 1 to {MAX_TOKENS}.")
        return texts

    def scores(self, n: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        scores = np.asarray(self._metadata.get("tokenizer.ggml.scores"))
        if scores.ndim != 1 or scores.dtype.kind != "f":
            raise FileFormatError(f"{self.where}.ggml.scores is missing, or no array of numbers with a fraction.")
        if len(scores) != n:
            raise FileFormatError(f"{self.where}: there are {n} tokens but {len(scores)} scores.")
        with np.errstate(over="ignore"):
            return scores.astype(np.float32)

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
    texts = keys.tokens()
    types = keys.types(len(texts))
    tokens: list[str | None] = [text or None for text in texts]
    for i in np.flatnonzero(types == _UNUSED).tolist():
        tokens[i] = None
    vocabulary = Vocabulary(keys.where, tokens)
    named = _named(keys, vocabulary)
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
    _begin_and_end(keys, vocabulary, named, pre.add_bos)
    return vocabulary


def _named(keys: _Keys, vocabulary: Vocabulary) -> dict[str, int | None]:
    """The tokens that the file names for a purpose."""
    return {
        name: vocabulary.token_id(keys.get(f"{name}_token_id", int), f"tokenizer.ggml.{name}_token_id")
        for name in ("bos", "eos", "eot", "eom", "unknown")
    }


def _begin_and_end(keys: _Keys, vocabulary: Vocabulary, named: dict[str, int | None], add_bos: bool) -> None:
    """Sets what begins and ends a text; `add_bos` is what a file means that does not say."""
    vocabulary.bos_id = bos = named["bos"]
    said = keys.get("add_bos_token", bool)
    if said and bos is None:
        raise FileFormatError(f"{keys.where}: wants a BOS token (add_bos_token) but names none (bos_token_id).")
    vocabulary.add_bos = bos is not None and (add_bos if said is None else said)
    vocabulary.set_ends((named["eos"], named["eot"], named["eom"]))


# ---- SentencePiece ----

# options of other kinds of SentencePiece, and the value that changes nothing
_OPTIONS = {"remove_extra_whitespaces": False, "treat_whitespace_as_suffix": False, "escape_whitespaces": True}
_DEFAULTS = {"bos": 1, "eos": 2, "unknown": 0}  # of a file that names none


def _sentencepiece(keys: _Keys, checkpoint: Checkpoint) -> SpmTokenizer:
    """The pieces are joined by their scores (BPE): files of this kind mean that, however their model was trained."""
    for option, usual in _OPTIONS.items():
        if keys.get(option, bool) not in (None, usual):
            raise UnsupportedError(
                f"{keys.where}.ggml.{option} is {str(not usual).lower()}, an option that this version does not know."
            )
    if len(np.atleast_1d(checkpoint.metadata.get("tokenizer.ggml.precompiled_charsmap", []))):
        raise UnsupportedError(
            f"{keys.where}: changes characters before it cuts (precompiled_charsmap), which this version does not do."
        )
    texts = keys.tokens()
    types = keys.types(len(texts)).astype(np.uint8)
    vocabulary = Vocabulary(keys.where, [text or None for text in texts])
    named = _named(keys, vocabulary)
    if "tokenizer.ggml.token_type" not in checkpoint.metadata:
        types[[i for i, text in enumerate(texts) if text in BYTE_TEXTS]] = proto.BYTE
        types[[i for name, i in _DEFAULTS.items() if named[name] is None and i < len(texts)]] = proto.CONTROL
    for name, i in _DEFAULTS.items():
        if named[name] is None and i < len(texts) and types[i] in (_CONTROL, _UNKNOWN):
            named[name] = i
    _mark_control(texts, types, named)
    for i in np.flatnonzero((types == _CONTROL) | (types == _UNKNOWN)).tolist():
        if texts[i]:
            vocabulary.added[texts[i]] = Added(i, control=True)
    _begin_and_end(keys, vocabulary, named, add_bos=True)
    prefix = keys.get("add_space_prefix", bool)
    texts = _escaped(texts, types)
    model = proto.Model(proto.BPE, texts, keys.scores(len(texts)), types, prefix is None or prefix)
    return SpmTokenizer(vocabulary, model_rows(checkpoint, len(texts), keys.where), model)


def _escaped(texts: list[str], types: np.ndarray[Any, Any]) -> list[str]:
    """The texts as a model file has them: user-defined ones with U+2581 for a space. A normal piece of such a text is
    never reached, for they go first; it becomes a control piece."""
    spaced = {i: texts[i].replace(" ", SPACE) for i in np.flatnonzero(types == _USER).tolist() if " " in texts[i]}
    same = set(spaced.values())
    types[[i for i, text in enumerate(texts) if text in same and types[i] == proto.NORMAL]] = _CONTROL
    return [spaced.get(i, text) for i, text in enumerate(texts)] if spaced else texts


def _mark_control(texts: list[str], types: np.ndarray[Any, Any], named: dict[str, int | None]) -> None:
    """Makes `types` tell all control tokens, also those that a file calls normal or user-defined; one is unknown."""
    types[types == _UNKNOWN] = _CONTROL
    for i in np.flatnonzero(types == _USER).tolist():
        if is_tag(texts[i]):
            types[i] = _CONTROL
    for i in (i for i, text in enumerate(texts) if text[:2] == "<|" and text[-2:] == "|>" and types[i] == proto.NORMAL):
        types[i] = _CONTROL
    for i in named.values():
        if i is not None and types[i] == proto.NORMAL and len(texts[i]) > 1:
            types[i] = _CONTROL
    unknown = named["unknown"]
    if unknown is not None and types[unknown] == _CONTROL:
        types[unknown] = _UNKNOWN
