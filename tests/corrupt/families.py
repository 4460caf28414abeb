"""The part of the corpus that is about families: `cd tests && python -m corrupt.families` writes it into `families/`.

As in `make.py`: each case is a loadable tiny model with one fault, in a mixture of experts, in options that hold
something for each layer, or in what else a family reads of its own.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

from . import make
from .make import (
    ARRAY,
    BOOL,
    CONFIG,
    EMPTY,
    F32,
    HF_NAMES,
    I32,
    SHAPES,
    STRING,
    U32,
    Gguf,
    container,
    entry,
    folder,
    key,
    set_key,
    with_more,
)

CASES: dict[str, tuple[bytes | dict[str, bytes], str]] = {}


def case(name: str, content: bytes | dict[str, bytes], words: str) -> None:
    assert f"families/{name}" not in CASES
    CASES[f"families/{name}"] = content, words


HEAD_NORMS = {"blk.0.attn_q_norm": [2], "blk.0.attn_k_norm": [2]}
MOE_SHAPES = {name: dims for name, dims in SHAPES.items() if name[6:14] not in ("ffn_gate", "ffn_up", "ffn_down")}
MOE_SHAPES |= HEAD_NORMS | {
    "blk.0.ffn_gate_inp": [2, 3], "blk.0.ffn_gate_exps": [2, 4, 3], "blk.0.ffn_up_exps": [2, 4, 3],
    "blk.0.ffn_down_exps": [4, 2, 3],
}  # fmt: skip
GEMMA_SHAPES = SHAPES | HEAD_NORMS | {"blk.0.post_attention_norm": [2], "blk.0.post_ffw_norm": [2]}


def moe() -> Gguf:
    """A tiny Qwen3-MoE: 3 experts of 4, of which a token uses 2."""
    more = {"expert_count": 3, "expert_used_count": 2, "expert_feed_forward_length": 4}
    return family("qwen3moe", MOE_SHAPES, more)


def gemma() -> Gguf:
    """A tiny Gemma 3 of one local layer."""
    return family("gemma3", GEMMA_SHAPES, {"attention.sliding_window": 8})


def family(arch: str, shapes: dict[str, list[int]], more: dict[str, int]) -> Gguf:
    model = Gguf()
    size = {"block_count": 1, "context_length": 64, "embedding_length": 2, "feed_forward_length": 2}
    model.keys = {"general.architecture": key("general.architecture", STRING, arch)}
    set_key("general.alignment", U32, 8)(model)
    set_key(f"{arch}.attention.layer_norm_rms_epsilon", F32, 1e-5)(model)
    for name, value in (size | {"attention.head_count": 1} | more).items():
        set_key(f"{arch}.{name}", U32, value)(model)
    model.entries, model.data = {}, b""
    for name, dims in shapes.items():
        model.entries[f"{name}.weight"] = entry(f"{name}.weight", dims, 0, len(model.data))
        model.data += struct.pack(f"<{math.prod(dims)}f", *(0.125 * i - 3 for i in range(math.prod(dims))))
    return model


def gguf_cases() -> None:
    def other(new: Callable[[], Gguf], name: str, words: str, change: Callable[[Gguf], Any]) -> None:
        model = new()
        change(model)
        case(f"{name}.gguf", model.bytes(), words)

    for name, words, kind, value in (
        ("expert_count", "expert_count is 0", U32, 0), ("expert_count", "from 1 to", U32, 2**32 - 1),
        ("expert_count", "from 1 to", U32, 4097), ("expert_count", "shape [3, 2]", U32, 4),
        ("expert_count", "expert_count is '3'", STRING, "3"), ("expert_count", "for each layer", ARRAY, (U32, [3])),
        ("expert_used_count", "4 of 3 experts", U32, 4), ("expert_used_count", "expert_used_count is 0", U32, 0),
        ("expert_feed_forward_length", "shape [3, 4, 2]", U32, 2), ("expert_feed_forward_length", "is 0", U32, 0),
        ("expert_feed_forward_length", "for each layer", ARRAY, (U32, [4])),
        ("expert_shared_count", "expert_shared_count is 1", U32, 1), ("expert_gating_func", "_func is 2", U32, 2),
    ):  # fmt: skip
        shown = {STRING: "text", ARRAY: "array"}.get(kind, value)
        other(moe, f"moe_{name}_{shown}", words, set_key(f"qwen3moe.{name}", kind, value))
    for name in ("expert_count", "expert_used_count", "expert_feed_forward_length"):
        other(moe, f"moe_{name}_missing", f"{name} is missing", lambda m, name=name: m.keys.pop(f"qwen3moe.{name}"))
    up = "blk.0.ffn_up_exps.weight"
    for word, words, dims in (
        ("flat", "shape [12, 2]", [2, 12]), ("an_expert_less", "shape [2, 4, 2]", [2, 4, 2]),
        ("turned", "shape [4, 3, 2]", [2, 3, 4]), ("4_dims", "shape [1, 3, 4, 2]", [2, 4, 3, 1]),
        ("past_end", "cut", [2, 4, 3000]), ("overflow", "cut", [2, 2**31, 2**31]), ("wraps", "cut", [2, 2**62, 6]),
    ):  # fmt: skip
        other(moe, f"moe_shape_{word}", words, lambda m, dims=dims: with_more(up, dims)(m))
    other(
        moe, "moe_router_missing", "'blk.0.ffn_gate_inp.weight'", lambda m: m.entries.pop("blk.0.ffn_gate_inp.weight")
    )
    other(moe, "moe_expert_bias", "'blk.0.exp_probs_b.bias'", with_more("blk.0.exp_probs_b.bias", [3]))
    other(moe, "moe_format", "I32", with_more(up, [2, 4, 3], 26))
    other(moe, "moe_layers_2", "'blk.1.", set_key("qwen3moe.block_count", U32, 2))

    pattern = "gemma3.attention.sliding_window_pattern"
    for word, kind, value in (
        ("empty", BOOL, []), ("long", BOOL, [1, 1]), ("numbers", U32, [1]), ("floats", F32, [1.0]),
        ("texts", STRING, ["1"]), ("huge", BOOL, [1] * 5000),
    ):  # fmt: skip
        other(gemma, f"pattern_{word}", pattern, set_key(pattern, ARRAY, (kind, value)))
    other(gemma, "pattern_cut", "cut", set_key(pattern, ARRAY, struct.pack("<IQ", BOOL, 2**40)))
    other(gemma, "pattern_bool_2", "bools", set_key(pattern, ARRAY, struct.pack("<IQB", BOOL, 1, 2)))
    for word, kind, value in (("0", U32, 0), ("negative", I32, -6), ("float", F32, 6.0), ("bool", BOOL, 1)):
        other(gemma, f"pattern_{word}", pattern, set_key(pattern, kind, value))
    window = "gemma3.attention.sliding_window"
    for word, kind, value in (("0", U32, 0), ("2_32", U32, 2**32 - 1), ("text", STRING, "512"), ("float", F32, 512.0)):
        other(gemma, f"window_{word}", f"{window} is", set_key(window, kind, value))
    other(gemma, "window_array", "for each layer", set_key(window, ARRAY, (U32, [8])))
    other(gemma, "window_missing", f"{window} is missing", lambda m: m.keys.pop(window))
    other(gemma, "head_norm_shape", "shape [3]", with_more("blk.0.attn_q_norm.weight", [3]))
    other(gemma, "softcap", "final_logit_softcapping", set_key("gemma3.final_logit_softcapping", F32, 30.0))
    other(gemma, "kv_heads_array", "for each layer", set_key("gemma3.attention.head_count_kv", ARRAY, (U32, [1])))


QWEN3_MOE = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_key_value_heads": 1, "num_experts": 3,
    "num_experts_per_tok": 2, "moe_intermediate_size": 4, "norm_topk_prob": True,
}  # fmt: skip
GEMMA3 = {
    "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "num_key_value_heads": 1, "head_dim": 2,
    "sliding_window": 8, "hidden_act": "absent", "layer_types": ["sliding_attention"], "tie_word_embeddings": False,
}  # fmt: skip
BY_LAYER = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
LAYER = "model.layers.0"
HF_HEADS = {"blk.0.attn_q_norm": f"{LAYER}.self_attn.q_norm", "blk.0.attn_k_norm": f"{LAYER}.self_attn.k_norm"}
MOE_NAMES = HF_NAMES | HF_HEADS | {"blk.0.ffn_gate_inp": f"{LAYER}.mlp.gate"}
MOE_NAMES |= {f"blk.0.ffn_{part}_exps": f"{LAYER}.mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")}
GEMMA_NAMES = HF_NAMES | HF_HEADS | {
    "blk.0.ffn_norm": f"{LAYER}.pre_feedforward_layernorm",
    "blk.0.post_attention_norm": f"{LAYER}.post_attention_layernorm",
    "blk.0.post_ffw_norm": f"{LAYER}.post_feedforward_layernorm",
}  # fmt: skip


def config(base: dict[str, Any], **change: Any) -> dict[str, Any]:
    """The options of a tiny model of another family; "absent" takes one away."""
    return {k: v for k, v in (CONFIG | base | change).items() if v != "absent"}


def hf_weights(shapes: dict[str, list[int]], names: dict[str, str]) -> bytes:
    """The tensors of such a model as one safetensors container."""
    header: dict[str, Any] = {}
    end = 0
    for name, dims in shapes.items():
        for expert in range(dims[2] if len(dims) > 2 else 1):
            span = [end, end := end + 4 * math.prod(dims[:2])]
            header[f"{names[name].format(expert)}.weight"] = {
                "dtype": "F32", "shape": dims[1::-1], "data_offsets": span,
            }  # fmt: skip
    return container(header, struct.pack(f"<{end // 4}f", *(0.125 * i - 3 for i in range(end // 4))))


def moe_weights() -> bytes:
    return hf_weights(MOE_SHAPES, MOE_NAMES)


def gemma_weights() -> bytes:
    return hf_weights(GEMMA_SHAPES, GEMMA_NAMES)


def hf_cases() -> None:
    def hf(name: str, words: str, base: dict[str, Any], weights: bytes = EMPTY, **change: Any) -> None:
        case(f"{name}", folder(config(base, **change), model_safetensors=weights), words)

    for name, value, words in (
        ("num_experts", 0, "num_experts is 0"), ("num_experts", 4097, "num_experts is 4097"),
        ("num_experts", "absent", "num_experts is missing"), ("num_experts", [3], "num_experts is a list"),
        ("num_experts", True, "num_experts is true"), ("num_experts_per_tok", 4, "4 of 3 experts"),
        ("num_experts_per_tok", "absent", "num_experts_per_tok is missing"), ("num_local_experts", 4, "num_experts"),
        ("moe_intermediate_size", 0, "moe_intermediate_size is 0"), ("norm_topk_prob", 1, "norm_topk_prob"),
        ("mlp_only_layers", [0], "mlp_only_layers"), ("decoder_sparse_step", 2, "decoder_sparse_step"),
        ("num_hidden_layers", 4096, "no tensor"), ("num_hidden_layers", 4097, "num_hidden_layers is 4097"),
    ):  # fmt: skip
        shown = value if not isinstance(value, list) else "list"
        hf(f"moe_{name}_{shown}", words, QWEN3_MOE, **{name: value})
    for name, value, words in (
        ("num_experts", 4, "mlp.gate.weight' has the shape [3, 2]"), ("num_hidden_layers", 2, "'model.layers.1."),
        ("num_experts", 2, "mlp.gate.weight' has the shape [3, 2]"), ("moe_intermediate_size", 3, "the shape [4, 2]"),
    ):  # fmt: skip
        hf(f"moe_shapes_{name}_{value}", words, QWEN3_MOE, moe_weights(), **{name: value})
    hf("moe_is_dense", "'model.layers.0.self_attn.q_norm.weight'", QWEN3_MOE, make.hf_weights())
    hf("gemma3_is_llama", "'model.layers.0.self_attn.q_norm.weight'", GEMMA3, make.hf_weights())
    hf("gemma3_head_dim", "shape [2, 2]", GEMMA3, gemma_weights(), head_dim=4)
    hf("moe_tensors_too_many", "more than the 131072", QWEN3_MOE, num_hidden_layers=4096, num_experts=11)

    for word, words, value in (
        ("empty", "0 entries", []), ("long", "2 entries", ["full_attention"] * 2),
        ("numbers", "a list that names", [1]), ("null", "a list that names", [None]),
        ("text", "a list that names", "full_attention"),
        ("object", "a list that names", {"0": "full_attention"}), ("nested", "a list that names", [["full_attention"]]),
        ("unknown", "'chunked_attention'", ["chunked_attention"]),
    ):  # fmt: skip
        hf(f"layer_types_{word}", words, GEMMA3, layer_types=value)
        if word != "unknown":
            hf(f"layer_types_{word}_qwen3_moe", words, QWEN3_MOE, layer_types=value)
    full, sliding = BY_LAYER["full_attention"], BY_LAYER["sliding_attention"]
    for word, words, value in (
        ("flat", "full_attention is missing", {"rope_type": "default"}),
        ("half", "sliding_attention is missing", {"full_attention": full}),
        ("list", "sliding_attention is a list", {"full_attention": full, "sliding_attention": [sliding]}),
        ("more", "'chunked'", {"full_attention": full, "sliding_attention": sliding, "chunked": full}),
    ):
        hf(f"rope_by_layer_{word}", words, GEMMA3, rope_parameters=value, rope_theta="absent")
    for name, value in (
        ("sliding_window", 0), ("sliding_window", None), ("sliding_window", [8]), ("query_pre_attn_scalar", 0),
        ("_sliding_window_pattern", 0), ("final_logit_softcapping", 30.0), ("use_bidirectional_attention", True),
    ):  # fmt: skip
        shown = value if not isinstance(value, list) else "list"
        hf(f"gemma3_{name}_{shown}", name, GEMMA3, **{name: value})
    outside = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}
    for word, words, inside in (("list", "text_config is a list", [GEMMA3]), ("empty", "hidden_size is missing", {})):
        case(f"gemma3_text_config_{word}", folder(outside | {"text_config": inside}, model_safetensors=EMPTY), words)
    hf("mistral_window", "sliding_window", {"model_type": "mistral", "architectures": ["MistralForCausalLM"]},
           num_key_value_heads=1, sliding_window=32)  # fmt: skip


gguf_cases()
hf_cases()

if __name__ == "__main__":
    make.write(make.HERE, CASES)
