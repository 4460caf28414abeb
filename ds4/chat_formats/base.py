"""One interface for all chat formats: how a conversation becomes token ids, and how sampled text is read.

Three rules hold for each of them. Content is encoded as plain text: a control token spelled in it stays text, and
control tokens stand only where the format puts them. Every message is rendered on its own: the ids of a conversation
are the ids of its messages one after the other. Nothing is added that the caller did not write: there is no hidden
system text, also where a model's own template has one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ds4.errors import ArgumentError, UnsupportedError
from ds4.tokenizer.base import Tokenizer
from ds4.tokenizer.stream import Detokenizer

if TYPE_CHECKING:
    from ds4.files.checkpoint import Checkpoint


@dataclass(frozen=True)
class ToolCall:
    """A call that the model asks for. `id` is empty where the format has none."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    id: str = ""


@dataclass(frozen=True)
class Message:
    """One message of a conversation.

    `role` is "system", "user", "assistant" or "tool". `content` is text; of a tool message with the results of several
    calls a tuple of texts, in the order of the calls. `thinking` and `tool_calls` belong to an assistant message,
    `tools` (JSON schemas with "name", "description", "parameters") to a system message.
    """

    role: str
    content: str | tuple[str, ...] = ""
    thinking: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Parsed:
    """What an assistant turn's text holds. `faults`: one sentence for each tool call that could not be read; its raw
    text is then part of `content`."""

    content: str
    thinking: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    faults: tuple[str, ...] = ()


@dataclass(frozen=True)
class Boundary:
    """Where free text ends: `kind` is "end" (of a turn), "role", "think" or "tool".

    `id` is its token, None where the model only has it as `text`; `before` is text in front of it that belongs to it.
    """

    kind: str
    text: str
    id: int | None = None
    before: str = ""


class Tag(str):
    """Text of a format itself: the control token of that text where the tokenizer has one."""


class Reader(Protocol):
    """Reads an assistant turn while it is sampled. `inside_syntax`: the next token belongs to the markup of a call, not
    to its arguments and not to text."""

    @property
    def inside_syntax(self) -> bool: ...

    def feed(self, token: int) -> object: ...


