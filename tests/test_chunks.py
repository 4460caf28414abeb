"""K1, K2 and K3, case by case: chunk sizes, threads, batch mates, places to cut, windows left and entered again, marks."""

from __future__ import annotations

import numpy as np
import pytest
from oracle import KV_DTYPES, PAGE, TOYS, WINDOWED, assert_same, feed, fresh_logits, held_rows, some_tokens

from ds4.errors import InexactError, MarkError, NoLogits, PositionError

every_toy = pytest.mark.parametrize("toy", TOYS)
every_kv = pytest.mark.parametrize("kv_dtype", KV_DTYPES)


def dump(session):
    """Everything of a session that a caller can see, to find that nothing has changed."""
    rows = [held_rows(session, i) for i in range(len(session.engine.streams))]
    logits = session.logits.tobytes() if session.logits_valid else None
    return session.tokens, session.pos, session.state, rows, logits, session.auto_marks, session.reserved


# ---- chunks, threads, batches ----------------------------------------------------------------------------------------------


@every_toy
@pytest.mark.parametrize("kv_dtype, threads", [("f32", 1), ("f16", 2), ("q8_0", 1)])
def test_bits_do_not_depend_on_chunks_or_threads(engine_of, toy, kv_dtype, threads):
    engine, tokens = engine_of(toy=toy, kv_dtype=kv_dtype, threads=threads), some_tokens(200)
    with engine_of(toy=toy, kv_dtype=kv_dtype).session() as whole:
        wanted = whole.eval(tokens, logits="all", chunk=2048).tobytes()
        rows = [held_rows(whole, i) for i in range(len(engine.streams))]
        for chunk in (1, 7, 8, 63, 64, 65, 512):
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
    """Of each token given all before it, from the same logits; chunks change no bit; an empty session's first token has nothing before it."""
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
@pytest.mark.parametrize("chunk", [None, 1, 64])
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


# ---- truncate --------------------------------------------------------------------------------------------------------------


@every_toy
@every_kv
@pytest.mark.parametrize("n", [1, 7, 8, 9, 63, 64, 65, 200])
def test_truncate_everywhere_that_matters(engine_of, toy, kv_dtype, n):
    """A2, A3, A4, A6, A7: cut, go on, compare; inside a group of quantised rows, at the borders of pages and groups. Slack 256 keeps all exact."""
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
        before = dump(session)
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
        assert dump(session) == before


