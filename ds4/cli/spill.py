"""`ds4 spill`: the raw messages that compactions have replaced."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ds4 import conversations
from ds4.cli.options import Subparsers, command
from ds4.cli.output import Output
from ds4.errors import FileFormatError


def add(subparsers: Subparsers) -> None:
    help = "show the raw messages that a compaction has replaced"
    parser = subparsers.add_parser("spill", help=help, description=help, allow_abbrev=False)
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="spill_command")
    show_ = command(commands, "show", show, help)
    show_.add_argument("conversation", help="its id, or the beginning of it")
    show_.add_argument("number", help="the number of the spill file, or its path")


def show(args: argparse.Namespace, out: Output) -> None:
    """What stands before a damaged line is shown, then the damage is the error."""
    one = conversations.read(conversations.find(args.conversation))
    nodes, damage = one.spill.load(args.number)
    for node in nodes:
        out.event("node", **node)
        out.line(f"#{node['number']} {node['role']}, {len(node['ids'])} tokens", style="bold")
        if node["thinking"]:
            out.line(f"(thinking) {node['thinking']}", style="dim")
        for text in (node["text"], *(_call(call) for call in node["calls"])):
            if text:
                out.line(text)
        out.line()
    if damage is not None:
        raise FileFormatError(f"{one.path.name}: {damage}.")


def _call(call: dict[str, Any]) -> str:
    return f"[call {call['id']}] {call['name']} {json.dumps(call['arguments'], ensure_ascii=False)}"
