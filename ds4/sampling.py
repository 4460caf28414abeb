"""Sampling and generation: which token comes next, and when to end.

The arithmetic is one C call per token, `sample` (csrc/sample.c); this file holds the options, the stop rules and the
loop. Nothing is kept between two calls of `generate`: penalties are functions of the session's tokens and the random
number is a function of (seed, position), so going back and forward again gives the same tokens (K10).
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .core import check, ffi, lib
from .errors import ArgumentError, Cancelled

if TYPE_CHECKING:
    from .engine import Session

INT32_MAX = 2**31 - 1
SCRATCH = 20  # bytes for each logit that the core works in

_NUMBERS: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda x: 0 <= x < math.inf, "0 (greedy) or a positive finite number"),
    "top_p": (lambda x: 0 < x <= 1, "a number above 0 and up to 1 (all)"),
    "min_p": (lambda x: 0 <= x < 1, "a number from 0 (all) to below 1"),
    "repetition": (lambda x: 0 < x < math.inf, "1 (off) or another positive finite number"),
    "presence": (math.isfinite, "0 (off) or a finite number"),
    "frequency": (math.isfinite, "0 (off) or a finite number"),
}
_COUNTS = {
    "top_k": (0, INT32_MAX, "0 (all) or a count of tokens"),
    "repeat_last": (-1, INT32_MAX, "-1 (all tokens) or a count of tokens"),
    "seed": (0, 2**64 - 1, "None or a whole number from 0 to 2**64 - 1"),
}


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. `Sampling()` is greedy.

    The steps, in this order: mask, logit_bias, penalties, then the best token when `temperature` is below 1e-6 (of
    equal ones the lowest id), else temperature, top_k, top_p, min_p and a draw. Raises ArgumentError naming the field
    and its value.
    """

    temperature: float = 0.0
    top_k: int = 0
    """Keep this many tokens, 0 = all."""
    top_p: float = 1.0
    """Keep the fewest tokens that have this much probability together."""
    min_p: float = 0.0
    """Keep the tokens that have at least this share of the best one's probability."""
    repetition: float = 1.0
    """Divides positive and multiplies negative logits of tokens that occurred (Keskar et al. 2019, CTRL)."""
    presence: float = 0.0
    """Subtracted from the logit of tokens that occurred."""
    frequency: float = 0.0
    """Subtracted once for each occurrence."""
    repeat_last: int = -1
    """How many of the session's last tokens the three penalties count, those before the generation too; -1 = all."""
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    """Added to the logits of these token ids; -inf bans a token."""
    seed: int | None = None
    """None: `generate` draws one and shows it in each token."""
    mask: Callable[[tuple[int, ...]], Iterable[int]] | None = None
    """Called before each token with the ids sampled since the generation began; returns the allowed ids. A function of
    its argument alone."""

    def __post_init__(self) -> None:
        for name, (fits, wanted) in _NUMBERS.items():
            value = getattr(self, name)
            if not _is_real(value) or not fits(_float32(value)):
                raise ArgumentError(f"{name} is {value!r}; give {wanted}")
            object.__setattr__(self, name, float(value))
        for name, (low, high, wanted) in _COUNTS.items():
            value = getattr(self, name)
            if value is None and name == "seed":
                continue
            if not _is_integer(value) or not low <= value <= high:
                raise ArgumentError(f"{name} is {value!r}; give {wanted}")
            object.__setattr__(self, name, int(value))
        if not isinstance(self.logit_bias, Mapping):
            raise ArgumentError(f"logit_bias is {self.logit_bias!r}; give a dict from token id to number")
        for token, bias in self.logit_bias.items():
            if not _is_integer(token) or not 0 <= token <= INT32_MAX:
                raise ArgumentError(f"logit_bias has the key {token!r}; give token ids")
            if not _is_real(bias) or not _float32(bias) < math.inf:
                raise ArgumentError(f"logit_bias[{token}] is {bias!r}; give a finite number, or -inf to ban the token")
        object.__setattr__(self, "logit_bias", {int(k): float(v) for k, v in self.logit_bias.items()})
        if self.mask is not None and not callable(self.mask):
            raise ArgumentError(f"mask is {self.mask!r}; give None or a function from token ids to allowed ids")

    @property
    def penalises(self) -> bool:
        """Whether the tokens before have an influence on the choice."""
        return (self.repetition, self.presence, self.frequency) != (1, 0, 0) and self.repeat_last != 0


