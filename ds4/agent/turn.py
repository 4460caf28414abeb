"""A turn: the model answers, its tools run, it goes on, until it stops or the user does.

Whatever ends a turn, the transcript is whole: a cut answer is closed as the format demands, a call always has a result.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ds4.chat_formats import ToolCall
from ds4.compaction import prompts
from ds4.compaction.boundaries import ControlWatch
from ds4.errors import Cancelled, PoolFull
from ds4.events import Event, Text, Thinking, ToolResult, TurnEnd
from ds4.events import ToolCall as Called
from ds4.nodes import Node
from ds4.sampling import Sampling, Token
from ds4.transcript import Held

from . import admission
from .tools import CANCELLED, Result

if TYPE_CHECKING:
    from .chat import Chat

SECURE = 64  # tokens that pages are set aside for at a time while the model writes
MAX_STEPS = 100  # answers of the model in one turn: a model that calls tools for ever has to be stopped
NOT_RUN = Result("cancelled by the user: this call was not run", failed=True)


@dataclass
class _Answer:
    """What the model wrote: `cut` means at the generation reserve, where a summary is still possible."""

    ids: list[int] = field(default_factory=list)
    finish: str = "cancelled"
    cut: bool = False
    node: Node | None = None


class Turn:
    """One turn of a chat; `run` yields its events."""

    def __init__(self, chat: Chat, sampling: Sampling) -> None:
        self.chat, self.sampling = chat, sampling
        self.live = chat.live
        self.transcript = chat.live.transcript
        self.format = chat.format
        self.start = time.perf_counter()
        self.generated = 0
        self.prompt_tokens = self.reused = 0

    def run(self) -> Generator[Event, None, None]:
        """Answers what the surface ends with."""
        finish = "cancelled"
        cancels = self.live.cancels
        try:
            finish = yield from self._steps()
        except Cancelled:
            pass
        if self.live.cancels != cancels:
            finish = "cancelled"
        yield self.end(finish)

    def end(self, finish: str) -> TurnEnd:
        """The event that ends the turn."""
        return TurnEnd(finish, self.prompt_tokens, self.reused, self.generated, time.perf_counter() - self.start)

    def _steps(self) -> Generator[Event, None, str]:
        cuts = 0  # in a row, without a finished answer between
        for _ in range(MAX_STEPS):
            answer = yield from self._answer()
            if answer.cut and not (answer.node and answer.node.calls):
                cuts += 1
                if cuts > 1 or not (yield from self._resume()):
                    return "length"
                continue
            cuts = 0
            if answer.node is not None and answer.node.calls:
                if not (yield from self._tools(answer.node, answer.finish == "cancelled")):
                    return "cancelled"
            elif answer.finish != "stop" or not self.chat.queued:
                return answer.finish
            yield from self._before_going_on()
        return "length"

    def _resume(self) -> Generator[Event, None, bool]:
        """Compacts an answer that was cut at the reserve and asks the model to go on; False when that failed."""
        outcome = yield from self.chat.compact_now("the room for the answer is used up")
        if outcome.state == "done":
            self.chat.append(self.chat.writer.user(prompts.RESUME, first=False, kind="note"))
        return outcome.state == "done"

    def _before_going_on(self) -> Generator[Event, None, None]:
        """What waits comes in, and a context that is nearly full is compacted, before the model continues."""
        while self.chat.queued:
            text = self.chat.queued[0]
            yield from self.chat.admit_user(text)
            self.chat.queued.popleft()
        limits = self.live.limits
        if self.chat.asked:
            self.chat.asked = False
            yield from self.chat.compact_now("asked for")
        elif limits is not None and limits.soft_fires(self.live.used):
            yield from self.chat.compact_now("the context is nearly full", automatic=True)

    # ---- the model

    def _answer(self) -> Generator[Event, None, _Answer]:
        """One answer of the model, appended to the transcript however it ends."""
        prefix = self.format.generation_prefix(self.chat.thinking)
        reused, evaluated = yield from self._prompt(prefix)
        if not self.prompt_tokens:
            self.prompt_tokens, self.reused = reused + evaluated, reused
        answer = _Answer()
        try:
            yield from self._sample(answer)
        finally:
            self.generated += len(answer.ids)
            answer.node = self._keep(answer)
        if answer.node is not None:
            for call in answer.node.calls:
                yield Called(call.id, call.name, call.arguments)
        return answer

    def _prompt(self, prefix: Sequence[int]) -> Generator[Event, None, tuple[int, int]]:
        """Brings the session to where the answer begins, with pages set aside for a summary."""
        try:
            return (yield from self.live.sync(prefix))
        finally:
            self.live.secured(SECURE)

    def _sample(self, answer: _Answer) -> Generator[Event, None, None]:
        """Streams the answer; `answer` grows with every token that is in the session."""
        session, start = self.live.session, self.live.session.pos
        shown = _Shown(self.chat)
        try:
            for token in self._tokens(answer):
                answer.finish = token.finish or answer.finish
                yield from shown.feed(token)
            yield from shown.rest(answer, session.tokens[start:])
        except PoolFull:
            if self.live.limits is None or session.pos == start:
                raise
            answer.finish, answer.cut = "length", True
        finally:
            answer.ids = session.tokens[start:]

    def _tokens(self, answer: _Answer) -> Generator[Token, None, None]:
        """The tokens of the answer: forced ones, else sampled ones up to the generation reserve."""
        session, limits = self.live.session, self.live.limits
        if self.chat.forced:
            yield from self._forced(self.chat.forced.popleft())
            return
        end = session.ctx if limits is None else session.ctx - limits.generation
        most = self.chat.max_tokens
        reserve = most is None or session.pos + most > end
        left = max(0, end - session.pos) if reserve else most or 0
        budget = _ThinkingBudget(self.chat)
        while True:
            forced = None
            for token in session.generate(self.sampling, max_tokens=left, stop_ids=self.format.stop_ids):
                left -= token.id is not None
                forced = budget.exceeded(token) if token.finish is None else None
                yield token
                if forced is not None:
                    break
                if left % SECURE == 0 and not self.live.secured(SECURE):
                    raise PoolFull("the pool has no room for a summary behind a longer answer.")
                if token.finish == "length" and reserve and limits is not None:
                    answer.cut = True
            if forced is None:
                return
            session.eval([forced])
            left -= 1

    def _forced(self, ids: Sequence[int]) -> Generator[Token, None, None]:
        """Tokens that were given, one by one, as if they had been sampled."""
        stream = self.chat.engine.tokenizer.stream()  # type: ignore[union-attr]
        session, cancels = self.live.session, self.live.session.cancels
        for i, token in enumerate(ids):
            if session.cancels != cancels:
                yield Token(None, stream.flush(), None, "cancelled", None)
                return
            session.eval([token])
            text = "" if token in self.format.stop_ids else stream.feed(token)
            yield Token(token, text, None, "stop" if i == len(ids) - 1 else None, None)

    def _keep(self, answer: _Answer) -> Node | None:
        """Appends the answer as it is, closed where it was cut. None when there is nothing to keep."""
        if not answer.ids:
            return None  # the question waits for an answer: retry gives one
        ids = answer.ids
        calls: tuple[ToolCall, ...] = ()
        if self.chat.has_tools:
            if answer.finish != "stop":
                ids = self._without_open_call(ids)
            parsed = self.format.parse(self.format.tokenizer.decode(ids))
            stem = f"call-{self.transcript.seq + 1}"
            calls = tuple(replace(call, id=f"{stem}-{i}") for i, call in enumerate(parsed.tool_calls, 1))
        node = self.chat.writer.sampled(ids, calls, answer.finish, thinking=self.chat.thinking)
        return self.transcript.append(node)[0]

    def _without_open_call(self, ids: list[int]) -> list[int]:
        """The ids up to a tool call that was cut in the middle."""
        text = self.format.tokenizer.decode(ids)
        openers = [b.before + b.text for b in self.format.boundaries if b.kind == "tool"]
        at = max((text.rfind(opener) for opener in openers), default=-1)
        if at < 0 or (self.format.parse(text[at:]).tool_calls and not self.format.parse(text[at:]).faults):
            return ids
        stream = self.format.tokenizer.stream()
        length = 0
        for i, token in enumerate(ids):
            length += len(stream.feed(token))
            if length > at:
                return ids[:i]
        return ids

    # ---- its tools

    def _tools(self, node: Node, cancelled: bool) -> Generator[Event, None, bool]:
        """Runs the calls of an answer in order and appends each result as it comes; False when the user cancelled."""
        calls = list(node.calls)
        at = 0
        while at < len(calls):
            if self.chat.spans.handles(calls[at].name) and not cancelled:
                result = yield from self.chat.spans.call(calls[at])
                if result is not None:
                    yield from self._admit(node, at, result)
                at += 1
                continue
            group = at
            while group < len(calls) and (cancelled or not self.chat.spans.handles(calls[group].name)):
                group += 1
            for i, result in self._run(calls[at:group], cancelled):
                yield from self._admit(node, at + i, result)
            at = group
            cancelled = cancelled or self.chat.cancelled.is_set()
        return not cancelled

    def _run(self, calls: Sequence[ToolCall], cancelled: bool) -> Generator[tuple[int, Result], None, None]:
        """The results of calls that the user allows. They come in the order of the calls: the format wants them so."""
        if cancelled:
            yield from ((i, NOT_RUN) for i in range(len(calls)))
            return
        results = {i: self.chat.refused(call) for i, call in enumerate(calls)}
        allowed = [i for i, refused in results.items() if refused is None]
        done: dict[int, Result] = {i: refused for i, refused in results.items() if refused is not None}
        running = self.chat.toolbox.call_all([calls[i] for i in allowed], self.chat.cancelled)
        following = 0
        for index, result in running:
            done[allowed[index]] = result
            while following in done:
                yield following, done[following]
                following += 1
        yield from ((i, done.get(i, CANCELLED)) for i in range(following, len(calls)))

    def _admit(self, node: Node, index: int, result: Result) -> Generator[Event, None, None]:
        """Appends a result, whatever it takes; see `admission`. Raises Cancelled when the user ends a compaction that
        it needs: it then waits in the slot."""
        call = node.calls[index]
        yield ToolResult(call.id, result.text)
        held = Held("tool", result.text + self.chat.spans.nudge(), call.id, index, len(node.calls))
        if not self.chat.fits(len(admission.written(self.chat, held))):
            self.transcript.hold(held)
            outcome = yield from self.chat.compact_now("a tool result does not fit", automatic=True)
            if outcome.state == "cancelled":
                raise Cancelled("the compaction that a tool result needs was cancelled; the result waits.")
        yield from admission.admit_result(self.chat, held)


class _Shown:
    """What of an answer the user sees: thinking apart from text, and a call as an event instead of its raw text."""

    def __init__(self, chat: Chat) -> None:
        self._thinking = {
            b.id: "</" not in b.text for b in chat.format.boundaries if b.kind == "think" and b.id is not None
        }
        self._inside = False
        self._chat = chat
        self._watch = ControlWatch([b for b in chat.format.boundaries if b.kind == "tool"] if chat.has_tools else [])
        self._text = ""
        self._seen = 0

    def feed(self, token: Token) -> Generator[Event, None, None]:
        if token.id in self._thinking:
            self._inside = self._thinking[token.id]
        elif self._inside:
            if token.text:
                yield Thinking(token.text)
        else:
            self._text += token.text
            free = self._watch.feed(-1 if token.id is None else token.id, token.text)
            self._seen += len(free)
            if free:
                yield Text(free)

    def rest(self, answer: _Answer, ids: Sequence[int]) -> Generator[Event, None, None]:
        """What was held back and turned out to be no call."""
        free = self._watch.flush()
        if self._watch.ended is not None:
            parsed = self._chat.format.parse(self._chat.format.tokenizer.decode(list(ids)))
            free = self._text[self._seen :] if not parsed.tool_calls else ""
        if free:
            yield Text(free)


class _ThinkingBudget:
    """Bounds one thinking block: says which token closes it when it has become too long."""

    def __init__(self, chat: Chat) -> None:
        policy = chat.live.policy
        self._most = policy.thinking_budget if policy is not None else None
        tags = {"</" in b.text: b.id for b in chat.format.boundaries if b.kind == "think"}
        self._open, self._close = tags.get(False), tags.get(True)
        self._inside, self._count = False, 0

    def exceeded(self, token: Token) -> int | None:
        if self._most is None or self._close is None:
            return None
        if token.id in (self._open, self._close):
            self._inside, self._count = token.id == self._open, 0
        self._count += self._inside
        return self._close if self._inside and self._count > self._most else None
