"""The long conversation of `ds4 demo` and `ds4 bench`: a text to be read in parts, answers that are given instead of
sampled, and what is looked at when a compaction has ended.

A small model cannot call tools, so its answers may be given ("forced"): they are evaluated token by token as if it had
written them. Summaries, and all work on the context, are real in any case.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds4 import events as ev
from ds4 import models
from ds4.chat_formats import ToolCall
from ds4.cli.options import add_engine, open_engine
from ds4.cli.pull import fetch
from ds4.errors import Ds4Error, UnsupportedError

if TYPE_CHECKING:
    from ds4.agent.chat import Chat
    from ds4.agent.tools import Tool
    from ds4.cli.output import Output, Report
    from ds4.engine import Engine, Session

MODEL = "smollm2-135m"
SYSTEM = "Be brief."
FILE = "log.txt"
TASK = f"Do not change any file. The deadline is Friday 14:00. Read {FILE} to its end, then say what the station needs."
READ_ON = "Read on."
READING = "I read the next part."

_KEEPERS = ("Ines", "Tomas", "Ruth", "Oleg", "Marit")
_THINGS = ("the lamp", "the pump", "the north door", "the fuel tank", "the radio", "the rain gauge", "the boat")
_STATES = ("in good order", "cleaned and oiled", "worn, a spare is needed", "repaired with wire", "tested twice")
_SKY = ("clear", "low cloud", "rain from the west", "fog until noon")
_MOST_LINES = 1 << 16
_LOOK = 0.2  # seconds between two looks at the background pass


def log_text(lines: int) -> str:
    """The log of a small station on an island: the same text every time."""
    return "".join(
        f"Day {i}: {_KEEPERS[i % 5]} looked at {_THINGS[i * 3 % 7]}: {_STATES[i * 2 % 5]}. "
        f"Sky: {_SKY[i % 4]}. Wind {i * 7 % 40} knots, fuel {900 - i * 13 % 600} litres.\n"
        for i in range(1, lines + 1)
    )


def write_log(folder: Path, ctx: int) -> None:
    """A log that is several times as long as the context."""
    folder.mkdir()
    (folder / FILE).write_text(log_text(max(400, ctx // 4)), encoding="utf-8")


def reading_tools(folder: Path) -> list[Tool]:
    """The four reading tools, with room for parts as large as the context asks for."""
    from ds4.agent.builtin import builtin_tools

    return builtin_tools(folder, max_lines=_MOST_LINES, max_bytes=1 << 26)


def add_model(parser: argparse.ArgumentParser) -> None:
    """Flags for the model, which has a default here, and its engine."""
    help = f"default: {MODEL}, which is fetched when it is not here"
    parser.add_argument("-m", "--model", metavar="M", default=MODEL, help=help)
    add_engine(parser, ctx=False)


def open_model(args: argparse.Namespace, out: Output) -> Engine:
    """The engine that the flags ask for; a known model is fetched first where it is not here."""
    if args.model in models.names() and not models.load(args.model).present:
        fetch(args.model, out)
    return open_engine(args, out)


def need_tools(engine: Engine, model: str) -> None:
    """Raises UnsupportedError when the model's chat format has no tool calls."""
    from ds4.agent.chat import calls_tools

    if not calls_tools(engine):
        raise UnsupportedError(
            f"{model} has no way to call tools, and this conversation needs them; take another model."
        )


def read(start: int, lines: int) -> ToolCall:
    return ToolCall("read", {"path": FILE, "start": start, "lines": lines})


def lines_for(chat: Chat, start: int, tokens: int) -> int:
    """How many lines from `start` on a read may have so that its result has at most `tokens` tokens."""

    def fits(lines: int) -> bool:
        return len(chat.writer.result("", chat.toolbox.call(read(start, lines)).text)) <= tokens

    many = 1
    while fits(many) and many < _MOST_LINES:
        many *= 2
    few = many // 2
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (middle, many) if fits(middle) else (few, middle)
    return few


