"""Chat formats: from messages to token ids and from sampled text back to messages.

>>> name = ds4.chat_formats.detect(checkpoint, tokenizer)
>>> chat = ds4.chat_formats.get(name, tokenizer, checkpoint)
>>> ids = chat.begin() + chat.render(Message("user", "Hello")) + chat.generation_prefix()
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ds4.chat_formats.base import Boundary, ChatFormat, Message, Parsed, ToolCall
from ds4.chat_formats.chatml import ChatML
from ds4.chat_formats.deepseek_v4 import DeepSeekV4
from ds4.chat_formats.gemma import Gemma
from ds4.chat_formats.llama3 import Llama3
from ds4.errors import ArgumentError
from ds4.files.base import read_file
from ds4.tokenizer.base import Tokenizer
from ds4.tokenizer.folder import MAX_CONFIG, read_config

if TYPE_CHECKING:
    from ds4.files.checkpoint import Checkpoint

__all__ = ["Boundary", "ChatFormat", "Message", "Parsed", "ToolCall", "detect", "get", "names"]

_FORMATS: dict[str, type[ChatFormat]] = {format.name: format for format in (ChatML, Llama3, Gemma, DeepSeekV4)}


def names() -> list[str]:
    """The chat formats that this version has."""
    return sorted(_FORMATS)


def get(name: str, tokenizer: Tokenizer, checkpoint: Checkpoint | None = None) -> ChatFormat:
    """The format of that name for a model's tokenizer, with the texts that its checkpoint has for it.

    Raises ArgumentError for an unknown name, UnsupportedError when the tokenizer lacks its control tokens.
    """
    if name not in _FORMATS:
        raise ArgumentError(f"there is no chat format {name!r}; choose one of: {', '.join(names())}.")
    return _FORMATS[name].open(tokenizer, checkpoint)


def detect(checkpoint: Checkpoint, tokenizer: Tokenizer) -> str | None:
    """The name of the format whose control tokens the model's own template spells and its tokenizer has, else None.
    Where models of an architecture have no template, the architecture decides.

    The template is only searched as text: it is a program, and nothing from a checkpoint is run.
    """
    template = _template(checkpoint)
    for name, format in _FORMATS.items():
        if format.architectures:
            named = checkpoint.architecture in format.architectures
        else:
            named = all(text in template for text in format.needs)
        if named and all(text in tokenizer.control for text in format.needs):
            return name
    return None


def _template(checkpoint: Checkpoint) -> str:
    """All chat templates of a checkpoint in one text, "" when it has none."""
    if checkpoint.kind == "gguf":
        found = [value for key, value in checkpoint.metadata.items() if key.startswith("tokenizer.chat_template")]
    else:
        found = [read_config(checkpoint.path, name).get("chat_template")
                 for name in ("tokenizer_config.json", "chat_template.json")]  # fmt: skip
        path = os.path.join(checkpoint.path, "chat_template.jinja")
        if os.path.exists(path):
            found.append(read_file(path, MAX_CONFIG).decode("utf-8", "replace"))
    flat = [item.get("template") if isinstance(item, dict) else item
            for value in found for item in (value if isinstance(value, list) else [value])]  # fmt: skip
    return "\n".join(item for item in flat if isinstance(item, str))
