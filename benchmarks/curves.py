"""What a token costs against the depth it stands at: `python benchmarks/curves.py [--json] [--depth N] [MODEL]`.

Both curves should be straight lines: one decoded token, and 512 tokens of prefill (so a prefill of n tokens costs the
sum of the second line over its chunks). For each the least-squares line and the worst distance from it are printed.
Without a model it makes a tiny one with a context of 40,000; the same work is counted, not timed, in
tests/test_curves.py. Every depth is verified before it is timed: the logits are those of the same tokens evaluated in
other chunks, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
from moves import long_tiny

import ds4

CHUNK = 512
DEPTHS = (0, 1024, 2048, 4096, 8192, 12288, 16384, 24576, 32768)
DECODES, PREFILLS = 30, 5


def least(session: ds4.Session, depth: int, tokens: list[int], times: int) -> float:
    """Seconds of the fastest of a few evals of the same tokens at the same depth."""
    best = float("inf")
    for _ in range(times):
        with session.fork() as child:
            child.eval(tokens[:1])  # copies the shared page and warms up
            child.truncate(depth)
            start = time.perf_counter()
            child.eval(tokens, chunk=CHUNK)
            best = min(best, time.perf_counter() - start)
    return best


def verify(session: ds4.Session, depth: int, tokens: list[int]) -> None:
    found = []
    for chunk in (CHUNK, 100):
        with session.fork() as child:
            child.eval(tokens, chunk=chunk)
            found.append(child.logits.tobytes())
    if found[0] != found[1]:
        raise SystemExit(f"the bits depend on the chunk at depth {depth}: no figure is printed")


def line_of(depths: list[int], seconds: list[float]) -> tuple[float, float, float]:
    """(seconds at depth 0, seconds for each 1000 of depth, worst distance as a share of the largest value)."""
    slope, start = np.polyfit(depths, seconds, 1)
    fit = start + slope * np.array(depths)
    return float(start), float(slope) * 1000, float(np.max(np.abs(np.array(seconds) - fit)) / max(seconds))


def measure(engine: ds4.Engine, depths: list[int]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"decode": [], "prefill": []}
    tokens = [int(t) for t in np.random.default_rng(1).integers(0, engine.vocab, depths[-1] + CHUNK)]
    with engine.session() as session:
        for depth in depths:
            session.eval(tokens[session.pos : depth], logits=None)
            following = tokens[depth : depth + CHUNK]
            verify(session, depth, following)
            found["prefill"].append(least(session, depth, following, PREFILLS))
            found["decode"].append(least(session, depth, following[:1], DECODES))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--depth", type=int, default=DEPTHS[-1], help="the deepest point")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or long_tiny(Path(folder))
        with ds4.Engine(model, pool_tokens=args.depth + 8192, threads=args.threads) as engine:
            depths = [d for d in DEPTHS if d <= args.depth and d + CHUNK <= engine.ctx]
            found = measure(engine, depths)
    if args.json:
        print(json.dumps({"depths": depths, **found}))
        return
    print(f"fastest of {DECODES} and {PREFILLS}; verified bit for bit first")
    print(f"{'depth':>8}{'decode, us':>14}{f'{CHUNK} tokens, ms':>18}")
    for depth, decode, prefill in zip(depths, found["decode"], found["prefill"], strict=True):
        print(f"{depth:8}{decode * 1e6:14.1f}{prefill * 1e3:18.2f}")
    for name, seconds in found.items():
        start, slope, worst = line_of(depths, seconds)
        print(
            f"{name}: {start * 1e6:.1f} us + {slope * 1e6:.2f} us for each 1000 of depth; worst distance from the line "
            f"{100 * worst:.1f} % of the largest"
        )


if __name__ == "__main__":
    main()
