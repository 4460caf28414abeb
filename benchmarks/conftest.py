"""What the benchmarks share: one engine, a timeline, and the tests of `ds4 bench`, each compared with a fresh prefill
before and after it is timed.

The model: SmolLM2 135M where it is pulled, else random weights of 100 million (`ds4 bench --synthetic 100m:q4_0`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sizes import DECODE, DEPTHS, PREFILL

import ds4
from ds4 import models
from ds4.cli import bench_models
from ds4.cli.bench_tests import NAMES, Test, Timeline, length_of
from ds4.cli.output import Output
from ds4.cli.scenario import MODEL


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if models.load(MODEL).present:
        return models.resolve(MODEL)
    return bench_models.write(tmp_path_factory.mktemp("weights"), "100m:q4_0", lambda done, total: None)


@pytest.fixture(scope="session")
def timeline(model: Path) -> Iterator[Timeline]:
    with ds4.Engine(model) as engine:
        length = length_of(DEPTHS, NAMES, PREFILL, DECODE)
        with Timeline(engine, length, Output(quiet=True)) as timeline:
            yield timeline


@pytest.fixture
def measure(benchmark) -> Callable[..., None]:
    """measure(test, rounds): a test that has passed once is timed; the comparison of a round is in the next setup."""

    def run(test: Test, rounds: int = 5) -> None:
        test.run()
        open_round = False

        def setup() -> None:
            nonlocal open_round
            if open_round:
                test.done()
            test.setup()
            open_round = True

        benchmark.extra_info.update(test=test.name, tokens=test.tokens, model=test.engine.model)
        benchmark.pedantic(test.work, setup=setup, rounds=rounds)
        test.done()
        if test.tokens:
            benchmark.extra_info["tokens_per_second"] = test.tokens / benchmark.stats.stats.median

    return run
