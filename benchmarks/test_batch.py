"""What does decode of eight sessions in one pass gain over one session's? `make bench`."""

from __future__ import annotations

import pytest
from sizes import DEPTHS

from ds4.cli.bench_tests import BATCH_STEPS, Batch, Timeline


@pytest.mark.parametrize("depth", (0, *DEPTHS))
def test_eight_sessions(measure, timeline: Timeline, depth: int) -> None:
    measure(Batch(timeline, depth))


@pytest.mark.parametrize("depth", (0, *DEPTHS))
def test_one_session(benchmark, timeline: Timeline, depth: int) -> None:
    test = Batch(timeline, depth)
    test.run()
    benchmark.extra_info["tokens"] = BATCH_STEPS
    benchmark.pedantic(test.one, rounds=5)
