"""Chat: a conversation with a model, its tools, and its compactions.

>>> chat = ds4.Chat(ds4.Engine("smollm2-135m"), system="You answer in one sentence.")
>>> chat.ask("Why is the sky blue?")
>>> chat.undo()             # the context stands where it stood before the question, nothing is evaluated again
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any

from ds4 import chat_formats, models
from ds4.chat_formats import ChatFormat, ToolCall
from ds4.compaction import prompts
from ds4.compaction.background import Background
from ds4.compaction.live import Live, common, open_calls
from ds4.compaction.policy import CompactionPolicy
from ds4.compaction.spantool import SpanOptions
from ds4.compaction.transaction import Compactor, Outcome
from ds4.engine import Engine, Session
from ds4.errors import ArgumentError, Busy, Cancelled, ContextFull, Ds4Error, UnsupportedError
from ds4.events import Event, Notice, Text
from ds4.nodes import Node, Writer, size_of
from ds4.sampling import Sampling
from ds4.store import MemoryStore, Store
from ds4.transcript import Held, Transcript

from .admission import admit, append_whole, soft_due
from .spans import Spans
from .tools import Result, Tool, Toolbox
from .turn import Turn

RETRY_TEMPERATURE = 0.8  # a greedy answer would only come again
LOST = "the turn was cut before the result came; call the tool again if it is still needed."
REFUSED = "the user does not allow this call; ask what to do instead, or go on without it."
NOBODY = "this call needs the user's permission, and nobody is there to be asked: it was not run. Go on without it."


def calls_tools(engine: Engine, chat_format: str | None = None) -> bool | None:
    """Whether a chat format, by default the model's own, has tool calls; None where there is no format to be asked."""
    name = chat_format or default_format(engine)
    if name is None or engine.tokenizer is None:
        return None
    return chat_formats.get(name, engine.tokenizer, engine.checkpoint).tools


def default_format(engine: Engine) -> str | None:
    """The chat format of an engine's model: by its entry in models/, else by the control tokens that its template
    names, else None."""
    return _format_of(engine, models.describe(engine.model))


def _format_of(engine: Engine, model: models.Model | None) -> str | None:
    if model is not None and model.chat_format:
        return model.chat_format
    return chat_formats.detect(engine.checkpoint, engine.tokenizer) if engine.tokenizer is not None else None


