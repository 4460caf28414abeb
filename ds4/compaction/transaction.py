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

from ds4.engine import Mark, Session
from ds4.errors import Busy, Cancelled, Ds4Error
from ds4.events import CompactionDone, CompactionFailed, CompactionStarted, Event, Notice
from ds4.interrupts import uninterrupted
from ds4.nodes import Node, size_of
from ds4.spill import Entry

from .live import Live, open_calls
from .plan import Plan, Refusal
from .summary import Summarised, SummaryPass
from .whole import acceptance, nothing_to_compact, plan_whole, request_for

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
class Timing:
    """Seconds of the parts of a compaction."""

    start: float = field(default_factory=time.perf_counter)
    summary: float = 0.0
    rollback: float = 0.0


class Refused(Exception):
    """There is no plan, for a reason."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.reason)
        self.refusal = refusal


class Build:
    """A plan, and the fork that is brought to its surface. `run` may be ended and run again: whole chunks stay."""

    def __init__(
        self, live: Live, source: Session, plan: Plan, step: str, entry: Entry | None, archive_error: str = ""
    ) -> None:
        self.live, self.source, self.plan, self.step = live, source, plan, step
        self.entry, self.archive_error = entry, archive_error
        self.session: Session | None = None
        self.evaluated = 0

    def run(self, stop: Callable[[], bool] = bool, extra: Sequence[Node] = ()) -> Generator[Event, None, None]:
        """Brings the fork to the plan's surface and `extra` nodes behind it."""
        if self.session is None:
            self.live.lend_spare()
            self.session = self.source.fork()
        self.live.working = self.session
        try:
            _, evaluated = yield from self.live.bring(self.session, (*self.plan.surface, *extra), (), stop)
            self.evaluated += evaluated
        finally:
            self.live.working = None

    def discard(self) -> None:
        """Leaves nothing behind."""
        if self.entry is not None:
            self.entry.discard()
        if self.session is not None:
            self.session.close()
        self.live.return_spare()


