"""The mechanical ledger: what measured summaries lose, taken from calls, results and messages without a model.

Flat entries of one line each (the human's own messages keep theirs), without duplicates, bounded, carried through
later compactions as they are, never nested.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..chat_formats import ToolCall
from ..nodes import Node
from ..tokenizer.base import Tokenizer, characters
from . import prompts

HUMAN_TOKENS = 256  # of one human message
LEAST_QUOTE = 6  # tokens that its line has at least
MAX_VALUE = 240  # characters of a path, a command, an URL
MAX_PLACE = 4096  # of a place in the spill, which is of no use without its middle
MAX_TEXT = 16_384  # of an entry that is read back
KINDS = ("file", "command", "url", "spill", "checkpoint", "human")

_PATHS = ("path", "file", "filename", "file_path", "filepath")
_COMMANDS = ("command", "cmd")
_URLS = ("url", "urls", "uri")
_URL = re.compile(r"https?://[^\s\"'<>\\^`{|}]+")
_EXIT = re.compile(r"exit code (-?\d{1,10})(?:[\r\n]|$)")
_RANGE = re.compile(r"([^\r\n]{1,4096}) lines (\d{1,12}-\d{1,12} of \d{1,12})\b")  # how the built-in `read` begins
_EDITED = re.compile(r"[^\r\n]{1,4096} edited at line (\d{1,12})\b")
_UNPRINTABLE = re.compile(
    r"[\x00-\x20\x7f-\xa0\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ufffd]+"
)  # control characters, spaces of all kinds, and what changes the direction of a text


@dataclass(frozen=True)
class Entry:
    """One line of the ledger. `kind`: "file", "command", "url", "spill", "checkpoint" or "human". `node`: the number of
    the node that it comes from."""

    kind: str
    text: str
    node: int = 0

    @property
    def line(self) -> str:
        """As the model reads it."""
        if self.kind == "human":
            return f"- the user said (#{self.node}): {self.text}"
        if self.kind == "checkpoint":
            return f"- took the place of checkpoint {self.text}"
        return f"- {_LABELS[self.kind]}{self.text}"


_LABELS = {"file": "", "command": "ran ", "url": "link ", "spill": "archive "}


def collect(
    nodes: Iterable[Node], tokenizer: Tokenizer, human_tokens: int, carried: Sequence[Entry] = ()
) -> list[Entry]:
    """The entries of nodes that a checkpoint stands for, behind `carried` ones, oldest first.

    The ledgers of earlier checkpoints among the nodes are taken over as they are. Of equal entries the newest one
    stays. `human_tokens`: the most that all human messages may have together.
    """
    found = list(carried)
    nodes = list(nodes)
    results = {node.result_of: node for node in nodes if node.role == "tool"}
    said = [node for node in nodes if node.human and node.text.strip()]
    quoted = {id(node) for node in (*said[:1], *said[-(human_tokens // LEAST_QUOTE + 1) :])}  # no more could be kept
    for node in nodes:
        if node.kind == "checkpoint":
            found += from_json(node.data.get("ledger"))
            found.append(Entry("checkpoint", one_line(node.data.get("number", "?")), node.number))
        found += [Entry("spill", one_line(place, MAX_PLACE), node.number) for place in _spills(node.data)]
        if id(node) in quoted:
            found.append(Entry("human", _quoted(tokenizer, node, min(HUMAN_TOKENS, human_tokens)), node.number))
        for call in node.calls:
            found += _of_call(call, results.get(call.id), node.number)
    newest: dict[tuple[str, str, int], Entry] = {}
    for entry in reversed(found):
        newest.setdefault((entry.kind, entry.text, entry.node if entry.kind == "human" else 0), entry)
    return list(reversed(newest.values()))


def bounded(entries: Sequence[Entry], limit_tokens: int, human_limit: int, count: Callable[[str], int]) -> list[Entry]:
    """The entries that there is room for, the human's messages first. These have `human_limit` tokens: the first one,
    and then the newest ones. All else has `limit_tokens`: the oldest go first. `count`: the tokens of a text."""
    humans = sorted((entry for entry in entries if entry.kind == "human"), key=lambda entry: entry.node)
    others = [entry for entry in entries if entry.kind != "human"]
    first, left = humans[:1], human_limit - sum(count(entry.line + "\n") for entry in humans[:1])
    others = _newest(others, limit_tokens - count(prompts.LEDGER_TITLE + "\n"), count)
    return [*first, *_newest(humans[1:], left, count), *others]


def render(entries: Sequence[Entry]) -> str:
    """The ledger as text, "" when it is empty."""
    return "\n".join([prompts.LEDGER_TITLE, *(entry.line for entry in entries)]) if entries else ""


def to_json(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """As the data of a checkpoint node holds them."""
    return [{"kind": entry.kind, "text": entry.text, "node": entry.node} for entry in entries]


def from_json(value: object) -> list[Entry]:
    """The entries of a checkpoint's data. What is no entry is left out: a damaged line must not end a conversation."""
    found = []
    for item in value if isinstance(value, (list, tuple)) else ():
        if not isinstance(item, Mapping):
            continue
        kind, text, node = item.get("kind"), item.get("text"), item.get("node")
        if kind not in KINDS or not isinstance(text, str) or not text or isinstance(node, bool):
            continue
        if not isinstance(node, int) or not 0 <= node < 1 << 53 or len(text) > MAX_TEXT:
            continue
        if kind != "human":
            text = one_line(text, MAX_PLACE if kind == "spill" else MAX_TEXT)
        found.append(Entry(kind, text, node))
    return found


