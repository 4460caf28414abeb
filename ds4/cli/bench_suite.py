"""The speed suite of `ds4 bench`: every test is verified, then all are timed, ours and the peers' runs in turn."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ds4 import models
from ds4.cli import bench_models, bench_tests
from ds4.cli.bench_peer import TESTS as PEER_TESTS
from ds4.cli.bench_peer import Peer, Refused
from ds4.cli.bench_report import OURS
from ds4.cli.bench_tests import SEVERAL, Decode, FirstEval, Resync, Test, Timeline
from ds4.cli.bench_work import work_of
from ds4.cli.options import UsageError
from ds4.cli.output import JSON_EVERY, PLAIN_EVERY
from ds4.cli.pull import fetch
from ds4.cli.roofs import Roofs, busy, machine, measure_roofs
from ds4.cli.scenario import MODEL
from ds4.memory import usable_cpus

if TYPE_CHECKING:
    from ds4.cli.output import Output


@dataclass(frozen=True)
class Figure:
    """One test on one engine. seconds: the median of `runs`; least, most: the shortest and the longest. tokens: those
    that a run evaluates, of all sessions; 0: it only moves the context. of_roofline: the time that the machine needs
    at least / the median. ratio, of peers: how many times as fast ours was. bit_exact: ours, compared after every run.
    """

    model: str
    engine: str
    test: str
    kind: str
    size: int
    depth: int
    tokens: int
    runs: int
    seconds: float
    least: float
    most: float
    tokens_per_second: float | None
    bytes_per_second: float | None
    macs_per_second: float | None
    of_roofline: float | None
    ratio: float | None
    detail: str
    bit_exact: bool | None


@dataclass(frozen=True)
class Machine:
    """Where the figures were measured. load: of the machine, before anything was measured."""

    machine: str
    isa: str
    threads: int
    kv_dtype: str
    read: float
    macs: float
    load: float
    peers: dict[str, str]


class Status:
    """A line on stderr that says what is measured. It changes between runs only: nothing draws while a run is timed."""

    def __init__(self, out: Output) -> None:
        self.out, self.last = out, time.monotonic()
        self.drawn = out.fancy_err and not out.quiet and not out.json

    def show(self, test: str, engine: str, run: int, runs: int) -> None:
        text, now = f"{test}, {engine}: run {run} of {runs}", time.monotonic()
        if self.drawn:
            sys.stderr.write(f"\x1b[2K{text}\r")
            sys.stderr.flush()
        elif now - self.last >= (JSON_EVERY if self.out.json else PLAIN_EVERY):
            self.last = now
            self.out.event("progress", phase="runs", test=test, engine=engine, done=run - 1, total=runs)
            self.out.note(text)

    def clear(self) -> None:
        if self.drawn:
            sys.stderr.write("\x1b[2K")
            sys.stderr.flush()


class Suite:
    """All figures that the flags ask for. `roofs` are measured once for all models."""

    def __init__(self, args: argparse.Namespace, out: Output) -> None:
        self.args, self.out, self.status = args, out, Status(out)
        self.depths = sorted(args.d)
        self.names: Sequence[str] = args.tests
        moves = [n for n in self.names if n in bench_tests.MOVES or n == "resync"]
        if moves and not max(self.depths) and args.tests is not bench_tests.NAMES:
            raise UsageError(f"{moves[0]} needs a context to work on: give -d a depth above 0")
        self.length = bench_tests.length_of(self.depths, self.names, args.p, args.n)
        self.threads = args.threads or usable_cpus()
        self.load = os.getloadavg()[0]
        for note in busy(self.load):
            out.note(note)

    def measure(self) -> tuple[Machine, list[Figure]]:
        found: list[Figure] = []
        with tempfile.TemporaryDirectory(prefix="ds4-bench-") as folder:
            wanted = [(name, name) for name in self._names()]
            for kind in self.args.synthetic:
                with self.out.progress("writing random weights", "bytes", phase="weights") as report:
                    wanted.append((kind, os.fspath(bench_models.write(Path(folder), kind, report))))
            for name, model in wanted:
                self._check(name, model)
            self.roofs = measure_roofs(self.threads, self.out)
            for name, model in wanted:
                try:
                    found += self._model(name, model)
                finally:
                    self.status.clear()
        return self.where, found

    def _names(self) -> list[str]:
        """The models of -m; the small one that `ds4 demo` takes when none is given."""
        if self.args.models or self.args.synthetic:
            return list(self.args.models)
        return [MODEL]

    def _check(self, name: str, model: str) -> None:
        """Fetches a known model that is not here. Raises UsageError when a peer cannot read what we can."""
        if model in models.names() and not models.load(model).present:
            fetch(model, self.out)
        if self.args.vs and models.resolve(model).is_dir():
            raise UsageError(f"--vs compares engines on one GGUF file, and {name} is a folder")
        if self.args.vs and self.args.kv_dtype == "fp8":
            raise UsageError("--vs compares engines with rows of f32, f16 or q8_0; fp8 is DeepSeek V4's")

    def _model(self, name: str, model: str) -> list[Figure]:
        from ds4.engine import Engine

        options = {"kv_dtype": self.args.kv_dtype} if self.args.kv_dtype else {}
        with ExitStack() as opened:
            with self.out.progress("loading", "bytes", type="load") as report:
                engine = opened.enter_context(Engine(model, progress=report, threads=self.threads, **options))
            if self.length + bench_tests.MARGIN > engine.ctx:
                raise UsageError(
                    f"{name} has a context of {engine.ctx}, and these tests take {self.length + bench_tests.MARGIN} "
                    "positions: a smaller -d, -p or -n needs less"
                )
            timeline = opened.enter_context(Timeline(engine, self.length, self.out))
            tests = [
                test
                for depth in self.depths
                for test in bench_tests.tests_at(timeline, depth, self.names, self.args.p, self.args.n)
            ]
            self._verify(timeline, tests)
            peers = [opened.enter_context(Peer(peer)) for peer in self.args.vs]
            for peer in peers:
                self.status.show("loading", peer.name, 1, 1)
                peer.open(
                    models.resolve(model),
                    timeline.tokens.tolist(),
                    engine.threads,
                    len(timeline.tokens),
                    engine.kv_dtype,
                )
            self.where = Machine(
                machine(), engine.isa, engine.threads, engine.kv_dtype, self.roofs.read, self.roofs.macs,
                self.load, {peer.name: peer.version for peer in peers},
            )  # fmt: skip
            self.out.event("machine", **asdict(self.where))
            return [figure for test in tests for figure in self._time(name, test, peers)]

    def _verify(self, timeline: Timeline, tests: Sequence[Test]) -> None:
        """Runs every test once, untimed: a run that leaves other bits than a fresh prefill raises, and nothing is
        timed. It is also the warm-up."""
        timeline.prepare(position for test in tests for position in test.positions())
        for i, test in enumerate(tests):
            self.status.show(test.name, "comparing", i + 1, len(tests))
            test.run()

    # ---- the timed runs

    def _time(self, model: str, test: Test, peers: Sequence[Peer]) -> list[Figure]:
        """Ours and the peers' runs in turn: A B C A B C."""
        runs = self.args.r if not test.several else max(self.args.r, SEVERAL)
        ours: list[float] = []
        least: list[float] = []
        beside = [_Beside(peer, self._setting(test, peer)) for peer in peers if test.kind in PEER_TESTS]
        for run in range(runs):
            self.status.show(test.name, OURS, run + 1, runs)
            ours.append(test.run())
            if (floor := test.least()) is not None:
                least.append(floor)
            for other in beside if run < self.args.r else ():
                self.status.show(test.name, other.peer.name, run + 1, self.args.r)
                other.run(test)
        found = [self._figure(model, test, ours, least, self.roofs)]
        for other in beside:
            if other.refused:
                self.out.note(other.refused)
            else:
                found.append(_peer_figure(found[0], other))
        for figure in found:
            self.out.event("figure", **asdict(figure))
        return found

    def _setting(self, test: Test, peer: Peer) -> int:
        """The best of the peer's settings for this test, from one run of each after a warm-up."""
        if test.kind == "truncate":
            return 0
        seconds = []
        for i, name in enumerate(peer.settings):
            self.status.show(test.name, f"{peer.name}, {name}", i + 1, len(peer.settings))
            peer.run(test.kind, min(test.size, 64), test.depth, i)
            seconds.append(peer.run(test.kind, test.size, test.depth, i)[0])
        return seconds.index(min(seconds))

    def _figure(self, model: str, test: Test, ours: list[float], least: list[float], roofs: Roofs) -> Figure:
        seconds = statistics.median(ours)
        size, macs = _work(test)
        floor = statistics.median(least) if least else max(size / roofs.read, macs / roofs.macs)
        return Figure(
            model, OURS, test.name, test.kind, test.size, test.depth, test.tokens, len(ours), seconds, min(ours),
            max(ours), test.tokens / seconds if test.tokens else None, size / seconds or None, macs / seconds or None,
            floor / seconds if floor else None, None, test.detail, True,
        )  # fmt: skip


