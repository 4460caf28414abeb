"""Chat: a conversation on one session. The token ids of its messages are the truth; text is never tokenised again.

>>> chat = ds4.Chat(ds4.Engine("smollm2-135m"), system="You answer in one sentence.")
>>> chat.ask("Why is the sky blue?")
>>> chat.undo()             # the context stands where it stood before the question, nothing is evaluated again
"""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from types import TracebackType

from . import chat_formats, models
from .chat_formats import ChatFormat, Message
from .engine import Engine, Session
from .errors import ArgumentError, Cancelled, ContextFull, UnsupportedError
from .sampling import Sampling

PIECE = 256  # tokens between two Prefill events
RETRY_TEMPERATURE = 0.8  # a greedy answer would only come again
FILLER = "Noted."  # the answer to a question that has none, where turns must alternate


@dataclass(frozen=True)
class Prefill:
    """`done` of `total` tokens of the prompt are in."""

    done: int
    total: int
    type: str = field(default="prefill", init=False)


@dataclass(frozen=True)
class Thinking:
    """A piece of a thinking block."""

    text: str
    type: str = field(default="thinking", init=False)


@dataclass(frozen=True)
class Text:
    """A piece of the answer."""

    text: str
    type: str = field(default="text", init=False)


@dataclass(frozen=True)
class TurnEnd:
    """The turn is over: `finish` is "stop", "length" or "cancelled"; of `prompt_tokens` `reused` were in the session
    already; `generated` tokens came in `seconds`."""

    finish: str
    prompt_tokens: int
    reused: int
    generated: int
    seconds: float
    type: str = field(default="turn_end", init=False)


Event = Prefill | Thinking | Text | TurnEnd


@dataclass(frozen=True)
class _Node:
    role: str
    ids: tuple[int, ...]


def default_format(engine: Engine) -> str | None:
    """The chat format of an engine's model: by its entry in models/, else by the control tokens that its template
    names, else None."""
    model = models.describe(engine.model)
    if model is not None and model.chat_format:
        return model.chat_format
    return chat_formats.detect(engine.checkpoint, engine.tokenizer) if engine.tokenizer is not None else None


