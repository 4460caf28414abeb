"""`ds4 perplexity`: how well a model foretells a text."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ds4.cli.options import Subparsers, UsageError, add_model, at_least, command, open_engine, text_of, with_words
from ds4.cli.output import Output, Report

if TYPE_CHECKING:
    from ds4.engine import Session

CTX = 512


def add(subparsers: Subparsers) -> None:
    parser = command(
        subparsers, "perplexity", run, "score a text: tokens, mean loss, perplexity with its standard error"
    )
    parser.add_argument("file", metavar="FILE", help="a text file in UTF-8; - reads stdin")
    parser.add_argument(
        "--stride",
        type=at_least(1),
        metavar="N",
        help="tokens scored in one window of --ctx (default: 512) positions; default: half",
    )
    add_model(parser)


def run(args: argparse.Namespace, out: Output) -> None:
    text = _read(args.file)
    with open_engine(args, out) as engine:
        tokenizer = with_words(engine.tokenizer, engine.model)
        tokens = tokenizer.encode(text)
        bos = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
        if len(bos) + len(tokens) < 2:
            raise UsageError("the text has too few tokens to foretell one from another: give more of it")
        ctx = min(args.ctx or CTX, engine.ctx)
        stride = args.stride or max(1, ctx // 2)
        if stride > ctx - len(bos):
            raise UsageError(
                f"a window of {ctx} positions has no room for {stride} new tokens: --stride up to {ctx - len(bos)}"
            )
        with engine.session(ctx) as session, out.progress("scoring") as report:
            scores = [-part for part in score(session, tokens, bos, stride, report)]
    loss = np.concatenate(scores).astype(np.float64)
    mean, error = float(loss.mean()), float(loss.std(ddof=1) / math.sqrt(len(loss))) if len(loss) > 1 else 0.0
    with np.errstate(over="ignore"):
        perplexity = float(np.exp(mean))
    finite = math.isfinite(perplexity)
    out.event(
        "perplexity",
        tokens=len(loss),
        nll=mean,
        nll_error=error,
        perplexity=perplexity if finite else None,
        perplexity_error=perplexity * error if finite else None,
        ctx=ctx,
        stride=stride,
    )
    out.line(f"tokens      {len(loss):,} in windows of {ctx}, {stride} new ones in each")
    out.line(f"nll         {mean:.5f} +- {error:.5f} nats a token")
    out.line(f"perplexity  {perplexity:.4f} +- {perplexity * error:.4f}")


def score(
    session: Session, tokens: list[int], bos: list[int], stride: int, report: Report
) -> Iterator[npt.NDArray[np.float32]]:
    """The log-probability of every token once, in pieces. A window holds `bos` and as many tokens as the session has
    positions for; the last `stride` of them are scored, in the first window all. A token with nothing before it, the
    first of a model without BOS, is left out."""
    room, done = session.ctx - len(bos), 0
    while done < len(tokens):
        end = min(len(tokens), done + (stride if done else room))
        before = bos + tokens[max(0, end - room) : done]
        session.clear()
        if before:
            session.eval(before)
        scores = session.score(tokens[done:end], progress=lambda n, of, at=done: report(at + n, len(tokens)))  # type: ignore[misc]
        yield scores if before else scores[1:]
        done = end
    report(done, len(tokens))


def _read(name: str) -> str:
    if name == "-":
        return text_of(name)
    with open(name, "rb") as file:
        raw = file.read()
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise UsageError(f"{name} is not UTF-8: convert it first, for example with iconv") from None
