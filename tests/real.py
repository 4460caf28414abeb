"""What the tests of real models share: the divergence from the reference, and what loading costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
from oracle import DATA

import ds4

TEXTS = ("chat", "code", "numbers", "prose", "unicode")


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def reference(name: str) -> dict[str, np.ndarray]:
    """Ids, 20 best log-probabilities at every position, and 32 greedy tokens, in float32 on the dequantised weights."""
    return dict(np.load(DATA / "real" / f"{name}.npz"))


def divergence(engine: ds4.Engine, name: str) -> tuple[float, float, float]:
    """Mean KL(reference || engine) over the 20 best tokens: the sum of their terms, and as distributions over these
    20; and how often the best token is the same."""
    data, kl, among, same = reference(name), [], [], []
    for text in TEXTS:
        ids, best, theirs = data[f"{text}.ids"], data[f"{text}.top_ids"].astype(int), data[f"{text}.top_lp"]
        theirs = theirs.astype(np.float64)
        with engine.session() as s:
            pieces = [ids[i : i + 64] for i in range(0, len(ids), 64)]
            ours = np.concatenate([log_softmax(s.eval(piece, logits="all")) for piece in pieces])
        picked = np.take_along_axis(ours, best, -1)
        kl.append((np.exp(theirs) * (theirs - picked)).sum(-1))
        p, q = log_softmax(theirs), log_softmax(picked)
        among.append((np.exp(p) * (p - q)).sum(-1))
        same.append(ours.argmax(-1) == best[:, 0])
    mean = [float(np.concatenate(values).mean()) for values in (kl, among, same)]
    return mean[0], mean[1], mean[2]


def behind_greedy(engine: ds4.Engine, name: str) -> dict[str, np.ndarray]:
    """How much less likely than our best token each greedy token of the reference is (natural logarithm), per text."""
    data, found = reference(name), {}
    for text in TEXTS:
        ids, greedy = data[f"{text}.ids"], data[f"{text}.greedy"].astype(int)
        with engine.session() as s:
            s.eval(ids[:-1], logits=None)
            ours = log_softmax(s.eval(np.concatenate([ids[-1:], greedy[:-1]]), logits="all"))
        found[text] = ours.max(-1) - ours[np.arange(len(greedy)), greedy]
    return found


MEASURE = """
import os, sys, time
import ds4
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
start = time.perf_counter()
engine = ds4.Engine(sys.argv[1], pool_tokens=4096)
seconds = time.perf_counter() - start
with engine.session() as s:
    s.eval(list(range(1000, 2000)))
    print(seconds, resident(), s.bytes_held)
"""


def loading(path: Path) -> tuple[float, int, int]:
    """Seconds to load a model in a new process; resident bytes after a prefill of 1000 tokens, and its rows."""
    command = [sys.executable, "-c", MEASURE, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds, resident, held = done.stdout.split()
    return float(seconds), int(resident), int(held)
