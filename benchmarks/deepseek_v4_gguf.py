"""A tiny DeepSeek V4 in GGUF, evaluated here and by llama-cpp-python: `python benchmarks/deepseek_v4_gguf.py`.

Needs llama-cpp-python from 0.3.36 on, which knows `deepseek4` (extra `bench`), and the `gguf` library. Two engines that
share no code read the same tensors; what is printed is the largest difference of their logits at any position.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import make_deepseek_v4 as make
from oracle import some_tokens
from test_deepseek_v4_gguf import stacked, write

import ds4

TOKENS = 200  # beyond the first row of 128, and more rows of 4 than the indexer keeps
# llama.cpp turns index rows by a Hadamard matrix of 64 or more; with few index heads scores tie at zero, and then any
# of the rows is as good as another
CONFIG = make.CONFIG | {
    "hidden_size": 128, "num_hidden_layers": 4, "compress_ratios": [0, 4, 128, 4, 0], "head_dim": 128,
    "qk_rope_head_dim": 32, "moe_intermediate_size": 64, "index_n_heads": 16, "index_head_dim": 64, "index_topk": 16,
}  # fmt: skip


@dataclass(frozen=True)
class Compared:
    """The logits of both engines, [tokens, vocab]."""

    here: np.ndarray
    peer: np.ndarray

    @property
    def difference(self) -> float:
        return float(np.abs(self.here - self.peer).max())

    @property
    def size(self) -> float:
        return float(self.here.std())

    @property
    def same_choice(self) -> float:
        """The share of positions where both find the same token most likely."""
        return float((self.here.argmax(-1) == self.peer.argmax(-1)).mean())


def write_model(path: Path, texts: dict[str, str] | None = None) -> Path:
    """F32 weights, no tokenizer; `texts`: further keys."""
    s = make.sizes(CONFIG)
    tensors: dict[str, Any] = {name: (data, None) for name, data in stacked(s, make.weights(s)).items()}
    return write(path, s, tensors, texts=texts)


def logits_here(path: Path, tokens: list[int]) -> np.ndarray:
    with ds4.Engine(path, kv_dtype="f32", threads=1, pool_tokens=4096) as engine, engine.session() as session:
        return np.array(session.eval(tokens, logits="all"))


def logits_of_peer(path: Path, tokens: list[int]) -> np.ndarray:
    """With llama.cpp: rows in float32 too, all tokens in one batch."""
    import llama_cpp

    llama_cpp.llama_backend_init()
    model_options = llama_cpp.llama_model_default_params()
    model_options.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_options)
    if not model:
        raise RuntimeError(f"llama-cpp-python {llama_cpp.__version__} does not load the file")
    options = llama_cpp.llama_context_default_params()
    options.n_ctx = options.n_batch = options.n_ubatch = 512
    options.n_threads = options.n_threads_batch = 1
    options.type_k = options.type_v = llama_cpp.GGML_TYPE_F32
    options.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = llama_cpp.llama_init_from_model(model, options)
    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    try:
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
            batch.seq_id[i][0] = 0
        status = llama_cpp.llama_decode(context, batch)
        if status:
            raise RuntimeError(f"llama_decode has ended with {status}")
        vocab = CONFIG["vocab_size"]
        rows = [np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, i), (vocab,)) for i in range(len(tokens))]
        return np.array(rows)
    finally:
        llama_cpp.llama_batch_free(batch)
        llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(model)


def compare(folder: Path) -> Compared:
    """The peer's file differs by one key: llama.cpp wants to be told that there is no tokenizer."""
    tokens = some_tokens(TOKENS)
    here = logits_here(write_model(folder / "tiny.gguf"), tokens)
    named = write_model(folder / "peer.gguf", {"tokenizer.ggml.model": "no_vocab"})
    return Compared(here, logits_of_peer(named, tokens))


def text_of(found: Compared) -> str:
    return (
        f"{len(found.here)} tokens: the logits differ by {found.difference:.2e} at most (their standard deviation is "
        f"{found.size:.2f}); the most likely token is the same at {found.same_choice:.1%} of the positions"
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(text_of(compare(Path(folder))))
