"""`ds4 sessions`: the conversations that are kept, what is in them, and whether their files are sound."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence

from ds4 import conversations
from ds4.cli.options import Subparsers, UsageError, command
from ds4.cli.output import Output
from ds4.errors import StoreBusy
from ds4.memory import size_text
from ds4.nodes import Node
from ds4.store import in_use

FIRST_LINE = 100  # characters


def add(subparsers: Subparsers) -> None:
    help = "list, show, delete or verify conversations"
    parser = subparsers.add_parser("sessions", help=help, description=help, allow_abbrev=False)
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="sessions_command")
    command(commands, "list", list_, "the conversations that are kept, the newest first")
    show_ = command(commands, "show", show, "the nodes that the model sees")
    show_.add_argument("--all", action="store_true", help="replaced ones as well")
    delete_ = command(commands, "delete", delete, "remove conversations with all their files")
    delete_.add_argument("--yes", action="store_true", help="do not ask")
    verify_ = command(commands, "verify", verify, "check log, spill and snapshot; exit code 1 when one is damaged")
    which = "its id, or the beginning of it"
    show_.add_argument("conversation", help=which)
    delete_.add_argument("conversation", nargs="+", help=which)
    verify_.add_argument("conversation", nargs="*", help=f"{which} (default: all)")


def list_(args: argparse.Namespace, out: Output) -> None:
    show_conversations(out)


def show_conversations(out: Output, here: str = "") -> None:
    """A table of all; `here`: the id of the one that the user is in."""
    rows = []
    for one in conversations.conversations():
        out.event("session", **{**dataclasses.asdict(one), "path": str(one.path)})
        busy = "here" if one.id == here else "in use"
        marks = [word for word, there in ((busy, one.in_use), ("damaged", one.damage is not None)) if there]
        changed = time.strftime("%Y-%m-%d %H:%M", time.localtime(one.changed))
        snapshot = size_text(one.snapshot_bytes) if one.snapshot_bytes else "-"
        rows.append([one.id, changed, one.nodes, one.tokens, snapshot, ", ".join(marks) or "-", one.title])
    if rows:
        out.table(["id", "changed", "nodes", "tokens", "snapshot", "state", "begins with"], rows, right=[2, 3, 4])
    else:
        out.note(f"no conversation is kept in {conversations.data_home()} yet")


def show(args: argparse.Namespace, out: Output) -> None:
    one = conversations.read(conversations.find(args.conversation))
    nodes = conversations.history(one.state) if args.all else [(node, True) for node in one.state.surface]
    show_nodes(out, nodes, args.all)
    if (held := one.state.held) is not None:
        out.event("held", kind=held.kind, text=held.text)
        out.note(f"waiting to be appended: a {held.kind} message of {len(held.text)} characters")
    if one.scan.live is not None:
        out.note(f"what comes after this cannot be read: {one.scan.live}")


def show_nodes(out: Output, nodes: Sequence[tuple[Node, bool]], states: bool) -> None:
    """A table of nodes, each with whether the model sees it; `states`: that has a column."""
    rows = []
    for node, there in nodes:
        role = f"{node.role} ({node.kind})" if node.kind else node.role
        first = next((line for line in node.text.splitlines() if line.strip()), "")
        first = " ".join([first, *(f"[call {call.name}]" for call in node.calls)]).strip()
        first = first if len(first) <= FIRST_LINE else first[: FIRST_LINE - 3] + "..."
        rows.append([f"#{node.number}", role, len(node), *(["" if there else "replaced"] if states else []), first])
        out.event(
            "node", number=node.number, role=node.role, kind=node.kind, tokens=len(node), surface=there, text=node.text
        )
    columns = ["node", "role", "tokens", *(["state"] if states else []), "first line"]
    out.table(columns, rows, right=[0, 2])


def delete(args: argparse.Namespace, out: Output) -> int:
    paths = [conversations.find(name) for name in args.conversation]
    code = 0
    for path in dict.fromkeys(paths):
        if in_use(path):
            raise StoreBusy(f"{path.name} is in use: close it first.")
        if not args.yes and not _agreed(path.name, out):
            out.note(f"{path.name} is kept")
            code = 1
            continue
        conversations.delete(path)
        out.event("deleted", id=path.name)
        out.line(f"deleted {path.name}")
    return code


def _agreed(name: str, out: Output) -> bool:
    if out.json or not sys.stdin.isatty():
        raise UsageError(f"{name} is deleted only when you say so: run it with --yes")
    return input(f"delete {name} with all its files? [y/N] ").strip().lower() in ("y", "yes")


def verify(args: argparse.Namespace, out: Output) -> int:
    paths = [conversations.find(name) for name in args.conversation]
    if not args.conversation:
        paths = [one.path for one in conversations.conversations()]
    broken = 0
    for path in dict.fromkeys(paths):
        found = conversations.verify(path)
        for damage in found:
            out.event("damage", id=path.name, **dataclasses.asdict(damage))
            out.line(f"{path.name}: {damage}")
        if not found:
            out.event("sound", id=path.name)
            out.line(f"{path.name}: sound")
        broken += any(not (damage.cut and damage.passed) for damage in found)  # no whole line was lost there
    return 1 if broken else 0
