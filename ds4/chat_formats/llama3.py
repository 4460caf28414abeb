"""Llama 3, 3.1, 3.2 and 3.3:

    <|start_header_id|>ROLE<|end_header_id|>

    content<|eot_id|>

with tool results under the role ipython. A tool call is a JSON object that is a whole assistant turn, or stands behind
<|python_tag|>; there is no closing tag. A turn that waits for the result of a tool may end with <|eom_id|>.
"""

from __future__ import annotations

import re
from typing import Any

from ds4.chat_formats.base import Boundary, ChatFormat, Message, Parsed, Tag, ToolCall
from ds4.chat_formats.toolcalls import call_of, json_text, values_at
from ds4.tokenizer.base import Tokenizer

HEAD, HEADED, END = Tag("<|start_header_id|>"), Tag("<|end_header_id|>"), Tag("<|eot_id|>")
CODE, MORE = Tag("<|python_tag|>"), "<|eom_id|>"
_ARGUMENTS = re.compile(r'"(parameters|arguments|function)"')


class Llama3(ChatFormat):
    name = "llama3"
    needs = (HEAD, HEADED, END)
    roles = frozenset({"system", "user", "assistant", "tool"})
    tools = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        control = tokenizer.control
        self._ends = {control[text] for text in (END, MORE) if text in control}
        self.stop_ids = tokenizer.eos_ids | self._ends
        self.boundaries = (
            *(Boundary("end", tokenizer.decode([i]), i) for i in sorted(self.stop_ids)),
            Boundary("role", str(HEAD), control[HEAD]),
            Boundary("tool", str(CODE), control.get(CODE)),
            Boundary("tool", '{"name":'),
        )

    def render(self, message: Message, after: str | None = None) -> list[int]:
        self.check(message)
        if message.role == "tool":
            results = message.content if isinstance(message.content, tuple) else (message.content,)
            return self.ids(*(part for text in results for part in _turn("ipython", text)))
        assert isinstance(message.content, str)
        if message.role == "assistant":
            return self.ids(*_turn("assistant", *_answer(message)))
        return self.ids(*_turn(message.role, message.content, *_tool_list(message.tools, bool(message.content))))

    def generation_prefix(self, thinking: bool = True) -> list[int]:
        return self.ids(HEAD, "assistant", HEADED, "\n\n")

    def end_turn(self, sampled: list[int]) -> list[int]:
        return [] if sampled and sampled[-1] in self._ends else [self.tokenizer.control[END]]

    def parse(self, text: str, thinking: bool = False) -> Parsed:
        """A call in the middle of text is text: only what begins the turn, or stands behind <|python_tag|>, is one."""
        before, tag, code = text.partition(CODE)
        body = code if tag else text
        start = body.lstrip()
        if not tag and not start.startswith(("{", "[")):
            return Parsed(text)
        end, values = values_at(start, 0)
        if not tag and (not all(map(_is_call, values)) or not _ARGUMENTS.search(start)):
            return Parsed(text)  # an answer in JSON
        found = [call_of(value) for value in values]
        wrong = [call for call in found if isinstance(call, str)]
        calls = tuple(call for call in found if isinstance(call, ToolCall))
        if calls and not wrong and not start[end:].strip():
            return Parsed(before.strip() if tag else "", tool_calls=calls)
        reason = wrong[0] if wrong else "is followed by other text" if calls else "holds no complete JSON object"
        return Parsed(text, faults=(f"Tool call {len(calls) + 1} {reason}.",))


def _is_call(value: Any) -> bool:
    """Whether a JSON object is meant as a call: an answer in JSON may well have a name."""
    return isinstance(value, dict) and not value.keys().isdisjoint(("parameters", "arguments", "function"))


def _turn(role: str, *parts: str) -> tuple[str, ...]:
    return HEAD, role, HEADED, "\n\n", *parts, END


def _answer(message: Message) -> list[str]:
    """The parts of an assistant turn: its text, then the calls, one a line."""
    assert isinstance(message.content, str)
    calls = "\n".join(json_text({"name": call.name, "parameters": call.arguments}) for call in message.tool_calls)
    if not message.content or not calls:
        return [message.content, calls]
    return [message.content, CODE, calls]


def _tool_list(tools: tuple[dict[str, Any], ...], after_text: bool) -> list[str]:
    """What tells the model which tools there are and how to call them."""
    if not tools:
        return []
    schemas = "\n".join(
        json_text(tool if "function" in tool else {"type": "function", "function": tool}) for tool in tools
    )
    return [
        *("\n\n",) * after_text,
        f"These functions are at your disposal, one JSON schema a line:\n\n{schemas}\n\nTo call one, answer with "
        'nothing but a JSON object of this form: {"name": NAME OF THE FUNCTION, "parameters": {NAME: VALUE}}. '
        "Use no variables. The result comes in the next message.",
    ]
