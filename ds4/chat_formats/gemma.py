"""Gemma 2 and 3:

    <start_of_turn>ROLE
    content<end_of_turn>

with the roles user and model, strictly in turn. There is no system role: its text stands at the head of the first user
turn, with an empty line behind it. Tools are described in text, in whatever form the program likes.
"""

from __future__ import annotations

from ds4.chat_formats.base import Boundary, ChatFormat, Message, Parsed, Tag
from ds4.errors import ArgumentError
from ds4.tokenizer.base import Tokenizer

START, END = Tag("<start_of_turn>"), Tag("<end_of_turn>")


class Gemma(ChatFormat):
    name = "gemma"
    needs = (START, END)
    roles = frozenset({"user", "assistant"})
    alternating = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        control = tokenizer.control
        self.stop_ids = tokenizer.eos_ids | {control[END]}
        self.boundaries = (
            *(Boundary("end", tokenizer.decode([i]), i) for i in sorted(self.stop_ids)),
            Boundary("role", str(START), control[START]),
        )

    def render(self, message: Message, after: str | None = None) -> list[int]:
        self.check(message)
        if after == message.role or (after is None and message.role == "assistant"):
            raise ArgumentError(
                "the chat format gemma begins with a user message, and then user and assistant take turns: "
                f"{'no message' if after is None else 'another ' + after} stands before this {message.role} message."
            )
        assert isinstance(message.content, str)
        role = "model" if message.role == "assistant" else "user"
        return self.ids(START, f"{role}\n{message.content}", END, "\n")

    def generation_prefix(self, thinking: bool = True) -> list[int]:
        return self.ids(START, "model\n")

    def end_turn(self, sampled: list[int]) -> list[int]:
        ended = bool(sampled) and sampled[-1] == self.tokenizer.control[END]
        return self.ids(*() if ended else (END,), "\n")

    def parse(self, text: str, thinking: bool = False) -> Parsed:
        return Parsed(text)
