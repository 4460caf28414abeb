"""GGUF files of random weights for `ds4 bench --synthetic SHAPE:FORMAT`: a Llama of a given shape, every matrix in one
format, that ds4 and other engines read. Written block by block, without a library.

The time of a product does not depend on what is multiplied, so codes are pieces of one random text; their scales keep
the size of what a matrix multiplies, so that all logits are finite.
"""

from __future__ import annotations

import math
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from ds4.cli.options import UsageError
from ds4.errors import SystemResourceError
from ds4.files.gguf import TYPES

CTX = 131072
_ALIGN = 32
_POOL = 1 << 24  # random bytes that codes are taken from
_PIECE = 1 << 24  # bytes written at once
_NUMBER = {name: number for number, (name, _, _) in TYPES.items()}
_U32, _F32, _STRING, _ARRAY, _I32 = 4, 6, 8, 9, 5  # value types of the container


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama; the head is tied to the embedding, as in Llama 3.2 1B."""

    n_layers: int
    dim: int
    ffn: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab: int


# 1b is Llama 3.2 1B but for its vocabulary of 128256, which would be a fifth of the file
SHAPES = {
    "tiny": Shape(2, 256, 512, 4, 2, 64, 512),
    "100m": Shape(12, 768, 2048, 12, 4, 64, 32768),
    "1b": Shape(16, 2048, 8192, 32, 8, 64, 32768),
}

Blocks = npt.NDArray[np.uint8]


def _f16(values: npt.ArrayLike) -> Blocks:
    return np.asarray(values, "<f2").view(np.uint8)


# Each fills in the scales of blocks of random bytes, [blocks, bytes of one], so that weights have the deviation `std`
# and the mean 0. One scale for all: which bits the scale has is as unimportant as which bits the codes have.


def _q4_0(blocks: Blocks, std: float) -> None:
    blocks[:, :2] = _f16([std / 4.64])  # codes -8..7


def _q4_1(blocks: Blocks, std: float) -> None:
    blocks[:, :4] = _f16([std / 4.61, -7.5 * std / 4.61])


def _q8_0(blocks: Blocks, std: float) -> None:
    blocks[:, :2] = _f16([std / 73.9])


def _q4_k(blocks: Blocks, std: float) -> None:
    blocks[:, :4] = _f16([std / 257, 7.5 * std / 257])  # scales and minima of 6 bits, codes 0..15


def _q6_k(blocks: Blocks, std: float) -> None:
    blocks[:, -2:] = _f16([std / 1366])  # scales of 8 bits, codes -32..31


FILL: dict[str, Callable[[Blocks, float], None]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0, "Q4_K": _q4_k, "Q6_K": _q6_k,
}  # fmt: skip


def parse(text: str) -> tuple[Shape, str]:
    """`1b:q4_k` as a shape and a format of tensors. Raises UsageError."""
    shape, colon, name = text.partition(":")
    if shape not in SHAPES or not colon or name.upper() not in FILL:
        raise UsageError(
            f"--synthetic takes SHAPE:FORMAT such as 1b:q4_k, not {text!r}; shapes: {', '.join(SHAPES)}; formats: "
            f"{', '.join(map(str.lower, FILL))}"
        )
    return SHAPES[shape], name.upper()


@dataclass(frozen=True)
class _Entry:
    name: str
    format: str
    shape: tuple[int, ...]  # (rows, cols), or one dimension for norms

    @property
    def bytes(self) -> int:
        _, weights, size = TYPES[_NUMBER[self.format]]
        return math.prod(self.shape) // weights * size


def _entries(s: Shape, format: str) -> list[_Entry]:
    q, kv = s.n_heads * s.head_dim, s.n_kv_heads * s.head_dim
    matrices = {
        "attn_q": (q, s.dim), "attn_k": (kv, s.dim), "attn_v": (kv, s.dim), "attn_output": (s.dim, q),
        "ffn_gate": (s.ffn, s.dim), "ffn_up": (s.ffn, s.dim), "ffn_down": (s.dim, s.ffn),
    }  # fmt: skip
    found = [_Entry("token_embd.weight", format, (s.vocab, s.dim)), _Entry("output_norm.weight", "F32", (s.dim,))]
    for i in range(s.n_layers):
        found += [_Entry(f"blk.{i}.{name}.weight", "F32", (s.dim,)) for name in ("attn_norm", "ffn_norm")]
        found += [_Entry(f"blk.{i}.{name}.weight", format, shape) for name, shape in matrices.items()]
    return found


def _vocabulary(n: int) -> list[str]:
    """A byte-level vocabulary: the 256 bytes, spelled as such files spell them, and words that no text can hold."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    letters = [chr(b if b in printable else next(others)) for b in range(256)]
    return letters + [f"<|{i}|>" for i in range(256, n)]


