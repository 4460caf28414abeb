"""What a checkpoint means to the core: options, tensor names, RoPE frequencies, and that nothing is silently
ignored."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from corrupt import make

from ds4.errors import FileFormatError, UnsupportedError
from ds4.families import model_spec, rope, rope_options
from ds4.families.options import Options, Tensors
from ds4.files import Checkpoint, open_checkpoint, safetensors
from ds4.files import gguf as gguf_parser

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = next((p for p in (ROOT / "shared" / "reference", ROOT.parent / "shared" / "reference") if p.is_dir()), None)
needs_reference = pytest.mark.skipif(REFERENCE is None, reason="shared/reference is not beside the tree")

LAYER = ("attn_norm", "q", "k", "v", "o", "ffn_norm", "gate", "up", "down")
NAMES = {"embed", "head", "norm"} | {f"layers.0.{part}" for part in LAYER}


def hf(weights: bytes | None = None, **options) -> Checkpoint:
    """The tiny Hugging Face model with other options; the option "absent" is left out."""
    config = {key: value for key, value in (make.CONFIG | options).items() if value != "absent"}
    tensors = safetensors.parse(weights or make.hf_weights(), "m")
    return Checkpoint("m", "safetensors", config["model_type"], config, tensors)


def gguf_model(*changes, weights: bytes | None = None) -> Checkpoint:
    model = make.Gguf()
    for change in changes:
        change(model)
    return Checkpoint("m.gguf", "gguf", "llama", *gguf_parser.parse(model.bytes(), "m.gguf"))


def key(name: str, kind: int, value):
    return make.set_key(f"llama.{name}", kind, value)


def freqs(checkpoint: Checkpoint) -> list[float]:
    return model_spec(checkpoint).config["rope_freqs"]


# ---- names, shapes, options ----


def test_hf_and_gguf_give_the_same_tensors_under_the_same_names():
    one, two = model_spec(hf()), model_spec(gguf_model())
    assert one.arch == two.arch == "llama"
    assert {name for name, _ in one.tensors} == {name for name, _ in two.tensors} == NAMES
    ours = dict(two.tensors)
    for name, tensor in one.tensors:
        assert tensor.shape == ours[name].shape and bytes(tensor.data) == bytes(ours[name].data), name
    expected = {
        "n_layers": [1.0], "dim": [2.0], "n_heads": [1.0], "n_kv_heads": [1.0], "head_dim": [2.0], "ffn_dim": [2.0],
        "vocab": [4.0], "ctx": [64.0], "norm_eps": [1e-5], "rope_interleaved": [0.0], "rope_freqs": [1.0],
        "rope_scale": [1.0],
    }  # fmt: skip
    assert one.config == expected
    eps = float(np.float32(1e-5))  # GGUF keeps it in 32 bits
    assert two.config == expected | {"norm_eps": [eps], "rope_interleaved": [1.0]}
    assert all(type(v) is float for values in two.config.values() for v in values)


def test_shapes_with_grouped_heads(tmp_path):
    """4 heads of 6 on 2 key/value heads, 10 wide: every product differs, so that no two can be mixed up."""
    dim, heads, kv, head, ffn, vocab = 10, 4, 2, 6, 14, 11
    shapes = {
        "token_embd": (vocab, dim), "output_norm": (dim,), "blk.0.attn_norm": (dim,),
        "blk.0.attn_q": (heads * head, dim),
        "blk.0.attn_k": (kv * head, dim), "blk.0.attn_v": (kv * head, dim), "blk.0.attn_output": (dim, heads * head),
        "blk.0.ffn_norm": (dim,), "blk.0.ffn_gate": (ffn, dim), "blk.0.ffn_up": (ffn, dim),
        "blk.0.ffn_down": (dim, ffn),
    }  # fmt: skip
    path = str(tmp_path / "m.gguf")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(99)
    writer.add_embedding_length(dim)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(5e5)
    writer.add_vocab_size(vocab)
    for i, (name, shape) in enumerate(shapes.items()):
        writer.add_tensor(f"{name}.weight", np.full(shape, i, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with open_checkpoint(path) as checkpoint:
        spec = model_spec(checkpoint)
        core = ["embed", "norm", *(f"layers.0.{part}" for part in LAYER)]  # no head: tied
        assert [name for name, _ in spec.tensors] == core
        for i, ((name, tensor), shape) in enumerate(zip(spec.tensors, shapes.values(), strict=True)):
            assert tensor.shape == shape and set(np.frombuffer(tensor.data, "<f4")) == {i}, name
        assert spec.config["n_kv_heads"] == [2.0] and spec.config["head_dim"] == [6.0]
        assert spec.config["rope_freqs"] == pytest.approx([5e5 ** (-2 * i / 6) for i in range(3)], rel=1e-15)


def test_tied_head():
    without = make.hf_weights(lambda name: name != "lm_head.weight")
    assert "head" not in dict(model_spec(hf(without, tie_word_embeddings=True)).tensors)
    with pytest.raises(FileFormatError, match="there is no tensor 'lm_head.weight'"):
        model_spec(hf(without))
    embed = bytes(safetensors.parse(make.hf_weights(), "m")["model.embed_tokens.weight"].data)
    twice = bytearray(make.hf_weights())
    at = 8 + int.from_bytes(twice[:8], "little")
    assert twice[at : at + 32] == embed  # the first tensor; the head is the second
    twice[at + 32 : at + 64] = embed
    assert "head" not in dict(model_spec(hf(bytes(twice), tie_word_embeddings=True)).tensors)
    with pytest.raises(FileFormatError, match="ties lm_head.weight"):
        model_spec(hf(tie_word_embeddings=True))
    assert "head" in dict(model_spec(hf()).tensors)

    def drop(model):
        model.entries.pop("output.weight")

    assert "head" not in dict(model_spec(gguf_model(drop)).tensors)


@pytest.mark.parametrize(
    "name, value",
    [
        ("sliding_window", 4096), ("hidden_act", "gelu"), ("attention_bias", True), ("mlp_bias", True),
        ("logit_scale", 2.0), ("num_local_experts", 8), ("quantization_config", {"bits": 4}), ("auto_map", {}),
        ("use_qk_norm", True),
        ("rope_interleaved", True), ("partial_rotary_factor", 0.5), ("architectures", ["LlamaModel"]),
        ("invented_option", False), ("layer_types", ["full_attention", "sliding_attention"]),
        ("attention_multiplier", 0.1),
    ],
)  # fmt: skip
def test_hf_options_that_would_change_results_are_refused_by_name(name, value):
    with pytest.raises(UnsupportedError, match=f"m/config.json.*{name}"):
        model_spec(hf(**{name: value}))


@pytest.mark.parametrize(
    "name, value",
    [
        ("sliding_window", None), ("attention_bias", False), ("hidden_act", "swish"), ("use_cache", True),
        ("torch_dtype", "bfloat16"), ("pretraining_tp", 4), ("rope_interleaved", False), ("is_llama_config", True),
        ("layer_types", ["full_attention"]), ("transformers.js_config", {"kv_cache_dtype": {}}), ("top_p", 0.9),
        ("architectures", "absent"),
        ("auto_map", None), ("rope_scaling", None), ("eos_token_id", [1, 2]), ("partial_rotary_factor", 1.0),
    ],
)  # fmt: skip
def test_hf_options_that_change_nothing_are_accepted(name, value):
    assert model_spec(hf(**{name: value})).config == model_spec(hf()).config


@pytest.mark.parametrize(
    "name, kind, value",
    [
        ("attention.sliding_window", make.U32, 512), ("logit_scale", make.F32, 1.0), ("expert_count", make.U32, 2),
        ("attention.scale", make.F32, 0.1), ("rope.scaling.yarn_log_multiplier", make.F32, 0.1),
        ("attention.causal", make.BOOL, 0),
        ("attention.value_length", make.U32, 4), ("rope.dimension_count", make.U32, 1), ("invented", make.STRING, "x"),
        ("rope.scaling.yarn_ext_factor", make.F32, 0.5), ("tensor_data_layout", make.STRING, "other"),
        ("block_count", make.ARRAY, (make.U32, [1])),
    ],
)  # fmt: skip
def test_gguf_options_that_would_change_results_are_refused_by_name(name, kind, value):
    with pytest.raises(UnsupportedError, match=f"m.gguf.*llama.{name}"):
        model_spec(gguf_model(key(name, kind, value)))


def test_gguf_keys_that_change_nothing_are_accepted():
    plain = model_spec(gguf_model())
    changes = [
        key("expert_count", make.U32, 0), key("rope.dimension_count", make.U32, 2), key("vocab_size", make.U32, 4),
        key("rope.scaling.finetuned", make.BOOL, 1), key("attention.causal", make.BOOL, 1),
        make.set_key("general.type", make.STRING, "model"), make.set_key("general.name", make.STRING, "x"),
        make.set_key("quantize.imatrix.file", make.STRING, "x"), make.set_key("somebody.note", make.U32, 5),
    ]  # fmt: skip
    assert model_spec(gguf_model(*changes)).config == plain.config


def test_kinds_of_gguf_files_that_are_no_model():
    with pytest.raises(UnsupportedError, match=r"general.type is 'mmproj'"):
        model_spec(gguf_model(make.set_key("general.type", make.STRING, "mmproj")))
    with pytest.raises(UnsupportedError, match="is an adapter"):
        model_spec(gguf_model(make.set_key("adapter.type", make.STRING, "lora")))


def test_unknown_architecture_lists_the_known_ones():
    with pytest.raises(
        UnsupportedError, match="'qwen9'.*this version runs deepseek_v4, gemma3, gemma3_text, llama, mistral"
    ):
        model_spec(hf(model_type="qwen9"))


def test_leftover_tensors_are_refused():
    more = make.with_more("blk.0.attn_q.bias", [2])
    with pytest.raises(UnsupportedError, match="1 tensor.*'blk.0.attn_q.bias'"):
        model_spec(gguf_model(more))
    with pytest.raises(UnsupportedError, match=r"more layers than its options say"):
        model_spec(gguf_model(make.with_more("blk.1.attn_norm.weight", [2])))


def test_formats_that_are_not_computed_with_are_named():
    def iq1_s(model):
        make.with_more("blk.0.ffn_up.weight", [256], 19)(model)

    with pytest.raises(UnsupportedError, match="'blk.0.ffn_up.weight' is stored as IQ1_S"):
        model_spec(gguf_model(iq1_s))
    header = {"model.embed_tokens.weight": {"dtype": "F8_E4M3", "shape": [4, 2], "data_offsets": [0, 8]}}
    with pytest.raises(UnsupportedError, match="'model.embed_tokens.weight' is stored as F8_E4M3"):
        model_spec(hf(make.container(header, bytes(8))))


def test_tensors_at_odd_bytes_reach_the_core_aligned():
    whole = make.hf_weights()
    size = int.from_bytes(whole[:8], "little")
    for pad in range(1, 4):
        header = whole[8 : 8 + size] + b" " * pad
        checkpoint = hf(struct.pack("<Q", len(header)) + header + whole[8 + size :])
        straight = dict(model_spec(hf()).tensors)
        addresses = set()
        for name, tensor in model_spec(checkpoint).tensors:
            assert np.frombuffer(tensor.data, np.uint8).ctypes.data % 4 == 0
            assert tensor.data.readonly and bytes(tensor.data) == bytes(straight[name].data)
            addresses.add(np.frombuffer(checkpoint.tensors["lm_head.weight"].data, np.uint8).ctypes.data % 4)
        assert addresses, pad


# ---- RoPE, the formulas written out a second time ----


def hf_yarn(dim, base, factor, original, fast=32.0, slow=1.0, truncate=True):
    """As transformers writes it: two frequency tables, blended by a ramp over the pair's index."""

    def correction(rotations):
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = correction(fast), correction(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    out = []
    for i in range(dim // 2):
        extrapolation = 1 / base ** (2 * i / dim)
        interpolation = 1 / (factor * base ** (2 * i / dim))
        keep = 1 - min(max((i - low) / (high - low), 0), 1)
        out.append(interpolation * (1 - keep) + extrapolation * keep)
    return out


def hf_llama3(dim, base, factor, low_factor, high_factor, original):
    """As transformers writes it: by wavelength."""
    out = []
    for i in range(dim // 2):
        freq = 1 / base ** (2 * i / dim)
        wave = 2 * math.pi / freq
        if wave < original / high_factor:
            out.append(freq)
        elif wave > original / low_factor:
            out.append(freq / factor)
        else:
            smooth = (original / wave - low_factor) / (high_factor - low_factor)
            out.append((1 - smooth) * freq / factor + smooth * freq)
    return out


def rope_of(**options) -> tuple[list[float], float]:
    """The frequencies and the factor for a head of 64, through the whole reader."""
    return rope_options.from_hf(Options(options, "m"), 64, options.pop("max_position_embeddings", 8192))


def test_plain_frequencies():
    expected = [1 / 500000.0 ** (2 * i / 64) for i in range(32)]
    assert rope_of(rope_theta=500000.0) == (pytest.approx(expected, rel=1e-14), 1.0)
    assert rope_of(rope_parameters={"rope_type": "default", "rope_theta": 500000.0})[0] == pytest.approx(
        expected, rel=1e-14
    )
    assert rope_of() == (pytest.approx([10000.0 ** (-2 * i / 64) for i in range(32)], rel=1e-14), 1.0)


def test_linear_frequencies():
    for options in (
        {"rope_scaling": {"type": "linear", "factor": 2.5}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 10000.0}, "rope_theta": 10000.0},
    ):
        found, scale = rope_of(**options)
        assert found == pytest.approx([10000.0 ** (-2 * i / 64) / 2.5 for i in range(32)], rel=1e-14) and scale == 1.0


@pytest.mark.parametrize(
    "factor, low, high, original, base", [(8, 1, 4, 8192, 5e5), (32, 1, 4, 8192, 5e5), (3, 0.5, 7, 300, 1e4)]
)
def test_llama3_frequencies(factor, low, high, original, base):
    scaling = {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }  # fmt: skip
    found, scale = rope_of(rope_scaling=scaling, rope_theta=base)
    expected = hf_llama3(64, base, factor, low, high, original)
    assert found == pytest.approx(expected, rel=1e-12) and scale == 1.0
    kept = [f == pytest.approx(base ** (-2 * i / 64)) for i, f in enumerate(found)]
    slowed = [f == pytest.approx(base ** (-2 * i / 64) / factor) for i, f in enumerate(found)]
    assert (
        kept[0] and slowed[-1] and not all(k or s for k, s in zip(kept, slowed, strict=True))
    )  # all three bands are met


@pytest.mark.parametrize(
    "factor, original, more",
    [
        (4.0, 2048, {}),
        (40.0, 4096, {"beta_fast": 32, "beta_slow": 1}),
        (8.0, 4096, {"beta_fast": 16.0, "beta_slow": 2.0}),
        (4.0, 2048, {"truncate": False}),
        (16.0, 512, {"truncate": True, "beta_fast": 8}),
        (2.0, 6, {}),
        (4.0, 1_000_000, {}),
        (1.0, 2048, {}),
    ],
)
@pytest.mark.parametrize("base", [10000.0, 500000.0])
def test_yarn_frequencies(factor, original, more, base):
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **more}
    found, scale = rope_of(rope_scaling=scaling, rope_theta=base)
    expected = hf_yarn(
        64, base, factor, original, more.get("beta_fast", 32), more.get("beta_slow", 1), more.get("truncate", True)
    )
    assert found == pytest.approx(expected, rel=1e-12)
    assert scale == pytest.approx(0.1 * math.log(factor) + 1 if factor > 1 else 1.0, rel=1e-15)


def test_yarn_numbers_by_hand():
    """Head 8, base 10000, original 100: pair 0 turns 15.9 times, pair 1 1.59, pair 2 0.159. Range
    floor(-0.302)..ceil(1.2)."""
    low = 8 * math.log(100 / (32 * 2 * math.pi)) / (2 * math.log(10000))
    high = 8 * math.log(100 / (2 * math.pi)) / (2 * math.log(10000))
    assert (low, high) == (pytest.approx(-0.3033, abs=1e-4), pytest.approx(1.2018, abs=1e-4))
    found = rope.yarn(rope.plain(8, 10000.0), 10000.0, 4.0, 100)
    # ramp 0, 1/2, 1, 1 over the pairs: kept, half and half, a quarter, a quarter
    assert found == pytest.approx([1.0, 0.1 * (0.5 + 0.5 / 4), 0.01 / 4, 0.001 / 4], rel=1e-14)


@pytest.mark.parametrize(
    "more, expected",
    [
        ({}, 0.1 * math.log(4) + 1),
        ({"attention_factor": 1.25}, 1.25),
        ({"mscale": 1.0, "mscale_all_dim": 0.5}, (0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1)),
        ({"mscale": 0.707, "mscale_all_dim": 0.707}, 1.0),
        ({"mscale": 2.0, "mscale_all_dim": 0.0}, 0.1 * math.log(4) + 1),
        ({"mscale": 2.0}, 0.1 * math.log(4) + 1),
        ({"mscale": 1.0, "mscale_all_dim": 0.5, "attention_factor": 0.9}, 0.9),
        ({"factor": None, "original_max_position_embeddings": 1024}, 0.1 * math.log(8) + 1),
    ],
)
def test_yarn_attention_factor(more, expected):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048, **more}
    assert rope_of(rope_scaling=scaling)[1] == pytest.approx(expected, rel=1e-14)


