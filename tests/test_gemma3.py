"""What a Gemma 3 checkpoint means to the core; and two of them with different windows in one process."""

from __future__ import annotations

import json
import math
import threading

import numpy as np
import pytest
from oracle import DATA, fresh_logits, settled, some_tokens
from shapes import checkpoint_of, gguf_checkpoint

import ds4
from ds4.errors import FileFormatError, UnsupportedError
from ds4.families import model_spec

FULL, SLIDING = "full_attention", "sliding_attention"
# config.json of Gemma 3 270M with seven layers, and the short one of the 27B model with six
SMALL = {
    "_sliding_window_pattern": 6, "architectures": ["Gemma3ForCausalLM"], "attention_bias": False,
    "attention_dropout": 0.0, "attn_logit_softcapping": None, "bos_token_id": 2, "eos_token_id": 1,
    "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 640,
    "initializer_range": 0.02, "intermediate_size": 2048, "layer_types": [SLIDING] * 5 + [FULL, SLIDING],
    "max_position_embeddings": 32768, "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 7,
    "num_key_value_heads": 1, "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000.0, "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": 512,
    "torch_dtype": "bfloat16", "transformers_version": "4.55.0.dev0", "use_bidirectional_attention": False,
    "use_cache": True, "vocab_size": 262144,
}  # fmt: skip
LARGE_TEXT = {
    "head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504, "model_type": "gemma3_text",
    "num_attention_heads": 32, "num_hidden_layers": 6, "num_key_value_heads": 16, "query_pre_attn_scalar": 168,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
}  # fmt: skip
LARGE = {
    "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
    "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
    "model_type": "gemma3", "text_config": LARGE_TEXT, "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}  # fmt: skip
LAYER = {
    "attn_norm": "input_layernorm", "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
    "o": "self_attn.o_proj", "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm",
    "attn_post_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm", "gate": "mlp.gate_proj",
    "up": "mlp.up_proj", "down": "mlp.down_proj", "ffn_post_norm": "post_feedforward_layernorm",
}  # fmt: skip


def tensors(config: dict, model: str = "model.") -> dict[str, tuple[int, ...]]:
    dim, ffn, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = dict.fromkeys(LAYER, (dim,)) | {
        "q": (q, dim), "k": (kv, dim), "v": (kv, dim), "o": (dim, q), "q_norm": (head,), "k_norm": (head,),
        "gate": (ffn, dim), "up": (ffn, dim), "down": (dim, ffn),
    }  # fmt: skip
    found = {f"{model}embed_tokens": (config.get("vocab_size", 262208), dim), f"{model}norm": (dim,)}
    for i in range(config["num_hidden_layers"]):
        found |= {f"{model}layers.{i}.{LAYER[part]}": shape for part, shape in shapes.items()}
    return {f"{name}.weight": shape for name, shape in found.items()}


def hf(**changes):
    """The small model with other options; "absent" takes one away."""
    return checkpoint_of({k: v for k, v in (SMALL | changes).items() if v != "absent"}, tensors(SMALL))


def large(model: str = "language_model.model.", text: dict | None = None, more: tuple[str, ...] = (), **changes):
    config = LARGE | {"text_config": LARGE_TEXT | (text or {})} | changes
    return checkpoint_of(config, tensors(LARGE_TEXT, model) | dict.fromkeys(more, (4, 4)))


def base(theta: float, head_dim: int, factor: float = 1.0) -> object:
    return pytest.approx([theta ** (-2 * i / head_dim) / factor for i in range(head_dim // 2)], rel=1e-14)


def test_config_of_gemma3_270m():
    spec = model_spec(hf())
    assert spec.arch == "gemma3"
    config = dict(spec.config)
    assert config.pop("rope_freqs") == base(1e6, 256) and config.pop("local_rope_freqs") == base(1e4, 256)
    assert config == {
        "n_layers": [7.0], "dim": [640.0], "n_heads": [4.0], "n_kv_heads": [1.0], "head_dim": [256.0],
        "ffn_dim": [2048.0], "vocab": [262144.0], "ctx": [32768.0], "norm_eps": [1e-6], "rope_interleaved": [0.0],
        "rope_scale": [1.0], "window": [512.0], "global_layers": [0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0],
        "attn_scale": [0.0625], "embed_scale": [math.sqrt(640)],
    }  # fmt: skip
    found = {name: tensor.name for name, tensor in spec.tensors}
    expected = {f"layers.{i}.{k}": f"model.layers.{i}.{v}.weight" for i in range(7) for k, v in LAYER.items()}
    assert found == expected | {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight"}


@pytest.mark.parametrize("model", ["language_model.model.", "model.language_model."])
def test_config_of_gemma3_27b(model):
    """Nearly everything is left to the defaults of transformers; the scaling holds for the full layers alone."""
    spec = model_spec(large(model))
    config = spec.config
    assert config["rope_freqs"] == base(1e6, 128, 8.0) and config["local_rope_freqs"] == base(1e4, 128)
    assert config["attn_scale"] == [pytest.approx(168**-0.5)] and config["window"] == [1024.0]
    assert config["vocab"] == [262208.0] and config["ctx"] == [131072.0]
    assert config["global_layers"] == [0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    found = {name: tensor.name for name, tensor in spec.tensors}
    assert found["layers.5.ffn_post_norm"] == f"{model}layers.5.post_feedforward_layernorm.weight"
    assert len(found) == 2 + 6 * len(LAYER)


def test_vision_tensors_are_refused_by_name():
    for name in ("vision_tower.vision_model.embeddings.patch_embedding.weight", "multi_modal_projector.mm_soft.weight"):
        with pytest.raises(UnsupportedError, match=f"holds 1 tensors of a vision model, such as '{name}'"):
            model_spec(large(more=(name,)))


def test_norms_reach_the_core_as_factors():
    """x times 1 + w, in float32, from every format that a norm may have."""
    small = {
        "hidden_size": 4, "intermediate_size": 6, "head_dim": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "num_hidden_layers": 1, "vocab_size": 3, "layer_types": [FULL],
    }  # fmt: skip
    checkpoint = checkpoint_of(SMALL | small, tensors(SMALL | small))
    weights = np.array([-0.5, 0.0, 1e-4, 3.140625], "<f4")
    for format, raw in (
        ("F32", weights),
        ("F16", weights.astype("<f2")),
        ("BF16", (weights.view("<u4") >> 16).astype("<u2")),
    ):
        exact = {"F32": weights, "F16": raw.astype("<f4"), "BF16": (raw.astype("<u4") << 16).view("<f4")}[format]
        old = checkpoint.tensors["model.layers.0.pre_feedforward_layernorm.weight"]
        changed = type(old)(old.name, format, old.shape, memoryview(raw.view(np.uint8)).toreadonly())
        checkpoint.tensors[old.name] = changed
        spec = dict(model_spec(checkpoint).tensors)
        tensor = spec["layers.0.ffn_norm"]
        assert tensor.format == "F32" and tensor.shape == (4,) and tensor.data.readonly
        assert bytes(tensor.data) == (exact + np.float32(1)).tobytes()
        raw_q = np.frombuffer(checkpoint.tensors["model.layers.0.self_attn.q_norm.weight"].data, "<f4")
        assert bytes(spec["layers.0.q_norm"].data) == (raw_q + np.float32(1)).tobytes()
        assert spec["layers.0.q"] is checkpoint.tensors["model.layers.0.self_attn.q_proj.weight"]  # not copied


def test_rope_in_its_new_form():
    new = {FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5}, SLIDING: {"rope_theta": 2e4}}
    config = model_spec(
        hf(rope_parameters=new, rope_theta="absent", rope_local_base_freq="absent", rope_scaling="absent")
    ).config
    assert config["rope_freqs"] == base(5e5, 256, 8.0) and config["local_rope_freqs"] == base(2e4, 256)
    both = {FULL: {"rope_type": "default", "rope_theta": 1e6}, SLIDING: {"rope_type": "default", "rope_theta": 1e4}}
    assert model_spec(hf(rope_parameters=both)).config == model_spec(hf()).config


def test_absent_thetas_are_those_of_transformers():
    config = model_spec(hf(rope_theta="absent", rope_local_base_freq="absent")).config
    assert config["rope_freqs"] == base(1e6, 256) and config["local_rope_freqs"] == base(1e4, 256)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "full_attention is missing"),
        ({"rope_parameters": {FULL: {}, SLIDING: []}}, "sliding_attention is a list"),
        ({"rope_parameters": {FULL: {}, SLIDING: {}, "chunked_attention": {}}}, "'chunked_attention'"),
        ({"rope_parameters": {FULL: {"rope_theta": 5e5}, SLIDING: {}}}, "rope_theta differs"),
        ({"rope_parameters": {FULL: {}, SLIDING: {"rope_theta": 5e5}}}, "rope_local_base_freq differs"),
        ({"rope_parameters": {FULL: {}, SLIDING: {}}, "rope_scaling": {"rope_type": "default"}}, "rope_scaling stands"),
        ({"rope_local_base_freq": 1.0}, "rope_local_base_freq is 1.0"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
    ],
)
def test_rope_that_is_not_clear(changes, words):
    with pytest.raises((FileFormatError, UnsupportedError), match=words):
        model_spec(hf(**changes))


def test_yarn_that_scales_the_local_layers_is_refused():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
    assert model_spec(hf(rope_scaling=yarn)).config["rope_scale"] == [pytest.approx(0.1 * math.log(4) + 1)]
    with pytest.raises(UnsupportedError, match="local layers"):
        model_spec(hf(rope_parameters={FULL: {}, SLIDING: yarn}))


@pytest.mark.parametrize(
    "name, value",
    [
        ("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0), ("hidden_activation", "gelu"),
        ("hidden_act", "silu"), ("use_bidirectional_attention", True), ("attention_bias", True),
        ("architectures", ["Gemma3TextModel"]), ("invented_option", 0), ("layer_types", [FULL, "chunked"] + [FULL] * 5),
    ],
)  # fmt: skip
def test_options_that_would_change_results_are_refused_by_name(name, value):
    with pytest.raises(UnsupportedError, match=f"m/config.json.*{name}"):
        model_spec(hf(**{name: value}))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"text": {"attn_logit_softcapping": 50.0}}, "text_config: attn_logit_softcapping"),
        ({"text": {"attention_bias": True}}, "text_config: attention_bias"),
        ({"text": {"model_type": "gemma2"}}, "text_config: model_type"),
        ({"text": {"tie_word_embeddings": False}}, "text_config: tie_word_embeddings"),
        ({"text_config": None}, "text_config is missing"),
        ({"text_config": [1]}, "text_config is a list"),
        ({"audio_config": {}}, "'audio_config'"),
        ({"architectures": ["Gemma3ForCausalLM"]}, "architectures"),
    ],
)
def test_options_of_the_multimodal_model(changes, words):
    with pytest.raises((FileFormatError, UnsupportedError), match=words):
        model_spec(large(**changes))


