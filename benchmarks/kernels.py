"""Speed of the matrix products by weight format: one large layer, evaluated with 1 and with 512 tokens.

    python benchmarks/kernels.py [FORMAT ...]

Prints multiply-adds per second (10^9, all threads), and for one token also the weight bytes read per second. Before a
format is timed its logits have to equal those of backend "ref" bit for bit. DS4_ISA chooses the instruction set.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from test_formats import FORMATS, random_weights

from ds4.core import check, ffi, lib

DIM, FFN, VOCAB, CTX = 2048, 8192, 64, 2048
SMALL = {"q": (16, DIM), "k": (8, DIM), "v": (8, DIM), "o": (DIM, 16)}
LARGE = {"gate": (FFN, DIM), "up": (FFN, DIM), "down": (DIM, FFN)}


class Layer:
    """An engine with one Llama layer whose three large matrices are stored as `name`."""

    def __init__(self, name: str, backend: str, threads: int) -> None:
        err, out = ffi.new("ds4_error *"), ffi.new("ds4_engine **")
        check(lib.ds4_engine_new(b"llama", backend.encode(), threads, out, err), err)
        self.engine, self.keep = ffi.gc(out[0], lib.ds4_engine_free), []
        options = {"n_layers": 1, "vocab": VOCAB, "ctx": CTX, "dim": DIM, "ffn_dim": FFN, "norm_eps": 1e-5}
        options |= {"n_heads": 2, "n_kv_heads": 1, "head_dim": 8, "rope_base": 10000, "rope_interleaved": 0}
        for key, value in options.items():
            check(lib.ds4_engine_set(self.engine, key.encode(), [value], 1, err), err)
        rng = np.random.default_rng(1)
        for key in ("norm", "layers.0.attn_norm", "layers.0.ffn_norm"):
            self.tensor(key, "F32", 1, DIM, np.ones(DIM, np.float32))
        for key in ("embed", "head"):
            self.tensor(key, "F32", VOCAB, DIM, rng.standard_normal((VOCAB, DIM)).astype(np.float32))
        for key, shape in SMALL.items():
            self.tensor(f"layers.0.{key}", "F32", *shape, np.zeros(shape, np.float32))
        for key, shape in LARGE.items():
            self.tensor(f"layers.0.{key}", name, *shape, random_weights(name, *shape, seed=2))
        check(lib.ds4_engine_ready(self.engine, b"f32", CTX, 0, bytes(32), err), err)
        session = ffi.new("ds4_session **")
        check(lib.ds4_session_new(self.engine, 0, session, err), err)
        self.session = ffi.gc(session[0], lib.ds4_session_free)

    def tensor(self, key: str, name: str, rows: int, cols: int, data: np.ndarray) -> None:
        err, data = ffi.new("ds4_error *"), np.ascontiguousarray(data)
        self.keep.append(data)
        raw = ffi.from_buffer(data)
        status = lib.ds4_engine_tensor(self.engine, key.encode(), FORMATS[name][0], rows, cols, raw, data.nbytes, err)
        check(status, err)

    def run(self, n: int) -> tuple[np.ndarray, float]:
        """Logits of the last of `n` tokens from an empty session, and the seconds of the evaluation."""
        err, logits = ffi.new("ds4_error *"), np.empty(VOCAB, np.float32)
        check(lib.ds4_session_clear(self.session, err), err)
        segment = ffi.new("ds4_segment *", {"session": self.session, "n": n, "want": lib.DS4_WANT_LAST})
        tokens = np.arange(n, dtype=np.int32) % VOCAB
        segment.tokens = ffi.from_buffer("int32_t[]", tokens)
        segment.out = ffi.from_buffer("float[]", logits, require_writable=True)
        start = time.perf_counter()
        check(lib.ds4_eval(self.engine, segment, 1, 0, ffi.NULL, ffi.NULL, err), err)
        return logits, time.perf_counter() - start

    def best(self, n: int, seconds: float) -> float:
        """The shortest of the evaluations of `n` tokens that fit into `seconds`."""
        times, end = [self.run(n)[1]], time.perf_counter() + seconds
        while time.perf_counter() < end:
            times.append(self.run(n)[1])
        return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of the matrix products by weight format.")
    parser.add_argument("formats", nargs="*", default=list(FORMATS), metavar="FORMAT", help=" ".join(FORMATS))
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each figure")
    options = parser.parse_args()
    work = sum(rows * cols for rows, cols in LARGE.values())
    print(f"{'format':8}{'n=1 GMAC/s':>12}{'GB/s':>8}{'n=512 GMAC/s':>14}")
    for name in options.formats:
        layer, info = Layer(name, "cpu", options.threads), ffi.new("ds4_engine_info *")
        if layer.run(9)[0].tobytes() != Layer(name, "ref", 1).run(9)[0].tobytes():
            sys.exit(f"{name}: the logits differ from those of backend ref; nothing is timed.")
        lib.ds4_engine_get_info(layer.engine, info)
        one, many = layer.best(1, options.seconds), layer.best(512, options.seconds)
        print(
            f"{name:8}{work / one / 1e9:12.1f}{info.weight_bytes / one / 1e9:8.1f}{512 * work / many / 1e9:14.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
