"""truncate, fork, mark and rollback through pytest-benchmark: `make bench`."""

from __future__ import annotations

import pytest
from moves import DEPTHS, Moves, long_tiny

import ds4


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory):
    with ds4.Engine(long_tiny(tmp_path_factory.mktemp("tiny")), pool_tokens=200_000) as engine:
        yield engine


@pytest.fixture(scope="module", params=DEPTHS)
def moves(engine: ds4.Engine, request: pytest.FixtureRequest):
    moves = Moves(engine, request.param)
    moves.verify_all()
    yield moves
    moves.session.close()


def test_fork(benchmark, moves: Moves) -> None:
    benchmark(lambda: moves.session.fork().close())


def test_mark(benchmark, moves: Moves) -> None:
    benchmark(lambda: moves.session.mark().release())


def test_truncate_to_nothing(benchmark, moves: Moves) -> None:
    benchmark.pedantic(lambda s: s.truncate(0), setup=lambda: ((moves.session.fork(),), {}), rounds=50)


def test_rollback(benchmark, moves: Moves) -> None:
    with moves.session.mark() as mark:

        def ahead() -> tuple[tuple[ds4.Mark], dict[str, object]]:
            moves.session.eval(moves.tokens[-2:])
            return (mark,), {}

        benchmark.pedantic(moves.session.rollback, setup=ahead, rounds=50)