@pytest.mark.parametrize(
    "name, value",
    [("cache_implementation", "hybrid"), ("hidden_activation", "absent"), ("architectures", "absent"),
     ("sliding_window_pattern", 3), ("query_pre_attn_scalar", "absent"), ("tie_word_embeddings", True),
     ("rms_norm_eps", "absent"), ("head_dim", "absent")],
)  # fmt: skip
def test_options_that_change_nothing_are_accepted(name, value):
    assert model_spec(hf(**{name: value})).config == model_spec(hf()).config


@pytest.mark.parametrize("name", ["sliding_window_pattern", "_sliding_window_pattern"])
def test_the_period_counts_without_layer_types(name):
    changes = {"layer_types": "absent", "_sliding_window_pattern": "absent", name: 3}
    assert model_spec(hf(**changes)).config["global_layers"] == [0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0]
    assert model_spec(hf(**changes | {name: 1})).config["global_layers"] == [1.0] * 7
    assert model_spec(hf(**changes | {name: "absent"})).config["global_layers"] == [0.0] * 5 + [1.0, 0.0]


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("layer_types", [SLIDING] * 6, "layer_types has 6 entries, but num_hidden_layers is 7"),
        ("layer_types", [SLIDING] * 8, "layer_types has 8 entries"),
        ("layer_types", [], "layer_types has 0 entries"),
        ("layer_types", [SLIDING] * 6 + [1], "layer_types must be a list"),
        ("layer_types", SLIDING, "layer_types must be a list"),
        ("layer_types", {"0": FULL}, "layer_types must be a list"),
        ("_sliding_window_pattern", 0, "_sliding_window_pattern"),
        ("sliding_window", 0, "sliding_window is 0"),
        ("sliding_window", None, "sliding_window is missing"),
        ("sliding_window", [512], "sliding_window is a list"),
        ("query_pre_attn_scalar", 0, "query_pre_attn_scalar"),
        ("query_pre_attn_scalar", -256, "query_pre_attn_scalar"),
        ("num_hidden_layers", 8, "layer_types has 7 entries"),
    ],
)
def test_options_that_make_no_sense(name, value, words):
    with pytest.raises(FileFormatError, match=words):
        model_spec(hf(**{name: value}))


