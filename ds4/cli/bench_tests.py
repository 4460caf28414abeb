"""The tests of `ds4 bench`, named as users of llama-bench know them: pp512, tg128 @ d2048, truncate @ d2048 ...

A test prepares (`setup`), is timed (`work`), and compares (`done`): after every run, the timed ones too, the next
logits must be those of a fresh prefill of the same tokens in other chunks, bit for bit. `Timeline` holds what the tests
share; `benchmarks/` runs the same tests through pytest-benchmark.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ds4 import core, sampling
from ds4 import engine as engines
from ds4.cli.roofs import write_durably
from ds4.cli.scenario import time_text
from ds4.errors import Ds4Error
from ds4.memory import size_text

if TYPE_CHECKING:
    from ds4.cli.output import Output
    from ds4.engine import Engine, Mark, Session

OTHER_CHUNK = 160  # of the fresh prefills; the timed ones have the default of 512
SESSIONS = 8
BATCH_STEPS = 16
STEPS = 32  # in which Python is measured
SEVERAL = 20  # runs of what takes microseconds
EDITS = (25, 50, 90)
MARGIN = 64  # tokens behind the longest test, for what follows it
_SEED = 7

Ids = npt.NDArray[np.int32]


class Timeline:
    """One session of random tokens that is brought to one depth after the other, the logits that a fresh prefill has
    at the positions which are compared, and snapshots. A context manager."""

    def __init__(self, engine: Engine, length: int, out: Output) -> None:
        self.engine, self.out = engine, out
        self.tokens: Ids = np.random.default_rng(_SEED).integers(0, engine.vocab, length + MARGIN, dtype=np.int32)
        self.one = [self.tokens[i : i + 1] for i in range(len(self.tokens))]
        self._open = ExitStack()
        self.folder = Path(self._open.enter_context(tempfile.TemporaryDirectory(prefix="ds4-bench-")))
        self.session: Session = self._open.enter_context(engine.session(ctx=len(self.tokens)))
        self._fresh: dict[int, bytes] = {}
        self._snapshots: dict[int, Path] = {}

    def __enter__(self) -> Timeline:
        return self

    def __exit__(self, *unused: object) -> None:
        self._open.close()

    def at(self, depth: int) -> Session:
        """The session with the first `depth` tokens. It stops half-way once, where it gets an automatic mark: so a
        model with windows can go back there."""
        s = self.session
        if s.pos == depth and (depth == 0 or s.logits_valid) and np.array_equal(s.tokens, self.tokens[:depth]):
            return s
        if depth == 0:
            s.clear()
            return s
        with self.out.progress(f"context of {depth}", phase="context") as report:
            if s.pos < depth // 2:
                s.sync(self.tokens[: depth // 2], progress=report)
            s.sync(self.tokens[:depth], progress=report)
        return s

    def snapshot(self, depth: int) -> Path:
        if depth not in self._snapshots:
            self._snapshots[depth] = self.folder / f"{depth}.ds4"
            self.at(depth).save(self._snapshots[depth])
        return self._snapshots[depth]

    def prepare(self, positions: Iterable[int]) -> None:
        """Evaluates the tokens from nothing in other chunks, and keeps the logits at these positions."""
        wanted = sorted(set(positions) - {0} - self._fresh.keys())
        if not wanted:
            return
        total = wanted[-1]
        with (
            self.engine.session(ctx=len(self.tokens)) as s,
            self.out.progress("fresh prefill", phase="fresh") as report,
        ):
            for end in wanted:
                begin = s.pos
                s.eval(self.tokens[begin:end], chunk=OTHER_CHUNK, progress=_behind(report, begin, total))
                self._fresh[end] = s.logits.tobytes()

    def top(self, n: int) -> int:
        """The most likely token after the first n."""
        return int(np.frombuffer(self._fresh[n], np.float32).argmax())

    def fresh(self, tokens: Ids) -> bytes:
        """The logits after other tokens, from nothing."""
        with self.engine.session(ctx=len(tokens)) as s, self.out.progress("fresh prefill", phase="fresh") as report:
            s.eval(tokens, chunk=OTHER_CHUNK, progress=report)
            return s.logits.tobytes()

    def compare(self, what: str, s: Session, n: int) -> None:
        """Raises Ds4Error unless the session stands at `n` with the logits of a fresh prefill of the first n tokens."""
        self.prepare([n])
        same(what, s, n, self._fresh[n])


def same(what: str, s: Session, n: int, logits: bytes) -> None:
    if s.pos != n or s.logits.tobytes() != logits:
        raise Ds4Error(
            f"{what}: the next logits differ from those of a fresh prefill of the same {n} tokens, so no figure is "
            "printed: please report this as a bug"
        )


def _behind(report: Callable[[int, int], object], begin: int, total: int) -> Callable[[int, int], object]:
    return lambda done, _: report(begin + done, total)


class Test:
    """One test at one depth. `tokens`: evaluated by a run, 0 for what only moves the context. `passes`: of the model,
    in a run, each of so many sessions."""

    __test__ = False  # not pytest's
    kind = ""
    tokens = 0
    passes = 1
    sessions = 1
    several = False  # takes microseconds: more runs than those asked for

    def __init__(self, timeline: Timeline, depth: int, size: int = 0) -> None:
        self.timeline, self.engine, self.depth, self.size = timeline, timeline.engine, depth, size
        self.detail = ""

    @property
    def name(self) -> str:
        return self.kind + (f" @ d{self.depth}" if self.depth else "")

    @property
    def end(self) -> int:
        """The first position that the test does not need."""
        return self.depth + 1

    def positions(self) -> list[int]:
        """Where its logits are compared."""
        return [self.depth + 1]

    def setup(self) -> None:
        raise NotImplementedError

    def work(self) -> None:
        raise NotImplementedError

    def done(self) -> None:
        raise NotImplementedError

    def run(self) -> float:
        """One run: seconds of the work alone."""
        self.setup()
        start = time.perf_counter()
        self.work()
        seconds = time.perf_counter() - start
        self.done()
        return seconds

    def least(self) -> float | None:
        """One run of what the machine has to do at least for this, in seconds, where that can be measured."""
        return None

    def _go_on(self, s: Session, n: int) -> None:
        """The token at position n is evaluated next."""
        s.eval(self.timeline.one[n])
        self.timeline.compare(self.name, s, n + 1)


class _Evaluates(Test):
    """Tokens behind a depth; the session goes back by truncate or a mark, untimed."""

    mark: Mark | None = None

    @property
    def name(self) -> str:
        return f"{self.kind}{self.size}" + (f" @ d{self.depth}" if self.depth else "")

    @property
    def end(self) -> int:
        return self.depth + self.size

    def positions(self) -> list[int]:
        return [self.end]

    def setup(self) -> None:
        self.session = self.timeline.at(self.depth)
        self.mark = self.session.mark() if self.depth else None

    def done(self) -> None:
        self.timeline.compare(self.name, self.session, self.end)
        if self.mark is None:
            self.session.truncate(0)
        else:
            self.session.rollback(self.mark)
            self.mark.release()


class Prefill(_Evaluates):
    kind = "pp"

    def __init__(self, timeline: Timeline, depth: int, size: int) -> None:
        super().__init__(timeline, depth, size)
        self.tokens = size

    def work(self) -> None:
        self.session.eval(self.timeline.tokens[self.depth : self.end])


class Decode(_Evaluates):
    kind = "tg"

    def __init__(self, timeline: Timeline, depth: int, size: int) -> None:
        super().__init__(timeline, depth, size)
        self.tokens = self.passes = size

    def work(self) -> None:
        for one in self.timeline.one[self.depth : self.end]:
            self.session.eval(one)


class Truncate(Test):
    """To half of the depth, or the nearest exact position below, on a session that shares no page: it comes from a
    snapshot."""

    kind = "truncate"
    several = True

    def __init__(self, timeline: Timeline, depth: int, size: int = 0) -> None:
        super().__init__(timeline, depth, depth // 2)

    def positions(self) -> list[int]:
        return [self.size + 1]

    def setup(self) -> None:
        self.session = self.engine.load(self.timeline.snapshot(self.depth))
        self.size = self.session.nearest_exact(self.depth // 2)
        self.detail = f"to {self.size}"

    def work(self) -> None:
        self.session.truncate(self.size)

    def done(self) -> None:
        with self.session:
            self._go_on(self.session, self.size)


class Fork(Test):
    kind = "fork"
    several = True

    def positions(self) -> list[int]:
        return [self.depth, self.depth + 1]

    def setup(self) -> None:
        self.session = self.timeline.at(self.depth)

    def work(self) -> None:
        self.child = self.session.fork()

    def done(self) -> None:
        with self.child:
            self._go_on(self.child, self.depth)
        self.timeline.compare("the parent of a fork", self.session, self.depth)


class FirstEval(Test):
    """One token behind a fork in the middle of a page, which is copied then."""

    kind = "first eval after fork"
    tokens = 1

    @property
    def place(self) -> int:
        return self.depth if self.depth % self.engine.page_rows else self.depth - self.engine.page_rows // 2

    def positions(self) -> list[int]:
        return [self.place + 1]

    def setup(self) -> None:
        self.child = self.timeline.at(self.depth).fork(self.place)
        self.detail = f"at {self.place}: copies a page of each stream"

    def work(self) -> None:
        self.child.eval(self.timeline.one[self.place])

    def done(self) -> None:
        with self.child:
            self.timeline.compare(self.name, self.child, self.place + 1)


class MarkRollback(Test):
    """A mark and the way back to it; the token in between is not timed."""

    kind = "mark+rollback"
    several = True

    def setup(self) -> None:
        self.session = self.timeline.at(self.depth)

    def work(self) -> None:
        self.mark = self.session.mark()

    def back(self) -> None:
        self.session.rollback(self.mark)

    def ahead(self) -> None:
        self.session.eval(self.timeline.one[self.depth + 1])

    def done(self) -> None:
        self.timeline.compare(self.name, self.session, self.depth)
        self._go_on(self.session, self.depth)
        self.session.rollback(self.mark)
        self.mark.release()

    def positions(self) -> list[int]:
        return [self.depth, self.depth + 1]

    def run(self) -> float:
        self.setup()
        start = time.perf_counter()
        self.work()
        middle = time.perf_counter()
        self.ahead()
        second = time.perf_counter()
        self.back()
        seconds = time.perf_counter() - second + middle - start
        self.done()
        return seconds


class Save(Test):
    """A snapshot, durable. The least: to write as many bytes durably."""

    kind = "save"

    def setup(self) -> None:
        self.session = self.timeline.at(self.depth)
        self.path = self.timeline.folder / "saved.ds4"
        self.path.unlink(missing_ok=True)  # to free the old file is no part of it

    def work(self) -> None:
        self.session.save(self.path)

    def done(self) -> None:
        self.detail = size_text(self.path.stat().st_size)
        with self.engine.load(self.path) as loaded:
            self._go_on(loaded, self.depth)

    def least(self) -> float:
        data, path = self.path.read_bytes(), self.timeline.folder / "bytes"
        path.unlink(missing_ok=True)
        start = time.perf_counter()
        write_durably(path, data)
        return time.perf_counter() - start


class Load(Test):
    """A session from a snapshot. The least: to read as many bytes into memory that is there."""

    kind = "load"

    def setup(self) -> None:
        self.path = self.timeline.snapshot(self.depth)
        self.detail = size_text(self.path.stat().st_size)

    def work(self) -> None:
        self.loaded = self.engine.load(self.path)

    def done(self) -> None:
        with self.loaded:
            self._go_on(self.loaded, self.depth)

    def least(self) -> float:
        with open(self.path, "rb", buffering=0) as file:
            memory = bytearray(b"\1") * self.path.stat().st_size
            start = time.perf_counter()
            while file.readinto(memory):
                pass
            return time.perf_counter() - start


class Resync(Test):
    """A sync with one token edited at `size` percent of the context; every second run takes the edit back."""

    kind = "resync"

    def __init__(self, timeline: Timeline, depth: int, size: int) -> None:
        super().__init__(timeline, depth, size)
        self.edited = timeline.tokens[:depth].copy()
        place = depth * size // 100
        self.edited[place] = (self.edited[place] + 1) % timeline.engine.vocab
        self.logits: bytes | None = None

    @property
    def name(self) -> str:
        return f"resync {self.size}% @ d{self.depth}"

    def positions(self) -> list[int]:
        return [self.depth]

    def setup(self) -> None:
        self.session = self.timeline.session
        self.is_edited = np.array_equal(self.session.tokens, self.edited)  # other tests move it, too
        if not self.is_edited:
            self.timeline.at(self.depth)

    def work(self) -> None:
        to = self.timeline.tokens[: self.depth] if self.is_edited else self.edited
        self.synced = self.session.sync(to)

    def done(self) -> None:
        self.is_edited = not self.is_edited
        self.tokens = self.synced.evaluated
        self.detail = f"evaluated {self.synced.evaluated}, reused {self.synced.reused}"
        if not self.is_edited:
            self.timeline.compare(self.name, self.session, self.depth)
            return
        if self.logits is None:
            self.logits = self.timeline.fresh(self.edited)
        same(self.name, self.session, self.depth, self.logits)


class Batch(Test):
    """Decode of several sessions in one pass, each with tokens of its own behind a common front. `one`: a run of one
    session's decode, for comparison."""

    kind = "batch"
    sessions = SESSIONS

    def __init__(self, timeline: Timeline, depth: int, size: int = BATCH_STEPS) -> None:
        super().__init__(timeline, depth, size)
        self.tokens, self.passes = SESSIONS * size, size
        # one more than is timed: the first one copies pages
        self.own = [np.roll(timeline.tokens, -i)[: size + 1].copy() for i in range(SESSIONS)]
        self.children: list[Session] = []
        self.logits: list[bytes] = []
        self.single: list[float] = []

    @property
    def name(self) -> str:
        return f"batch{SESSIONS} tg{self.size}" + (f" @ d{self.depth}" if self.depth else "")

    @property
    def end(self) -> int:
        return self.depth + self.size + 1

    def positions(self) -> list[int]:
        return []

    def setup(self) -> None:
        self.close()
        session = self.timeline.at(self.depth)
        self.children = [session.fork() for _ in range(SESSIONS)]
        self._step(0)

    def close(self) -> None:
        for child in self.children:
            child.close()

    def _step(self, j: int) -> None:
        self.engine.eval_batch([(child, own[j : j + 1]) for child, own in zip(self.children, self.own, strict=True)])

    def work(self) -> None:
        for j in range(1, self.size + 1):
            self._step(j)

    def done(self) -> None:
        if not self.logits:
            self.logits = self._expected()
        for child, logits in zip(self.children, self.logits, strict=True):
            same(self.name, child, self.end, logits)
        self.close()

    def _expected(self) -> list[bytes]:
        """Of every session, each alone: the first from nothing, the others behind its front."""
        front = self.timeline.tokens[: self.depth]
        found = [self.timeline.fresh(np.concatenate([front, self.own[0]]))]
        with self.engine.session(ctx=self.end) as s:
            if self.depth:
                with self.timeline.out.progress("fresh prefill", phase="fresh") as report:
                    s.eval(front, chunk=OTHER_CHUNK, progress=report)
            for own in self.own[1:]:
                with s.fork() as alone:
                    alone.eval(own, chunk=5)
                    found.append(alone.logits.tobytes())
        return found

    def run(self) -> float:
        seconds = super().run()
        self.single.append(self.one())
        times = statistics.median(self.single) * SESSIONS / seconds
        self.detail = f"{times:.2f}x one session"
        return seconds

    def one(self) -> float:
        """The same steps of one session alone: seconds."""
        with self.timeline.at(self.depth).fork() as child:
            child.eval(self.own[0][:1])
            start = time.perf_counter()
            for j in range(1, self.size + 1):
                child.eval(self.own[0][j : j + 1])
            seconds = time.perf_counter() - start
            same("one session's decode", child, self.end, self.logits[0])
        return seconds


