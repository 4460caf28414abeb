"""What the compaction of one conversation costs: `ds4 bench compaction`.

A conversation is filled up to its soft trigger once; every measurement works on a copy that shares its pages. A figure
is given out only when the next logits were those of a session that evaluated the same tokens from nothing.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds4 import events as ev
from ds4.cli import scenario
from ds4.cli.scenario import READ_ON, READING, Measured, Watch
from ds4.errors import Ds4Error

if TYPE_CHECKING:
    from ds4.agent.chat import Chat
    from ds4.cli.output import Output, Report
    from ds4.engine import Engine, Session

PARTS = 4  # reads that fill the context
SINCE = "What comes next?"
SHORT = "I go on when you want me to."
_PHASES = {"summary": "summary", "compaction_planned": "rebuild", "compaction_done": ""}
Events = Generator[ev.Event, None, None]


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of a compaction from `before` to `after` tokens at one ctx, in tokens and seconds.

    `evaluated` of `after` were re-prefilled in `rebuild_seconds`; all of them, from nothing, take `zero_seconds`.
    `interrupted_evaluated`: tokens to be evaluated again after a compaction that was interrupted in its summary and one
    in its rebuild; `interrupted_seconds`: the longer of the two ways back. `pause_seconds`: the conversation stands
    still, without background mode; `background_pause_seconds`: with it, where `since` tokens came behind what was
    prepared.
    """

    ctx: int
    before: int
    after: int
    step: str
    summary_seconds: float
    rollback_seconds: float
    rebuild_seconds: float
    evaluated: int
    zero_seconds: float
    interrupted_evaluated: int
    interrupted_seconds: float
    pause_seconds: float
    background_pause_seconds: float
    since: int


def measure(engine: Engine, ctx: int, out: Output, repeat: int = 1) -> Cost:
    """The costs at one ctx: of `repeat` runs the medians of all seconds. Raises Ds4Error when a bit differs."""
    with tempfile.TemporaryDirectory(prefix="ds4-bench-") as folder:
        scenario.write_log(Path(folder) / "station", ctx)
        with Conversation(engine, ctx, out, Path(folder) / "station") as conversation:
            runs = [conversation.run() for _ in range(repeat)]
    middle = {
        field.name: statistics.median(getattr(run, field.name) for run in runs)
        for field in dataclasses.fields(Cost)
        if field.name.endswith("_seconds")
    }
    worst = max(run.interrupted_evaluated for run in runs)
    return dataclasses.replace(runs[0], **middle, interrupted_evaluated=worst)