class Chat:
    """A conversation: its transcript, the session that holds it, and the ways on and back. A context manager; closing
    it closes its session.

    `ctx` as for `Engine.session`. `system`: the system prompt. `tools`: plain callables and `Tool`s; `allow(call,
    line)` says whether a tool that asks for permission may run, `line` is what it would do (None: such calls are
    refused). `chat_format`: a name of `ds4.chat_formats`, default the model's own. `sampling`: default the model's own,
    else greedy. `max_tokens`: most tokens of an answer. `policy`: when and how it compacts itself, None = never by
    itself. `store`: the folder that keeps the conversation, which is gone on with when it holds one; None = everything
    in memory. `thinking`: whether a model with thinking blocks may open one. `drop_thinking`: thinking leaves the
    context when the next message arrives, but not where a model with tools wants to keep it (DeepSeek V4). `effort`: of
    reasoning, one that the format has; it stands at the head of the conversation. `greedy_calls`: the markup of a call
    is written greedily, its arguments with `sampling`. `span_tools`: the model gets `context_compact` and `expand`.
    `notes`: gives texts about what is alive outside of the conversation, which are restated after a compaction.
    `auto_archive`: what a compaction replaces goes to the spill. `volume_nudge_tokens`: the growth after which a model
    with span tools is reminded of them, 0 = never. `about`: JSON that the first event of a new store keeps for the
    program, see `transcript.info["about"]`.

    Raises ArgumentError (among others: no chat format is known for the model, it does not have the effort or cannot
    tell markup while it is written, or ctx is too small for the policy; the text has the numbers), UnsupportedError,
    ContextFull, StoreBusy.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        ctx: int | None = None,
        system: str | None = None,
        tools: Iterable[Tool | Callable[..., Any]] = (),
        allow: Callable[[ToolCall, str], bool] | None = None,
        chat_format: str | None = None,
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
        policy: CompactionPolicy | None = CompactionPolicy(),  # noqa: B008
        store: str | os.PathLike[str] | None = None,
        thinking: bool = True,
        drop_thinking: bool = False,
        effort: str | None = None,
        greedy_calls: bool = False,
        span_tools: bool = False,
        notes: Callable[[], Sequence[str]] = list,
        auto_archive: bool = True,
        volume_nudge_tokens: int = 50_000,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        if engine.tokenizer is None:
            raise UnsupportedError(f"{engine.model} has no tokenizer, so it takes token ids only; use Engine.session.")
        model = models.describe(engine.model)
        self.engine = engine
        self.sampling = sampling or Sampling(**(model.defaults if model is not None else {}))
        self.max_tokens, self.allow, self.thinking, self.drop_thinking = max_tokens, allow, thinking, drop_thinking
        self.greedy_calls = greedy_calls
        self.spans = Spans(self, span_tools, SpanOptions(auto_archive, volume_nudge_tokens))
        self.toolbox = Toolbox(tools, others=[schema["name"] for schema in self.spans.schemas])
        schemas = (*self.toolbox.schemas, *self.spans.schemas)
        self.queued: deque[str] = deque()
        """Messages that come in at the next safe point of the turn in progress, or with the next one."""
        self.forced: deque[list[int]] = deque()
        self.about = dict(about or {})
        self.cancelled = threading.Event()
        self._busy = threading.Lock()
        self._set_up(model, ctx, system, schemas, chat_format, effort, policy, store, notes)

    def _set_up(
        self,
        model: models.Model | None,
        ctx: int | None,
        system: str | None,
        schemas: Sequence[dict[str, Any]],
        chat_format: str | None,
        effort: str | None,
        policy: CompactionPolicy | None,
        store: str | os.PathLike[str] | None,
        notes: Callable[[], Sequence[str]],
    ) -> None:
        engine = self.engine
        names = [schema["name"] for schema in schemas]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ArgumentError(f"{twice[0]} is a tool of the chat itself (span_tools=True); give yours another name=.")
        name = chat_format or _format_of(engine, model)
        if name is None:
            known = ", ".join(chat_formats.names())
            raise ArgumentError(
                f"{engine.model} does not say how messages are written; give chat_format=, one of: {known}."
            )
        self.format: ChatFormat = chat_formats.get(name, engine.tokenizer, engine.checkpoint)  # type: ignore[arg-type]
        if self.greedy_calls and self.format.reader() is None:
            raise ArgumentError(
                f"the chat format {name} cannot tell the markup of a call while it is written; leave greedy_calls out."
            )
        self.writer = Writer(self.format, system, schemas, effort)
        info = {
            "chat_format": name,
            "system": system or "",
            "tools": list(schemas),
            "effort": effort,
            "tokenizer": engine.tokenizer.fingerprint().hex(),  # type: ignore[union-attr]
        }
        transcript = self._open(store, info)
        try:
            session = self._session(transcript, ctx)
        except BaseException:
            transcript.store.close()
            raise
        try:
            manual = (policy or CompactionPolicy()).for_model(model.compaction if model is not None else {})
            self.live = Live(engine, self.writer, transcript, session, manual if policy is not None else None)
            self.live.check()
            archive = self.spans.options.auto_archive
            self.compactor = Compactor(self.live, notes=notes, archive=archive, policy=manual)
            self.background = Background(self.compactor)
            if not transcript.surface:
                transcript.append(*self.writer.opening())
            self._fit(max(transcript.size, size_of(self.writer.opening()) + len(self.writer.head_ids())))
            self.spans.opened()
        except BaseException:
            session.close()
            transcript.store.close()
            raise

    def _open(self, path: str | os.PathLike[str] | None, info: dict[str, Any]) -> Transcript:
        """The transcript of a store, begun where there is none. Raises ArgumentError when what it was begun with is
        not what this chat has: the ids of its system prompt are part of it."""
        if path is None:
            return Transcript(MemoryStore())
        if Store.exists(path):
            store = Store.open(path)
        else:
            store = Store.create(path, {"model": self.engine.model, "about": self.about, **info})
        try:
            transcript = Transcript.open(store)
            for key, value in info.items():
                if transcript.info.get(key) != value:
                    raise ArgumentError(
                        f"the conversation in {os.fspath(path)} was begun with another {key.replace('_', ' ')}; open "
                        "it with the same, or begin a new one."
                    )
            return transcript
        except BaseException:
            store.close()
            raise

    def _session(self, transcript: Transcript, ctx: int | None) -> Session:
        """The session of a snapshot where there is a good one, else an empty one: then the log is evaluated again."""
        path = transcript.store.snapshot
        if path is not None and path.exists():
            try:
                return self.engine.load(path, ctx)
            except Ds4Error as error:
                self.snapshot_refused = str(error)
        return self.engine.session(ctx)

    snapshot_refused: str | None = None
    """Why the snapshot of a store was not used; its log is evaluated again then."""

    # ---- talking

    def ask(self, text: str) -> str:
        """Runs a whole turn, tools included, and returns the text that the model wrote."""
        return "".join(event.text for event in self.send(text) if isinstance(event, Text))

    def send(self, text: str) -> Generator[Event, None, None]:
        """The events of a turn. Nothing happens until the first one is read; closing it early cancels, and the turn
        is kept as it was cut. Raises ContextFull when the message does not fit, not even after a compaction: the
        conversation is then as it was, and the text waits in `held` until the next message takes its place there. The
        same holds for a message whose compaction is cancelled."""
        with self._alone():
            turn = Turn(self, self.sampling)
            try:
                yield from self._settle_calls()
                yield from self.admit_user(text)
            except Cancelled:
                if self.held is None or self.held.kind != "user":
                    self.queued.append(text)  # the slot holds what has to come in before it
                yield turn.end("cancelled")
                return
            yield from self.store_notice()
            yield from turn.run()

    def retry(self, seed: int | None = None) -> Generator[Event, None, None]:
        """The last answer again, with another seed. A greedy conversation is sampled at temperature 0.8 for this
        turn."""
        with self._alone():
            self.live.transcript.rewind_to_answer()
            self._drop_stale()
            again = self.sampling
            if not again.temperature:
                again = replace(again, temperature=RETRY_TEMPERATURE)
            yield from Turn(self, replace(again, seed=seed)).run()

    def queue(self, text: str) -> None:
        """A message for the turn in progress: the model gets it when its next tools have run, or when it stops. With no
        turn in progress it follows the next message. One that does not fit ends the turn with ContextFull and waits in
        `held`."""
        self.queued.append(text)

    def force(self, text: str, calls: Sequence[ToolCall] = (), thinking: str = "") -> None:
        """The model's next answer is this one, evaluated token by token, instead of a sampled one. For demonstrations
        and tests of what follows; several wait in line."""
        node = self.writer.assistant(text, calls, thinking)
        body = list(node.ids[self._written_prefix(node.ids) :])
        ends = range(len(body), 0, -1)
        self.forced.append(next(body[:n] for n in ends if body[:n] + self.format.end_turn(body[:n]) == body))

    def _written_prefix(self, ids: Sequence[int]) -> int:
        """How many ids of a written answer the prefix of a sampled one gives. Where they disagree about thinking, the
        answer opens or closes the block itself."""
        prefix, tags = self.format.generation_prefix(self.thinking), self.format.thinking_tags
        same = common(prefix, ids)
        return same if same == len(prefix) else next((i for i in range(same + 1) if prefix[i] in tags), same)

    def cancel(self) -> None:
        """Ends the turn or the compaction in progress, from any thread."""
        self.cancelled.set()
        self.live.cancel()

    def undo(self) -> str:
        """Takes the newest step back: a compaction, or the last user message and all that follows. Returns "compaction"
        or "turn". Raises ArgumentError when there is none."""
        with self._alone():
            transcript, session = self.live.transcript, self.session
            what = transcript.undo()
            self._drop_stale()
            session.truncate(session.nearest_exact(common(session.tokens, transcript.tokens)))
            return what

    def fork(self) -> Chat:
        """A second conversation that starts where this one stands and shares its pages. It is kept in memory."""
        with self._alone():
            other = object.__new__(type(self))
            other.__dict__.update(self.__dict__)
            other.queued, other.forced = deque(self.queued), deque(self.forced)
            other.cancelled, other._busy = threading.Event(), threading.Lock()
            transcript = self.live.transcript.fork()
            session = self.session.fork()
            other.live = Live(self.engine, self.writer, transcript, session, self.live.policy)
            mine = self.compactor
            other.compactor = Compactor(other.live, notes=mine.notes, archive=mine.archive, policy=mine.policy)
            other.background = Background(other.compactor)
            other.spans = self.spans.copy(other)
            return other

    # ---- compaction

    def compact(self, reason: str = "asked for") -> Generator[Event, None, None]:
        """Replaces the history by a summary that the model writes. Events as of a turn; the last one is CompactionDone
        or CompactionFailed, and after the latter the conversation is as it was."""
        with self._alone():
            yield from self.compact_now(reason)

    def compact_soon(self) -> None:
        """Asks for a compaction at the next safe point of the turn in progress: when its tools have run, or when it
        stops."""
        self.asked = True

    asked = False

    def compact_now(self, reason: str, automatic: bool = False) -> Generator[Event, None, Outcome]:
        """A compaction inside of a turn. `automatic`: not when the last one failed on nearly the same surface."""
        if automatic and self.live.limits is None:
            return Outcome("failed", "automatic compactions are switched off (policy=None).")
        if automatic and not self.compactor.allowed():
            return Outcome("failed", "the last compaction failed and the conversation has hardly grown since.")
        outcome = yield from self.compactor.whole(reason, self.background.take())
        yield from self.after_compaction(outcome)
        return outcome

    def compact_span(
        self, *, end: str, summary: str, start: str | None = None, include_active: bool = False
    ) -> dict[str, Any]:
        """Replaces a span of messages by a checkpoint text. `start` and `end`: verbatim openings of its first (default:
        the first that can be) and last message, or "#N". Returns what it did, as the tool `context_compact` does.
        Raises ArgumentError when the span or the text will not do; nothing has changed then."""
        with self._alone():
            return self.spans.compact(start, end, summary, include_active)

    def plan_span(
        self, *, end: str, summary: str, start: str | None = None, include_active: bool = False
    ) -> dict[str, Any]:
        """What `compact_span` would do, in numbers; changes nothing."""
        return self.spans.plan(start, end, summary, include_active)

    def after_compaction(self, outcome: Outcome) -> Generator[Event, None, None]:
        """What the user should know of it."""
        if outcome.done is not None:
            self.spans.compacted(outcome.done.after)
        if outcome.archive_error:
            yield Notice(outcome.archive_error)
        yield from self.store_notice()

    # ---- keeping

    @property
    def session(self) -> Session:
        """The session that holds the conversation now; a compaction replaces it."""
        return self.live.session

    @property
    def transcript(self) -> Transcript:
        return self.live.transcript

    @property
    def held(self) -> Held | None:
        """What waits to be appended: a message or a result that a failure or a cancel has left outside."""
        return self.live.transcript.held

    def save(self) -> None:
        """Writes a snapshot of the session beside the log, so that opening the conversation evaluates nothing. Raises
        ArgumentError when the conversation has no store."""
        path = self.live.transcript.store.snapshot
        if path is None:
            raise ArgumentError("this conversation is kept in memory only; give Chat a store= folder to keep it.")
        with self._alone():
            self.session.save(path)

    def close(self) -> None:
        """Closes session and store. Safe to call twice."""
        self.background.close()
        self.live.close()
        self.live.transcript.store.close()

    def __enter__(self) -> Chat:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- what a turn needs

    @property
    def has_tools(self) -> bool:
        """Whether the model may call anything."""
        return bool(self.writer.tools)

    @contextmanager
    def _alone(self) -> Any:
        """One call at a time; the background pass waits meanwhile and goes on afterwards."""
        mine = False
        try:
            mine = self._busy.acquire(blocking=False)
            if not mine:
                raise Busy("another call is working on this conversation; wait for its end, or cancel it.")
            self.cancelled.clear()
            self.background.pause()
            yield
        finally:
            if mine:
                try:
                    self.background.idle()
                finally:
                    self._busy.release()

    def _settle_calls(self) -> Generator[Event, None, None]:
        """Calls whose results never came, because the turn was cut or the process ended, get one: what the slot holds,
        or a text that says so."""
        for held in self._missing():
            yield from admit(self, held)

    def settle_now(self, node: Node, known: Mapping[int, Result]) -> None:
        """A turn ends while its tools run: the calls of `node` get the results that are known by their index, or a text
        that says so, up to the first one that does not fit or waits already. The log has what of them is left."""
        waits = self.held is not None
        for held in self._missing({node.calls[i].id: result.text for i, result in known.items()}):
            if waits or not append_whole(self, held):
                if not waits:
                    self.transcript.hold(held)
                elif held.text != LOST and self.held != held:
                    self.transcript.record("result_left", call=held.call, text=held.text)
                waits = True

    def _missing(self, known: Mapping[str, str] = {}) -> list[Held]:
        """The results that calls on the surface wait for: what the slot holds, what is known of them by their call, or
        a text that says that they are lost."""
        surface, slot = self.transcript.surface, self.held
        waiting, found = open_calls(surface), []
        for node in surface:
            for i, call in enumerate(node.calls):
                if call.id in waiting:
                    mine = slot if slot is not None and slot.call == call.id else None
                    found.append(mine or Held("tool", known.get(call.id, LOST), call.id, i, len(node.calls)))
        return found

    def _drop_stale(self) -> None:
        """A result in the slot whose call is gone belongs nowhere."""
        held = self.held
        if held is not None and held.kind == "tool" and held.call not in open_calls(self.live.transcript.surface):
            self.live.transcript.release_held()

    def append(self, *nodes: Node) -> list[Node]:
        """Appends nodes as the format wants them behind the surface."""
        transcript = self.live.transcript
        return transcript.append(*self.writer.arrange(nodes, transcript.surface))

    def fits(self, tokens: int) -> bool:
        """Whether a message of so many tokens can be appended and answered."""
        limits, used = self.live.limits, self.live.used
        return limits.fits(used, tokens) if limits is not None else used + tokens + self.reserve <= self.live.ctx

    @property
    def reserve(self) -> int:
        """What must stay free behind a message, without a policy the least that an answer takes."""
        limits = self.live.limits
        if limits is not None:
            return limits.reserve
        return len(self.format.generation_prefix(self.thinking)) + 1 + self.closing

    @property
    def closing(self) -> int:
        """The most tokens that close an answer which is cut."""
        return len(self.format.end_turn([])) + bool(self.format.thinking_tags)

    def admit_user(self, text: str) -> Generator[Event, None, None]:
        """Appends a user message, behind a compaction where one is due; it waits in the slot meanwhile. Raises
        Cancelled when the user ends that, ContextFull when it does not fit."""
        transcript = self.live.transcript
        self._drop_thinking()
        if soft_due(self):
            transcript.hold(Held("user", text))
            yield from self._make_room("the context is nearly full")
        if not self.fits(len(self._question(text))):
            transcript.hold(Held("user", text))
            yield from self._make_room("the message does not fit")
        self._fit(self.live.used, len(self._question(text)))
        transcript.append(*self.writer.arrange([self._question(text)], transcript.surface), release=True)

    def admit_queued(self) -> Generator[Event, None, None]:
        """Appends the messages that wait for a safe point."""
        while self.queued:
            try:
                yield from self.admit_user(self.queued[0])
            except ContextFull:
                self.queued.popleft()
                raise
            self.queued.popleft()

    def _make_room(self, reason: str) -> Generator[Event, None, None]:
        """Compacts for a message that waits. Raises Cancelled when the user ended that."""
        outcome = yield from self.compact_now(reason, automatic=True)
        if outcome.state == "cancelled" or self.cancelled.is_set():  # in it, or between its end and the message
            raise Cancelled("the compaction before the message was cancelled; the message waits.")

    def _question(self, text: str) -> Node:
        return self.writer.user(text, first=not any(node.role == "user" for node in self.live.transcript.surface))

    def _fit(self, used: int, message: int = 0) -> None:
        """Raises ContextFull with the numbers unless the message can be appended and answered."""
        ctx = self.live.ctx
        if self.fits(message) if message else used < ctx:
            return
        text = f"the conversation begins with {used} tokens, which is too much for ctx {ctx}; use a larger ctx."
        if message:
            text = prompts.turn_too_large(used, message, ctx, self.reserve)
        error = ContextFull(text)
        error.wanted, error.ctx = used + message + 1, ctx
        raise error

    def _drop_thinking(self) -> None:
        """Takes the thinking of earlier answers out of the context, as one event."""
        surface = self.live.transcript.surface
        drop = self.drop_thinking and not (self.has_tools and self.format.tools_keep_thinking)
        without = [self.writer.without_thinking(node) for node in surface] if drop else list(surface)
        if without != list(surface):
            self.live.transcript.replace(without, reason="thinking")

    def store_notice(self) -> Generator[Event, None, None]:
        """Says once that the store cannot be written any more."""
        failed = self.live.transcript.store.failed
        if failed and failed != self._told:
            self._told = failed
            yield Notice(failed)

    _told: str | None = None

    def refused(self, call: ToolCall) -> Result | None:
        """The result of a call that the user does not allow, None when it may run."""
        line = self.toolbox.permission(call)
        if line is None or (self.allow is not None and self.allow(call, line)):
            return None
        return Result(REFUSED if self.allow is not None else NOBODY, failed=True)
