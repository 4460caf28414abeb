"""What truncate, fork, mark and rollback cost at several depths: `python benchmarks/moves.py [--json] [MODEL]`.

Without a model it makes a tiny one with a context of 40,000 (random weights: the costs are those of tables, not of
weights). Every operation is verified before it is timed: the next logits must be those of a fresh prefill, bit for bit.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import ds4

DEPTHS = (1024, 8192, 32768)
REPEATS = 200
TINY = Path(__file__).parent.parent / "tests" / "data" / "llama"


def long_tiny(folder: Path, ctx: int = 40000) -> Path:
    """The tiny Llama with a longer context."""
    config = json.loads((TINY / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": ctx}), encoding="utf-8")
    (folder / "model.safetensors").write_bytes((TINY / "model.safetensors").read_bytes())
    return folder


class Moves:
    """A session of `depth` tokens, and the operations on it. Each returns the microseconds of its call alone."""

    def __init__(self, engine: ds4.Engine, depth: int) -> None:
        self.engine, self.depth = engine, depth
        self.tokens = [int(t) for t in np.random.default_rng(depth).integers(0, engine.vocab, depth + 64)]
        self.session = engine.session()
        self.session.sync(self.tokens[:depth])
        self.oracle = {n: self._fresh(n) for n in (depth // 2, depth)}

    def _fresh(self, n: int) -> bytes:
        """Logits after the first n tokens and one more, from nothing."""
        with self.engine.session() as s:
            s.eval(self.tokens[:n] + self.tokens[-1:], chunk=512)
            return s.logits.tobytes()

    def verify(self, session: ds4.Session, n: int) -> None:
        """Raises unless the session goes on from position n with the bits of a fresh prefill."""
        session.eval(self.tokens[-1:])
        if session.logits.tobytes() != self.oracle[n]:
            raise SystemExit(f"the bits differ from a fresh prefill at position {n}: no figure is printed")
        session.truncate(n)

    def truncate_all(self) -> float:
        """A fork is cut back to 0: every token is dropped."""
        child = self.session.fork()
        seconds = _timed(lambda: child.truncate(0))
        child.close()
        return seconds

    def truncate_half(self) -> float:
        child = self.session.fork()
        seconds = _timed(lambda: child.truncate(self.depth // 2))
        child.close()
        return seconds

    def truncate_one(self) -> float:
        self.session.sync(self.tokens[: self.depth])
        seconds = _timed(lambda: self.session.truncate(self.depth - 1))
        self.session.sync(self.tokens[: self.depth])
        return seconds

    def fork(self) -> float:
        made: list[ds4.Session] = []
        seconds = _timed(lambda: made.append(self.session.fork()))
        made[0].close()
        return seconds

    def mark(self) -> float:
        made: list[ds4.Mark] = []
        seconds = _timed(lambda: made.append(self.session.mark()))
        made[0].release()
        return seconds

    def rollback(self) -> float:
        with self.session.mark() as mark:
            self.session.eval(self.tokens[-2:])
            return _timed(lambda: self.session.rollback(mark))

    def first_eval_after_fork(self) -> float:
        """One token: a partly filled page per stream is copied."""
        with self.session.fork() as child:
            return _timed(lambda: child.eval(self.tokens[-1:]))

    def verify_all(self) -> None:
        s, n = self.session, self.depth
        with s.fork() as child:
            child.truncate(n // 2)
            self.verify(child, n // 2)
        with s.mark() as mark:
            s.eval(self.tokens[-5:])
            s.rollback(mark)
            with s.fork() as child:
                self.verify(child, n)
        s.check()


def _timed(do: Callable[[], object]) -> float:
    start = time.perf_counter()
    do()
    return (time.perf_counter() - start) * 1e6


NAMES = ("truncate_all", "truncate_half", "truncate_one", "fork", "mark", "rollback", "first_eval_after_fork")


def measure(
    engine: ds4.Engine, depths: tuple[int, ...] = DEPTHS, repeats: int = REPEATS
) -> dict[str, dict[int, float]]:
    """Median microseconds through Python, per operation and depth."""
    found: dict[str, dict[int, float]] = {name: {} for name in NAMES}
    for depth in depths:
        moves = Moves(engine, depth)
        moves.verify_all()
        for name in NAMES:
            do = getattr(moves, name)
            found[name][depth] = statistics.median(do() for _ in range(repeats))
        moves.session.close()
    return found


def main(arguments: list[str]) -> None:
    as_json = "--json" in arguments
    model = next((a for a in arguments if not a.startswith("-")), None)
    with tempfile.TemporaryDirectory() as folder:
        with ds4.Engine(model or long_tiny(Path(folder)), pool_tokens=200_000) as engine:
            depths = tuple(d for d in DEPTHS if d + 64 < engine.ctx)
            found = measure(engine, depths)
    if as_json:
        print(json.dumps(found))
        return
    print(f"median of {REPEATS}, microseconds through Python, verified bit for bit first")
    print(f"{'':24}" + "".join(f"{depth:>10}" for depth in depths))
    for name, values in found.items():
        print(f"{name.replace('_', ' '):24}" + "".join(f"{values[depth]:10.1f}" for depth in depths))


if __name__ == "__main__":
    main(sys.argv[1:])
