"""`ds4 bench profile`: where the time of prefill and of decode goes, op by op."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from ds4.cli import scenario
from ds4.cli.options import Subparsers, UsageError, at_least, command
from ds4.cli.tables import aligned, table_csv, table_json
from ds4.errors import Ds4Error
from ds4.profile import ProfileEntry, table, tokens_of

if TYPE_CHECKING:
    from ds4.cli.output import Output
    from ds4.engine import Engine

LEFT = 3  # columns of text


def add(commands: Subparsers) -> None:
    parser = command(commands, "profile", profile, "where the time goes: time, bytes and multiply-adds of every op")
    scenario.add_model(parser)
    number = at_least(1)
    parser.add_argument("-p", "--prompt", type=number, default=512, metavar="N", help="tokens of the prefill (512)")
    parser.add_argument("-n", "--decode", type=number, default=32, metavar="N", help="tokens decoded one by one (32)")
    parser.add_argument("-d", "--depth", type=at_least(0), default=0, metavar="N", help="tokens before both (0)")
    parser.add_argument("--output", choices=("csv", "json", "md"), default="md", help="form of the table (default: md)")


def profile(args: argparse.Namespace, out: Output) -> None:
    with scenario.open_model(args, out) as engine:
        if args.depth + args.prompt + args.decode > engine.ctx:
            raise UsageError(f"{args.model} has a context of {engine.ctx}: depth, prompt and decode are more together")
        found = measure(engine, args.depth, args.prompt, args.decode, out)
        for entry in found:
            out.event("profile", **asdict(entry))
        out.line(shown(found, args.output))
        rates = [
            f"{what}: {n / sum(e.seconds for e in found if e.many == many):.0f} tokens/s"
            for many, what in ((True, "prefill"), (False, "decode"))
            if (n := tokens_of(found, many))
        ]
        out.note(
            f"{args.model}, threads: {engine.threads}, {engine.isa}, depth {args.depth}; {', '.join(rates)}, with the "
            "profile running; the logits with and without it were the same bits"
        )


def measure(engine: Engine, depth: int, prompt: int, decode: int, out: Output) -> list[ProfileEntry]:
    """The same work twice: as it is, to warm up and for its logits, then with a profile. Raises Ds4Error when a bit
    differs."""
    tokens = [(i * 7919 + 11) % engine.vocab for i in range(depth + prompt + decode)]
    logits, found = [], []
    with engine.session() as session:
        with out.progress("evaluating", "tokens") as report:
            session.sync(tokens[:depth], progress=report)
        for profiled in (False, True):
            session.sync(tokens[:depth])
            if profiled:
                engine.profile("start")
            with out.progress("evaluating", "tokens") as report:
                session.eval(tokens[depth : depth + prompt], progress=report)
            for token in tokens[depth + prompt :]:
                session.eval([token])
            found = engine.profile("stop")
            logits.append(session.logits.tobytes())
    if logits[0] != logits[1]:
        raise Ds4Error("the logits with a profile differ from those without: please report this as a bug")
    return found


def shown(entries: Sequence[ProfileEntry], form: str) -> str:
    if form == "md":
        return aligned(table(entries), LEFT)
    return (table_csv if form == "csv" else table_json)(entries)
