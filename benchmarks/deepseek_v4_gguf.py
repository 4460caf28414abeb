"""A tiny DeepSeek V4 in GGUF, evaluated here and by llama-cpp-python: `python benchmarks/deepseek_v4_gguf.py`.

Needs llama-cpp-python from 0.3.36 on, which knows `deepseek4` (extra `bench`), and the `gguf` library. Two engines that
share no code read the same tensors; what is printed is the largest difference of their logits at any position. Where
experts are quantised the engines round activations to int8, each in its way (MXFP4: only llama.cpp does), and that
can turn the choice of an expert. So both are compared with the same numbers as F32 weights, where they agree.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import gguf
import make_deepseek_v4 as make
from oracle import some_tokens
from test_deepseek_v4_gguf import MIXES, blocks_of, stacked, write

import ds4

TOKENS = 450  # three rows of 128, and far more rows of 4 than the indexer keeps
# llama.cpp turns index rows by a Hadamard matrix of 64 or more; with few index heads scores tie at zero, and then any
# of the rows is as good as another
CONFIG = make.CONFIG | {
    "hidden_size": 256, "num_hidden_layers": 4, "compress_ratios": [0, 4, 128, 4, 0], "head_dim": 128,
    "qk_rope_head_dim": 32, "moe_intermediate_size": 256, "index_n_heads": 16, "index_head_dim": 64, "index_topk": 16,
}  # fmt: skip


@dataclass(frozen=True)
class Compared:
    """Two sets of logits of the same tokens, [tokens, vocab]."""

    one: np.ndarray
    other: np.ndarray

    @property
    def most(self) -> float:
        return float(np.abs(self.one - self.other).max())

    @property
    def typical(self) -> float:
        """Of a position: the median of the mean differences."""
        return float(np.median(np.abs(self.one - self.other).mean(-1)))

    @property
    def size(self) -> float:
        return float(self.one.std())

    @property
    def same_choice(self) -> float:
        """The share of positions where both find the same token most likely."""
        return float((self.one.argmax(-1) == self.other.argmax(-1)).mean())

    def __str__(self) -> str:
        return (
            f"{self.most:.1e} at most, {self.typical:.1e} at a typical position (standard deviation of the logits "
            f"{self.size:.2f}); same most likely token at {self.same_choice:.1%} of {len(self.one)} positions"
        )


def write_model(path: Path, mix: str | None = None, plain: bool = False, texts: dict[str, str] | None = None) -> Path:
    """F32 weights, no tokenizer. `mix`: experts of random blocks, one of MIXES; `plain`: their numbers as F32. `texts`:
    further keys."""
    s = make.sizes(CONFIG)
    tensors: dict[str, Any] = {name: (data, None) for name, data in stacked(s, make.weights(s)).items()}
    for name, (data, _) in tensors.items():
        if mix is not None and "_exps." in name:
            kind = gguf.GGMLQuantizationType[MIXES[mix]["down" in name]]
            raw = np.stack([blocks_of(kind.name, expert, seed=e) for e, expert in enumerate(data)])
            numbers = gguf.dequantize(raw, kind).reshape(data.shape).astype(np.float32) if plain else raw
            tensors[name] = (numbers, None if plain else kind)
    return write(path, s, tensors, texts=texts)


def logits_here(path: Path, tokens: list[int]) -> np.ndarray:
    with ds4.Engine(path, kv_dtype="f32", threads=1, pool_tokens=4096) as engine, engine.session() as session:
        return np.array(session.eval(tokens, logits="all"))


@cache
def silence() -> Any:
    """A callback for llama.cpp's log, which tells of every tensor; the library keeps the pointer."""
    import llama_cpp

    return llama_cpp.llama_log_callback(lambda *_: None)


def logits_of_peer(path: Path, tokens: list[int]) -> np.ndarray:
    """With llama.cpp: rows in float32 too, all tokens in one batch."""
    import llama_cpp

    llama_cpp.llama_log_set(silence(), None)
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


def both(folder: Path, mix: str | None = None, plain: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """The logits here and of the peer. Its file differs by one key: it wants to be told that there is no tokenizer."""
    tokens = some_tokens(TOKENS)
    here = logits_here(write_model(folder / "tiny.gguf", mix, plain), tokens)
    named = write_model(folder / "peer.gguf", mix, plain, {"tokenizer.ggml.model": "no_vocab"})
    return here, logits_of_peer(named, tokens)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(f"F32, here and llama.cpp: {Compared(*both(Path(folder)))}")
        for mix, kinds in MIXES.items():
            here, peer = both(Path(folder), mix)
            exact, exact_peer = both(Path(folder), mix, plain=True)
            print(f"experts of {' and '.join(dict.fromkeys(kinds))}, their numbers as F32 on both sides:")
            print(f"  here and llama.cpp: {Compared(exact, exact_peer)}")
            print(f"  blocks here:        {Compared(here, exact)}")
            print(f"  blocks, llama.cpp:  {Compared(peer, exact_peer)}")
