"""What a Qwen3 checkpoint means to the core, dense and with experts; and Mistral, whose files hold a plain Llama."""

from __future__ import annotations

import numpy as np
import pytest
from oracle import DATA
from shapes import checkpoint_of, gguf_checkpoint

from ds4.errors import FileFormatError, UnsupportedError
from ds4.families import model_spec
from ds4.files import open_checkpoint

# config.json of Qwen3-0.6B, Qwen3-30B-A3B and Mistral-7B-v0.3, the models with fewer layers
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02,
    "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
    "num_attention_heads": 16, "num_hidden_layers": 2, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
    "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 2,
    "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
MISTRAL = {
    "architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 2,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.42.0.dev0", "use_cache": True,
    "vocab_size": 32768,
}  # fmt: skip


def tensors(config: dict, qk_norms: bool = True) -> dict[str, tuple[int, ...]]:
    """The names and shapes of the tensors that such a model has."""
    dim, head = config["hidden_size"], config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    found = {"model.embed_tokens": (config["vocab_size"], dim), "model.norm": (dim,)}
    if not config["tie_word_embeddings"]:
        found["lm_head"] = (config["vocab_size"], dim)
    for i in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm": (dim,), "post_attention_layernorm": (dim,), "self_attn.q_proj": (q, dim),
            "self_attn.k_proj": (kv, dim), "self_attn.v_proj": (kv, dim), "self_attn.o_proj": (dim, q),
        }  # fmt: skip
        if qk_norms:
            layer |= {"self_attn.q_norm": (head,), "self_attn.k_norm": (head,)}
        if "moe_intermediate_size" in config:
            layer["mlp.gate"] = (config["num_experts"], dim)
            ffns = {f"mlp.experts.{e}": config["moe_intermediate_size"] for e in range(config["num_experts"])}
        else:
            ffns = {"mlp": config["intermediate_size"]}
        for name, ffn in ffns.items():
            layer |= {f"{name}.gate_proj": (ffn, dim), f"{name}.up_proj": (ffn, dim), f"{name}.down_proj": (dim, ffn)}
        found |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return {f"{name}.weight": shape for name, shape in found.items()}


def hf(config: dict, **changes):
    """A checkpoint with the tensors of `config` and other options; "absent" takes one away."""
    options = {key: value for key, value in (config | changes).items() if value != "absent"}
    return checkpoint_of(options, tensors(config, qk_norms=config is not MISTRAL))


