"""The background pass: summary and rebuild on a fork while the model is idle, so that the compaction itself is a swap.
Turns that come meanwhile are appended to the fork when the model is idle again.

The user goes first: `pause` stops the pass at the next op, its whole chunks stay, and `idle` goes on with it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence

from ds4.engine import Session
from ds4.errors import Cancelled
from ds4.events import Event
from ds4.nodes import Node, size_of

from .summary import SummaryPass
from .transaction import Build, Compactor

REASON = "prepared while the model was idle"


class Preparation:
    """A compaction of `base` on a fork, up to its commit. `run` may be stopped and called again."""

    def __init__(self, compactor: Compactor) -> None:
        self.compactor, self.live = compactor, compactor.live
        self.base: tuple[Node, ...] = self.live.transcript.surface
        self.fork: Session | None = None
        self.summary: SummaryPass | None = None
        self.build: Build | None = None
        self.stopped = threading.Event()
        self.complete = self.failed = False
        self.covered = 0
        """How many nodes of the surface the fork is brought to: those of the base, and what came behind them."""
        self.seconds = 0.0
        """That it has worked so far."""

    def run(self, stop: Callable[[], bool]) -> Generator[Event, None, None]:
        """Works until all but the commit is done. Raises Cancelled when `stop` says so, and what a compaction raises:
        PoolFull at its start, when there is no room."""
        start = time.perf_counter()
        try:
            if self.build is None:
                self.build = yield from self._plan(stop)
            surface = self.live.transcript.surface
            extra = self.live.writer.arrange(self.since(surface) or (), self.build.plan.surface)
            yield from self.build.run(stop, extra)
            self.complete, self.covered = True, len(surface)
        finally:
            self.live.working = None
            self.seconds += time.perf_counter() - start

    def _plan(self, stop: Callable[[], bool]) -> Generator[Event, None, Build]:
        live = self.live
        if self.fork is None:
            live.lend_spare()
            self.fork = live.session.fork()
        live.working = self.fork
        if self.summary is None:
            yield from live.bring(self.fork, self.base, (), stop)
            self.summary = self.compactor.summary_pass(self.fork, REASON, self.base)
            self.fork.reserve(
                min(len(self.summary.prompt) + self.compactor.limits.summary, self.fork.ctx - self.fork.pos)
            )
        summarised = yield from self.summary.run(stop)
        self.summary.close()
        build = self.compactor.build(self.compactor.planner(summarised, self.base), self.fork, summarised.step)
        build.restate(self.compactor.notes())
        build.take(self.fork)
        self.fork = None
        return build

    def finish(self, stop: Callable[[], bool]) -> Generator[Event, None, Build]:
        """Does what is missing, in the foreground."""
        if not self.complete:
            yield from self.run(stop)
        assert self.build is not None
        return self.build

    def useless(self, surface: Sequence[Node]) -> bool:
        """Whether the surface has changed inside of the base, or has too much behind it."""
        since = self.since(surface)
        size = self.build.plan.size if self.build is not None else 0
        return since is None or size + size_of(since) > self.compactor.limits.landing

    def stop(self) -> None:
        """Ends `run` at the next op, from any thread."""
        self.stopped.set()
        working = self.live.working
        if working is not None:
            working.cancel()

    def since(self, surface: Sequence[Node]) -> Sequence[Node] | None:
        """The nodes that came behind what this was made from; None when that has changed."""
        n = len(self.base)
        same = len(surface) >= n and all(a is b or a == b for a, b in zip(self.base, surface, strict=False))
        return surface[n:] if same else None

    def discard(self) -> None:
        """Leaves nothing behind."""
        if self.summary is not None:
            self.summary.close()
        if self.build is not None:
            self.build.discard()
        if self.fork is not None:
            self.fork.close()
        self.fork = None
        self.live.return_spare()


class Background:
    """Prepares the next compaction of a live conversation in a thread of its own, where the policy wants that. All
    calls come from the thread that the conversation is in."""

    def __init__(self, compactor: Compactor) -> None:
        self.compactor, self.live = compactor, compactor.live
        self._work: Preparation | None = None
        self._thread: threading.Thread | None = None
        self._failed_at: int | None = None
        self._closed = False
        self.error: Exception | None = None
        """Why the last preparation was given up."""

    @property
    def ready(self) -> bool:
        """Whether a compaction is prepared, up to its commit."""
        return self._work is not None and self._work.complete

    def idle(self) -> None:
        """The model has nothing to do: begins a preparation, or goes on with the one that was paused."""
        live = self.live
        if live.policy is None or not live.policy.background or live.limits is None or self._closed:
            return
        self.pause()
        if self._work is not None and self._work.useless(live.transcript.surface):
            self._give_up()
        if self._work is None:
            failed = self._failed_at
            tried = failed is not None and failed <= live.used < failed + max(1, live.ctx // 50)
            if live.used < live.limits.pre or tried or live.transcript.held is not None:
                return
            self._work = Preparation(self.compactor)
        if not self._work.complete or self._work.covered != len(live.transcript.surface):
            self._work.stopped.clear()
            self._thread = threading.Thread(target=self._run, args=(self._work,), daemon=True)
            self._thread.start()

    def _run(self, work: Preparation) -> None:
        try:
            for _ in work.run(work.stopped.is_set):
                pass
        except Cancelled:
            pass
        except Exception as error:  # whatever it is, the conversation goes on without a preparation
            self.error = error.with_traceback(None)  # which would keep sessions alive
            work.failed = True

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the preparation in work; True when a compaction is prepared."""
        if self._thread is not None:
            self._thread.join(timeout)
            if not self._thread.is_alive():
                self._end()
        return self.ready

    def pause(self) -> None:
        """The user goes first: the pass ends at the next op."""
        thread = self._thread
        if thread is None:
            return
        while thread.is_alive():
            if self._work is not None:
                self._work.stop()  # again: it may have been between two calls of the core
            thread.join(0.01)
        self._end()

    def _end(self) -> None:
        """The thread is gone: a preparation that failed is given up."""
        self._thread = None
        if self._work is not None and self._work.failed:
            self._failed_at = self.live.used
            self._give_up()

    def _give_up(self) -> None:
        if self._work is not None:
            self._work.discard()
            self._work = None

    def take(self) -> Preparation | None:
        """What is prepared, to be finished and committed by the caller: all of it, or a part. None when there is
        nothing, or nothing that could be used any more."""
        self.pause()
        work, self._work = self._work, None
        if work is not None and work.since(self.live.transcript.surface) is None:
            work.discard()
            work = None
        return work

    def close(self) -> None:
        """Stops the pass and leaves nothing behind."""
        self._closed = True
        self.pause()
        self._give_up()
