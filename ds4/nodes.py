"""Nodes: what a conversation consists of, and how a message becomes one.

A node is a piece of the surface that the model sees: its role, its text, and its exact token ids. The ids are the
truth: they are made once, by the chat format or by sampling, and copied ever after.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .chat_formats import ChatFormat, Message, Parsed, ToolCall

FILLER = "Noted."  # the answer to a message that has none, where turns must alternate


@dataclass(frozen=True)
class Node:
    """One node of a surface.

    `number`: how listings name it (#N), unique in its conversation and never used again; 0 until the transcript has
    taken it. `role`: "system", "user", "assistant" or "tool". `kind`: "" (what the role says), "checkpoint", "note" (an
    internal message to the model) or "filler" (an assistant turn between two user turns where a format wants one).
    `text`: its text without thinking and calls; of a first message without the system prompt at its head. `calls` of
    an assistant node have ids, unique in the conversation; `result_of` is the id that a tool node answers, `index` of
    `count` its place among the results of its message. `headed`: the ids begin with the system prompt (formats without
    a system role). `finish`: how a sampled turn ended. `data`: what a kind adds, as JSON.
    """

    role: str
    ids: tuple[int, ...]
    text: str = ""
    kind: str = ""
    thinking: str = ""
    calls: tuple[ToolCall, ...] = ()
    result_of: str = ""
    index: int = 0
    count: int = 1
    headed: bool = False
    finish: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)
    number: int = 0

    @property
    def human(self) -> bool:
        """Whether the user wrote it."""
        return self.role == "user" and not self.kind

    @property
    def user_level(self) -> bool:
        """Whether the model sees it as a turn of the user: tool results are one too."""
        return self.role in ("user", "tool")

    def __len__(self) -> int:
        return len(self.ids)


def tokens_of(nodes: Iterable[Node]) -> list[int]:
    """The ids of nodes in a row."""
    return [token for node in nodes for token in node.ids]


def size_of(nodes: Iterable[Node]) -> int:
    """How many tokens nodes have together."""
    return sum(len(node.ids) for node in nodes)


class Writer:
    """Makes nodes for one chat format. `system`, `tools` and the `effort` of reasoning are what every surface begins
    with.

    Raises ArgumentError when the format has no tool calls and there are tools, or does not have the effort.
    """

    def __init__(
        self,
        format: ChatFormat,
        system: str | None = None,
        tools: Sequence[dict[str, Any]] = (),
        effort: str | None = None,
    ) -> None:
        self.format, self.tools = format, tuple(tools)
        self._head = system if system and "system" not in format.roles else None
        ids = format.begin(effort)
        if "system" in format.roles and (system is not None or tools):
            ids += format.render(Message("system", system or "", tools=self.tools))
        elif tools:
            format.check(Message("system", tools=self.tools))  # says that there is no such role
        self._opening = Node("system", tuple(ids), text=system or "") if ids else None

    def opening(self) -> list[Node]:
        """The node that a surface begins with, if there is one."""
        return [self._opening] if self._opening is not None else []

    def head_ids(self) -> list[int]:
        """A first user turn that holds nothing but the system prompt, where that is its place."""
        return self.format.render(Message("user", self.format.first_user(self._head, ""))) if self._head else []

    def user(self, text: str, *, first: bool, kind: str = "", data: Mapping[str, Any] | None = None) -> Node:
        """A turn at the user's level. `first`: none stands before it on its surface."""
        written = self.format.first_user(self._head, text) if first else text
        ids = self.format.render(Message("user", written), None if first else "assistant")
        return Node("user", tuple(ids), text, kind, headed=first and self._head is not None, data=data or {})

    def sampled(
        self,
        ids: Sequence[int],
        parsed: Parsed,
        calls: Sequence[ToolCall] = (),
        finish: str = "",
        *,
        thinking: bool = True,
    ) -> Node:
        """An assistant turn from its sampled ids and what they say. `thinking`: as the generation prefix before them
        was made."""
        prefix = self.format.generation_prefix(thinking)
        # the end depends on what the prefix has left open
        whole = (*prefix, *ids, *self.format.end_turn([*prefix, *ids]))
        return Node("assistant", whole, parsed.content, thinking=parsed.thinking, calls=tuple(calls), finish=finish)

    def thinks(self, ids: Sequence[int]) -> bool:
        """Whether ids end inside a thinking block."""
        tags = self.format.thinking_tags
        return next((tags[i] for i in reversed(ids) if i in tags), False)

    def without_thinking(self, node: Node) -> Node:
        """An assistant node without its thinking; others, and those without, as they are."""
        tags = self.format.thinking_tags
        at = next((i for i in reversed(range(len(node.ids))) if tags.get(node.ids[i]) is False), -1)
        if not node.thinking or at < 0:
            return node
        rest = list(node.ids[at + 1 :])
        while self.format.thinking_gap and rest and not self.format.tokenizer.decode(rest[:1]).strip("\n"):
            del rest[0]
        return replace(node, ids=(*self.format.dropped_prefix(), *rest), thinking="")

    def assistant(self, text: str, calls: Sequence[ToolCall] = (), thinking: str = "", finish: str = "") -> Node:
        """An assistant turn from its parts, as the format writes it."""
        message = Message("assistant", text, thinking=thinking, tool_calls=tuple(calls))
        ids = self.format.render(message, "user")
        return Node("assistant", tuple(ids), text, thinking=thinking, calls=tuple(calls), finish=finish)

    def result(self, call: str, text: str, index: int = 0, count: int = 1, **data: Any) -> Node:
        """The result of a call: the index-th of `count` of its message."""
        ids = self.format.render_result(text, index, count)
        return Node("tool", tuple(ids), text, result_of=call, index=index, count=count, data=data)

    def filler(self) -> Node:
        """An assistant turn that only says that it has read."""
        format = self.format
        said = format.tokenizer.encode(FILLER)
        return Node("assistant", (*format.generation_prefix(False), *said, *format.end_turn(said)), FILLER, "filler")

    def arrange(self, nodes: Sequence[Node], onto: Sequence[Node] = ()) -> list[Node]:
        """The nodes as the format can hold them behind the surface `onto`: the first user turn, and no other, carries
        the system prompt where that is its place, and fillers stand where two user turns would follow one another in a
        format that alternates. Every other node is kept as it is, with its ids."""
        out: list[Node] = []
        before = onto[-1] if onto else None
        first = not any(node.role == "user" for node in onto)
        for node in nodes:
            if node.kind == "filler":
                continue
            if self.format.alternating and before is not None and node.user_level and before.user_level:
                if not (node.role == "tool" and node.index):  # one message with the result before it
                    out.append(self.filler())
            if node.role == "user":
                node, first = self._placed(node, first), False
            before = node
            out.append(node)
        return out

    def _placed(self, node: Node, first: bool) -> Node:
        """A user node with the system prompt at its head exactly when it is the first."""
        if node.headed == (first and self._head is not None):
            return node
        return replace(self.user(node.text, first=first, kind=node.kind, data=node.data), number=node.number)
