"""Tables of results as text: Markdown from cells, CSV and JSON from dataclasses."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Sequence
from typing import Any


def aligned(table: Sequence[Sequence[str]], left: int = 1) -> str:
    """A Markdown table with its head in the first row; columns from `left` on are numbers."""
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    lines = ["| " + " | ".join(_cells(row, widths, left)) + " |" for row in table]
    rule = "|" + "|".join("-" * (w + 1) + ("-" if i < left else ":") for i, w in enumerate(widths)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def _cells(row: Sequence[str], widths: Sequence[int], left: int) -> list[str]:
    return [cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))]


def table_csv(records: Sequence[Any]) -> str:
    names = [field.name for field in dataclasses.fields(records[0])]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(dataclasses.asdict(record) for record in records)
    return text.getvalue().rstrip("\n")


def table_json(records: Sequence[Any]) -> str:
    return json.dumps([dataclasses.asdict(record) for record in records], indent=2)
