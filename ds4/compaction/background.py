"""The background pass: summary and rebuild on a fork while the model is idle, so that the compaction itself is a swap.

The user goes first: `pause` stops the pass at the next op, its whole chunks stay, and `idle` goes on with it.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence

from ds4.engine import Session
from ds4.errors import Cancelled, Ds4Error
from ds4.events import Event
from ds4.nodes import Node, size_of

from .summary import SummaryPass
from .transaction import Build, Compactor, Outcome, Refused


class Preparation:
    """A compaction of `base` on a fork. `run` may be stopped and called again."""

    def __init__(self, compactor: Compactor, reason: str) -> None:
        self.compactor, self.live, self.reason = compactor, compactor.live, reason
        self.base: tuple[Node, ...] = self.live.transcript.surface
        self.fork: Session | None = None
        self.summary: SummaryPass | None = None
        self.build: Build | None = None
        self.stopped = threading.Event()
        self.complete = False

    def run(self) -> Generator[Event, None, None]:
        """Works until all but the commit is done. Raises Cancelled after `stop`, and what a compaction raises."""
        stop = self.stopped.is_set
        if self.build is None:
            if self.fork is None:
                self.live.lend_spare()
                self.fork = self.live.session.fork()
            if self.summary is None:
                yield from self.live.bring(self.fork, self.base, (), stop)
                self.summary = self.compactor.summary_pass(self.fork, self.reason, self.base)
            summarised = yield from self.summary.run()
            plan = self.compactor.planner(summarised, self.base)
            self.build = self.compactor.build(plan, self.fork, summarised.step, self.compactor.archive)
            self.summary.close()
            self.build.session, self.fork = self.fork, None  # the summary is cut off when it is brought to the plan
        yield from self.build.run(stop)
        self.complete = True

    def stop(self) -> None:
        """Ends `run` at the next op, from any thread."""
        self.stopped.set()
        for session in (self.fork, self.build.session if self.build is not None else None):
            if session is not None:
                session.cancel()

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
        self.live.return_spare()


class Background:
    """Prepares the next compaction of a live conversation in a thread of its own, where the policy wants that."""

    def __init__(self, compactor: Compactor) -> None:
        self.compactor, self.live = compactor, compactor.live
        self._work: Preparation | None = None
        self._thread: threading.Thread | None = None
        self._failed_at: int | None = None
        self._failed = False
        self.error: Exception | None = None
        """Why the last preparation was given up."""

    @property
    def ready(self) -> bool:
        """Whether a compaction is prepared, up to its commit."""
        return self._work is not None and self._work.complete

    def idle(self) -> None:
        """The model has nothing to do: begins a preparation, or goes on with the one that was paused."""
        live = self.live
        if live.policy is None or not live.policy.background or live.limits is None or self._thread is not None:
            return
        if self._work is not None and self._work.since(live.transcript.surface) is None:
            self._give_up()
        if self._work is None:
            grown = self._failed_at is None or live.used >= self._failed_at + live.ctx // 50
            if live.used < live.limits.pre or not grown or live.transcript.held is not None:
                return
            self._work = Preparation(self.compactor, "prepared while the model was idle")
        if not self._work.complete:
            self._work.stopped.clear()
            self._thread = threading.Thread(target=self._run, args=(self._work,), daemon=True)
            self._thread.start()

    def _run(self, work: Preparation) -> None:
        try:
            for _ in work.run():
                pass
        except Cancelled:
            pass
        except (Ds4Error, Refused, OSError) as error:
            self.error, self._failed = error, True

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the preparation in work; True when a compaction is prepared."""
        if self._thread is not None:
            self._thread.join(timeout)
            if not self._thread.is_alive():
                self._end()
        return self.ready

    def pause(self) -> None:
        """The user goes first."""
        if self._thread is not None:
            if self._work is not None:
                self._work.stop()
            self._thread.join()
            self._end()

    def _end(self) -> None:
        """The thread is gone: a preparation that failed is given up."""
        self._thread = None
        if self._failed:
            self._failed, self._failed_at = False, self.live.used
            self._give_up()

    def _give_up(self) -> None:
        if self._work is not None:
            self._work.discard()
            self._work = None

    def finish(self, reason: str) -> Generator[Event, None, Outcome | None]:
        """Commits what is prepared, finishing it first if need be. None when there is nothing that can be used: then
        the compaction is made on the spot."""
        self.pause()
        work = self._work
        if work is None:
            return None
        since = work.since(self.live.transcript.surface)
        limits = self.live.limits
        self._work = None
        try:
            if since is None or limits is None:
                return None
            work.stopped.clear()
            if not work.complete:
                yield from work.run()
            assert work.build is not None
            if work.build.plan.size + size_of(since) > limits.landing:
                return None
            outcome = yield from self.compactor.adopt(reason, work.build, since)
            return outcome if outcome.state in ("done", "cancelled") else None
        except (Refused, OSError, Ds4Error) as error:
            if isinstance(error, Cancelled):
                raise
            return None
        finally:
            work.discard()

    def close(self) -> None:
        """Stops the pass and leaves nothing behind."""
        self.pause()
        self._give_up()
