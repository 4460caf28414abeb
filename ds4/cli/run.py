"""`ds4 run`: one prompt, one answer."""

from __future__ import annotations

import argparse
import time
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from ds4.cli.options import (
    Subparsers,
    UsageError,
    add_chat,
    add_model,
    add_sampling,
    command,
    given_sampling,
    open_engine,
    sampling,
    text_of,
    with_words,
)
from ds4.cli.output import Output

if TYPE_CHECKING:
    from ds4.engine import Session
    from ds4.sampling import Sampling


def add(subparsers: Subparsers) -> None:
    parser = command(subparsers, "run", run, "answer one prompt, or continue one text with --raw")
    parser.add_argument("-p", "--prompt", metavar="TEXT", required=True, help="the prompt; - reads it from stdin")
    parser.add_argument("--raw", action="store_true", help="continue the text as it stands, without a chat format")
    parser.add_argument(
        "--stop", metavar="TEXT", action="append", default=[], help="with --raw: end at this text (repeatable)"
    )
    add_chat(parser)
    add_sampling(parser, max_tokens=512)
    add_model(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    from ds4.agent.chat import Chat, default_format
    from ds4.cli.talk import talk

    if args.raw and (args.system or args.chat_format):
        raise UsageError("--raw continues plain text: it takes no --system and no --chat-format")
    text, options = text_of(args.prompt), sampling(args.model, given_sampling(args))
    with open_engine(args, out) as engine:
        name = None if args.raw else args.chat_format or default_format(engine)
        if name is None:
            with engine.session(ctx=args.ctx) as session:
                end = talk(out, _continue(session, text, options, args.max_tokens, args.stop, out), session.cancel)
        else:
            if args.stop:
                raise UsageError("--stop goes with --raw: a chat format knows where an answer ends")
            with Chat(
                engine,
                ctx=args.ctx,
                system=args.system,
                chat_format=name,
                sampling=options,
                max_tokens=args.max_tokens,
                policy=None,  # one turn has no history: all of ctx is for its prompt and its answer
            ) as chat:
                end = talk(out, chat.send(text), chat.cancel)
    return 130 if end is None or end.finish == "cancelled" else 0


def _continue(
    session: Session, text: str, options: Sampling, max_tokens: int, stop: list[str], out: Output
) -> Generator[Any, None, None]:
    """The events of a turn for plain text."""
    from ds4.events import Text, TurnEnd

    tokenizer = with_words(session.engine.tokenizer, session.engine.model)
    tokens = tokenizer.encode(text)
    if tokenizer.add_bos and tokenizer.bos_id is not None:
        tokens = [tokenizer.bos_id, *tokens]
    if not tokens:
        raise UsageError("the prompt is empty and this model begins with no token of its own: give it some text")
    start = time.monotonic()
    with out.progress("prefill", type="prefill") as report:
        session.sync(tokens, progress=report)
    finish = "length"
    for token in session.generate(options, max_tokens=max_tokens, stop=stop):
        if token.text:
            yield Text(token.text)
        finish = token.finish or finish
    generated = session.pos - len(tokens)
    yield TurnEnd(finish, len(tokens), 0, generated, time.monotonic() - start)
