"""Model families: what a checkpoint's options and tensors mean, in the terms of the C core.

`model_spec` looks the architecture up and refuses, by name, everything that it does not understand: an unknown
architecture, an option that may change the results, a tensor that would not be used, a tensor format that is not
computed with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ds4.errors import ArgumentError, SystemResourceError, UnsupportedError
from ds4.families import common, deepseek_v4, gemma3, llama, qwen3
from ds4.families.options import MATRIX_FORMATS as MATRIX_FORMATS
from ds4.families.options import SCALED_FORMATS as SCALED_FORMATS
from ds4.files import Checkpoint, Tensor
from ds4.files.base import quote

# (container, architecture as the file names it) -> (the core's architecture, reader)
FAMILIES: dict[tuple[str, str], tuple[str, Callable[..., common.Parts]]] = {
    ("gguf", "deepseek4"): ("deepseek_v4", deepseek_v4.from_gguf),
    ("gguf", "gemma3"): ("gemma3", gemma3.from_gguf),
    ("gguf", "llama"): ("llama", llama.from_gguf),
    ("gguf", "qwen3"): ("qwen3", qwen3.from_gguf),
    ("gguf", "qwen3moe"): ("qwen3", qwen3.from_gguf),
    ("safetensors", "deepseek_v4"): ("deepseek_v4", deepseek_v4.from_hf),
    ("safetensors", "gemma3"): ("gemma3", gemma3.from_hf_multimodal),
    ("safetensors", "gemma3_text"): ("gemma3", gemma3.from_hf),
    ("safetensors", "llama"): ("llama", llama.from_hf),
    ("safetensors", "mistral"): ("llama", llama.from_hf_mistral),
    ("safetensors", "qwen3"): ("qwen3", qwen3.from_hf),
    ("safetensors", "qwen3_moe"): ("qwen3", qwen3.from_hf_moe),
}
# names that look like one of these and are another architecture
REFUSED = {
    "deepseek_v41": "DeepSeek V4.1 (model_type 'deepseek_v41') is an architecture of its own that this version does "
    "not run; use a DeepSeek V4 model",
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


def model_spec(checkpoint: Checkpoint, *, rounding: bool = False, mtp: bool = False) -> ModelSpec:
    """Translates a checkpoint for the core; `rounding` and `mtp` are options of DeepSeek V4 (see `Engine`).

    Raises UnsupportedError for whatever this version does not know, FileFormatError when options and tensors do not fit
    together.
    """
    if checkpoint.architecture in REFUSED:
        raise UnsupportedError(f"{checkpoint.path}: {REFUSED[checkpoint.architecture]}.")
    try:
        arch, read = FAMILIES[checkpoint.kind, checkpoint.architecture]
    except KeyError:
        known = sorted(name for kind, name in FAMILIES if kind == checkpoint.kind)
        raise UnsupportedError(
            f"{checkpoint.path}: the architecture {quote(checkpoint.architecture)} is not supported; this version runs "
            f"{', '.join(known)}."
        ) from None
    try:
        if arch == "deepseek_v4":
            return ModelSpec(arch, *read(checkpoint, rounding, mtp))
        if rounding or mtp:
            raise ArgumentError(
                f"{checkpoint.path}: rounding and mtp are options of DeepSeek V4; this model has neither."
            )
        return ModelSpec(arch, *read(checkpoint))
    except MemoryError:
        raise SystemResourceError(f"{checkpoint.path}: there is not enough memory to prepare its tensors.") from None
