"""DeepSeek V4 (Flash and Pro):

    <BOS>system text<｜User｜>question<｜Assistant｜><think>reasoning</think>answer<EOS>

without line breaks between messages. System text has no token of its own. Results of tools are a user turn of
<tool_result> elements; what a user says next goes on in the same turn. Tool calls are DSML: see `dsml`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ds4.chat_formats.base import Boundary, ChatFormat, Message, Parsed
from ds4.chat_formats.deepseek_v4_messages import ASSISTANT, BEGIN, REMINDER, USER, conversation, result_parts
from ds4.chat_formats.deepseek_v4_texts import Texts, of_checkpoint
from ds4.chat_formats.dsml import DSML, END, THINK, THOUGHT, CallFinished, Event, calls_parts, parsed
from ds4.chat_formats.dsml_reader import DsmlReader
from ds4.tokenizer.base import Tokenizer

if TYPE_CHECKING:
    from ds4.files.checkpoint import Checkpoint


class DeepSeekV4(ChatFormat):
    """`texts`: the checkpoint's own, default ds4's wording of them."""

    name = "deepseek-v4"
    needs = (BEGIN, END, USER, ASSISTANT, THINK, THOUGHT, DSML)
    architectures = frozenset({"deepseek_v4", "deepseek4"})
    roles = frozenset({"system", "user", "assistant", "tool"})
    alternating = True
    tools = True
    thinking = True
    writes_thinking = True
    thinking_gap = False
    tools_keep_thinking = True

    def __init__(self, tokenizer: Tokenizer, texts: Texts | None = None) -> None:
        super().__init__(tokenizer)
        control = tokenizer.control
        self.texts = texts or Texts()
        self.efforts = self.texts.efforts
        self.stop_ids = tokenizer.eos_ids | {control[END]}
        self.boundaries = (
            *(Boundary("end", tokenizer.decode([i]), i) for i in sorted(self.stop_ids)),
            *(Boundary("role", str(tag), control[tag]) for tag in (USER, ASSISTANT, REMINDER) if tag in control),
            *(Boundary("think", str(tag), control[tag]) for tag in (THINK, THOUGHT)),
            Boundary("tool", str(DSML), control[DSML], before="<"),
        )

    @classmethod
    def open(cls, tokenizer: Tokenizer, checkpoint: Checkpoint | None) -> DeepSeekV4:
        return cls(tokenizer, of_checkpoint(checkpoint))

    def begin(self, effort: str | None = None) -> list[int]:
        return self.ids(BEGIN, self.texts.effort(effort))

    def render(self, message: Message, after: str | None = None) -> list[int]:
        self.check(message)
        if message.role == "tool":
            results = message.content if isinstance(message.content, tuple) else (message.content,)
            return self.ids(*_turn(after), *result_parts(results))
        assert isinstance(message.content, str)
        if message.role == "user":
            return self.ids(*_turn(after), message.content)
        if message.role == "system":
            tools = ("\n\n", *self.texts.tools(message.tools)) if message.tools else ()
            return self.ids(message.content, *tools)
        thinking = (THINK, message.thinking, THOUGHT) if message.thinking else (THOUGHT,)
        calls = calls_parts((call.name, call.arguments) for call in message.tool_calls)
        return self.ids(ASSISTANT, *thinking, message.content, *calls, END)

    def render_result(self, text: str, index: int = 0, count: int = 1, after: str | None = "assistant") -> list[int]:
        """All results of a message share one user turn, which the first opens; the empty line between two belongs to
        the first of them."""
        self.check(Message("tool", text))
        opener = () if index else _turn(after)
        return self.ids(*opener, *result_parts([text]), *("\n\n",) * (index < count - 1))

    def generation_prefix(self, thinking: bool = True) -> list[int]:
        return self.ids(ASSISTANT, THINK if thinking else THOUGHT)

    def dropped_prefix(self) -> list[int]:
        return self.generation_prefix(thinking=False)

    def end_turn(self, sampled: list[int]) -> list[int]:
        control = self.tokenizer.control
        tags = [i for i in sampled if i in (control[THINK], control[THOUGHT])]
        inside = bool(tags) and tags[-1] == control[THINK]
        ended = bool(sampled) and sampled[-1] == control[END]
        return [] if ended else self.ids(*(THOUGHT,) * inside, END)

    def parse(self, text: str, thinking: bool = False) -> Parsed:
        """Protocol tokens are known by their spelling here; `parse_ids` tells true ones from quoted ones."""
        reader = DsmlReader(thinking)
        return parsed([*reader.feed(text), *reader.finish()])

    def parse_ids(self, ids: Sequence[int], thinking: bool = False) -> Parsed:
        reader = self.reader(thinking)
        return parsed([*(event for i in self.said(ids) for event in reader.feed(i)), *reader.finish()])

    def reader(self, thinking: bool = True) -> TurnReader:
        """A reader for the ids of an assistant turn as they are sampled; `thinking` as for `parse`."""
        return TurnReader(self.tokenizer, thinking)

    def without_open_call(self, ids: list[int], thinking: bool = False) -> tuple[int, list[int]]:
        """Of a block that was cut the whole calls stay, and its end is written behind them. Without any the block goes,
        and with it the empty line that belongs to it."""
        reader, dsml = self.reader(thinking), self.tokenizer.control[DSML]
        begin = end = 0  # of the markup that is open, and of the last whole call in it
        for i, token in enumerate(ids):
            was_open = reader.inside_markup
            events = reader.feed(token)
            if reader.inside_markup and not was_open:
                begin, end = i, 0
            if any(isinstance(event, CallFinished) for event in events):
                end = i + 1
        if not reader.inside_markup:
            return len(ids), []
        if not end:
            return self._before_block(ids, begin)
        last = max(i for i in range(end) if ids[i] == dsml) + 1
        _, tag, rest = self.tokenizer.decode(ids[last:end]).partition(">")
        closing = self.ids("\n" * ("\n" not in rest) + "</", DSML, "tool_calls>") if reader.inside_block else []
        if rest.strip():  # the token that ends the call holds more than its end
            return last, self.ids(f"invoke{tag}\n</", DSML, "tool_calls>")
        return end, closing

    def _before_block(self, ids: list[int], begin: int) -> tuple[int, list[int]]:
        """How many of the ids stand before a block whose first control token is at `begin`; and, where the token before
        it holds more than the block's "<", the ids of that."""
        while begin and not self.tokenizer.decode(ids[begin - 1 : begin]).strip(" \n<"):
            begin -= 1
        before = self.tokenizer.decode(ids[begin - 1 : begin]) if begin else ""
        return (begin - 1, self.ids(before[:-1])) if before.endswith("<") else (begin, [])

    def encode(
        self,
        messages: list[dict[str, Any]],
        *,
        thinking: bool = True,
        effort: str | None = None,
        drop_thinking: bool = True,
        context: list[dict[str, Any]] | None = None,
    ) -> list[int]:
        """The ids of a whole conversation as the model's own encoder writes it, ready for an answer.

        `messages` are those of a chat completion request: see `deepseek_v4_messages.conversation`. Raises ArgumentError
        for messages that have no such form.
        """
        return self.ids(*conversation(messages, self.texts, thinking, effort, drop_thinking, context))


