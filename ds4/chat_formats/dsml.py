"""DSML, the markup of DeepSeek V4's tool calls: how it is written, and the events that `dsml_reader` finds in a turn.

    reasoning</think>text

    <｜DSML｜tool_calls>
    <｜DSML｜invoke name="read">
    <｜DSML｜parameter name="path" string="true">a.txt</｜DSML｜parameter>
    <｜DSML｜parameter name="lines" string="false">[1, 20]</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜tool_calls>

A value with string="true" is text as it stands, any other is JSON. Nothing is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ds4.chat_formats.base import Parsed, Tag, ToolCall
from ds4.chat_formats.toolcalls import json_text

DSML = Tag("｜DSML｜")
THINK, THOUGHT = Tag("<think>"), Tag("</think>")
END = Tag("<｜end▁of▁sentence｜>")

# ---- writing ----


def call_parts(name: str, arguments: Mapping[str, Any]) -> list[str]:
    """One call as parts for `ChatFormat.ids`. Raises ArgumentError when a value is no JSON."""
    parts = ["<", DSML, f'invoke name="{name}">\n']
    for i, (key, value) in enumerate(arguments.items()):
        is_text = isinstance(value, str)
        head = f'parameter name="{key}" string="{"true" if is_text else "false"}">'
        parts += ["\n" * bool(i) + "<", DSML, head, value if is_text else json_text(value), "</", DSML, "parameter>"]
    return [*parts, "\n</", DSML, "invoke>"]


def calls_parts(calls: Iterable[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """The block of all calls of a turn, with the empty line before it; nothing when there are none."""
    parts: list[str] = []
    for name, arguments in calls:
        parts += [*("\n",) * bool(parts), *call_parts(name, arguments)]
    return ["\n\n<", DSML, "tool_calls>\n", *parts, "\n</", DSML, "tool_calls>"] if parts else []


# ---- events ----


@dataclass(frozen=True)
class ThinkingText:
    """A piece of the reasoning."""

    text: str


@dataclass(frozen=True)
class PlainText:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True)
class CallStarted:
    """A call of the tool `name` begins. It may still end in a `Fault`."""

    name: str


@dataclass(frozen=True)
class ArgumentPiece:
    """A piece of the value of the argument `name` as it is written: text, or JSON."""

    name: str
    text: str


@dataclass(frozen=True)
class CallFinished:
    """The call is whole."""

    call: ToolCall


@dataclass(frozen=True)
class Fault:
    """Markup that is no call: `reason` is a sentence, `text` all of it as it stands, also what pieces have shown."""

    reason: str
    text: str


Event = ThinkingText | PlainText | CallStarted | ArgumentPiece | CallFinished | Fault


def parsed(events: Iterable[Event]) -> Parsed:
    """The turn that a reader's events tell of. Without any whole call no text is lost; text behind a call comes on a
    line of its own."""
    thinking: list[str] = []
    pieces: list[list[str]] = [[]]
    calls: list[ToolCall] = []
    faults: list[str] = []
    for event in events:
        if isinstance(event, ThinkingText):
            thinking.append(event.text)
        elif isinstance(event, PlainText | Fault):
            pieces[-1].append(event.text)
            faults += [event.reason] if isinstance(event, Fault) else []
        elif isinstance(event, CallFinished):
            calls.append(event.call)
            pieces.append([])
    first, *later = ("".join(piece) for piece in pieces)
    content = "\n".join([*(first,) * bool(first), *(text.strip() for text in later if text.strip())])
    return Parsed(content, "".join(thinking), tuple(calls), tuple(faults))
