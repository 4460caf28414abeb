"""The events of a conversation: what `Chat.send` and `Chat.compact` yield. All have `.type`, for JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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
class ToolCall:
    """The model calls a tool."""

    id: str
    name: str
    arguments: Mapping[str, Any]
    type: str = field(default="tool_call", init=False)


@dataclass(frozen=True)
class ToolResult:
    """What the tool answered to the call `id`."""

    id: str
    text: str
    type: str = field(default="tool_result", init=False)


@dataclass(frozen=True)
class CompactionStarted:
    """`reason` says what asked for it; `bottom`: the tokens of the context that it starts from."""

    reason: str
    bottom: int
    type: str = field(default="compaction_started", init=False)


@dataclass(frozen=True)
class Summary:
    """A piece of the summary."""

    text: str
    type: str = field(default="summary", init=False)


@dataclass(frozen=True)
class SummaryDiscarded:
    """The summary streamed so far is no good, for `reason`; another try follows, or the ledger alone."""

    reason: str
    type: str = field(default="summary_discarded", init=False)


@dataclass(frozen=True)
class CompactionPlanned:
    """The context will go from `before` to `after` tokens, of which `reused` are there already and the last `tail` stay
    as they were; the rebuild follows."""

    before: int
    after: int
    reused: int
    tail: int
    type: str = field(default="compaction_planned", init=False)


@dataclass(frozen=True)
class CompactionDone:
    """The context went from `before` to `after` tokens; `reused` rows were kept, `evaluated` computed, in `seconds` (of
    which the model's summary took `summary_seconds`). `step` says who wrote the checkpoint: "model" (first try),
    "retry", "ledger" (no text of the model) or "agent". `tail`: tokens kept as they were at the end. `pause`: seconds
    that the conversation stood still."""

    before: int
    after: int
    reused: int
    evaluated: int
    seconds: float
    step: str
    tail: int
    summary_seconds: float
    rollback_seconds: float
    pause: float
    type: str = field(default="compaction_done", init=False)


@dataclass(frozen=True)
class CompactionFailed:
    """Nothing has changed: the context is as it was. `step` is where it ended."""

    reason: str
    step: str
    type: str = field(default="compaction_failed", init=False)


@dataclass(frozen=True)
class Notice:
    """Something the user should know: a store that cannot be written, a result kept aside."""

    text: str
    type: str = field(default="notice", init=False)


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


Event = (
    Prefill
    | Thinking
    | Text
    | ToolCall
    | ToolResult
    | CompactionStarted
    | Summary
    | SummaryDiscarded
    | CompactionPlanned
    | CompactionDone
    | CompactionFailed
    | Notice
    | TurnEnd
)
