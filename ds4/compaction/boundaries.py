"""Where free text ends: before the end of a turn, a role, a thinking tag or a tool call.

At token level where the format has a token for the boundary, at text level across token boundaries where it does not.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..chat_formats import Boundary


class ControlWatch:
    """Lets text through up to the first boundary; what stands behind it is never seen.

    `ended`: the boundary that was met, None so far. Held back is only text that may belong to a boundary: the
    beginning of one that is spelled, and the text in front of a token that belongs to it (`Boundary.before`).
    """

    def __init__(self, boundaries: Iterable[Boundary]) -> None:
        self.ended: Boundary | None = None
        self._tokens: dict[int, list[Boundary]] = {}
        self._spelled: list[Boundary] = []
        for boundary in boundaries:
            if boundary.id is not None:
                self._tokens.setdefault(boundary.id, []).append(boundary)
            elif boundary.text:
                self._spelled.append(boundary)
        self._held = ""

    def stops(self, token: int) -> bool:
        """Whether this token is a boundary."""
        return token in self._tokens

    def feed(self, token: int, text: str) -> str:
        """The text that is free to go after this token. `text`: what the token adds, without meaning when the token is
        a boundary. Once `ended`, nothing is free any more."""
        if self.ended is not None:
            return ""
        if token in self._tokens:
            self.ended = self._tokens[token][0]
            free, self._held = self._held, ""
            return _without(free, [boundary.before for boundary in self._tokens[token]])
        pending = self._held + text
        found = [(pending.find(boundary.text), i) for i, boundary in enumerate(self._spelled)]
        place, i = min((hit for hit in found if hit[0] >= 0), default=(-1, -1))
        if place >= 0:
            self.ended, self._held = self._spelled[i], ""
            return _without(pending[:place], [self._spelled[i].before])
        sure = len(pending) - self._unsure(pending)
        self._held = pending[sure:]
        return pending[:sure]

    def flush(self) -> str:
        """The text held back, when nothing can follow any more."""
        free, self._held = self._held, ""
        return free

    def _unsure(self, text: str) -> int:
        """How many characters at the end may still turn out to belong to a boundary."""
        longest = 0
        for boundary in self._spelled:
            for whole in (boundary.before + boundary.text, boundary.text):
                longest = max(longest, _overlap(text, whole[:-1]))
        for boundaries in self._tokens.values():
            for boundary in boundaries:
                longest = max(longest, _overlap(text, boundary.before))
        return longest


def _overlap(text: str, start: str) -> int:
    """The length of the longest end of `text` that `start` begins with."""
    return next((n for n in range(min(len(text), len(start)), 0, -1) if text.endswith(start[:n])), 0)


def _without(text: str, endings: Iterable[str]) -> str:
    """The text without the longest of these endings."""
    longest = max((ending for ending in endings if text.endswith(ending)), key=len, default="")
    return text[: len(text) - len(longest)]
