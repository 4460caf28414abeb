"""The contract as a random walk: sessions against plain lists of tokens.

Every rule does one thing to a session and to its list. After each, `check()` recomputes what the sessions and the pool
claim; at intervals and at the end a session is compared, bit for bit, with a fresh one that was prefilled once with the
list."""

from __future__ import annotations

from pathlib import Path

import hypothesis
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    precondition,
    rule,
    run_state_machine_as_test,
)
from oracle import KV_DTYPES, TEST_BUILD, TOYS, assert_same, some_tokens
from walk import SLACK, Boom, Line, Remembered, Walker

from ds4.errors import (
    ComputeError,
    ContextFull,
    InexactError,
    MarkError,
    NoLogits,
    Poisoned,
    PoolFull,
    PositionError,
    SystemResourceError,
)

SIZES = st.one_of(st.integers(1, 12), st.sampled_from([7, 8, 9, 23, 24, 25, 40, 63, 64, 65, 127, 128, 150]))
CHUNKS = st.sampled_from([None, 1, 7, 8, 63, 64, 65])
SEEDS = st.integers(0, 10**6)
PICK = st.integers(0, 10**6)
KINDS = st.sampled_from(["kernel", "alloc"])
WHERE = st.one_of(st.integers(1, 12), st.integers(1, 400))


