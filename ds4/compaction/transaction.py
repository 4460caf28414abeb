"""The transaction: whatever ends a compaction before its commit leaves the conversation as it was, with nothing to
evaluate again.

    hold      what waits (a user's text, a tool's result) is in the transcript's slot: the caller's part
    mark      BOTTOM = the live position
    summary   the request and the model's answer on the live context; or the agent's own text
    rollback  to BOTTOM: they were never there
    plan      the new surface; verified, or the compaction ends here
    build     a fork of the session is brought to the new surface
    commit    the archive gets its name, the log its one event, the conversation its new session
    release   the old session's pages go
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from ds4.engine import Mark, Session
from ds4.errors import Busy, Cancelled, ContextFull, Ds4Error, PoolFull, SystemResourceError
from ds4.events import (
    CompactionDone,
    CompactionFailed,
    CompactionPlanned,
    CompactionStarted,
    Event,
    Notice,
    SummaryDiscarded,
)
from ds4.interrupts import uninterrupted
from ds4.nodes import Node, size_of, tokens_of
from ds4.spill import Entry

from .live import Live, common, open_calls
from .plan import Plan, Refusal
from .policy import CompactionPolicy
from .summary import Summarised, SummaryPass
from .whole import acceptance, nothing_to_compact, plan_whole, request_for, request_size

MakePlan = Callable[[str | None], Plan | Refusal]
"""From the locator of the archive, None without one, to a plan."""


@dataclass
class Outcome:
    """How a compaction ended: `state` is "done", "nothing" (there is nothing to compact), "failed" or "cancelled"."""

    state: str
    reason: str = ""
    done: CompactionDone | None = None
    plan: Plan | None = None
    locator: str | None = None
    archive_error: str = ""
    error: Exception | None = None


@dataclass
class Run:
    """A compaction in progress: whether the user has cancelled it, and the seconds of its parts. `prepared`: those
    that went by before it was needed."""

    stop: Callable[[], bool]
    start: float = field(default_factory=time.perf_counter)
    summary: float = 0.0
    rollback: float = 0.0
    prepared: float = 0.0
    rolled_back: bool = False

    def check(self) -> None:
        """Raises Cancelled when the user has cancelled."""
        if self.stop():
            raise Cancelled("the compaction was cancelled.")


class Refused(Exception):
    """There is no plan, for a reason."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.reason)
        self.refusal = refusal


class Build:
    """A plan, and the fork that is brought to its surface. `run` may be ended and run again: whole chunks stay.

    `bare`: the plan without `notes`, which are the texts about what is alive outside of the transcript.
    """

    def __init__(
        self, live: Live, source: Session, bare: Plan, step: str, entry: Entry | None = None, archive_error: str = ""
    ) -> None:
        self.live, self.source, self.bare, self.step = live, source, bare, step
        self.entry, self.archive_error = entry, archive_error
        self.notes: tuple[str, ...] = ()
        self.plan = bare
        self.session: Session | None = None
        self.front: int | None = None
        """How many rows of the old context the fork has kept; None before it has begun."""
        self._secured = 0

    def restate(self, texts: Sequence[str]) -> None:
        """Puts the notes right behind the checkpoint, as one."""
        if tuple(texts) == self.notes:
            return
        self.notes, writer, surface = tuple(texts), self.live.writer, self.bare.surface
        note = [writer.user("\n".join(texts), first=False, kind="note")] if texts else []
        at = next(i for i, node in enumerate(surface) if node is self.bare.checkpoint) + 1
        self.plan = replace(self.bare, surface=tuple(writer.arrange([*surface[:at], *note, *surface[at:]])))

    def take(self, fork: Session) -> None:
        """Uses this session, whose contents are of no more use to anybody, instead of a fork of its own."""
        self.session, self.source = fork, fork

    def reused(self, extra: Sequence[Node] = ()) -> int:
        """How many rows of the session stay where they are."""
        source = self.session or self.source
        return source.nearest_exact(common(source.tokens, tokens_of((*self.plan.surface, *extra))))

    def run(self, stop: Callable[[], bool] = bool, extra: Sequence[Node] = ()) -> Generator[Event, None, None]:
        """Brings the fork to the plan's surface and `extra` nodes behind it. All its pages are taken at the start."""
        surface = (*self.plan.surface, *extra)
        if self.session is None:
            self.live.lend_spare()
            self.session = self.source.fork(self.reused(extra))
        self.live.working = self.session
        try:
            if self._secured < size_of(surface):
                self.session.truncate(self.reused(extra))
                self.session.reserve(size_of(surface) - self.session.pos)
                self._secured = size_of(surface)
            if self.front is None:
                self.front = self.session.pos
            yield from self.live.bring(self.session, surface, (), stop)
        finally:
            self.live.working = None

    def discard(self) -> None:
        """Leaves nothing behind."""
        if self.session is not None:
            self.session.close()
        if self.entry is not None:
            self.entry.discard()
        self.session = self.entry = None
        self.live.return_spare()


