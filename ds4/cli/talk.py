"""Shows a turn or a compaction: bars, streamed text, figures. `ds4 run`, `chat`, `agent` and `demo` share it."""

from __future__ import annotations

import dataclasses
import json
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ds4 import events as ev
from ds4.cli.output import Output, Report, printable
from ds4.errors import Cancelled
from ds4.events import Prefill, TurnEnd

SHORT_PREFILL = 64  # tokens; no bar below
RESULT_LINES = 4  # of a tool's result
GREY = "bright_black"


@contextmanager
def interruptible(stop: Callable[[], None]) -> Iterator[threading.Event]:
    """Inside, the first Ctrl-C calls `stop` and sets the event; a second one raises KeyboardInterrupt as usual."""
    pressed = threading.Event()

    def handle(number: int, frame: object) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()
        stop()

    if threading.current_thread() is not threading.main_thread():  # only the main thread hears signals
        yield pressed
        return
    before = signal.signal(signal.SIGINT, handle)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def leaving_on_signals() -> Iterator[None]:
    """Inside, the first SIGTERM or SIGHUP (the terminal was closed) raises SystemExit, so that nothing that was started
    runs on unseen and the terminal is put right; a second one ends at once. Where they are ignored they stay so."""

    def handle(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise SystemExit(128 + number)

    ours = []
    if threading.current_thread() is threading.main_thread():
        ours = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) == signal.SIG_DFL]
    for number in ours:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def talk(out: Output, events: Generator[Any, None, None], cancel: Callable[[], None]) -> TurnEnd | None:
    """Shows the events of one turn, or of a compaction, and returns the last TurnEnd; None when there was none.

    Ctrl-C calls `cancel` (the chat's), which ends the turn; what was generated until then stays. A second Ctrl-C closes
    the events, should the turn not end by itself.
    """
    with _Screen(out) as screen, interruptible(cancel) as pressed:
        try:
            for event in events:
                screen.show(event)
        except (Cancelled, KeyboardInterrupt):
            if not pressed.is_set():
                raise
        finally:
            events.close()
    return screen.end


class _Screen:
    """What is on the screen at present: a bar, a text that grows, or nothing that is open."""

    def __init__(self, out: Output) -> None:
        self.out = out
        self.end: TurnEnd | None = None
        self._open = ExitStack()
        self._what = ""
        self._report: Report | None = None
        self._feed: Callable[[str], None] | None = None
        self._label = "prefill"
        self._base = 0
        self._first_token = 0.0

    def __enter__(self) -> _Screen:
        return self

    def __exit__(self, *unused: object) -> None:
        self._close()
        self.out.end_line()
        if self.end is not None:
            decoding = time.monotonic() - self._first_token if self._first_token else 0
            self.out.note(figures(self.end, decoding))

    def _close(self) -> None:
        self._open.close()
        self._what, self._report, self._feed = "", None, None

    def show(self, event: Any) -> None:
        if isinstance(event, Prefill):
            self._prefill(event)
            return
        if not isinstance(event, ev.Summary) or self._what != "summary":
            self._close()
        getattr(self, f"_{event.type}", lambda event: None)(event)
        self.out.event(**(dataclasses.asdict(event) | {"type": event.type}))

    def _prefill(self, event: Prefill) -> None:
        if self._what != "bar":
            self._close()
            self._what = "bar"
            self._base = (
                0 if self.out.json else event.done
            )  # what was there before: the bar's speed is that of the rest
            if self.out.json or event.total - event.done >= SHORT_PREFILL:
                self._report = self._open.enter_context(self.out.progress(self._label, type="prefill"))
        if self._report is not None:
            self._report(event.done - self._base, event.total - self._base)
        self._first_token = time.monotonic()

    def _text(self, event: ev.Text) -> None:
        self.out.stream(event.text)

    def _thinking(self, event: ev.Thinking) -> None:
        self.out.stream(event.text, style="dim italic")

    def _tool_call(self, event: ev.ToolCall) -> None:
        self.out.end_line()
        arguments = json.dumps(dict(event.arguments), ensure_ascii=False)
        self.out.line(printable(f"-> {event.name} {_cut(arguments, 200)}"), style="cyan")

    def _tool_result(self, event: ev.ToolResult) -> None:
        lines = event.text.splitlines()
        for line in lines[:RESULT_LINES]:
            self.out.line(printable(f"   {_cut(line, 120)}"), style="dim")  # hostile in a pipe, too: think of tee
        if len(lines) > RESULT_LINES:
            self.out.line(f"   ... {len(lines) - RESULT_LINES} more lines", style="dim")

    def _notice(self, event: ev.Notice) -> None:
        self.out.note(event.text)

    def _compaction_started(self, event: ev.CompactionStarted) -> None:
        self._label = "reading"
        self.out.end_line()
        self.out.line(f"COMPACTING {event.bottom} tokens: {event.reason}", style="bold bright_magenta")

    def _summary(self, event: ev.Summary) -> None:
        if self._feed is None:
            self._what = "summary"
            self._feed = self._open.enter_context(self.out.running(GREY))
        self._feed(event.text)

    def _summary_discarded(self, event: ev.SummaryDiscarded) -> None:
        self.out.line(f"[not kept: {event.reason}]", style=GREY)

    def _compaction_planned(self, event: ev.CompactionPlanned) -> None:
        self._label = "rebuilding"
        self.out.line(
            f"{event.before} tokens become {event.after}: {event.reused} stay in place, the last {event.tail} are kept "
            "as they were",
            style=GREY,
        )

    def _compaction_done(self, event: ev.CompactionDone) -> None:
        self._label = "prefill"
        by = {"model": "", "retry": ", second try", "ledger": ", no summary: the record alone", "agent": ""}
        self.out.line(
            f"compacted: {event.before} -> {event.after} tokens, {event.evaluated} evaluated again, {event.pause:.2f} s"
            + by.get(event.step, ""),
            style="magenta",
        )

    def _compaction_failed(self, event: ev.CompactionFailed) -> None:
        self._label = "prefill"
        self.out.line(
            f"not compacted ({event.step}): {event.reason.rstrip('.')}. Nothing has changed.", style="magenta"
        )

    def _forced(self, event: Any) -> None:
        """Of `ds4 demo`: the answer that comes is not the model's own."""
        self.out.stream("[forced] ", style="dim")

    def _turn_end(self, event: TurnEnd) -> None:
        self.end = event


def _cut(text: str, limit: int) -> str:
    """On one line, at most so many characters."""
    text = " ".join(text.split()) if "\n" in text else text
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def figures(end: TurnEnd, decoding: float) -> str:
    """One line about a turn; `decoding`: seconds since the prompt was in."""
    speed = f", {end.generated / decoding:.1f} tokens/s" if decoding > 0.05 and end.generated else ""
    if end.finish == "cancelled" and not end.prompt_tokens:
        return "[stopped before an answer began]"
    why = {"length": "; cut at the token limit", "cancelled": "; stopped"}.get(end.finish, "")
    return f"[{end.prompt_tokens} prompt tokens, {end.reused} of them reused; {end.generated} generated{speed}{why}]"
