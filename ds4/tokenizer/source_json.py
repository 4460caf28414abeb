"""The tokenizer of a safetensors folder: tokenizer.json, and what begins and ends a text in three more files."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ds4.errors import FileFormatError, UnsupportedError
from ds4.files.base import quote
from ds4.files.jsonfile import read_object
from ds4.tokenizer.base import Tokenizer
from ds4.tokenizer.bpe import BpeTokenizer, Merges
from ds4.tokenizer.pre import read_normalizer, read_steps
from ds4.tokenizer.vocabulary import MAX_TOKENS, Added, Vocabulary, is_marker, model_rows

if TYPE_CHECKING:
    from ds4.files.checkpoint import Checkpoint

MAX_TOKENIZER = 128 << 20  # the largest public ones have 33 MB
MAX_CONFIG = 4 << 20


def load(checkpoint: Checkpoint) -> Tokenizer | None:
    """The folder's tokenizer, None when it has none. Raises FileFormatError or UnsupportedError, naming the file."""
    where = os.path.join(checkpoint.path, "tokenizer.json")
    if not os.path.exists(where):
        for other in ("tokenizer.model", "vocab.json", "tiktoken.model"):
            if os.path.exists(os.path.join(checkpoint.path, other)):
                raise UnsupportedError(
                    f"{checkpoint.path}: has {other} but no tokenizer.json, which is what this version reads."
                )
        return None
    data = read_object(where, MAX_TOKENIZER)
    model = _bpe_model(data, where)
    entries = _entries(model, where)
    merges = _merges(model, where)
    vocabulary = _vocabulary(entries, data.get("added_tokens"), merges.made, where)
    rows = model_rows(checkpoint, len(vocabulary.tokens), where)
    _set_begin_and_end(vocabulary, checkpoint, data)
    pre = read_steps(data.get("pre_tokenizer"), where)
    normalizer = read_normalizer(data.get("normalizer"), where)
    return BpeTokenizer(vocabulary, rows, merges, pre, normalizer, model.get("ignore_merges") is True)


def read_config(folder: str, name: str) -> dict[str, Any]:
    """A JSON object of the folder, empty when there is no such file."""
    path = os.path.join(folder, name)
    return read_object(path, MAX_CONFIG) if os.path.exists(path) else {}


def _bpe_model(data: dict[str, Any], where: str) -> dict[str, Any]:
    """The "model" object, with every option that this version does not know refused."""
    model = data.get("model")
    if not isinstance(model, dict):
        raise FileFormatError(f"{where}: model is {quote(model)}; it must be an object.")
    kind = model.get("type", "BPE" if "merges" in model else None)
    if kind != "BPE":
        raise UnsupportedError(f"{where}: has the tokenizer model {quote(kind)}; this version reads BPE.")
    if model.get("byte_fallback"):
        raise UnsupportedError(f"{where}: is a SentencePiece BPE (byte_fallback); this version reads byte-level BPE.")
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk"):
        if model.get(option):
            raise UnsupportedError(f"{where}: uses the BPE option {option}, which this version does not know.")
    return model


def _entries(model: dict[str, Any], where: str) -> dict[str, int]:
    entries = model.get("vocab")
    if not isinstance(entries, dict) or not 0 < len(entries) <= MAX_TOKENS:
        raise FileFormatError(f"{where}: model.vocab must be an object of 1 to {MAX_TOKENS} tokens and their ids.")
    for text, i in entries.items():
        _check_id(i, text, where)
    return entries


def _check_id(i: object, text: object, where: str) -> int:
    if type(i) is not int or not 0 <= i < MAX_TOKENS:
        raise FileFormatError(
            f"{where}: token {quote(text)} has the id {quote(i)}; ids are whole numbers from 0 to {MAX_TOKENS - 1}."
        )
    return i


def _vocabulary(entries: dict[str, int], added: object, made: set[str], where: str) -> Vocabulary:
    added = [] if added is None else added
    if not isinstance(added, list) or len(added) > MAX_TOKENS or not all(isinstance(a, dict) for a in added):
        raise FileFormatError(f"{where}: added_tokens is {quote(added)}; it must be a list of objects.")
    whole = [_added(token, made, where) for token in added]
    size = 1 + max(*entries.values(), *(token.id for _, token in whole), 0)
    tokens: list[str | None] = [None] * size
    texts = {**entries}
    for text, token in whole:
        if texts.setdefault(text, token.id) != token.id:
            raise FileFormatError(f"{where}: token {quote(text)} has the ids {texts[text]} and {token.id}.")
    for text, i in texts.items():
        if tokens[i] is not None:
            raise FileFormatError(f"{where}: tokens {quote(tokens[i])} and {quote(text)} share the id {i}.")
        tokens[i] = text or None
    return Vocabulary(where, tokens, dict(whole))


def _added(token: dict[str, Any], made: set[str], where: str) -> tuple[str, Added]:
    text = token.get("content")
    if not isinstance(text, str) or not text:
        raise FileFormatError(f"{where}: an added token has the content {quote(text)}; it must be text.")
    flags = [token.get(name, False) for name in ("special", "lstrip", "rstrip", "single_word")]
    if not all(isinstance(flag, bool) for flag in flags):
        raise FileFormatError(f"{where}: the flags of added token {quote(text)} must be true or false.")
    special, lstrip, rstrip, word = flags
    control = special or is_marker(text, made)
    return text, Added(_check_id(token.get("id"), text, where), control, lstrip, rstrip, word)


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


def _set_begin_and_end(vocabulary: Vocabulary, checkpoint: Checkpoint, data: dict[str, Any]) -> None:
    """BOS: tokenizer_config.json decides when it is there, else config.json. EOS: all that any of the files names."""
    folder, config = checkpoint.path, checkpoint.metadata
    own, generation = read_config(folder, "tokenizer_config.json"), read_config(folder, "generation_config.json")
    ids = {text: i for i, text in enumerate(vocabulary.tokens) if text is not None}

    def named(key: str) -> int | None:
        value = own.get(key)
        text = value.get("content") if isinstance(value, dict) else value
        if text is None:
            return None
        if not isinstance(text, str) or text not in ids:
            raise FileFormatError(f"{folder}: tokenizer_config.json has the {key} {quote(text)}, which is no token.")
        return ids[text]

    if "bos_token" in own:
        vocabulary.bos_id = named("bos_token")
    else:
        vocabulary.bos_id = vocabulary.token_id(config.get("bos_token_id"), "bos_token_id of config.json")
    ends = [named("eos_token")]
    for source, name in ((config, "config.json"), (generation, "generation_config.json")):
        value = source.get("eos_token_id")
        for i in value if isinstance(value, list) else [value]:
            ends.append(vocabulary.token_id(i, f"eos_token_id of {name}"))
    vocabulary.set_ends(ends)
    said = own.get("add_bos_token")
    if said is not None and not isinstance(said, bool):
        raise FileFormatError(f"{folder}: add_bos_token of tokenizer_config.json is {quote(said)}, not true or false.")
    vocabulary.add_bos = vocabulary.bos_id is not None and (_template_begins(data) if said is None else said)


def _template_begins(data: dict[str, Any]) -> bool:
    """Whether the post-processor puts a special token before a text; it is read for this only and never run."""
    node = data.get("post_processor")
    parts = node.get("processors") if isinstance(node, dict) and node.get("type") == "Sequence" else [node]
    for part in parts if isinstance(parts, list) else []:
        single = part.get("single") if isinstance(part, dict) and part.get("type") == "TemplateProcessing" else None
        if isinstance(single, list) and single:
            return isinstance(single[0], dict) and "SpecialToken" in single[0]
    return False