class _CoreClock:
    """The core's functions; `seconds` passed inside those that compute."""

    COMPUTE = frozenset({"ds4_eval", "ds4_sample"})

    def __init__(self) -> None:
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        function = getattr(core.lib, name)
        if name in self.COMPUTE:
            inner = function

            def function(*args: Any) -> Any:
                start = time.perf_counter()
                try:
                    return inner(*args)
                finally:
                    self.seconds += time.perf_counter() - start

        setattr(self, name, function)
        return function


@contextmanager
def core_clock() -> Iterator[_CoreClock]:
    """Counts the time that evals and sampling spend inside the core, as long as the block runs."""
    clock = _CoreClock()
    modules = (vars(engines), vars(sampling))
    for names in modules:
        names["lib"] = clock
    try:
        yield clock
    finally:
        for names in modules:
            names["lib"] = core.lib


class Overhead(Test):
    """What Python costs for each token: the time of a step minus the time inside the core, in one `eval` of a token. A
    run is the median of its steps."""

    kind = "python/eval"

    @property
    def place(self) -> int:
        return max(1, self.depth)  # generation needs a token before it

    @property
    def end(self) -> int:
        return self.place + STEPS

    def positions(self) -> list[int]:
        return [self.end]

    def compare(self, s: Session) -> None:
        self.timeline.compare(self.name, s, self.end)

    def steps(self, s: Session) -> Iterator[object]:
        for one in self.timeline.tokens[self.place : self.end].tolist():
            yield s.eval([one])

    def run(self) -> float:
        python, inside = [], []
        with self.timeline.at(self.place).fork() as s, core_clock() as clock:
            steps = self.steps(s)
            for _ in range(STEPS):
                clock.seconds, start = 0.0, time.perf_counter()
                next(steps)
                python.append(time.perf_counter() - start - clock.seconds)
                inside.append(clock.seconds)
            self.compare(s)
        self.detail = f"beside {time_text(statistics.median(inside))} inside the core"
        return statistics.median(python)


