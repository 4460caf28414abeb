"""Writes a GGUF file from a tiny Hugging Face folder, as converters do. Names come from the tables of the `gguf`
library, not from ours: a name that is wrong here and there would not be found otherwise."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import load_file

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA, "qwen3": gguf.MODEL_ARCH.QWEN3, "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}  # fmt: skip


def write(folder: Path, path: Path, quantize: bool = False) -> Path:
    """The folder's model as a GGUF file at `path`: F32, or Q8_0 in every matrix that is wide enough and no router."""
    config = json.loads((folder / "config.json").read_text())
    arch = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(str(path), gguf.MODEL_ARCH_NAMES[arch])
    _keys(writer, config)
    for name, values in _tensors(arch, config, load_file(folder / "model.safetensors")).items():
        if quantize and values.ndim > 1 and values.shape[-1] % 32 == 0 and "ffn_gate_inp" not in name:
            writer.add_tensor(name, gguf.quantize(values, Type.Q8_0), raw_dtype=Type.Q8_0)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _keys(writer: gguf.GGUFWriter, config: dict) -> None:
    head_dim = config["head_dim"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_quantization_version(2)
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if "num_local_experts" in config:
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config["model_type"] == "gemma3_text":
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])


def _tensors(arch: gguf.MODEL_ARCH, config: dict, held: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    n_experts, found = config.get("num_local_experts", 0), {}
    for name, values in held.items():
        if ".experts." in name:
            if ".experts.0." not in name:
                continue
            values = np.stack([held[name.replace(".experts.0.", f".experts.{e}.")] for e in range(n_experts)])
            name = name.replace(".experts.0.", ".experts.")
        if arch is gguf.MODEL_ARCH.GEMMA3 and name.endswith("norm.weight"):
            values = values + np.float32(1)
        if arch is gguf.MODEL_ARCH.LLAMA and name.endswith(("q_proj.weight", "k_proj.weight")):
            # a rotary pair's two rows beside each other
            halves = values.reshape(-1, 2, config["head_dim"] // 2, values.shape[1])
            values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
        found[names.get_name(name, try_suffixes=(".weight",))] = values
    return found