class TurnReader:
    """Reads an assistant turn by its token ids: only control tokens are markup, and text that spells one stays text.
    So a call that the model quotes, from a file say, is not run."""

    def __init__(self, tokenizer: Tokenizer, thinking: bool) -> None:
        self._reader = DsmlReader(thinking, spelled=False)
        self._control = {i: text for text, i in tokenizer.control.items()}
        self._stream = tokenizer.stream()

    @property
    def inside_syntax(self) -> bool:
        """Whether the next token belongs to the markup of a call: see `DsmlReader`."""
        return self._reader.inside_syntax

    @property
    def inside_markup(self) -> bool:
        """Whether a call, or the block of the calls, has begun and not ended."""
        return self._reader.inside_markup or self._reader.inside_syntax

    @property
    def inside_block(self) -> bool:
        """Whether the block's opening tag has come and its end has not."""
        return self._reader.inside_block

    def feed(self, token: int) -> list[Event]:
        """The events that are certain with this token. Raises ArgumentError outside the vocabulary."""
        text = self._control.get(token)
        if text is None:
            return self._reader.feed(self._stream.feed(token))
        return [*self._reader.feed(self._stream.flush()), *self._reader.feed_control(text)]

    def finish(self) -> list[Event]:
        """The events of what was held back."""
        return [*self._reader.feed(self._stream.flush()), *self._reader.finish()]


def _turn(after: str | None) -> tuple[str, ...]:
    """What opens a user turn; one that follows another goes on in it."""
    return ("\n\n",) if after in ("user", "tool") else (USER,)
