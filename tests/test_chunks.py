"""K1, K2 and K3, case by case: chunk sizes, threads, batch mates, places to cut, what a sync reuses."""

from __future__ import annotations

import numpy as np
import pytest
from oracle import KV_DTYPES, PAGE, TOYS, assert_same, fresh_logits, held_rows, some_tokens, visible

from ds4.errors import PositionError

every_toy = pytest.mark.parametrize("toy", TOYS)
every_kv = pytest.mark.parametrize("kv_dtype", KV_DTYPES)


# ---- chunks, threads, batches ------------------------------------------------------------------------------------


@every_toy
@pytest.mark.parametrize("kv_dtype, threads", [("f32", 1), ("f16", 2), ("q8_0", 1)])
def test_bits_do_not_depend_on_chunks_or_threads(engine_of, toy, kv_dtype, threads):
    engine, tokens = engine_of(toy=toy, kv_dtype=kv_dtype, threads=threads), some_tokens(150)
    with engine_of(toy=toy, kv_dtype=kv_dtype).session() as whole:
        wanted = whole.eval(tokens, logits="all", chunk=2048).tobytes()
        rows = [held_rows(whole, i) for i in range(len(engine.streams))]
        for chunk in (1, 7, 63, 64, 65, 512):
            with engine.session() as session:
                assert session.eval(tokens, logits="all", chunk=chunk).tobytes() == wanted, f"chunk {chunk}"
                for i, held in enumerate(rows):
                    other = held_rows(session, i)
                    assert all(other[row] == held[row] for row in held.keys() & other.keys()), (
                        f"chunk {chunk}, stream {i}"
                    )


@every_toy
def test_every_split(engine_of, toy):
    """A prefill of n against n - k and k more (D3), for the whole and in single steps."""
    engine, tokens = engine_of(toy=toy), some_tokens(70)
    with engine.session() as session:
        wanted = session.eval(tokens, logits="all")
    for n in range(1, len(tokens)):
        with engine.session() as session:
            session.eval(tokens[:n], logits=None)
            assert session.eval(tokens[n:], logits="all").tobytes() == wanted[n:].tobytes()
    with engine.session() as session:
        steps = [session.eval([token], logits="all") for token in tokens]
    assert np.concatenate(steps).tobytes() == wanted.tobytes()


def test_score_is_the_log_softmax(engine_of):
    """Of each token given all before it, from the same logits; chunks change no bit; an empty session's first token has
    nothing before it."""
    engine, tokens = engine_of(toy="both"), some_tokens(130)
    with engine.session() as session:
        logits = session.eval(tokens, logits="all").astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    wanted = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    wanted = wanted[np.arange(129), tokens[1:]]
    scores = {}
    for chunk in (1, 7, 64, 512):
        for first in (0, 1, 64):
            with engine.session() as session:
                session.eval(tokens[:first], logits=None)
                scores[chunk, first] = session.score(tokens[first:], chunk=chunk)
                assert_same(session, tokens)
    for (chunk, first), score in scores.items():
        assert score.dtype == np.float32 and score.tobytes()[4:] == scores[1, first].tobytes()[4:], f"chunk {chunk}"
        assert np.abs(score[1 if first == 0 else 0 :] - wanted[max(0, first - 1) :]).max() < 2e-6
        assert first or score[0] == 0


def test_the_same_request_three_times(engine_of):
    """D4: neither the first answer nor a later one differs."""
    engine, tokens = engine_of(), some_tokens(100)
    with engine.session() as session:
        answers = []
        for _ in range(3):
            session.clear()
            session.sync(tokens)
            answers.append(session.logits.tobytes())
    assert answers == [fresh_logits(engine, tokens)] * 3


