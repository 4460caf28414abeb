"""`ds4 bench`: what things cost on this machine. A figure is shown only when its result was compared bit for bit."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds4.cli import profile, scenario
from ds4.cli.options import Subparsers, UsageError, at_least, command
from ds4.cli.output import Output
from ds4.cli.scenario import MODEL, time_text
from ds4.cli.tables import aligned, table_csv, table_json

if TYPE_CHECKING:
    from ds4.cli.costs import Cost

CTX = (2048, 4096, 8192)
KINDS = ("v4-tiny", "v4-layer")


def add(subparsers: Subparsers) -> None:
    parser = command(subparsers, "bench", suite, "measure what this machine does, each result checked")
    parser.description = (
        "Without WHAT: speed against depth, tests named as in llama-bench, beside other engines with --vs. Each test "
        "is compared bit for bit with a fresh prefill before it is timed."
    )
    _add_suite(parser)
    commands = parser.add_subparsers(metavar="WHAT", dest="bench_command", help="something else than the speed suite")
    one = _command(commands, "compaction", compaction, "summary, rollback, rebuild; interrupted; in the background")
    one.add_argument(
        "--ctx", type=_numbers(2048), default=CTX, metavar="N,N", help="contexts (default: 2048,4096,8192)"
    )
    one.add_argument("--repeat", type=at_least(1), default=1, metavar="N", help="runs, of which the medians count (1)")
    one.add_argument("--output", choices=sorted(_FORMATS), default="md", help="form of the table (default: md)")
    two = _command(commands, "moves", moves, "truncate, fork, mark, sync and snapshots")
    two.add_argument("--tokens", type=at_least(64), default=512, metavar="N", help="length of the context moved (512)")
    help = "DeepSeek V4 of random weights: tokens/s and the share of what this machine can do"
    three = command(commands, "synthetic", synthetic, help)
    three.add_argument("kind", choices=KINDS, help="v4-layer: a layer of each kind as wide as in V4 Flash (3.6 GB)")
    three.add_argument(
        "--depth", type=at_least(1), default=512, metavar="N", help="tokens before the decoded one (512)"
    )
    three.add_argument("--repeat", type=at_least(1), default=1, metavar="N", help="prefills; the median counts (1)")
    three.add_argument("--threads", type=at_least(1), metavar="N", help="default: the CPUs this process may use")
    three.add_argument("--kv-dtype", choices=["f32", "f16", "fp8"], default="fp8", help="how rows are kept (fp8)")
    three.add_argument("--output", choices=sorted(_FORMATS), default="md", help="form of the table (default: md)")
    parser.add_argument(
        "--synthetic", action=_Synthetic, nargs=argparse.REMAINDER, commands=commands, main=parser, default=[],
        metavar="KIND", help="random weights: SHAPE:FORMAT, such as 1b:q4_k, for the speed suite; or what the command "
        "synthetic takes",
    )  # fmt: skip
    profile.add(commands)


def _add_suite(parser: argparse.ArgumentParser) -> None:
    from ds4.cli.bench_peer import PACKAGES
    from ds4.cli.bench_tests import NAMES

    add = parser.add_argument
    add("-m", "--model", action="append", dest="models", default=[], metavar="M", help="repeatable; default: " + MODEL)
    add("-p", type=_numbers(1), default=(512,), metavar="N,N", help="prefill: tokens (512)")
    add("-n", type=_numbers(1), default=(128,), metavar="N,N", help="decode: tokens (128)")
    add("-d", type=_numbers(0), default=(0, 2048), metavar="N,N", help="depths: tokens in the context before (0,2048)")
    add("-r", type=at_least(1), default=5, metavar="N", help="runs of each test; the median counts (5)")
    add("-t", "--threads", type=at_least(1), metavar="N", help="default: the CPUs this process may use")
    add("--kv-dtype", choices=["f32", "f16", "q8_0", "fp8"], help="how keys and values are kept (default f16)")
    add("--tests", type=_tests, default=NAMES, metavar="T,T", help=f"of {','.join(NAMES)} (default: all)")
    add("--vs", action="append", choices=list(PACKAGES), default=[], help="measure another engine too; repeatable")
    add("--output", choices=sorted(_FORMATS), default="md", help="form of the table (default: md)")
    add("--plot", type=Path, metavar="FILE", help="speed against depth as a .png, .svg or .pdf")


class _Synthetic(argparse.Action):
    """`ds4 bench --synthetic v4-tiny ...` is `ds4 bench synthetic v4-tiny ...`; SHAPE:FORMAT is a model of the speed
    suite, and what follows are its flags."""

    def __init__(self, *args: Any, commands: Any, main: argparse.ArgumentParser, **options: Any) -> None:
        super().__init__(*args, **options)
        self.commands, self.main = commands, main

    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        if values and ":" in values[0]:
            namespace.synthetic = [*namespace.synthetic, values[0]]
            self.main.parse_args(values[1:], namespace)
        else:
            self.commands(parser, namespace, ["synthetic", *values], option)


def _tests(text: str) -> tuple[str, ...]:
    from ds4.cli.bench_tests import NAMES

    found = tuple(dict.fromkeys(text.split(",")))
    if unknown := [name for name in found if name not in NAMES]:
        raise argparse.ArgumentTypeError(f"there is no test {unknown[0]!r}; there are {', '.join(NAMES)}")
    return found


def _command(commands: Subparsers, name: str, run: Callable[..., int | None], help: str) -> argparse.ArgumentParser:
    parser = command(commands, name, run, help)
    scenario.add_model(parser)
    return parser


def _numbers(least: int) -> Callable[[str], tuple[int, ...]]:
    return lambda text: tuple(dict.fromkeys(map(at_least(least), text.split(","))))


# ---- the speed suite


def suite(args: argparse.Namespace, out: Output) -> None:
    from ds4.cli import bench_models, bench_peer, bench_report
    from ds4.cli.bench_suite import Suite

    for kind in args.synthetic:
        bench_models.parse(kind)
    for peer in args.vs:
        bench_peer.require(peer)
    if args.plot is not None:
        bench_report.check_plot(args.plot)
    where, figures = Suite(args, out).measure()
    if args.output == "json":
        out.line(bench_report.as_json(where, figures))
    elif args.output == "csv":
        out.line(table_csv(figures))
    else:
        out.line(bench_report.where_text(where))
        for model in bench_report.models_of(figures):
            out.line(f"\n{model}\n")
            out.line(aligned(bench_report.table(figures, model), left=2))
    if args.plot is not None:
        bench_report.plot(args.plot, figures, bench_report.where_text(where))
        out.note(f"the plot is in {args.plot}")
    out.note("the next logits after every run were those of a fresh prefill in other chunks, bit for bit")


# ---- moves


def moves(args: argparse.Namespace, out: Output) -> None:
    from ds4.cli.moves import Figures

    with scenario.open_model(args, out) as engine, Figures(engine, out, args.tokens) as figures:
        figures.measure()
        figures.show()


# ---- synthetic


def synthetic(args: argparse.Namespace, out: Output) -> None:
    from ds4.cli import speed

    with speed.Bench(args.kind, out, args.depth, args.repeat, args.threads, args.kv_dtype) as bench:
        roofs, found = bench.measure()
    forms = _FORMATS | {"md": lambda found: aligned(speed.table(found), left=2)}
    out.line(forms[args.output](found))
    for note in bench.notes(roofs):
        out.note(note)


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
    return aligned(table)


_FORMATS: dict[str, Callable[[Sequence[Any]], str]] = {"md": markdown, "csv": table_csv, "json": table_json}
