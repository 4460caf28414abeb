"""Shows a turn: prefill bar, streamed text, figures. `ds4 run`, `ds4 chat` and `ds4 demo` share it."""

from __future__ import annotations

import dataclasses
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ds4.cli.output import Output, Report
from ds4.errors import Cancelled
from ds4.events import Prefill, Text, Thinking, TurnEnd

SHORT_PREFILL = 64  # tokens; no bar below


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


def talk(out: Output, events: Generator[Any, None, None], cancel: Callable[[], None]) -> TurnEnd | None:
    """Shows the events of one turn and returns the last one; None when the turn was cut before it came.

    Ctrl-C calls `cancel` (the session's), which ends the turn; what was generated until then stays. A second Ctrl-C
    closes the events, should the turn not end by itself.
    """
    end, first_token = None, 0.0
    with ExitStack() as bar, interruptible(cancel) as pressed:
        report: Report | None = None
        try:
            for event in events:
                if isinstance(event, Prefill):
                    if report is None and (event.total >= SHORT_PREFILL or out.json):
                        report = bar.enter_context(out.progress("prefill", type="prefill"))
                    if report is not None:
                        report(event.done, event.total)
                    first_token = time.monotonic()
                    continue
                bar.close()
                _show(out, event)
                if isinstance(event, TurnEnd):
                    end = event
        except (Cancelled, KeyboardInterrupt):
            if not pressed.is_set():
                raise
        finally:
            events.close()
    out.end_line()
    if end is not None:
        out.note(figures(end, time.monotonic() - first_token if first_token else 0))
    return end


def _show(out: Output, event: Any) -> None:
    if isinstance(event, Text):
        out.stream(event.text)
    elif isinstance(event, Thinking):
        out.stream(event.text, style="dim italic")
    out.event(**(dataclasses.asdict(event) | {"type": event.type}))


def figures(end: TurnEnd, decoding: float) -> str:
    """One line about a turn; `decoding`: seconds since the prompt was in."""
    speed = f", {end.generated / decoding:.1f} tokens/s" if decoding > 0.05 and end.generated else ""
    why = {"length": "; cut at the token limit", "cancelled": "; stopped"}.get(end.finish, "")
    return f"[{end.prompt_tokens} prompt tokens, {end.reused} of them reused; {end.generated} generated{speed}{why}]"
