"""Anchors: how the agent names a message by its verbatim opening, or by its number `#N`.

Texts are compared in a normal form in which the ways to type a punctuation mark or a space are one; nothing else is
folded. Every error says what would work instead.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Collection, Sequence

from ds4.errors import ArgumentError
from ds4.nodes import Node

from .prompts import checkpoint_body

ANCHOR_SHOWN = 120
PREVIEW = 80
CLOSEST = 3
HITS_SHOWN = 20

_PUNCTUATION = {
    "\u3002": ".", "\uff0c": ",", "\u3001": ",", "\uff01": "!", "\uff1f": "?", "\uff1b": ";", "\uff1a": ":",
    "\u201c": '"', "\u201d": '"', "\u2018": "'", "\u2019": "'", "\uff08": "(", "\uff09": ")", "\u3010": "[",
    "\uff3b": "[", "\u3011": "]", "\uff3d": "]", "\uff5b": "{", "\uff5d": "}", "\uff5e": "~", "\u2026": "...",
}  # fmt: skip
# Not \s: that has the separators U+001C to U+001F and U+0085 as well, and lacks U+FEFF.
_SPACE = re.compile("[\t\n\v\f\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff]+")
_NUMBER = re.compile("#([0-9]{1,18})")
_CJK = (
    "\u2e80-\u2fdf\u3005\u3007\u3021-\u3029\u3038-\u303b\u3400-\u4dbf\u4e00-\u9fff"  # Han
    "\uf900-\ufaff\U00020000-\U0003ffff"
    "\u3041-\u30fa\u30fc-\u30ff\u31f0-\u31ff\uff66-\uff9f"  # Kana
    "\u1100-\u11ff\u3131-\u318e\ua960-\ua97c\uac00-\ud7fb\uffa0-\uffdc"  # Hangul
)
_WORD = re.compile(rf"[{_CJK}]|(?:(?![{_CJK}])[^\W_]){{3,}}")
_JOINER = "\u200d"


def normalise(text: str) -> str:
    """The form in which anchors and texts are compared: punctuation mapped, white space collapsed and trimmed."""
    for mark, form in _PUNCTUATION.items():  # no form is a mark; many times as fast as str.translate
        text = text.replace(mark, form)
    return _SPACE.sub(" ", text).strip(" ")


def text_of(node: Node) -> str:
    """What an anchor is compared with: the text as it was written, of a checkpoint what stands between its marker
    lines. Thinking and calls are no part of it; what looks like a call inside a text is text."""
    return checkpoint_body(node.text) if node.kind == "checkpoint" else node.text


def nameable(node: Node) -> bool:
    """Whether an anchor can name it by its text: messages of user and assistant, checkpoints, and notes."""
    return node.role in ("user", "assistant") and node.kind != "filler"


def find(surface: Sequence[Node], anchor: str, side: str, never: Collection[int] = ()) -> int:
    """The index of the one node that the anchor names. `side` is "start" or "end"; nodes whose index is in `never`
    count only when no other node is hit, so that a caller can say why they will not do.

    Raises ArgumentError when no node, or more than one, is hit.
    """
    wanted = normalise(anchor)
    if match := _NUMBER.fullmatch(wanted):
        return _numbered(surface, int(match[1]), side)
    hits: list[int] = []
    whole: list[int] = []
    for i, node in enumerate(surface):
        if nameable(node):
            opening = _opening(text_of(node), len(wanted) + 1)
            if opening.startswith(wanted):
                (whole if opening == wanted else hits).append(i)
    hits = whole or hits
    hits = [i for i in hits if i not in never] or hits
    if not hits:
        raise ArgumentError(_no_hit(surface, anchor, side))
    if len(hits) > 1:
        raise ArgumentError(_ambiguous([surface[i] for i in hits], anchor, side))
    return hits[0]


def listing(nodes: Sequence[Node]) -> str:
    """Nodes as lines of `#N` and preview."""
    return "\n".join(
        f"#{node.number} {node.role}: {cut(_opening(text_of(node), 4 * PREVIEW), PREVIEW)}" for node in nodes
    )


def cut(text: str, limit: int) -> str:
    """The text, or its first `limit` characters and an ellipsis; no combining sequence is torn."""
    return text if len(text) <= limit else text[: _border(text, limit)] + "\u2026"


def closest(surface: Sequence[Node], anchor: str) -> list[Node]:
    """The nodes that share most words with the anchor, best first, the earlier one of equals; without one in common,
    none. Words are compared without case: a wrong capital is what makes many anchors miss."""
    words = _words(anchor)
    scored = [(len(words & _words(text_of(node))), -i) for i, node in enumerate(surface) if nameable(node)]
    best = sorted((score for score in scored if score[0]), reverse=True)[:CLOSEST]
    return [surface[-i] for _, i in best]


def _opening(text: str, length: int) -> str:
    """The first `length` characters of the normal form, without the work of making the rest of it."""
    take = 2 * length + 64
    while take < len(text):
        found = normalise(text[:take])  # the normal form of a beginning is the beginning of the normal form
        if len(found) >= length:
            return found[:length]
        take *= 4
    return normalise(text)[:length]


def _numbered(surface: Sequence[Node], number: int, side: str) -> int:
    for i, node in enumerate(surface):
        if node.number == number:
            return i
    near = sorted((node for node in surface if nameable(node)), key=lambda node: abs(node.number - number))[:CLOSEST]
    near.sort(key=lambda node: node.number)
    raise ArgumentError(
        f"The {side} anchor #{number} names no node of the context now; perhaps it was compacted before. "
        f"The numbers next to it are:\n{listing(near)}"
    )


def _no_hit(surface: Sequence[Node], anchor: str, side: str) -> str:
    near = closest(surface, anchor)
    head = f'The {side} anchor "{cut(anchor, ANCHOR_SHOWN)}" is not the opening of any message in the context. '
    if not near:
        return head + "Copy the first words of a user or assistant message as they stand there, or name it as #N."
    return head + f"Closest are these; name one by its number or copy its opening:\n{listing(near)}"


def _ambiguous(hits: Sequence[Node], anchor: str, side: str) -> str:
    texts = [normalise(text_of(node)) for node in hits]
    same = len(os.path.commonprefix(texts))
    if all(len(text) == same for text in texts):
        same = 0  # equal to the last character: only their numbers differ
    lines = [f"#{node.number} {node.role}: {_from(text, same)}" for node, text in zip(hits, texts, strict=True)]
    more = f"\n(and {len(hits) - HITS_SHOWN} more)" if len(hits) > HITS_SHOWN else ""
    return (
        f'AMBIGUOUS: {len(hits)} messages open with the {side} anchor "{cut(anchor, ANCHOR_SHOWN)}". '
        "Name the one you mean by its number, or copy more of its opening"
        + (" (shown from where they differ):\n" if same else " (these are equal):\n")
        + "\n".join(lines[:HITS_SHOWN])
        + more
    )


def _from(text: str, pos: int) -> str:
    """A preview of the text from `pos` on."""
    pos = _border(text, pos)
    shown = cut(text[pos : pos + 4 * PREVIEW], PREVIEW) or "(ends here)"
    return "\u2026" * bool(pos) + shown


def _border(text: str, pos: int) -> int:
    """The last place up to `pos` where the text may be cut: not in front of a mark that belongs to the character
    before it, and on neither side of a joiner. `pos` itself inside of what is longer than any real character."""
    for at in range(pos, max(0, pos - PREVIEW), -1):
        if at >= len(text) or not (_joins(text[at]) or text[at - 1] == _JOINER):
            return at
    return pos


def _joins(character: str) -> bool:
    modifier = "\U0001f3fb" <= character <= "\U0001f3ff"  # skin tones
    return character == _JOINER or modifier or unicodedata.category(character).startswith("M")


def _words(text: str) -> set[str]:
    return set(_WORD.findall(normalise(text).casefold()))
