"""Checkpoints that have names and shapes but hardly any bytes: what a family makes of the options of large models."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ds4.files import Checkpoint, Tensor

SMALL = 1 << 16  # a tensor of more elements shares one piece of memory with all others: only its shape is looked at


def _tensors(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    zeros = np.zeros(SMALL, "<f4")
    found = {}
    for i, (name, shape) in enumerate(shapes.items()):
        count = math.prod(shape)
        values = zeros if count > SMALL else np.arange(count, dtype="<f4") + np.float32(i * 1000)
        found[name] = Tensor(name, "F32", shape, memoryview(values.view(np.uint8)).toreadonly())
    return found


def checkpoint_of(config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> Checkpoint:
    """A Hugging Face folder "m" with these options and tensors."""
    return Checkpoint("m", "safetensors", config["model_type"], config, _tensors(shapes))


def gguf_checkpoint(arch: str, keys: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> Checkpoint:
    """A GGUF file "m.gguf" with these keys of its architecture (None: without the key) and tensors."""
    metadata = {f"{arch}.{key}": value for key, value in keys.items() if value is not None}
    return Checkpoint("m.gguf", "gguf", arch, {"general.architecture": arch, **metadata}, _tensors(shapes))