def lines_up_to(chat: Chat, start: int, used: int, question: str) -> int:
    """The lines of a read, asked for by `question`, behind which `used` tokens are in the context; 0 when not even one
    fits."""
    call = chat.writer.assistant(READING, [read(start, 1000)])
    return lines_for(chat, start, used - chat.live.used - len(chat.writer.user(question, first=False)) - len(call))


def prepared(chat: Chat, seen: Callable[[], None] = lambda: None) -> bool:
    """Waits until a compaction is prepared in the background; False when none is in work. Calls `seen` meanwhile."""
    while True:
        looked = time.perf_counter()
        if chat.background.wait(_LOOK):
            return True
        if time.perf_counter() - looked < _LOOK / 2:
            return False
        seen()


# ---- what is looked at


def same_bits(engine: Engine, session: Session, ctx: int, report: Report | None, opened: list[Session]) -> float:
    """Evaluates the session's tokens from nothing in another session and compares the next logits, bit for bit. Returns
    the seconds that took; raises Ds4Error when a bit differs. `opened` holds the other session meanwhile."""
    tokens = session.tokens
    with engine.session(ctx) as fresh:
        opened.append(fresh)
        try:
            seconds = fresh.sync(tokens, progress=report).seconds
            if session.logits.tobytes() != fresh.logits.tobytes():
                raise Ds4Error(
                    f"the next logits differ from those of a session that evaluated the same {len(tokens)} tokens from "
                    "nothing: please report this as a bug"
                )
        finally:
            opened.remove(fresh)
    return seconds


@dataclass(frozen=True)
class Measured:
    """A compaction that was compared. `rebuild`: seconds from its plan to its commit; `zero`: those of evaluating the
    same tokens from nothing."""

    reason: str
    done: ev.CompactionDone
    rebuild: float
    zero: float

    @property
    def kind(self) -> str:
        if self.prepared:
            return "background"
        return {"a tool result does not fit": "hard", "the context is nearly full": "soft"}.get(
            self.reason, "asked for"
        )

    @property
    def prepared(self) -> float:
        """Seconds of work that went by while the model was idle."""
        return self.done.seconds - self.done.pause

    def fields(self) -> dict[str, Any]:
        """For JSON."""
        done = self.done
        return {
            "kind": self.kind, "reason": self.reason, "step": done.step, "before": done.before, "after": done.after,
            "tail": done.tail, "reused": done.reused, "evaluated": done.evaluated,
            "summary_seconds": done.summary_seconds, "rollback_seconds": done.rollback_seconds,
            "rebuild_seconds": self.rebuild, "pause_seconds": done.pause, "prepared_seconds": self.prepared,
            "zero_seconds": self.zero, "bit_exact": True,
        }  # fmt: skip


@dataclass
class Watch:
    """Passes the events of one chat on, and compares every compaction as soon as it has ended."""

    chat: Chat
    out: Output
    compactions: list[Measured] = field(default_factory=list)
    opened: list[Session] = field(default_factory=list)
    reason: str = ""
    planned: float = 0.0

    def cancel(self) -> None:
        """Ends whatever computes."""
        self.chat.cancel()
        for session in list(self.opened):
            session.cancel()

    def events(self, events: Generator[ev.Event, None, None]) -> Generator[ev.Event, None, None]:
        try:
            for event in events:
                now = time.perf_counter()
                if isinstance(event, ev.CompactionStarted):
                    self.reason = event.reason
                elif isinstance(event, ev.CompactionPlanned):
                    self.planned = now
                yield event
                if isinstance(event, ev.CompactionDone):
                    self._compare(event, now - self.planned)
        finally:
            events.close()

    def _compare(self, done: ev.CompactionDone, rebuild: float) -> None:
        session, chat = self.chat.session, self.chat
        if session.tokens != chat.transcript.tokens:
            raise Ds4Error("the session does not hold the tokens of the conversation: please report this as a bug")
        with self.out.progress("comparing with an evaluation from nothing") as report:
            zero = same_bits(chat.engine, session, session.ctx, report, self.opened)
        self.compactions.append(Measured(self.reason, done, rebuild, zero))
        self.out.event("compared", **self.compactions[-1].fields())


def time_text(seconds: float) -> str:
    """A duration with three digits and its unit."""
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        if seconds * factor < 999.5:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.2f} s"
