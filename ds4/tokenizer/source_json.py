"""The tokenizer of a safetensors folder: tokenizer.json, and what begins and ends a text in three more files."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ds4.errors import FileFormatError, UnsupportedError
from ds4.files.base import quote
from ds4.files.jsonfile import read_object
from ds4.tokenizer import source_model
from ds4.tokenizer.base import Tokenizer
from ds4.tokenizer.bpe import BpeTokenizer, Merges
from ds4.tokenizer.folder import added_tokens, check_id, set_begin_and_end
from ds4.tokenizer.pre import read_normalizer, read_steps
from ds4.tokenizer.spm_json import SpmJsonTokenizer, read_prefix
from ds4.tokenizer.vocabulary import MAX_TOKENS, Added, Vocabulary, is_marker, is_tag, model_rows

if TYPE_CHECKING:
    from ds4.files.checkpoint import Checkpoint

MAX_TOKENIZER = 128 << 20  # the largest public ones have 33 MB


def load(checkpoint: Checkpoint) -> Tokenizer | None:
    """The folder's tokenizer, None when it has none. Raises FileFormatError or UnsupportedError, naming the file."""
    where = os.path.join(checkpoint.path, "tokenizer.json")
    if not os.path.exists(where):
        return _without_json(checkpoint)
    data = read_object(where, MAX_TOKENIZER)
    model = data.get("model")
    if not isinstance(model, dict):
        raise FileFormatError(f"{where}: model is {quote(model)}; it must be an object.")
    if model.get("type") == "Unigram" or model.get("byte_fallback"):
        return _sentencepiece(checkpoint, data, where)
    _check_options(model, where)
    entries = _entries(model, where)
    merges = _merges(model, where)
    added = added_tokens(data, lambda text: is_marker(text, merges.made), where)
    vocabulary = _vocabulary(entries, added, where)
    rows = model_rows(checkpoint, len(vocabulary.tokens), where)
    set_begin_and_end(vocabulary, checkpoint, _template_begins(data))
    pre = read_steps(data.get("pre_tokenizer"), where)
    normalizer = read_normalizer(data.get("normalizer"), where)
    return BpeTokenizer(vocabulary, rows, merges, pre, normalizer, model.get("ignore_merges") is True)


def _without_json(checkpoint: Checkpoint) -> Tokenizer | None:
    if os.path.exists(os.path.join(checkpoint.path, source_model.NAME)):
        return source_model.load(checkpoint, [])
    for other in ("vocab.json", "tiktoken.model"):
        if os.path.exists(os.path.join(checkpoint.path, other)):
            raise UnsupportedError(
                f"{checkpoint.path}: has {other} but neither tokenizer.json nor tokenizer.model, which are read."
            )
    return None


def _sentencepiece(checkpoint: Checkpoint, data: dict[str, Any], where: str) -> Tokenizer:
    """A tokenizer.json that was converted from SentencePiece; the original is read where it lies beside it."""
    model, added = data["model"], added_tokens(data, is_tag, where)
    if os.path.exists(os.path.join(checkpoint.path, source_model.NAME)):
        tokenizer = source_model.load(checkpoint, added)
        if isinstance(model.get("vocab"), dict):
            tokenizer.compare(model["vocab"], where)
        return tokenizer
    if model.get("type") == "Unigram":
        raise UnsupportedError(
            f"{where}: has the tokenizer model 'Unigram'; put the model's {source_model.NAME}, the original, beside it."
        )
    if model.get("ignore_merges"):
        raise UnsupportedError(f"{where}: uses byte_fallback and ignore_merges together, which no known model does.")
    _check_options({**model, "fuse_unk": False}, where)  # with all bytes nothing is unknown
    prefix, merges = read_prefix(data, where), _merges(model, where)
    vocabulary = _vocabulary(_entries(model, where), added, where)
    set_begin_and_end(vocabulary, checkpoint, _template_begins(data))
    return SpmJsonTokenizer(vocabulary, model_rows(checkpoint, len(vocabulary.tokens), where), merges, prefix)


def _check_options(model: dict[str, Any], where: str) -> None:
    """Every option of the "model" object that this version does not know is refused."""
    kind = model.get("type", "BPE" if "merges" in model else None)
    if kind != "BPE":
        raise UnsupportedError(f"{where}: has the tokenizer model {quote(kind)}; this version reads BPE.")
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk"):
        if model.get(option):
            raise UnsupportedError(f"{where}: uses the BPE option {option}, which this version does not know.")


def _entries(model: dict[str, Any], where: str) -> dict[str, int]:
    entries = model.get("vocab")
    if not isinstance(entries, dict) or not 0 < len(entries) <= MAX_TOKENS:
        raise FileFormatError(f"{where}: model.vocab must be an object of 1 to {MAX_TOKENS} tokens and their ids.")
    for text, i in entries.items():
        check_id(i, text, where)
    return entries


def _vocabulary(entries: dict[str, int], added: list[tuple[str, Added]], where: str) -> Vocabulary:
    size = 1 + max(*entries.values(), *(token.id for _, token in added), 0)
    tokens: list[str | None] = [None] * size
    texts = {**entries}
    for text, token in added:
        if texts.setdefault(text, token.id) != token.id:
            raise FileFormatError(f"{where}: token {quote(text)} has the ids {texts[text]} and {token.id}.")
    for text, i in texts.items():
        if tokens[i] is not None:
            raise FileFormatError(f"{where}: tokens {quote(tokens[i])} and {quote(text)} share the id {i}.")
        tokens[i] = text or None
    return Vocabulary(where, tokens, dict(added))


def _merges(model: dict[str, Any], where: str) -> Merges:
    """Pairs; older files write them as one text with a space between."""
    lines = model.get("merges")
    if not isinstance(lines, list):
        raise FileFormatError(f"{where}: model.merges is {quote(lines)}; it must be a list.")
    pairs = []
    for i, line in enumerate(lines):
        pair = line.split(" ") if isinstance(line, str) else line
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(p, str) and p for p in pair):
            raise FileFormatError(f"{where}: merge {i} is {quote(line)}; it must be two tokens.")
        pairs.append((pair[0], pair[1]))
    return Merges(pairs)


def _template_begins(data: dict[str, Any]) -> bool:
    """Whether the post-processor puts a special token before a text; it is read for this only and never run."""
    node = data.get("post_processor")
    parts = node.get("processors") if isinstance(node, dict) and node.get("type") == "Sequence" else [node]
    for part in parts if isinstance(parts, list) else []:
        single = part.get("single") if isinstance(part, dict) and part.get("type") == "TemplateProcessing" else None
        if isinstance(single, list) and single:
            return isinstance(single[0], dict) and "SpecialToken" in single[0]
    return False
