"""DeepSeek V4 in GGUF: a tiny file written with the `gguf` library, whose names and types follow public files, against
the same weights in the official layout."""

from __future__ import annotations

from pathlib import Path

import gguf
import make_deepseek_v4 as make
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from oracle import BACKENDS, some_tokens
from safetensors.numpy import save_file
from test_formats import random_weights

import ds4
from ds4.errors import FileFormatError, UnsupportedError
from ds4.families import deepseek_v4

# rows of 256 numbers, as the formats with blocks of 256 need them
WIDE = make.CONFIG | {
    "hidden_size": 256,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 3,
    "compress_ratios": [0, 4, 128, 0],
}
KEYS: dict[str, object] = {
    "block_count": "n_layers", "context_length": "ctx", "embedding_length": "dim", "vocab_size": "vocab",
    "attention.head_count": "n_heads", "attention.key_length": "head_dim", "attention.value_length": "head_dim",
    "attention.sliding_window": "window", "attention.q_lora_rank": "q_rank", "attention.output_lora_rank": "o_rank",
    "attention.output_group_count": "o_groups", "attention.indexer.head_count": "index_heads",
    "attention.indexer.key_length": "index_dim", "attention.indexer.top_k": "index_keep", "expert_count": "n_experts",
    "expert_used_count": "n_experts_used", "expert_feed_forward_length": "expert_ffn_dim",
    "hash_layer_count": "n_hash_layers", "rope.dimension_count": "rope_dim", "hyper_connection.count": "streams",
    "hyper_connection.sinkhorn_iterations": "mix_iterations",
}  # fmt: skip


def stacked(s: deepseek_v4.Sizes, weights: dict[str, np.ndarray], mtp: bool = False) -> dict[str, np.ndarray]:
    """The tensors by their names in GGUF, experts stacked, numbers of experts as I32."""
    found: dict[str, list[np.ndarray]] = {}
    for piece in deepseek_v4.pieces(s, mtp):
        found.setdefault(piece.gguf, []).append(weights[piece.official])
    joined = {name: parts[0] if "_exps." not in name else np.stack(parts) for name, parts in found.items()}
    return {name: a.astype(np.int32) if a.dtype == np.int64 else a for name, a in joined.items()}


def write(
    path: Path,
    s: deepseek_v4.Sizes,
    tensors: dict[str, tuple[np.ndarray, Type | None]],
    texts: dict[str, str] | None = None,
    **changed,
) -> Path:
    """`texts`: further keys; `changed`: whole numbers behind `deepseek4.` that are others than usual."""
    writer = gguf.GGUFWriter(str(path), "deepseek4")
    keys = {key: getattr(s, str(name)) for key, name in KEYS.items()}
    keys |= {"attention.head_count_kv": 1, "expert_shared_count": 1, "expert_gating_func": 4, "expert_group_count": 0}
    keys |= {"nextn_predict_layers": 1, "rope.scaling.original_context_length": 65536}
    floats = {
        "attention.layer_norm_rms_epsilon": s.norm_eps, "rope.freq_base": 10000.0, "rope.scaling.factor": 16.0,
        "attention.compress_rope_freq_base": 160000.0, "rope.scaling.yarn_beta_fast": 32.0,
        "rope.scaling.yarn_beta_slow": 1.0, "expert_weights_scale": s.route_scale,
        "hyper_connection.epsilon": s.mix_eps,
    }  # fmt: skip
    for key, value in (keys | changed).items():
        writer.add_uint32(f"deepseek4.{key}", value)
    for key, value in floats.items():
        writer.add_float32(f"deepseek4.{key}", value)
    for key, text in ({"deepseek4.rope.scaling.type": "yarn"} | (texts or {})).items():
        writer.add_string(key, text)
    writer.add_bool("deepseek4.expert_weights_norm", True)
    writer.add_array("deepseek4.attention.compress_ratios", s.ratios)
    writer.add_array("deepseek4.swiglu_clamp_exp", [s.swiglu_limit] * s.n_layers)
    writer.add_quantization_version(2)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits_of(path: Path, backend: str, want: str = "all") -> np.ndarray:
    options = {"backend": backend, "threads": 1, "kv_dtype": "f32", "pool_tokens": 4096, "mtp": want == "draft"}
    with ds4.Engine(path, **options) as engine, engine.session() as session:
        return session.eval(some_tokens(150), logits=want)


@pytest.fixture(scope="module")
def model():
    s = make.sizes(WIDE)
    return s, make.weights(s)