class Chat:
    """A conversation: messages, the session that holds them, and the ways back. A context manager; closing it closes
    its session.

    `ctx` as for `Engine.session`; `system`: the system prompt; `chat_format`: a name of `ds4.chat_formats`, default
    the model's own; `sampling`: default the model's own, else greedy; `max_tokens`: most tokens of an answer.
    Everything is kept in memory.

    Raises ArgumentError (no chat format is known for the model: the text lists the names), UnsupportedError,
    ContextFull.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        ctx: int | None = None,
        system: str | None = None,
        chat_format: str | None = None,
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
    ) -> None:
        if engine.tokenizer is None:
            raise UnsupportedError(f"{engine.model} has no tokenizer, so it takes token ids only; use Engine.session.")
        name = chat_format or default_format(engine)
        if name is None:
            known = ", ".join(chat_formats.names())
            raise ArgumentError(
                f"{engine.model} does not say how messages are written; give chat_format=, one of: {known}."
            )
        model = models.describe(engine.model)
        self.engine = engine
        self.format: ChatFormat = chat_formats.get(name, engine.tokenizer, engine.checkpoint)
        self.sampling = sampling or Sampling(**(model.defaults if model is not None else {}))
        self.max_tokens = max_tokens
        head = self.format.begin()
        self._head: str | None = None  # a system prompt that belongs to the first user message
        if "system" not in self.format.roles:
            self._head = system
        elif system is not None:
            head += self.format.render(Message("system", system))
        self._nodes = [_Node("system", tuple(head))] if head else []
        self.session: Session = engine.session(ctx)
        try:
            self._fit(self._tokens() + self._head_ids())
        except ContextFull:
            self.session.close()
            raise

    def ask(self, text: str) -> str:
        """Runs a whole turn and returns the answer's text."""
        return "".join(event.text for event in self.send(text) if isinstance(event, Text))

    def send(self, text: str) -> Generator[Event, None, None]:
        """The events of a turn. Nothing happens until the first one is read; closing it early cancels, and the turn
        is kept as it was cut. Raises ContextFull when the message does not fit: the conversation is then as it was."""
        yield from self._turn(self._question(text), self.sampling)

    def retry(self, seed: int | None = None) -> Generator[Event, None, None]:
        """The last answer again, with another seed. A greedy conversation is sampled at temperature 0.8 for this
        turn."""
        users = [i for i, node in enumerate(self._nodes) if node.role == "user"]
        if not users:
            raise ArgumentError("there is no answer to try again; ask something first.")
        user = self._nodes[users[-1]]
        del self._nodes[users[-1] :]
        again = self.sampling if self.sampling.temperature else replace(self.sampling, temperature=RETRY_TEMPERATURE)
        yield from self._turn(user, replace(again, seed=seed))

    def undo(self) -> None:
        """Goes back to before the last user message. Raises ArgumentError when there is none."""
        users = [i for i, node in enumerate(self._nodes) if node.role == "user"]
        if not users:
            raise ArgumentError("there is no turn to undo.")
        del self._nodes[users[-1] :]
        self.session.truncate(self.session.nearest_exact(_common(self.session.tokens, self._tokens())))

    def fork(self) -> Chat:
        """A second conversation that starts where this one stands and shares its pages."""
        other = object.__new__(Chat)
        other.__dict__.update(self.__dict__)
        other._nodes = list(self._nodes)
        other.session = self.session.fork()
        return other

    def close(self) -> None:
        """Closes the session. Safe to call twice."""
        self.session.close()

    def __enter__(self) -> Chat:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- one turn

    def _tokens(self) -> list[int]:
        return [token for node in self._nodes for token in node.ids]

    def _question(self, text: str) -> _Node:
        """The node of a user message."""
        role, ids = self._nodes[-1].role if self._nodes else None, []
        if not any(node.role == "user" for node in self._nodes):
            text = self.format.first_user(self._head, text)
        elif role == "user" and self.format.alternating:
            ids, role = self.format.render(Message("assistant", FILLER), role), "assistant"
        return _Node("user", tuple(ids + self.format.render(Message("user", text), role)))

    def _head_ids(self) -> list[int]:
        """A first user message that holds nothing but the system prompt, where that is its place."""
        return self.format.render(Message("user", self.format.first_user(self._head, ""))) if self._head else []

    def _system_end(self) -> int:
        """Where the tokens of the system prompt end, 0 without one."""
        end = len(self._nodes[0].ids) if self._nodes[0].role == "system" else 0
        first = next(node for node in self._nodes if node.role == "user")
        return end + _common(list(first.ids), self._head_ids())

    def _fit(self, tokens: list[int]) -> None:
        """Raises ContextFull unless the tokens and one more fit."""
        if len(tokens) >= self.session.ctx:
            error = ContextFull(
                f"the conversation with this message has {len(tokens)} tokens and needs one more to answer, but ctx is "
                f"{self.session.ctx}; shorten it, undo a turn, or use a larger ctx."
            )
            error.wanted, error.ctx = len(tokens) + 1, self.session.ctx
            raise error

    def _turn(self, user: _Node, sampling: Sampling) -> Generator[Event, None, None]:
        start = time.perf_counter()
        prefix = self.format.generation_prefix()
        before = self._tokens()
        prompt = before + list(user.ids) + prefix
        self._fit(prompt)
        self._nodes.append(user)
        answer: list[int] = []
        finish, reused = "cancelled", 0
        try:
            reused = yield from self._prefill(before, prompt)
            finish = yield from self._generate(sampling, prefix, answer)
        except Cancelled:
            pass
        finally:
            if answer:  # else the question waits for an answer: retry gives one
                whole = prefix + answer
                self._nodes.append(_Node("assistant", tuple(whole + self.format.end_turn(whole))))
        yield TurnEnd(finish, len(prompt), reused, len(answer), time.perf_counter() - start)

    def _prefill(self, before: list[int], prompt: list[int]) -> Generator[Event, None, int]:
        """Brings the session to `prompt`; automatic marks stand where the system prompt and the turns end. Returns
        how many tokens were reused."""
        held = _common(self.session.tokens, prompt)
        system_end = self._system_end()
        edges = {len(before), system_end}
        evaluated, at, cancels = 0, held, self.session.cancels
        while at < len(prompt) or not self.session.logits_valid or self.session.pos != len(prompt):
            at = min([edge for edge in edges if edge > at] + [at + PIECE, len(prompt)])
            synced = self.session.sync(prompt[:at])
            evaluated += synced.evaluated
            if at in edges:
                self.session.mark_auto(pinned=at == system_end)
            yield Prefill(at, len(prompt))
            if self.session.cancels != cancels:  # between two calls of the core, which ends those in progress only
                raise Cancelled("the turn was cancelled while its prompt was evaluated.")
        return max(0, len(prompt) - evaluated)

    def _generate(self, sampling: Sampling, prefix: list[int], answer: list[int]) -> Generator[Event, None, str]:
        """Streams the answer; `answer` grows with every token that is in the session. `prefix` may open a thinking
        block."""
        thinking = {
            boundary.id: "</" not in boundary.text
            for boundary in self.format.boundaries
            if boundary.kind == "think" and boundary.id is not None
        }
        inside = next((thinking[i] for i in reversed(prefix) if i in thinking), False)
        start = self.session.pos
        finish = "cancelled"
        try:
            for token in self.session.generate(sampling, max_tokens=self.max_tokens, stop_ids=self.format.stop_ids):
                finish = token.finish or finish
                if token.id in thinking:
                    inside = thinking[token.id]
                elif token.text:
                    yield Thinking(token.text) if inside else Text(token.text)
        finally:
            answer.extend(self.session.tokens[start:])
        return finish


def _common(a: list[int], b: list[int]) -> int:
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n
