"""The reader of a DeepSeek V4 assistant turn, which may hold DSML: text in, events out, piece by piece.

Nothing in DSML is escaped. Read as text, a value that spells its closing tag ends there, and a quoted call is a call.
Read by tokens (`spelled=False`) only true control tokens are markup.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import Any

from ds4.chat_formats.base import ToolCall
from ds4.chat_formats.dsml import (
    DSML,
    END,
    THINK,
    THOUGHT,
    ArgumentPiece,
    CallFinished,
    CallStarted,
    Event,
    Fault,
    PlainText,
    ThinkingText,
)
from ds4.chat_formats.toolcalls import MAX_FAULTS, json_value
from ds4.files.base import quote
from ds4.tokenizer.base import characters

# Inside the reader a protocol token is one character: a lone surrogate, which no text can hold (`characters`).
_D, _OPEN, _SHUT = "\ud800", "\ud801", "\ud802"
_MARKS = {str(DSML): _D, str(THINK): _OPEN, str(THOUGHT): _SHUT}
_SPELLINGS = {ord(mark): text for text, mark in _MARKS.items()}
_SPELLED = re.compile("|".join(map(re.escape, _MARKS)))

_BLOCK, _UNBLOCK = f"<{_D}tool_calls>", f"</{_D}tool_calls>"
_INVOKE, _UNINVOKE = f'<{_D}invoke name="', f"</{_D}invoke>"
_PARAMETER, _UNPARAMETER = f'<{_D}parameter name="', f"</{_D}parameter>"
_LONGEST = 32  # no tag is longer, names apart
_MAX_HEAD = 320  # an opening tag with a name of at most 256 characters; it stands on one line
_INVOKE_HEAD = re.compile(rf'{_INVOKE}([^\n{_D}]{{1,256}}?)">')
_PARAMETER_HEAD = re.compile(rf'{_PARAMETER}([^\n{_D}]{{0,256}}?)" string="(true|false)">')
_OPENER = re.compile(rf"\n{{0,2}}<{_D}")
_OPENER_BEGUN = re.compile(r"\n{0,2}<?\Z")
_SPACE = re.compile(r"\s*")
_LEAD = 64  # white space at most that may stand before a <think> that begins a turn


class _Unreadable(Exception):
    """What stands here is no call; the text says why."""


class _Input:
    """Text with the protocol tokens as marks. What could be the beginning of one is held back; an end of sentence that
    is the very last thing is dropped, elsewhere it is text."""

    def __init__(self, spelled: bool) -> None:
        self._spelled, self._held = spelled, ""

    def text(self, text: str) -> str:
        if not self._spelled:
            return characters(text)
        text = self._held + characters(text)
        tail = max((match.end() for match in _SPELLED.finditer(text)), default=0)
        keep = next((i for i in range(max(tail, len(text) - len(END)), len(text)) if _begins(text[i:])), len(text))
        self._held = text[keep:]
        return _SPELLED.sub(lambda match: _MARKS[match[0]], text[:keep])

    def control(self, text: str) -> str:
        before, self._held = self._held, ""
        return before + ("" if text == END else _MARKS.get(text, text))

    def rest(self) -> str:
        held, self._held = self._held, ""
        return "" if held == END else held


def _begins(text: str) -> bool:
    return any(token.startswith(text) for token in (*_MARKS, END))


class DsmlReader:
    """Reads an assistant turn piece by piece; it never raises, and any cut of the same text gives the same events,
    apart from how long the pieces of text are.

    `thinking`: the generation prefix has left a thinking block open. `spelled`: protocol tokens are recognised by their
    spelling; else only those count that `feed_control` brings, and what `feed` brings is text however it is spelled.

    `inside_syntax`: the text so far ends where the markup of a call has to go on, not in its arguments or in the
    answer: a caller may choose the next token greedily there. `inside_markup`: calls have begun and not ended, and
    `inside_block`: the end of their block has still to come.

    A call that is cut or malformed is never completed. Behind malformed markup the rest of its block stays unread:
    what was meant as a value can then not be told from a call.
    """

    def __init__(self, thinking: bool = False, spelled: bool = True) -> None:
        self.inside_syntax = self.inside_markup = self.inside_block = False
        self._input = _Input(spelled)
        self._buffer, self._pos, self._ended = "", 0, False
        self._raw: list[str] = []  # markup that no event has told of yet
        self._events: list[Event] = []
        self._calls = self._faults = 0
        self._reading = self._turn(thinking)

    def feed(self, text: str) -> list[Event]:
        """The events that are certain with this text."""
        return self._go_on(self._input.text(text))

    def feed_control(self, text: str) -> list[Event]:
        """The same for a control token, given by its text."""
        return self._go_on(self._input.control(text))

    def finish(self) -> list[Event]:
        """The events of what was held back. The reader is used up then."""
        self._ended = True
        return self._go_on(self._input.rest())

    def _go_on(self, text: str) -> list[Event]:
        self._buffer, self._pos = self._buffer[self._pos :] + text, 0
        next(self._reading, None)
        events, self._events = self._events, []
        return events

    # Each of the following reads on from `_pos`; it yields when it needs more text.

    def _turn(self, thinking: bool) -> Generator[None, None, None]:
        if (yield from self._reopened()) or thinking:
            yield from self._thoughts()
        while (yield from self._answer()):
            self.inside_markup = True
            try:
                yield from self._block()
            except _Unreadable as wrong:
                yield from self._until(_UNBLOCK)
                self._fault(str(wrong))
            self.inside_markup = self.inside_block = False

    def _reopened(self) -> Generator[None, None, bool]:
        """Whether the turn begins with a <think> of its own, which is passed over."""
        while True:
            end = _SPACE.match(self._buffer, 0, _LEAD).end()  # type: ignore[union-attr]
            if end < len(self._buffer) or end == _LEAD or self._ended:
                break
            yield
        if end == _LEAD or not self._buffer.startswith(_OPEN, end):
            return False
        self._pos = end + 1
        return True

    def _thoughts(self) -> Generator[None, None, None]:
        while (end := self._buffer.find(_SHUT, self._pos)) < 0:
            self._say(ThinkingText, len(self._buffer))
            if self._ended:
                return
            yield
        self._say(ThinkingText, end)
        self._pos += 1

    def _answer(self) -> Generator[None, None, bool]:
        """Text, up to a call (True) or to the end."""
        while True:
            opener = _OPENER.search(self._buffer, self._pos) if self._faults < MAX_FAULTS else None
            if opener is None:
                tail = max(self._pos, len(self._buffer) - 3)
                held = 0 if self._ended else len(_OPENER_BEGUN.search(self._buffer, tail)[0])  # type: ignore[index]
                self._say(PlainText, len(self._buffer) - held)
                self.inside_syntax = False
            else:
                self._say(PlainText, opener.start())
                tag = opener.end() - 2
                if self._buffer.startswith((_BLOCK, _INVOKE), tag) or (self._ended and self._begun(tag)):
                    return True
                if not self._begun(tag):
                    self._say(PlainText, opener.end())
                    continue
                self.inside_syntax = True
            if self._ended:
                return False
            yield

    def _block(self) -> Generator[None, None, None]:
        """The calls between a pair of tags; a call may also stand without them."""
        calls, faults = self._calls, self._faults
        bare = (yield from self._tag(_BLOCK, _INVOKE)) == _INVOKE
        self._keep(0 if bare else len(_BLOCK))
        self.inside_block = not bare
        while (tag := (yield from self._look(_INVOKE, _UNBLOCK))) == _INVOKE:
            yield from self._call()
            if self._faults >= MAX_FAULTS:
                return
        nothing = (calls, faults) == (self._calls, self._faults)
        if tag:
            self._keep(len(_UNBLOCK))
        elif not bare and self._cut(_UNBLOCK) and not nothing:
            self._keep(len(self._buffer) - self._pos)  # only the closing tag is cut: the calls are whole
        elif not bare:
            raise _Unreadable(self._why("has other text between its tags"))
        if nothing:
            self._fault("is an empty block")
        elif self._calls == calls or not tag and bare:
            self._flush()  # tags around faults alone are text like these, and so is what follows a call without tags
        self._raw.clear()

    def _call(self) -> Generator[None, None, None]:
        (name,) = yield from self._head(_INVOKE_HEAD)
        self._events.append(CallStarted(name))
        arguments: dict[str, Any] = {}
        wrong = ""
        while (yield from self._tag(_PARAMETER, _UNINVOKE)) == _PARAMETER:
            key, is_text = yield from self._head(_PARAMETER_HEAD)
            value: Any = yield from self._value(key)
            if key in arguments:
                wrong = wrong or f"has the argument {quote(key)} twice"
            if is_text == "false":
                try:
                    value = json_value(value)
                except ValueError:
                    wrong = wrong or f"has an argument {quote(key)} that is no JSON"
            arguments[key] = value
        self._keep(len(_UNINVOKE))
        if wrong:
            self._fault(wrong)
            return
        self._calls += 1
        self._raw.clear()
        self._events.append(CallFinished(ToolCall(name, arguments)))

    def _value(self, key: str) -> Generator[None, None, str]:
        """The value of an argument, as text."""
        found: list[str] = []
        while True:
            end = self._buffer.find(_UNPARAMETER, self._pos)
            stop = end if end >= 0 else len(self._buffer) - self._held(_UNPARAMETER)
            if piece := self._keep(stop - self._pos):
                found.append(piece)
                self._events.append(ArgumentPiece(key, piece))
            if end >= 0:
                self._keep(len(_UNPARAMETER))
                return "".join(found)
            yield from self._more(_D in self._buffer[stop:])

    def _until(self, tag: str) -> Generator[None, None, None]:
        """Passes over everything up to and with a tag."""
        while (end := self._buffer.find(tag, self._pos)) < 0 and not self._ended:
            self._keep(len(self._buffer) - self._held(tag) - self._pos)
            self.inside_syntax = False
            yield
        self._keep((len(self._buffer) if end < 0 else end + len(tag)) - self._pos)

    # ---- tags

    def _head(self, head: re.Pattern[str]) -> Generator[None, None, tuple[str, ...]]:
        """The names in an opening tag, which is passed over."""
        while (match := head.match(self._buffer, self._pos)) is None:
            line = self._buffer[self._pos : self._pos + _MAX_HEAD]
            if len(line) == _MAX_HEAD or "\n" in line or _D in line[2:]:
                raise _Unreadable("has a tag that cannot be read")
            yield from self._more()
        self._keep(match.end() - self._pos)
        return tuple(group.translate(_SPELLINGS) for group in match.groups())

    def _tag(self, *tags: str) -> Generator[None, None, str]:
        """Which of the tags comes next."""
        tag = yield from self._look(*tags)
        if not tag:
            raise _Unreadable(self._why("has other text between its tags"))
        return tag

    def _look(self, *tags: str) -> Generator[None, None, str]:
        """The same, "" when none of them does."""
        while True:
            self._keep(_SPACE.match(self._buffer, self._pos).end() - self._pos)  # type: ignore[union-attr]
            for tag in tags:
                if self._buffer.startswith(tag, self._pos):
                    return tag
            if self._ended or not self._begun(self._pos, tags):
                return ""
            yield from self._more()

    def _more(self, syntax: bool = True) -> Generator[None, None, None]:
        if self._ended:
            raise _Unreadable("is cut short")
        self.inside_syntax = syntax
        yield

    def _begun(self, pos: int, tags: tuple[str, ...] = (_BLOCK, _INVOKE)) -> bool:
        """Whether what is left from `pos` on could become one of the tags; at the end: was cut in the middle of one."""
        rest = self._buffer[pos : pos + _LONGEST]
        if self._ended:
            rest, tags = rest.translate(_SPELLINGS), tuple(tag.translate(_SPELLINGS) for tag in tags)
        return any(len(rest) < len(tag) and tag.startswith(rest) for tag in tags)

    def _cut(self, tag: str) -> bool:
        return self._ended and self._begun(self._pos, (tag,))

    def _why(self, reason: str) -> str:
        """The reason, or that the text ends in the middle of what would be right."""
        tags = (_BLOCK, _INVOKE, _UNBLOCK, _UNINVOKE, _PARAMETER)
        return "is cut short" if self._ended and self._begun(self._pos, tags) else reason

    def _held(self, tag: str) -> int:
        """How many characters at the end may be the beginning of the tag."""
        begin = self._buffer.rfind("<", max(self._pos, len(self._buffer) - len(tag)))
        return len(self._buffer) - begin if begin >= 0 and tag.startswith(self._buffer[begin:]) else 0

    # ---- what comes out

    def _say(self, kind: type[PlainText | ThinkingText], stop: int) -> None:
        text, self._pos = self._buffer[self._pos : stop], stop
        if text:
            self._events.append(kind(text.translate(_SPELLINGS)))

    def _keep(self, n: int) -> str:
        """Passes over n characters of markup, and returns them."""
        text = self._buffer[self._pos : self._pos + n].translate(_SPELLINGS)
        self._raw.append(text)
        self._pos += n
        return text

    def _flush(self) -> None:
        text = "".join(self._raw)
        self._raw.clear()
        if text:
            self._events.append(PlainText(text))

    def _fault(self, reason: str) -> None:
        text = "".join(self._raw)
        self._raw.clear()
        self._faults += 1
        self._events.append(Fault(f"Tool call {self._calls + self._faults} {reason}.", text))
