"""The other side of the random walk: what a session must be, as plain lists, and what a call may have done to it.

The rules are in test_contract.py.
"""

from __future__ import annotations

import gc
import itertools
import sys
import tempfile

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
)
from oracle import TEST_BUILD, Fresh, assert_same, feed, make_engine, settled, some_tokens

import ds4
from ds4.errors import (
    Cancelled,
    ComputeError,
    ContextFull,
    NoLogits,
    PoolFull,
    SystemResourceError,
)

SLACK = 16


class Boom(Exception):
    """What a progress callback raises."""


class Line:
    """What a session must be: its tokens, whether it has logits, and from which row on it must still have every row."""

    def __init__(self, session, tokens=(), logits=False, low=None):
        self.session, self.tokens, self.logits, self.poisoned = session, list(tokens), logits, False
        self.low = dict(low) if low else {s.reach: 0 for s in session.engine.streams if s.reach}

    @property
    def pos(self):
        return len(self.tokens)

    def grew(self, tokens):
        """After a commit everything within reach and slack of the new position is there."""
        self.tokens += tokens
        for reach in self.low:
            self.low[reach] = max(self.low[reach], self.pos - reach - SLACK, 0)

    def cut(self, pos):
        if pos < self.pos:
            self.logits = False
        del self.tokens[pos:]
        for reach in self.low:
            self.low[reach] = min(self.low[reach], max(0, pos - reach))

    def must_be_exact(self, pos):
        return pos == 0 or pos == self.pos or all(max(0, pos - reach) >= low for reach, low in self.low.items())


class Remembered:
    """A mark: where, on which line, with which logits; `alive` until the line is cut below it."""

    def __init__(self, mark, line):
        self.mark, self.line, self.pos, self.logits, self.alive = mark, line, line.pos, line.logits, True


