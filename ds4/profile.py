"""What `Engine.profile` found: entries, and a table of them for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ROUND, SESSION, CALLS = "between ops", "session", "between calls"
HEAD = ("rounds of", "op", "format", "calls", "ms", "%", "us/token", "GB/s", "GMAC/s")


@dataclass(frozen=True)
class ProfileEntry:
    """One kind of work. `many`: in rounds of several tokens, else of one. `op`: an op, with the format of its weights
    or rows, or what is not one:

    - "between ops": inside rounds; `calls` are rounds, `rows` the tokens of them;
    - "session": inside eval, sync and refresh, outside their rounds: checks, pages, the wait for a turn;
    - "between calls": the time between two of these: sampling, Python, the program.

    All `seconds` together are the time from the first call to the end of the last one. `bytes`: of weights and rows,
    each counted once an op, however many tokens read it. `macs`: multiply-adds. `rows`: rows read or written, counted
    for each token.
    """

    op: str
    format: str
    many: bool
    calls: int
    seconds: float
    bytes: int
    macs: int
    rows: int


def tokens_of(entries: Iterable[ProfileEntry], many: bool) -> int:
    """How many tokens the rounds of one kind evaluated."""
    return sum(e.rows for e in entries if e.op == ROUND and e.many == many)


def table(entries: Sequence[ProfileEntry]) -> list[list[str]]:
    """Rows of text under `HEAD`: for each kind of round its entries, the longest time first, and their sum."""
    lines = [list(HEAD)]
    for many in (True, False):
        some = sorted((e for e in entries if e.many == many), key=lambda e: -e.seconds)
        tokens, total = tokens_of(some, many), sum(e.seconds for e in some)
        if not tokens:
            continue
        kind = "several" if many else "one token"
        for e in some:
            lines.append([kind, e.op, e.format, str(e.calls), *_times(e.seconds, total, tokens), *_rates(e)])
        rounds = sum(e.calls for e in some if e.op == ROUND)
        lines.append([kind, f"{tokens} tokens", "", str(rounds), *_times(total, total, tokens), "", ""])
    return lines


def _times(seconds: float, total: float, tokens: int) -> list[str]:
    return [f"{seconds * 1e3:.2f}", f"{100 * seconds / (total or 1):.1f}", f"{seconds * 1e6 / tokens:.2f}"]


def _rates(e: ProfileEntry) -> list[str]:
    return [f"{n / e.seconds / 1e9:.2f}" if n and e.seconds else "" for n in (e.bytes, e.macs)]