class Prepared(Protocol):
    """A compaction that was begun before it was needed, see `background`."""

    seconds: float

    def finish(self, stop: Callable[[], bool]) -> Generator[Event, None, Build]:
        """Does what is missing up to the commit. Raises Cancelled when `stop` says so, and what a compaction raises."""

    def since(self, surface: Sequence[Node]) -> Sequence[Node] | None:
        """The nodes that came behind what it was made from; None when that has changed."""

    def discard(self) -> None:
        """Leaves nothing behind."""


class Compactor:
    """Compacts one live conversation, one compaction at a time.

    `notes` gives texts about what is alive outside of the transcript, to be restated after a rebuild; `archive`:
    whether what is replaced goes to the spill. `policy`: for compactions that are asked for where the conversation has
    none of its own.
    """

    def __init__(
        self,
        live: Live,
        *,
        notes: Callable[[], Sequence[str]] = list,
        archive: bool = True,
        policy: CompactionPolicy | None = None,
    ) -> None:
        self.live, self.notes, self.archive = live, notes, archive
        self.policy = live.policy or policy or CompactionPolicy()
        self.limits = live.limits or self.policy.limits(live.ctx, request_size(live.writer, self.policy))
        self.step = ""
        """Where the compaction in progress is, or where the last one ended."""
        self.busy = False
        self._failed_at: int | None = None

    def allowed(self) -> bool:
        """Whether an automatic compaction may be tried: not while the surface has hardly grown since one failed."""
        failed = self._failed_at
        return failed is None or not failed <= self.live.used < failed + max(1, self.live.ctx // 50)

    def whole(self, reason: str, prepared: Prepared | None = None) -> Generator[Event, None, Outcome]:
        """Whole-history compaction: the model writes the checkpoint. `prepared` is used where that is possible, and
        is gone in any case."""
        live = self.live
        try:
            surface = live.transcript.surface
            nothing = nothing_to_compact(surface, live.writer, self.limits, open_calls(surface))
            if nothing is not None:
                self._failed_at = live.used
                yield Notice(nothing.reason)
                return Outcome("nothing", nothing.reason)
            outcome = yield from self._transaction(reason, lambda run: self._prepared_or_whole(run, reason, prepared))
        finally:
            if prepared is not None:
                prepared.discard()
        if outcome.state == "failed":
            self._failed_at = live.used
        return outcome

    def span(self, reason: str, make_plan: MakePlan) -> Generator[Event, None, Outcome]:
        """A compaction whose checkpoint somebody wrote already."""

        def work(run: Run) -> Generator[Event, None, Outcome]:
            yield from self.live.sync()
            return (yield from self._settle(make_plan, "agent", run))

        return self._transaction(reason, work)

    def _transaction(
        self, reason: str, work: Callable[[Run], Generator[Event, None, Outcome]]
    ) -> Generator[Event, None, Outcome]:
        """The frame of every compaction: one at a time, its bracket in the log, its failure an event."""
        if self.busy:
            raise Busy("a compaction of this conversation is running; try again when it has ended.")
        transcript, cancels = self.live.transcript, self.live.cancels
        run = Run(lambda: self.live.cancels != cancels)  # a cancel between two steps counts as well
        try:
            try:
                self.busy, self.step = True, "mark"
                yield CompactionStarted(reason, self.live.used)
                transcript.record("compaction_started", reason=reason, bottom=self.live.used)
                run.check()
                outcome = yield from work(run)
            except Refused as error:
                outcome = Outcome("failed", error.refusal.reason)
            except (Ds4Error, OSError) as error:
                state = "cancelled" if isinstance(error, Cancelled) else "failed"
                outcome = Outcome(state, " ".join(str(error).split()), error=error)
            finally:
                self._leave()
        finally:
            self._leave()  # again, for a Ctrl-C that came right before it
        if outcome.state == "done":
            assert outcome.done is not None
            yield outcome.done
            return outcome
        transcript.record("compaction_failed", reason=outcome.reason, state=outcome.state, step=self.step)
        yield CompactionFailed(outcome.reason, self.step)
        return outcome

    def _leave(self) -> None:
        self.busy, self.live.working = False, None
        self.live.return_spare()

    # ---- the steps

    def _prepared_or_whole(self, run: Run, reason: str, prepared: Prepared | None) -> Generator[Event, None, Outcome]:
        """Commits what is prepared; where it will not do, the compaction is made on the spot."""
        if prepared is not None:
            try:
                return (yield from self._adopt(run, prepared))
            except Cancelled:
                raise
            except (Refused, Ds4Error, OSError):
                prepared.discard()
        return (yield from self._whole(run, reason))

    def _adopt(self, run: Run, prepared: Prepared) -> Generator[Event, None, Outcome]:
        surface = self.live.transcript.surface
        since = prepared.since(surface)
        if since is None:
            raise Refused(Refusal("changed", "the conversation has changed inside of what was prepared"))
        build = yield from prepared.finish(run.stop)
        run.prepared = prepared.seconds
        if build.plan.checkpoint.data["number"] != self._number():
            raise Refused(Refusal("changed", "another checkpoint was made since the compaction was prepared"))
        build.restate(self.notes())
        extra = self.live.writer.arrange(since, build.plan.surface)
        if build.plan.size + size_of(extra) > self.limits.landing:
            raise Refused(Refusal("landing", "too much has come since the compaction was prepared"))
        return (yield from self._finish(build, extra, run))

    def _whole(self, run: Run, reason: str) -> Generator[Event, None, Outcome]:
        surface = self.live.transcript.surface
        try:
            summarised = yield from self._summarise(run, reason, surface)
        except (PoolFull, ContextFull) as error:  # a rebuild is possible all the same: its pages are set aside
            yield SummaryDiscarded(str(error))
            summarised = Summarised("", "ledger", 0, str(error))
        return (yield from self._settle(self.planner(summarised, surface), summarised.step, run))

    def _summarise(self, run: Run, reason: str, surface: Sequence[Node]) -> Generator[Event, None, Summarised]:
        """The summary pass, after which the session stands where it stood."""
        live = self.live
        yield from live.sync()
        summary = self.summary_pass(live.session, reason, surface)
        self.step, start = "summary", time.perf_counter()
        with live.session.mark() as bottom:
            try:
                try:
                    summarised = yield from summary.run(run.stop)
                    run.summary = time.perf_counter() - start
                    return summarised
                finally:
                    self._roll_back(bottom, summary, run)
            finally:
                self._roll_back(bottom, summary, run)  # again, for a Ctrl-C that came right before it

    def _roll_back(self, bottom: Mark, summary: SummaryPass, run: Run) -> None:
        """The request and its answer were never there. Once; then, and when the session is closed, it does nothing."""
        with uninterrupted():
            if run.rolled_back or not bottom.alive:
                return
            start = time.perf_counter()
            summary.close()
            try:
                bottom.session.rollback(bottom)
            except SystemResourceError:
                bottom.session.rollback(bottom)  # the system was short of memory for an instant; nothing has changed
            run.rolled_back, run.rollback = True, time.perf_counter() - start

    def summary_pass(self, session: Session, reason: str, surface: Sequence[Node]) -> SummaryPass:
        """The summary of a surface, to be run on a session that holds it."""
        writer, limits, waiting = self.live.writer, self.limits, open_calls(surface)
        request = request_for(surface, writer, limits, self.policy, reason, waiting)
        accept = acceptance(surface, writer, limits, number=self._number(), waiting=waiting)
        return SummaryPass(
            session, writer.format, request.prompt, limits, self.policy, request_ids=request.ids, accept=accept
        )

    def planner(self, summarised: Summarised, surface: Sequence[Node]) -> MakePlan:
        """Makes the plan of a whole-history compaction of a surface."""
        live, number, waiting = self.live, self._number(), open_calls(surface)

        def make_plan(locator: str | None) -> Plan | Refusal:
            return plan_whole(
                surface, live.writer, self.limits, summarised.text, number=number, locator=locator, waiting=waiting
            )

        return make_plan

    def _number(self) -> int:
        """The number of the next checkpoint."""
        return self.live.transcript.checkpoints + 1

    def _settle(self, make_plan: MakePlan, step: str, run: Run) -> Generator[Event, None, Outcome]:
        """Plan, build and commit."""
        self.step = "plan"
        run.check()
        build = self.build(make_plan, self.live.session, step)
        try:
            build.restate(self.notes())
            return (yield from self._finish(build, (), run))
        finally:
            build.discard()

    def _finish(self, build: Build, extra: Sequence[Node], run: Run) -> Generator[Event, None, Outcome]:
        """Build and commit."""
        after = build.plan.size + size_of(extra)
        yield CompactionPlanned(self.live.used, after, build.reused(extra), build.plan.kept_tail + size_of(extra))
        self.step = "build"
        run.check()
        yield from build.run(run.stop, extra)
        run.check()
        return self._commit(build, extra, run)

    def build(self, make_plan: MakePlan, source: Session, step: str) -> Build:
        """The plan, with its archive prepared. Raises Refused."""
        plan, error = _accepted(make_plan(None)), ""
        for _ in range(2 if self.archive else 0):  # naming the archive may move what is replaced, once
            try:
                number = plan.checkpoint.data["number"]
                entry = self.live.transcript.store.spill.prepare(plan.archived, checkpoint=number)
            except OSError as failure:
                error = f"the replaced part was not archived: {failure.strerror or failure}"
                break
            try:
                named = _accepted(make_plan(entry.locator))
                if [node.number for node in named.archived] == [node.number for node in plan.archived]:
                    return Build(self.live, source, named, step, entry)
            except BaseException:
                entry.discard()
                raise
            entry.discard()
            plan = named
        return Build(self.live, source, _accepted(make_plan(None)), step, None, error)

    def _commit(self, build: Build, extra: Sequence[Node], run: Run) -> Outcome:
        """The one moment at which the conversation changes."""
        self.step = "commit"
        live, plan = self.live, build.plan
        assert build.session is not None and build.front is not None
        before, after = live.used, plan.size + size_of(extra)
        done = CompactionDone(
            before, after, build.front, after - build.front, 0.0, build.step,
            plan.kept_tail + size_of(extra), run.summary, run.rollback, 0.0,
        )  # fmt: skip
        figures = {name: getattr(done, name) for name in ("before", "after", "reused", "evaluated", "step", "tail")}
        locator = build.entry.locator if build.entry is not None else None
        spills = [build.entry] if build.entry is not None else []
        with uninterrupted():
            live.transcript.replace([*plan.surface, *extra], spills=spills, **figures)
            old = live.swap(build.session)
            build.session = build.entry = None
            self._failed_at, self.step = None, "release"
            old.close()
        pause = time.perf_counter() - run.start
        done = replace(done, seconds=pause + run.prepared, pause=pause)
        return Outcome("done", done=done, plan=plan, locator=locator, archive_error=build.archive_error)


def _accepted(plan: Plan | Refusal) -> Plan:
    if isinstance(plan, Refusal):
        raise Refused(plan)
    return plan