class Walk(Walker):
    # ---- appending -----------------------------------------------------------------------------------------------

    @rule(pick=PICK, n=SIZES, seed=SEEDS, chunk=CHUNKS, want=st.sampled_from(["last", "last", "all", None]))
    def eval(self, pick, n, seed, chunk, want):
        if not (line := self.line(pick)):
            return
        tokens, out = some_tokens(n, seed), []
        error = self.appended(
            [(line, tokens)], lambda: out.append(line.session.eval(tokens, logits=want, chunk=chunk)), chunk
        )
        if error is None:
            line.logits = want is not None
            if want == "all":
                assert out[0].shape == (n, 512) and out[0][-1].tobytes() == line.session.logits.tobytes()
                middle = n // 2
                assert out[0][middle].tobytes() == self.fresh(line.tokens[: line.pos - n + middle + 1]).logits

    @rule(picks=st.lists(st.tuples(PICK, SIZES, SEEDS), min_size=2, max_size=4), chunk=CHUNKS)
    def eval_batch(self, picks, chunk):
        parts = {id(line): (line, some_tokens(n, seed)) for pick, n, seed in picks if (line := self.line(pick))}
        segments = [(line.session, tokens) for line, tokens in parts.values()]
        self.appended(list(parts.values()), lambda: self.engine.eval_batch(segments, chunk=chunk), chunk)

    @rule(pick=PICK, n=SIZES, seed=SEEDS, chunk=CHUNKS)
    def score(self, pick, n, seed, chunk):
        if not (line := self.line(pick)):
            return
        tokens, out = some_tokens(n, seed), []
        if self.appended([(line, tokens)], lambda: out.append(line.session.score(tokens, chunk=chunk)), chunk) is None:
            logits = (
                np.frombuffer(self.fresh(line.tokens[:-1]).logits, np.float32).astype(np.float64)
                if line.pos > 1
                else None
            )
            if logits is not None:
                wanted = logits[tokens[-1]] - logits.max() - np.log(np.exp(logits - logits.max()).sum())
                assert abs(out[0][-1] - wanted) < 1e-4

    @rule(pick=PICK)
    def refresh(self, pick):
        line = self.line(pick)
        if line and line.pos:
            try:
                line.session.refresh()
                line.logits = True
            except PoolFull:
                pass
        elif line:
            with pytest.raises(NoLogits):
                line.session.refresh()

    # ---- failing -------------------------------------------------------------------------------------------------

    @precondition(lambda self: TEST_BUILD)
    @rule(pick=PICK, n=SIZES, seed=SEEDS, chunk=CHUNKS, kind=KINDS, k=WHERE)
    def failing_eval(self, pick, n, seed, chunk, kind, k):
        if line := self.line(pick):
            tokens = some_tokens(n, seed)
            self.engine.fault(kind, k)
            self.appended([(line, tokens)], lambda: line.session.eval(tokens, chunk=chunk), chunk)

    @precondition(lambda self: TEST_BUILD)
    @rule(picks=st.lists(st.tuples(PICK, SIZES, SEEDS), min_size=2, max_size=4), chunk=CHUNKS, kind=KINDS, k=WHERE)
    def failing_eval_batch(self, picks, chunk, kind, k):
        self.engine.fault(kind, k)
        self.eval_batch(picks, chunk)

    @precondition(lambda self: TEST_BUILD)
    @rule(pick=PICK, kind=KINDS, k=st.integers(1, 60))
    def failing_refresh(self, pick, kind, k):
        line = self.line(pick)
        if not line or not line.pos:
            return
        self.engine.fault(kind, k)
        try:
            line.session.refresh()
            line.logits = True
        except (ComputeError, SystemResourceError, PoolFull) as error:
            assert error.pos == line.pos, "a failed refresh lost tokens"
        self.engine.fault(kind, 0)

    @precondition(lambda self: TEST_BUILD)
    @rule(pick=PICK, n=SIZES, seed=SEEDS, k=st.integers(1, 60))
    def failing_device(self, pick, n, seed, k):
        """A device that fails poisons the session: everything but clear, sync and close is refused."""
        line = self.line(pick)
        if not line:
            return
        self.engine.fault("device", k)
        tokens, pos = some_tokens(n, seed), line.pos
        error = self.appended([(line, tokens)], lambda: line.session.eval(tokens, chunk=7), 7)
        if not isinstance(error, ComputeError):
            return
        line.poisoned, line.logits = True, False
        assert line.session.state == "POISONED" and line.pos >= pos
        s = line.session
        for call in (
            lambda: s.eval([1]),
            lambda: s.truncate(0),
            s.fork,
            s.mark,
            s.refresh,
            lambda: s.reserve(1),
            lambda: s.score([1]),
            s.mark_auto,
        ):
            with pytest.raises(Poisoned):
                call()
        for m in self.marks:
            if m.alive and m.line is line:
                with pytest.raises(Poisoned):
                    s.rollback(m.mark)

    @rule(
        pick=PICK, n=st.integers(20, 150), seed=SEEDS, at=st.integers(0, 150), how=st.sampled_from(["cancel", "raise"])
    )
    def cancelled_eval(self, pick, n, seed, at, how):
        line = self.line(pick)
        if not line:
            return

        def stop(done, total):
            assert 0 <= done <= total == n
            if done >= at:
                if how == "raise":
                    raise Boom
                line.session.cancel()

        tokens = some_tokens(n, seed)
        self.appended([(line, tokens)], lambda: line.session.eval(tokens, chunk=9, progress=stop), 9)

    @rule(pick=PICK)
    def idle_cancel(self, pick):
        self.lines[pick % len(self.lines)].session.cancel()

    # ---- sync ----------------------------------------------------------------------------------------------------

    @rule(
        pick=PICK,
        keep=st.one_of(st.integers(0, 400), st.integers(-30, -1)),
        n=st.integers(0, 70),
        seed=SEEDS,
        chunk=CHUNKS,
        fault=st.one_of(st.just(0), st.just(0), WHERE),
        kind=KINDS,
    )
    def sync(self, pick, keep, n, seed, chunk, fault, kind):
        """Keeps `keep` tokens (from the end when negative) of what the session holds."""
        line = self.line(pick)
        if not line:
            return
        keep = max(0, min(line.pos, keep if keep >= 0 else line.pos + keep))
        tail = some_tokens(n, seed)
        if keep < line.pos and tail and tail[0] == line.tokens[keep]:
            tail[0] = (tail[0] + 1) % 512
        self.synced(line, line.tokens[:keep] + tail, chunk, fault if TEST_BUILD else 0, kind)

    @rule(pick=PICK, other=PICK, chunk=CHUNKS)
    def sync_to_another(self, pick, other, chunk):
        if line := self.line(pick):
            self.synced(line, list(self.lines[other % len(self.lines)].tokens), chunk)

    # ---- going back ----------------------------------------------------------------------------------------------

    @rule(pick=PICK, at=st.one_of(st.integers(0, 400), st.integers(-40, 0)))
    def truncate(self, pick, at):
        line = self.line(pick)
        if not line:
            return
        pos = max(0, min(line.pos, at if at > 0 else line.pos + at))
        nearest = line.session.nearest_exact(pos)
        self.expect_nearest(line, pos, nearest)
        if nearest == pos:
            line.session.truncate(pos)
        else:
            with pytest.raises(InexactError) as caught:
                line.session.truncate(pos)
            assert (caught.value.wanted, caught.value.nearest) == (pos, nearest)
            with pytest.raises(InexactError):
                line.session.fork(pos)
            assert line.session.pos == line.pos, "a refused truncate has moved the session"
            line.session.truncate(nearest)
        self.cut(line, nearest)

    @rule(pick=PICK, out=st.sampled_from([-1, -(2**31), -(2**63), 1, 1000, 2**31, 2**32, 2**63, 2**70]))
    def truncate_outside(self, pick, out):
        line = self.line(pick)
        if line:
            for call in (line.session.truncate, line.session.fork, line.session.nearest_exact):
                with pytest.raises(PositionError):
                    call(out if out < 0 else line.pos + out)

    @rule(
        pick=PICK,
        at=st.one_of(st.none(), st.integers(-80, 0), st.integers(1, 300)),
        k=st.one_of(st.just(0), st.integers(1, 12)),
    )
    def fork(self, pick, at, k):
        line = self.line(pick)
        if not line or len(self.lines) > 5:
            return
        pos = None if at is None else line.session.nearest_exact(max(0, min(line.pos, at if at > 0 else line.pos + at)))
        if TEST_BUILD:
            self.engine.fault("alloc", k)
        try:
            session = line.session.fork(pos)
        except SystemResourceError:
            assert k
            return
        except PoolFull as error:  # the parent must copy its last page now, and its reserve has none for that
            assert error.needed > error.free and line.session.reserved
            return
        finally:
            if TEST_BUILD:
                self.engine.fault("alloc", 0)
        end = line.pos if pos is None else pos
        child = Line(session, line.tokens[:end], line.logits and end == line.pos, line.low)
        for reach in child.low:
            child.low[reach] = min(max(0, end - reach), max(child.low[reach], end - reach - SLACK))
        self.lines.append(child)

    @rule(pick=PICK, k=st.one_of(st.just(0), st.just(1)))
    def mark(self, pick, k):
        line, k = self.line(pick), k if TEST_BUILD else 0
        if not line or len(self.marks) > 8:
            return
        if TEST_BUILD:
            self.engine.fault("alloc", k)
        try:
            self.marks.append(Remembered(line.session.mark(), line))
            assert not k
        except SystemResourceError:
            assert k
        except PoolFull as error:
            assert error.needed > error.free and line.session.reserved
        if TEST_BUILD:
            self.engine.fault("alloc", 0)

    @rule(pick=PICK, pinned=st.booleans())
    def mark_auto(self, pick, pinned):
        if line := self.line(pick):
            line.session.mark_auto(pinned=pinned)

    @precondition(lambda self: self.marks)
    @rule(pick=PICK, k=st.one_of(st.just(0), st.just(0), st.integers(1, 3)))
    def rollback(self, pick, k):
        m = self.marks[pick % len(self.marks)]
        if m.line not in self.lines or m.line.poisoned:
            return
        assert m.mark.alive == m.alive
        if not m.alive:
            with pytest.raises(MarkError):
                m.line.session.rollback(m.mark)
            return
        if TEST_BUILD:
            self.engine.fault("alloc", k)
        try:
            m.line.session.rollback(m.mark)
        except SystemResourceError:
            assert k
            return
        finally:
            if TEST_BUILD:
                self.engine.fault("alloc", 0)
        self.cut(m.line, m.pos)
        m.line.logits = m.logits

    @precondition(lambda self: self.marks)
    @rule(pick=PICK, other=PICK)
    def rollback_of_another(self, pick, other):
        m, line = self.marks[pick % len(self.marks)], self.line(other)
        if line and m.line is not line:
            with pytest.raises(MarkError):
                line.session.rollback(m.mark)

    @precondition(lambda self: self.marks)
    @rule(pick=PICK)
    def release(self, pick):
        self.marks.pop(pick % len(self.marks)).mark.release()

    # ---- the rest ------------------------------------------------------------------------------------------------

    @rule(ctx=st.sampled_from([None, 64, 300]))
    def new_session(self, ctx):
        if len(self.lines) < 5:
            self.lines.append(Line(self.engine.session(ctx or None)))

    @rule(pick=PICK)
    def clear(self, pick):
        line = self.line(pick, alive=False)
        line.session.clear()
        self.cut(line, 0)
        line.poisoned = line.logits = False

    @rule(pick=PICK, n=st.integers(0, 90), seed=SEEDS)
    def sync_of_a_poisoned_one(self, pick, n, seed):
        poisoned = [line for line in self.lines if line.poisoned]
        if not poisoned:
            return
        line, wanted = poisoned[pick % len(poisoned)], some_tokens(n, seed)
        try:
            result = line.session.sync(wanted)
        except (PoolFull, ContextFull):
            assert line.session.state == "POISONED"
            return
        assert (result.reused, result.evaluated) == (0, n)
        self.cut(line, 0)
        line.grew(wanted)
        line.poisoned, line.logits = False, n > 0

    @rule(pick=PICK, n=st.sampled_from([0, 1, 64, 200]))
    def reserve(self, pick, n):
        line = self.line(pick)
        if not line:
            return
        before = line.session.reserved
        try:
            line.session.reserve(n)
            assert line.session.reserved == (line.pos + n if n else 0)
        except PoolFull as error:
            assert error.needed > error.free and line.session.reserved == before
        except ContextFull as error:
            assert (error.wanted, error.ctx) == (line.pos + n, line.session.ctx) and line.session.reserved == before

    @precondition(lambda self: len(self.lines) > 1)
    @rule(pick=PICK)
    def close(self, pick):
        line = self.lines.pop(pick % len(self.lines))
        line.session.close()
        self.kill_marks(line, -1)

    @rule(
        pick=PICK,
        ctx=st.sampled_from([None, 200]),
        kind=st.sampled_from(["", "", "write", "alloc"]),
        k=st.integers(1, 12),
    )
    def save_and_load(self, pick, ctx, kind, k):
        line = self.line(pick)
        if not line or len(self.lines) > 5:
            return
        path = Path(self.folder.name) / f"{next(self.steps)}.ds4"
        if kind and TEST_BUILD:
            self.engine.fault(kind, k)
        try:
            line.session.save(path)
        except SystemResourceError as error:
            left = list(path.parent.iterdir())
            assert kind and left in ([], [path]), "a failed save leaves nothing behind"
            assert not left or "the new snapshot is whole" in str(error)
            if not left:
                return
        finally:
            if kind and TEST_BUILD:
                self.engine.fault(kind, 0)
        try:
            loaded = Line(self.engine.load(path, ctx), line.tokens, line.logits, line.low)
            led = self.engine.ledger()
            fit = led["auto_mark_bytes"] + self.engine.mark_bytes <= led["bytes_budget"] // 8
            for p in range(line.pos + 1):  # the same ability as before (B9), where all its marks fit as automatic ones
                before, after = line.session.nearest_exact(p), loaded.session.nearest_exact(p)
                assert after == before or after < before and not (fit and "pool_tokens" not in self.options)
            self.lines.append(loaded)
        except PoolFull:
            pass
        except ContextFull:
            assert ctx and ctx < line.pos
        finally:
            path.unlink()

    @rule(pick=PICK)
    def keep_the_logits(self, pick):
        """An array handed out stays as it was, whatever the session does (K5)."""
        line = self.line(pick)
        if line and line.logits and len(self.arrays) < 8:
            self.arrays.append((line.session.logits, line.session.logits.tobytes()))

    @rule(pick=PICK)
    def compare(self, pick):
        if line := self.line(pick):
            assert_same(line.session, line.tokens, self.fresh(line.tokens))


