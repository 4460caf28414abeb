"""Tokenizers: text to token ids and back, exactly as the models were trained.

>>> tokenizer = ds4.tokenizer.load(checkpoint)
>>> tokenizer.decode(tokenizer.encode("some text"))
'some text'
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds4.errors import SystemResourceError
from ds4.tokenizer import source_gguf, source_json
from ds4.tokenizer.base import Tokenizer
from ds4.tokenizer.stream import Detokenizer

if TYPE_CHECKING:
    from ds4.files.checkpoint import Checkpoint

__all__ = ["Detokenizer", "Tokenizer", "load"]


def load(checkpoint: Checkpoint) -> Tokenizer | None:
    """The tokenizer that comes with a checkpoint, None when it has none (then the model takes token ids only).

    Raises FileFormatError when its data are damaged or do not fit the model, UnsupportedError, by name, for a kind of
    tokenizer or pre-tokeniser that this version does not know, SystemResourceError when memory runs out.
    """
    try:
        return source_gguf.load(checkpoint) if checkpoint.kind == "gguf" else source_json.load(checkpoint)
    except MemoryError:
        raise SystemResourceError(f"{checkpoint.path}: there is not enough memory for its tokenizer.") from None
