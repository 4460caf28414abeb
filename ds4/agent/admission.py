"""How a tool's result comes into the context: as it is, else as a preview with the whole text in the spill, else as an
error text. The tool has run already, so nothing of its result is dropped without a trace."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import TYPE_CHECKING

from ds4.compaction import prompts
from ds4.errors import ContextFull
from ds4.events import Event, Notice
from ds4.nodes import Node
from ds4.spill import Entry
from ds4.transcript import Held

if TYPE_CHECKING:
    from .chat import Chat

LEAST_PREVIEW = 16  # tokens


def written(chat: Chat, held: Held) -> Node:
    """The node of a result."""
    return chat.writer.result(held.call, held.text, held.index, held.count)


def admit_result(chat: Chat, held: Held) -> Generator[Event, None, None]:
    """Appends a result in the largest form that fits, and empties the slot. Raises ContextFull when not even an error
    text fits: the result then stays in the slot."""
    transcript, live = chat.live.transcript, chat.live
    node, spills = written(chat, held), []
    if not chat.fits(len(node)):
        text, entry = _preview(chat, node)
        spills = [entry] if entry is not None else []
        node = written(chat, replace(held, text=text))
        where = entry.locator if entry is not None else "no place, for the spill cannot be written"
        yield Notice(f"a result is too large for the context and is kept in {where}; the model sees its two ends.")
    if not chat.fits(len(node)):
        reserve = live.limits.reserve if live.limits is not None else 1
        projected = live.used + len(node)
        node = written(chat, replace(held, text=prompts.result_too_large(projected, live.ctx, reserve)))
        fits = live.limits.fits_error(live.used, len(node)) if live.limits is not None else chat.fits(len(node))
        if not fits:
            for entry in spills:
                entry.discard()
            error = ContextFull(
                f"the result of a tool does not fit, nor does a text that says so: {live.used} tokens are used of ctx "
                f"{live.ctx}. It is kept: undo a turn, compact, or use a larger ctx."
            )
            error.wanted, error.ctx = projected, live.ctx
            raise error
    transcript.append(node, release=True, spills=spills)


def _preview(chat: Chat, node: Node) -> tuple[str, Entry | None]:
    """Head and tail of a result, and the entry of the spill that holds all of it."""
    live = chat.live
    try:
        entry = live.transcript.store.spill.prepare([node])
    except OSError:
        entry = None
    free = live.ctx - live.used - (live.limits.reserve if live.limits is not None else 1)
    tokens = max(LEAST_PREVIEW, min(free // 2, live.limits.tail if live.limits is not None else free // 2))
    locator = entry.locator if entry is not None else None
    text = prompts.preview(chat.format.tokenizer, node.text, tokens, 0, locator)
    hint = f"\n[`{chat.spans.EXPAND}` with this locator shows it]" if entry is not None and chat.spans.on else ""
    return text + hint, entry
