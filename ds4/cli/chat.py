"""`ds4 chat`: a conversation at the terminal, or one turn a line from a pipe."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ds4 import models
from ds4.cli.options import Subparsers, add_chat, add_model, add_sampling, command, open_engine, sampling
from ds4.cli.output import Output
from ds4.errors import Ds4Error
from ds4.memory import size_text

if TYPE_CHECKING:
    from ds4.agent.chat import Chat

HELP = """\
/undo         truncate to before your last message
/retry [N]    the last answer again, with a new seed (or the seed N)
/fork [N]     go on in a copy that shares its pages; with N: go to branch N
/stats        positions, pages and branches
/help         this list
/quit         leave (Ctrl-D too)
Alt-Enter, or a backslash at the end of a line, begins a new line. Ctrl-C stops an answer and keeps what is there."""


def add(subparsers: Subparsers) -> None:
    parser = command(subparsers, "chat", run, "talk to a model; /help inside lists what can be done with the context")
    add_chat(parser)
    add_sampling(parser)
    add_model(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    from ds4.agent.chat import Chat

    options = sampling(args)
    with open_engine(args, out) as engine:
        chat = Chat(
            engine,
            ctx=args.ctx,
            system=args.system,
            chat_format=args.chat_format,
            sampling=options,
            max_tokens=args.max_tokens,
        )
        room = Room(chat, out)
        try:
            interactive = sys.stdin.isatty() and sys.stdout.isatty()
            if interactive:
                out.note(f"{args.model}: /help lists the commands, Ctrl-D leaves")
            for text in _prompts() if interactive else _lines():
                if not room.enter(text):
                    break
        finally:
            room.close()
    return 1 if room.failed and not interactive else 0


class Room:
    """The branches of one conversation and the commands on them."""

    def __init__(self, chat: Chat, out: Output) -> None:
        self.branches, self.current, self.out = [chat], 0, out
        self.failed = False
        self.commands: dict[str, Callable[[str], None]] = {
            "/undo": self.undo,
            "/retry": self.retry,
            "/fork": self.fork,
            "/stats": self.stats,
            "/help": lambda argument: out.line(HELP),
        }

    @property
    def chat(self) -> Chat:
        return self.branches[self.current]

    def enter(self, text: str) -> bool:
        """Does what one input says; False ends the conversation. An error ends only the turn."""
        word, _, argument = text.strip().partition(" ")
        if not word:
            return True
        if word in ("/quit", "/exit"):
            return False
        try:
            if word in self.commands:
                self.commands[word](argument.strip())
            elif word.startswith("/") and word[1:].isalpha():
                self.fail(f"there is no command {word}: /help lists them")
            else:
                self.show(self.chat.send(text))
        except Ds4Error as e:
            self.fail(" ".join(str(e).split()))
        return True

    def fail(self, message: str) -> None:
        self.failed = True
        self.out.error(message)

    def show(self, events: object) -> None:
        from ds4.cli.talk import talk

        talk(self.out, events, self.chat.session.cancel)  # type: ignore[arg-type]

    def undo(self, argument: str) -> None:
        before = self.chat.session.pos
        self.chat.undo()
        self.say("undone", before=before, pos=self.chat.session.pos)

    def retry(self, argument: str) -> None:
        if argument and not argument.isdecimal():
            return self.fail(f"/retry takes a seed, a whole number, not {argument!r}")
        self.show(self.chat.retry(int(argument) if argument else secrets.randbits(32)))

    def fork(self, argument: str) -> None:
        if argument:
            if not argument.isdecimal() or not 1 <= int(argument) <= len(self.branches):
                return self.fail(f"there is no branch {argument}: 1 to {len(self.branches)} are there")
            self.current = int(argument) - 1
        else:
            self.branches.append(self.chat.fork())
            self.current = len(self.branches) - 1
        self.say("branch", branch=self.current + 1, branches=len(self.branches), pos=self.chat.session.pos)

    def stats(self, argument: str) -> None:
        session = self.chat.session
        ledger = session.engine.ledger()
        self.say(
            "stats",
            branch=self.current + 1,
            branches=len(self.branches),
            pos=session.pos,
            ctx=session.ctx,
            pages_used=ledger["pages_used"],
            bytes_used=ledger["bytes_used"],
            bytes_budget=ledger["bytes_budget"],
        )

    def say(self, type: str, **fields: int) -> None:
        """A result of a command, as an event or as a line."""
        self.out.event(type, **fields)
        shown = {k.removeprefix("bytes_"): size_text(v) if k.startswith("bytes_") else v for k, v in fields.items()}
        self.out.line(f"{type}: " + ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in shown.items()))

    def close(self) -> None:
        for chat in self.branches:
            chat.close()


def _lines() -> Iterator[str]:
    """Turns from a pipe: one a line, a backslash at the end goes on."""
    text = ""
    for raw in sys.stdin:
        line = raw.rstrip("\n")
        if line.endswith("\\"):
            text += line[:-1] + "\n"
            continue
        yield text + line
        text = ""
    if text:
        yield text


def _prompts() -> Iterator[str]:
    """Turns from the keyboard, with history. Ctrl-C empties the line."""
    session = prompt_session()
    while True:
        try:
            yield session.prompt("> ")
        except KeyboardInterrupt:
            continue
        except EOFError:
            return


def prompt_session(**options):  # type: ignore[no-untyped-def]
    """A prompt with a history file that only its owner reads; Enter sends, Alt-Enter or a last backslash goes on."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory
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

    path = models.home() / "history"
    path.parent.mkdir(parents=True, exist_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
    return PromptSession(
        history=FileHistory(str(path)), multiline=True, prompt_continuation=". ", key_bindings=keys, **options
    )