def _is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, (bool, np.bool_))


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, (bool, np.bool_))


def _float32(value: Any) -> float:
    """The number as C will see it."""
    try:
        with np.errstate(all="ignore"):
            return float(np.float32(float(value)))
    except OverflowError:  # an int beyond float64
        return math.inf


def _token_ids(name: str, values: Iterable[int]) -> npt.NDArray[np.int32]:
    try:
        ids = np.asarray(values if isinstance(values, (np.ndarray, list, tuple)) else list(values))
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"{name} is no list of token ids: {error}") from error
    if ids.size == 0:
        return np.empty(0, np.int32)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ArgumentError(f"{name} is an array of {ids.dtype} {list(ids.shape)}; give a list of token ids")
    if ids.dtype != np.int32 and (ids.min() < 0 or ids.max() > INT32_MAX):
        raise ArgumentError(f"{name} holds ids from {ids.min()} to {ids.max()}; no model has such tokens")
    return np.ascontiguousarray(ids, np.int32)


def sample(
    logits: npt.NDArray[np.float32],
    sampling: Sampling,
    history: Iterable[int] = (),
    position: int = 0,
    allowed: Iterable[int] | None = None,
    scratch: npt.NDArray[np.uint8] | None = None,
) -> tuple[int, float]:
    """Chooses one token from logits [vocab]: (id, log-probability under the model's own distribution).

    `history`: the tokens that the penalties count; here `repeat_last` does not cut it. `position`: the index that the
    token will have. `allowed`: None = every token; `sampling.mask` is not asked. A seed of None is drawn anew.
    `scratch`: `SCRATCH` bytes for each logit, to work in, which begin at a multiple of 16; without it memory is taken
    for the call. Raises ArgumentError, and NonFiniteError for NaN, +inf or no finite logit.
    """
    logits = np.ascontiguousarray(logits, np.float32)
    if logits.ndim != 1:
        raise ArgumentError(f"logits have the shape {list(logits.shape)}; give one row, [vocab]")
    if scratch is not None:
        whole = scratch.flags.c_contiguous and scratch.flags.writeable
        if not whole or scratch.ctypes.data % 16:
            raise ArgumentError("scratch is not writable memory in one piece at a multiple of 16; give a new array")
    core, out, err = _CoreOptions(sampling, scratch), ffi.new("ds4_sampled *"), ffi.new("ds4_error *")
    core.set(history, position, allowed)
    check(lib.ds4_sample(ffi.from_buffer("float[]", logits), len(logits), core.struct, out, err), err)
    return out.id, out.logprob


class _CoreOptions:
    """A Sampling as the core takes it, made once for many tokens."""

    def __init__(self, sampling: Sampling, scratch: npt.NDArray[np.uint8] | None) -> None:
        self._sampling = sampling
        bias = sampling.logit_bias
        ids, values = np.array(list(bias), np.int32), np.array(list(bias.values()), np.float32)
        # The struct borrows arrays: they have names so that they live as long as it does.
        self._bias = ffi.from_buffer("int32_t[]", ids), ffi.from_buffer("float[]", values)
        self._scratch = None if scratch is None else ffi.from_buffer(scratch, require_writable=True)
        self._history = self._allowed = ffi.NULL
        self.struct = o = ffi.new("ds4_sampling *")
        o.temperature, o.top_k, o.top_p, o.min_p = sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
        o.repetition, o.presence, o.frequency = sampling.repetition, sampling.presence, sampling.frequency
        (o.bias_ids, o.bias), o.n_bias, o.n_allowed = self._bias, len(ids), -1
        if self._scratch is not None:
            o.scratch, o.scratch_bytes = self._scratch, len(self._scratch)

    def set(self, history: Iterable[int], position: int, allowed: Iterable[int] | None) -> None:
        """What is different for each token."""
        o = self.struct
        if self._sampling.penalises:
            self._history = ffi.from_buffer("int32_t[]", _token_ids("history", history))
            o.history, o.n_history = self._history, len(self._history)
        ids = None if allowed is None else _token_ids("allowed", allowed)
        self._allowed = ffi.NULL if ids is None else ffi.from_buffer("int32_t[]", ids)
        o.allowed, o.n_allowed = self._allowed, -1 if ids is None else len(ids)
        o.seed = _draw_seed() if self._sampling.seed is None else self._sampling.seed
        o.position = position


