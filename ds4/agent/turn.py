"""A turn: the model answers, its tools run, it goes on, until it stops or the user does.

Whatever ends a turn, the transcript is whole: a cut answer is closed as the format demands, a call always has a result.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ds4.chat_formats import ToolCall
from ds4.compaction import prompts
from ds4.compaction.boundaries import ControlWatch
from ds4.errors import Cancelled, PoolFull
from ds4.events import Event, Notice, Text, Thinking, ToolResult, TurnEnd
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
UNREADABLE = (
    "Internal note, not the user: {faults} It was not run. Write the call again in the form that was described with "
    "the tools, or go on without it."
)


@dataclass
class _Answer:
    """What the model wrote. `thinks`: the prefix before it has left a thinking block open. `cut`: at the generation
    reserve, where a summary is still possible. `node`, made of the first `kept` ids and what closes them, is what the
    transcript has of it. `faults`: a sentence for each call that cannot be read."""

    thinks: bool
    ids: list[int] = field(default_factory=list)
    finish: str = "cancelled"
    cut: bool = False
    kept: int = 0
    node: Node | None = None
    faults: tuple[str, ...] = ()

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        return self.node.calls if self.node is not None else ()


class Turn:
    """One turn of a chat; `run` yields its events."""

    def __init__(self, chat: Chat, sampling: Sampling) -> None:
        self.chat, self.sampling = chat, sampling
        self.live = chat.live
        self.transcript = chat.live.transcript
        self.format = chat.format
        self.start = time.perf_counter()
        self.cancels = chat.live.cancels
        self.generated = 0
        self.prompt_tokens = self.reused = 0

    @property
    def cancelled(self) -> bool:
        """Whether the user has ended the turn."""
        return self.live.cancels != self.cancels

    def run(self) -> Generator[Event, None, None]:
        """Answers what the surface ends with."""
        finish = "cancelled"
        with suppress(Cancelled):
            finish = yield from self._steps()
            if self.chat.asked and not self.cancelled:
                yield from self._compact("asked for")
        yield from self.chat.store_notice()
        yield self.end("cancelled" if self.cancelled else finish)

    def end(self, finish: str) -> TurnEnd:
        """The event that ends the turn."""
        return TurnEnd(finish, self.prompt_tokens, self.reused, self.generated, time.perf_counter() - self.start)

    def _steps(self) -> Generator[Event, None, str]:
        cuts = faulty = 0  # in a row: cut answers, and answers with a call that cannot be read
        for _ in range(MAX_STEPS):
            if self.cancelled:  # while no call of the core was there to be ended
                return "cancelled"
            answer = yield from self._answer()
            if answer.calls and not (yield from self._tools(answer)):
                return "cancelled"
            if answer.cut and not answer.calls:
                cuts += 1
                if cuts > 1 or not (yield from self._resume(answer)):
                    return "length"
                continue
            cuts, faulty = 0, faulty + 1 if answer.faults and answer.finish == "stop" else 0
            again = faulty == 1 and (yield from self._tell(answer.faults))
            if not answer.calls and not again and (answer.finish != "stop" or not self.chat.queued):
                return answer.finish
            yield from self._before_going_on()
        yield Notice(f"the model has answered {MAX_STEPS} times: the turn ends here; send a message to go on.")
        return "length"

    def _resume(self, answer: _Answer) -> Generator[Event, None, bool]:
        """Compacts an answer that was cut at the reserve and asks the model to go on; False when that failed."""
        done = yield from self._compact("the room for the answer is used up")
        if done and answer.node is not None:
            self.chat.append(self.chat.writer.user(prompts.RESUME, first=False, kind="note"))
        return done

    def _tell(self, faults: Sequence[str]) -> Generator[Event, None, bool]:
        """Tells the model what is wrong with its calls; False when there is no room for that."""
        note = self.chat.writer.user(UNREADABLE.format(faults=" ".join(faults)), first=False, kind="note")
        fits = self.chat.fits(len(note))
        if fits:
            self.chat.append(note)
            yield Notice("the model wrote a tool call that cannot be read, and is asked to write it again.")
        return fits

    def _before_going_on(self) -> Generator[Event, None, None]:
        """What waits comes in, and a context that is nearly full is compacted, before the model continues: for results
        that was looked at when they came."""
        yield from self.chat.admit_queued()
        if self.chat.asked and not admission.cuts_unseen(self.chat):
            yield from self._compact("asked for")
        elif self.transcript.surface[-1].role != "tool" and admission.soft_due(self.chat):
            yield from self._compact("the context is nearly full", automatic=True)

    def _compact(self, reason: str, automatic: bool = False) -> Generator[Event, None, bool]:
        """A compaction between two steps; False when it failed. Raises Cancelled when the user ended it."""
        self.chat.asked = False
        outcome = yield from self.chat.compact_now(reason, automatic)
        if outcome.state == "cancelled":
            raise Cancelled("the compaction was cancelled, and the turn with it.")
        return outcome.state == "done"

    # ---- the model

    def _answer(self) -> Generator[Event, None, _Answer]:
        """One answer of the model, appended to the transcript however it ends."""
        prefix = self.format.generation_prefix(self.chat.thinking)
        try:
            reused, evaluated = yield from self._prompt(prefix)
        except PoolFull:
            if self.live.limits is None:
                raise
            yield from self._compact("the pool has no room for the context", automatic=True)
            reused, evaluated = yield from self._prompt(prefix)
        if not self.prompt_tokens:
            self.prompt_tokens, self.reused = reused + evaluated, reused
        answer = _Answer(self.chat.writer.thinks(prefix))
        shown = _Shown(self.chat, answer.thinks)
        try:
            yield from self._sample(answer, shown)
        finally:
            self.generated += len(answer.ids)
            self._keep(answer)
        yield from shown.rest(answer)
        for call in answer.calls:
            yield Called(call.id, call.name, call.arguments)
        return answer

    def _prompt(self, prefix: Sequence[int]) -> Generator[Event, None, tuple[int, int]]:
        """Brings the session to where the answer begins, with pages set aside for a summary."""
        try:
            return (yield from self.live.sync(prefix))
        finally:
            self.live.secured(SECURE)

    def _sample(self, answer: _Answer, shown: _Shown) -> Generator[Event, None, None]:
        """Streams the answer; its ids are those that the session has in the end."""
        session, start = self.live.session, self.live.session.pos
        try:
            for token in self._tokens(answer):
                answer.finish = token.finish or answer.finish
                yield from shown.feed(token)
        except PoolFull:
            if self.live.limits is None:
                raise
            answer.finish, answer.cut = "length", True
        finally:
            answer.ids = session.tokens[start:]

    def _tokens(self, answer: _Answer) -> Generator[Token, None, None]:
        """The tokens of the answer: forced ones, else sampled ones, up to the generation reserve."""
        session, limits, most = self.live.session, self.live.limits, self.chat.max_tokens
        room = max(0, session.ctx - session.pos - (limits.generation if limits is not None else self.chat.closing))
        if self.chat.forced:
            for token in self._forced(self.chat.forced.popleft(), room):
                answer.cut = limits is not None and token.finish == "length"
                yield token
            return
        left = room if most is None else min(most, room)
        reserve = limits is not None and left == room
        budget, syntax = _ThinkingBudget(self.chat, answer.thinks), _Syntax(self.chat, answer.thinks)
        while True:
            closing = None
            for token in session.generate(
                self.sampling, max_tokens=left, stop_ids=self.format.stop_ids, greedy=syntax.inside
            ):
                left -= token.id is not None
                syntax.feed(token.id)
                answer.cut = reserve and token.finish == "length"
                yield token
                if token.finish is None:
                    closing = budget.exceeded(token)
                    if closing is not None:
                        break
                    if left % SECURE == 0 and not self.live.secured(SECURE):
                        raise PoolFull("the pool has no room for a summary behind a longer answer.")
            if closing is None:
                return
            session.eval([closing])
            syntax.feed(closing)
            left -= 1
            yield Token(closing, "", None, None, None)

    def _forced(self, ids: Sequence[int], room: int) -> Generator[Token, None, None]:
        """At most `room` tokens that were given, one by one, as if they had been sampled."""
        stream = self.chat.engine.tokenizer.stream()  # type: ignore[union-attr]
        session, cancels = self.live.session, self.live.session.cancels
        for i, token in enumerate(ids):
            if i == room or session.cancels != cancels:
                yield Token(None, stream.flush(), None, "length" if i == room else "cancelled", None)
                return
            session.eval([token])
            text = "" if token in self.format.stop_ids else stream.feed(token)
            yield Token(token, text, None, "stop" if i == len(ids) - 1 else None, None)

    def _keep(self, answer: _Answer) -> None:
        """Appends the answer as it is, closed where it was cut. Where there is nothing to keep, the question waits for
        an answer: retry gives one."""
        ids, kept = answer.ids, len(answer.ids)
        if self.chat.has_tools and answer.finish != "stop":
            kept, closing = self.format.without_open_call(ids, answer.thinks)
            ids = [*ids[:kept], *closing]
        if not ids:
            return
        parsed = self.format.parse_ids(ids, answer.thinks)
        calls: tuple[ToolCall, ...] = ()
        if self.chat.has_tools:
            stem = f"call-{self.transcript.seq + 1}"
            calls = tuple(replace(call, id=f"{stem}-{i}") for i, call in enumerate(parsed.tool_calls, 1))
            answer.faults = parsed.faults
        node = self.chat.writer.sampled(ids, parsed, calls, answer.finish, thinking=self.chat.thinking)
        answer.kept, answer.node = kept, self.transcript.append(node)[0]

    # ---- its tools

    def _tools(self, answer: _Answer) -> Generator[Event, None, bool]:
        """Runs the calls of an answer and appends each result as it comes; False when the user cancelled. Whatever ends
        it early, every call has a result then, unless one waits in the slot."""
        node, spans = answer.node, self.chat.spans
        assert node is not None
        calls, at = node.calls, 0
        known: dict[int, Result] = {}
        cancelled = answer.finish == "cancelled"
        try:
            while at < len(calls):
                cancelled = cancelled or self.cancelled
                if not cancelled and spans.handles(calls[at].name):
                    yield from self._span(node, at)
                    at += 1
                    continue
                ours = range(at, len(calls)) if not cancelled else ()
                group = next((i for i in ours if spans.handles(calls[i].name)), len(calls))
                for i in self._run(calls, range(at, group), known, cancelled):
                    yield from self._admit(node, i, known[i])
                at = group
        except BaseException:
            self.chat.settle_now(node, known)
            raise
        return not (cancelled or self.cancelled)

    def _run(
        self, calls: Sequence[ToolCall], which: range, known: dict[int, Result], cancelled: bool
    ) -> Generator[int, None, None]:
        """Runs the calls that the user allows and puts their results into `known`; yields the index of each in the
        order of the calls, as the format wants them."""
        allowed = []
        for i in which:
            refused = NOT_RUN if cancelled else self.chat.refused(calls[i])
            if refused is None:
                allowed.append(i)
            else:
                known[i] = refused
        following = which.start
        for index, result in self.chat.toolbox.call_all([calls[i] for i in allowed], self.chat.cancelled):
            known[allowed[index]] = result
            while following in known:
                yield following
                following += 1
        for i in range(following, which.stop):
            known.setdefault(i, CANCELLED)
            yield i

    def _admit(self, node: Node, index: int, result: Result) -> Generator[Event, None, None]:
        """Appends a result, whatever it takes: see `admission`."""
        call = node.calls[index]
        held = Held("tool", result.text + self.chat.spans.nudge(), call.id, index, len(node.calls))
        here = admission.append_now(self.chat, held)
        if not here:
            self.transcript.hold(held)
        yield ToolResult(call.id, result.text)
        if not here:
            yield from admission.admit(self.chat, held)

    def _span(self, node: Node, index: int) -> Generator[Event, None, None]:
        """Runs a call of the span tools, whose result may be a note in its place."""
        call = node.calls[index]
        result, noted = yield from self.chat.spans.call(call)
        if noted:
            yield ToolResult(call.id, result.text)
        else:
            yield from self._admit(node, index, result)


class _Shown:
    """What of an answer the user sees: thinking apart from text, and a call as an event instead of its raw text."""

    def __init__(self, chat: Chat, thinks: bool) -> None:
        self._format, self._tags, self._inside = chat.format, chat.format.thinking_tags, thinks
        self._watch = ControlWatch([b for b in chat.format.boundaries if b.kind == "tool"] if chat.has_tools else [])
        self._pieces: list[str] = []  # the text of each token; "" for thinking
        self._seen = 0

    def feed(self, token: Token) -> Generator[Event, None, None]:
        thinking = self._inside or token.id in self._tags
        self._pieces.append("" if thinking else token.text)
        if token.id in self._tags:
            self._inside = self._tags[token.id]
        elif thinking and token.text:
            yield Thinking(token.text)
        elif not thinking:
            free = self._watch.feed(-1 if token.id is None else token.id, token.text)
            self._seen += len(free)
            if free:
                yield Text(free)

    def rest(self, answer: _Answer) -> Generator[Event, None, None]:
        """What was held back and is no call."""
        cut = answer.kept < len(answer.ids)
        held = "".join(self._pieces[: answer.kept] if cut else self._pieces)[self._seen :]
        if answer.calls:
            held = self._without_calls(answer, held)
        if held:
            yield Text(held)

    def _without_calls(self, answer: _Answer, held: str) -> str:
        """What was held back without the calls in it, read by its ids where it begins with a token."""
        seen = at = 0
        while at < answer.kept and (seen < self._seen or not self._pieces[at]):
            seen, at = seen + len(self._pieces[at]), at + 1
        if seen != self._seen:
            return self._format.parse(held).content
        return self._format.parse_ids(answer.ids[at : answer.kept]).content


class _ThinkingBudget:
    """Bounds one thinking block: says which token closes it when it has become too long."""

    def __init__(self, chat: Chat, thinks: bool) -> None:
        policy = chat.live.policy
        self._most = policy.thinking_budget if policy is not None else None
        self._tags = chat.format.thinking_tags
        self._close = next((id for id, opens in self._tags.items() if not opens), None)
        self._inside, self._count = thinks, 0

    def exceeded(self, token: Token) -> int | None:
        if token.id in self._tags:
            self._inside, self._count = self._tags[token.id], 0
            return None
        self._count += self._inside
        if not self._inside or self._most is None or self._count < self._most:
            return None
        self._inside = False
        return self._close


class _Syntax:
    """Says where an answer is inside of a call's markup, which is then written greedily, if the chat wants that."""

    def __init__(self, chat: Chat, thinks: bool) -> None:
        self._reader = chat.format.reader(thinks) if chat.greedy_calls and chat.has_tools else None

    def inside(self) -> bool:
        return self._reader is not None and self._reader.inside_syntax

    def feed(self, token: int | None) -> None:
        if self._reader is not None and token is not None:
            self._reader.feed(token)
