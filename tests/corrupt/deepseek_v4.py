"""The part of the corpus that is about DeepSeek V4: `cd tests && python -m corrupt.deepseek_v4` writes it into
`deepseek_v4/`. As in `make.py`: each case is a loadable tiny model with one fault."""

from __future__ import annotations

import math
from typing import Any

from ds4.families import deepseek_v4
from ds4.families.options import Options

from . import make
from .make import container, folder

CASES: dict[str, tuple[bytes | dict[str, bytes], str]] = {}

CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v4", "architectures": ["DeepseekV4ForCausalLM"], "vocab_size": 4, "hidden_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "qk_rope_head_dim": 2,
    "q_lora_rank": 2, "o_groups": 1, "o_lora_rank": 2, "moe_intermediate_size": 32, "n_routed_experts": 2,
    "n_shared_experts": 1, "num_experts_per_tok": 1, "num_hash_layers": 1, "num_nextn_predict_layers": 0,
    "norm_topk_prob": True, "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc",
    "swiglu_limit": 1.5, "sliding_window": 4, "index_n_heads": 1, "index_head_dim": 4, "index_topk": 2, "hc_mult": 2,
    "hc_sinkhorn_iters": 2, "hc_eps": 1e-6, "rms_norm_eps": 1e-6, "rope_theta": 10000, "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536,
    },
    "max_position_embeddings": 64, "compress_ratios": [4], "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
QUERY, EXPERT = "layers.0.attn.wq_a", "layers.0.ffn.experts.0.w1"
IDS = "layers.0.ffn.gate.tid2eid"
Entry = tuple[str, list[int], bytes]


def tensors() -> dict[str, Entry]:
    """The sound model: one matrix as FP8, one as FP4, the rest F32."""
    found: dict[str, Entry] = {}
    for piece in deepseek_v4.pieces(deepseek_v4.sizes_of(Options(CONFIG, "config.json")), mtp=False):
        kind, size = ("I64", 8) if piece.stored == "I64" else ("F32", 4)
        found[piece.official] = kind, list(piece.shape), bytes(size * math.prod(piece.shape))
    found[f"{QUERY}.weight"] = "F8_E4M3", [2, 32], bytes(64)
    found[f"{QUERY}.scale"] = "F8_E8M0", [1, 1], b"\x7f"
    found[f"{EXPERT}.weight"] = "I8", [32, 16], bytes(512)
    found[f"{EXPERT}.scale"] = "F8_E8M0", [32, 1], b"\x7f" * 32
    return found


def weights(**changed: Entry | None) -> bytes:
    """The container; `changed` replaces tensors, or takes them away (None)."""
    header: dict[str, Any] = {}
    data = b""
    for name, entry in (tensors() | changed).items():
        if entry is None:
            continue
        kind, shape, raw = entry
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    return container(header, data)


def options(name: str, words: str, **change: Any) -> None:
    config = {k: v for k, v in (CONFIG | change).items() if v != "absent"}
    CASES[f"deepseek_v4/{name}"] = folder(config, model_safetensors=make.EMPTY), words


def files(name: str, words: str, **changed: Entry | None) -> None:
    CASES[f"deepseek_v4/{name}"] = folder(CONFIG, model_safetensors=weights(**changed)), words


for key, value, words in (
    ("compress_ratios", "absent", "compress_ratios is missing"), ("compress_ratios", [], "compress_ratios must be"),
    ("compress_ratios", [5], "compress_ratios holds 5"), ("compress_ratios", [4.0], "compress_ratios must be"),
    ("compress_ratios", "4", "compress_ratios must be"), ("hc_mult", 17, "hc_mult is 17"),
    ("hc_sinkhorn_iters", 10**9, "hc_sinkhorn_iters is"), ("o_groups", 3, "3 output groups"),
    ("index_head_dim", 6, "heads of 6"), ("index_topk", 0, "index_topk is 0"), ("index_topk", 10**6, "index_topk is"),
    ("qk_rope_head_dim", 8, "8 rotary numbers"), ("num_experts_per_tok", 3, "3 of 2 experts"),
    ("n_routed_experts", 5000, "n_routed_experts is 5000"), ("num_hash_layers", -1, "num_hash_layers is -1"),
    ("num_hidden_layers", 4096, "compress_ratios"), ("swiglu_limit", "absent", "swiglu_limit is missing"),
    ("swiglu_limit", 0, "swiglu_limit is 0"), ("rope_scaling", [1], "rope_scaling is a list"),
    ("rope_scaling", {"type": "yarn", "factor": 16}, "original_max_position_embeddings is missing"),
    ("quantization_config", {"quant_method": "fp8", "weight_block_size": [64, 64]}, "weight_block_size"),
    ("quantization_config", {"quant_method": "gptq"}, "quant_method"), ("layer_types", ["x"], "'layer_types'"),
    ("model_type", "deepseek_v41", "DeepSeek V4.1"), ("expert_dtype", "int4", "expert_dtype"),
):  # fmt: skip
    shown = value if isinstance(value, (int, str)) else type(value).__name__ + str(len(value))  # type: ignore[arg-type]
    name = f"{key}_{shown}"
    options(name if f"deepseek_v4/{name}" not in CASES else f"{name}_{len(CASES)}", words, **{key: value})

files("scale_missing", f"no tensor '{QUERY}.scale'", **{f"{QUERY}.scale": None})
files("scale_shape", "shape [1, 2]", **{f"{QUERY}.scale": ("F8_E8M0", [1, 2], b"\x7f" * 2)})
files("scale_of_floats", "F8_E8M0", **{f"{QUERY}.scale": ("F32", [1, 1], bytes(4))})
files("scale_of_nothing", "'layers.0.attn.wkv.scale'", **{"layers.0.attn.wkv.scale": ("F8_E8M0", [1, 1], b"\x7f")})
files("fp8_shape", "shape [2, 16]", **{f"{QUERY}.weight": ("F8_E4M3", [2, 16], bytes(32))})
files("fp4_shape", "shape [32, 32]", **{f"{EXPERT}.weight": ("I8", [32, 32], bytes(1024))})
files("fp4_scale_shape", "shape [32, 2]", **{f"{EXPERT}.scale": ("F8_E8M0", [32, 2], b"\x7f" * 64)})
files("fp4_vector", "stored as I8", **{"layers.0.attn_norm.weight": ("I8", [32], bytes(32))})
files("fp4_where_columns_are_few", "do not divide", **{"layers.0.attn.wq_b.weight": ("I8", [8, 1], bytes(8))})
files("ids_too_large", "names experts from 0 to 2", **{IDS: ("I64", [4, 1], bytes(24) + b"\x02" + bytes(7))})
files("ids_negative", "names experts from -1", **{IDS: ("I64", [4, 1], bytes(24) + b"\xff" * 8)})
files("ids_are_floats", "stored as F32", **{IDS: ("F32", [4, 1], bytes(16))})
files("ids_shape", "shape [3, 1]", **{IDS: ("I64", [3, 1], bytes(24))})
files("ape_shape", "shape [4, 4]", **{"layers.0.attn.compressor.ape": ("F32", [4, 4], bytes(64))})
files("expert_missing", "experts.1.w2.weight'", **{"layers.0.ffn.experts.1.w2.weight": None})
files("sink_missing", "attn_sink'", **{"layers.0.attn.attn_sink": None})
files(
    "one_expert_more",
    "'layers.0.ffn.experts.2.w1.weight'",
    **{"layers.0.ffn.experts.2.w1.weight": ("F32", [32, 32], bytes(4096))},
)

if __name__ == "__main__":
    make.write(make.HERE, CASES)
