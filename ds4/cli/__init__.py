"""The command `ds4`: one module per subcommand, each with `add(subparsers)` and `run(args, out) -> exit code or None`.

Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted. A failure is one sentence on stderr; DS4_DEBUG=1 shows
the traceback. Modules import what is heavy inside `run`, so that help and mistakes answer at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from typing import NoReturn

from ds4.cli import agent, bench, chat, demo, inspect, models, perplexity, pull, run, sessions, spill, tokenize
from ds4.cli.options import UsageError
from ds4.cli.output import Output
from ds4.errors import Ds4Error

COMMANDS = (run, chat, agent, tokenize, perplexity, inspect, pull, models, demo, bench, sessions, spill)


class _Parser(argparse.ArgumentParser):
    """argparse with its errors as one sentence."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"ds4: {message}; see `{self.prog} --help`\n")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="ds4", description="A local model runtime whose context can be rolled back exactly.")
    parser.add_argument("--version", action="version", version=f"ds4 {_version()}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True, dest="command")
    for module in COMMANDS:
        module.add(subparsers)
    return parser


def _version() -> str:
    try:
        return metadata.version("ds4")
    except metadata.PackageNotFoundError:
        return "(a checkout that is not installed)"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    _open_streams()
    try:
        args = build_parser().parse_args(argv)
    except SystemExit as e:  # help, version, or a usage error that is already printed
        return e.code if isinstance(e.code, int) else 2
    out = Output(json=args.json, quiet=args.quiet)
    try:
        code = args.run(args, out) or 0
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `ds4 ... | head`: nobody reads on
        _silence()
        return 1
    except KeyboardInterrupt:
        out.end_line()
        return 130
    except Exception as e:
        if os.environ.get("DS4_DEBUG") == "1":
            raise
        with suppress(OSError):
            out.error(_sentence(e))
        try:
            sys.stdout.flush()
        except OSError:  # such as a full disk behind `>`
            _silence()
        return 2 if isinstance(e, UsageError) else 1


def _open_streams() -> None:
    """Opens standard streams that the caller has closed on nothing: else the next file that is opened, such as a log,
    would get the number of one, and what is meant for the screen would go into it."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))


def _silence() -> None:
    """What is still in the buffer of stdout goes nowhere: Python must not complain again when it flushes at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _sentence(e: Exception) -> str:
    if isinstance(e, (Ds4Error, UsageError)):
        return " ".join(str(e).split())
    if isinstance(e, OSError):
        return f"{e.filename}: {e.strerror}" if e.filename and e.strerror else e.strerror or str(e)
    if isinstance(e, MemoryError):
        return "this machine has too little memory for that: a smaller --ctx or --pool-tokens needs less"
    return f"internal error, {type(e).__name__}: {e} (DS4_DEBUG=1 shows where)"
