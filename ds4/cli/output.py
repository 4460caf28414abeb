"""How every command speaks: text for people, or one JSON object a line for programs.

Text: results go to stdout, notes and progress to stderr. Colour and bars only where the stream is a terminal and
NO_COLOR is not set. `--json`: stdout carries events, each {"type": ...}; notes and bars are off. `--quiet`: only
results and errors. Text of models and files is hostile: on a terminal control characters (all that could start an
escape sequence) are shown, not sent.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from ds4.memory import size_text

Report = Callable[[int, int], None]
"""report(done, total); total 0 = unknown."""

# C0 and C1, and what turns the direction of a line around or breaks one for some programs
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
PLAIN_EVERY = 5.0  # seconds between two progress lines that are not drawn in place
JSON_EVERY = 0.1


def printable(text: str) -> str:
    """`text` with control characters, except tab and newline, as visible escapes."""
    return _CONTROL.sub(lambda m: f"\\x{ord(m[0]):02x}" if m[0] < "\u0100" else f"\\u{ord(m[0]):04x}", text)


def fancy(stream: IO[str]) -> bool:
    """Whether colour and redrawing suit this stream."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class _Rate(ProgressColumn):
    """Tokens or bytes: done, total, per second."""

    def __init__(self, unit: str) -> None:
        super().__init__(Column(no_wrap=True))
        self.unit = unit

    def render(self, task: Task) -> Text:
        seconds = task.elapsed or 0
        return Text(_amount(int(task.completed), int(task.total or 0), self.unit, seconds))


def _amount(done: int, total: int, unit: str, seconds: float) -> str:
    rate = done / seconds if seconds > 0.05 else 0
    if unit == "bytes":
        text, speed = size_text(done) + (f" of {size_text(total)}" if total else ""), f"{size_text(rate)}/s"
    else:
        text, speed = (f"{done}/{total}" if total else f"{done}") + f" {unit}", f"{rate:.0f} {unit}/s"
    return f"{text}, {speed}" if rate else text


class _Running:
    """The open line of a text that grows, and its figures below."""

    def __init__(self, style: str) -> None:
        self.style, self.line, self.count, self.start = style, "", 0, time.monotonic()

    def feed(self, text: str) -> list[str]:
        """The lines that are complete now."""
        self.count += 1
        *lines, self.line = (self.line + text).split("\n")
        return lines

    def __rich__(self) -> Group:
        seconds = max(0.05, time.monotonic() - self.start)
        status = f"{self.count} tokens, {self.count / seconds:.1f} tokens/s"
        return Group(Text(self.line, style=self.style), Text(status, style="dim"))


