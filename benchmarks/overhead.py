"""What a decoded token costs beside its ops: `python benchmarks/overhead.py [MODEL]`.

Microseconds a token, the least of a few runs: `between ops` and `session` are the core's, `between calls` is Python,
with ds4_sample in it where tokens are generated; what ds4_sample takes alone is shown beside it and taken off in the
last column. After a token of a real model the processor's caches hold weights and nothing of Python, so Python is
several times slower there than with a tiny model: measure with the model that you mean.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np

import ds4
from ds4.profile import tokens_of
from ds4.sampling import SCRATCH, Sampling, sample

PROMPT, TOKENS, RUNS = 64, 32, 20
PARTS = ("between ops", "session", "between calls")


def least(engine: ds4.Engine, session: ds4.Session, run: Callable[[], object]) -> dict[str, float]:
    """Microseconds a token of what is not an op."""
    found = dict.fromkeys(PARTS, float("inf"))
    for _ in range(RUNS):
        session.truncate(PROMPT - 1)
        session.eval([5])
        engine.profile("start")
        run()
        entries = engine.profile("stop")
        for e in entries:
            if not e.many and e.op in found:
                found[e.op] = min(found[e.op], e.seconds * 1e6 / tokens_of(entries, False))
    return found


def sampling_alone(session: ds4.Session, options: Sampling) -> float:
    logits, scratch = session.logits, np.empty(SCRATCH * session.engine.vocab, np.uint8)
    best = float("inf")
    for i in range(100):
        start = time.perf_counter()
        sample(logits, options, (), i, None, scratch)
        best = min(best, time.perf_counter() - start)
    return best * 1e6


def main() -> None:
    with ds4.Engine(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m", pool_tokens=8192) as engine:
        session = engine.session()
        session.eval([(i * 37) % engine.vocab for i in range(PROMPT)])
        print(f"{'us a token':20}" + "".join(f"{part:>15}" for part in PARTS) + f"{'ds4_sample':>15}{'Python':>15}")

        def show(name: str, run: Callable[[], object], sampling: float) -> None:
            found = least(engine, session, run)
            python = found["between calls"] - sampling
            print(f"{name:20}" + "".join(f"{x:15.1f}" for x in (*found.values(), sampling, python)))

        show("eval", lambda: [session.eval([i + 3]) for i in range(TOKENS)], 0.0)
        for name, options in {
            "generate, greedy": Sampling(),
            "generate, drawn": Sampling(temperature=0.8, min_p=0.05, seed=1),
        }.items():
            alone = sampling_alone(session, options)
            show(name, lambda o=options: list(session.generate(o, max_tokens=TOKENS, stop_ids=())), alone)


if __name__ == "__main__":
    main()