def test_an_untied_head_is_taken():
    shapes = tensors(SMALL) | {"lm_head.weight": (262144, 640)}
    spec = model_spec(checkpoint_of(SMALL | {"tie_word_embeddings": False}, shapes))
    assert dict(spec.tensors)["head"].name == "lm_head.weight"
    assert "head" not in dict(model_spec(checkpoint_of(SMALL, shapes)).tensors)  # both are zeros here


# ---- GGUF ----

KEYS = {
    "block_count": 7, "context_length": 32768, "embedding_length": 8, "feed_forward_length": 10,
    "attention.head_count": 4, "attention.head_count_kv": 1, "attention.key_length": 6, "attention.value_length": 6,
    "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e6, "attention.sliding_window": 512,
}  # fmt: skip
GGUF_LAYER = {
    "attn_norm": (8,), "attn_q": (24, 8), "attn_k": (6, 8), "attn_v": (6, 8), "attn_output": (8, 24),
    "attn_q_norm": (6,), "attn_k_norm": (6,), "post_attention_norm": (8,), "ffn_norm": (8,), "ffn_gate": (10, 8),
    "ffn_up": (10, 8), "ffn_down": (8, 10), "post_ffw_norm": (8,),
}  # fmt: skip


def gguf(layers: int = 7, more: dict | None = None, **changes):
    shapes = {f"blk.{i}.{name}.weight": shape for i in range(layers) for name, shape in GGUF_LAYER.items()}
    shapes |= {"token_embd.weight": (11, 8), "output_norm.weight": (8,)} | (more or {})
    return gguf_checkpoint("gemma3", KEYS | {"block_count": layers} | changes, shapes)


