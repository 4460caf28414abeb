"""What the tests of `ds4 demo` and `ds4 bench` share: a tiny model that a conversation can be held with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from oracle import DATA
from tiny_tokenizer import CHATML, QWEN, tokenizer_json


def small_chat_model(folder: Path, ctx: int = 40000) -> Path:
    """The tiny Llama with a tokenizer of bytes, ChatML, and a long context."""
    shutil.copytree(DATA / "llama", folder)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(CHATML, QWEN)))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "<|im_start|><|im_end|>"}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": ctx}))
    return folder
