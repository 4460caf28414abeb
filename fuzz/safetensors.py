"""Fuzzes the safetensors container."""

import sys
from pathlib import Path

# this file's own folder must not stand first: it would hide the packages `gguf` and `safetensors`
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from ds4.files import safetensors  # noqa: E402
from fuzz import common  # noqa: E402
from tests.corrupt import make  # noqa: E402


def target(data: bytes) -> None:
    for tensor in safetensors.parse(data, "x.safetensors").values():
        bytes(tensor.data)


def seeds() -> list[bytes]:
    mixed = {
        "__metadata__": {"format": "pt"},
        "none": {"dtype": "I64", "shape": [0, 3], "data_offsets": [0, 0]},
        "one": {"dtype": "BOOL", "shape": [], "data_offsets": [0, 1]},
        "half": {"dtype": "BF16", "shape": [1, 2], "data_offsets": [1, 5]},
        "nibbles": {"dtype": "F4", "shape": [6], "data_offsets": [5, 8]},
    }
    return [make.hf_weights(), make.container(mixed, bytes(8)), make.EMPTY]


if __name__ == "__main__":
    common.main("safetensors", target, seeds())