class _Beside:
    """A peer's runs of one test, with its best setting."""

    def __init__(self, peer: Peer, setting: int) -> None:
        self.peer, self.setting = peer, setting
        self.seconds: list[float] = []
        self.same = True  # its most likely next token was ours
        self.refused = ""

    def run(self, test: Test) -> None:
        if self.refused:
            return
        try:
            seconds, top = self.peer.run(test.kind, test.size, test.depth, self.setting)
        except Refused as error:
            self.refused = f"{test.name}: {error}"
            return
        self.seconds.append(seconds)
        self.same = self.same and (top is None or top == test.timeline.top(test.end))

    @property
    def detail(self) -> str:
        return self.peer.settings[self.setting] + ("" if self.same else "; its most likely token is another")


def _peer_figure(ours: Figure, other: _Beside) -> Figure:
    seconds = statistics.median(other.seconds)
    share = ours.seconds / seconds
    bytes_, macs, roofline = (v and v * share for v in (ours.bytes_per_second, ours.macs_per_second, ours.of_roofline))
    return Figure(
        ours.model, other.peer.name, ours.test, ours.kind, ours.size, ours.depth, ours.tokens, len(other.seconds),
        seconds, min(other.seconds), max(other.seconds), ours.tokens / seconds if ours.tokens else None, bytes_, macs,
        roofline, 1 / share, other.detail, None,
    )  # fmt: skip


def _work(test: Test) -> tuple[float, float]:
    """(bytes, multiply-adds) of a run at least; (0, 0) for what computes nothing."""
    engine = test.engine
    if isinstance(test, Resync):
        return work_of(engine, test.depth - test.tokens, test.tokens)
    if isinstance(test, FirstEval):
        return work_of(engine, test.place, 1)
    if isinstance(test, Decode) or test.sessions > 1:
        size, macs = work_of(engine, test.depth + test.size // 2, 1, test.sessions)
        return size * test.passes, macs * test.passes
    return work_of(engine, test.depth, test.size) if test.kind == "pp" else (0.0, 0.0)