class Conversation:
    """A conversation that is nearly full, and what is measured on copies of it."""

    def __init__(self, engine: Engine, ctx: int, out: Output, folder: Path) -> None:
        from ds4.agent.chat import Chat
        from ds4.sampling import Sampling

        self.engine, self.ctx, self.out = engine, ctx, out
        tools = scenario.reading_tools(folder)[:1]  # the schemas of all would take a quarter of the smallest ctx
        self.chat = Chat(engine, ctx=ctx, system=scenario.SYSTEM, tools=tools, sampling=Sampling())
        try:
            self._fill()
        except BaseException:
            self.chat.close()
            raise

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, *unused: object) -> None:
        self.chat.close()

    def run(self) -> Cost:
        with self.copy() as copy:
            self.turn_since(copy)
            evaluated, seconds = self._interrupted(copy)
            watch = self._compact(copy, "compaction")
        plain = watch.compactions[0]
        ahead, since = self._ahead()
        done = plain.done
        return Cost(
            self.ctx, done.before, done.after, done.step, done.summary_seconds, done.rollback_seconds, plain.rebuild,
            done.evaluated, plain.zero, evaluated, seconds, done.pause, ahead.done.pause, since,
        )  # fmt: skip

    # ---- the conversation

    def _fill(self) -> None:
        """Reads in parts until the soft trigger is near."""
        chat, line, question = self.chat, 1, scenario.TASK
        assert chat.live.limits is not None
        short = len(chat.writer.assistant(SHORT))
        room = chat.live.limits.soft - 2 * short - len(chat.writer.user(SINCE, first=False)) - chat.live.used
        first = chat.live.used
        for part in range(1, PARTS + 1):
            lines = scenario.lines_up_to(chat, line, first + room * part // PARTS - short, question)
            calls = [(READING, [scenario.read(line, lines)])] if lines else []
            self._turn(chat, question, [*calls, (SHORT, [])], "filling")
            line, question = line + lines, READ_ON

    def turn_since(self, chat: Chat) -> int:
        """One more turn, up to the soft trigger. Returns its tokens."""
        before = chat.live.used
        self._turn(chat, SINCE, [(SHORT, [])], "one more turn")
        return chat.live.used - before

    def _turn(self, chat: Chat, text: str, forced: Sequence[tuple[str, Sequence[Any]]], label: str) -> None:
        for words, calls in forced:
            chat.force(words, calls)
        self._show(chat.send(text), label)

    @contextmanager
    def copy(self, background: bool = False) -> Iterator[Chat]:
        copy = self.chat.fork()
        try:
            assert copy.live.policy is not None
            copy.live.policy = dataclasses.replace(copy.live.policy, background=background)
            yield copy
        finally:
            copy.close()

    # ---- what is measured

    def _compact(self, chat: Chat, label: str) -> Watch:
        watch = Watch(chat, self.out)
        self._show(watch.events(chat.compact()), label)
        if not watch.compactions:
            raise Ds4Error(f"at ctx {self.ctx} the compaction has failed, so there is nothing to measure")
        return watch

    def _ahead(self) -> tuple[Measured, int]:
        """A compaction that was prepared while the model was idle, and the tokens that came behind it."""
        with self.copy(background=True) as copy:
            copy.background.idle()
            label = f"ctx {self.ctx}, preparing in the background"
            with self.out.progress(label, phase=label) as report:
                ready = scenario.prepared(copy, lambda: report(getattr(copy.live.working, "pos", 0), 0))
            if not ready:
                why = copy.background.error or "it was given up"
                raise Ds4Error(f"at ctx {self.ctx} no compaction could be prepared in the background: {why}")
            since = self.turn_since(copy)
            return self._compact(copy, "compaction, prepared").compactions[0], since

    def _interrupted(self, chat: Chat) -> tuple[int, float]:
        """Cancels a compaction in its summary and another in its rebuild: (tokens to be evaluated again, seconds from
        the cancel to the end). Raises Ds4Error when the conversation goes on in another way than before."""
        list(chat.live.sync())
        tokens, probe = chat.session.tokens, _probe(chat.session)
        again, longest = 0, 0.0
        for phase, reached in (("summary", _in_summary), ("rebuild", _in_rebuild())):
            longest = max(longest, self._cancelled_in(chat, phase, reached))
            computed = chat.live.evaluated
            list(chat.live.sync())
            again += chat.live.evaluated - computed
            chat.session.check()
            if chat.session.tokens != tokens or _probe(chat.session) != probe:
                raise Ds4Error(f"a compaction that was interrupted in its {phase} has left a trace: please report this")
        return again, longest

    def _cancelled_in(self, chat: Chat, phase: str, reached: Callable[[ev.Event], bool]) -> float:
        """Seconds from the cancel to the end of a compaction that is cancelled where `reached` says so."""
        start, last = 0.0, None
        with self._bars(f"to be interrupted in its {phase}") as bars:
            for last in chat.compact():
                bars.show(last)
                if not start and reached(last):
                    start = time.perf_counter()
                    chat.cancel()
        if not isinstance(last, ev.CompactionFailed) or not start:
            raise Ds4Error(f"at ctx {self.ctx} no compaction came to its {phase}, so none could be interrupted there")
        return time.perf_counter() - start

    # ---- what is seen meanwhile

    def _show(self, events: Events, label: str) -> None:
        with self._bars(label) as bars:
            for event in events:
                bars.show(event)

    def _bars(self, label: str) -> _Bars:
        return _Bars(self.out, f"ctx {self.ctx}, {label}")


class _Bars:
    """How far the events of a turn or a compaction are: a bar for each phase."""

    def __init__(self, out: Output, label: str) -> None:
        self.out, self.label = out, label
        self.phase, self.pieces = "", 0
        self._bar = ExitStack()
        self._report: Report | None = None

    def __enter__(self) -> _Bars:
        return self

    def __exit__(self, *unused: object) -> None:
        self._bar.close()

    def show(self, event: ev.Event) -> None:
        phase = _PHASES.get(event.type, self.phase)
        if phase != self.phase:
            self._bar.close()
            self.phase, self._report = phase, None
        if not isinstance(event, (ev.Prefill, ev.Summary)):
            return
        if self._report is None:
            label = self.label + (f": {phase}" if phase else "")
            self._report = self._bar.enter_context(self.out.progress(label, phase=label))
        self.pieces += isinstance(event, ev.Summary)
        if isinstance(event, ev.Prefill):
            self._report(event.done, event.total)
        else:
            self._report(self.pieces, 0)


def _in_summary(event: ev.Event) -> bool:
    return isinstance(event, ev.Summary)


def _in_rebuild() -> Callable[[ev.Event], bool]:
    planned = False

    def reached(event: ev.Event) -> bool:
        nonlocal planned
        planned = planned or isinstance(event, ev.CompactionPlanned)
        return planned and isinstance(event, ev.Prefill)

    return reached


def _probe(session: Session) -> bytes:
    """The logits that one more token gives: they depend on every row."""
    with session.fork() as fork:
        fork.eval(fork.tokens[:1])
        return fork.logits.tobytes()
