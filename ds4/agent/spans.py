"""Span compaction in a chat: the tools `context_compact` and `expand`, and `Chat.compact_span` and `plan_span`."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ds4.chat_formats import ToolCall
from ds4.chat_formats.toolcalls import json_text
from ds4.compaction import span, spantool
from ds4.compaction.live import common, open_calls
from ds4.compaction.plan import Plan
from ds4.compaction.transaction import MakePlan, Outcome
from ds4.errors import ArgumentError, Busy, Ds4Error
from ds4.events import Event
from ds4.nodes import size_of

from .schema import fit
from .tools import Result

if TYPE_CHECKING:
    from .chat import Chat

REASON = "a finished part of the conversation"
LEAST_PART = 500  # characters of an archive that are shown in any case


class Spans:
    """The span compactions of one chat. `on`: the model has the tools."""

    EXPAND = spantool.EXPAND

    def __init__(self, chat: Chat, on: bool, options: spantool.SpanOptions) -> None:
        self.chat, self.on, self.options = chat, on, options
        self.drafts = spantool.Drafts()
        self._told = ""
        self._base = 0  # tokens of the context after the last compaction

    @property
    def schemas(self) -> tuple[dict[str, Any], ...]:
        return (spantool.SCHEMA, spantool.EXPAND_SCHEMA) if self.on else ()

    def handles(self, name: str) -> bool:
        """Whether a call of this name is ours."""
        return self.on and name in (spantool.NAME, spantool.EXPAND)

    def copy(self, chat: Chat) -> Spans:
        """For a fork of the chat."""
        other = Spans(chat, self.on, self.options)
        other.drafts.texts.update(self.drafts.texts)
        other._told, other._base = self._told, self._base
        return other

    def opened(self) -> None:
        """The conversation may be one that is gone on with: what was said before is not said again."""
        surface = self.chat.transcript.surface
        kept = [i for i, node in enumerate(surface) if node.role == "system" or node.kind == "checkpoint"]
        self._base = size_of(surface[: max(kept, default=-1) + 1])
        self.nudge()

    def compacted(self, size: int) -> None:
        """A compaction has brought the context to `size` tokens."""
        self._base, self._told = size, ""

    def nudge(self) -> str:
        """The reminder that the next result ends with: once for each bucket that the context has grown by."""
        if not self.on:
            return ""
        text = spantool.nudge(self.chat.live.used, self._base, self.options.volume_nudge_tokens) or ""
        new, self._told = text if text != self._told else "", text
        return f"\n{new}" if new else ""

    # ---- the tools

    def call(self, call: ToolCall) -> Generator[Event, None, tuple[Result, bool]]:
        """Runs one of our tools: its result, and whether a note has taken the place of the call already."""
        if call.name == spantool.EXPAND:
            return self._expand(call), False
        draft = None
        try:
            arguments = spantool.Request.read(call.arguments)
            self._recall()
            summary = self.drafts.text(arguments.summary)
            draft = self.drafts.keep(summary)
            found, make_plan = self._resolved(
                arguments.start, arguments.end, summary, arguments.include_active, call.id
            )
            outcome = yield from self._run(make_plan)
        except (ArgumentError, Busy) as error:
            return self._failed(call, str(error), draft), False
        if outcome.state != "done":
            return self._failed(call, outcome.reason, draft), False
        del self.drafts.texts[draft]
        noted = all(call.id != other.id for node in self.chat.transcript.surface for other in node.calls)
        return Result(json_text(self._result(found, outcome))), noted

    def _recall(self) -> None:
        """The drafts that calls on the surface name are in those calls as they first came, whoever wrote them."""
        transcript = self.chat.transcript
        for node in transcript.surface:
            for now, first in zip(node.calls, transcript.find(node.number).calls, strict=True):
                if now.name == spantool.NAME and now != first:
                    self.drafts.restore(str(now.arguments["summary"]), str(first.arguments["summary"]))

    def _failed(self, call: ToolCall, reason: str, draft: int | None) -> Result:
        """The result of a call that has changed nothing. Its long summary need not stay in the context twice."""
        transcript = self.chat.transcript
        if draft is not None:
            words = spantool.draft_name(draft)
            surface = span.stubbed(transcript.surface, call.id, words, self.chat.writer)
            if surface != list(transcript.surface):
                transcript.replace(surface, reason="draft")
            else:
                draft = None
        return Result(spantool.error_text(reason, draft), failed=True)

    def _expand(self, call: ToolCall) -> Result:
        try:
            arguments = fit(call.arguments, spantool.EXPAND_SCHEMA["parameters"])
            lines = self.chat.transcript.store.spill.read(arguments.pop("locator"))
            return Result(self._part(lines, arguments))
        except (Ds4Error, OSError) as error:
            return Result(f"{spantool.EXPAND} failed: {error}", failed=True)

    def _part(self, lines: Sequence[Mapping[str, Any]], arguments: dict[str, Any]) -> str:
        """As much of an archive as takes no more than half of the room that is left."""
        free = self.chat.live.ctx - self.chat.live.used - self.chat.reserve
        limit = spantool.EXPAND_CHARACTERS
        text = spantool.expand(lines, **arguments, limit=limit)
        while limit > LEAST_PART and len(self.chat.format.tokenizer.encode(text)) > free // 2:
            limit //= 2
            text = spantool.expand(lines, **arguments, limit=limit)
        return text

    # ---- the calls of the program

    def compact(self, start: str | None, end: str, summary: str, include_active: bool) -> dict[str, Any]:
        """See `Chat.compact_span`."""
        found, make_plan = self._resolved(start, end, summary, include_active)
        work = self._run(make_plan)
        try:
            while True:
                next(work)
        except StopIteration as ended:
            outcome: Outcome = ended.value
        if outcome.state != "done":
            raise outcome.error or ArgumentError(outcome.reason)
        return self._result(found, outcome)

    def plan(self, start: str | None, end: str, summary: str, include_active: bool) -> dict[str, Any]:
        """See `Chat.plan_span`."""
        live = self.chat.live
        found, make_plan = self._resolved(start, end, summary, include_active)
        plan = make_plan(self._locator())
        assert isinstance(plan, Plan)

        held = common(live.session.tokens, live.transcript.tokens)

        def nearest(position: int) -> int:
            return live.session.nearest_exact(min(position, held))

        return dataclasses.asdict(span.estimate(live.transcript.surface, found, plan, nearest, live.speed))

    # ---- both

    def _resolved(
        self, start: str | None, end: str, summary: str, include_active: bool, running: str | None = None
    ) -> tuple[span.Span, MakePlan]:
        """The span, and what makes its plan. Raises ArgumentError when it or the summary will not do."""
        live = self.chat.live
        surface = live.transcript.surface
        found = span.resolve(surface, start, end, running=open_calls(surface), include_active=include_active)
        number = live.transcript.checkpoints + 1

        def make_plan(locator: str | None) -> Plan:
            return span.plan_span(
                surface, found, live.writer, live.limits, summary, number=number, locator=locator, running_call=running
            )

        make_plan(self._locator())  # refused before anything has begun
        return found, make_plan

    def _locator(self) -> str | None:
        """Where the next span will be archived."""
        return self.chat.transcript.store.spill.upcoming() if self.options.auto_archive else None

    def _run(self, make_plan: MakePlan) -> Generator[Event, None, Outcome]:
        outcome = yield from self.chat.compactor.span(REASON, make_plan)
        yield from self.chat.after_compaction(outcome)
        return outcome

    def _result(self, found: span.Span, outcome: Outcome) -> dict[str, Any]:
        assert outcome.plan is not None
        number = outcome.plan.checkpoint.data["number"]
        return spantool.result(found, number, outcome.locator, outcome.archive_error)
