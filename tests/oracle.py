"""What the contract's tests compare with: fresh sessions that never saw anything but the tokens (O1), and the ledger
(O2)."""

from __future__ import annotations

import platform
from pathlib import Path

import numpy as np
import pytest

import ds4
from ds4.core import lib
from ds4.errors import InexactError, PoolFull

DATA = Path(__file__).parent / "data"
VOCAB = 512
# What the contract's tests run on: the tiny Llama, with streams that only a test build gives it, and tiny models of
# other families
TOYS: dict[str, dict[str, float]] = {
    "plain": {},
    "window": {"toy_window": 24},
    "both": {"toy_window": 24, "toy_stride": 4},
    "wide": {"toy_window": 100},
    "gemma3": {},
    "qwen3_moe": {},
    "deepseek_v4": {},
}
OTHERS = ("gemma3", "qwen3_moe", "deepseek_v4")
WINDOWED = [toy for toy in TOYS if toy not in ("plain", "qwen3_moe")]
BACKENDS = ("ref", "cpu")
ARM = platform.machine() in ("aarch64", "arm64")
ISAS = ("scalar", "neon-plain", "neon-dot") if ARM else ("scalar", "avx2", "avx512")  # what DS4_ISA can force
KV_DTYPES = ("f32", "f16", "q8_0")
PAGE = 64
TEST_BUILD = bool(lib.ds4_test_build())
NEEDS_TEST_BUILD = (
    "needs the test build of the core: DS4_BUILD_TEST=1 python setup.py build_ext --inplace, then DS4_CORE=test"
)


def some_tokens(n: int, seed: int = 0) -> list[int]:
    """n token ids of the tiny models, the same ones for the same seed; those of a shorter list are a prefix."""
    return [int(t) for t in np.random.default_rng(seed).integers(0, VOCAB, n)]


def make_engine(model="llama", toy="plain", **options) -> ds4.Engine:
    """An engine of a tiny model. The default pool is small enough to be cheap and large enough for every test that is
    not about pools."""
    if TOYS[toy] and not TEST_BUILD:
        pytest.skip(NEEDS_TEST_BUILD)
    options = {"backend": "cpu", "threads": 1, "kv_dtype": "f16", **options}
    if "pool_bytes" not in options:
        options.setdefault("pool_tokens", 16384)
    name = toy if toy in OTHERS else model  # the model itself may also be one of the others
    return ds4.Engine(DATA / name, test_options=TOYS[toy], **kv_options(name, options))


def room(toy: str, tokens: int) -> int:
    """pool_tokens for tests in which one session's window, held and reserved at once, must fit beside the rest: in
    DeepSeek V4 windows are most of the bytes, and pool_tokens brings one per 4096 tokens."""
    return tokens + (4096 if toy == "deepseek_v4" else 0)


def kv_options(model: str, options: dict) -> dict:
    """DeepSeek V4 has no q8_0: its smallest rows are fp8, which need rounding."""
    if model != "deepseek_v4" or options["kv_dtype"] != "q8_0":
        return options
    return options | {"kv_dtype": "fp8", "rounding": True}


_twins: dict[tuple, ds4.Engine] = {}


def twin(engine: ds4.Engine) -> ds4.Engine:
    """Another engine that must give the same bits: same model, backend, KV dtype and streams; a pool and threads of its
    own."""
    toys: dict[str, float] = {}
    for stream in engine.streams if engine.arch == "llama" else ():  # other families have windows of their own
        toys |= {"toy_window": stream.reach} if stream.name == "window" else {}
        toys |= {"toy_stride": stream.stride} if stream.name == "group" else {}
    more = {name: bool(engine.spec.config.get(name, [0])[0]) for name in ("rounding", "mtp")}
    key = (engine.model, engine.backend, engine.kv_dtype, *more.values(), *sorted(toys.items()))
    if key not in _twins:
        options = {"backend": engine.backend, "kv_dtype": engine.kv_dtype, "threads": 1, "pool_tokens": 16384} | more
        _twins[key] = ds4.Engine(engine.model, test_options=toys, **options)
    return _twins[key]


def settled(ledger: dict[str, int]) -> dict[str, int]:
    """The part of the ledger that has to return to its start value: freed pages may keep their memory."""
    return {name: value for name, value in ledger.items() if name != "bytes_system"}