def _keys(s: Shape, name: str) -> dict[str, Any]:
    return {
        "general.architecture": "llama",
        "general.name": f"random weights, {name}",
        "general.quantization_version": 2,
        "llama.block_count": s.n_layers,
        "llama.context_length": CTX,
        "llama.embedding_length": s.dim,
        "llama.feed_forward_length": s.ffn,
        "llama.attention.head_count": s.n_heads,
        "llama.attention.head_count_kv": s.n_kv_heads,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": s.head_dim,
        "llama.rope.freq_base": 500000.0,
        "llama.vocab_size": s.vocab,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": _vocabulary(s.vocab),
        "tokenizer.ggml.token_type": [1] * 256 + [3] * (s.vocab - 256),  # normal, control
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.eos_token_id": s.vocab - 1,
        "tokenizer.ggml.bos_token_id": s.vocab - 2,
        "tokenizer.ggml.add_bos_token": False,
    }


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    """A value with its type before it."""
    if isinstance(value, bool):
        return struct.pack("<IB", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", _U32, value)
    if isinstance(value, float):
        return struct.pack("<If", _F32, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    head = struct.pack("<IIQ", _ARRAY, _I32 if value and isinstance(value[0], int) else _STRING, len(value))
    if value and isinstance(value[0], int):
        return head + np.asarray(value, "<i4").tobytes()
    return head + b"".join(map(_text, value))


def _header(keys: dict[str, Any], entries: list[_Entry]) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(entries), len(keys))
    head += b"".join(_text(key) + _value(value) for key, value in keys.items())
    offset = 0
    for entry in entries:
        dims = entry.shape[::-1]
        head += _text(entry.name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, _NUMBER[entry.format], offset)
        offset += -(-entry.bytes // _ALIGN) * _ALIGN
    return head + bytes(-len(head) % _ALIGN)


def write(folder: Path, kind: str, report: Callable[[int, int], object]) -> Path:
    """Writes the model `kind` (SHAPE:FORMAT), the same bytes every time. `report(done, total)` is given bytes.
    Raises UsageError, and SystemResourceError when the disk has no room."""
    shape, format = parse(kind)
    entries = _entries(shape, format)
    total = sum(entry.bytes for entry in entries)
    free = shutil.disk_usage(folder).free
    if total + (64 << 20) > free:
        raise SystemResourceError(f"{folder}: {kind} takes {total} bytes and {free} are free; set TMPDIR to more room")
    path, done = folder / f"{kind.replace(':', '-')}.gguf", 0
    pool = np.random.default_rng(5).integers(0, 256, 2 * _POOL, dtype=np.uint8)
    with open(path, "wb") as file:
        file.write(_header(_keys(shape, kind), entries))
        for i, entry in enumerate(entries):
            for piece in _pieces(entry, pool, 7919 * i):
                file.write(piece.data)
                done += piece.nbytes
                report(done, total)
            _pad(file)
    return path


def _pieces(entry: _Entry, pool: Blocks, seed: int) -> Iterator[Blocks]:
    """The bytes of one tensor."""
    if entry.format == "F32":
        yield (1 + pool[: entry.shape[0]].astype("<f4") / 1024).view(np.uint8)
        return
    size, std = TYPES[_NUMBER[entry.format]][2], 1 / math.sqrt(entry.shape[-1])
    n, step, first = entry.bytes // size, _PIECE // size, seed
    for start in range(0, n, step):
        count = min(step, n - start)
        first = (first + 104729) % (_POOL - 1)
        blocks = pool[first : first + count * size].copy().reshape(count, size)
        FILL[entry.format](blocks, std)
        yield blocks


def _pad(file: IO[bytes]) -> None:
    file.write(bytes(-file.tell() % _ALIGN))
