"""The room that a conversation at the terminal takes place in: what is open in it, and how one is left for another.

A conversation gets its folder with its first message. Branches (`/fork`) live in memory; only the first one is kept.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds4 import conversations
from ds4.cli import commands
from ds4.cli.output import Output
from ds4.cli.settings import Opened, Opener
from ds4.cli.talk import interruptible, talk
from ds4.errors import Ds4Error
from ds4.events import Summary, Text, Thinking
from ds4.memory import size_text
from ds4.store import Store

if TYPE_CHECKING:
    from ds4.agent.chat import Chat
    from ds4.events import Event

SNAPSHOT_FROM = 512  # tokens; less is evaluated again faster than one looks


class Room:
    """`kept`: conversations go to disk. `interactive`: the user can be asked. `again`: the command that a conversation
    is gone on with. `failed`: an input did not do; `interrupted`: Ctrl-C came during the last one."""

    def __init__(
        self, opener: Opener, opened: Opened, out: Output, *, kept: bool, interactive: bool, again: str
    ) -> None:
        self.opener, self.out, self.kept, self.interactive, self.again = opener, out, kept, interactive, again
        self.opened = opened
        self.branches, self.current = [opened.chat], 0
        self.failed = self.interrupted = False
        self.pace = Pace()
        self._pending = self._told = ""

    @property
    def chat(self) -> Chat:
        return self.branches[self.current]

    @property
    def path(self) -> Path | None:
        """The folder of the conversation, once it has one."""
        return self.branches[0].transcript.store.path

    def prompt(self) -> str:
        """How full the context is, and the cursor's place."""
        live = self.chat.live
        ready = ", a compaction is prepared" if self.chat.background.ready else ""
        return f"[{short(live.used)}/{short(live.ctx)}{ready}] > "

    def take_pending(self) -> str:
        """The text that a failure or Ctrl-C has left unsent, to be offered again; once."""
        text, self._pending = self._pending, ""
        return text

    # ---- turns

    def enter(self, text: str) -> bool:
        """Does what one input says; False ends the conversation. An error ends only the turn, and so does Ctrl-C."""
        word, _, argument = text.strip().partition(" ")
        if not word:
            return True
        if word in ("/quit", "/exit"):
            return False
        self.interrupted = False
        try:
            if word in commands.COMMANDS:
                commands.COMMANDS[word].run(self, argument.strip())
            elif word.startswith("/") and word[1:].isalpha():
                self.fail(f"there is no command {word}: /help lists them")
            else:
                self._begin()
                self.show(self.chat.send(text))
        except BrokenPipeError:  # nobody reads what is said
            raise
        except (Ds4Error, OSError) as error:
            self.fail(" ".join(str(error).split()))
        except KeyboardInterrupt:  # a second one, when the turn had just ended
            self.interrupted = True
            self.out.end_line()
        self._offer()
        return True

    def fail(self, message: str) -> None:
        self.failed = True
        self.out.error(message)

    def show(self, events: Generator[Event, None, None]) -> None:
        """Shows a turn or a compaction; Ctrl-C cancels it."""
        talk(self.out, self.pace.timed(events), self.cancel)

    def cancel(self) -> None:
        self.interrupted = True
        self.chat.cancel()

    def say(self, type: str, **fields: int | str) -> None:
        """A result of a command, as an event or as a line."""
        self.out.event(type, **fields)
        shown = [
            f"{name[6:]} {size_text(int(value))}" if name.startswith("bytes_") else f"{name.replace('_', ' ')} {value}"
            for name, value in fields.items()
        ]
        self.out.line(f"{type}: {', '.join(shown)}")

    def _begin(self) -> None:
        """The first message is about to be sent: the conversation gets its folder."""
        if not self.kept or self.path is not None:
            return
        try:
            path = conversations.new_path()
        except OSError as error:
            self.kept = False
            self.out.note(f"the conversation is kept in memory only: {error}")
            return
        new = self.opener.open(self.opened.settings, path)
        self._close()
        self._enter(new)
        self._announce()

    def _offer(self) -> None:
        """A message that did not come in is offered again."""
        chat, held = self.chat, self.chat.held
        texts = [held.text] if held is not None and held.kind == "user" else []
        texts += chat.queued
        chat.queued.clear()
        self._pending, told = "\n\n".join(texts), self._told
        waits = "the result of a tool waits: it comes in with your next message"
        self._told = self._pending or (waits if held is not None and held.kind == "tool" else "")
        if not self._told or self._told == told:
            return
        if texts:
            self.out.event("pending", text=self._pending)
            waits = "not sent: your message waits; send it again, or another one"
        self.out.note(waits)

    # ---- coming and going

    def welcome(self) -> None:
        """Says of a conversation that is gone on with what there is to know."""
        if self.path is None:
            return
        store, chat = self.chat.transcript.store, self.chat
        self._announce()
        if store.damage is not None:
            self.out.note(f"some of it cannot be read, it goes on from before that: {store.damage}")
        if chat.snapshot_refused:
            self.out.note(f"its snapshot is not used, so it is evaluated again: {chat.snapshot_refused}")
        self.out.note(f"{chat.live.used} tokens of {chat.live.ctx} are used; /history shows what was said")
        self._offer()

    def _announce(self) -> None:
        self.out.event("conversation", id=self.path.name if self.path else "", path=str(self.path))
        if self.path is not None:
            self.out.note(f"conversation {self.path.name}")

    def switch(self, opened: Opened) -> None:
        """Leaves the conversation for another one."""
        self.leave()
        self._enter(opened)
        self.welcome()

    def drop(self, opened: Opened) -> None:
        """Closes the conversation, of which nothing shall be left, for another one."""
        self._end_jobs()
        self._close()
        self._enter(opened)

    def leave(self, snapshot: bool = True) -> None:
        """Closes what is open; a long conversation gets a snapshot first, so that it is there at once next time."""
        if snapshot and self._worth_a_snapshot():
            self.out.note("saving a snapshot, so that it opens at once (Ctrl-C skips that)")
            try:
                self.save()
            except (Ds4Error, OSError) as error:
                self.out.note(f"no snapshot: {' '.join(str(error).split()).rstrip('.')}. Nothing is lost without it.")
        if len(self.branches) > 1:
            self.out.note(f"{len(self.branches) - 1} branches were kept in memory only and end here")
        self._end_jobs()
        path, failed = self.path, self.branches[0].transcript.store.failed
        self._close()
        if path is None:
            return
        if not Store.exists(path):
            self.out.note(f"nothing is kept: {path} has no log")
        elif failed is not None:
            self.out.note(f"the end of it is lost; go on from what is kept with: {self.again} --resume {path.name}")
        else:
            self.out.note(f"kept; go on with: {self.again} --resume {path.name}")

    def save(self) -> int:
        """Writes a snapshot of the kept branch; its bytes. Raises Cancelled when Ctrl-C ends that, and what
        `Chat.save` raises."""
        chat = self.branches[0]
        errors: list[BaseException] = []

        def work() -> None:
            try:
                chat.save()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=work)  # the main thread has to be free to hear Ctrl-C
        with interruptible(chat.cancel) as pressed:
            thread.start()
            while thread.is_alive():
                thread.join(0.02)
                if pressed.is_set():
                    chat.cancel()  # again: it may have come before the save was in the core
        if errors:
            raise errors[0]
        self.opened.saved = chat.transcript.seq
        path = chat.transcript.store.snapshot
        return path.stat().st_size if path is not None else 0

    def _enter(self, opened: Opened) -> None:
        self.opened = opened
        self.branches, self.current = [opened.chat], 0
        self._pending = self._told = ""

    def _close(self) -> None:
        for chat in self.branches:
            chat.close()

    def _worth_a_snapshot(self) -> bool:
        chat = self.branches[0]
        new = chat.transcript.seq != self.opened.saved
        return chat.transcript.store.persistent and chat.session.pos >= SNAPSHOT_FROM and new

    def _end_jobs(self) -> None:
        jobs = self.opened.jobs
        if jobs is None:
            return
        if running := jobs.running():
            self.out.note(f"background jobs are ended: {', '.join(map(str, running))}")
        jobs.close()


class Pace:
    """How fast the model writes, from the events as they come."""

    def __init__(self) -> None:
        self.tokens, self.seconds = 0, 0.0

    @property
    def rate(self) -> float:
        """Tokens a second; 0 while nothing was measured."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    def timed(self, events: Generator[Event, None, None]) -> Generator[Event, None, None]:
        """The events as they are."""
        last: Any = None
        start = time.monotonic()
        try:
            for event in events:
                now = time.monotonic()
                if isinstance(event, (Text, Thinking, Summary)) and type(event) is type(last):
                    self.tokens, self.seconds = self.tokens + 1, self.seconds + now - start
                yield event
                last, start = event, time.monotonic()
        finally:
            events.close()


def short(tokens: int) -> str:
    """A number of tokens in few characters: 812, 1.2k, 128k."""
    return f"{tokens}" if tokens < 1024 else f"{tokens / 1024:.1f}".removesuffix(".0") + "k"
