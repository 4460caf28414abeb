"""Small byte-level BPE tokenizers in memory, as GGUF metadata and as a tokenizer.json folder, for the tests of text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from ds4 import tokenizer as tokenizers
from ds4.files import Checkpoint
from ds4.files.base import Tensor
from ds4.tokenizer import Tokenizer
from ds4.tokenizer.bpe import BYTE_OF

MERGES = [
    "t h", "th e", "Ġ the", "i n", "in g", "h e", "l l", "he ll", "hell o", "1 2", "12 3", "Ã ©", "Ċ Ċ", "Ġ Ġ", "u s",
    "us e", "use r", "< |", "| >", "i m", "_ e", "n d", "Ġ a", "â Ĥ", "âĤ ¬", "ð Ł", "ðŁ ĺ",
]  # fmt: skip
CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
DEEPSEEK = [
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜",
    "<｜latest_reminder｜>",
]  # fmt: skip
QWEN = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]


def vocabulary(control: list[str] = CHATML, user: list[str] = []) -> tuple[list[str], list[int]]:  # noqa: B006
    """(tokens, GGUF token types): control tokens, all bytes, what the merges make, user-defined tokens."""
    made = list(dict.fromkeys(merge.replace(" ", "") for merge in MERGES))
    tokens = [*control, *BYTE_OF, *made, *user]
    return tokens, [3] * len(control) + [1] * (len(BYTE_OF) + len(made)) + [4] * len(user)


def gguf_checkpoint(
    control: list[str] = CHATML,
    user: list[str] = [],  # noqa: B006
    rows: int | None = None,
    **keys: Any,
) -> Checkpoint:
    """A checkpoint with a tokenizer and nothing else; `keys` replace tokenizer.ggml.* values (None removes one), `rows`
    gives the model an embedding of that many rows."""
    tokens, types = vocabulary(control, user)
    values = {
        "model": "gpt2", "pre": "smollm", "tokens": tokens, "token_type": np.array(types, np.int32), "merges": MERGES,
        "eos_token_id": 2, "bos_token_id": 1, "add_bos_token": False, **keys,
    }  # fmt: skip
    metadata = {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}
    return Checkpoint("tiny.gguf", "gguf", "llama", metadata, embedding(rows))


def embedding(rows: int | None) -> dict[str, Tensor]:
    if rows is None:
        return {}
    return {"token_embd.weight": Tensor("token_embd.weight", "F32", (rows, 1), memoryview(bytes(4 * rows)))}


def tiny(**more: Any) -> Tokenizer:
    """A tokenizer with every byte, so that it can spell every text."""
    found = tokenizers.load(gguf_checkpoint(**more))
    assert found is not None
    return found


def tokenizer_json(control: list[str] = CHATML, user: list[str] = []) -> dict[str, Any]:  # noqa: B006
    """The same vocabulary as a tokenizer.json."""
    tokens, types = vocabulary(control, user)
    ids = {token: i for i, token in enumerate(tokens)}
    added = [{"id": ids[text], "content": text, "special": text in control, "single_word": False, "lstrip": False,
              "rstrip": False, "normalized": False} for text in (*control, *user)]  # fmt: skip
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}]},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "vocab": {
            token: i for token, i in ids.items() if types[i] == 1}, "merges": list(MERGES)},
    }  # fmt: skip


def folder_checkpoint(
    folder: Path, tokenizer: object, config: dict[str, Any] | None = None, **files: Any
) -> Checkpoint:
    """A safetensors folder's text files; `files` by name without .json."""
    for name, value in {"tokenizer": tokenizer, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
    return Checkpoint(str(folder), "safetensors", "llama", config or {}, {})
