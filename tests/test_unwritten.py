"""K8: what was never written, what was cut off and what lies ahead is never read, not even to be multiplied by zero.

Pages come from the pool full of NaN in a test build. Here rows become NaN in an honest way too: a checkpoint in which
one token's embedding is NaN and another one's is infinite. Nothing of them may show in a position, a session or a page
where they are not."""

from __future__ import annotations

import numpy as np
import pytest
from oracle import BACKENDS, DATA, KV_DTYPES, TEST_BUILD, TOYS, held_rows, some_tokens
from safetensors.numpy import load_file, save_file

import ds4
from ds4.errors import NonFiniteError

NAN, INF = 7, 11  # the two spoilt tokens
CLEAN = [t for t in some_tokens(400) if t not in (NAN, INF)]


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory):
    """The tiny Llama with two bad embeddings."""
    folder = tmp_path_factory.mktemp("spoilt")
    (folder / "config.json").write_bytes((DATA / "llama" / "config.json").read_bytes())
    tensors = load_file(DATA / "llama" / "model.safetensors")
    tensors["model.embed_tokens.weight"][NAN] = np.nan
    tensors["model.embed_tokens.weight"][INF, ::3] = np.inf
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def engines(spoilt):
    made = {}

    def get(toy, **options):
        key = (toy, *sorted(options.items()))
        if key not in made:
            toys = TOYS[toy] if TEST_BUILD else {}
            made[key] = ds4.Engine(spoilt, test_options=toys, pool_tokens=2048, reach_slack=16, **options)
        return made[key]

    yield get
    for engine in made.values():
        engine.close()


every = pytest.mark.parametrize(
    "toy, kv_dtype, backend",
    [(toy, kv, "cpu") for toy in ("plain", "both", "wide") for kv in KV_DTYPES]
    + [("plain", "f16", "ref"), ("both", "q8_0", "ref"), ("wide", "f32", "ref")],
)


def clean_logits(engine, tokens):
    with engine.session() as session:
        logits = session.eval(tokens, logits="all")
    assert np.isfinite(logits).all()
    return logits


@every
def test_the_tokens_ahead_are_not_read(engines, toy, kv_dtype, backend):
    """A bad token anywhere in a chunk: every position before it has the bits that it has without."""
    engine, n = engines(toy, kv_dtype=kv_dtype, backend=backend), 70
    wanted = clean_logits(engine, CLEAN[:n])
    for bad in (NAN, INF):
        for at in (0, 1, 7, 16, 31, 63, 64, 69):
            with engine.session() as session:
                logits = session.eval([*CLEAN[:at], bad, *CLEAN[at + 1 : n]], logits="all")
            assert logits[:at].tobytes() == wanted[:at].tobytes(), f"token {at} is read by those before it"
            assert not np.isfinite(logits[at]).all()


@every
def test_batch_mates_are_not_read(engines, toy, kv_dtype, backend):
    """I6: one session of the batch is full of NaN, the others do not notice."""
    engine = engines(toy, kv_dtype=kv_dtype, backend=backend)
    wanted = clean_logits(engine, CLEAN[:40])
    for order in (0, 1, 2):
        mates = [engine.session() for _ in range(3)]
        parts = [(mate, [NAN, INF] * 20 if i == order else CLEAN[:33]) for i, mate in enumerate(mates)]
        engine.eval_batch(parts)
        engine.eval_batch([(mate, [NAN] if i == order else [CLEAN[33]]) for i, mate in enumerate(mates)])
        for i, mate in enumerate(mates):
            if i == order:
                assert np.isnan(mate.logits).any()
            else:
                assert mate.logits.tobytes() == wanted[33].tobytes()
            mate.close()


@pytest.mark.parametrize(
    "toy, kv_dtype, backend",
    [(toy, kv, "cpu") for toy in ("plain", "both", "wide") for kv in KV_DTYPES]
    + [("plain", "f16", "ref"), ("both", "q8_0", "ref")],
)
def test_what_was_cut_off_is_not_read(engines, toy, kv_dtype, backend):
    """Bad rows in the page that is written next, in pages that went back to the pool and come again, in a page that a
    fork copies."""
    engine = engines(toy, kv_dtype=kv_dtype, backend=backend)
    wanted = clean_logits(engine, CLEAN[:150])
    with engine.session() as session:
        for n in (1, 5, 8, 30, 63, 64, 65, 100):
            session.sync(CLEAN[:n])
            mark = session.mark()
            session.eval([NAN, INF] * 30)
            with session.fork(session.nearest_exact(n)) as child, session.fork() as spoilt:
                child.sync(CLEAN[: n + 9])
                assert child.logits.tobytes() == wanted[n + 8].tobytes()
                spoilt.eval([1])
            session.rollback(mark)
            assert session.logits.tobytes() == wanted[n - 1].tobytes()
            assert session.eval(CLEAN[n : n + 20], logits="all").tobytes() == wanted[n : n + 20].tobytes()
            session.clear()
            session.eval([NAN] * 150)
            session.clear()
    with engine.session() as session:
        assert session.eval(CLEAN[:150], logits="all").tobytes() == wanted.tobytes()


@pytest.mark.parametrize("backend", BACKENDS)
def test_score_refuses_what_is_no_number(engines, backend):
    """A typed error; the session stands at the last whole chunk, and goes on."""
    engine = engines("plain", backend=backend)
    wanted = clean_logits(engine, CLEAN[:30])
    with engine.session() as session:
        with pytest.raises(NonFiniteError) as caught:
            session.score([*CLEAN[:20], NAN, *CLEAN[20:]], chunk=10)
        assert caught.value.pos == session.pos == 20
        session.check()
        session.eval([CLEAN[20]])
        assert session.logits.tobytes() == wanted[20].tobytes()


@pytest.mark.parametrize("toy", TOYS)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_every_length_in_used_and_unused_pages(engine_of, toy, kv_dtype):
    """I1, I3: lengths 1 to 139, step by step, with cuts; the small pool gives the same pages again and again."""
    engine, tokens = engine_of(toy=toy, kv_dtype=kv_dtype, pool_tokens=700, reach_slack=16), some_tokens(140)
    wanted = clean_logits(engine, tokens)
    with engine.session() as session:
        for n in range(1, 140):
            session.truncate(session.nearest_exact(max(0, session.pos - 2)))
            session.eval(tokens[session.pos : n])
            assert session.logits.tobytes() == wanted[n - 1].tobytes()
        rows = [held_rows(session, i) for i in range(len(engine.streams))]
    if kv_dtype == "f32":
        assert all(np.isfinite(np.frombuffer(row, np.float32)).all() for stream in rows for row in stream.values())
