"""`ds4 inspect`: what a model file holds and what its context costs here."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections import defaultdict
from typing import TYPE_CHECKING

from ds4 import models
from ds4.cli import plan
from ds4.cli.options import Subparsers, add_engine, command, open_engine
from ds4.cli.output import Output
from ds4.errors import UnsupportedError
from ds4.memory import size_text, usable_memory

if TYPE_CHECKING:
    from ds4.engine import Engine
    from ds4.files import Checkpoint

LONG = 8  # config values with more numbers are counted, not shown


def add(subparsers: Subparsers) -> None:
    parser = command(
        subparsers, "inspect", run, "architecture, tensors by format, streams, bytes per token, what fits in memory"
    )
    parser.add_argument("model", metavar="M", help="a name that `ds4 models` lists, a .gguf file, or a folder")
    add_engine(parser)
    parser.add_argument(
        "--plan",
        nargs="+",
        metavar="KEY=VALUE",
        help="DeepSeek V4, from its options alone: ctx=N, device_mem=141g, bandwidth=4.8t, reach_slack=N",
    )


def run(args: argparse.Namespace, out: Output) -> None:
    """The file first: a model that cannot be run is shown as far as it can be read, and then refused by name."""
    from ds4.families import model_spec
    from ds4.files import open_checkpoint

    if args.plan:
        plan.show(args, out)
        return
    path = models.resolve(args.model)
    with open_checkpoint(path) as checkpoint:
        _file(checkpoint, out)
        _tensors(checkpoint, out)
        try:
            config = model_spec(checkpoint).config
        except UnsupportedError as e:
            raise UnsupportedError(f"the file can be read, and not run: {e}") from None
        short = {k: v[0] if len(v) == 1 else v for k, v in config.items() if len(v) <= LONG}
        out.event("config", options=short)
        out.line()
        out.table(["option", "value"], [[k, f"{v:g}" if isinstance(v, float) else v] for k, v in short.items()])
    with open_engine(args, out) as engine:
        _context(engine, out)


def _file(checkpoint: Checkpoint, out: Output) -> None:
    model = models.describe(checkpoint.path)
    facts = {"file": str(checkpoint.path), "kind": checkpoint.kind, "architecture": checkpoint.architecture}
    if model:
        facts |= {"name": model.name, "title": model.title, "licence": model.licence}
    out.event("file", **facts)
    for key, value in facts.items():
        out.line(f"{key:<13}{value}")


def _tensors(checkpoint: Checkpoint, out: Output) -> None:
    groups: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for tensor in checkpoint.tensors.values():
        group = groups[tensor.format]
        for i, n in enumerate((1, math.prod(tensor.shape), len(tensor.data))):
            group[i] += n
    rows: list[list[object]] = []
    for name, (count, weights, size) in sorted(groups.items(), key=lambda item: -item[1][2]):
        out.event("tensors", format=name, count=count, weights=weights, bytes=size)
        rows.append([name, count, f"{weights:,}", size_text(size), f"{size * 8 / weights:.2f}" if weights else "-"])
    total = [sum(g[i] for g in groups.values()) for i in range(3)]
    rows.append(["all", total[0], f"{total[1]:,}", size_text(total[2]), f"{total[2] * 8 / max(total[1], 1):.2f}"])
    out.line()
    out.table(["format", "tensors", "weights", "bytes", "bits each"], rows, right=[1, 2, 3, 4])


def _context(engine: Engine, out: Output) -> None:
    rows = []
    for stream in engine.streams:
        out.event("stream", **dataclasses.asdict(stream))
        reach = stream.reach or "unlimited"
        size = size_text(stream.row_bytes)
        rows.append([stream.name, stream.n_layers, stream.stride, reach, stream.page_rows, size])
    out.line()
    out.table(["stream", "layers", "stride", "reach", "rows a page", "bytes a row"], rows, right=[1, 2, 3, 4, 5])
    memory, tokens = usable_memory(), engine.pool_bytes // max(engine.token_bytes, 1)
    facts: dict[str, object] = {
        "backend": f"{engine.backend} ({engine.isa}), {engine.threads} threads",
        "weights": f"{size_text(engine.weight_bytes)} of memory besides the file",
        "a token": f"{size_text(engine.token_bytes)} of context in {engine.kv_dtype}",
        "a mark": f"at most {size_text(engine.mark_bytes)}",
        "pool": f"{size_text(engine.pool_bytes)} of the {size_text(memory)} this process may use",
        "that fits": f"{tokens:,} tokens, {tokens / engine.ctx:.1f} sessions of {engine.ctx:,} positions",
    }
    fields = ("backend", "isa", "threads", "kv_dtype", "ctx", "weight_bytes", "token_bytes", "mark_bytes", "pool_bytes")
    out.event("memory", usable=memory, pool_tokens=tokens, **{name: getattr(engine, name) for name in fields})
    out.line()
    for key, value in facts.items():
        out.line(f"{key:<13}{value}")
