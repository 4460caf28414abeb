"""Writes tests/data/deepseek_v4: a DeepSeek V4 of random weights, small enough for the whole contract suite, with every
kind of layer (no compressed rows, ratio 4 with an indexer, ratio 128), experts by token and by score, and an MTP block.

`python tests/make_deepseek_v4.py` writes it again, byte for byte. The logits of a larger model of the same kind are
compared with Hugging Face in test_deepseek_v4.py, where ../shared/reference is there.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from ds4.families import deepseek_v4
from ds4.families.options import Options

FOLDER = Path(__file__).parent / "data" / "deepseek_v4"
CONFIG = {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "vocab_size": 512, "hidden_size": 32,
    "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16, "qk_rope_head_dim": 8,
    "q_lora_rank": 16, "o_groups": 2, "o_lora_rank": 8, "moe_intermediate_size": 32, "n_routed_experts": 4,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "num_hash_layers": 1, "num_nextn_predict_layers": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc",
    "swiglu_limit": 1.5, "sliding_window": 16, "index_n_heads": 4, "index_head_dim": 16, "index_topk": 8, "hc_mult": 4,
    "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "rms_norm_eps": 1e-6, "rope_theta": 10000, "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536,
    },
    "max_position_embeddings": 1048576, "compress_ratios": [0, 4, 128, 4, 128, 0], "hidden_act": "silu",
    "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


def sizes(config: dict = CONFIG) -> deepseek_v4.Sizes:
    return deepseek_v4.sizes_of(Options(config, "config.json"))


def weights(s: deepseek_v4.Sizes, seed: int = 4) -> dict[str, np.ndarray]:
    """Random tensors by their official names: whole numbers / 2^k, so that no library's normal distribution matters."""
    rng = np.random.default_rng(seed)

    def uniform(shape: tuple[int, ...], size: float) -> np.ndarray:
        return (rng.integers(-4096, 4097, shape) / 4096 * size).astype(np.float32)

    found = {}
    for piece in deepseek_v4.pieces(s, mtp=True):
        name, shape = piece.official, piece.shape
        if piece.stored == "I64":
            found[name] = np.stack([rng.permutation(s.n_experts)[: shape[1]] for _ in range(shape[0])]).astype(np.int64)
        elif piece.core.endswith("norm"):
            found[name] = 1 + uniform(shape, 0.3)
        elif name.endswith("_scale"):
            found[name] = 0.5 + uniform(shape, 0.2)
        elif len(shape) == 1 or name.endswith(".ape"):
            found[name] = uniform(shape, 0.5)
        else:
            found[name] = uniform(shape, 0.7 if piece.core in ("embed", "head") else 3.0 / math.sqrt(shape[1]))
    return found


def write(folder: Path = FOLDER, config: dict = CONFIG, seed: int = 4) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(weights(sizes(config), seed), folder / "model.safetensors")
    return folder


if __name__ == "__main__":
    write()
