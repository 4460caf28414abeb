"""What the snapshot tests share: an engine with windows and strides, sessions with a past, what can be seen of them.

A file that uses the fixtures `engine` and `ledger` has every test give back what it took."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest

import ds4
from ds4.errors import InexactError, NoLogits, SnapshotError

HERE = Path(__file__).parent
TINY = HERE / "data" / "llama"
TOYS = {"toy_window": 24, "toy_stride": 4}
TOKENS = [int(t) for t in np.random.default_rng(3).integers(0, 512, 3000)]
DTYPES = ("f32", "f16", "q8_0")

needs_test_core = pytest.mark.skipif(os.environ.get("DS4_CORE") != "test", reason="needs the test build: DS4_CORE=test")


def open_engine(model=TINY, toys=True, **options):
    options = {"threads": 1, "pool_tokens": 16384, "reach_slack": 16, "kv_dtype": "f16", **options}
    return ds4.Engine(model, test_options=TOYS if toys is True else toys or None, **options)


@pytest.fixture(scope="module")
def engine():
    """Windows, strides and f16 rows."""
    with open_engine() as e:
        yield e


@pytest.fixture(autouse=True)
def ledger(request):
    """K7: a test gives back all it took from the shared engine."""
    e = request.getfixturevalue("engine") if "engine" in request.fixturenames else None
    before = counts(e) if e else None
    yield
    if e:
        e.fault("read", 0), e.fault("write", 0), e.fault("alloc", 0)
        for session in list(e._sessions):
            session.close()
            del session
        gc.collect()  # a session and its mark hold each other
        assert counts(e) == before


def counts(e):
    return {name: n for name, n in e.ledger().items() if name != "bytes_system"}


def row(s, stream, i):
    try:
        return s.rows(stream, i, 1)
    except InexactError:
        return None


def logits(s):
    try:
        return s.logits.tobytes()
    except NoLogits:
        return None


def state(s):
    """Everything that can be seen of a session."""
    s.check()
    rows = [[row(s, i, r) for r in range(s.pos // st.stride)] for i, st in enumerate(s.engine.streams)]
    return s.tokens, logits(s), rows, [s.nearest_exact(p) for p in range(s.pos + 1)]


def make(e, n=333, ctx=1024):
    """A session with a past: marks of each kind, pages dropped between them."""
    s = e.session(ctx=ctx)
    s.eval(TOKENS[:60])
    s.kept = s.mark()
    s.eval(TOKENS[60 : min(n, 140)])
    s.mark_auto(pinned=True)
    s.eval(TOKENS[140:n])
    return s


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """The bytes of a small snapshot with a window, two marks and logits."""
    with open_engine() as e, make(e, 200) as s:
        path = tmp_path_factory.mktemp("sound") / "s"
        s.save(path)
        return path.read_bytes()


def refused(e, data, tmp_path, error=SnapshotError):
    """The text with which a file is refused; nothing may have changed."""
    path = tmp_path / "broken"
    path.write_bytes(data)
    before = counts(e)
    with pytest.raises(error) as caught:
        e.load(path)
    assert counts(e) == before
    assert str(caught.value).startswith(str(path)) and str(caught.value).isprintable()
    return str(caught.value)


def leftovers(folder):
    return [p.name for p in Path(folder).iterdir() if p.name.startswith(".ds4-")]
