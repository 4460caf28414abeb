"""Where the turns of a conversation come from: the keyboard, or a pipe; and how the user is asked in between."""

from __future__ import annotations

import os
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from ds4 import models
from ds4.cli.options import UsageError
from ds4.cli.output import printable

if TYPE_CHECKING:
    from ds4.chat_formats import ToolCall


def lines() -> Iterator[str]:
    """Turns from a pipe: one a line, a backslash at the end goes on."""
    text = ""
    try:
        for raw in sys.stdin:
            raw.encode()  # in some locales Python lets through what is not UTF-8
            line = raw.rstrip("\n")
            if line.endswith("\\"):
                text += line[:-1] + "\n"
                continue
            yield text + line
            text = ""
    except UnicodeError:
        raise UsageError("the input is not UTF-8: convert it first, for example with iconv") from None
    if text:
        yield text


def prompts(message: Callable[[], str], default: Callable[[], str], history: bool) -> Iterator[str]:
    """Turns from the keyboard. `message` is what stands before the cursor, `default` the text that is offered. Ctrl-C
    empties the line."""
    session = prompt_session(history)
    while True:
        try:
            yield session.prompt(message, default=default())
        except KeyboardInterrupt:
            continue
        except EOFError:
            return


def prompt_session(history: bool = True, **options):  # type: ignore[no-untyped-def]
    """A prompt; Enter sends, Alt-Enter or a last backslash goes on. `history`: in a file that only its owner reads,
    else in memory."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def _(event):  # type: ignore[no-untyped-def]
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event):  # type: ignore[no-untyped-def]
        event.current_buffer.insert_text("\n")

    past: FileHistory | InMemoryHistory = InMemoryHistory()
    if history:
        path = models.home() / "history"
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
        past = FileHistory(str(path))
    return PromptSession(history=past, multiline=True, prompt_continuation=". ", key_bindings=keys, **options)


def ask(question: str) -> str | None:
    """One line from the keyboard, "" where the input has ended; None when Ctrl-C was pressed instead. What was typed
    before the question could be read is no answer to it."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.input.typeahead import clear_typeahead

    session: PromptSession[str] = PromptSession()
    try:
        with suppress(termios.error, OSError, ValueError):  # no terminal
            termios.tcflush(sys.stdin, termios.TCIFLUSH)
        clear_typeahead(session.app.input)
        answer = session.prompt(printable(question))
        return answer
    except KeyboardInterrupt:
        return None
    except EOFError:
        return ""


class Permission:
    """Asks before a tool runs that can change something: yes, no, or always for that tool. `cancel` ends the turn: so
    does Ctrl-C at the question."""

    def __init__(self, cancel: Callable[[], None]) -> None:
        self.cancel = cancel
        self.always: set[str] = set()

    def __call__(self, call: ToolCall, line: str) -> bool:
        if call.name in self.always:
            return True
        answer = ask(f"{line}\nallow this? y(es), n(o), a(lways for {call.name}) ")
        if answer is None:
            self.cancel()
            return False
        answer = answer.strip().lower()
        if answer in ("a", "always"):
            self.always.add(call.name)
        return answer in ("y", "yes", "a", "always")