@pytest.mark.parametrize("backend", BACKENDS)
def test_f32_has_the_bits_of_the_official_layout(model, tmp_path, backend):
    s, weights = model
    path = write(tmp_path / "f32.gguf", s, {name: (data, None) for name, data in stacked(s, weights).items()})
    assert logits_of(path, backend).tobytes() == logits_of(make.write(tmp_path / "folder", WIDE), backend).tobytes()


def test_the_mtp_block_in_the_same_file(model, tmp_path):
    s, weights = model
    path = write(tmp_path / "f32.gguf", s, {n: (data, None) for n, data in stacked(s, weights, mtp=True).items()})
    folder = make.write(tmp_path / "folder", WIDE)
    for want in ("draft", "all"):
        assert logits_of(path, "cpu", want).tobytes() == logits_of(folder, "cpu", want).tobytes()


MIXES = {  # the experts of gate and up, and of down, as public files have them
    "iq2_xxs": ("IQ2_XXS", "Q2_K"),
    "q4_k": ("Q4_K", "Q4_K"),
    "mxfp4": ("MXFP4", "MXFP4"),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mix", MIXES)
def test_quantised_files_agree_as_their_formats_allow(model, tmp_path, backend, mix):
    """Random blocks of each format; the official layout gets the numbers that the `gguf` library reads in them. MXFP4
    products take float activations, so only Q8_0 and the K formats may differ, by the rounding of activations."""
    s, weights = model
    tensors: dict[str, tuple[np.ndarray, Type | None]] = {}
    plain = dict(weights)
    for name, data in stacked(s, weights).items():
        kind = None
        if "_exps." in name:
            kind = MIXES[mix][1 if "down" in name else 0]
            raw = np.stack([blocks_of(kind, data[e], seed=e) for e in range(s.n_experts)])
        elif data.ndim == 2 and mix != "mxfp4" and data.shape[1] % 32 == 0 and ".attn_" in name and "ape" not in name:
            kind = "Q8_0"
            raw = gguf.quantize(data, Type.Q8_0)
        tensors[name] = (data, None) if kind is None else (raw, Type[kind])
        if kind is not None:
            put_back(plain, s, name, gguf.dequantize(raw, Type[kind]).reshape(data.shape).astype(np.float32))
    path = write(tmp_path / "mix.gguf", s, tensors)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_bytes((make.write(tmp_path / "f", WIDE) / "config.json").read_bytes())
    save_file(plain, tmp_path / "folder" / "model.safetensors")
    got, wanted = logits_of(path, backend), logits_of(tmp_path / "folder", backend)
    if mix == "mxfp4":
        assert got.tobytes() == wanted.tobytes()
    else:
        assert 0 < np.abs(got - wanted).mean() / wanted.std() < 0.03
    assert np.isfinite(got).all()


def blocks_of(kind: str, like: np.ndarray, seed: int) -> np.ndarray:
    """Random blocks whose numbers are about as large as those of `like`."""
    raw = random_weights(kind, *like.shape, seed=seed)
    size = np.abs(gguf.dequantize(raw, Type[kind])).mean() / np.abs(like).mean()
    block = gguf.GGML_QUANT_SIZES[Type[kind]][1]
    blocks = raw.reshape(-1, block).copy()
    if kind == "MXFP4":
        blocks[:, 0] -= np.uint8(max(0, round(np.log2(size))))
        return blocks.reshape(raw.shape)
    at, n = {"Q2_K": (80, 2), "Q4_K": (0, 2)}.get(kind, (0, 1))
    scales = blocks[:, at : at + 2 * n].copy().view(np.float16)
    blocks[:, at : at + 2 * n] = (scales / np.float16(size)).astype(np.float16).view(np.uint8)
    return blocks.reshape(raw.shape)


def put_back(weights: dict[str, np.ndarray], s: deepseek_v4.Sizes, name: str, values: np.ndarray) -> None:
    for piece in deepseek_v4.pieces(s, mtp=False):
        if piece.gguf == name:
            weights[piece.official] = np.ascontiguousarray(values if piece.expert is None else values[piece.expert])


def test_what_the_family_does_not_do_is_refused_by_name(model, tmp_path):
    s, weights = model
    tensors = {name: (data, None) for name, data in stacked(s, weights).items()}
    for key, value, error in (
        ("expert_gating_func", 2, UnsupportedError), ("expert_group_count", 4, UnsupportedError),
        ("expert_used_count", 9, FileFormatError), ("attention.output_group_count", 3, FileFormatError),
        ("something_new", 1, UnsupportedError),
    ):  # fmt: skip
        path = write(tmp_path / "bad.gguf", s, tensors, **{key: value})
        with pytest.raises(error, match=f"{key.split('.')[-1]}|each token uses 9|output groups"):
            ds4.Engine(path)