@every_toy
@pytest.mark.parametrize("chunk", [None, 7])
def test_batch_mates_change_nothing(engine_of, toy, chunk):
    """D8: a row alone, and the same row among six others of all lengths; prefill and decode mixed."""
    engine, lengths = engine_of(toy=toy, threads=2), [1, 2, 7, 63, 64, 65, 130]
    sessions = [engine.session() for _ in lengths]
    texts = [some_tokens(n + 30, seed) for seed, n in enumerate(lengths)]
    engine.eval_batch([(s, text[:n]) for s, text, n in zip(sessions, texts, lengths, strict=True)], chunk=chunk)
    for step in range(10):
        engine.eval_batch(
            [(s, [text[n + step]]) for s, text, n in zip(sessions, texts, lengths, strict=True)], chunk=chunk
        )
    engine.eval_batch(
        [(s, text[n + 10 :]) for s, text, n in zip(sessions[::2], texts[::2], lengths[::2], strict=True)], chunk=chunk
    )
    for i, (session, text, n) in enumerate(zip(sessions, texts, lengths, strict=True)):
        assert_same(session, text if i % 2 == 0 else text[: n + 10])


@every_toy
def test_two_sessions_prefill_the_same_prefix_at_once(engine_of, toy):
    """C3: finish in either order, decode both."""
    engine, tokens = engine_of(toy=toy), some_tokens(150)
    for first in (0, 1):
        pair = [engine.session(), engine.session()]
        engine.eval_batch([(pair[0], tokens), (pair[1], tokens)], chunk=64)
        pair[first].close()
        pair[1 - first].eval([1, 2, 3])
        assert_same(pair[1 - first], [*tokens, 1, 2, 3])
        pair[1 - first].close()


# ---- truncate ----------------------------------------------------------------------------------------------------