def test_gguf_with_the_keys_of_the_270m_file():
    checkpoint = gguf()
    spec = model_spec(checkpoint)
    config = spec.config
    assert config["rope_freqs"] == base(1e6, 6) and config["local_rope_freqs"] == base(1e4, 6)
    assert config["global_layers"] == [0.0] * 5 + [1.0, 0.0] and config["window"] == [512.0]
    assert config["attn_scale"] == [6**-0.5] and config["embed_scale"] == [math.sqrt(8)]
    assert config["rope_interleaved"] == [0.0] and config["vocab"] == [11.0]
    for core, name in (("attn_post_norm", "post_attention_norm"), ("ffn_post_norm", "post_ffw_norm")):
        tensor = dict(spec.tensors)[f"layers.3.{core}"]
        assert tensor is checkpoint.tensors[f"blk.3.{name}.weight"]  # factors already


def test_gguf_pattern_by_layer_or_period():
    key = "attention.sliding_window_pattern"
    local = [True, False, True, True, False, False, True]
    found = model_spec(gguf(**{key: np.array(local)})).config["global_layers"]
    assert found == [0.0 if is_local else 1.0 for is_local in local]
    assert model_spec(gguf(**{key: 3})).config["global_layers"] == [0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    "value",
    [
        np.array([True] * 6), np.array([True] * 8), np.zeros(0, np.bool_), np.ones(7, np.int32), np.ones(7, np.float32),
        ["a"] * 7, 0, -1, True, 6.0, "6",
    ],
)  # fmt: skip
def test_gguf_pattern_of_wrong_length_or_type(value):
    with pytest.raises(FileFormatError, match=r"gemma3.attention.sliding_window_pattern"):
        model_spec(gguf(**{"attention.sliding_window_pattern": value}))


