"""Models of random weights for `ds4 bench synthetic`: files in the official layout of DeepSeek V4, FP8 dense weights
and packed FP4 experts, written in a temporary folder.

`v4-layer` has the widths and the experts of V4 Flash, one layer at a time: a whole model would be 160 GB. `v4-tiny` has
every kind of layer in one small model.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ds4 import models
from ds4.errors import SystemResourceError
from ds4.families import deepseek_v4 as v4
from ds4.families.options import Options
from ds4.memory import usable_memory

FLASH = "deepseek-v4-flash"
VOCAB = 512  # the embedding and the head are no layers
MOST_MEMORY = 5 << 30  # for the files of a model, which become its memory
_ALIGN = 64
_POOL = 1 << 25

# rms of FP8 numbers and FP4 numbers whose codes are all as likely
_RMS = {"FP8": 110.0, "FP4": 2.93}
_ONE = 127  # E8M0: the scale 1
_TINY: dict[str, Any] = {
    "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 64, "qk_rope_head_dim": 16,
    "q_lora_rank": 64, "o_groups": 2, "o_lora_rank": 128, "moe_intermediate_size": 64, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "num_hash_layers": 1, "sliding_window": 16, "index_n_heads": 4, "index_head_dim": 32,
    "index_topk": 8, "compress_ratios": [0, 4, 128],
}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """One model to be written: what its layers are, and the options of its config.json."""

    label: str
    config: dict[str, Any]

    @property
    def sizes(self) -> v4.Sizes:
        return v4.sizes_of(Options(json.loads(json.dumps(self.config)), "config.json"))

    @property
    def bytes(self) -> int:
        """All its tensors."""
        return sum(v4.stored_bytes(piece)[1] for piece in v4.pieces(self.sizes, mtp=False))


def kinds(name: str, experts: int | None = None) -> list[Kind]:
    """The models of `v4-tiny` or `v4-layer`; `experts`: other than the real number."""
    real = dict(models.load(FLASH).config) | {"vocab_size": VOCAB, "num_nextn_predict_layers": 0}
    if name == "v4-tiny":
        return [Kind("all kinds", real | _TINY)]
    one = real | {"num_hidden_layers": 1} | ({"n_routed_experts": experts} if experts else {})
    return [
        Kind("window only, experts by token", one | {"compress_ratios": [0], "num_hash_layers": 1}),
        Kind("rows of 4, indexer", one | {"compress_ratios": [4], "num_hash_layers": 0}),
        Kind("rows of 128", one | {"compress_ratios": [128], "num_hash_layers": 0}),
    ]


def kinds_that_fit(name: str, folder: Path, memory: int | None = None) -> list[Kind]:
    """The models, with fewer experts where the machine has no room for all. Raises SystemResourceError."""
    memory = usable_memory() * 3 // 4 if memory is None else memory
    room = min(MOST_MEMORY, memory, shutil.disk_usage(folder).free * 9 // 10)
    found = kinds(name)
    experts = found[0].sizes.n_experts
    while max(kind.bytes for kind in found) > room:
        experts //= 2
        if name == "v4-tiny" or experts < 2 * found[0].sizes.n_experts_used:
            raise SystemResourceError(f"{folder}: there is no room for a layer, neither on disk nor in memory")
        found = kinds(name, experts)
    return found


class Writer:
    """Writes the models into one folder. All kinds share the file of the experts, which is nearly all of their bytes.
    `report(done, total)` is given the bytes written."""

    def __init__(self, folder: Path, found: Sequence[Kind], report: Callable[[int, int], object]) -> None:
        self.folder, self.kinds, self.report = folder, found, report
        self.numbers = _Numbers()
        self.done = 0
        dense = [[p for p in v4.pieces(k.sizes, mtp=False) if p.expert is None] for k in found]
        experts = [p for p in v4.pieces(found[0].sizes, mtp=False) if p.expert is not None]
        self.total = sum(v4.stored_bytes(p)[1] for pieces in (experts, *dense) for p in pieces)
        self.dense, self.experts = dense, experts

    def write(self) -> list[Path]:
        shared = self.folder / "experts.safetensors"
        names = self._shard(shared, self.kinds[0].sizes, self.experts)
        return [self._model(i, shared, names) for i in range(len(self.kinds))]

    def _model(self, i: int, shared: Path, names: list[str]) -> Path:
        kind, folder = self.kinds[i], self.folder / str(i)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(kind.config), encoding="utf-8")
        (folder / shared.name).symlink_to(shared.resolve())
        own = self._shard(folder / "layers.safetensors", kind.sizes, self.dense[i])
        shards = dict.fromkeys(names, shared.name) | dict.fromkeys(own, "layers.safetensors")
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": shards}), encoding="utf-8")
        return folder

    def _shard(self, path: Path, s: v4.Sizes, pieces: Sequence[v4.Piece]) -> list[str]:
        """Writes the tensors piece by piece, so that none but the one at hand is in memory. Returns their names."""
        header, end = {}, 0
        for piece in pieces:
            for name, dtype, shape, size in _entries(piece):
                header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
                end += size
        text = json.dumps(header).encode()
        text += b" " * (-(8 + len(text)) % _ALIGN)
        with open(path, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for piece in pieces:
                for data in self.numbers.of(s, piece):
                    file.write(np.ascontiguousarray(data).data)
                    self.done += data.nbytes
                self.report(self.done, self.total)
        return list(header)


def _entries(piece: v4.Piece) -> Iterator[tuple[str, str, list[int], int]]:
    """(name, dtype, shape, bytes) of the tensors of a piece, as the official files have them."""
    if piece.stored not in _RMS:
        yield piece.official, piece.stored, list(piece.shape), v4.stored_bytes(piece)[1]
        return
    rows, cols = piece.shape
    packed = piece.stored == "FP4"
    scales = [rows, cols // v4.FP4_BLOCK] if packed else [-(-rows // v4.TILE), -(-cols // v4.TILE)]
    codes = [rows, cols // 2] if packed else [rows, cols]
    yield piece.official, "I8" if packed else "F8_E4M3", codes, math.prod(codes)
    yield piece.official.removesuffix(".weight") + ".scale", "F8_E8M0", scales, math.prod(scales)


class _Numbers:
    """Random tensors, the same ones every time. Codes are pieces of one random text: drawing gigabytes takes long, and
    the time of a product does not depend on what is multiplied."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(4)
        self.pool = np.tile(self.rng.integers(0, 256, _POOL, dtype=np.uint8), 2)

    def of(self, s: v4.Sizes, piece: v4.Piece) -> Iterator[npt.NDArray[Any]]:
        """The tensors of a piece. Matrices keep the size of what they multiply, more or less."""
        rng = self.rng
        if piece.stored in _RMS:
            (_, _, codes, _), (_, _, scales, _) = _entries(piece)
            data = self._codes(math.prod(codes))
            yield np.where(data & 127 == 127, data - 1, data) if piece.stored == "FP8" else data  # 127 is no number
            middle = _ONE - round(math.log2(_RMS[piece.stored] * math.sqrt(piece.shape[1])))
            yield self._codes(math.prod(scales)) % 3 + np.uint8(middle - 1)
        elif piece.stored == "I64":
            yield np.argsort(rng.random((piece.shape[0], s.n_experts)), axis=1)[:, : piece.shape[1]].astype("<i8")
        else:
            values = rng.random(piece.shape, np.float32) * 2 - 1
            if piece.core.endswith(("norm", "_scale")):
                values = 1 + values * np.float32(0.3)
            elif len(piece.shape) == 2 and not piece.core.endswith("_ape") and piece.core != "embed":
                values *= np.float32(math.sqrt(3 / piece.shape[1]))
            yield values if piece.stored == "F32" else (values.view(np.uint32) >> 16).astype("<u2")

    def _codes(self, n: int) -> npt.NDArray[np.uint8]:
        first = int(self.rng.integers(_POOL))
        return self.pool[first : first + n] if n <= _POOL else np.resize(self.pool, n)
