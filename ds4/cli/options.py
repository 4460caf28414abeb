"""Flags that several commands share, and what they become."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ds4 import models
from ds4.cli.output import Output
from ds4.errors import ArgumentError, UnsupportedError

if TYPE_CHECKING:
    from ds4.engine import Engine
    from ds4.sampling import Sampling
    from ds4.tokenizer import Tokenizer


class UsageError(Exception):
    """The command line asks for something that makes no sense: exit code 2."""


Subparsers = Any  # argparse has no public name for it


def command(subparsers: Subparsers, name: str, run: Callable[..., int | None], help: str) -> argparse.ArgumentParser:
    """A subcommand with the flags that all have."""
    parser: argparse.ArgumentParser = subparsers.add_parser(name, help=help, description=help, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="one JSON object a line on stdout")
    parser.add_argument("--quiet", action="store_true", help="only results and errors")
    parser.set_defaults(run=run)
    return parser


def at_least(least: int) -> Callable[[str], int]:
    """An argparse type: whole numbers from `least` on."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not least <= value < 1 << 31:
            raise argparse.ArgumentTypeError(f"{value} is not between {least} and {(1 << 31) - 1}")
        return value

    return convert


def add_model(parser: argparse.ArgumentParser, engine: bool = True, required: bool = True) -> None:
    help = "a name that `ds4 models` lists, a .gguf file, or a folder"
    parser.add_argument("-m", "--model", metavar="M", required=required, help=help)
    if engine:
        add_engine(parser)


def add_engine(parser: argparse.ArgumentParser, ctx: bool = True) -> None:
    """`ctx`: whether the command has one context, whose length may be given."""
    group = parser.add_argument_group("engine")
    group.add_argument("--backend", choices=["cpu", "ref"], help="cpu (default), or ref: plain, slow, the definition")
    group.add_argument("--threads", type=at_least(1), metavar="N", help="default: the CPUs this process may use")
    group.add_argument(
        "--kv-dtype", choices=["f32", "f16", "q8_0", "fp8"], help="how keys and values are kept (default f16)"
    )
    group.add_argument(
        "--rounding", action="store_true", default=None, help="DeepSeek V4: rows rounded as in the published code"
    )
    if ctx:
        group.add_argument(
            "--ctx", type=at_least(1), metavar="N", help="most positions of a session (default: the model's own)"
        )
    group.add_argument(
        "--pool-tokens", type=at_least(1), metavar="N", help="room for keys and values (default: half of memory)"
    )


_SAMPLING = {
    "temperature": (float, "0: always the most likely token"),
    "top_k": (int, "only the N most likely tokens; 0: all"),
    "top_p": (float, "the fewest tokens with this much probability together"),
    "min_p": (float, "tokens at least this likely, relative to the most likely"),
    "repetition": (float, "divides the logits of tokens that occurred; 1: off"),
    "presence": (float, "taken off the logits of tokens that occurred"),
    "frequency": (float, "the same, for each time"),
    "seed": (int, "the same seed gives the same text (default: drawn)"),
}


def add_sampling(parser: argparse.ArgumentParser, max_tokens: int | None = None) -> None:
    group = parser.add_argument_group("sampling", "defaults are the model's own where its entry has some, else greedy")
    for name, (kind, help) in _SAMPLING.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N", help=help)
    default = "until it stops" if max_tokens is None else str(max_tokens)
    help = f"most tokens of an answer (default: {default})"
    group.add_argument("-n", "--max-tokens", type=at_least(1), default=max_tokens, metavar="N", help=help)


def add_chat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="the system prompt")
    parser.add_argument("--chat-format", metavar="NAME", help="how messages are written (default: the model's own)")


def open_engine(args: argparse.Namespace, out: Output) -> Engine:
    """The engine that the flags ask for, loaded with a bar."""
    from ds4.engine import Engine

    names = ("backend", "threads", "kv_dtype", "pool_tokens", "rounding")
    wanted = {name: value for name in names if (value := getattr(args, name)) is not None}
    with out.progress("loading", "bytes", type="load") as report:
        return Engine(args.model, progress=report, **wanted)


def with_words(tokenizer: Tokenizer | None, model: str) -> Tokenizer:
    """The tokenizer, where a model has one."""
    if tokenizer is None:
        raise UnsupportedError(
            f"{model} has no tokenizer: put its tokenizer.json or tokenizer.model beside the weights"
        )
    return tokenizer


def given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling flags that were given."""
    return {name: value for name in _SAMPLING if (value := getattr(args, name)) is not None}


def sampling(model_name: str, given: Mapping[str, Any]) -> Sampling:
    """The model's defaults with the flags on top."""
    from ds4.sampling import Sampling

    model = models.describe(model_name)
    values: dict[str, Any] = {**(model.defaults if model else {}), **given}
    try:
        return Sampling(**values)
    except (ArgumentError, TypeError) as e:  # TypeError: an option that a log made up
        raise UsageError(str(e)) from None


def policy_values(pairs: Sequence[str]) -> dict[str, Any]:
    """The fields of a compaction policy from texts FIELD=VALUE. Raises UsageError for what the policy refuses."""
    from ds4.compaction.policy import CompactionPolicy

    values: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise UsageError(f"--policy takes FIELD=VALUE, such as tail_fraction=0.2, not {pair!r}")
        values[name.strip()] = _value(text.strip())
    try:
        CompactionPolicy.from_mapping(values)
    except ArgumentError as e:
        raise UsageError(str(e)) from None
    return values


def _value(text: str) -> Any:
    """A number, true, false, none, or the text itself."""
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def text_of(value: str) -> str:
    """A text argument; "-" reads stdin."""
    try:
        if value == "-":
            return sys.stdin.buffer.read().decode()
        value.encode()
    except UnicodeError:
        raise UsageError("the text is not UTF-8: convert it first, for example with iconv") from None
    return value