@every_toy
@every_kv
@pytest.mark.parametrize("n", [1, 7, 8, 9, 63, 64, 65, 200])
def test_truncate_everywhere_that_matters(engine_of, toy, kv_dtype, n):
    """A2, A3, A4, A6, A7: cut, go on, compare; inside a group of quantised rows, at the borders of pages and groups.
    Slack 256 keeps all exact."""
    engine, tokens, more = engine_of(toy=toy, kv_dtype=kv_dtype), some_tokens(n), some_tokens(20, 9)
    with engine.session() as parent:
        parent.eval(tokens)
        for pos in sorted({0, 1, 3, 4, 5, 7, 8, 9, 63, 64, 65, n - 2, n - 1, n} & set(range(n + 1))):
            with parent.fork() as session:
                session.truncate(pos)
                assert (session.pos, session.state) == (pos, "LIVE" if pos else "EMPTY")
                assert session.logits_valid == (pos == n)
                session.eval(more)
                assert_same(session, tokens[:pos] + more)
            with parent.fork() as session:  # without an eval in between, and twice
                session.truncate(pos)
                session.truncate(pos // 2)
                assert_same(session, tokens[: pos // 2])
        assert_same(parent, tokens)


@pytest.mark.parametrize("n", [1, PAGE - 1, PAGE, PAGE + 1])
@pytest.mark.parametrize("call", ["truncate", "fork", "nearest_exact"])
def test_positions_outside_are_refused_with_both_numbers(engine_of, n, call):
    with engine_of(toy="both").session() as session:
        session.eval(some_tokens(n))
        before = visible(session)
        for pos in (
            n + 1,
            -1,
            -n,
            -(2**31),
            2**31 - 1,
            2**31,
            2**32,
            2**32 + n,
            2**63 - 1,
            2**63,
            -(2**63),
            2**80,
            -(2**80),
        ):
            with pytest.raises(PositionError) as caught:
                getattr(session, call)(pos)
            assert caught.value.held == n and (caught.value.wanted == pos or abs(pos) > 2**62)
            assert str(n) in str(caught.value)
        for wrong in (1.0, "1", None if call != "fork" else 1.5, [1]):
            with pytest.raises(ValueError):
                getattr(session, call)(wrong)
        assert visible(session) == before


@pytest.mark.parametrize(
    "toy, kv_dtype",
    [("plain", "f16"), ("plain", "q8_0"), ("both", "f16"), ("both", "q8_0"), ("wide", "f32"), ("gemma3", "f16")],
)
def test_seven_forward_five_back(engine_of, toy, kv_dtype):
    """A thousand times, so that every place in a page, a group and a window is cut at."""
    engine, rng, tokens = engine_of(toy=toy, kv_dtype=kv_dtype), np.random.default_rng(3), []
    with engine.session() as session:
        for step in range(1000):
            new = rng.integers(0, 512, 7).tolist()
            session.eval(new, logits=None)
            session.truncate(session.pos - 5)
            tokens += new[:2]
            if step % 250 == 249:
                session.check()
        assert_same(session, tokens)


@every_toy
def test_cut_inside_a_shared_page(engine_of, toy):
    """C11, C15: both sides of a fork go on in the page that they share; each copies it once."""
    engine, tokens = engine_of(toy=toy), some_tokens(100)
    parent = engine.session()
    parent.eval(tokens)
    start = engine.ledger()
    children = [parent.fork(pos) for pos in (70, 99, 100)]
    assert engine.ledger()["bytes_used"] == start["bytes_used"], "a fork copies nothing"
    for i, child in enumerate(children):
        child.eval([i, i + 1])
    writes = [(pos // s.stride, (pos + 2) // s.stride) for pos in (70, 99, 100) for s in engine.streams]
    used = engine.ledger()["pages_used"] - start["pages_used"]
    assert used == sum(end > first for first, end in writes), "one copy of one page for each stream that a child writes"
    parent.truncate(80)
    parent.eval([9, 9])
    assert_same(parent, [*tokens[:80], 9, 9])
    for i, (child, pos) in enumerate(zip(children, (70, 99, 100), strict=True)):
        assert_same(child, [*tokens[:pos], i, i + 1])
    parent.close()
    for child in children[:2]:
        child.close()
    assert_same(children[2], [*tokens, 2, 3])


@every_toy
def test_forks_of_forks_freed_in_every_order(engine_of, toy):
    engine = engine_of(toy=toy)
    start = engine.ledger()["pages_used"]
    for order in ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)):
        a = engine.session()
        a.eval(some_tokens(130))
        b = a.fork(100)
        c = b.fork(64)
        family, texts = [a, b, c], [some_tokens(130), some_tokens(100), some_tokens(64)]
        for i in order:
            for k, session in enumerate(family):
                if session is not None:
                    session.eval([i])
                    texts[k].append(i)
                    assert_same(session, texts[k])
            family[i].close()
            family[i] = None
        assert engine.ledger()["pages_used"] == start


# ---- sync --------------------------------------------------------------------------------------------------------


@every_toy
def test_sync_counts(engine_of, toy):
    """A16, D1, D10: what is reused is what can be, and never less; logits are valid afterwards, never stale."""
    engine, tokens = engine_of(toy=toy), some_tokens(200)
    with engine.session() as session:
        cases = [  # tokens, reused, evaluated
            (tokens[:150], 0, 150),
            (tokens[:150], 150, 0),  # equal, logits valid
            (tokens, 150, 50),
            (tokens[:120], 119, 1),  # a strict prefix: only the last token again
            (tokens[:120], 120, 0),
            ([*tokens[:64], 7, 8], 64, 2),
            (tokens[:64], 63, 1),
            ([5], 0, 1),
            ([5], 1, 0),
            ([], 0, 0),
            (tokens[:65], 0, 65),
        ]
        for wanted, reused, evaluated in cases:
            result = session.sync(wanted)
            assert (result.reused, result.evaluated) == (reused, evaluated)
            assert session.logits_valid == bool(wanted)
            assert_same(session, wanted)
        session.truncate(64)
        assert (session.sync(tokens[:64]).reused, session.logits_valid) == (63, True)
        session.eval(tokens[64:70], logits=None)
        result = session.sync(tokens[:70])
        assert (result.reused, result.evaluated) == (69, 1)
        assert_same(session, tokens[:70])