def test_gguf_scaling_holds_for_the_full_layers():
    scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "rope.freq_base_swa": 2e4}
    config = model_spec(gguf(**scaling)).config
    assert config["rope_freqs"] == base(1e6, 6, 8.0) and config["local_rope_freqs"] == base(2e4, 6)


def test_gguf_27b_scales_scores_by_its_width():
    """It has 62 layers, and its queries are scaled by dim / n_heads; all others by the head size."""
    assert model_spec(gguf(layers=62, embedding_length=8)).config["attn_scale"] == [(8 / 4) ** -0.5]
    assert model_spec(gguf(layers=61)).config["attn_scale"] == [6**-0.5]


@pytest.mark.parametrize(
    "name, value",
    [
        ("final_logit_softcapping", 30.0), ("attn_logit_softcapping", 50.0), ("rope.scaling.type", "yarn"),
        ("rope.scaling.attn_factor", 1.5), ("attention.scale", 0.1), ("rope.local.freq_base", 1e4),
        ("attention.key_length_swa", 6), ("expert_count", 4), ("attention.shared_kv_layers", 2),
    ],
)  # fmt: skip
def test_gguf_options_that_would_change_results_are_refused_by_name(name, value):
    with pytest.raises(UnsupportedError, match=f"gemma3.{name}"):
        model_spec(gguf(**{name: value}))


def test_gguf_without_a_window_is_not_run():
    """Converters leave the key out of models without local layers, which also cap their logits or use YaRN."""
    with pytest.raises(FileFormatError, match=r"gemma3.attention.sliding_window is missing"):
        model_spec(gguf(**{"attention.sliding_window": None}))


def test_gguf_tensors_that_would_not_be_used():
    for name in ("v.patch_embd.weight", "rope_freqs.weight"):
        with pytest.raises(UnsupportedError, match=f"'{name}'"):
            model_spec(gguf(more={name: (3,)}))


# ---- windows in one process ----


def test_engines_with_different_windows_do_not_disturb_each_other(tmp_path):
    """Each computes what it computes alone, also while the other one works in another thread."""
    config = json.loads((DATA / "gemma3" / "config.json").read_text())
    folders, tokens = {24: DATA / "gemma3"}, some_tokens(200)
    for window in (8, 70):
        folders[window] = tmp_path / str(window)
        folders[window].mkdir()
        (folders[window] / "config.json").write_text(json.dumps(config | {"sliding_window": window}))
        (folders[window] / "model.safetensors").symlink_to((DATA / "gemma3" / "model.safetensors").resolve())

    def engine(window: int) -> ds4.Engine:
        return ds4.Engine(folders[window], threads=1, pool_tokens=2048)

    alone = {}
    for window in folders:
        with engine(window) as one:
            alone[window] = [fresh_logits(one, tokens[:n]) for n in (20, 120, 200)]
    assert len({logits[0] for logits in alone.values()}) == 2  # 8 hides something from 20 tokens, 24 and 70 nothing
    assert len({logits[2] for logits in alone.values()}) == 3
    engines = {window: engine(window) for window in folders}
    start = {window: settled(one.ledger()) for window, one in engines.items()}
    sessions = {window: one.session() for window, one in engines.items()}
    for first in range(0, 200, 10):
        for window, session in sessions.items():
            session.eval(tokens[first : first + 10])
            if first in (10, 110, 190):
                assert session.logits.tobytes() == alone[window][(10, 110, 190).index(first)]
    found: dict[int, bytes] = {}

    def again(window: int) -> None:
        session = sessions[window]
        session.clear()
        session.eval(tokens, chunk=7)
        found[window] = session.logits.tobytes()

    workers = [threading.Thread(target=again, args=(window,)) for window in sessions]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert found == {window: logits[2] for window, logits in alone.items()}
    for window, session in sessions.items():
        session.check()
        session.close()
        assert settled(engines[window].ledger()) == start[window]
        engines[window].close()
