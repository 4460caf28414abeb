"""`ds4 tokenize`: text to token ids and back."""

from __future__ import annotations

import argparse

from ds4 import models
from ds4.cli.options import Subparsers, UsageError, add_model, command, text_of, with_words
from ds4.cli.output import Output


def add(subparsers: Subparsers) -> None:
    parser = command(subparsers, "tokenize", run, "show the token ids of a text, or the text of token ids")
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="the text; - reads it from stdin")
    parser.add_argument("--ids", metavar="IDS", help='the other way round: ids such as "504 2365 282"')
    parser.add_argument(
        "--special", action="store_true", help="control tokens spelled in the text become control tokens"
    )
    add_model(parser, engine=False)


def run(args: argparse.Namespace, out: Output) -> None:
    from ds4 import tokenizer as tokenizers
    from ds4.files import open_checkpoint

    if (args.prompt is None) == (args.ids is None):
        raise UsageError("give either -p TEXT or --ids IDS")
    text = text_of(args.prompt) if args.prompt is not None else None
    with open_checkpoint(models.resolve(args.model)) as checkpoint:
        tokenizer = with_words(tokenizers.load(checkpoint), args.model)
        ids = tokenizer.encode(text, special=args.special) if text is not None else _ids(args.ids, tokenizer.vocab_size)
        pieces = [tokenizer.token_bytes(i).decode(errors="backslashreplace") for i in ids]
        text = tokenizer.decode(ids)
    out.event("tokens", ids=ids, pieces=pieces, text=text)
    if args.ids is not None:
        out.line(text)
    elif args.quiet:
        out.line(" ".join(map(str, ids)))
    else:
        out.table(["id", "text"], [[i, repr(piece)] for i, piece in zip(ids, pieces, strict=True)], right=[0])
        out.note(f"[{len(ids)} tokens]")


def _ids(text: str, vocab_size: int) -> list[int]:
    try:
        ids = [int(word) for word in text.replace(",", " ").split()]
    except ValueError as e:
        raise UsageError(f"--ids takes whole numbers: {e}") from None
    for i in ids:
        if not 0 <= i < vocab_size:
            raise UsageError(f"token id {i} is outside 0..{vocab_size - 1}")
    return ids
