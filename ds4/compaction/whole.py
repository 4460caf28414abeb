"""Whole-history compaction: what the model is asked, and what the surface becomes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ..nodes import Node, Writer, size_of, tokens_of
from . import ledger, prompts
from .plan import Plan, Refusal, checkpoint_data
from .policy import CompactionPolicy, Limits
from .tail import Kept, keep, own_size

_LONGEST_REASON = 80  # characters
_WORDS = 0.6  # for a token, with some to spare


@dataclass(frozen=True)
class Request:
    """What is appended to the live context for the summary: `prompt` with placeholder results, the request and the
    head of the answer; `ids`: the request's own words, which the summary must not echo."""

    prompt: list[int]
    ids: list[int]


def request_for(
    surface: Sequence[Node],
    writer: Writer,
    limits: Limits,
    policy: CompactionPolicy,
    reason: str,
    waiting: Collection[str] = (),
) -> Request:
    """The request for a summary of this surface. The text of the checkpoint that will be replaced stands in it, to be
    brought up to date; where that would take the summary's room, the checkpoint is named by its number."""
    form, words, reason = policy.request or "full", int(limits.summary * _WORDS), reason[:_LONGEST_REASON]
    _, above = _parts(surface)
    gone = _replaced(above, keep(above, writer, limits, waiting))
    earlier = [node for node in gone if node.kind == "checkpoint" and node.data.get("summary")]
    number = int(earlier[-1].data.get("number", 0)) if earlier else 0
    own = prompts.request(form, reason, words, earlier=number)
    ids = writer.format.tokenizer.encode(own)
    text = "\n\n".join(str(node.data["summary"]) for node in earlier)
    prompt = _prompt(surface, writer, prompts.request(form, reason, words, update=text), waiting)
    if text and size_of(surface) + len(prompt) + limits.summary > limits.ctx:
        prompt = _prompt(surface, writer, own, waiting)
    return Request(prompt, ids)


def request_size(writer: Writer, policy: CompactionPolicy) -> int:
    """The tokens that a request takes, for `CompactionPolicy.limits`: the longest one that copies no checkpoint, with
    the placeholder for an open call and the head of the answer."""
    reason = ("the context is nearly full " * _LONGEST_REASON)[:_LONGEST_REASON]
    text = prompts.request(policy.request or "full", reason, 9999, earlier=999)
    called = [writer.result("", prompts.PLACEHOLDER)] if writer.format.tools else []
    asked = writer.arrange([*called, writer.user(text, first=False, kind="note")], called or [writer.filler()])
    return size_of([*called, *asked]) + len(writer.format.generation_prefix(False))


def acceptance(
    surface: Sequence[Node], writer: Writer, limits: Limits, *, number: int, waiting: Collection[str] = ()
) -> Callable[[str], str | None]:
    """Says of a summary why its checkpoint would not be smaller than what it stands for, or None."""

    def accept(summary: str) -> str | None:
        plan = plan_whole(surface, writer, limits, summary, number=number, waiting=waiting)
        return plan.reason if isinstance(plan, Refusal) and plan.kind == "shrink" else None

    return accept


def nothing_to_compact(
    surface: Sequence[Node], writer: Writer, limits: Limits, waiting: Collection[str] = ()
) -> Refusal | None:
    """Says, before the model is asked, that there is nothing to compact: all stays anyway, or is so little that not
    even a checkpoint without a summary would be smaller."""
    plan = plan_whole(surface, writer, limits, "", number=1, waiting=waiting)
    if isinstance(plan, Refusal) and plan.kind == "shrink" and size_of(surface) <= limits.landing:
        return Refusal("nothing", f"nothing to compact: {plan.reason}")
    return plan if isinstance(plan, Refusal) and plan.kind == "nothing" else None


