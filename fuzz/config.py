"""Fuzzes config.json: the JSON, then what the family makes of it, with sound weights."""

import json
import sys
from pathlib import Path

# this file's own folder must not stand first: it would hide the packages `gguf` and `safetensors`
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from ds4.families import model_spec  # noqa: E402
from ds4.files import Checkpoint, safetensors  # noqa: E402
from ds4.files.jsonfile import parse_object  # noqa: E402
from fuzz import common  # noqa: E402
from tests.corrupt import deepseek_v4, families, make  # noqa: E402

WEIGHTS = {
    "llama": make.hf_weights(), "mistral": make.hf_weights(), "qwen3_moe": families.moe_weights(),
    "gemma3_text": families.gemma_weights(), "deepseek_v4": deepseek_v4.weights(),
}  # fmt: skip
TENSORS = {family: safetensors.parse(weights, "model.safetensors") for family, weights in WEIGHTS.items()}


def target(data: bytes) -> None:
    config = parse_object(data, "x/config.json")
    family = config.get("model_type")
    if not isinstance(family, str) or family not in TENSORS:
        family = "llama"
    checkpoint = Checkpoint("x", "safetensors", family, config, TENSORS[family])
    checkpoint.fingerprint(model_spec(checkpoint))


def seeds() -> list[bytes]:
    yarn = {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0,
        "mscale_all_dim": 0.5, "beta_fast": 32, "beta_slow": 1, "truncate": False, "rope_theta": 10000.0,
    }  # fmt: skip
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    more = {"attention_bias": False, "head_dim": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}
    configs = [
        make.CONFIG,
        make.CONFIG | more | {"rope_scaling": None},
        make.CONFIG | {"rope_parameters": yarn},
        make.CONFIG | {"rope_scaling": llama3},
        make.CONFIG | {"rope_scaling": {"type": "linear", "factor": 2.0}},
        make.CONFIG | {"model_type": "mistral", "architectures": None, "num_key_value_heads": 1, "sliding_window": 64},
        families.config(families.QWEN3_MOE),
        families.config(families.QWEN3_MOE, mlp_only_layers=[], decoder_sparse_step=1, layer_types=["full_attention"]),
        families.config(families.GEMMA3),
        families.config(families.GEMMA3, layer_types="absent", _sliding_window_pattern=6),
        families.config(families.GEMMA3, rope_theta="absent", rope_parameters=families.BY_LAYER),
        deepseek_v4.CONFIG,
        deepseek_v4.CONFIG | {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3"}, "dspark_block_size": 5},
    ]
    return [json.dumps(config).encode() for config in configs]


if __name__ == "__main__":
    common.main("config", target, seeds())