def walk(toy, options, examples, steps, number=None, **more):
    """`number`: the same walks every time, other ones for each number."""
    machine = type("Walk", (Walk,), {"toy": toy, "options": options})
    machine = machine if number is None else hypothesis.seed(number)(machine)
    checks = list(HealthCheck)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=checks, **more
        ),
    )


QUICK = [
    ("plain", {"kv_dtype": "f16", "threads": 2}),
    ("plain", {"kv_dtype": "q8_0", "pool_tokens": 600}),
    ("window", {"kv_dtype": "f32", "threads": 1}),
    ("window", {"kv_dtype": "q8_0", "threads": 2, "pool_tokens": 600}),
    ("both", {"kv_dtype": "f16", "threads": 2}),
    ("both", {"kv_dtype": "q8_0", "pool_tokens": 500}),
    ("both", {"kv_dtype": "f32", "backend": "ref"}),
    ("wide", {"kv_dtype": "f16"}),
    ("gemma3", {"kv_dtype": "f16", "threads": 2}),
    ("gemma3", {"kv_dtype": "q8_0", "pool_tokens": 600}),
    ("qwen3_moe", {"kv_dtype": "f16", "threads": 2}),
    ("deepseek_v4", {"kv_dtype": "f16", "threads": 2}),
    ("deepseek_v4", {"kv_dtype": "q8_0", "pool_tokens": 600}),
]


@pytest.mark.parametrize(
    "toy, options", QUICK, ids=lambda v: v if isinstance(v, str) else "-".join(map(str, v.values()))
)
def test_random_walk(toy, options):
    number = QUICK.index((toy, options))
    walk(toy, options, 6, 30, number, database=None, phases=[Phase.generate])  # shrinking would take minutes


LONG = [
    (toy, {"kv_dtype": kv_dtype, "threads": 1 + i % 2, "pool_tokens": (900, 16384)[(i + j) % 2]})
    for i, toy in enumerate(TOYS)
    for j, kv_dtype in enumerate(KV_DTYPES)
]
LONG += [(toy, {"kv_dtype": "f16", "backend": "ref", "pool_tokens": 900}) for toy in ("plain", "both", "gemma3")]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "toy, options", LONG, ids=lambda v: v if isinstance(v, str) else "-".join(map(str, v.values()))
)
def test_long_random_walk(toy, options):
    walk(toy, options, examples=2 if options.get("backend") == "ref" else 15, steps=60)
