"""RoPE as files describe it: config.json (both forms that transformers has had) and the keys of GGUF.

Every reader returns the frequencies in radians per position with all scaling in them, and the factor on cos and sin.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from ds4.errors import FileFormatError, UnsupportedError
from ds4.families import rope
from ds4.families.options import Options, Tensors
from ds4.files.base import quote

MAX_CTX = 2**31 - 1
Rope = tuple[list[float], float]


def from_hf(options: Options, head_dim: int, ctx: int) -> Rope:
    """One RoPE for all layers: `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before)."""
    new, old = options.raw("rope_parameters", None), options.raw("rope_scaling", None)
    if new is not None and old is not None and new != old:
        raise UnsupportedError(
            f"{options.name('rope_scaling')} differs from rope_parameters; keep the one that counts."
        )
    r = options.object("rope_scaling" if new is None else "rope_parameters", {})
    return _hf(r, options, "rope_theta", 10000.0, head_dim, ctx)


def from_hf_by_layer_type(options: Options, head_dim: int, ctx: int) -> tuple[Rope, Rope]:
    """The RoPE of the full and of the sliding layers: `rope_parameters` by layer type (transformers 5), or `rope_theta`
    and `rope_scaling` for the full layers and `rope_local_base_freq` for the others (before)."""
    if "rope_parameters" in options:
        both = options.object("rope_parameters")
        full, sliding = both.object("full_attention"), both.object("sliding_attention")
        both.finish()
        if "rope_scaling" in options:
            raise UnsupportedError(
                f"{options.name('rope_scaling')} stands beside rope_parameters; keep the one that counts."
            )
    else:
        full = options.object("rope_scaling", {})
        sliding = Options({}, options.name("rope_local_base_freq"))
    return (
        _hf(full, options, "rope_theta", 1000000.0, head_dim, ctx),
        _hf(sliding, options, "rope_local_base_freq", 10000.0, head_dim, ctx),
    )


def _hf(r: Options, options: Options, theta_key: str, theta: float, head_dim: int, ctx: int) -> Rope:
    """From one object of parameters `r`; `theta_key` among the outer options is where theta stood before
    transformers 5, `theta` is what counts when neither has it."""
    theta = r.number("rope_theta", options.number(theta_key, theta, 1.0), 1.0)
    if theta_key in options and options.number(theta_key, above=1.0) != theta:
        raise UnsupportedError(
            f"{options.name(theta_key)} differs from the one in rope_parameters; keep the one that counts."
        )
    kind = r.text("rope_type", r.raw("type", "default"))
    r.only("type", kind)
    r.only("partial_rotary_factor", 1.0, 1)
    original = options.count(
        "original_max_position_embeddings", r.raw("original_max_position_embeddings", ctx), MAX_CTX
    )
    freqs, scale = rope.plain(head_dim, theta), 1.0
    with _named(r.where):
        if kind == "linear":
            freqs = rope.linear(freqs, r.number("factor"))
        elif kind == "llama3":
            low, high = r.number("low_freq_factor"), r.number("high_freq_factor")
            freqs = rope.llama3(freqs, r.number("factor"), low, high, original)
        elif kind == "yarn":
            factor = r.number("factor", ctx / original)
            beta = r.number("beta_fast", 32.0), r.number("beta_slow", 1.0)
            freqs = rope.yarn(freqs, theta, factor, original, *beta, truncate=r.flag("truncate", True))
            scale = _hf_magnitude(r, factor)
        elif kind != "default":
            raise UnsupportedError(f"rope_type is {quote(kind)}; this version knows default, linear, llama3 and yarn.")
    r.finish()
    return _checked(freqs, scale, r)


def _hf_magnitude(r: Options, factor: float) -> float:
    default = rope.yarn_magnitude(factor)
    both = [key for key in ("mscale", "mscale_all_dim") if r.raw(key, 0) != 0]  # 0 means absent
    if len(both) == 2:
        above, below = (rope.yarn_magnitude(factor, r.number(key)) for key in both)
        default = above / below
    return r.number("attention_factor", default)


def gguf_factors(tensors: Tensors, head_dim: int) -> list[float]:
    """The divisors in rope_freqs.weight: how GGUF files carry Llama 3's scaling. All 1 without that tensor."""
    found = tensors.checkpoint.tensors.get("rope_freqs.weight")
    if found is None:
        return [1.0] * (head_dim // 2)
    if found.format != "F32" or found.shape != (head_dim // 2,):
        raise FileFormatError(
            f"{tensors.checkpoint.path}: tensor 'rope_freqs.weight' is {found.format} {list(found.shape)}; it must be "
            f"F32 [{head_dim // 2}]."
        )
    factors = np.frombuffer(found.data, "<f4").astype(np.float64)
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise FileFormatError(
            f"{tensors.checkpoint.path}: tensor 'rope_freqs.weight' holds a divisor that is not a number above 0."
        )
    tensors.skip("rope_freqs.weight")
    return [float(f) for f in factors]


def from_gguf(options: Options, head_dim: int, ctx: int, factors: list[float]) -> Rope:
    """llama.cpp's order: the tensor's divisors first, then linear or YaRN scaling; attn_factor multiplies whatever
    results."""
    theta = options.number("rope.freq_base", 10000.0, 1.0)
    kind = options.text("rope.scaling.type", "linear")
    factor = options.number("rope.scaling.factor", options.number("rope.scale_linear", 1.0))
    original = options.count("rope.scaling.original_context_length", ctx, MAX_CTX)
    beta = options.number("rope.scaling.yarn_beta_fast", 32.0), options.number("rope.scaling.yarn_beta_slow", 1.0)
    scale = options.number("rope.scaling.attn_factor", 1.0)
    options.flag("rope.scaling.finetuned", False)
    if "rope.scaling.yarn_attn_factor" in options:
        raise UnsupportedError(
            f"{options.name('rope.scaling.yarn_attn_factor')} means the whole attention factor to some writers and a "
            "multiplier of it to others, so it cannot be read safely; use rope.scaling.attn_factor, the multiplier, "
            "in its place."
        )
    freqs = [f / divisor for f, divisor in zip(rope.plain(head_dim, theta), factors, strict=True)]
    with _named(options.where):
        if kind == "linear":
            freqs = rope.linear(freqs, factor)
        elif kind == "yarn":
            freqs = rope.yarn(freqs, theta, factor, original, *beta)
            scale *= rope.yarn_magnitude(factor)
        elif kind != "none":
            raise UnsupportedError(f"rope.scaling.type is {quote(kind)}; this version knows none, linear and yarn.")
    return _checked(freqs, scale, options)


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Puts the file's name before a fault that the formulas report."""
    try:
        yield
    except (FileFormatError, UnsupportedError) as error:
        if str(error).startswith(where):
            raise
        raise type(error)(f"{where}: {error}") from None


def _checked(freqs: list[float], scale: float, options: Options) -> Rope:
    """Absurd options can leave the range of float32, in which the core keeps its tables."""
    if not all(math.isfinite(f) and 0.0 < f < 1e6 for f in freqs) or not 0.0 < scale < 1e6:
        raise FileFormatError(f"{options.where}: the rope options give frequencies that are not usable numbers.")
    return freqs, scale
