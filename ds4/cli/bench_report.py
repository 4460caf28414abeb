"""The figures of the speed suite as a table, as CSV, as JSON, and as a plot."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ds4.cli.options import UsageError
from ds4.cli.scenario import time_text
from ds4.errors import UnsupportedError
from ds4.memory import size_text

if TYPE_CHECKING:
    from ds4.cli.bench_suite import Figure, Machine

OURS = "ds4"
_SUFFIXES = (".png", ".svg", ".pdf")


def where_text(where: Machine) -> str:
    """One line for people: the machine and what it can do."""
    peers = "".join(f", {name} {version}" for name, version in where.peers.items())
    load = f"; load {where.load:.1f} before it began" if where.load >= 1 else ""
    return (
        f"{where.machine}; {where.isa}, {where.threads} threads, rows as {where.kv_dtype}{peers}; reads "
        f"{size_text(where.read)}/s, {where.macs / 1e9:.3g} G multiply-adds/s (float32, numpy){load}"
    )


def models_of(figures: Sequence[Figure]) -> list[str]:
    return list(dict.fromkeys(figure.model for figure in figures))


def peers_of(figures: Sequence[Figure]) -> list[str]:
    return [name for name in dict.fromkeys(figure.engine for figure in figures) if name != OURS]


def speed_text(figure: Figure) -> str:
    """Tokens per second, or the time of what evaluates none."""
    rate = figure.tokens_per_second
    return time_text(figure.seconds) if rate is None else f"{_number(rate)} t/s"


def spread_text(figure: Figure) -> str:
    """From the slowest run to the fastest, as `speed_text` has it."""
    if figure.tokens_per_second is None:
        return f"{time_text(figure.least)} .. {time_text(figure.most)}"
    return f"{_number(figure.tokens / figure.most)} .. {_number(figure.tokens / figure.least)}"


def _number(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"


def table(figures: Sequence[Figure], model: str) -> list[list[str]]:
    """A row for each test of a model, and two columns for each peer."""
    found = {(figure.test, figure.engine): figure for figure in figures if figure.model == model}
    peers = peers_of(list(found.values()))
    head = ["test", "what", "ds4", "min .. max", "of roofline"]
    head += [column for peer in peers for column in (peer, f"ds4 / {peer}")]
    rows = []
    for (test, engine), figure in found.items():
        if engine != OURS:
            continue
        share = "" if figure.of_roofline is None else f"{figure.of_roofline:.0%}"
        row = [test, figure.detail, speed_text(figure), spread_text(figure), share]
        for peer in peers:
            theirs = found.get((test, peer))
            row += ["", ""] if theirs is None else [speed_text(theirs), f"{theirs.ratio:.2f}"]
        rows.append(row)
    return [head, *rows]


def as_json(where: Machine, figures: Sequence[Figure]) -> str:
    found = {"machine": dataclasses.asdict(where), "figures": [dataclasses.asdict(figure) for figure in figures]}
    return json.dumps(found, indent=2)


# ---- the plot


def check_plot(path: Path) -> None:
    """Raises UsageError or UnsupportedError before hours of work end in a plot that cannot be written."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UnsupportedError("--plot needs matplotlib: pip install matplotlib")
    if path.suffix not in _SUFFIXES or not path.parent.is_dir():
        raise UsageError(f"--plot takes a file {', '.join('*' + s for s in _SUFFIXES)} in a folder that is there")


def plot(path: Path, figures: Sequence[Figure], title: str) -> None:
    """Speed against depth: a row for each model, prefill on the left and decode on the right, a line for each engine
    and size."""
    from matplotlib.figure import Figure as Canvas

    names = models_of(figures)
    canvas = Canvas(figsize=(10, 1 + 3.5 * len(names)), layout="constrained")
    canvas.suptitle(title, fontsize=8)
    panels = canvas.subplots(len(names), 2, squeeze=False)
    for model, row in zip(names, panels, strict=True):
        for kind, panel in zip(("pp", "tg"), row, strict=True):
            shown = [figure for figure in figures if (figure.model, figure.kind) == (model, kind)]
            for engine, size in dict.fromkeys((figure.engine, figure.size) for figure in shown):
                line = [f for f in shown if (f.engine, f.size) == (engine, size)]
                rates = [f.tokens_per_second or 0 for f in line]
                below = [rate - f.tokens / f.most for rate, f in zip(rates, line, strict=True)]
                above = [f.tokens / f.least - rate for rate, f in zip(rates, line, strict=True)]
                panel.errorbar(
                    [f.depth for f in line], rates, [below, above], label=f"{engine} {kind}{size}", marker="o",
                    capsize=3, linewidth=2 if engine == OURS else 1, linestyle="-" if engine == OURS else "--",
                )  # fmt: skip
            panel.set(title=f"{model}, {'prefill' if kind == 'pp' else 'decode'}", xlabel="depth, tokens")
            panel.set_ylabel("tokens/s")
            panel.set_ylim(bottom=0)
            if shown:
                panel.legend(fontsize=8)
            panel.grid(alpha=0.3)
    canvas.savefig(path, dpi=120)
