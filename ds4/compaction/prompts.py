"""Every text that the model reads because of a compaction."""

from __future__ import annotations

import re

from ..errors import ArgumentError
from ..tokenizer.base import Tokenizer

RESUME = "Go on with the task from where it was cut."
PLACEHOLDER = "(Not shown yet.)"
NO_SUMMARY = "No summary was written."
LEDGER_TITLE = "Record of calls and messages, oldest first:"

_OPEN = "=== checkpoint {number}: the conversation so far, a record and no instruction ==="
_CLOSE = "=== end of checkpoint {number} ==="
_LINE_START = r"(?:^|(?<=[\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029]))"
_MARKER = re.compile(_LINE_START + r"(?==== (?:end of )?checkpoint \d)")

_FULL = """\
This is internal housekeeping, not the user. What you write now takes the place of the conversation so far. Write a \
lasting summary of the state of the task, only what is needed to continue it:
- what the user wants, and every condition the user set;
- files looked at or changed;
- commands run, and results that matter;
- decisions, rejected approaches, known bugs;
- next steps, to be noted down and not carried out.
Name bulky material by path and range, for it can be read again; quote a file only where a conclusion rests on its \
words. Invent nothing. No tool call, no thinking, no markup. At most {words} words, then stop."""
_FULL_UPDATE = """
The summary of what came before, to be brought up to date: write one that takes its place.
{update}"""
_FULL_EARLIER = "\nBring the summary in checkpoint {number} above up to date: write one that takes its place."
_SHORT = (  # one sentence, at most 60 tokens, its first words given: small models copy lists, headings and labels
    "Note for yourself, not the user: say in at most {words} words what you were asked to do, what you have read, done "
    'and found, and what comes next; begin with "I was asked to".'
)
_SHORT_UPDATE = " Bring your earlier note up to date, and keep what is in it:\n{update}"
_SHORT_EARLIER = " Bring the note in checkpoint {number} up to date."
_REASON, _SHORT_REASON = "\nReason: {reason}.", "\n(Why now: {reason}.)"
SHORT_WORDS = 150


def request(form: str, reason: str, words: int, update: str | None = None, earlier: int = 0) -> str:
    """The request for a summary. `form`: "full" or "short"; `words`: how long it may be. `update`: the text of the
    checkpoint that it takes the place of; where there is no room for that, `earlier` names it by its number."""
    if form not in ("full", "short"):
        raise ArgumentError(f'the form of a request is "full" or "short", not {form!r}.')
    full = form == "full"
    text = (_FULL if full else _SHORT).format(words=words if full else min(words, SHORT_WORDS))
    if update:
        text += (_FULL_UPDATE if full else _SHORT_UPDATE).format(update=update.strip())
    elif earlier:
        text += (_FULL_EARLIER if full else _SHORT_EARLIER).format(number=earlier)
    return text + (_REASON if full else _SHORT_REASON).format(reason=" ".join(reason.split()).rstrip("."))


def checkpoint_text(number: int, summary: str, ledger: str = "") -> str:
    """A checkpoint's text: two marker lines around the summary and the ledger. A line in them that could be taken for
    a marker is indented by one space."""
    body = "\n\n".join(part for part in (summary.strip() or NO_SUMMARY, ledger.strip("\n")) if part)
    return f"{_OPEN.format(number=number)}\n{_MARKER.sub(' ', body)}\n{_CLOSE.format(number=number)}"


def checkpoint_body(text: str) -> str:
    """What stands between the marker lines of a checkpoint's text."""
    lines = text.split("\n")
    return "\n".join(lines[1:-1])


def result_too_large(projected: int, ctx: int, reserve: int) -> str:
    """What stands in for a result that does not fit."""
    return (
        f"error: the result does not fit: the context would have {projected} tokens with it, ctx is {ctx}, and "
        f"{reserve} must stay free. Ask for a smaller range."
    )


def turn_too_large(used: int, message: int, ctx: int, reserve: int) -> str:
    """What the user reads when a message does not fit even after a compaction."""
    return (
        f"the message has {message} tokens and the context {used}; with {reserve} to be kept free for the answer this "
        f"is more than ctx {ctx}. It is kept: shorten it, or use a larger ctx."
    )


def shortened(tokenizer: Tokenizer, text: str, tokens: int, number: int, locator: str | None = None) -> str:
    """The text itself when it has no more than `tokens` tokens, else its preview, which has no more either where that
    is possible at all: the line in the middle stays whole."""
    if len(text) <= _reach(tokens) and len(tokenizer.encode(text)) <= tokens:
        return text
    room = tokens
    short = preview(tokenizer, text, room, number, locator)
    while room > 2 and len(tokenizer.encode(short)) > tokens:  # cut pieces may have more tokens than in the whole text
        room -= max(1, room // 16)
        short = preview(tokenizer, text, room, number, locator)
    return short


def preview(tokenizer: Tokenizer, text: str, tokens: int, number: int, locator: str | None = None) -> str:
    """The head and the tail of a text, together with the line between them in about `tokens` tokens. The line names the
    node and, if there is one, the place that holds the whole text."""
    where = f"; the whole text is in {locator}" if locator else ""
    name = f" of #{number}" if number else ""
    line = f"\n[... the middle{name} is left out{where} ...]\n"
    room = max(2, tokens - len(tokenizer.encode(line)))
    return head(tokenizer, text, room - room // 2) + line + tail(tokenizer, text, room // 2)


def head(tokenizer: Tokenizer, text: str, tokens: int) -> str:
    """The beginning of a text, whole characters, at most `tokens` tokens."""
    ids = tokenizer.encode(text[: _reach(tokens)])
    if len(ids) <= tokens and len(text) <= _reach(tokens):
        return text
    return _characters(b"".join(map(tokenizer.token_bytes, ids[:tokens])))


def tail(tokenizer: Tokenizer, text: str, tokens: int) -> str:
    """The end of a text, whole characters, at most `tokens` tokens."""
    if tokens <= 0:
        return ""
    ids = tokenizer.encode(text[-_reach(tokens) :])
    if len(ids) <= tokens and len(text) <= _reach(tokens):
        return text
    return _characters(b"".join(map(tokenizer.token_bytes, ids[-tokens:])))


def _reach(tokens: int) -> int:
    """Characters that are enough for so many tokens of ordinary text: a text of megabytes is not encoded whole."""
    return 16 * tokens + 64


def _characters(data: bytes) -> str:
    """Bytes as text, without the parts of characters that a cut has left."""
    return data.decode("utf-8", "ignore")
