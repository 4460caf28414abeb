"""What a pass over the model has to do at least: the bytes that it reads and the multiply-adds that it makes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds4.engine import Engine


def work_of(engine: Engine, depth: int, n: int, sessions: int = 1) -> tuple[float, float]:
    """(bytes read, multiply-adds) of `n` tokens behind `depth` others, in one pass, in each of so many sessions.

    Matrices are read once in a pass, of the experts those that so many tokens are expected to choose; an embedding
    that is no head is not counted. Only the last token needs the head. Rows: those that the last token reads.
    Multiply-adds of attention: where a layer keeps a row for every position.
    """
    config, names = engine.spec.config, {name for name, _ in engine.spec.tensors}
    used = config["n_experts_used"][0] / config["n_experts"][0] if config.get("n_experts", [0])[0] else 0.0
    chosen = 1 - (1 - used) ** (n * sessions)
    size = macs = 0.0
    for name, tensor in engine.spec.tensors:
        expert = ".experts." in name
        if name.startswith("mtp.") or (name == "embed" and "head" in names):
            continue
        size += tensor.bytes() * (chosen if expert else 1)
        if len(tensor.shape) == 2:
            times = 1 if name in ("head", "embed") else n
            macs += math.prod(tensor.shape) * times * sessions * (used if expert else 1)
    width = math.prod(config.get(key, [0])[0] for key in ("n_heads", "head_dim"))
    for stream in engine.streams:
        rows = (depth + n) // stream.stride
        size += sessions * stream.row_bytes * min(rows, stream.reach or rows)
        if stream.stride == 1:
            macs += sessions * 2 * stream.n_layers * width * keys(depth, n, stream.reach)
    return size, macs


def keys(depth: int, n: int, reach: int | None) -> int:
    """Keys that `n` tokens behind `depth` others see together, each its own included."""
    if reach is None:
        return n * depth + n * (n + 1) // 2
    return sum(min(reach, depth + i) for i in range(1, n + 1))