class Walker(RuleBasedStateMachine):
    """The world of one walk: an engine, lines and marks."""

    options: dict = {}
    toy = "plain"

    @initialize(n=st.sampled_from([0, 20, 70, 200, 300]), seed=st.integers(0, 10**6))
    def start(self, n, seed):
        """A session of n tokens, with marks near its beginning and in its middle."""
        self.engine = engine_of(self.toy, self.options)
        self.begin = settled(self.engine.ledger())
        self.lines, self.marks, self.arrays, self.known = [], [], [], {}
        self.folder = tempfile.TemporaryDirectory()
        self.steps = itertools.count()
        self.new_session(0)
        for piece in (some_tokens(n // 5, seed), some_tokens(n // 5, seed + 1), some_tokens(n - n // 5 * 2, seed + 2)):
            feed(self.lines[0].session, piece)
            for i in range(0, len(piece), 50):
                self.lines[0].grew(piece[i : i + 50])
            self.lines[0].logits = False
            self.mark(0, 0)

    def line(self, pick, alive=True):
        lines = [line for line in self.lines if not (alive and line.poisoned)]
        return lines[pick % len(lines)] if lines else None

    def fresh(self, tokens):
        key = tuple(tokens)
        if key not in self.known:
            self.known[key] = Fresh(self.engine, tokens)
        return self.known[key]

    def kill_marks(self, line, pos):
        for m in self.marks:
            m.alive &= m.line is not line or m.pos <= pos

    def cut(self, line, pos):
        line.cut(pos)
        self.kill_marks(line, pos)

    def appended(self, parts, call, chunk=None):
        """Runs a call that appends `parts` = [(line, tokens)], and works out from its outcome what has been committed
        (K6). The positions must be those at the end of one round, and nothing may be lost. Returns the error."""
        before, reserved = [line.pos for line, _ in parts], [line.session.reserved for line, _ in parts]
        error = None
        try:
            call()
        except (Cancelled, ComputeError, SystemResourceError, PoolFull, ContextFull, Boom) as e:
            error = e
        for kind in ("kernel", "alloc", "device"):
            if TEST_BUILD:
                self.engine.fault(kind, 0)
        after = [line.session.pos for line, _ in parts]
        rounds = list(whole_rounds([len(tokens) for _, tokens in parts], chunk or 512))
        done = [a - b for a, b in zip(after, before, strict=True)]
        assert done in ([rounds[-1]] if error is None else rounds), f"{done} is not the end of a round of {rounds}"
        for (line, tokens), n in zip(parts, done, strict=True):
            line.grew(tokens[:n])
            if n:
                line.logits = n == len(tokens)
        if isinstance(error, PoolFull):
            assert not any(done) and error.needed > error.free >= 0 and "report" not in str(error)
            assert len(parts) > 1 or chunk and chunk > 512 or before[0] + len(parts[0][1]) > reserved[0], (
                "the reserve was not there"
            )
        if isinstance(error, ContextFull):
            assert not any(done) and error.wanted > error.ctx
        if error is not None and not isinstance(error, Boom):
            assert (error.positions if error.positions is not None else [error.pos]) == after
        return error

    def synced(self, line, wanted, chunk, fault=0, kind="kernel"):
        k = next(
            (i for i, (a, b) in enumerate(zip(line.tokens, wanted, strict=False)) if a != b), min(line.pos, len(wanted))
        )
        start = line.session.nearest_exact(k)
        ready = line.logits and k == line.pos == len(wanted)
        again = start == len(wanted) > 0 and not ready
        was, result = list(line.tokens), []
        if fault:
            self.engine.fault(kind, fault)

        def call():
            try:
                result.append(line.session.sync(wanted, chunk=chunk))
            except PoolFull:
                assert line.session.tokens == was
                raise

        if again or ready or not wanted:
            try:
                call()
                assert (result[0].reused, result[0].evaluated) == ((start - 1, 1) if again else (len(wanted), 0))
                if start < line.pos:
                    self.cut(line, start)
                line.logits = bool(wanted)
            except (PoolFull, ComputeError, SystemResourceError) as error:
                assert error.pos in (line.pos, start), "a failed sync lost tokens that it had to keep"
                self.cut(line, error.pos)
            if TEST_BUILD:
                self.engine.fault(kind, 0)
            return
        # cut, then appended; a call that was refused has not cut either
        logits, low, marks = line.logits, dict(line.low), [m.alive for m in self.marks]
        error = None
        if start < line.pos:
            self.cut(line, start)
        try:
            call()
        except (PoolFull, ComputeError, SystemResourceError, ContextFull) as e:
            error = e
        if TEST_BUILD:
            self.engine.fault(kind, 0)
        if error is None:
            assert (result[0].reused, result[0].evaluated) == (start, len(wanted) - start)
            line.grew(wanted[start:])
            line.logits = True
            return
        pos = line.session.pos
        assert error.pos == pos
        if line.session.tokens == was:  # refused before anything was touched
            line.tokens, line.logits, line.low = was, logits, low
            for m, alive in zip(self.marks, marks, strict=True):
                m.alive = alive
            return
        assert isinstance(error, (ComputeError, SystemResourceError)) and start <= pos < len(wanted)
        assert (pos - start) % (chunk or 512) == 0
        line.grew(wanted[start:pos])
        line.logits = False if pos > start or start < len(was) else line.logits

    def expect_nearest(self, line, pos, nearest):
        """Never above pos, never below a position that the past of the session guarantees."""
        assert nearest <= pos
        sure = max([m.pos for m in self.marks if m.alive and m.line is line and m.pos <= pos], default=0)
        sure = next((p for p in range(pos, sure, -1) if line.must_be_exact(p)), sure)
        assert nearest >= sure, f"{sure} must be exact, nearest_exact({pos}) is {nearest} at {line.pos}"

    # ---- after every rule ----------------------------------------------------------------------------------------

    @invariant()
    def holds(self):
        for line in getattr(self, "lines", []):
            line.session.check()
            assert line.session.pos == line.pos
            assert line.session.logits_valid == line.logits
            if line.logits and line.pos:
                assert line.session.logits.shape == (512,)
            elif not line.poisoned:
                with pytest.raises(NoLogits):
                    line.session.logits  # noqa: B018
            assert line.session.tokens == line.tokens
        for m in getattr(self, "marks", []):
            assert m.mark.alive == m.alive
            if m.alive:
                assert m.mark.pos == m.pos

    def teardown(self):
        if not hasattr(self, "lines"):
            return
        failed = sys.exc_info()[0] is not None
        try:
            for line in [] if failed else self.lines:
                if not line.poisoned:
                    assert_same(line.session, line.tokens, self.fresh(line.tokens))
            assert all(array.tobytes() == data for array, data in self.arrays)
            for m in [] if failed else self.marks:
                if m.alive and m.line in self.lines and not m.line.poisoned:
                    m.line.session.rollback(m.mark)
                    self.cut(m.line, m.pos)
                    assert_same(m.line.session, m.line.tokens, self.fresh(m.line.tokens))
        finally:
            for line in self.lines:
                line.session.close()
            for m in self.marks:
                m.mark.release()
            self.lines, self.marks, self.arrays = [], [], []
            self.folder.cleanup()
        if settled(self.engine.ledger()) != self.begin:
            gc.collect()
        assert failed or settled(self.engine.ledger()) == self.begin


def whole_rounds(sizes, chunk):
    """What each segment has appended after 0, 1, ... rounds of at most `chunk` tokens, taken from the segments in
    order."""
    done = [0] * len(sizes)
    yield list(done)
    while done != sizes:
        room = chunk
        for i, size in enumerate(sizes):
            take = min(size - done[i], room)
            done[i] += take
            room -= take
        yield list(done)


_made: dict[str, ds4.Engine] = {}


def engine_of(toy, options):
    key = repr((toy, sorted(options.items())))
    if key not in _made:
        _made[key] = make_engine(toy=toy, reach_slack=SLACK, **options)
    return _made[key]
