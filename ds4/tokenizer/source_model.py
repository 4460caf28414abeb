"""The tokenizer of a safetensors folder with tokenizer.model, SentencePiece's own file."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from ds4.errors import FileFormatError
from ds4.files.base import quote, read_file
from ds4.tokenizer import proto
from ds4.tokenizer.folder import check_id, read_config, set_begin_and_end
from ds4.tokenizer.spm import SpmTokenizer
from ds4.tokenizer.vocabulary import Added, Vocabulary, is_tag, model_rows

if TYPE_CHECKING:
    from ds4.files.checkpoint import Checkpoint

NAME = "tokenizer.model"
MAX_MODEL = 64 << 20  # the largest public ones have 5 MB


def load(checkpoint: Checkpoint, added: list[tuple[str, Added]]) -> SpmTokenizer:
    """The folder's tokenizer with the tokens that its tokenizer.json adds, or without one its added_tokens.json.

    Raises FileFormatError or UnsupportedError, naming the file.
    """
    where = os.path.join(checkpoint.path, NAME)
    model = proto.read(read_file(where, MAX_MODEL), where)
    vocabulary = Vocabulary(where, [text or None for text in model.texts])
    hidden = np.isin(model.types, (proto.CONTROL, proto.UNKNOWN))
    for i in np.flatnonzero(hidden | (model.types == proto.USER)).tolist():
        text = model.texts[i]
        if text and (hidden[i] or is_tag(text)):
            vocabulary.added[text] = Added(i, control=True)
    for text, i in read_config(checkpoint.path, "added_tokens.json").items() if not added else ():
        added.append((text, Added(check_id(i, text, where), is_tag(text))))
    for text, token in added:
        _add(vocabulary, model, text, token)
    vocabulary.bos_id = model.bos_id
    set_begin_and_end(vocabulary, checkpoint, True, model.eos_id)
    return SpmTokenizer(vocabulary, model_rows(checkpoint, len(vocabulary.tokens), where), model)


def _add(vocabulary: Vocabulary, model: proto.Model, text: str, token: Added) -> None:
    """Enters a token that a JSON file adds; most of them repeat a piece of the model."""
    i, tokens = token.id, vocabulary.tokens
    if i < len(tokens) and tokens[i] not in (None, text):
        raise FileFormatError(
            f"{vocabulary.where}: its token {i} is {quote(tokens[i])}, but a file beside it adds {quote(text)} there; "
            "they do not belong together."
        )
    if i < len(model.texts) and not token.control and model.types[i] == proto.USER:
        return  # the library finds it, among spaces too
    tokens += [None] * (i + 1 - len(tokens))
    tokens[i] = text
    vocabulary.added[text] = token
