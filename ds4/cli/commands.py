"""What a user can do with a conversation besides talking: the commands that begin with a slash."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ds4 import conversations
from ds4.cli import plans, settings
from ds4.cli.sessions import show_conversations, show_nodes
from ds4.cli.turns import ask
from ds4.memory import size_text

if TYPE_CHECKING:
    from ds4.cli.room import Room


@dataclass(frozen=True)
class Command:
    usage: str
    help: str
    run: Callable[[Room, str], None]


# ---- the context


def compact(room: Room, argument: str) -> None:
    room.show(room.chat.compact())


def plan(room: Room, argument: str) -> None:
    if not argument:
        return plans.show_whole(room.chat, room.out, room.pace.rate)
    names = re.fullmatch(r"(?:(#\d+)\s+)?(#\d+)", argument)
    if names is None:
        return room.fail(f"/plan takes nothing, or a span of messages such as #3 #8, not {argument!r}")
    plans.show_span(room.chat, room.out, names[1], names[2])


def history(room: Room, argument: str) -> None:
    if argument and (not argument.isdecimal() or argument == "0"):
        return room.fail(f"/history takes a number of messages, not {argument!r}")
    nodes = conversations.history(room.chat.transcript)
    show_nodes(room.out, nodes[-int(argument) :] if argument else nodes, states=True)


def undo(room: Room, argument: str) -> None:
    before = room.chat.live.used
    what = room.chat.undo()
    after = room.chat.live.used
    room.out.event("undone", what=what, before=before, tokens=after)
    said = {"turn": "your last message and what followed", "compaction": "the last compaction"}[what]
    room.out.line(f"undone: {said}; {before} -> {after} tokens")


def retry(room: Room, argument: str) -> None:
    if argument and not argument.isdecimal():
        return room.fail(f"/retry takes a seed, a whole number, not {argument!r}")
    room.show(room.chat.retry(int(argument) if argument else secrets.randbits(32)))


def fork(room: Room, argument: str) -> None:
    if argument:
        if not argument.isdecimal() or not 1 <= int(argument) <= len(room.branches):
            return room.fail(f"there is no branch {argument}: 1 to {len(room.branches)} are there")
        room.current = int(argument) - 1
    elif not any(node.human for node in room.chat.transcript.surface):
        return room.fail("there is nothing to fork yet: say something first")
    else:
        room.branches.append(room.chat.fork())
        room.current = len(room.branches) - 1
    room.say("branch", branch=room.current + 1, branches=len(room.branches), tokens=room.chat.live.used)


def stats(room: Room, argument: str) -> None:
    live = room.chat.live
    ledger = live.engine.ledger()
    room.say(
        "stats",
        branch=room.current + 1,
        branches=len(room.branches),
        tokens=live.used,
        evaluated=live.session.pos,
        ctx=live.ctx,
        pages_used=ledger["pages_used"],
        bytes_used=ledger["bytes_used"],
        bytes_budget=ledger["bytes_budget"],
    )


# ---- keeping


def save(room: Room, argument: str) -> None:
    if not _kept(room):
        return
    size = room.save()
    room.out.event("saved", path=str(room.chat.transcript.store.snapshot), bytes=size)
    room.out.line(f"saved: a snapshot of {size_text(size)} beside the log")


def strip(room: Room, argument: str) -> None:
    if not _kept(room):
        return
    snapshot = room.branches[0].transcript.store.snapshot
    if snapshot is None or not snapshot.exists():
        return room.fail("there is no snapshot to drop")
    size = snapshot.stat().st_size
    snapshot.unlink()
    room.opened.saved = room.branches[0].transcript.seq  # not to be written again for what is there now
    room.out.event("stripped", bytes=size)
    room.out.line(f"stripped: {size_text(size)} freed; the log has everything")


def _kept(room: Room) -> bool:
    """Whether the conversation has a folder; says so when it has none."""
    if room.path is None:
        why = "has not begun: say something first" if room.kept else "is kept in memory only"
        room.fail(f"there is nothing on disk: the conversation {why}")
    elif room.current:
        room.fail("this branch is kept in memory only: /fork 1 goes back to the one on disk")
    return room.path is not None and not room.current


# ---- other conversations


def list_(room: Room, argument: str) -> None:
    show_conversations(room.out, room.path.name if room.path is not None else "")


def switch(room: Room, argument: str) -> None:
    if not argument:
        return room.fail("/switch takes the id of a conversation, or the beginning of it: /list shows them")
    path = conversations.find(argument)
    if room.path is not None and path.samefile(room.path):
        return room.fail(f"{path.name} is where you are")
    wanted = settings.from_info(conversations.info(path))
    if wanted.model != room.opened.settings.model:
        return room.fail(f"{path.name} is with {wanted.model}: leave, then {room.again} --resume {path.name}")
    room.switch(room.opener.open(room.opener.checked(wanted), path))


def new(room: Room, argument: str) -> None:
    room.switch(room.opener.open(room.opened.settings))


def delete(room: Room, argument: str) -> None:
    if not argument and room.path is None:
        return room.fail("the conversation is not on disk: there is nothing to delete")
    path = conversations.find(argument) if argument else room.path
    assert path is not None
    here = room.path is not None and path.samefile(room.path)
    if not room.interactive:
        return room.fail(f"nobody is at a terminal to be asked: `ds4 sessions delete --yes {path.name}` does it")
    answer = ask(f"delete {path.name} with all its files? [y/N] ")
    if answer is None or answer.strip().lower() not in ("y", "yes"):
        return room.out.note(f"{path.name} is kept")
    if here:
        room.drop(room.opener.open(room.opened.settings))
    conversations.delete(path)
    room.out.event("deleted", id=path.name)
    room.out.line(f"deleted {path.name}")


def help_(room: Room, argument: str) -> None:
    room.out.event("help", commands={command.usage: command.help for command in COMMANDS.values()} | {"/quit": QUIT})
    room.out.line(HELP)


COMMANDS = {
    command.usage.split()[0]: command
    for command in (
        Command("/compact", "replace the history by a summary, now", compact),
        Command("/plan [#A #B]", "what a compaction would do; with numbers: of these messages", plan),
        Command("/history [N]", "the (last N) messages, replaced ones too", history),
        Command("/undo", "take back the last message and what followed, or the last compaction", undo),
        Command("/retry [N]", "the last answer again, with a new seed (or the seed N)", retry),
        Command("/fork [N]", "go on in a copy that shares its pages; with N: go to branch N", fork),
        Command("/stats", "tokens, pages and branches", stats),
        Command("/save", "write a snapshot, so that the conversation opens at once", save),
        Command("/strip", "drop the snapshot; the log has everything", strip),
        Command("/list", "the conversations that are kept", list_),
        Command("/switch ID", "go to another conversation", switch),
        Command("/new", "begin another conversation", new),
        Command("/delete [ID]", "delete a conversation with its files; it asks first", delete),
        Command("/help", "this list", help_),
    )
}
QUIT = "leave (Ctrl-D too)"
HELP = "\n".join(
    [
        *(f"{command.usage:<14}{command.help}" for command in COMMANDS.values()),
        f"{'/quit':<14}{QUIT}",
        "Alt-Enter, or a backslash at the end of a line, begins a new line.",
        "Ctrl-C stops an answer and keeps what is there;",
        "a compaction that it stops has changed nothing.",
    ]
)
