"""`/plan`: what a compaction would do now, in numbers; nothing is changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds4.cli.output import Output
from ds4.compaction.live import common, open_calls
from ds4.compaction.plan import Plan, Refusal
from ds4.compaction.summary import Summarised
from ds4.compaction.whole import nothing_to_compact, request_for
from ds4.nodes import Node, tokens_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ds4.agent.chat import Chat


def show_whole(chat: Chat, out: Output, pace: float) -> None:
    """The whole-history compaction. `pace`: tokens a second that the model writes, 0 = unknown."""
    live, compactor = chat.live, chat.compactor
    surface, limits = live.transcript.surface, compactor.limits
    waiting = open_calls(surface)
    made: Plan | Refusal | None = nothing_to_compact(surface, live.writer, limits, waiting)
    made = made or compactor.planner(Summarised("", "ledger", 0), surface)(None)
    if isinstance(made, Refusal):
        out.event("plan", possible=False, reason=made.reason)
        out.line(f"no compaction: {made.reason}")
        return
    request = request_for(surface, live.writer, limits, compactor.policy, "asked for", waiting)
    kept = {node.number: node for node in made.surface}
    stays = [node for node in surface if node.number in kept and node.ids == kept[node.number].ids]
    cut = [node for node in surface if node.number in kept and node.ids != kept[node.number].ids]
    reused = live.session.nearest_exact(common(live.session.tokens, tokens_of(made.surface)))
    evaluated = made.size - reused
    seconds = _seconds(evaluated + len(request.prompt), live.speed, limits.summary, pace)
    out.event(
        "plan", possible=True, before=live.used, after=made.size, summary=limits.summary, reused=reused,
        evaluated=evaluated, tail=made.kept_tail, goes=[n.number for n in made.replaced],
        stays=[n.number for n in stays], cut=[n.number for n in cut], seconds=seconds,
    )  # fmt: skip
    out.line(f"goes:    {_listed(made.replaced)}")
    out.line(f"stays:   {_listed(stays)}")
    if cut:
        ends = sum(len(kept[node.number]) for node in cut)
        out.line(f"cut:     {_listed(cut)}: of what is too large the two ends stay, {ends} tokens")
    out.line(f"tokens:  {live.used} become {made.size} and the summary, which has {limits.summary} at most")
    out.line(f"prefill: {evaluated} again and the summary, {reused} stay in place; {_expected(seconds)}")


def show_span(chat: Chat, out: Output, start: str | None, end: str) -> None:
    """The compaction of a span. Its summary is not there yet, so it counts with one token."""
    found = chat.plan_span(start=start, end=end, summary="x", include_active=True)
    room = found["span"] - found["checkpoint"]
    out.event("plan", possible=True, room=room, **found)
    out.line(f"goes:    #{found['first']} to #{found['last']}: {found['nodes']} messages, {found['span']} tokens")
    out.line(f"tokens:  {found['before']} become {found['after']} and the summary, which may have {room}")
    again = f"{found['evaluated']} again and the summary, {found['reused']} stay in place"
    out.line(f"prefill: {again}; {_expected(found['seconds'])}")


def _seconds(prefill: int, speed: float, written: int, pace: float) -> float | None:
    return round(prefill / speed + written / pace, 2) if speed > 0 and pace > 0 else None


def _expected(seconds: float | None) -> str:
    return f"at most about {seconds:.1f} s" if seconds is not None else "how long it takes is known after some turns"


def _listed(nodes: Sequence[Node]) -> str:
    """Nodes by number, those in a row as a range, and their tokens."""
    numbers = sorted(node.number for node in nodes)
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    names = ", ".join(f"#{a}" if a == b else f"#{a} to #{b}" for a, b in ranges) or "nothing"
    return f"{names} ({sum(len(node) for node in nodes)} tokens)"
