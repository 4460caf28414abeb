"""RoPE frequencies in float64: radians per position for each pair of a head, all scaling included.

Sources: RoPE, arXiv 2104.09864; linear scaling is position interpolation, arXiv 2306.15595; YaRN, arXiv 2309.00071.
Where papers leave room, Hugging Face `transformers` and llama.cpp decide; the two agree on everything that is accepted
here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ds4.errors import FileFormatError


def plain(dim: int, theta: float) -> list[float]:
    """theta^(-2i/dim) for i = 0 .. dim/2 - 1; `dim` is the head size, even, and theta is above 1."""
    return [theta ** (-2.0 * i / dim) for i in range(dim // 2)]


def linear(freqs: Sequence[float], factor: float) -> list[float]:
    """Every frequency `factor` times slower."""
    return [f / factor for f in freqs]


def llama3(freqs: Sequence[float], factor: float, low: float, high: float, original: float) -> list[float]:
    """Llama 3.1: slow waves are divided by `factor`, fast ones stay, between the two a linear blend.

    A wave is fast when it fits into the `original` context more than `high` times, slow when fewer than `low` times.
    """
    if not low < high:
        raise FileFormatError(f"low_freq_factor {low:g} must be below high_freq_factor {high:g}.")
    scaled = []
    for f in freqs:
        turns = original * f / (2.0 * math.pi)
        keep = min(1.0, max(0.0, (turns - low) / (high - low)))
        scaled.append(f * keep + f / factor * (1.0 - keep))
    return scaled


def yarn(
    freqs: Sequence[float],
    theta: float,
    factor: float,
    original: float,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> list[float]:
    """YaRN's "NTK by parts": pairs that turn more than `beta_fast` times in the `original` context stay, those that
    turn fewer than `beta_slow` times are divided by `factor`, between the two pairs a linear blend over the pair's
    index. `truncate` rounds the two ends outwards to whole pairs. The attention factor is `yarn_magnitude`.
    """
    dim = 2 * len(freqs)

    def pair_that_turns(turns: float) -> float:
        return dim * math.log(original / (turns * 2.0 * math.pi)) / (2.0 * math.log(theta))

    low, high = pair_that_turns(beta_fast), pair_that_turns(beta_slow)
    if truncate and math.isfinite(low) and math.isfinite(high):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if not low <= high:
        # readers of such files disagree on the blend, so there is no right answer
        raise FileFormatError(
            f"the YaRN range is empty (from pair {low:g} to {high:g}): beta_fast {beta_fast:g}, beta_slow "
            f"{beta_slow:g}, original context {original:g} and theta {theta:g} do not fit together."
        )
    width = max(high - low, 0.001)
    scaled = []
    for i, f in enumerate(freqs):
        slow = min(1.0, max(0.0, (i - low) / width))
        scaled.append(f / factor * slow + f * (1.0 - slow))
    return scaled


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """YaRN's attention factor for cos and sin: 0.1 mscale ln(factor) + 1, and 1 for factors up to 1."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0
