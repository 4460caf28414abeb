"""`ds4 demo`: a long conversation that compacts itself, three times and in three ways, and what that costs.

No figure is shown before the next logits were compared, bit for bit, with those of a session that evaluated the same
tokens from nothing.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ds4 import events as ev
from ds4.chat_formats import ToolCall
from ds4.cli import scenario
from ds4.cli.options import Subparsers, at_least, command
from ds4.cli.output import Output
from ds4.cli.scenario import READ_ON, READING, Measured, Watch, time_text
from ds4.errors import Ds4Error

if TYPE_CHECKING:
    from ds4.agent.chat import Chat
    from ds4.compaction.policy import Limits
    from ds4.engine import Engine

CTX = 4096
PARTS = 3  # of the log that fit before the next one does not
ANSWER = 60  # most tokens of an answer of the model, where its turns are not its own
FREE_ANSWER = 2000  # the same for a free model, which may think
FREE_TURNS = 8  # messages to a free model before a compaction is given up

NOTES = (
    "So far the log is a list of days. Each line names the keeper, the thing that was looked at, its state, the sky, "
    "the wind in knots and the fuel in litres. Some things are worn and need a spare, others were repaired with wire "
    "only. The fuel goes down from day to day. I have changed no file, and I will go on with the next line of the log "
    "when you want me to."
)
ASK_STATE = "What have you found so far?"
ASK_LAST = "How many parts of the log have you read, and up to which line?"
ASK_RULE = "Which rule did I give you about files, and when is the deadline?"

Forced = tuple[str, Sequence[ToolCall]]


@dataclass(frozen=True)
class _Forced:
    """The answer that comes now is a forced one."""

    type: str = "forced"


def add(subparsers: Subparsers) -> None:
    help = "a long conversation that compacts itself, and what that costs, each result checked"
    parser = command(subparsers, "demo", run, help)
    scenario.add_model(parser)
    parser.add_argument("--ctx", type=at_least(2048), default=CTX, metavar="N", help=f"context (default: {CTX})")
    parser.add_argument("--free", action="store_true", help="all answers are the model's own (it has to be able to)")


def run(args: argparse.Namespace, out: Output) -> None:
    with scenario.open_model(args, out) as engine, tempfile.TemporaryDirectory(prefix="ds4-demo-") as folder:
        scenario.need_tools(engine, args.model)
        with _Demo(engine, out, Path(folder), args.ctx, args.free) as demo:
            demo.run()
            demo.report()


class _Demo:
    """The conversation, from its first message to the report."""

    def __init__(self, engine: Engine, out: Output, folder: Path, ctx: int, free: bool) -> None:
        self.engine, self.out, self.folder, self.ctx, self.free = engine, out, folder, ctx, free
        self.start = time.perf_counter()
        self.line = 1  # of the log, the next to be read
        self.compactions: list[Measured] = []
        self.messages = 0
        scenario.write_log(folder / "station", ctx)
        self.tools = scenario.reading_tools(folder / "station")
        self.chat, self.watch = self.open()

    def __enter__(self) -> _Demo:
        return self

    def __exit__(self, *unused: object) -> None:
        self.chat.close()

    def run(self) -> None:
        self.say_what_is_real()
        self.title("A tool result does not fit: hard compaction")
        self.hard()
        self.title("Saved and opened again, then a question: soft compaction before the turn")
        self.fill(self.limits.soft, self.notes // 2)
        self.reopen()
        self.say(ASK_LAST)
        self.title("The same with background mode: prepared while the model is idle")
        self.reopen(background=True)
        self.fill(self.limits.pre if self.free else self.limits.soft, -self.notes // 2)
        self.wait_for_background()
        self.say(ASK_STATE, (NOTES, ()))
        self.until(lambda: self.used >= self.limits.soft)
        self.say(ASK_RULE)

    # ---- the conversation

    def open(self, background: bool = False) -> tuple[Chat, Watch]:
        from ds4.agent.chat import Chat
        from ds4.compaction.policy import CompactionPolicy
        from ds4.sampling import Sampling

        chat = Chat(
            self.engine,
            ctx=self.ctx,
            system=scenario.SYSTEM,
            tools=self.tools,
            sampling=None if self.free else Sampling(),
            max_tokens=FREE_ANSWER if self.free else ANSWER,
            policy=CompactionPolicy(background=background),
            store=self.folder / "conversation",
        )
        return chat, Watch(chat, self.out, self.compactions)

    @property
    def limits(self) -> Limits:
        limits = self.chat.live.limits
        assert limits is not None
        return limits

    @property
    def used(self) -> int:
        return self.chat.live.used

    def say(self, text: str, *forced: Forced) -> None:
        """One turn. `forced`: its first answers, where they are not the model's own."""
        from ds4.cli.talk import talk

        self.messages += 1
        self.out.line(f"> {text}", style="bold")
        self.out.event("user", text=text)
        if not self.free:
            for words, calls in forced:
                self.chat.force(words, calls)
        events = self.marked(self.watch.events(self.chat.send(text)))
        end = talk(self.out, events, self.watch.cancel)
        if end is None or end.finish == "cancelled":
            raise KeyboardInterrupt

    def marked(self, events: Generator[ev.Event, None, None]) -> Generator[ev.Event | _Forced, None, None]:
        """The events with a mark before every forced answer."""
        left = len(self.chat.forced)
        try:
            for event in events:
                if isinstance(event, (ev.Text, ev.ToolCall)) and len(self.chat.forced) < left:
                    left = len(self.chat.forced)
                    yield _Forced()
                yield event
        finally:
            events.close()

    def hard(self) -> None:
        """Parts of equal size up to just below the soft trigger: the next one does not fit."""
        chat = self.chat
        used = self.used + len(chat.writer.user(scenario.TASK, first=True))
        call = len(chat.writer.assistant(READING, [scenario.read(1, 1000)]))
        part = (self.limits.soft - used) // PARTS
        lines = scenario.lines_for(chat, 1, part * 19 // 20 - call)
        more = (READING, [ToolCall("more", {})])
        self.say(scenario.TASK, (READING, [scenario.read(1, lines)]), *[more] * PARTS)
        self.line = 1 + lines * (1 + PARTS)
        self.until(lambda: bool(self.compactions))

    def fill(self, trigger: int, past: int) -> None:
        """Reads on in one turn that ends about `past` tokens past a trigger."""
        if self.free:
            self.until(lambda: self.used >= trigger)
            return
        lines = scenario.lines_up_to(self.chat, self.line, trigger + past - self.notes, READ_ON)
        read = [(READING, [scenario.read(self.line, lines)])] if lines > 0 else []
        self.say(READ_ON, *read, (NOTES, ()))
        self.line += lines

    @property
    def notes(self) -> int:
        """Tokens of the longest forced answer."""
        return len(self.chat.writer.assistant(NOTES))

    def until(self, reached: Callable[[], bool]) -> None:
        """Asks a free model to read on, a few times, until something is reached."""
        for _ in range(FREE_TURNS if self.free else 0):
            if reached():
                return
            self.say(READ_ON)

    def reopen(self, background: bool = False) -> None:
        """Saves the conversation, closes it, and opens it from its folder. The next logits are the same."""
        self.chat.session.refresh()
        before = self.chat.session.logits.tobytes()
        self.chat.save()
        self.chat.close()
        start = time.perf_counter()
        self.chat, self.watch = self.open(background)
        seconds = time.perf_counter() - start
        if self.chat.snapshot_refused or self.chat.session.logits.tobytes() != before:
            raise Ds4Error("the conversation has other logits after it was opened again: please report this as a bug")
        self.out.line(
            f"saved and opened again in {time_text(seconds)}: same next logits, nothing evaluated", style="dim"
        )
        self.out.event("reopened", seconds=seconds, bit_exact=True)

    def wait_for_background(self) -> None:
        """The user is away, and the model has time."""
        start = time.perf_counter()
        self.out.event("preparing")
        text, fancy = "the model is idle: a compaction is being prepared on a fork", self.out.fancy_err
        if not fancy:
            self.out.note(text)
        with self.out.err.status(text) if fancy and not self.out.quiet else nullcontext():
            ready = scenario.prepared(self.chat)
        seconds = time.perf_counter() - start
        self.out.event("prepared", ready=ready, seconds=seconds)
        why = self.chat.background.error or "too little has been said"
        self.out.line(f"prepared in {time_text(seconds)}" if ready else f"not prepared: {why}", style="dim")

    # ---- what is said around it

    def say_what_is_real(self) -> None:
        ctx, soft = self.ctx, self.limits.soft
        if self.free:
            self.out.line("Every answer is the model's own.", style="dim")
        else:
            self.out.line(
                "Answers marked [forced] are given, token by token, for a small model cannot use tools. The other "
                "answers and all summaries are the model's own, and all work on the context is real.",
                style="dim",
            )
        self.out.line(f"ctx {ctx}; a turn begins with a compaction from {soft} tokens on (soft trigger).", style="dim")

    def title(self, text: str) -> None:
        self.out.line(f"\n== {text}", style="bold cyan")
        self.out.event("step", title=text)

    def report(self) -> None:
        self.title("Report")
        columns = [_column(one) for one in self.compactions]
        rows = list(zip(_FIGURES, *columns, strict=True))
        self.out.table(["compaction", *(one.kind for one in self.compactions)], rows, right=range(1, 1 + len(columns)))
        self.out.line()
        for text in self.conclusions():
            self.out.line(text)
        seconds = time.perf_counter() - self.start
        self.out.event("report", compactions=[one.fields() for one in self.compactions], seconds=seconds)
        self.out.note(f"{self.messages} messages in {seconds:.0f} s")

    def conclusions(self) -> Generator[str, None, None]:
        """What the table means, in sentences."""
        if not self.compactions:
            yield "No compaction was needed: the model has read too little."
            return
        n = len(self.compactions)
        yield (
            f"After each of the {n} compactions the next logits were those of a session that evaluated the same tokens "
            "from nothing, bit for bit."
        )
        longest = max(self.compactions, key=lambda one: one.done.rollback_seconds).done
        if longest.rollback_seconds:
            yield (
                f"Rolling back the request and the summary took at most {time_text(longest.rollback_seconds)}, and "
                "nothing was evaluated for it."
            )
        ahead = next((one for one in self.compactions if one.kind == "background"), None)
        plain = next((one for one in self.compactions if one.kind == "soft"), None)
        if ahead is not None and plain is not None:
            yield (
                f"The conversation stood still for {time_text(plain.done.pause)} without background mode and for "
                f"{time_text(ahead.done.pause)} with it: {time_text(ahead.prepared)} of work were done while the model "
                "was idle."
            )


_FIGURES = (
    "tokens before", "tokens after", "reused", "re-prefilled", "summary", "rollback", "rebuild", "pause",
    "next logits",
)  # fmt: skip


def _column(one: Measured) -> list[str]:
    """The figures of one compaction, as text."""
    done = one.done
    by = {"retry": "penalty, ", "ledger": "none kept, "}.get(done.step, "")
    work = [by + time_text(done.summary_seconds), time_text(done.rollback_seconds), time_text(one.rebuild)]
    if one.kind == "background":
        work = ["done ahead"] * 3
    tokens = [str(n) for n in (done.before, done.after, done.reused, done.evaluated)]
    return [*tokens, *work, time_text(done.pause), "same bits"]