def test_original_context_comes_from_the_outer_key_then_the_inner_then_the_model():
    scaling = {"rope_type": "yarn", "factor": 4.0}
    inner = scaling | {"original_max_position_embeddings": 2048}
    assert rope_of(rope_scaling=scaling)[0] == pytest.approx(hf_yarn(64, 1e4, 4.0, 8192), rel=1e-12)
    assert rope_of(rope_scaling=inner)[0] == pytest.approx(hf_yarn(64, 1e4, 4.0, 2048), rel=1e-12)
    both = rope_of(rope_scaling=inner, original_max_position_embeddings=512)
    assert both[0] == pytest.approx(hf_yarn(64, 1e4, 4.0, 512), rel=1e-12)


def ggml_yarn(dim, base, factor, original, divisors, fast=32.0, slow=1.0):
    """As ggml computes an angle: extrapolated and interpolated, mixed by a ramp that falls with the pair's index."""

    def correction(rotations):
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    start, end = max(0, math.floor(correction(fast))), min(dim - 1, math.ceil(correction(slow)))
    out = []
    for i in range(dim // 2):
        extrapolated = base ** (-2 * i / dim) / divisors[i]
        mix = 1 - min(1, max(0, (i - start) / max(0.001, end - start)))
        out.append(extrapolated / factor * (1 - mix) + extrapolated * mix)
    return out


def gguf_rope(head_dim: int, *changes, divisors=None) -> tuple[list[float], float]:
    model = make.Gguf()
    for change in changes:
        change(model)
    if divisors is not None:
        model.entries["rope_freqs.weight"] = make.entry("rope_freqs.weight", [head_dim // 2], 0, len(model.data))
        model.data += np.array(divisors, "<f4").tobytes()
    metadata, tensors = gguf_parser.parse(model.bytes(), "m.gguf")
    checkpoint = Checkpoint("m.gguf", "gguf", "llama", metadata, tensors)
    factors = rope_options.gguf_factors(Tensors(checkpoint), head_dim)
    return rope_options.from_gguf(Options(metadata, "m.gguf", "llama."), head_dim, 2048, factors)


def test_gguf_rope():
    plain = [10000.0 ** (-2 * i / 32) for i in range(16)]
    assert gguf_rope(32) == (pytest.approx(plain, rel=1e-14), 1.0)
    base = key("rope.freq_base", make.F32, 100000.0)
    assert gguf_rope(32, base)[0] == pytest.approx([1e5 ** (-2 * i / 32) for i in range(16)], rel=1e-14)
    factor = key("rope.scaling.factor", make.F32, 4.0)
    for more in ((), (key("rope.scaling.type", make.STRING, "linear"),)):
        assert gguf_rope(32, factor, *more)[0] == pytest.approx([f / 4 for f in plain], rel=1e-14)
    assert gguf_rope(32, key("rope.scale_linear", make.F32, 2.0))[0] == pytest.approx([f / 2 for f in plain], rel=1e-14)
    none = key("rope.scaling.type", make.STRING, "none")
    assert gguf_rope(32, factor, none)[0] == pytest.approx(plain, rel=1e-14)
    assert gguf_rope(32, key("rope.scaling.attn_factor", make.F32, 1.5))[1] == 1.5


@pytest.mark.parametrize("original", [None, 256])
@pytest.mark.parametrize("beta", [None, (16.0, 2.0)])
def test_gguf_yarn(original, beta):
    divisors = [1 + 0.25 * i for i in range(16)]
    changes = [key("rope.scaling.type", make.STRING, "yarn"), key("rope.scaling.factor", make.F32, 4.0)]
    changes.append(key("rope.scaling.attn_factor", make.F32, 0.5))
    if original:
        changes.append(key("rope.scaling.original_context_length", make.U32, original))
    if beta:
        changes.append(key("rope.scaling.yarn_beta_fast", make.F32, beta[0]))
        changes.append(key("rope.scaling.yarn_beta_slow", make.F32, beta[1]))
    found, scale = gguf_rope(32, *changes, divisors=divisors)
    assert found == pytest.approx(ggml_yarn(32, 1e4, 4.0, original or 2048, divisors, *(beta or ())), rel=1e-12)
    assert scale == pytest.approx(0.5 * (1 + 0.1 * math.log(4)), rel=1e-14)


def test_llama3_scaling_through_gguf_divisors_is_the_same():
    """Converters write Llama 3's scaling as a tensor of divisors; both ways must give the same frequencies."""
    plain = [5e5 ** (-2 * i / 64) for i in range(32)]
    scaled = hf_llama3(64, 5e5, 8.0, 1.0, 4.0, 8192)
    divisors = [a / b for a, b in zip(plain, scaled, strict=True)]
    found, _ = gguf_rope(64, key("rope.freq_base", make.F32, 5e5), divisors=divisors)
    assert found == pytest.approx(scaled, rel=1e-7)  # the tensor has 32 bits
    straight, _ = rope_of(
        rope_theta=5e5,
        rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    )
    assert found == pytest.approx(straight, rel=1e-7)


# ---- fingerprint (K9) ----


def fingerprint(checkpoint: Checkpoint) -> bytes:
    return checkpoint.fingerprint(model_spec(checkpoint))


def test_fingerprint_is_stable_and_names_the_weights():
    first = fingerprint(hf())
    assert len(first) == 32 and first == fingerprint(hf())
    # what does not change results does not change it
    assert first == fingerprint(hf(torch_dtype="float16", bos_token_id=7))
    assert first == fingerprint(hf(head_dim=2))
    # what changes results does
    others = [
        fingerprint(hf(rms_norm_eps=1e-6)),
        fingerprint(hf(max_position_embeddings=128)),
        fingerprint(hf(rope_scaling={"type": "linear", "factor": 2.0})),
        fingerprint(gguf_model()),
    ]
    assert len({first, *others}) == 5


def test_fingerprint_sees_every_byte_of_small_tensors():
    whole = make.hf_weights()
    begin = 8 + int.from_bytes(whole[:8], "little")
    prints = {fingerprint(hf(whole))}
    for at in range(begin, len(whole)):
        prints.add(fingerprint(hf(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])))
    assert len(prints) == 1 + len(whole) - begin


def test_fingerprint_sees_the_format():
    """The same bytes read as F16 and as BF16 are two models."""
    whole = make.hf_weights()
    prints = set()
    for dtype in (b"F16", b"BF16"):
        header = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")].replace(b"F32", dtype))
        for entry in header.values():
            entry["data_offsets"] = [n // 2 for n in entry["data_offsets"]]
        size = max(entry["data_offsets"][1] for entry in header.values())
        prints.add(fingerprint(hf(make.container(header, bytes(size)))))
    assert len(prints) == 2


def test_fingerprint_samples_the_first_middle_and_last_64_kb():
    """A tensor of 512 KB: changes in the three samples are seen, elsewhere not (that is the price of a fast start)."""
    vocab = 65536

    def model(change_at=None):
        names = {"model.embed_tokens.weight": [vocab, 2]}
        embed = bytearray(8 * vocab)
        if change_at is not None:
            embed[change_at] = 1
        small = make.hf_weights(lambda name: name not in ("model.embed_tokens.weight", "lm_head.weight"))
        size = int.from_bytes(small[:8], "little")
        header = json.loads(small[8 : 8 + size])
        end = len(small) - 8 - size
        header |= {
            name: {"dtype": "F32", "shape": shape, "data_offsets": [end, end + len(embed)]}
            for name, shape in names.items()
        }
        weights = make.container(header, small[8 + size :] + bytes(embed))
        return fingerprint(hf(weights, vocab_size=vocab, tie_word_embeddings=True))

    plain, kb, whole = model(), 1024, 512 * 1024
    for at in (0, 64 * kb - 1, whole // 2 - 32 * kb, whole // 2 + 32 * kb - 1, whole - 64 * kb, whole - 1):
        assert model(at) != plain, at
    for at in (64 * kb, whole // 2 - 32 * kb - 1, whole // 2 + 32 * kb, whole - 64 * kb - 1):
        assert model(at) == plain, at


# ---- real models ----


@needs_reference
@pytest.mark.parametrize("name, tied, head_dim", [("llama", False, 8), ("llama3rope", True, 16)])
def test_reference_models(name, tied, head_dim):
    with open_checkpoint(REFERENCE / name) as checkpoint:
        spec = model_spec(checkpoint)
        assert ("head" not in dict(spec.tensors)) is tied
        assert spec.config["head_dim"] == [float(head_dim)] and spec.config["n_layers"] == [3.0]
        assert dict(spec.tensors)["layers.2.q"].shape == (8 * head_dim, 64)
        expected = [10000.0 ** (-2 * i / 8) for i in range(4)] if not tied else hf_llama3(16, 5e5, 8.0, 1.0, 4.0, 64)
        assert spec.config["rope_freqs"] == pytest.approx(expected, rel=1e-12)


@needs_reference
def test_other_families_are_refused_by_name():
    with pytest.raises(UnsupportedError, match="DeepSeek V4.1 .*'deepseek_v41'"):
        model_spec(hf(model_type="deepseek_v41"))


@pytest.mark.model
def test_smollm2(smollm2):
    with open_checkpoint(smollm2) as checkpoint:
        spec = model_spec(checkpoint)
        assert len(spec.tensors) == 272 and "head" not in dict(spec.tensors)
        expected = {
            "n_layers": 30, "dim": 576, "n_heads": 9, "n_kv_heads": 3, "head_dim": 64, "ffn_dim": 1536, "vocab": 49152,
            "ctx": 8192, "rope_interleaved": 1, "rope_scale": 1,
        }  # fmt: skip
        assert {name: spec.config[name] for name in expected} == {name: [float(v)] for name, v in expected.items()}
        assert spec.config["rope_freqs"] == pytest.approx([1e5 ** (-2 * i / 64) for i in range(32)], rel=1e-14)
        assert len(checkpoint.fingerprint(spec)) == 32
