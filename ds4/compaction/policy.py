"""When a conversation is compacted, and how much of everything there may be: spec sections 1 and 2.

"Used" is always the length of the transcript in the model's own tokens, measured again after every change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Any

from ..errors import ArgumentError

MIN_CTX = 2048  # from here on the generation reserve begins above the soft trigger
REQUESTS = ("full", "short")
_BACKGROUND = 15  # percent of ctx that the background pass begins ahead of the soft trigger
_WHOLE = {
    "min_free": 0, "tail_max": 1, "summary_max": 16, "summary_min_room": 16, "tool_result_reserve": 1,
    "error_reserve": 1, "generation_reserve": 1,
}  # fmt: skip
_OPTIONAL = {"ledger_max": 0, "human_max": 0, "thinking_budget": 1}


@dataclass(frozen=True)
class CompactionPolicy:
    """When and how a conversation compacts itself. Raises ArgumentError that names the field and its value."""

    soft_fraction: float = 0.85
    """The soft trigger fires at this share of ctx,"""
    min_free: int = 8192
    """or when no more than this many tokens (at most ctx / 4) are free."""
    tail_fraction: float = 0.1
    """Share of ctx that stays as it is at the end,"""
    tail_max: int = 50_000
    """at most this many tokens."""
    summary_max: int = 4096
    """Longest summary; at most ctx / 8 where that is more than `summary_min_room`."""
    summary_min_room: int = 256
    """Least room for a summary."""
    tool_result_reserve: int = 1024
    """Room to answer a tool result, at most ctx / 8."""
    error_reserve: int = 16
    """Room behind the error text that stands in for a result."""
    generation_reserve: int = 4096
    """Room that an answer leaves so that a summary is always possible: at most ctx / 16, at least `summary_min_room`,
    and the request on top."""
    ledger_max: int | None = None
    """Tokens of the mechanical ledger; never more than ctx / 16, which is the default."""
    human_max: int | None = None
    """Tokens of the human's own messages in it; never more than ctx / 20, which is the default."""
    thinking_budget: int | None = None
    """Tokens of one thinking block; None = no bound of its own."""
    background: bool = False
    """Prepare the compaction on a fork while the model is idle."""
    request: str | None = None
    """The form of the request for a summary: "full", "short" (for models below 1B), None = as the model's entry says,
    else full."""
    summary_penalty: bool | None = None
    """Write the summary with a repetition penalty at once; None = as the model's entry says, else False."""

    def __post_init__(self) -> None:
        for name in ("soft_fraction", "tail_fraction"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1:
                raise ArgumentError(f"{name} is {value!r}; give a share of ctx between 0 and 1.")
        for name, least in {**_WHOLE, **_OPTIONAL}.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 31:
                raise ArgumentError(f"{name} is {value!r}; give a whole number of tokens, at least {least}.")
        for name in ("background", "summary_penalty"):
            value = getattr(self, name)
            if not isinstance(value, bool) and (name == "background" or value is not None):
                raise ArgumentError(f"{name} is {value!r}; give True or False.")
        if self.request is not None and self.request not in REQUESTS:
            raise ArgumentError(f'request is {self.request!r}; give "full" or "short".')
        if self.summary_min_room > self.summary_max:
            raise ArgumentError(
                f"summary_min_room {self.summary_min_room} is more than summary_max {self.summary_max}: no summary "
                "could ever be written; lower the one or raise the other."
            )
        if self.tail_fraction >= self.soft_fraction:
            raise ArgumentError(
                f"tail_fraction {self.tail_fraction} is not below soft_fraction {self.soft_fraction}: what stays "
                "would fire the trigger again; lower tail_fraction."
            )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> CompactionPolicy:
        """A policy from a table of options. Raises ArgumentError for a field that there is not, by name."""
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise ArgumentError(f"a compaction policy has no field {name!r}; its fields are {', '.join(known)}.")
        return cls(**values)

    def for_model(self, defaults: Mapping[str, Any]) -> CompactionPolicy:
        """This policy with `request` and `summary_penalty` settled: where they are None, by the model's own entry."""
        model = CompactionPolicy.from_mapping(defaults)
        request = self.request or model.request or "full"
        penalty = self.summary_penalty if self.summary_penalty is not None else bool(model.summary_penalty)
        return replace(self, request=request, summary_penalty=penalty)

    def limits(self, ctx: int, request_tokens: int) -> Limits:
        """The numbers for a context of `ctx` tokens and a request of `request_tokens`."""
        soft = min(_share(ctx, self.soft_fraction), ctx - min(self.min_free, ctx // 4))
        least = self.summary_min_room
        return Limits(
            ctx=ctx,
            soft=max(1, soft),
            pre=max(1, soft - ctx * _BACKGROUND // 100),
            tail=max(1, min(self.tail_max, _share(ctx, self.tail_fraction))),
            summary=min(self.summary_max, max(least, ctx // 8)),
            summary_min=least,
            tool_result=min(self.tool_result_reserve, max(16, ctx // 8)),
            error=self.error_reserve,
            generation=request_tokens + 1 + max(least, min(self.generation_reserve, ctx // 16)),
            ledger=_at_most(self.ledger_max, ctx // 16),
            human=_at_most(self.human_max, ctx // 20),
            human_keep=ctx // 4,
        )


def _share(ctx: int, fraction: float) -> int:
    """floor(ctx * fraction), of the fraction as it is written: 0.85 is no binary number."""
    return math.floor(ctx * Fraction(repr(fraction)))


def _at_most(wanted: int | None, most: int) -> int:
    return most if wanted is None else min(wanted, most)


@dataclass(frozen=True)
class Limits:
    """A policy's numbers for one context, in tokens.

    `soft`: the first `used` at which the soft trigger fires; `pre`: where the background pass begins. `tail`: budget of
    the kept end. `summary`: longest summary, `summary_min` its least room. `tool_result`, `generation`, `error`:
    reserves. `ledger`, `human`: bounds of the ledger and of the human's messages in it. `human_keep`: up to here the
    newest human message stays whole.
    """

    ctx: int
    soft: int
    pre: int
    tail: int
    summary: int
    summary_min: int
    tool_result: int
    error: int
    generation: int
    ledger: int
    human: int
    human_keep: int

    @property
    def landing(self) -> int:
        """The most that a compacted context may have."""
        return self.soft - self.ctx // 10

    @property
    def reserve(self) -> int:
        """What must stay free behind a message."""
        return max(self.tool_result, self.generation)

    def soft_fires(self, used: int) -> bool:
        """Whether it is time to compact before the next turn."""
        return used >= self.soft

    def fits(self, used: int, message: int) -> bool:
        """Whether a result or a user turn of so many tokens can be appended: the hard trigger is its opposite."""
        return used + message + self.reserve < self.ctx

    def fits_error(self, used: int, message: int) -> bool:
        """Whether an error text that stands in for a result can be appended."""
        return used + message + self.error < self.ctx

    def check(self, overhead: int) -> None:
        """Raises ArgumentError with the numbers when ctx cannot hold a conversation: `overhead` is the system prompt
        with the tool contract, which no compaction can shorten."""
        if self.ctx < MIN_CTX:
            raise ArgumentError(
                f"ctx is {self.ctx}, and a conversation that compacts itself needs at least {MIN_CTX}; raise ctx, or "
                "switch compaction off with policy=None."
            )
        if self.ctx - self.generation <= self.soft:
            raise ArgumentError(
                f"the generation reserve of {self.generation} tokens leaves {self.ctx - self.generation} of ctx "
                f"{self.ctx}, which is not above the soft trigger at {self.soft}: a summary would have no room; raise "
                "ctx, or lower generation_reserve, summary_min_room or soft_fraction."
            )
        needed = overhead + self.summary + self.ledger + 2 * self.tail + self.human
        if needed > self.landing:
            raise ArgumentError(
                f"ctx {self.ctx} is too small: system prompt and tools {overhead} + summary {self.summary} + ledger "
                f"{self.ledger} + twice the kept end {2 * self.tail} + human messages {self.human} = {needed} tokens, "
                f"but a compacted context may have {self.landing} (soft trigger {self.soft} - a tenth of ctx); raise "
                "ctx, shorten the system prompt, or offer fewer tools."
            )
