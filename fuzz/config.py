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
from tests.corrupt import make  # noqa: E402

TENSORS = safetensors.parse(make.hf_weights(), "model.safetensors")


def target(data: bytes) -> None:
    checkpoint = Checkpoint("x", "safetensors", "llama", parse_object(data, "x/config.json"), TENSORS)
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
    ]
    return [json.dumps(config).encode() for config in configs]


if __name__ == "__main__":
    common.main("config", target, seeds())