@pytest.mark.parametrize(
    "toy, kv_dtype", [*((toy, "f16") for toy in TOYS), ("both", "f32"), ("both", "q8_0"), ("plain", "q8_0")]
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


# ---- windows ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("toy", WINDOWED)
def test_a_window_that_was_left_is_refused_and_nothing_changes(engine_of, toy):
    """A1, A5, K3: one stream cannot go back, so nothing does; the refusal says where it could."""
    engine, tokens = engine_of(toy=toy, reach_slack=16), some_tokens(300)
    with engine.session() as session:
        feed(session, tokens)
        before = dump(session)
        reach = max(stream.reach or 0 for stream in engine.streams)
        for pos in range(1, 300):
            nearest = session.nearest_exact(pos)
            assert nearest == pos if pos >= 300 - 16 else nearest in (0, pos)
            if pos < 300 - 16 - 64 and pos > reach:
                assert nearest == 0
            if nearest == pos:
                continue
            for call in (session.truncate, session.fork):
                with pytest.raises(InexactError) as caught:
                    call(pos)
                assert (caught.value.wanted, caught.value.nearest) == (pos, nearest)
                assert str(pos) in str(caught.value) and str(nearest) in str(caught.value)
        assert dump(session) == before
        assert_same(session, tokens)
        session.truncate(0)
        session.eval(tokens[:50])
        assert_same(session, tokens[:50])


@pytest.mark.parametrize("toy", WINDOWED)
def test_every_answer_of_nearest_exact_is_true(engine_of, toy):
    """B16: for each position that is said to be exact, truncate and fork there and compare."""
    engine, tokens = engine_of(toy=toy, reach_slack=16, pool_tokens=20000), some_tokens(400)
    with engine.session() as parent:
        parent.eval(tokens[:100], chunk=50)
        mark = parent.mark()
        parent.eval(tokens[100:])
        checked = 0
        for pos in range(0, 401, 7 if toy == "wide" else 1):
            nearest = parent.nearest_exact(pos)
            assert nearest <= pos and parent.nearest_exact(nearest) == nearest
            if nearest != pos or (checked := checked + 1) % 3:
                continue
            with parent.fork(pos) as child:
                assert_same(child, tokens[:pos])
                child.eval(tokens[pos : pos + 30], chunk=7)
                assert_same(child, tokens[: pos + 30])
        assert parent.nearest_exact(100) == 100 and checked > 16
        parent.rollback(mark)
        assert_same(parent, tokens[:100])


@pytest.mark.parametrize("toy", WINDOWED)
@pytest.mark.parametrize("slack", [0, 16])
def test_windows_crossed_left_and_entered_again(engine_of, toy, slack):
    """B2, B13, B16: eval far past the window, back as far as it goes, forward, again and again."""
    engine, rng, tokens = engine_of(toy=toy, reach_slack=slack), np.random.default_rng(5), []
    with engine.session() as session:
        for step in range(60):
            new = rng.integers(0, 512, int(rng.integers(1, 90))).tolist()
            session.eval(new, chunk=int(rng.choice([1, 7, 64, 512])))
            tokens += new
            pos = session.nearest_exact(int(rng.integers(max(0, session.pos - 120), session.pos + 1)))
            session.truncate(pos)
            del tokens[pos:]
            if step % 6 == 5:
                assert_same(session, tokens)
        assert_same(session, tokens)


@pytest.mark.parametrize("toy", WINDOWED)
@pytest.mark.parametrize("slack", [0, 1, 16])
def test_slack_is_kept(engine_of, toy, slack):
    """Within the slack every position is exact, whatever the chunks were; the memory of a windowed stream does not grow."""
    engine, tokens = engine_of(toy=toy, reach_slack=slack, pool_tokens=700), some_tokens(500)
    with engine.session() as session:
        for n in range(0, 500, 25):
            session.eval(tokens[n : n + 25], logits=None, chunk=9)
            for back in range(0, min(slack, session.pos) + 1):
                assert session.nearest_exact(session.pos - back) == session.pos - back
        windows = [stream for stream in engine.streams if stream.reach]
        most = sum(((w.reach + slack) // w.page_rows + 2) * w.page_bytes for w in windows)
        unlimited = sum(-(-500 // s.stride // s.page_rows) * s.page_bytes for s in engine.streams if not s.reach)
        assert session.bytes_held <= most + unlimited
        session.truncate(session.pos - slack)
        session.eval(tokens[500 - slack :])
        assert_same(session, tokens)


@pytest.mark.parametrize("toy", WINDOWED)
def test_sync_near_the_end_costs_little(engine_of, toy):
    """B1, B3, F5: a difference three tokens before the end is not a full prefill."""
    engine, tokens = engine_of(toy=toy), some_tokens(1000)
    with engine.session() as session:
        session.eval(tokens)
        edited = [*tokens[:997], (tokens[997] + 1) % 512, 4, 5]
        result = session.sync(edited)
        assert (result.reused, result.evaluated) == (997, 3)
        assert_same(session, edited)
        shorter = edited[:900] + edited[940:]  # a span was removed
        result = session.sync(shorter)
        assert result.evaluated <= 60 + 64
        assert_same(session, shorter)


# ---- sync -------------------------------------------------------------------------------------------------------------------


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


# ---- marks -------------------------------------------------------------------------------------------------------------------


@every_toy
@every_kv
def test_a_mark_far_outside_the_window(engine_of, toy, kv_dtype):
    """The page ranges of many marks overlap, are left far behind and are rolled back to, newest first."""
    engine, tokens = engine_of(toy=toy, kv_dtype=kv_dtype, reach_slack=16), some_tokens(1500)
    session, marks = engine.session(), []
    for n in (1, 20, 21, 64, 100, 128, 400, 405, 1000):
        session.eval(tokens[session.pos : n])
        marks.append((n, session.mark()))
    session.eval(tokens[1000:])
    assert all(session.nearest_exact(n) == n and mark.pos == n for n, mark in marks)
    for n, mark in reversed(marks):
        session.rollback(mark)
        assert session.logits_valid
        assert_same(session, tokens[:n])
        session.eval(tokens[n : n + 90], chunk=64)
        assert_same(session, tokens[: n + 90])
    n, mark = marks[0]
    session.rollback(mark)
    assert [m.alive for _, m in marks] == [True] + [False] * 8
    with pytest.raises(MarkError):
        session.rollback(marks[1][1])
    assert_same(session, tokens[:1])


@pytest.mark.parametrize("toy", WINDOWED)
def test_releasing_a_mark_gives_its_pages_back(engine_of, toy):
    engine, tokens = engine_of(toy=toy, reach_slack=16, pool_tokens=700), some_tokens(600)
    with engine.session() as session:
        feed(session, tokens)
        alone = engine.ledger()["bytes_used"]
        session.clear()
        feed(session, tokens[:300])
        marks = [session.mark() for _ in range(3)]
        feed(session, tokens[300:])
        pinned = engine.ledger()["bytes_used"] - alone
        assert 0 < pinned <= engine.mark_bytes
        for mark in marks[:2]:
            mark.release()
            assert engine.ledger()["bytes_used"] - alone == pinned
        with marks[2]:
            assert session.nearest_exact(300) == 300
        assert engine.ledger()["bytes_used"] == alone
        assert session.nearest_exact(300) == 0
        assert_same(session, tokens)


def test_marks_live_and_die_with_the_prefix(engine_of):
    """A mark is on one timeline: truncate below it and sync with a shorter prefix kill it; at or before the prefix it survives."""
    engine, tokens = engine_of(toy="window"), some_tokens(200)
    with engine.session() as session, engine.session() as other:
        session.eval(tokens[:50])
        early = session.mark()
        session.eval(tokens[50:100])
        late = session.mark()
        session.sync([*tokens[:100], 1, 2])
        assert early.alive and late.alive
        session.sync([*tokens[:99], 500, 2])
        assert early.alive and not late.alive
        session.truncate(50)
        assert early.alive
        child = session.fork()
        for wrong in (child, other):
            with pytest.raises(MarkError):
                wrong.rollback(early)
        session.eval(tokens[50:60])
        session.rollback(early)
        assert_same(session, tokens[:50])
        session.truncate(49)
        with pytest.raises(MarkError):
            session.rollback(early)
        with pytest.raises(MarkError):
            early.pos  # noqa: B018
        assert session.pos == 49
        end = session.mark()
        session.close()
        assert not end.alive
        assert_same(child, tokens[:50])


def test_a_mark_brings_its_logits_back(engine_of):
    engine, tokens = engine_of(), some_tokens(80)
    with engine.session() as session:
        session.eval(tokens[:40])
        with_logits = session.mark()
        session.eval(tokens[40:60], logits=None)
        without = session.mark()
        session.eval(tokens[60:])
        session.rollback(without)
        with pytest.raises(NoLogits):
            session.logits  # noqa: B018
        session.rollback(with_logits)
        assert session.logits.tobytes() == fresh_logits(engine, tokens[:40])


@pytest.mark.parametrize("toy", ["window", "both"])
def test_automatic_marks_are_set_thinned_and_bounded(engine_of, toy):
    """After evals of 64 tokens and more, and every 2048 positions; older ones lie farther apart; all of them hold an eighth of the pool at most."""
    engine, tokens = engine_of(toy=toy, reach_slack=16, pool_tokens=30000), some_tokens(4090)
    with engine.session() as session:
        session.eval(tokens[:63])
        assert session.auto_marks == 0
        session.eval(tokens[63:127])
        assert session.auto_marks == 1 and session.nearest_exact(127) == 127
        session.eval(tokens[127:4000], chunk=512)
        assert session.nearest_exact(2048) == 2048
        assert session.nearest_exact(2060) == 2048
        assert_same(session, tokens[:4000])
        with session.fork(2048) as child:
            assert child.auto_marks >= 1
            child.eval(tokens[2048:2100])
            assert_same(child, tokens[:2100])
    with engine.session() as session:
        for n in range(0, 4000, 64):
            session.eval(tokens[n : n + 64])
            assert engine.ledger()["auto_mark_bytes"] <= engine.pool_bytes // 8
        exact = [n for n in range(0, 4001, 64) if session.nearest_exact(min(n, session.pos)) == n]
        gaps = [b - a for a, b in zip(exact, exact[1:], strict=False)]
        assert 6 <= session.auto_marks <= 30, "about the logarithm of the position"
        assert all(a + 64 >= b for a, b in zip(gaps, gaps[1:], strict=False)), (
            f"older marks lie closer together: {exact}"
        )
        session.truncate(session.nearest_exact(2000))
        assert session.pos >= 1000
        assert_same(session, tokens[: session.pos])


def test_a_pinned_mark_goes_last(engine_of):
    """The end of a system prompt outlives all other automatic marks."""
    engine, tokens = engine_of(toy="window", reach_slack=16, pool_tokens=4096), some_tokens(4000)
    with engine.session() as session:
        session.eval(tokens[:100])
        session.mark_auto(pinned=True)
        for n in range(100, 3900, 100):
            session.eval(tokens[n : n + 100])
        assert session.nearest_exact(100) == 100
        result = session.sync([*tokens[:150], 1])
        assert (
            100 <= result.reused < 108 and result.reused + result.evaluated == 151
        )  # pages are whole: some more positions are exact
        assert_same(session, [*tokens[:150], 1])