def _draw_seed() -> int:
    return secrets.randbits(53)  # survives a JSON reader that knows only float64


class StopMatcher:
    """Finds stop strings in text that arrives in pieces; what it releases does not depend on where the pieces end.

    The stop string that ends first wins, of several that end there the longest. Held back is only the longest suffix
    that is a proper prefix of a stop string. Each string has a Knuth-Morris-Pratt automaton: the work is linear in the
    text, whatever the strings are.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = [(stop, _borders(stop)) for stop in stops]
        self._matched = [0] * len(self._stops)
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """(text that is free to go, whether a stop string was completed). After True there is nothing more to feed."""
        if not self._stops:
            return text, False
        pending = self._held + text
        for end in range(len(self._held), len(pending)):
            found = self._advance(pending[end])
            if found:
                self._held = ""
                return pending[: end + 1 - found], True
        free = len(pending) - max(self._matched)
        self._held = pending[free:]
        return pending[:free], False

    def flush(self) -> str:
        """The text held back, when nothing can follow that would complete a stop string."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> int:
        """Moves every automaton by one character; the length of the longest stop string that ends here, or 0."""
        found = 0
        for i, (stop, borders) in enumerate(self._stops):
            n = self._matched[i]
            while n and stop[n] != char:
                n = borders[n]
            n += stop[n] == char
            self._matched[i] = n
            if n == len(stop):
                found = max(found, n)
        return found


def _borders(stop: str) -> list[int]:
    """For each n: the length of the longest proper prefix of stop[:n] that is also its suffix."""
    borders = [0, 0]
    n = 0
    for char in stop[1:]:
        while n and stop[n] != char:
            n = borders[n]
        n += stop[n] == char
        borders.append(n)
    return borders


@dataclass(frozen=True, slots=True)
class Token:
    """One item of `generate`."""

    id: int | None
    """None only on a last item that carries no token: text that was still held back, or just the reason of the end."""
    text: str
    """Text that became certain with this token; may be empty."""
    logprob: float | None
    """Log-probability under the model's own distribution, before penalties and filters; None without a token."""
    finish: str | None
    """On the last item: "stop", "length" or "cancelled"."""
    seed: int | None
    """With it the same session gives the same tokens again."""


class _Text:
    """From ids to text: detokeniser and stop strings, in this order."""

    def __init__(self, tokenizer: Any, stops: list[str]) -> None:
        self._stream = tokenizer.stream() if tokenizer is not None else None
        self._matcher = StopMatcher(stops)

    def feed(self, token: int) -> tuple[str, bool]:
        return self._matcher.feed(self._stream.feed(token)) if self._stream is not None else ("", False)

    def flush(self) -> tuple[str, bool]:
        text, stopped = self._matcher.feed(self._stream.flush()) if self._stream is not None else ("", False)
        return (text, True) if stopped else (text + self._matcher.flush(), False)


def generate(
    session: Session,
    sampling: Sampling | None = None,
    max_tokens: int | None = None,
    stop: str | Iterable[str] | None = None,
    stop_ids: Iterable[int] | None = None,
    greedy: Callable[[], bool] | None = None,
) -> Generator[Token, None, None]:
    """Samples, appends and evaluates tokens, one for each item that is asked for; arguments are checked at once.

    An item comes when its token is in the session, so after `break` the session stands just behind the last token seen
    and its logits are valid. `max_tokens` None: until the session's ctx is full. `stop`: its text is withheld, its
    tokens stay in the session. `stop_ids`: such a token is appended, with empty text; None = the tokenizer's
    end-of-text ids, () = none. `greedy`: asked before each token; while it says True the token is the best one that
    mask and logit_bias leave, without penalties.

    The last item has `finish`: "stop", "length" (max_tokens or ctx), or "cancelled" (`session.cancel()`; a token that
    was sampled and not yet evaluated is not in the session). When text is still held back before a stop id, one more
    item, without a token, carries it. Errors of the evaluation (PoolFull, ComputeError...) and KeyboardInterrupt pass
    through: the token in work is then not in the session, and text held back is in the ids only. Raises NoLogits on an
    empty session, and ArgumentError when the session was moved between two items.
    """
    sampling = Sampling() if sampling is None else sampling
    if not isinstance(sampling, Sampling):
        raise ArgumentError(f"sampling is {sampling!r}; give a ds4.Sampling")
    if max_tokens is not None and (not _is_integer(max_tokens) or max_tokens < 0):
        raise ArgumentError(f"max_tokens is {max_tokens!r}; give None (until the context is full) or a count")
    stops = _stop_strings(stop)
    tokenizer = session.engine.tokenizer
    if stops and tokenizer is None:
        raise ArgumentError("stop strings need a tokenizer and this engine has none; give stop_ids")
    if stop_ids is None:
        stop_ids = () if tokenizer is None else tokenizer.eos_ids
    ends = frozenset(_token_ids("stop_ids", stop_ids).tolist())
    if sampling.seed is None:
        sampling = replace(sampling, seed=_draw_seed())
    return _generate(session, sampling, max_tokens, _Text(tokenizer, stops), ends, greedy)


