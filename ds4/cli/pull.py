"""`ds4 pull`: fetches models by name."""

from __future__ import annotations

import argparse
from contextlib import ExitStack

from ds4 import pull as pulling
from ds4.cli.options import Subparsers, command
from ds4.cli.output import Output, Report


def add(subparsers: Subparsers) -> None:
    parser = command(
        subparsers, "pull", run, "fetch models that `ds4 models` lists; an interrupted pull goes on where it stopped"
    )
    parser.add_argument("name", nargs="+")


def run(args: argparse.Namespace, out: Output) -> None:
    for name in args.name:
        fetch(name, out)


def fetch(name: str, out: Output) -> str:
    """Pulls with progress and says where the model is."""
    with ExitStack() as bars:
        stage = ""
        report: Report = _silent

        def tell(now: str, done: int, total: int) -> None:
            nonlocal stage, report
            if now != stage:  # one bar per stage
                bars.close()
                stage = now
                if now == "waiting":
                    out.note(f"{name}: another process is fetching it, waiting")
                report = bars.enter_context(out.progress(f"{name}: {now}", "bytes", name=name, stage=now))
            report(done, total)

        path = str(pulling.pull(name, progress=tell))
    out.event("pulled", name=name, path=path)
    out.line(f"{name}: {path}")
    return path


def _silent(done: int, total: int) -> None:
    """Until the first stage begins."""