def test_config_of_qwen3_06b():
    spec = model_spec(hf(QWEN3))
    assert spec.arch == "qwen3"
    freqs = spec.config.pop("rope_freqs")
    assert freqs == pytest.approx([1e6 ** (-2 * i / 128) for i in range(64)], rel=1e-14)
    assert spec.config == {
        "n_layers": [2.0], "dim": [1024.0], "n_heads": [16.0], "n_kv_heads": [8.0], "head_dim": [128.0],
        "ffn_dim": [3072.0], "vocab": [151936.0], "ctx": [40960.0], "norm_eps": [1e-6], "rope_interleaved": [0.0],
        "rope_scale": [1.0],
    }  # fmt: skip
    found = {name: tensor.name for name, tensor in spec.tensors}
    layer = {
        "attn_norm": "input_layernorm", "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
        "o": "self_attn.o_proj", "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm",
        "ffn_norm": "post_attention_layernorm", "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
    }  # fmt: skip
    expected = {f"layers.{i}.{k}": f"model.layers.{i}.{v}.weight" for i in range(2) for k, v in layer.items()}
    assert found == expected | {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight"}


def test_config_of_qwen3_30b_a3b():
    spec = model_spec(hf(MOE))
    assert spec.arch == "qwen3"
    expected = {
        "dim": 2048, "n_heads": 32, "n_kv_heads": 4, "ffn_dim": 768, "n_experts": 128, "n_experts_used": 8,
        "expert_ffn_dim": 768, "norm_topk": 1,
    }  # fmt: skip
    assert {name: spec.config[name] for name in expected} == {name: [float(v)] for name, v in expected.items()}
    found = {name: tensor.name for name, tensor in spec.tensors}
    assert len(found) == len(tensors(MOE)) and "head" in found
    assert found["layers.1.router"] == "model.layers.1.mlp.gate.weight"
    for expert in (0, 17, 127):
        for part in ("gate", "up", "down"):
            name = f"model.layers.1.mlp.experts.{expert}.{part}_proj.weight"
            assert found[f"layers.1.experts.{expert}.{part}"] == name
    assert not any(name.startswith("layers.0.gate") for name in found)


def test_yarn_as_qwen3_recommends_it():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = model_spec(hf(QWEN3, rope_scaling=scaling)).config
    assert config["rope_scale"] == [pytest.approx(0.1 * np.log(4) + 1)]
    assert config["rope_freqs"][0] == 1.0
    assert config["rope_freqs"][-1] == pytest.approx(1e6 ** (-126 / 128) / 4)


@pytest.mark.parametrize("config", [QWEN3, MOE])
@pytest.mark.parametrize(
    "name, value",
    [
        ("attention_bias", True), ("hidden_act", "gelu"), ("use_sliding_window", True), ("invented_option", 1),
        ("layer_types", ["full_attention", "sliding_attention"]), ("architectures", ["Qwen3ForSequenceClassification"]),
        ("quantization_config", {"bits": 4}), ("num_nextn_predict_layers", 1),
    ],
)  # fmt: skip
def test_options_that_would_change_results_are_refused_by_name(config, name, value):
    with pytest.raises(UnsupportedError, match=f"m/config.json.*{name}"):
        model_spec(hf(config, **{name: value}))


@pytest.mark.parametrize(
    "name, value",
    [
        ("decoder_sparse_step", 2), ("mlp_only_layers", [0]), ("num_local_experts", 64),
        ("shared_expert_intermediate_size", 768), ("n_shared_experts", 1), ("routed_scaling_factor", 2.5),
    ],
)  # fmt: skip
def test_options_of_experts_that_would_change_results_are_refused_by_name(name, value):
    word = "num_experts" if name == "num_local_experts" else name
    with pytest.raises(UnsupportedError, match=f"m/config.json.*{word}"):
        model_spec(hf(MOE, **{name: value}))


@pytest.mark.parametrize(
    "name, value",
    [
        ("sliding_window", 4096), ("max_window_layers", 3), ("output_router_logits", True),
        ("layer_types", ["full_attention"] * 2), ("architectures", "absent"), ("decoder_sparse_step", "absent"),
        ("mlp_only_layers", None), ("router_aux_loss_coef", 0.0), ("num_local_experts", 128),
        ("intermediate_size", 9),
    ],
)  # fmt: skip
def test_options_that_change_nothing_are_accepted(name, value):
    assert model_spec(hf(MOE, **{name: value})).config == model_spec(hf(MOE)).config


def test_the_weights_of_experts_add_up_to_one_only_where_the_file_says_so():
    assert model_spec(hf(MOE)).config["norm_topk"] == [1.0]
    assert model_spec(hf(MOE, norm_topk_prob=False)).config["norm_topk"] == [0.0]
    assert model_spec(hf(MOE, norm_topk_prob="absent")).config["norm_topk"] == [0.0]  # what transformers takes


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("num_experts_per_tok", 129, "129 of 128 experts"), ("num_experts_per_tok", 0, "num_experts_per_tok"),
        ("num_experts", 0, "num_experts is 0"), ("num_experts", 4097, "num_experts is 4097"),
        ("num_experts", "absent", "num_experts is missing"), ("num_experts", 128.0, "num_experts is 128.0"),
        ("num_experts", 127, r"'model.layers.0.mlp.gate.weight' has the shape \[128, 2048\]"),
        ("moe_intermediate_size", "absent", "moe_intermediate_size is missing"),
        ("moe_intermediate_size", 767, "'model.layers.0.mlp.experts.0.gate_proj.weight' has the shape"),
        ("norm_topk_prob", 1, "norm_topk_prob"), ("layer_types", ["full_attention"], "layer_types has 1 entries"),
        ("layer_types", "full_attention", "layer_types must be a list"),
        ("layer_types", [None, None], "layer_types must be a list"),
        ("num_hidden_layers", 4000, "4000 layers of 128 experts"), ("num_hidden_layers", 4097, "num_hidden_layers"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_together(name, value, words):
    with pytest.raises(FileFormatError, match=words):
        model_spec(hf(MOE, **{name: value}))


def test_an_expert_too_many_is_a_tensor_that_would_not_be_used():
    more = tensors(MOE) | {"model.layers.1.mlp.experts.128.up_proj.weight": (768, 2048)}
    with pytest.raises(UnsupportedError, match=r"such as 'model.layers.1.mlp.experts.128.up_proj.weight'"):
        model_spec(checkpoint_of(MOE, more))


# ---- Mistral ----


def test_mistral_without_its_window_is_llama():
    llama = model_spec(checkpoint_of(MISTRAL | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
                                     tensors(MISTRAL, qk_norms=False)))  # fmt: skip
    for window in (None, 32768, 99999):
        spec = model_spec(hf(MISTRAL, sliding_window=window))
        assert spec.arch == "llama" and spec.config == llama.config
        assert [name for name, _ in spec.tensors] == [name for name, _ in llama.tensors]


@pytest.mark.parametrize("window", [4096, 32767, "absent"])  # transformers takes 4096 where there is none
def test_mistral_with_a_window_is_refused(window):
    with pytest.raises(UnsupportedError, match="sliding_window is .* in a context of 32768"):
        model_spec(hf(MISTRAL, sliding_window=window))


# ---- GGUF ----

GGUF_MOE = {
    "block_count": 2, "context_length": 4096, "embedding_length": 8, "feed_forward_length": 6144,
    "attention.head_count": 3, "attention.head_count_kv": 1, "attention.key_length": 6, "attention.value_length": 6,
    "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e6, "expert_count": 5, "expert_used_count": 2,
    "expert_feed_forward_length": 10,
}  # fmt: skip
GGUF_LAYER = {
    "attn_norm": (8,), "attn_q": (18, 8), "attn_k": (6, 8), "attn_v": (6, 8), "attn_output": (8, 18),
    "attn_q_norm": (6,), "attn_k_norm": (6,), "ffn_norm": (8,), "ffn_gate_inp": (5, 8), "ffn_gate_exps": (5, 10, 8),
    "ffn_up_exps": (5, 10, 8), "ffn_down_exps": (5, 8, 10),
}  # fmt: skip


def moe_gguf(layer: dict | None = None, **changes):
    shapes = {f"blk.{i}.{name}.weight": shape for i in range(2) for name, shape in (layer or GGUF_LAYER).items()}
    shapes |= {"token_embd.weight": (11, 8), "output_norm.weight": (8,)}
    return gguf_checkpoint("qwen3moe", GGUF_MOE | {k.replace("__", "."): v for k, v in changes.items()}, shapes)


def test_stacked_experts_are_split_in_place():
    checkpoint = moe_gguf()
    spec = model_spec(checkpoint)
    expected = {"n_experts": 5, "n_experts_used": 2, "expert_ffn_dim": 10, "norm_topk": 1, "ffn_dim": 10, "vocab": 11}
    assert {name: spec.config[name] for name in expected} == {name: [float(v)] for name, v in expected.items()}
    found = dict(spec.tensors)
    for layer in range(2):
        for part, shape in (("gate", (10, 8)), ("up", (10, 8)), ("down", (8, 10))):
            stacked = checkpoint.tensors[f"blk.{layer}.ffn_{part}_exps.weight"]
            whole = np.frombuffer(stacked.data, "<f4").reshape(5, *shape)
            for expert in range(5):
                tensor = found[f"layers.{layer}.experts.{expert}.{part}"]
                values = np.frombuffer(tensor.data, "<f4").reshape(shape)
                assert tensor.shape == shape and (values == whole[expert]).all()
                assert np.shares_memory(values, whole)
    assert len(found) == 2 + 2 * (9 + 15)


@pytest.mark.parametrize(
    "name, value",
    [
        ("expert_shared_count", 1), ("expert_gating_func", 2), ("expert_weights_norm", False),
        ("expert_weights_scale", 2.5), ("expert_group_count", 4), ("attention.sliding_window", 64),
        ("rope.dimension_sections", np.array([1, 2, 3, 0], np.int32)), ("pooling_type", 3),
    ],
)  # fmt: skip
def test_gguf_options_that_would_change_results_are_refused_by_name(name, value):
    with pytest.raises(UnsupportedError, match=f"qwen3moe.{name}"):
        model_spec(moe_gguf(**{name: value}))


def test_gguf_options_that_change_nothing_are_accepted():
    more = {"expert_shared_count": 0, "expert_gating_func": 1, "expert_weights_norm": True, "expert_weights_scale": 1.0}
    assert model_spec(moe_gguf(**more)).config == model_spec(moe_gguf()).config
    dense = {k: v for k, v in GGUF_MOE.items() if "expert" not in k} | {"expert_count": 0}
    layer = {k: v for k, v in GGUF_LAYER.items() if "exps" not in k and "inp" not in k}
    layer |= {"ffn_gate": (6144, 8), "ffn_up": (6144, 8), "ffn_down": (8, 6144)}
    shapes = {f"blk.{i}.{name}.weight": shape for i in range(2) for name, shape in layer.items()}
    shapes |= {"token_embd.weight": (11, 8), "output_norm.weight": (8,)}
    assert model_spec(gguf_checkpoint("qwen3", dense, shapes)).config["ffn_dim"] == [6144.0]
    with pytest.raises(UnsupportedError, match="qwen3.expert_count"):
        model_spec(gguf_checkpoint("qwen3", dense | {"expert_count": 5}, shapes))


@pytest.mark.parametrize("name", ["expert_count", "expert_used_count", "expert_feed_forward_length"])
def test_gguf_experts_need_their_sizes(name):
    with pytest.raises(FileFormatError, match=f"qwen3moe.{name} is missing"):
        model_spec(moe_gguf(**{name: None}))


@pytest.mark.parametrize(
    "name, shape",
    [
        ("ffn_gate_exps", (4, 10, 8)), ("ffn_gate_exps", (50, 8)), ("ffn_up_exps", (5, 8, 10)),
        ("ffn_down_exps", (5, 10, 8)), ("ffn_down_exps", (5, 80)), ("ffn_gate_inp", (8, 5)), ("ffn_gate_inp", (8,)),
        ("attn_q_norm", (18,)), ("attn_k_norm", (8,)),
    ],
)  # fmt: skip
def test_gguf_shapes_that_do_not_fit(name, shape):
    with pytest.raises((FileFormatError, UnsupportedError), match=f"'blk.0.{name}.weight'"):
        model_spec(moe_gguf({**GGUF_LAYER, name: shape}))


def test_fingerprint_sees_every_expert():
    """K9: the same bytes for other experts are another model."""
    with open_checkpoint(DATA / "qwen3_moe") as checkpoint:
        spec = model_spec(checkpoint)
        names = [name for name, _ in spec.tensors]
        a, b = names.index("layers.1.experts.2.up"), names.index("layers.1.experts.5.up")
        first = checkpoint.fingerprint(spec)
        tensors = list(spec.tensors)
        tensors[a], tensors[b] = (names[a], tensors[b][1]), (names[b], tensors[a][1])
        assert first != checkpoint.fingerprint(type(spec)(spec.arch, spec.config, tensors))