def _stop_strings(stop: str | Iterable[str] | None) -> list[str]:
    if stop is None:
        return []
    try:
        stops = [stop] if isinstance(stop, str) else list(stop)
    except TypeError:
        stops = [stop]  # type: ignore[list-item]
    for text in stops:
        if not isinstance(text, str) or not text:
            raise ArgumentError(f"stop holds {text!r}; give strings of at least one character")
    return stops


class _Chooser:
    """Gathers what `sample` needs, without asking the session for all its tokens each time."""

    def __init__(
        self, session: Session, sampling: Sampling, limit: int, greedy: Callable[[], bool] | None = None
    ) -> None:
        self._session, self._sampling = session, sampling
        self._greedy = greedy
        scratch = np.empty(SCRATCH * len(session.logits), np.uint8)
        fixed = replace(sampling, temperature=0.0, repetition=1.0, presence=0.0, frequency=0.0)
        self._core = _CoreOptions(sampling, scratch)
        self._fixed = None if greedy is None else _CoreOptions(fixed, scratch)
        self._sampled: list[int] = []
        self._log = np.empty(limit if sampling.penalises else 0, np.int32)
        if sampling.penalises:
            self._log[: session.pos] = session.tokens

    def choose(self, position: int) -> tuple[int, float]:
        last, mask = self._sampling.repeat_last, self._sampling.mask
        history = self._log[0 if last < 0 else max(0, position - last) : position] if len(self._log) else ()
        allowed = None
        if mask is not None:
            allowed = mask(tuple(self._sampled))
            if allowed is None:
                raise ArgumentError("mask returned None; it must return the allowed token ids")
        core = self._fixed if self._fixed is not None and self._greedy is not None and self._greedy() else self._core
        core.set(history, position, allowed)
        return self._session._sample(core.struct)

    def accept(self, token: int, position: int) -> None:
        """The token is in the session, at `position`."""
        self._sampled.append(token)
        if len(self._log):
            self._log[position] = token


def _generate(
    session: Session,
    sampling: Sampling,
    max_tokens: int | None,
    text: _Text,
    stop_ids: frozenset[int],
    greedy: Callable[[], bool] | None,
) -> Generator[Token, None, None]:
    seed, cancels, position = sampling.seed, session.cancels, session.pos
    limit = session.ctx if max_tokens is None else min(session.ctx, position + max_tokens)
    if position >= limit:
        yield Token(None, "", None, "length", seed)
        return
    try:
        session.refresh()
        chooser = _Chooser(session, sampling, limit, greedy)
        while session.cancels == cancels:
            if session.pos != position:
                raise ArgumentError(
                    f"the session was moved from position {position} to {session.pos} between two tokens; "
                    "end this generation and call generate again"
                )
            token, logprob = chooser.choose(position)
            session.eval([token])
            chooser.accept(token, position)
            position += 1
            if token in stop_ids:
                rest, _ = text.flush()
                yield Token(token, "", logprob, None if rest else "stop", seed)
                if rest:
                    yield Token(None, rest, None, "stop", seed)
                return
            piece, stopped = text.feed(token)
            ended = "length" if position == limit else None if session.cancels == cancels else "cancelled"
            if ended and not stopped:
                rest, stopped = text.flush()
                piece += rest
            finish = "stop" if stopped else ended
            yield Token(token, piece, logprob, finish, seed)
            if finish:
                return
    except Cancelled:
        pass
    yield Token(None, text.flush()[0], None, "cancelled", seed)