def plan_whole(
    surface: Sequence[Node],
    writer: Writer,
    limits: Limits,
    summary: str,
    *,
    number: int,
    locator: str | None = None,
    waiting: Collection[str] = (),
) -> Plan | Refusal:
    """System prompt, checkpoint `number` with the summary and the ledger, newest human message, tail.

    `locator`: where the raw nodes will lie in the spill. `waiting`: ids of calls whose results are still to come. Kept
    nodes keep their ids and numbers. When the result is nearer to the trigger than a tenth of ctx, the tail is
    shortened node by node. What previews free counts among what the checkpoint stands for.
    """
    opening, above = _parts(surface)
    kept = keep(above, writer, limits, waiting, locator)
    while True:
        gone = _replaced(above, kept)
        before = size_of(surface)
        if not _worth(gone) and not kept.previews:
            shorter = kept.without(before - limits.landing) if before > limits.landing else None
            if shorter is None:
                return Refusal("nothing", "nothing to compact: all that comes after the system prompt stays anyway")
            kept = shorter
            continue
        checkpoint = _checkpoint(gone, writer, limits, summary, number, locator)
        arranged = writer.arrange([*opening, checkpoint, *kept.nodes])
        excess = size_of(arranged) - limits.landing
        shorter = kept.without(excess) if excess > 0 else None
        if shorter is None:
            break
        kept = shorter
    size, after = len(checkpoint), size_of(arranged)
    freed = sum(own_size(node, writer) for node in gone)
    freed += sum(own_size(whole, writer) - own_size(short, writer) for short, whole in kept.previews)
    if size >= freed or after >= before:
        return Refusal("shrink", f"the checkpoint has {size} tokens and would stand for {freed}: it must be smaller")
    if excess > 0:
        return Refusal(
            "landing",
            f"the context would have {after} tokens even without its end, but {limits.landing} are the most that a "
            f"compaction may leave (soft trigger {limits.soft} - a tenth of ctx)",
        )
    start = next(i for i, node in enumerate(arranged) if node.kind == "checkpoint")
    return Plan(
        tuple(arranged),
        arranged[start],
        gone,
        size_of(arranged[start + 1 :]),
        tuple((whole, locator or "") for _, whole in kept.previews),
    )


def _parts(surface: Sequence[Node]) -> tuple[list[Node], list[Node]]:
    """(the system prompt's node if there is one, what stands above it)."""
    n = int(bool(surface) and surface[0].role == "system")
    return list(surface[:n]), list(surface[n:])


def _replaced(above: Sequence[Node], kept: Kept) -> tuple[Node, ...]:
    """The nodes that the checkpoint stands for. A filler is no message."""
    stay = {id(node) for node in kept.nodes} | {id(whole) for _, whole in kept.previews}
    return tuple(node for node in above if id(node) not in stay and node.kind != "filler")


def _worth(gone: Sequence[Node]) -> bool:
    """Whether a checkpoint of these nodes says more than what is there: one checkpoint alone stays as it is."""
    return any(node.kind not in ("checkpoint", "note") for node in gone) or (
        sum(node.kind == "checkpoint" for node in gone) > 1
    )


def _checkpoint(
    gone: Sequence[Node], writer: Writer, limits: Limits, summary: str, number: int, locator: str | None
) -> Node:
    """The node that stands for `gone`. The archive's place is the newest entry of its ledger."""
    tokenizer = writer.format.tokenizer
    entries = ledger.collect(gone, tokenizer, limits.human)
    if locator:
        entries = [entry for entry in entries if entry.text != locator]
        entries.append(ledger.Entry("spill", locator))
    entries = ledger.bounded(entries, limits.ledger, limits.human, lambda text: len(tokenizer.encode(text)))
    text = prompts.checkpoint_text(number, summary, ledger.render(entries))
    data = checkpoint_data(number, summary.strip(), ledger.to_json(entries), locator)
    return writer.user(text, first=False, kind="checkpoint", data=data)


def _prompt(surface: Sequence[Node], writer: Writer, request: str, waiting: Collection[str]) -> list[int]:
    """The ids behind the surface: placeholders for open calls, the request, the head of the answer."""
    added: list[Node] = []
    place = next((i for i in reversed(range(len(surface))) if surface[i].calls), None)
    if place is not None:
        calls = surface[place].calls
        answered = {node.result_of for node in surface[place:] if node.role == "tool"}
        if any(call.id in waiting and call.id not in answered for call in calls):
            added = [
                writer.result(call.id, prompts.PLACEHOLDER, i, len(calls))
                for i, call in enumerate(calls)
                if call.id not in answered
            ]
    added.append(writer.user(request, first=False, kind="note"))
    return [*tokens_of(writer.arrange(added, surface)), *writer.format.generation_prefix(False)]
