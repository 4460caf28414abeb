"""`ds4 bench`: what things cost on this machine. A figure is shown only when its result was compared bit for bit."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import io
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ds4.cli import scenario
from ds4.cli.options import Subparsers, UsageError, at_least, command
from ds4.cli.output import Output
from ds4.cli.scenario import time_text

if TYPE_CHECKING:
    from ds4.cli.costs import Cost

CTX = (2048, 4096, 8192)


def add(subparsers: Subparsers) -> None:
    help = "measure what things cost on this machine, each result checked"
    parser = subparsers.add_parser("bench", help=help, description=help, allow_abbrev=False)
    commands = parser.add_subparsers(metavar="WHAT", required=True, dest="bench_command")
    one = _command(commands, "compaction", compaction, "summary, rollback, rebuild; interrupted; in the background")
    one.add_argument("--ctx", type=_numbers, default=CTX, metavar="N,N", help="contexts (default: 2048,4096,8192)")
    one.add_argument("--repeat", type=at_least(1), default=1, metavar="N", help="runs, of which the medians count (1)")
    one.add_argument("--output", choices=sorted(_FORMATS), default="md", help="form of the table (default: md)")
    two = _command(commands, "moves", moves, "truncate, fork, mark, sync and snapshots")
    two.add_argument("--tokens", type=at_least(64), default=512, metavar="N", help="length of the context moved (512)")


def _command(commands: Subparsers, name: str, run: Callable[..., int | None], help: str) -> argparse.ArgumentParser:
    parser = command(commands, name, run, help)
    scenario.add_model(parser)
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(map(at_least(2048), text.split(","))))


# ---- moves


def moves(args: argparse.Namespace, out: Output) -> None:
    from ds4.cli.moves import Figures

    with scenario.open_model(args, out) as engine, Figures(engine, out, args.tokens) as figures:
        figures.measure()
        figures.show()


# ---- compaction


def compaction(args: argparse.Namespace, out: Output) -> None:
    from ds4.cli.costs import measure

    with scenario.open_model(args, out) as engine:
        scenario.need_tools(engine, args.model)
        for ctx in args.ctx:
            if ctx > engine.ctx:
                raise UsageError(f"{args.model} has a context of {engine.ctx}: --ctx {ctx} is more")
        costs = []
        for ctx in args.ctx:
            costs.append(measure(engine, ctx, out, args.repeat))
            out.event("cost", **dataclasses.asdict(costs[-1]), bit_exact=True)
        out.line(_FORMATS[args.output](costs))
        out.note(
            f"{args.model}, threads: {engine.threads}, {engine.isa}; the next logits after every compaction were "
            "compared bit for bit with those of an evaluation from nothing"
        )


def markdown(costs: Sequence[Cost]) -> str:
    """A row for each cost and a column for each context: it fits on a page."""
    rows: list[tuple[str, Callable[[Cost], str]]] = [
        ("tokens before -> after", lambda c: f"{c.before} -> {c.after}"),
        ("summary", lambda c: time_text(c.summary_seconds) + (", none kept" if c.step == "ledger" else "")),
        ("rollback", lambda c: time_text(c.rollback_seconds)),
        ("rebuild", lambda c: time_text(c.rebuild_seconds)),
        ("re-prefilled, tokens", lambda c: str(c.evaluated)),
        ("from nothing: tokens", lambda c: str(c.after)),
        ("from nothing: time", lambda c: time_text(c.zero_seconds)),
        ("interrupted: evaluated again", lambda c: str(c.interrupted_evaluated)),
        ("interrupted: way back", lambda c: time_text(c.interrupted_seconds)),
        ("pause", lambda c: time_text(c.pause_seconds)),
        ("pause, background mode", lambda c: time_text(c.background_pause_seconds)),
        ("... with tokens since", lambda c: str(c.since)),
    ]
    table = [["ctx", *(str(cost.ctx) for cost in costs)]]
    table += [[name, *(value(cost) for cost in costs)] for name, value in rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    lines = ["| " + " | ".join(_cells(row, widths)) + " |" for row in table]
    rule = "|" + "|".join("-" * (w + 1) + ("-" if not i else ":") for i, w in enumerate(widths)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def _cells(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))]


def table_csv(costs: Sequence[Cost]) -> str:
    names = [field.name for field in dataclasses.fields(costs[0])]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(dataclasses.asdict(cost) for cost in costs)
    return text.getvalue().rstrip("\n")


def table_json(costs: Sequence[Cost]) -> str:
    return json.dumps([dataclasses.asdict(cost) for cost in costs], indent=2)


_FORMATS: dict[str, Callable[[Sequence[Cost]], str]] = {"md": markdown, "csv": table_csv, "json": table_json}
