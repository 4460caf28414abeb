"""How a tool's result comes into the context: as it is, else behind a compaction, else as a preview with the whole text
in the spill, else as an error text. The tool has run already, so its result is in the slot until it has found a place:
nothing of it is lost.

A result that would fire the soft trigger waits for that compaction too: behind it in the context, a large one would
become a preview before the model has seen it. For the same reason the soft trigger waits for the model's next answer
where results that are new to it stand on the surface and would not stay whole."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import TYPE_CHECKING

from ds4.compaction import prompts
from ds4.compaction.live import open_calls
from ds4.compaction.tail import keep
from ds4.errors import Cancelled, ContextFull
from ds4.events import Event, Notice
from ds4.nodes import Node
from ds4.spill import Entry
from ds4.transcript import Held

if TYPE_CHECKING:
    from .chat import Chat

LEAST_PREVIEW = 16  # tokens


def append_whole(chat: Chat, held: Held) -> bool:
    """Appends a result as it is, and empties the slot if it was there; False when it does not fit."""
    node = _written(chat, held)
    fits = chat.fits(len(node))
    if fits:
        chat.transcript.append(node, release=_in_slot(chat, held))
    return fits


def append_now(chat: Chat, held: Held) -> bool:
    """`append_whole`; False also where a compaction is due before it."""
    return not soft_due(chat, len(_written(chat, held))) and append_whole(chat, held)


def soft_due(chat: Chat, tokens: int = 0) -> bool:
    """Whether the soft trigger fires with so many tokens more, and its compaction leaves whole what the model has not
    seen."""
    limits = chat.live.limits
    return limits is not None and limits.soft_fires(chat.live.used + tokens) and not cuts_unseen(chat)


def cuts_unseen(chat: Chat) -> bool:
    """Whether a compaction would make a preview of a result that the model has not seen."""
    surface, unseen = chat.transcript.surface, set()
    for node in reversed(surface):
        if node.role == "assistant" and node.kind != "filler":
            break
        if node.role == "tool":
            unseen.add(node.number)
    if not unseen:
        return False
    above = [node for node in surface if node.role != "system"]
    kept = keep(above, chat.writer, chat.compactor.limits, open_calls(surface))
    cut = {whole.number for _, whole in kept.previews}
    return not unseen <= {node.number for node in kept.nodes} - cut


def admit(chat: Chat, held: Held) -> Generator[Event, None, None]:
    """Appends a result in the largest form that fits, behind a compaction if one is due or that helps. Raises Cancelled
    when the user ends that, and ContextFull when not even an error text fits: the result then waits in the slot."""
    if append_now(chat, held):
        return
    if not _in_slot(chat, held):
        chat.transcript.hold(held)
    fits = chat.fits(len(_written(chat, held)))
    reason = "the context is nearly full" if fits else "a tool result does not fit"
    outcome = yield from chat.compact_now(reason, automatic=True)
    if outcome.state == "cancelled" or chat.cancelled.is_set():
        raise Cancelled("the compaction that a tool result needs was cancelled; the result waits.")
    if append_whole(chat, held):
        return
    used, ctx, limits = chat.live.used, chat.live.ctx, chat.live.limits
    whole = _written(chat, held)
    text, entry = _preview(chat, whole)
    place = {"spill": entry.locator} if entry is not None else {}  # the ledger of later checkpoints names it
    node, form = _written(chat, replace(held, text=text), **place), "its two ends"
    if not chat.fits(len(node)):
        text = prompts.result_too_large(used + len(whole), ctx, chat.reserve)
        node, form = _written(chat, replace(held, text=text), **place), "that it does not fit"
        if not (limits.fits_error(used, len(node)) if limits is not None else chat.fits(len(node))):
            if entry is not None:
                entry.discard()
            error = ContextFull(
                f"the result of a tool has {len(whole)} tokens and does not fit, nor does a text that says so: {used} "
                f"tokens are used of ctx {ctx}. It is kept: undo a turn, compact, or use a larger ctx."
            )
            error.wanted, error.ctx = used + len(whole), ctx
            raise error
    chat.transcript.append(node, release=True, spills=[entry] if entry is not None else [])
    where = entry.locator if entry is not None else "the log of the conversation, for the spill cannot be written"
    yield Notice(f"a tool result is too large for the context: the model sees {form}, the whole is in {where}.")


def _written(chat: Chat, held: Held, **data: str) -> Node:
    return chat.writer.result(held.call, held.text, held.index, held.count, **data)


def _in_slot(chat: Chat, held: Held) -> bool:
    slot = chat.transcript.held
    return slot is not None and slot.kind == "tool" and slot.call == held.call


def _preview(chat: Chat, node: Node) -> tuple[str, Entry | None]:
    """Head and tail of a result, and the entry of the spill that holds all of it: None where it cannot be written."""
    live = chat.live
    try:
        entry = live.transcript.store.spill.prepare([node])
    except OSError:
        entry = None
    free = live.ctx - live.used - chat.reserve
    tokens = max(LEAST_PREVIEW, min(free // 2, live.limits.tail if live.limits is not None else free // 2))
    locator = entry.locator if entry is not None else None
    text = prompts.preview(chat.format.tokenizer, node.text, tokens, 0, locator)
    hint = f"\n[`{chat.spans.EXPAND}` with this locator shows it]" if entry is not None and chat.spans.on else ""
    return text + hint, entry