class Generation(Overhead):
    """The same of `generate`: sampling, text and stops too."""

    kind = "python/generate"
    logits: bytes | None = None

    def positions(self) -> list[int]:
        return []

    def compare(self, s: Session) -> None:
        if self.logits is None:
            self.logits = self.timeline.fresh(np.asarray(s.tokens, np.int32))
        same(self.name, s, self.end, self.logits)

    def steps(self, s: Session) -> Iterator[object]:
        return s.generate(sampling.Sampling(seed=1), max_tokens=STEPS, stop_ids=())


MOVES: dict[str, tuple[type[Test], ...]] = {
    "truncate": (Truncate,), "fork": (Fork, FirstEval), "mark+rollback": (MarkRollback,), "save": (Save,),
    "load": (Load,),
}  # fmt: skip
NAMES = ("pp", "tg", *MOVES, "resync", "batch", "overhead")


def tests_at(timeline: Timeline, depth: int, names: Sequence[str], pp: Sequence[int], tg: Sequence[int]) -> list[Test]:
    """The tests of these names at one depth; where there is no context nothing is moved."""
    found: list[Test] = []
    if "pp" in names:
        found += [Prefill(timeline, depth, size) for size in pp]
    if "tg" in names:
        found += [Decode(timeline, depth, size) for size in tg]
    if depth:
        found += [kind(timeline, depth) for name in names for kind in MOVES.get(name, ())]
        if "resync" in names:
            found += [Resync(timeline, depth, percent) for percent in EDITS]
    if "batch" in names:
        found.append(Batch(timeline, depth))
    if "overhead" in names:
        found += [Overhead(timeline, depth), Generation(timeline, depth)]
    return found


def length_of(depths: Sequence[int], names: Sequence[str], pp: Sequence[int], tg: Sequence[int]) -> int:
    """Positions that the tests need."""
    behind = [1, *(pp if "pp" in names else ()), *(tg if "tg" in names else ())]
    behind += [BATCH_STEPS + 1] * ("batch" in names) + [STEPS + 1] * ("overhead" in names)
    return max(depths) + max(behind)
