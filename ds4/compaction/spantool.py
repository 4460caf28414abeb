"""What the agent sees of span compaction: the tools `context_compact` and `expand`, their results, and the nudge."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ds4.chat_formats.toolcalls import json_text
from ds4.errors import ArgumentError

from .anchors import normalise
from .span import STUB, Span

NAME = "context_compact"
EXPAND = "expand"
EXPAND_CHARACTERS = 8000
EXPAND_LISTED = 50  # numbers in an error

SCHEMA: dict[str, Any] = {
    "name": NAME,
    "description": (
        "Replace a finished stretch of this conversation by a checkpoint that you write, to free context. An anchor "
        "is the verbatim opening of a user or assistant message, enough of it to be unique, or its number #N; tool "
        "results come along with their calls. Use it when a step is done, when a wrong direction is over (write what "
        "went wrong, why, and the fix), or when the opening is stale (restate what still holds). The summary must be "
        "smaller than the span. Never cover the task in progress or the newest instruction."
    ),
    "parameters": {
        "type": "object",
        "properties": {
            "startAnchor": {"type": "string", "description": "Opening of the first message. Omitted: the very first."},
            "endAnchor": {"type": "string", "description": "Opening of the last message; it is replaced too."},
            "summary": {"type": "string", "description": "The complete checkpoint in Markdown, or \"draft N\"."},
            "includeActive": {"type": "boolean", "description": "Allow the newest instruction inside."},
        },
        "required": ["endAnchor", "summary"],
    },
}  # fmt: skip

EXPAND_SCHEMA: dict[str, Any] = {
    "name": EXPAND,
    "description": "Show the original messages that a checkpoint stands for. Changes nothing.",
    "parameters": {
        "type": "object",
        "properties": {
            "locator": {"type": "string", "description": "The archive, as a checkpoint or a result names it."},
            "first": {"type": "integer", "description": "Number of the first message to show."},
            "last": {"type": "integer", "description": "Number of the last."},
            "offset": {"type": "integer", "description": "Characters to skip: where the last part ended."},
        },
        "required": ["locator"],
    },
}


# ---- options and arguments


@dataclass(frozen=True)
class SpanOptions:
    """`auto_archive`: spans go to the spill. `volume_nudge_tokens`: a reminder each time the context has grown by so
    many tokens since the last compaction; 0 = never. Raises ArgumentError that names the option and its value."""

    auto_archive: bool = True
    volume_nudge_tokens: int = 50_000

    def __post_init__(self) -> None:
        if not isinstance(self.auto_archive, bool):
            raise ArgumentError(f"autoArchive is {self.auto_archive!r}; give True or False.")
        if type(self.volume_nudge_tokens) is not int or self.volume_nudge_tokens < 0:
            raise ArgumentError(
                f"volumeNudgeTokens is {self.volume_nudge_tokens!r}; give a whole number of tokens, 0 for no reminders."
            )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SpanOptions:
        """Options by the names `autoArchive` and `volumeNudgeTokens`. Raises ArgumentError for any other, by name."""
        known = {"autoArchive": "auto_archive", "volumeNudgeTokens": "volume_nudge_tokens"}
        for name in values:
            if name not in known:
                raise ArgumentError(f"span compaction has no option {name!r}; its options are {', '.join(known)}.")
        return cls(**{known[name]: value for name, value in values.items()})


@dataclass(frozen=True)
class Request:
    """The arguments of a `context_compact` call."""

    end: str
    summary: str
    start: str | None = None
    include_active: bool = False

    @classmethod
    def read(cls, arguments: Mapping[str, Any]) -> Request:
        """Raises ArgumentError for an argument that is unknown, missing or of the wrong type, by name. Null is as good
        as left out."""
        given = {name: value for name, value in arguments.items() if value is not None}
        known = SCHEMA["parameters"]["properties"]
        for name, value in given.items():
            if name not in known:
                raise ArgumentError(f"{NAME} has no argument {name!r}; its arguments are {', '.join(known)}.")
            wanted, word = (bool, "true or false") if name == "includeActive" else (str, "text")
            if not isinstance(value, wanted):
                raise ArgumentError(f"{name} is {word}, not {json_text(value)[:60]}.")
        if "summary" not in given:
            raise ArgumentError(
                "summary is needed: the complete Markdown text that stands in for the span from now on."
            )
        return cls(
            given.get("endAnchor", ""), given["summary"], given.get("startAnchor"), given.get("includeActive", False)
        )


# ---- drafts

_DRAFT = re.compile(r"draft ([0-9]{1,9})", re.IGNORECASE)


@dataclass
class Drafts:
    """Summaries of calls that failed, by number, so that the next try need not repeat them."""

    texts: dict[int, str] = field(default_factory=dict)

    def keep(self, summary: str) -> int:
        """The number under which a summary is kept: the one that it has already, or the next."""
        for number, text in self.texts.items():
            if text == summary:
                return number
        number = max(self.texts, default=0) + 1
        self.texts[number] = summary
        return number

    def restore(self, words: str, summary: str) -> None:
        """Takes back what `words` stand for in an earlier call, if they name a draft that is not kept any more."""
        match = _DRAFT.fullmatch(normalise(words))
        if match is not None:
            self.texts.setdefault(int(match[1]), summary)

    def text(self, summary: str) -> str:
        """The summary that is meant: itself, or the draft that it names. Raises ArgumentError for a draft that there is
        not, and for the words that stand in for a summary in an earlier call."""
        said = normalise(summary)
        if STUB.fullmatch(said):
            raise ArgumentError(
                f'"{said}" only marks where the summary of an earlier call stood; write the complete summary.'
            )
        match = _DRAFT.fullmatch(said)
        if match is None:
            return summary
        found = self.texts.get(int(match[1]))
        if found is None:
            kept = ", ".join(f"draft {number}" for number in self.texts) or "none"
            raise ArgumentError(f"there is no {said.lower()} (kept: {kept}); write the complete summary.")
        return found


def draft_name(number: int) -> str:
    """What a call may give as its summary to mean a draft, and what stands in for the summary that failed."""
    return f"draft {number}"


# ---- results


def result(span: Span, checkpoint: int, locator: str | None, archive_error: str = "") -> dict[str, Any]:
    """The result of a call that compacted `span` into the checkpoint of that number."""
    found: dict[str, Any] = {"ok": True, "archived": None}
    if locator is not None:
        found["archived"] = {
            "locator": locator,
            "retrievalHint": f'{EXPAND} with locator "{locator}" shows the original messages.',
        }
    elif archive_error:
        found["archiveError"] = archive_error
    covered = {"first": span.first, "last": span.last, "nodes": len(span.nodes), "tokens": span.tokens}
    return {**found, "covered": covered, "checkpoint": checkpoint}


def error_text(error: Exception | str, draft: int | None = None) -> str:
    """The result of a call that failed: what is wrong, and what would work. `draft`: where its summary is kept."""
    text = f"{NAME} failed and nothing has changed. {error}"
    if draft is not None:
        text += f'\nYour summary is kept: call again with "summary": "{draft_name(draft)}" instead of repeating it.'
    return text


# ---- the archive, read


def render(lines: Sequence[Mapping[str, Any]]) -> str:
    """Archived nodes as text: a head line `#N role` each, thinking, text, and calls as JSON."""
    parts = []
    for line in lines:
        kind = f" ({line['kind']})" if line.get("kind") else ""
        answers = f" to call {line['result_of']}" if line.get("result_of") else ""
        parts.append(f"#{line['number']} {line['role']}{kind}{answers}")
        if line.get("thinking"):
            parts.append(f"[thinking] {line['thinking']}")
        if line.get("text"):
            parts.append(line["text"])
        parts += [
            f"[call {call['id']}] {call['name']} {json_text(call['arguments'])}" for call in line.get("calls") or ()
        ]
        parts.append("")
    return "\n".join(parts)


def expand(
    lines: Sequence[Mapping[str, Any]],
    first: int | None = None,
    last: int | None = None,
    offset: int = 0,
    limit: int = EXPAND_CHARACTERS,
) -> str:
    """The text of the archived nodes `first` to `last`, `limit` characters of it from `offset` on, and how to get the
    rest. Raises ArgumentError for a message or an offset that is not there."""
    if not lines:
        return "The archive is empty."
    numbers = [line["number"] for line in lines]
    for number in (first, last):
        if number is not None and number not in numbers:
            shown = ", ".join(f"#{n}" for n in numbers[:EXPAND_LISTED]) + ", ..." * (len(numbers) > EXPAND_LISTED)
            raise ArgumentError(f"the archive has no message #{number}; it has {shown}.")
    # by place: a checkpoint has a higher number than the messages behind it
    begin = 0 if first is None else numbers.index(first)
    chosen = lines[begin : len(lines) if last is None else numbers.index(last) + 1]
    if not chosen:
        raise ArgumentError(f"the archive has no message from #{first} to #{last} in this order; swap the two.")
    text = render(chosen)
    if not 0 <= offset < len(text):
        raise ArgumentError(f"offset {offset} is outside of this text of {len(text)} characters.")
    end = min(len(text), offset + max(1, limit))
    if end == len(text):
        return text[offset:].rstrip("\n") + f"\n[end of #{chosen[0]['number']} to #{chosen[-1]['number']}]"
    line_end = text.rfind("\n", offset, end) + 1
    if line_end > offset + limit // 2:  # a whole line where that costs little
        end = line_end
    return text[offset:end].rstrip("\n") + f"\n[characters {offset} to {end} of {len(text)}; go on with offset {end}]"


# ---- the nudge


def nudge(size: int, last_compaction_size: int, bucket: int) -> str | None:
    """The reminder for a context of `size` tokens that had `last_compaction_size` after the last compaction, or None.
    It changes only when another `bucket` of tokens is full."""
    full = (size - last_compaction_size) // bucket if bucket > 0 else 0
    if full < 1:
        return None
    return (
        f"The context has grown by {full * bucket} tokens since the last compaction. When a step is finished, {NAME} "
        "can replace it by a checkpoint."
    )
