"""`ds4 models`: what the registry knows, and what is here."""

from __future__ import annotations

import argparse

from ds4 import models
from ds4.cli.options import Subparsers, command
from ds4.cli.output import Output
from ds4.errors import FileFormatError
from ds4.memory import size_text


def add(subparsers: Subparsers) -> None:
    command(subparsers, "models", run, "list the models known by name")


def run(args: argparse.Namespace, out: Output) -> int:
    """A broken TOML of the user hides no other model, but the exit code tells."""
    rows, broken = [], []
    for name in models.names():
        try:
            model = models.load(name)
        except FileFormatError as e:
            broken.append(str(e))
            continue
        path = str(model.path) if model.present else None
        size = size_text(model.size) if model.size else "?"
        manual = isinstance(model.source, models.ManualSource)
        absent = f"not here: put it into {model.path}" if manual else f"not here: ds4 pull {name}"
        rows.append([name, size, model.licence, model.chat_format or "-", path or absent])
        out.event(
            "model",
            name=name,
            title=model.title,
            size=model.size,
            licence=model.licence,
            chat_format=model.chat_format,
            ctx=model.ctx,
            path=path,
        )
    out.table(["name", "size", "licence", "chat format", "file"], rows, right=[1])
    for message in broken:
        out.error(message)
    return 1 if broken else 0
