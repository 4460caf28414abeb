"""What do snapshots cost beside writing durably, and reading, as many bytes? `make bench`."""

from __future__ import annotations

import pytest
from sizes import DEPTHS

from ds4.cli.bench_tests import Load, Save, Timeline


@pytest.mark.parametrize("depth", DEPTHS)
def test_save(measure, timeline: Timeline, depth: int) -> None:
    measure(Save(timeline, depth))


@pytest.mark.parametrize("depth", DEPTHS)
def test_load(measure, timeline: Timeline, depth: int) -> None:
    measure(Load(timeline, depth))


@pytest.mark.parametrize("kind", [Save, Load])
@pytest.mark.parametrize("depth", DEPTHS)
def test_as_many_bytes(benchmark, timeline: Timeline, depth: int, kind: type[Save] | type[Load]) -> None:
    test = kind(timeline, depth)
    test.run()
    benchmark.pedantic(test.least, rounds=5)
