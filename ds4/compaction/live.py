"""Live: a transcript and the session that holds its surface, moved together."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence

from ds4.engine import Engine, Session
from ds4.errors import Cancelled, PoolFull
from ds4.events import Prefill
from ds4.nodes import Node, Writer, size_of, tokens_of
from ds4.transcript import Transcript

from .policy import CompactionPolicy
from .whole import request_size

PIECE = 256  # tokens between two Prefill events
SPARE = 128  # tokens more than a rebuild has: markers, and pages that two sessions hold in part


class Live:
    """What a compaction works on. `policy` and `limits` are None where the user switched compactions off.

    The session may lag behind the surface (after an undo, a cut turn, on opening): `sync` brings it there.
    """

    def __init__(
        self,
        engine: Engine,
        writer: Writer,
        transcript: Transcript,
        session: Session,
        policy: CompactionPolicy | None = None,
    ) -> None:
        self.engine, self.writer, self.transcript, self.session = engine, writer, transcript, session
        self.policy = policy
        self.limits = policy.limits(session.ctx, request_size(writer, policy)) if policy is not None else None
        self.speed = 0.0
        """Tokens a second of the last prefill worth measuring; 0 until there was one."""
        self.evaluated = 0
        """Tokens that syncs have computed so far."""
        self.working: Session | None = None
        """A fork that computes at present, so that `cancel` reaches it."""
        self.cancels = 0
        self._spare: Session | None = None
        self._lent = self._closed = False

    def check(self) -> None:
        """Raises ArgumentError with the numbers when ctx is too small for the policy."""
        if self.limits is not None:
            self.limits.check(size_of(self.writer.opening()) + len(self.writer.head_ids()))

    @property
    def ctx(self) -> int:
        return self.session.ctx

    @property
    def used(self) -> int:
        """Tokens of the surface."""
        return self.transcript.size

    def cancel(self) -> None:
        """Ends what computes at present, from any thread."""
        self.cancels += 1
        for session in (self.session, self.working):
            if session is not None:
                session.cancel()

    def sync(self, extra: Sequence[int] = ()) -> Generator[Prefill, None, tuple[int, int]]:
        """Brings the session to the surface and `extra` behind it: see `bring`."""
        cancels = self.cancels
        return (yield from self.bring(self.session, self.transcript.surface, extra, lambda: self.cancels != cancels))

    def bring(
        self, session: Session, nodes: Sequence[Node], extra: Sequence[int] = (), stop: Callable[[], bool] = bool
    ) -> Generator[Prefill, None, tuple[int, int]]:
        """Brings a session to the ids of `nodes` and `extra` behind them. Automatic marks stand at the end of the
        system prompt and before every turn of the user. Returns how many tokens were reused and how many evaluated.
        Raises Cancelled when `stop` says so, and what a sync raises; what is in stays in."""
        target = tokens_of(nodes) + list(extra)
        pinned, edges = self._edges(nodes)
        at = common(session.tokens, target)
        evaluated, start, cancels = 0, time.perf_counter(), session.cancels
        if at < len(target):
            yield Prefill(at, len(target))
        while target and (at < len(target) or session.pos != len(target) or not session.logits_valid):
            at = min([edge for edge in edges if edge > at] + [at + PIECE, len(target)])
            evaluated += session.sync(target[:at]).evaluated
            if at in edges:
                session.mark_auto(pinned=at == pinned)
            if evaluated:
                yield Prefill(at, len(target))
            if stop() or session.cancels != cancels:  # between two calls of the core, which ends those in progress only
                raise Cancelled("cancelled while the context was evaluated; what is in stays.")
        self.evaluated += evaluated
        seconds = time.perf_counter() - start
        if evaluated >= PIECE and seconds:
            self.speed = evaluated / seconds
        return max(0, len(target) - evaluated), evaluated

    def _edges(self, nodes: Sequence[Node]) -> tuple[int, set[int]]:
        """Where the system prompt ends, and all positions that a user may want to come back to."""
        system, at = 0, 0
        edges: set[int] = set()
        for node in nodes:
            if node.role == "system":
                system = at + len(node)
            elif node.headed:
                system = at + common(node.ids, self.writer.head_ids())
            if node.human:
                edges.add(at)
            at += len(node)
        return system, (edges | {system}) - {0}

    def secure(self, tokens: int) -> None:
        """Sets pages aside for `tokens` more and for the summary behind them, and for a rebuild. Raises PoolFull."""
        if self.limits is None or self._closed:
            return
        limits, left = self.limits, self.ctx - self.session.pos
        # a request that copies the summary before it, and the new summary
        self.session.reserve(min(tokens + limits.generation + 2 * limits.summary, left))
        if self._lent:
            return
        if self._spare is None:
            self._spare = self.engine.session(self.ctx)
        kept = size_of(self.writer.opening()) + 2 * limits.tail + limits.human_keep
        made = limits.summary + limits.ledger + limits.human
        rebuild = min(min(limits.landing, kept + made) + SPARE, self.ctx)
        if self._spare.reserved < rebuild:
            self._spare.reserve(rebuild)

    def secured(self, tokens: int) -> bool:
        """`secure`, as a question."""
        try:
            self.secure(tokens)
        except PoolFull:
            return False
        return True

    def lend_spare(self) -> None:
        """Gives a rebuild the pages that were set aside for it, until `return_spare`."""
        self._lent = True
        if self._spare is not None:
            self._spare.close()
            self._spare = None

    def return_spare(self) -> None:
        """The rebuild has ended: `secure` sets its pages aside again."""
        self._lent = False

    def swap(self, session: Session) -> Session:
        """Makes `session` the live one and returns the old."""
        old, self.session = self.session, session
        return old

    def close(self) -> None:
        """Gives all pages back. Safe to call twice."""
        self._closed = True
        self.lend_spare()
        self.session.close()


def open_calls(surface: Sequence[Node]) -> tuple[str, ...]:
    """The ids of the calls that have no result yet, in order."""
    answered = {node.result_of for node in surface if node.role == "tool"}
    return tuple(call.id for node in surface for call in node.calls if call.id not in answered)


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the longest common prefix."""
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n
