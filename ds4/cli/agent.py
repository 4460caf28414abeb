"""`ds4 agent`: a conversation with a model that has tools for the files of a folder."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from ds4 import conversations
from ds4.cli import settings, turns
from ds4.cli.options import Subparsers, UsageError, command, open_engine
from ds4.cli.output import Output
from ds4.cli.talk import leaving_on_signals
from ds4.errors import ArgumentError


def add(subparsers: Subparsers) -> None:
    help = "talk to a model that reads, and where you allow it changes, the files of a folder"
    parser = command(subparsers, "agent", run, help)
    group = parser.add_argument_group("tools")
    group.add_argument("--root", metavar="DIR", help="the folder of the file tools (default: the current one)")
    group.add_argument("--write", action="store_true", help="offer write and edit; each call is asked for")
    group.add_argument("--bash", action="store_true", help="offer bash and job; each command is asked for")
    group.add_argument("--yes", action="store_true", help="allow all calls without asking")
    group.add_argument(
        "--no-span-tools", action="store_true", help="the model gets no tools to compact its own conversation"
    )
    group.add_argument(
        "--greedy-calls", action="store_true", help="write the markup of calls greedily, where the format allows it"
    )
    settings.add(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    return converse(args, out, tools=True)


def converse(args: argparse.Namespace, out: Output, tools: bool) -> int:
    """The conversation that the flags ask for, from its first turn to its end; returns the exit code."""
    from ds4.cli.room import Room

    path = _resumed(args)
    chosen = settings.from_args(args, tools, conversations.info(path) if path is not None else None)
    args.model = chosen.model
    interactive = sys.stdin.isatty() and sys.stdout.isatty() and not out.json
    permission = turns.Permission(lambda: room.cancel()) if interactive else None
    with leaving_on_signals(), open_engine(args, out) as engine:
        opener = settings.Opener(engine, out, (lambda call, line: True) if args.yes else permission)
        chosen = opener.checked(chosen)
        opened, again = opener.open(chosen, path), f"ds4 {args.command}"
        room = Room(opener, opened, out, kept=not args.memory, interactive=interactive, again=again)
        cut = True
        try:
            _greet(room, chosen, interactive, args.yes)
            if interactive:
                entered = turns.prompts(room.prompt, room.take_pending, history=not args.memory)
            else:
                entered = turns.lines()
            for text in entered:
                if not room.enter(text) or (room.interrupted and not interactive):
                    break
            cut = room.interrupted and not interactive
        finally:
            room.leave(snapshot=not cut)
    if interactive:
        return 0
    return 130 if room.interrupted else int(room.failed)


def _resumed(args: argparse.Namespace) -> Path | None:
    """The folder of the conversation to go on with."""
    if args.resume is None and not args.go_on:
        return None
    if args.memory:
        raise UsageError("--memory keeps nothing on disk: it cannot go on with a conversation that is there")
    if args.resume is not None:
        return conversations.find(args.resume)
    found = conversations.conversations()
    if not found:
        raise ArgumentError(f"there is no conversation in {conversations.data_home()} yet: leave out --continue.")
    return found[0].path


def _greet(room: Any, chosen: settings.Settings, interactive: bool, yes: bool) -> None:
    if interactive:
        room.out.note(f"{chosen.model}: /help lists the commands, Ctrl-D leaves")
    if chosen.tools:
        may = [name for name, there in (("write, edit", chosen.write), ("bash", chosen.bash)) if there]
        room.out.note(f"tools work in {chosen.root}")
        if may and yes:
            room.out.note(f"{', '.join(may)} run without asking")
        elif may and not interactive:
            room.out.note(f"{', '.join(may)} are refused, for nobody is at a terminal to be asked; --yes allows them")
    room.welcome()
