"""The summary pass: the model writes the summary on the live context, watched token by token.

First greedy; then, from a mark behind the request, greedy with a repetition penalty over the summary's own tokens
(sampling at 0.7 loops as well on small models); then nothing is left but the mechanical ledger.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..chat_formats import ChatFormat
from ..engine import Mark, Session
from ..errors import Cancelled
from ..events import Event, Prefill, Summary, SummaryDiscarded
from ..sampling import Sampling, sample
from .boundaries import ControlWatch
from .policy import CompactionPolicy, Limits

PIECE = 256  # tokens between two Prefill events
PERIODS = 128
REPEATS = 3  # times that a period comes before it is a loop,
LEAST_LOOP = 48  # and tokens that it fills at least
ECHO_GRAM = 4
ECHO_SHARE = 0.3
LEAST_KEPT = 16  # tokens that must be left of a summary that was cut
PENALTY = 1.1  # over the
PENALTY_LAST = 256  # last tokens of the summary itself

_SENTENCE = re.compile(r"[.!?…]+[\"'”’)\]*_`]*(?=\s)|[。！？]+[”’」』）]*|\n")
_LIST_NUMBER = re.compile(r"(?:^|\n)[ \t]*\(?(?:\d{1,3}|[A-Za-z])\.$")

Accept = Callable[[str], "str | None"]


@dataclass(frozen=True)
class Summarised:
    """What the pass came to. `step`: "model" (first try), "retry" (with the penalty), or "ledger": there is no text,
    and `why` says what was wrong with the last one. `tokens`: sampled in all tries together."""

    text: str
    step: str
    tokens: int
    why: str = ""


class Repetition:
    """Notices a loop as soon as it is one: for some period p of 1 to 128 tokens the last max(3p, 48) tokens are
    periodic. A step costs one comparison with the last 128 tokens."""

    def __init__(self) -> None:
        periods = np.arange(1, PERIODS + 1)
        self._needed = np.maximum(REPEATS * periods, LEAST_LOOP) - periods
        self._runs = np.zeros(PERIODS, np.int64)  # [p - 1]: how many last tokens equal the one p before them
        self._last: npt.NDArray[np.int64] = np.full(PERIODS, -1, np.int64)  # newest first

    def feed(self, token: int) -> int:
        """The period of the loop that this token completes, 0 = none."""
        self._runs = np.where(self._last == token, self._runs + 1, 0)
        self._last = np.concatenate(([token], self._last[:-1]))
        loops = np.flatnonzero(self._runs >= self._needed)
        return int(loops[0]) + 1 if len(loops) else 0


def echo_share(ids: Sequence[int], request: Sequence[int]) -> float:
    """The share of the 4-token sequences of `ids` that stand in the request."""
    grams = [tuple(ids[i : i + ECHO_GRAM]) for i in range(len(ids) - ECHO_GRAM + 1)]
    known = {tuple(request[i : i + ECHO_GRAM]) for i in range(len(request) - ECHO_GRAM + 1)}
    return sum(gram in known for gram in grams) / len(grams) if grams else 0.0


def whole_sentences(text: str) -> str:
    """The text up to its last sentence or line end, "" when there is none."""
    for match in reversed(list(_SENTENCE.finditer(text))):
        kept = text[: match.end()].rstrip()
        if not _LIST_NUMBER.search(kept):
            return kept
    return ""


class _Try:
    """One try: its tokens and its text so far."""

    def __init__(self, format: ChatFormat, step: str, sampling: Sampling) -> None:
        self.step, self.sampling = step, sampling
        self.ids: list[int] = []
        self.text = ""
        self.watch = ControlWatch(format.boundaries)
        self.repetition = Repetition()
        self.stream = format.tokenizer.stream()
        self.failure = ""

    def take(self, token: int) -> str:
        """The text that is free to go when the token is in the session."""
        self.ids.append(token)
        free = self.watch.feed(token, self.stream.feed(token))
        self.text += free
        period = self.repetition.feed(token)
        if period and self.watch.ended is None:
            self.failure = f"it repeats itself every {period} token{'s' * (period > 1)}"
        return free

    def end(self, token: int) -> str:
        """The token is a boundary: what was held back in front of it."""
        free = self.watch.feed(token, "")
        self.text += free
        return free

    def flush(self) -> str:
        """The limit is reached: what was held back."""
        free = self.watch.feed(-1, self.stream.flush()) + self.watch.flush()
        self.text += free
        return free


class SummaryPass:
    """A summary in work. `run` may be closed, or end with Cancelled, and be called again: it goes on where it was, as
    long as the session is where it left it.

    `session` stands at BOTTOM and `prompt` is what is appended to it: the request and what belongs around it.
    `request_ids`: the words of the request that the summary must not echo. `accept(text)`: None, or why a checkpoint
    with this text would not do. The session is left with the pass's tokens behind BOTTOM: the caller rolls back, in
    every case, and calls `close`.
    """

    def __init__(
        self,
        session: Session,
        format: ChatFormat,
        prompt: Sequence[int],
        limits: Limits,
        policy: CompactionPolicy,
        *,
        request_ids: Sequence[int],
        accept: Accept,
    ) -> None:
        self.session, self.format, self.prompt, self.limits = session, format, list(prompt), limits
        self.request_ids, self.accept = list(request_ids), accept
        self.bottom = session.pos
        self.sampled = 0
        self._result: Summarised | None = None
        self._steps = [_Try(format, "retry", Sampling(repetition=PENALTY))]
        if not policy.summary_penalty:
            self._steps.insert(0, _Try(format, "model", Sampling()))
        self._mark: Mark | None = None

    @property
    def room(self) -> int:
        """Tokens that a summary could have."""
        return min(self.session.ctx, self.limits.ctx) - self.bottom - len(self.prompt)

    def run(self, stop: Callable[[], bool] = bool) -> Generator[Event, None, Summarised]:
        """Yields Prefill, Summary and SummaryDiscarded; returns what came of it. Raises Cancelled when `stop` says so
        or the session is cancelled, and the errors of an evaluation; NonFiniteError when the model's numbers are
        none."""
        if self._result is None and self.room < self.limits.summary_min:
            self._result = Summarised(
                "", "ledger", 0, f"only {max(0, self.room)} tokens of room, {self.limits.summary_min} are needed"
            )
        cancels = self.session.cancels

        def check() -> None:
            if stop() or self.session.cancels != cancels:  # between two calls of the core, which ends those in progress
                raise Cancelled("the summary was cancelled.")

        if self._result is None and self._mark is None:
            yield from self._prefill(check)
            self._mark = self.session.mark()
        while self._result is None:
            yield from self._sample(self._steps[0], check)
        return self._result

    def close(self) -> None:
        """Lets go of the mark. Safe to call twice."""
        if self._mark is not None:
            self._mark.release()

    def _prefill(self, check: Callable[[], None]) -> Generator[Event, None, None]:
        session, total = self.session, len(self.prompt)
        while (done := session.pos - self.bottom) < total:
            session.eval(self.prompt[done : done + PIECE])
            yield Prefill(session.pos - self.bottom, total)
            check()

    def _sample(self, step: _Try, check: Callable[[], None]) -> Generator[Event, None, None]:
        """Goes on with a try; at its end there is a result, or it is no longer among the steps."""
        session = self.session
        limit = min(self.room, self.limits.summary)
        session.refresh()
        while step.watch.ended is None and not step.failure and len(step.ids) < limit:
            check()
            token, _ = sample(session.logits, step.sampling, step.ids[-PENALTY_LAST:], session.pos)
            if step.watch.stops(token):
                free = step.end(token)
            else:
                session.eval([token])
                self.sampled += 1
                free = step.take(token)
            if free:
                yield Summary(free)
        if step.watch.ended is None and not step.failure and (free := step.flush()):
            yield Summary(free)
        text, why = self._judge(step)
        if not why:
            self._result = Summarised(text, step.step, self.sampled)
            return
        yield SummaryDiscarded(why)
        del self._steps[0]
        if self._steps:
            assert self._mark is not None
            session.rollback(self._mark)
        else:
            self._result = Summarised("", "ledger", self.sampled, why)

    def _judge(self, step: _Try) -> tuple[str, str]:
        """(the text to be kept, what is wrong with it)."""
        if step.failure:
            return "", step.failure
        text = step.text.strip()
        if not text:
            return "", "it is empty"
        if step.watch.ended is None:
            text = whole_sentences(step.text).strip()
            kept = len(self.format.tokenizer.encode(text))
            if kept < LEAST_KEPT:
                return "", f"it was cut at {len(step.ids)} tokens, and whole sentences have only {kept} of them"
        share = echo_share(step.ids, self.request_ids)
        if share > ECHO_SHARE:
            return "", f"it echoes the request ({share:.0%} of it)"
        return text, self.accept(text) or ""
