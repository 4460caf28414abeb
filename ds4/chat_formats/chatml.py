"""ChatML (SmolLM2, Qwen and many others):

    <|im_start|>ROLE
    content<|im_end|>

with thinking as <think>...</think> at the head of an assistant turn, tool calls as JSON between <tool_call> tags, and
tool results in a user turn between <tool_response> tags. Where the tokenizer has tokens for these tags (Qwen) they are
used, else they are text (SmolLM2).
"""

from __future__ import annotations

from typing import Any

from ds4.chat_formats.base import Boundary, ChatFormat, Message, Parsed, Tag
from ds4.chat_formats.toolcalls import json_text, parse_tool_calls
from ds4.tokenizer.base import Tokenizer

START, END = Tag("<|im_start|>"), Tag("<|im_end|>")
THINK, THOUGHT = Tag("<think>"), Tag("</think>")
CALL, CALLED = Tag("<tool_call>"), Tag("</tool_call>")
RESULT, RESULTED = Tag("<tool_response>"), Tag("</tool_response>")


class ChatML(ChatFormat):
    name = "chatml"
    needs = (START, END)
    roles = frozenset({"system", "user", "assistant", "tool"})
    tools = True
    writes_thinking = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        control = tokenizer.control
        self.thinking = THINK in control and THOUGHT in control
        self.stop_ids = tokenizer.eos_ids | {control[END]}
        self.boundaries = (
            *(Boundary("end", tokenizer.decode([i]), i) for i in sorted(self.stop_ids)),
            Boundary("role", str(START), control[START]),
            *(Boundary("think", str(tag), control.get(tag)) for tag in (THINK, THOUGHT)),
            Boundary("tool", str(CALL), control.get(CALL)),
            Boundary("role", str(RESULT), control.get(RESULT)),  # a model that goes on as if it were the tool
        )

    def render(self, message: Message, after: str | None = None) -> list[int]:
        self.check(message)
        if message.role == "assistant":
            return self.generation_prefix() + self.ids(*_assistant(message), END, "\n")
        role = "user" if message.role == "tool" else message.role
        return self.ids(START, f"{role}\n", *_body(message), END, "\n")

    def render_result(self, text: str, index: int = 0, count: int = 1, after: str | None = "assistant") -> list[int]:
        """All results of a message share one user turn: the first opens it, the last closes it."""
        self.check(Message("tool", text))
        opener = ("\n",) if index else (START, "user\n")
        closer = (END, "\n") if index == count - 1 else ()
        return self.ids(*opener, RESULT, "\n", text, "\n", RESULTED, *closer)

    def generation_prefix(self, thinking: bool = True) -> list[int]:
        closed = (THINK, "\n\n", THOUGHT, "\n\n") if self.thinking and not thinking else ()
        return self.ids(START, "assistant\n", *closed)

    def end_turn(self, sampled: list[int]) -> list[int]:
        end = self.tokenizer.control[END]
        ended = bool(sampled) and sampled[-1] == end
        return self.ids(*(THOUGHT,) * self._thinks(sampled), *() if ended else (END,), "\n")

    def parse(self, text: str, thinking: bool = False) -> Parsed:
        thought = ""
        start = text.lstrip()
        if thinking or start.startswith(THINK):
            thought, _, text = start.removeprefix(THINK).partition(THOUGHT)
            text = text.lstrip("\n")
        content, calls, faults = parse_tool_calls(text, CALL, CALLED)
        return Parsed(content, thought.strip(), calls, faults)

    def _thinks(self, sampled: list[int]) -> bool:
        """Whether the ids end inside a thinking block."""
        control = self.tokenizer.control
        tags = [i for i in sampled if self.thinking and i in (control[THINK], control[THOUGHT])]
        return bool(tags) and tags[-1] == control[THINK]


def _body(message: Message) -> list[str]:
    """The parts of a system, user or tool message between its role line and its end."""
    if message.role == "tool":
        results = message.content if isinstance(message.content, tuple) else (message.content,)
        parts: list[str] = []
        for text in results:
            parts += [*("\n",) * bool(parts), RESULT, "\n", text, "\n", RESULTED]
        return parts
    assert isinstance(message.content, str)
    return [message.content, *_tool_list(message.tools, bool(message.content))] if message.tools else [message.content]


def _tool_list(tools: tuple[dict[str, Any], ...], after_text: bool) -> list[str]:
    """What tells the model which tools there are and how to call them."""
    schemas = "\n".join(
        json_text(tool if "function" in tool else {"type": "function", "function": tool}) for tool in tools
    )
    return [
        *("\n\n",) * after_text,
        f"# Tools\n\nThese functions are at your disposal, one JSON schema a line:\n<tools>\n{schemas}\n</tools>\n\n"
        "A call is one JSON object with the name and the arguments of a function, between two tags:\n",
        CALL,
        '\n{"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}\n',
        CALLED,
        "\nSeveral calls may follow one another. Their results come in the next message.",
    ]  # fmt: skip


def _assistant(message: Message) -> list[str]:
    assert isinstance(message.content, str)
    parts: list[str] = [THINK, f"\n{message.thinking}\n", THOUGHT, "\n\n"] if message.thinking else []
    parts.append(message.content)
    for i, call in enumerate(message.tool_calls):
        line = json_text({"name": call.name, "arguments": call.arguments})
        parts += [*("\n",) * bool(i or message.content), CALL, f"\n{line}\n", CALLED]
    return parts
