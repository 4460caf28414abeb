"""How fast are prefill and decode at a depth, and what does a re-sync after an edit cost? `make bench`."""

from __future__ import annotations

import pytest
from sizes import DECODE, DEPTHS, PREFILL

from ds4.cli.bench_tests import EDITS, Decode, Prefill, Resync, Timeline


@pytest.mark.parametrize("depth", (0, *DEPTHS))
@pytest.mark.parametrize("size", PREFILL)
def test_prefill(measure, timeline: Timeline, size: int, depth: int) -> None:
    measure(Prefill(timeline, depth, size))


@pytest.mark.parametrize("depth", (0, *DEPTHS))
@pytest.mark.parametrize("size", DECODE)
def test_decode(measure, timeline: Timeline, size: int, depth: int) -> None:
    measure(Decode(timeline, depth, size))


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("percent", EDITS)
def test_resync(measure, timeline: Timeline, percent: int, depth: int) -> None:
    measure(Resync(timeline, depth, percent), rounds=2)
