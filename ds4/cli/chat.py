"""`ds4 chat`: a conversation at the terminal, or one turn a line from a pipe. It is `ds4 agent` without tools."""

from __future__ import annotations

import argparse

from ds4.cli import settings
from ds4.cli.options import Subparsers, command
from ds4.cli.output import Output


def add(subparsers: Subparsers) -> None:
    parser = command(subparsers, "chat", run, "talk to a model; /help inside lists what can be done with the context")
    settings.add(parser)
    parser.set_defaults(root=None, write=False, bash=False, yes=False, no_span_tools=False, greedy_calls=False)


def run(args: argparse.Namespace, out: Output) -> int:
    from ds4.cli.agent import converse

    return converse(args, out, tools=False)
