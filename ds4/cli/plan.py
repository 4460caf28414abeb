"""`ds4 inspect M --plan ...`: what a DeepSeek V4 would cost on a machine that is not here."""

from __future__ import annotations

import argparse
import os
import re
from typing import TYPE_CHECKING, Any

from ds4 import models
from ds4.cli.options import UsageError
from ds4.cli.output import Output
from ds4.errors import ArgumentError, UnsupportedError
from ds4.memory import size_text

if TYPE_CHECKING:
    from ds4.plan import Plan

_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kmgt]?)b?", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
KEYS = ("ctx", "device_mem", "bandwidth", "reach_slack")


def options_of(words: list[str]) -> dict[str, int]:
    """`KEY=VALUE` words; sizes may end in k, m, g or t (powers of 1000)."""
    found: dict[str, int] = {}
    for word in words:
        key, equals, text = word.partition("=")
        match = _SIZE.fullmatch(text)
        if key not in KEYS or not equals or match is None:
            raise UsageError(f"--plan has {word!r}; it takes {', '.join(f'{name}=N' for name in KEYS)}")
        found[key] = int(float(match[1]) * _UNITS[match[2].lower()])
    return found


def _config(name: str) -> tuple[dict[str, Any], str]:
    """The options of a model, from its files or from its entry in the registry."""
    known = models.describe(name)
    if known is not None and known.config and not known.present:
        return known.config, f"models/{known.name}.toml"
    from ds4.files import open_config

    path = models.resolve(name)
    if not os.path.isdir(path):
        raise UnsupportedError(f"{path}: a plan is made from config.json; give the folder that holds it.")
    return open_config(path), f"{path}/config.json"


def show(args: argparse.Namespace, out: Output) -> None:
    """Makes the plan that the command line asks for and prints it."""
    from ds4.families import deepseek_v4
    from ds4.families.options import Options
    from ds4.plan import make_plan

    wanted = options_of(args.plan)
    if args.threads or args.pool_tokens or args.ctx:
        raise ArgumentError("a plan takes its numbers from --plan, for example --plan ctx=1000000 device_mem=141g")
    config, where = _config(args.model)
    if config.get("model_type") != "deepseek_v4":
        raise UnsupportedError(f"{where}: plans are made for DeepSeek V4; use `ds4 inspect` without --plan.")
    sizes = deepseek_v4.sizes_of(Options(config, where))
    ctx, slack = wanted.get("ctx", sizes.ctx), wanted.get("reach_slack", 256)
    plan = make_plan(sizes, ctx=ctx, kv_dtype=args.kv_dtype or "fp8", reach_slack=slack)
    _weights(plan, out)
    _streams(plan, out)
    _costs(plan, wanted, out)


def _weights(plan: Plan, out: Output) -> None:
    rows: list[list[object]] = []
    for name, (count, size) in sorted(plan.weights.items(), key=lambda item: -item[1][1]):
        out.event("weights", format=name, tensors=count, bytes=size)
        rows.append([name, f"{count:,}", size_text(size)])
    rows.append(["all", f"{sum(count for count, _ in plan.weights.values()):,}", size_text(plan.weight_bytes)])
    out.table(["weights", "tensors", "bytes"], rows, right=[1, 2])


def _streams(plan: Plan, out: Output) -> None:
    rows: list[list[object]] = []
    for stream in plan.streams:
        pages, size = stream.pages(plan.ctx, plan.slack), plan.rows_bytes(stream)
        token = stream.row_bytes / stream.stride if stream.reach is None else 0.0
        facts = {"name": stream.name, "layers": stream.n_layers, "stride": stream.stride, "reach": stream.reach}
        facts |= {"row_bytes": stream.row_bytes, "page_bytes": stream.page_bytes, "pages": pages, "bytes": size}
        out.event("stream", **facts, token_bytes=token)
        row: list[object] = [stream.name, stream.n_layers, stream.stride, stream.reach or "unlimited"]
        row += [size_text(stream.row_bytes), size_text(token) if token else "-", f"{pages:,}", size_text(size)]
        rows.append(row)
    out.line()
    header = ["stream", "layers", "stride", "reach", "bytes a row", "a token", "pages", f"bytes at {plan.ctx:,}"]
    out.table(header, rows, right=[1, 2, 3, 4, 5, 6, 7])


def _costs(plan: Plan, wanted: dict[str, int], out: Output) -> None:
    read, memory = plan.read_weights + plan.read_rows, wanted.get("device_mem")
    bandwidth = wanted.get("bandwidth", 10**12)
    lines = {
        "context": f"{size_text(plan.context_bytes)} for a session of {plan.ctx:,} positions in {plan.kv_dtype}",
        "a token": f"{size_text(plan.token_bytes)} for good",
        "a mark": f"at most {size_text(plan.mark_bytes)}",
        "the slack": f"{size_text(plan.slack_bytes)} a session for {plan.slack} positions",
        "reads": f"{size_text(read)} a token: weights {size_text(plan.read_weights)}, rows {size_text(plan.read_rows)}",
        "at most": f"{bandwidth / read:.1f} tokens a second at {size_text(bandwidth)} a second of bandwidth",
    }
    if memory is not None:
        missing = plan.weight_bytes + plan.context_bytes - memory
        lines["device"] = (
            f"{size_text(memory)} holds the weights and {plan.sessions_in(memory)} such session(s)"
            if missing <= 0
            else f"{size_text(memory)} is {size_text(missing)} too little for the weights and one such session"
        )
    fields = ("ctx", "kv_dtype", "slack", "weight_bytes", "token_bytes", "context_bytes", "mark_bytes", "slack_bytes")
    numbers = {name: getattr(plan, name) for name in (*fields, "read_weights", "read_rows")}
    out.event("plan", **numbers, device_mem=memory)
    out.line()
    for key, value in lines.items():
        out.line(f"{key:<13}{value}")
