"""What the JSON files of a safetensors folder say about its tokens besides the vocabulary itself."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ds4.errors import FileFormatError
from ds4.files.base import quote
from ds4.files.jsonfile import read_object
from ds4.tokenizer.vocabulary import MAX_TOKENS, Added, Vocabulary

if TYPE_CHECKING:
    from ds4.files.checkpoint import Checkpoint

MAX_CONFIG = 4 << 20


def read_config(folder: str, name: str) -> dict[str, Any]:
    """A JSON object of the folder, empty when there is no such file."""
    path = os.path.join(folder, name)
    return read_object(path, MAX_CONFIG) if os.path.exists(path) else {}


def check_id(i: object, text: object, where: str) -> int:
    """The id of a token. Raises FileFormatError unless it is a whole number in the range of all vocabularies."""
    if type(i) is not int or not 0 <= i < MAX_TOKENS:
        raise FileFormatError(
            f"{where}: token {quote(text)} has the id {quote(i)}; ids are whole numbers from 0 to {MAX_TOKENS - 1}."
        )
    return i


def added_tokens(data: dict[str, Any], is_control: Callable[[str], bool], where: str) -> list[tuple[str, Added]]:
    """(text, token) of a tokenizer.json's added_tokens; `is_control`: for those that are not called special."""
    added = data.get("added_tokens")
    added = [] if added is None else added
    if not isinstance(added, list) or len(added) > MAX_TOKENS or not all(isinstance(a, dict) for a in added):
        raise FileFormatError(f"{where}: added_tokens is {quote(added)}; it must be a list of objects.")
    return [_added(token, is_control, where) for token in added]


def _added(token: dict[str, Any], is_control: Callable[[str], bool], where: str) -> tuple[str, Added]:
    text = token.get("content")
    if not isinstance(text, str) or not text:
        raise FileFormatError(f"{where}: an added token has the content {quote(text)}; it must be text.")
    flags = [token.get(name, False) for name in ("special", "lstrip", "rstrip", "single_word")]
    if not all(isinstance(flag, bool) for flag in flags):
        raise FileFormatError(f"{where}: the flags of added token {quote(text)} must be true or false.")
    special, lstrip, rstrip, word = flags
    control = special or is_control(text)
    return text, Added(check_id(token.get("id"), text, where), control, lstrip, rstrip, word)


def set_begin_and_end(vocabulary: Vocabulary, checkpoint: Checkpoint, add_bos: bool, eos_id: int | None = None) -> None:
    """BOS: tokenizer_config.json decides when it is there, else config.json, else it stays as it is. EOS: all that any
    of the files names, else `eos_id`. `add_bos`: what a folder means that does not say."""
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
    elif config.get("bos_token_id") is not None:
        vocabulary.bos_id = vocabulary.token_id(config["bos_token_id"], "bos_token_id of config.json")
    ends = [named("eos_token")]
    for source, name in ((config, "config.json"), (generation, "generation_config.json")):
        value = source.get("eos_token_id")
        for i in value if isinstance(value, list) else [value]:
            ends.append(vocabulary.token_id(i, f"eos_token_id of {name}"))
    vocabulary.set_ends(ends if any(i is not None for i in ends) else [eos_id])
    said = own.get("add_bos_token")
    if said is not None and not isinstance(said, bool):
        raise FileFormatError(f"{folder}: add_bos_token of tokenizer_config.json is {quote(said)}, not true or false.")
    vocabulary.add_bos = vocabulary.bos_id is not None and (add_bos if said is None else said)
