"""Model families: what a checkpoint's options and tensors mean, in the terms of the C core.

`model_spec` looks the architecture up and refuses, by name, everything that it does not understand: an unknown
architecture, an option that may change the results, a tensor that would not be used, a tensor format that is not
computed with.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds4.errors import SystemResourceError, UnsupportedError
from ds4.families import llama
from ds4.families.options import MATRIX_FORMATS as MATRIX_FORMATS
from ds4.files import Checkpoint, Tensor
from ds4.files.base import quote

# (container, architecture as the file names it) -> (the core's architecture, reader)
FAMILIES = {
    ("gguf", "llama"): ("llama", llama.from_gguf),
    ("safetensors", "llama"): ("llama", llama.from_hf),
}


@dataclass(frozen=True)
class ModelSpec:
    """What the core needs: `arch` its architecture, `config` the values of ds4_engine_set, `tensors` (core name,
    tensor) pairs.

    A tied model has no tensor "head". The tensors borrow the checkpoint's mapping.
    """

    arch: str
    config: dict[str, list[float]]
    tensors: list[tuple[str, Tensor]]


def model_spec(checkpoint: Checkpoint) -> ModelSpec:
    """Translates a checkpoint for the core.

    Raises UnsupportedError for whatever this version does not know, FileFormatError when options and tensors do not fit
    together.
    """
    try:
        arch, read = FAMILIES[checkpoint.kind, checkpoint.architecture]
    except KeyError:
        known = sorted(name for kind, name in FAMILIES if kind == checkpoint.kind)
        raise UnsupportedError(
            f"{checkpoint.path}: the architecture {quote(checkpoint.architecture)} is not supported; this version runs "
            f"{', '.join(known)}."
        ) from None
    try:
        return ModelSpec(arch, *read(checkpoint))
    except MemoryError:
        raise SystemResourceError(f"{checkpoint.path}: there is not enough memory to prepare its tensors.") from None
