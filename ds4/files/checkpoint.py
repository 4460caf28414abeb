"""A model's files as one thing: metadata and tensors, whatever the container.

`open_checkpoint` takes a .gguf file, or a folder with config.json and either model.safetensors or
model.safetensors.index.json and the shards that it names. Nothing in a checkpoint is ever run, and no name in it can
lead out of the folder (links that are in the folder are followed: download caches are made of them).
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import struct
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ds4.errors import ArgumentError, FileFormatError, SystemResourceError, UnsupportedError
from ds4.files import gguf, safetensors
from ds4.files.base import Tensor, map_file, quote
from ds4.files.jsonfile import read_object

if TYPE_CHECKING:
    from types import TracebackType

    from ds4.families import ModelSpec

MAX_CONFIG = 4 << 20
MAX_INDEX = 32 << 20
MAX_SHARDS = 4096
SAMPLE = 64 << 10  # bytes of a tensor's beginning, middle and end that the fingerprint covers

_SHARD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}\.safetensors", re.ASCII)


class Checkpoint:
    """An opened model. A context manager; `close` gives the mapping back.

    `path` as given; `kind` "gguf" or "safetensors"; `architecture` is GGUF's general.architecture or config.json's
    model_type; `metadata` the GGUF key-values or config.json; `tensors` by the names in the files.
    """

    def __init__(
        self,
        path: str,
        kind: Literal["gguf", "safetensors"],
        architecture: str,
        metadata: dict[str, Any],
        tensors: dict[str, Tensor],
        mappings: list[mmap.mmap] | None = None,
    ) -> None:
        self.path, self.kind, self.architecture = path, kind, architecture
        self.metadata, self.tensors = metadata, tensors
        self._mappings = mappings or []

    def tensor(self, name: str) -> Tensor:
        """The tensor of that name. Raises FileFormatError when the checkpoint has none."""
        try:
            return self.tensors[name]
        except KeyError:
            raise FileFormatError(
                f"{self.path}: there is no tensor {quote(name)} in this checkpoint; it is incomplete, or its options "
                "do not belong to it."
            ) from None

    def fingerprint(self, spec: ModelSpec) -> bytes:
        """32 bytes that name the weights (K9): the same for the same model, another for any other.

        SHA-256 over the architecture, every option that changes results, and of each tensor its name, format, shape,
        size and the first, middle and last 64 KB.
        """
        digest = hashlib.sha256(b"ds4 weights 1")

        def text(value: str) -> None:
            raw = value.encode("utf-8")
            digest.update(struct.pack("<Q", len(raw)) + raw)

        text(spec.arch)
        for key, values in sorted(spec.config.items()):
            text(key)
            digest.update(struct.pack(f"<Q{len(values)}d", len(values), *values))
        for name, tensor in sorted(spec.tensors, key=lambda item: item[0]):
            text(name)
            text(tensor.format)
            data, size = tensor.data, len(tensor.data)
            digest.update(struct.pack(f"<Q{len(tensor.shape)}QQ", len(tensor.shape), *tensor.shape, size))
            for begin in sorted({0, max(0, size // 2 - SAMPLE // 2), max(0, size - SAMPLE)}):
                digest.update(data[begin : begin + SAMPLE])
            if tensor.scales is not None:
                digest.update(struct.pack("<Q", len(tensor.scales)) + tensor.scales[:SAMPLE])
            self.forget(tensor)  # the samples of a model with many tensors would stay in memory
        return digest.digest()

    def forget(self, tensor: Tensor) -> None:
        """Tells the system that this tensor's bytes are not needed soon: their memory is given back, the next read
        brings them from the file again."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        for data in (tensor.data, tensor.scales):
            if data is not None:
                self._forget(data)

    def _forget(self, data: memoryview) -> None:
        begin = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
        for mapping in self._mappings:
            base = np.frombuffer(mapping, np.uint8).__array_interface__["data"][0]
            if base <= begin < base + len(mapping):
                first = -(-(begin - base) // mmap.PAGESIZE) * mmap.PAGESIZE
                size = (begin - base + len(data)) // mmap.PAGESIZE * mmap.PAGESIZE - first
                if size > 0:
                    mapping.madvise(mmap.MADV_DONTNEED, first, size)

    def close(self) -> None:
        """Gives the mapping back. Bytes that something still uses (a numpy array, an engine that borrows them) stay
        until it lets go."""
        for tensor in self.tensors.values():
            _quietly(tensor.data.release)
        for mapping in self._mappings:
            _quietly(mapping.close)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Opens a .gguf file or a safetensors folder; every length in it is checked before this returns.

    Raises FileFormatError (damaged, cut, incomplete), UnsupportedError (a version, tensor type or dtype that is not
    read), ArgumentError (no such file), SystemResourceError (the system refuses the file or memory). Each names the
    file.
    """
    name = os.fspath(path)
    if not isinstance(name, str):
        raise ArgumentError("the path of a checkpoint must be text, not bytes.")
    try:
        return _open_folder(name) if os.path.isdir(name) else _open_gguf(name)
    except MemoryError:
        raise SystemResourceError(f"{name}: there is not enough memory to read its tables.") from None


def open_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The config.json of a folder alone. Raises like `open_checkpoint`."""
    return read_object(os.path.join(os.fspath(folder), "config.json"), MAX_CONFIG)


def _open_gguf(path: str) -> Checkpoint:
    if path.endswith((".safetensors", ".safetensors.index.json", "config.json")):
        raise ArgumentError(f"{path}: give the folder that holds this file, together with config.json.")
    mapping = map_file(path)
    metadata, tensors = gguf.parse(mapping, path)
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise FileFormatError(
            f"{path}: general.architecture is {quote(architecture)}; it must be text that names the architecture."
        )
    parts = metadata.get("split.count", 0)
    if type(parts) is not int or parts > 1:
        raise UnsupportedError(
            f"{path}: is one of {quote(parts)} parts of a split GGUF; join them first (llama-gguf-split --merge)."
        )
    return Checkpoint(path, "gguf", architecture, metadata, tensors, [mapping])


def _open_folder(folder: str) -> Checkpoint:
    config_path = os.path.join(folder, "config.json")
    if not os.path.exists(config_path):
        raise FileFormatError(f"{folder}: has no config.json, so it is no model folder.{_gguf_hint(folder)}")
    config = read_object(config_path, MAX_CONFIG)
    architecture = config.get("model_type")
    if not isinstance(architecture, str):
        raise FileFormatError(
            f"{config_path}: model_type is {quote(architecture)}; it must be text that names the architecture."
        )
    single = os.path.join(folder, "model.safetensors")
    index = os.path.join(folder, "model.safetensors.index.json")
    mappings: list[mmap.mmap] = []
    if os.path.exists(single):
        mappings.append(map_file(single))
        tensors = safetensors.parse(mappings[0], single)
    elif os.path.exists(index):
        tensors = _open_shards(folder, index, mappings)
    else:
        raise FileFormatError(
            f"{folder}: has neither model.safetensors nor model.safetensors.index.json; download the "
            f"weights.{_gguf_hint(folder)}"
        )
    return Checkpoint(folder, "safetensors", architecture, config, tensors, mappings)


def _open_shards(folder: str, index: str, mappings: list[mmap.mmap]) -> dict[str, Tensor]:
    """The tensors that the index names. Three faults have three sentences: a shard name that is none, a shard that is
    missing, and a shard that lacks a tensor which the index expects in it. A tensor that no index line names is not
    used."""
    names = read_object(index, MAX_INDEX).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise FileFormatError(
            f"{index}: weight_map is {quote(names)}; it must be an object that gives each tensor its shard."
        )
    for tensor, shard in names.items():
        if not isinstance(shard, str) or not _SHARD_NAME.fullmatch(shard):
            raise FileFormatError(
                f"{index}: tensor {quote(tensor)} lies in {quote(shard)}; a shard is a plain file name in the same "
                "folder, letters, digits, '.', '_' and '-' only, that ends in .safetensors."
            )
    shards: dict[str, list[str]] = {}
    for tensor, shard in names.items():
        shards.setdefault(shard, []).append(tensor)
    if len(shards) > MAX_SHARDS:
        raise FileFormatError(f"{index}: names {len(shards)} shards; at most {MAX_SHARDS} are opened.")
    missing = [shard for shard in shards if not os.path.exists(os.path.join(folder, shard))]
    if missing:
        listed = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise FileFormatError(f"{index}: of {len(shards)} shards {len(missing)} are missing: {listed}; download them.")
    tensors = {}
    for shard, wanted in shards.items():
        path = os.path.join(folder, shard)
        mappings.append(map_file(path))
        held = safetensors.parse(mappings[-1], path)
        for tensor in wanted:
            if tensor not in held:
                raise FileFormatError(
                    f"{path}: lacks the tensor {quote(tensor)} that the index places in it; index and shard are of "
                    "different revisions: download both again."
                )
            tensors[tensor] = held[tensor]
    return tensors


def _gguf_hint(folder: str) -> str:
    """Half a sentence for someone who named the folder of a GGUF file."""
    try:
        found = sorted(name for name in os.listdir(folder) if name.endswith(".gguf"))
    except OSError:
        return ""
    return f" It holds {quote(found[0])}: give the path of that file." if found else ""


def _quietly(release: Any) -> None:
    try:
        release()
    except BufferError:
        pass