def one_line(value: object, most: int = MAX_VALUE) -> str:
    """A value as one line of at most about `most` characters: control characters and line ends become spaces, a long
    one loses its middle."""
    text = value if isinstance(value, str) else str(value) if isinstance(value, int) and abs(value) < 1 << 63 else ""
    if len(text) > 4 * most:
        text = text[: 2 * most] + text[-2 * most :]
    text = _UNPRINTABLE.sub(" ", characters(text)).strip()
    return text if len(text) <= most else text[: most // 2] + " ... " + text[-most // 2 :]


def _newest(entries: Sequence[Entry], limit: int, count: Callable[[str], int]) -> list[Entry]:
    """The newest entries that have no more than `limit` tokens together."""
    kept: list[Entry] = []
    for entry in reversed(entries):
        limit -= count(entry.line + "\n")
        if limit < 0:
            break
        kept.append(entry)
    return kept[::-1]


def _quoted(tokenizer: Tokenizer, node: Node, limit: int) -> str:
    """A human message word for word, or its head and tail."""
    label = len(tokenizer.encode(Entry("human", "", node.number).line + "\n"))
    return prompts.shortened(tokenizer, characters(node.text), max(2, limit - label), node.number)


def _spills(data: Mapping[str, Any]) -> list[str]:
    """The places of the spill that a node's data name."""
    places = data.get("spills", ())
    found = [place for place in places if isinstance(place, str)] if isinstance(places, (list, tuple)) else []
    return [*found, *(place for place in [data.get("spill")] if isinstance(place, str) and place)]


def _of_call(call: ToolCall, result: Node | None, number: int) -> list[Entry]:
    """What a call and its result say about files, commands and URLs."""
    arguments, name = call.arguments, one_line(call.name)
    said = result.text if result is not None else ""
    failed = " (failed)" if said.startswith(f"{call.name} failed") else ""
    read = _RANGE.match(said)
    found: list[Entry] = []
    for key in _PATHS:
        if isinstance(arguments.get(key), str) and (path := one_line(arguments[key])):
            edited = _EDITED.match(said)
            part = f" lines {read[2]}" if read else f" line {edited[1]}" if edited else _range(arguments)
            found.append(Entry("file", f"{name} {path}{part}{failed}", number))
    if read and call.name == "more":  # it goes on with the file that was read last
        found.append(Entry("file", f"{name} {one_line(read[1])} lines {read[2]}", number))
    for key in _COMMANDS:
        value = arguments.get(key)
        if isinstance(value, list) and all(isinstance(word, str) for word in value):
            value = " ".join(value)
        if isinstance(value, str) and (command := one_line(value)):
            code = _EXIT.match(said)
            found.append(Entry("command", f"{command} (exit code {code[1]})" if code else command + failed, number))
    for key, value in arguments.items():
        if key in _COMMANDS:
            continue
        for text in value[:8] if isinstance(value, list) else [value]:
            if isinstance(text, str):
                links = [text] if key in _URLS else _URL.findall(text[:4096])[:8]
                found += [Entry("url", link, number) for link in map(one_line, links) if link]
    return found


def _range(arguments: Mapping[str, Any]) -> str:
    """The lines that a call asks for."""
    start, end = (_number(arguments, names) for names in (("start", "first", "offset", "line"), ("end", "last")))
    lines = arguments.get("lines", arguments.get("limit", arguments.get("count")))
    if isinstance(lines, int) and not isinstance(lines, bool) and start is not None:
        end = start + lines - 1 if end is None else end
    elif isinstance(lines, (str, int)) and not isinstance(lines, bool) and start is None:
        return f" lines {one_line(lines)}" if isinstance(lines, str) else f" lines 1-{one_line(lines)}"
    elif isinstance(lines, list) and len(lines) == 2 and all(isinstance(line, int) for line in lines):
        start, end = lines
    if start is None and end is None:
        return ""
    return f" lines {one_line(1 if start is None else start)}-{'' if end is None else one_line(end)}"


def _number(arguments: Mapping[str, Any], names: Sequence[str]) -> int | None:
    found = [arguments[name] for name in names if isinstance(arguments.get(name), int)]
    return next((value for value in found if not isinstance(value, bool)), None)
