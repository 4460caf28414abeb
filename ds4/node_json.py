"""Nodes as JSON objects, in logs and spill files, and back. What is read is hostile and checked field by field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .chat_formats import ToolCall
from .errors import ArgumentError, FileFormatError
from .files.base import quote
from .nodes import Node
from .sealed import plain
from .tokenizer.base import characters

ROLES = ("system", "user", "assistant", "tool")
MAX_ID = (1 << 31) - 1
MAX_NUMBER = (1 << 53) - 1
_TEXTS = ("text", "kind", "thinking", "result_of", "finish")
_FIELDS = {"number", "role", "ids", *_TEXTS, "calls", "index", "count", "headed", "data"}


def clean(node: Node) -> Node:
    """The node as it comes back from a log. Raises ArgumentError for what no log can hold."""
    ids = tuple(int(token) for token in node.ids)
    if ids and not 0 <= min(ids) <= max(ids) <= MAX_ID:
        raise ArgumentError(f"token ids lie between 0 and {MAX_ID}; a node has {min(ids)} to {max(ids)}.")
    if node.role not in ROLES or not 0 <= node.index < node.count <= MAX_ID:
        raise ArgumentError(f"no node has the role {node.role!r} and is number {node.index} of {node.count}.")
    texts: dict[str, Any] = {name: characters(getattr(node, name)) for name in _TEXTS}
    calls = tuple(ToolCall(characters(c.name), plain(c.arguments), characters(c.id)) for c in node.calls)
    return replace(node, ids=ids, calls=calls, data=plain(node.data), **texts)


def to_json(node: Node) -> dict[str, Any]:
    """Every field of a clean node."""
    return {
        "number": node.number,
        "role": node.role,
        "kind": node.kind,
        "text": node.text,
        "thinking": node.thinking,
        "ids": list(node.ids),
        "calls": [{"id": c.id, "name": c.name, "arguments": c.arguments} for c in node.calls],
        "result_of": node.result_of,
        "index": node.index,
        "count": node.count,
        "headed": node.headed,
        "finish": node.finish,
        "data": dict(node.data),
    }


def from_json(value: Any, least: int = 1) -> Node:
    """The node that a JSON object describes; its number is at least `least`. Raises FileFormatError for everything that
    is none."""
    if not isinstance(value, Mapping) or set(value) != _FIELDS:
        raise FileFormatError(f"{quote(value)} is not a node, or not one with the fields that a node has")
    if value["role"] not in ROLES:
        raise FileFormatError(f"a node has the role {quote(value['role'])}")
    for name in _TEXTS:
        if not isinstance(value[name], str):
            raise FileFormatError(f"{name} of a node is {quote(value[name])}, not text")
    index, count = whole(value["index"], "index", 0, MAX_ID), whole(value["count"], "count", 1, MAX_ID)
    if index >= count or not isinstance(value["headed"], bool) or not isinstance(value["data"], dict):
        raise FileFormatError("index, headed or data of a node do not fit")
    return Node(
        value["role"],
        _ids(value["ids"]),
        calls=_calls(value["calls"]),
        index=index,
        count=count,
        headed=value["headed"],
        data=value["data"],
        number=whole(value["number"], "number", least, MAX_NUMBER),
        **{name: value[name] for name in _TEXTS},
    )


def whole(value: Any, name: str, least: int, most: int) -> int:
    """A whole number of a file, in its range. Raises FileFormatError."""
    if type(value) is not int or not least <= value <= most:
        raise FileFormatError(f"{name} is {quote(value)}, not a whole number from {least} to {most}")
    return value


def _ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise FileFormatError("ids of a node are not a list of whole numbers")
    if value and not 0 <= min(value) <= max(value) <= MAX_ID:
        raise FileFormatError(f"ids of a node go from {quote(min(value))} to {quote(max(value))}")
    return tuple(value)


def _calls(value: Any) -> tuple[ToolCall, ...]:
    if not isinstance(value, list):
        raise FileFormatError(f"calls of a node are {quote(value)}, not a list")
    calls = []
    for call in value:
        if not isinstance(call, dict) or set(call) != {"id", "name", "arguments"}:
            raise FileFormatError("a call of a node has not the fields of a call")
        if not isinstance(call["id"], str) or not isinstance(call["name"], str):
            raise FileFormatError("id or name of a call is not text")
        if not isinstance(call["arguments"], dict):
            raise FileFormatError("the arguments of a call are not an object")
        calls.append(ToolCall(call["name"], call["arguments"], call["id"]))
    return tuple(calls)