class Output:
    """One command's two streams. Everything that a command says goes through here."""

    def __init__(self, json: bool = False, quiet: bool = False) -> None:
        self.json, self.quiet = json, quiet
        self.terminal = sys.stdout.isatty()
        self.fancy_out, self.fancy_err = fancy(sys.stdout), fancy(sys.stderr)
        plain: dict[str, Any] = {"markup": False, "emoji": False, "highlight": False}
        self.out = Console(force_terminal=self.fancy_out, no_color=not self.fancy_out, **plain)
        self.err = Console(stderr=True, force_terminal=self.fancy_err, no_color=not self.fancy_err, **plain)
        self._column_zero = True  # of stdout, where streamed text may have stopped in the middle of a line

    # -- results: stdout

    def event(self, type: str, **fields: Any) -> None:
        """One JSON line; nothing in text mode."""
        if self.json:
            line = json.dumps({"type": type, **fields}, ensure_ascii=False)
            sys.stdout.write(_CONTROL.sub(lambda m: f"\\u{ord(m[0]):04x}", line) + "\n")
            sys.stdout.flush()

    def stream(self, text: str, style: str = "") -> None:
        """A piece of a model's text, at once, in text mode."""
        if self.json or not text:
            return
        if self.terminal:
            text = printable(text)
        self._column_zero = text.endswith("\n")
        if style and self.fancy_out:
            self.out.print(Text(text, style=style), end="", soft_wrap=True)
        else:
            sys.stdout.write(text)
        sys.stdout.flush()

    def end_line(self) -> None:
        """Ends a streamed line that is still open."""
        if not self._column_zero:
            self._column_zero = True
            sys.stdout.write("\n")
            sys.stdout.flush()

    def line(self, text: str = "", style: str = "") -> None:
        """One line of a result, in text mode."""
        if not self.json:
            self.stream(text + "\n", style)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]], right: Sequence[int] = ()) -> None:
        """Rows of a result, in text mode, aligned with blanks; `right`: columns of numbers."""
        if self.json:
            return
        cells = [[printable(str(c)) for c in row] for row in rows]
        if self.fancy_out:
            table = Table(box=None, pad_edge=False, header_style="bold")
            for i, name in enumerate(columns):
                table.add_column(name, justify="right" if i in right else "left", overflow="fold")
            for row in cells:
                table.add_row(*(Text(c) for c in row))
            self.out.print(table)
            return
        widths = [max(len(r[i]) for r in [list(columns), *cells]) for i in range(len(columns))]
        for row in [list(columns), *cells]:
            words = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
            self.line("  ".join(words).rstrip())

    @contextmanager
    def running(self, style: str) -> Iterator[Callable[[str], None]]:
        """Text that grows, with a line below it that says how much there is and how fast it comes; only the text
        stays. The caller feeds about a token at a time. Without redrawing: plain streamed text."""
        if self.json or not self.fancy_out:
            yield self.stream
            self.end_line()
            return
        self.end_line()
        shown = _Running(style)
        with Live(shown, console=self.out, transient=True, refresh_per_second=12) as live:

            def feed(text: str) -> None:
                for line in shown.feed(printable(text)):
                    live.console.print(Text(line, style=style), soft_wrap=True)

            try:
                yield feed
            finally:
                rest, shown.line = shown.line, ""
                if rest:
                    live.console.print(Text(rest, style=style), soft_wrap=True)

    # -- notes: stderr

    def note(self, text: str) -> None:
        """Something that is good to know, for people only."""
        if not self.json and not self.quiet:
            self.end_line()
            self.err.print(Text(printable(text), style="dim"), soft_wrap=True)

    def error(self, text: str) -> None:
        """The one sentence that a failure ends with."""
        with suppress(OSError):  # it may be stdout that has failed
            self.end_line()
            self.event("error", message=text)
        self.err.print(Text.assemble(("ds4: ", "bold red"), printable(text)), soft_wrap=True)

    @contextmanager
    def progress(self, label: str, unit: str = "tokens", type: str = "progress", **fields: Any) -> Iterator[Report]:
        """A bar on a terminal, a line now and then elsewhere, events of `type` with `fields` in JSON."""
        if self.json:
            yield _every(JSON_EVERY, lambda done, total: self.event(type, **fields, done=done, total=total))
        elif self.quiet:
            yield lambda done, total: None
        elif self.fancy_err:
            self.end_line()
            bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                _Rate(unit),
                TimeRemainingColumn(),
                console=self.err,
                transient=True,
            )
            with bar:
                task = bar.add_task(label, total=None)
                yield lambda done, total: bar.update(task, completed=done, total=total or None)
        else:
            start = time.monotonic()
            yield _every(
                PLAIN_EVERY,
                lambda done, total: self.note(f"{label}: {_amount(done, total, unit, time.monotonic() - start)}"),
                first=False,
            )


def _every(seconds: float, report: Report, first: bool = True) -> Report:
    """Lets one call through each so many seconds, and always the last one (done = total)."""
    last = -seconds if first else time.monotonic()
    shown_end = False

    def limited(done: int, total: int) -> None:
        nonlocal last, shown_end
        now = time.monotonic()
        ended = bool(total) and done >= total
        if (ended and not shown_end and (first or now - last >= seconds)) or (not ended and now - last >= seconds):
            last = now
            shown_end = ended
            report(done, total)

    return limited