class ChatFormat:
    """A chat format for one tokenizer; a subclass fills it.

    `roles` that it has; `alternating`: user and assistant turns must alternate; `tools`: it has a way to call tools;
    `thinking`: the model has thinking blocks; `writes_thinking`: a message may have one; `efforts`: names of the
    efforts of reasoning that `begin` can ask for; `thinking_gap`: empty lines stand between thinking and what follows;
    `tools_keep_thinking`: where there are tools, the model wants the thinking of earlier turns too; `stop_ids` end an
    assistant turn; `boundaries` as `Boundary` says. Without the role "system" its text belongs to the head of the first
    user message: see `first_user`.
    """

    name: str
    needs: tuple[str, ...]
    """Control tokens without which the format cannot be used; a template that names all of them is of this format."""
    architectures: frozenset[str] = frozenset()
    """Models that come without a template: they are of this format, and no others are."""
    roles: frozenset[str]
    alternating = False
    tools = False
    thinking = False
    writes_thinking = False
    efforts: tuple[str, ...] = ()
    thinking_gap = True
    tools_keep_thinking = False
    stop_ids: frozenset[int]
    boundaries: tuple[Boundary, ...]

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises UnsupportedError when the tokenizer lacks a control token of the format."""
        missing = [text for text in self.needs if text not in tokenizer.control]
        if missing:
            raise UnsupportedError(
                f"the chat format {self.name} needs the control token {missing[0]}, which this model's tokenizer does "
                "not have; choose another chat_format."
            )
        self.tokenizer = tokenizer

    @classmethod
    def open(cls, tokenizer: Tokenizer, checkpoint: Checkpoint | None) -> ChatFormat:
        """The format with the texts that the checkpoint brings for it, where it brings any."""
        return cls(tokenizer)

    def begin(self, effort: str | None = None) -> list[int]:
        """The ids that begin a conversation: BOS where the model wants it, and what asks for an effort of reasoning.

        Raises ArgumentError when the format does not have that effort.
        """
        if effort is not None:
            raise ArgumentError(f"the chat format {self.name} has no efforts of reasoning; leave `effort` out.")
        bos = self.tokenizer.bos_id
        return [bos] if self.tokenizer.add_bos and bos is not None else []

    def render(self, message: Message, after: str | None = None) -> list[int]:
        """The ids of one whole message; `after` is the role of the message before it, None at the start.

        Raises ArgumentError for a role or a field that the format does not have.
        """
        raise NotImplementedError

    def render_result(self, text: str, index: int = 0, count: int = 1, after: str | None = "assistant") -> list[int]:
        """The ids of the result of a tool call, the index-th of `count` of one assistant message: in order they make
        whole messages as `render` would write them."""
        return self.render(Message("tool", text), after)

    def first_user(self, system: str | None, text: str) -> str:
        """The text of the first user message, with the system prompt at its head where the format has no such role."""
        return f"{system}\n\n{text}" if system and "system" not in self.roles else text

    def generation_prefix(self, thinking: bool = True) -> list[int]:
        """The ids after which the model writes an assistant turn. `thinking=False`: with its thinking block closed."""
        raise NotImplementedError

    def dropped_prefix(self) -> list[int]:
        """What an assistant turn begins with when its thinking is taken out."""
        return self.generation_prefix()

    def end_turn(self, sampled: list[int]) -> list[int]:
        """What must follow the ids of an assistant turn so that the next message can come, however it ended. With the
        generation prefix in front of the sampled ids a thinking block that it has opened is closed, too."""
        raise NotImplementedError

    def parse(self, text: str, thinking: bool = False) -> Parsed:
        """Reads the text of an assistant turn, cut or malformed ones too; it never raises.

        `thinking`: the generation prefix has left a thinking block open.
        """
        raise NotImplementedError

    def parse_ids(self, ids: Sequence[int], thinking: bool = False) -> Parsed:
        """Reads the sampled ids of an assistant turn; a token that ends the turn is no part of its text. Where a format
        can, it tells control tokens from text that only spells them."""
        return self.parse(self.tokenizer.decode(self.said(ids)), thinking)

    def said(self, ids: Sequence[int]) -> Sequence[int]:
        """The sampled ids of an assistant turn without a token that ends it."""
        return ids[:-1] if ids and ids[-1] in self.stop_ids else ids

    def reader(self, thinking: bool = True) -> Reader | None:
        """A reader for the ids of an assistant turn as they are sampled, `thinking` as for `parse`; None where the
        format has none."""
        return None

    def without_open_call(self, ids: list[int], thinking: bool = False) -> tuple[int, list[int]]:
        """A turn that was cut, without a call that was cut in the middle: how many of its ids stay, and what closes the
        calls among them. `thinking` as for `parse`. Here all calls that can be read stand before the opener of the one
        that is cut."""
        tags = self.thinking_tags
        start = next((i + 1 for i in reversed(range(len(ids))) if ids[i] in tags), 0)
        if tags[ids[start - 1]] if start else thinking:
            return len(ids), []  # inside of a thinking block no call can stand
        text = self.tokenizer.decode(ids[start:])
        whole = self.parse(text).tool_calls
        openers = "|".join(re.escape(b.before + b.text) for b in self.boundaries if b.kind == "tool")
        for at in (match.start() for match in re.finditer(openers, text) if openers):
            if not self.parse(text[at:]).tool_calls and self.parse(text[:at]).tool_calls == whole:
                return start + _tokens_before(self.tokenizer.stream(), ids[start:], at), []
        return len(ids), []

    @property
    def thinking_tags(self) -> dict[int, bool]:
        """The tokens around a thinking block; True for those that open one."""
        return {b.id: "/" not in b.text for b in self.boundaries if b.kind == "think" and b.id is not None}

    def check(self, message: Message) -> None:
        """Raises ArgumentError when the format cannot render the message."""
        if message.role not in self.roles:
            known = ", ".join(sorted(self.roles))
            raise ArgumentError(f"the chat format {self.name} has no role {message.role!r}; its roles are {known}.")
        texts = message.content if message.role == "tool" and isinstance(message.content, tuple) else (message.content,)
        if not texts or not all(isinstance(text, str) for text in (*texts, message.thinking)):
            raise ArgumentError(
                "the content of a message is text; only a tool message may have a tuple of texts, one for each result."
            )
        if message.role != "assistant" and (message.thinking or message.tool_calls):
            raise ArgumentError(f"thinking and tool calls belong to the assistant, not to a {message.role} message.")
        if message.role != "system" and message.tools:
            raise ArgumentError(f"tools belong to the system message, not to a {message.role} message.")
        if message.tool_calls and not self.tools:
            raise ArgumentError(f"the chat format {self.name} has no tool calls; write them as text.")
        if not all(isinstance(call, ToolCall) for call in message.tool_calls):
            raise ArgumentError("tool_calls of a message are ToolCall objects.")
        if message.thinking and not self.writes_thinking:
            raise ArgumentError(f"the chat format {self.name} has no thinking blocks; leave `thinking` empty.")

    def ids(self, *parts: str) -> list[int]:
        """The ids of parts in a row: a `Tag` is its control token where there is one, all else is plain text.
        Neighbouring texts are encoded as one, as in the model's own template."""
        found: list[int] = []
        text = ""
        for part in parts:
            token = self.tokenizer.control.get(part) if isinstance(part, Tag) else None
            if token is None:
                text += part
                continue
            found += [*self.tokenizer.encode(text), token]
            text = ""
        return found + self.tokenizer.encode(text)


def _tokens_before(stream: Detokenizer, ids: Sequence[int], at: int) -> int:
    """How many of the ids stand before the character `at` of their text."""
    length = 0
    for i, token in enumerate(ids):
        length += len(stream.feed(token))
        if length > at:
            return i
    return len(ids)