def needed_rows(stream: ds4.StreamInfo, pos: int) -> tuple[int, int]:
    """The rows [first, end) that a session at pos must hold so that it can go on and evaluate its last token again."""
    end = pos // stream.stride
    return (0 if stream.reach is None else max(0, end - stream.reach)), end


def held_rows(session: ds4.Session, index: int) -> dict[int, bytes]:
    """All rows of one stream that the session holds, by row number."""
    stream, rows = session.engine.streams[index], {}
    size = stream.row_bytes // stream.n_layers
    for first in range(0, session.pos // stream.stride, stream.page_rows):
        n = min(stream.page_rows, session.pos // stream.stride - first)
        try:
            data = np.frombuffer(session.rows(index, first, n), np.uint8).reshape(stream.n_layers, n, size)
        except InexactError:
            assert stream.reach is not None, (
                f"stream {stream.name} is unlimited, but page {first // stream.page_rows} is gone"
            )
            continue
        rows |= {first + i: data[:, i].tobytes() for i in range(n)}
    first, end = needed_rows(stream, session.pos)
    missing = [row for row in range(first, end) if row not in rows]
    assert not missing, f"stream {stream.name} lacks rows {missing[0]}..{missing[-1]} at position {session.pos}"
    return rows


def visible(session: ds4.Session) -> tuple:
    """Everything of a session that a caller can see, to find that nothing has changed."""
    rows = [held_rows(session, i) for i in range(len(session.engine.streams))]
    logits = session.logits.tobytes() if session.logits_valid else None
    return session.tokens, session.pos, session.state, rows, logits, session.auto_marks, session.reserved


def cancel_at(session: ds4.Session, at: int):
    """A progress callback that cancels when `at` tokens are done."""
    return lambda done, total: session.cancel() if done >= at else None


class Fresh:
    """A session that was prefilled once with the tokens, and what it holds."""

    def __init__(self, engine: ds4.Engine, tokens: list[int]) -> None:
        with twin(engine).session() as session:
            session.eval(tokens, chunk=2048)
            self.logits = session.logits.tobytes() if tokens else b""
            self.rows = [held_rows(session, i) for i in range(len(engine.streams))]
            session.eval([tokens[0] if tokens else 3])
            self.next_logits = session.logits.tobytes()


def fresh_logits(engine: ds4.Engine, tokens: list[int]) -> bytes:
    """The logits of a new session after one whole prefill."""
    with twin(engine).session() as session:
        session.eval(tokens, chunk=2048)
        return session.logits.tobytes()


def feed(session: ds4.Session, tokens: list[int]) -> None:
    """Appends tokens in pieces that are too short for automatic marks (those at multiples of 2048 excepted)."""
    for n in range(0, len(tokens), 50):
        session.eval(tokens[n : n + 50], logits=None)


def assert_same(session: ds4.Session, tokens: list[int], fresh: Fresh | None = None) -> None:
    """The session is, bit for bit, one that was prefilled once with the tokens: log, rows of every stream, logits if it
    has them, and what comes next. Windowed rows that either of them has let go of are left out, those that the next
    token needs never. Changes nothing."""
    assert session.tokens == list(tokens)
    assert session.pos == len(tokens)
    session.check()
    fresh = fresh or Fresh(session.engine, tokens)
    for index, stream in enumerate(session.engine.streams):
        held = held_rows(session, index)
        different = [row for row, data in held.items() if row in fresh.rows[index] and data != fresh.rows[index][row]]
        assert not different, (
            f"stream {stream.name}: rows {different[:5]} of {len(held)} differ at position {len(tokens)}"
        )
    if session.logits_valid:
        assert session.logits.tobytes() == fresh.logits, f"the logits differ at position {len(tokens)}"
    try:
        with session.fork() as child:
            if tokens:
                child.refresh()
                assert child.logits.tobytes() == fresh.logits, (
                    f"the last token's logits differ at position {len(tokens)}"
                )
            if child.pos < child.ctx:
                child.eval([tokens[0] if tokens else 3])
                assert child.logits.tobytes() == fresh.next_logits, f"the next logits differ at position {len(tokens)}"
    except PoolFull:
        pass  # a test that has filled the pool on purpose
    session.check()