class Compactor:
    """Compacts one live conversation, one compaction at a time.

    `notes` gives texts about what is alive outside of the transcript, to be restated after a rebuild; `archive`:
    whether what is replaced goes to the spill.
    """

    def __init__(self, live: Live, *, notes: Callable[[], Sequence[str]] = list, archive: bool = True) -> None:
        self.live, self.notes, self.archive = live, notes, archive
        self.step = ""
        """Where the compaction in progress is, or where the last one ended."""
        self.busy = False
        self._failed_at: int | None = None

    def allowed(self) -> bool:
        """Whether an automatic compaction may be tried: not while the surface has hardly grown since one failed."""
        return self._failed_at is None or self.live.used >= self._failed_at + max(1, self.live.ctx // 50)

    def whole(self, reason: str) -> Generator[Event, None, Outcome]:
        """Whole-history compaction: the model writes the checkpoint."""
        live = self.live
        assert live.limits is not None
        surface = live.transcript.surface
        nothing = nothing_to_compact(surface, live.writer, live.limits, open_calls(surface))
        if nothing is not None:
            yield Notice(nothing.reason)
            return Outcome("nothing", nothing.reason)
        outcome = yield from self._transaction(reason, lambda timing: self._whole(timing, reason))
        if outcome.state in ("done", "failed"):
            self._failed_at = self.live.used if outcome.state == "failed" else None
        return outcome

    def span(self, reason: str, make_plan: MakePlan) -> Generator[Event, None, Outcome]:
        """A compaction whose checkpoint somebody wrote already."""

        def work(timing: Timing) -> Generator[Event, None, Outcome]:
            yield from self.live.sync()
            return (yield from self._settle(make_plan, "agent", timing))

        return self._transaction(reason, work)

    def adopt(self, reason: str, build: Build, since: Sequence[Node]) -> Generator[Event, None, Outcome]:
        """Commits what was prepared on a fork; `since`: the nodes that came behind what it was made from."""

        def work(timing: Timing) -> Generator[Event, None, Outcome]:
            extra = self.live.writer.arrange(since, build.plan.surface)
            yield from build.run(self._stop(), extra)
            return self._commit(build, extra, timing)

        return self._transaction(reason, work)

    def _transaction(
        self, reason: str, work: Callable[[Timing], Generator[Event, None, Outcome]]
    ) -> Generator[Event, None, Outcome]:
        """The frame of every compaction: one at a time, its bracket in the log, its failure an event."""
        if self.busy:
            raise Busy("a compaction of this conversation is running; try again when it has ended.")
        self.busy, self.step = True, "mark"
        transcript = self.live.transcript
        try:
            yield CompactionStarted(reason, self.live.used)
            transcript.record("compaction_started", reason=reason, bottom=self.live.used)
            outcome = yield from work(Timing())
        except Refused as error:
            outcome = Outcome("failed", error.refusal.reason)
        except (Ds4Error, OSError) as error:
            state = "cancelled" if isinstance(error, Cancelled) else "failed"
            outcome = Outcome(state, " ".join(str(error).split()), error=error)
        finally:
            self.busy = False
        if outcome.state == "done":
            assert outcome.done is not None
            yield outcome.done
            return outcome
        transcript.record("compaction_failed", reason=outcome.reason, state=outcome.state, step=self.step)
        yield CompactionFailed(outcome.reason, self.step)
        return outcome

    # ---- the steps

    def _whole(self, timing: Timing, reason: str) -> Generator[Event, None, Outcome]:
        live = self.live
        surface = live.transcript.surface
        yield from live.sync()
        start = time.perf_counter()
        summary = self.summary_pass(live.session, reason, surface)
        with live.session.mark() as bottom:
            try:
                self.step = "summary"
                summarised = yield from summary.run()
            finally:
                timing.summary = time.perf_counter() - start
                summary.close()
                self._roll_back(bottom, timing)
        return (yield from self._settle(self.planner(summarised, surface), summarised.step, timing))

    def _roll_back(self, bottom: Mark, timing: Timing) -> None:
        """The request and its answer were never there."""
        start = time.perf_counter()
        bottom.session.rollback(bottom)
        timing.rollback = time.perf_counter() - start

    def _stop(self) -> Callable[[], bool]:
        """Whether `cancel` was called since now."""
        cancels = self.live.cancels
        return lambda: self.live.cancels != cancels

    def summary_pass(self, session: Session, reason: str, surface: Sequence[Node]) -> SummaryPass:
        """The summary of a surface, to be run on a session that holds it."""
        live, waiting = self.live, open_calls(surface)
        assert live.policy is not None and live.limits is not None
        request = request_for(surface, live.writer, live.limits, live.policy, reason, waiting)
        accept = acceptance(surface, live.writer, live.limits, number=self._number(), waiting=waiting)
        format = live.writer.format
        return SummaryPass(
            session, format, request.prompt, live.limits, live.policy, request_ids=request.ids, accept=accept
        )

    def planner(self, summarised: Summarised, surface: Sequence[Node]) -> MakePlan:
        """Makes the plan of a whole-history compaction of a surface."""
        live, number, waiting = self.live, self._number(), open_calls(surface)

        def make_plan(locator: str | None) -> Plan | Refusal:
            assert live.limits is not None
            return plan_whole(
                surface, live.writer, live.limits, summarised.text, number=number, locator=locator, waiting=waiting
            )

        return make_plan

    def _number(self) -> int:
        """The number of the next checkpoint."""
        return self.live.transcript.checkpoints + 1

    def _settle(self, make_plan: MakePlan, step: str, timing: Timing) -> Generator[Event, None, Outcome]:
        """Plan, build and commit."""
        self.step = "plan"
        build = self.build(make_plan, self.live.session, step, self.archive)
        try:
            self.step = "build"
            yield from build.run(self._stop())
            return self._commit(build, (), timing)
        finally:
            build.discard()

    def build(self, make_plan: MakePlan, source: Session, step: str, archive: bool) -> Build:
        """The plan, with its archive prepared. Raises Refused."""
        plan, entry, error = _accepted(make_plan(None)), None, ""
        for _ in range(2 if archive else 0):  # naming the archive may move what is replaced, once
            try:
                number = plan.checkpoint.data["number"]
                entry = self.live.transcript.store.spill.prepare(plan.archived, checkpoint=number)
            except OSError as failure:
                error = f"the replaced part was not archived: {failure.strerror or failure}"
                break
            before = plan
            try:
                plan = _accepted(make_plan(entry.locator))
            except BaseException:
                entry.discard()
                raise
            if [node.number for node in plan.archived] == [node.number for node in before.archived]:
                break
            entry.discard()
            entry = None
        return Build(self.live, source, self._with_notes(plan), step, entry, error)

    def _with_notes(self, plan: Plan) -> Plan:
        """Restates what is alive outside of the transcript, right behind the checkpoint."""
        texts = self.notes()
        if not texts:
            return plan
        writer = self.live.writer
        notes = [writer.user(text, first=False, kind="note") for text in texts]
        at = next(i for i, node in enumerate(plan.surface) if node is plan.checkpoint) + 1
        return replace(plan, surface=tuple(writer.arrange([*plan.surface[:at], *notes, *plan.surface[at:]])))

    def _commit(self, build: Build, extra: Sequence[Node], timing: Timing) -> Outcome:
        """The one moment at which the conversation changes."""
        self.step = "commit"
        live, plan = self.live, build.plan
        assert build.session is not None
        before, after = live.used, size_of(plan.surface) + size_of(extra)
        done = CompactionDone(
            before, after, max(0, after - build.evaluated), build.evaluated, 0.0, build.step, plan.kept_tail,
            timing.summary, timing.rollback, 0.0,
        )  # fmt: skip
        figures = {name: getattr(done, name) for name in ("before", "after", "reused", "evaluated", "step", "tail")}
        locator = build.entry.locator if build.entry is not None else None
        spills = [build.entry] if build.entry is not None else []
        with uninterrupted():
            live.transcript.replace([*plan.surface, *extra], spills=spills, **figures)
            old = live.swap(build.session)
            build.session = build.entry = None
        self.step = "release"
        old.close()
        seconds = time.perf_counter() - timing.start
        done = replace(done, seconds=seconds, pause=seconds)
        return Outcome("done", done=done, plan=plan, locator=locator, archive_error=build.archive_error)


def _accepted(plan: Plan | Refusal) -> Plan:
    if isinstance(plan, Refusal):
        raise Refused(plan)
    return plan
