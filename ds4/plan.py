"""What a DeepSeek V4 costs on a machine that is not here: weights, rows, marks, bytes read per token, all from its
options. The formulas for rows are those of the core (`csrc/layout.c`, `csrc/deepseek_v4_load.c`); tests compare them
with what an engine of the tiny models says and holds.

>>> plan = make_plan(sizes, ctx=1_000_000, kv_dtype="fp8")
>>> plan.weight_bytes, plan.token_bytes, plan.context_bytes
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from ds4.errors import ArgumentError
from ds4.families.deepseek_v4 import OVERLAP, Sizes, pieces, stored_bytes

PAGE_ROWS, SMALL_PAGE_ROWS = 64, 8
KV_DTYPES = ("f32", "f16", "fp8")
FP8_BLOCK, FP4_BLOCK = 64, 32


@dataclass(frozen=True)
class Part:
    """One part of a row: so many numbers, the last `tail` of them rotary, kept as `kind`."""

    width: int
    kind: str
    tail: int = 0

    def bytes(self) -> int:
        if self.kind == "fp8":
            numbers = self.width - self.tail
            return numbers + -(-numbers // FP8_BLOCK) + 2 * self.tail
        if self.kind == "fp4":
            return self.width // 2 + -(-self.width // FP4_BLOCK)
        return self.width * {"f32": 4, "f16": 2}[self.kind]


@dataclass(frozen=True)
class Stream:
    """One stream; `row_bytes` and `page_bytes` are of all its layers, as in `StreamInfo`. reach None: unlimited."""

    name: str
    n_layers: int
    stride: int
    reach: int | None
    parts: tuple[Part, ...]

    @property
    def page_rows(self) -> int:
        return SMALL_PAGE_ROWS if self.reach is not None and self.reach < PAGE_ROWS else PAGE_ROWS

    @property
    def row_bytes(self) -> int:
        return self.n_layers * sum(part.bytes() for part in self.parts)

    @property
    def page_bytes(self) -> int:
        layer = self.page_rows * sum(part.bytes() for part in self.parts)
        return self.n_layers * (-(-layer // 64) * 64)

    def pages(self, positions: int, slack: int) -> int:
        """Pages that a session of that many positions holds: all, or those of the window and the slack."""
        rows = positions // self.stride
        if self.reach is not None:
            first = max(0, positions - self.reach - slack) // self.page_rows
            return -(-rows // self.page_rows) - first
        return -(-rows // self.page_rows)


def streams_of(s: Sizes, kv_dtype: str, mtp: bool = False) -> list[Stream]:
    """The streams of a model, in the core's order."""
    row = Part(s.head_dim, kv_dtype, s.rope_dim)
    index = Part(s.index_dim, "fp4" if kv_dtype == "fp8" else kv_dtype)
    wide, index_wide = Part(2 * s.head_dim, "f32"), Part(2 * s.index_dim, "f32")
    n4, n128 = s.ratios.count(OVERLAP), s.ratios.count(128)
    found = [Stream("raw", s.n_layers + mtp, 1, s.window, (row,))]
    if n4:
        found.append(Stream("input4", n4, 1, 2 * OVERLAP, (wide, wide, index_wide, index_wide)))
    if n128:
        found.append(Stream("input128", n128, 1, 128, (Part(s.head_dim, "f32"),) * 2))
    if n4:
        found.append(Stream("rows4", n4, OVERLAP, None, (row, index)))
    if n128:
        found.append(Stream("rows128", n128, 128, None, (row,)))
    if mtp:
        found.append(Stream("hidden", 1, 1, 2, (Part(s.streams * s.dim, "f32"),)))
    return found


@dataclass(frozen=True)
class Plan:
    """`weights`: tensors and bytes by format. Bytes of one session at `ctx` positions: `rows_bytes` by stream, of which
    `slack_bytes` is what reach_slack costs; `mark_bytes`: most that one mark holds. `read_*`: bytes that one token of
    one session reads at the end of the context."""

    ctx: int
    kv_dtype: str
    slack: int
    streams: list[Stream]
    weights: dict[str, tuple[int, int]]
    read_weights: int
    read_rows: int

    @property
    def weight_bytes(self) -> int:
        return sum(size for _, size in self.weights.values())

    @property
    def token_bytes(self) -> float:
        """What one more position adds for good."""
        return sum(stream.row_bytes / stream.stride for stream in self.streams if stream.reach is None)

    def rows_bytes(self, stream: Stream) -> int:
        return stream.pages(self.ctx, self.slack) * stream.page_bytes

    @property
    def context_bytes(self) -> int:
        return sum(self.rows_bytes(stream) for stream in self.streams)

    @property
    def mark_bytes(self) -> int:
        return sum((-(-s.reach // s.page_rows) + 1) * s.page_bytes for s in self.streams if s.reach is not None)

    @property
    def slack_bytes(self) -> int:
        return sum(-(-self.slack // s.page_rows) * s.page_bytes for s in self.streams if s.reach is not None)

    def sessions_in(self, memory: int) -> int:
        """Sessions of `ctx` positions that fit beside the weights."""
        return max(0, memory - self.weight_bytes) // max(1, self.context_bytes)


def make_plan(s: Sizes, *, ctx: int, kv_dtype: str = "f16", reach_slack: int = 256, mtp: bool = False) -> Plan:
    """The plan of a model in its official storage. Raises ArgumentError for a ctx or kv_dtype that cannot be."""
    if kv_dtype not in KV_DTYPES:
        raise ArgumentError(f"kv_dtype is {kv_dtype!r}; a plan knows {', '.join(KV_DTYPES)}.")
    if not 1 <= ctx <= s.ctx:
        raise ArgumentError(f"ctx is {ctx}; the model has positions 1 to {s.ctx}.")
    weights: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    read = 0.0
    for piece in pieces(s, mtp):
        count, size = stored_bytes(piece)
        weights[piece.stored][0] += count
        weights[piece.stored][1] += size
        if piece.core == "embed" or piece.stored == "I64":
            read += size / s.vocab  # one row
        elif piece.expert is not None:
            read += size * s.n_experts_used / s.n_experts
        else:
            read += size
    return Plan(
        ctx=ctx,
        kv_dtype=kv_dtype,
        slack=reach_slack,
        streams=streams_of(s, kv_dtype, mtp),
        weights={name: (count, size) for name, (count, size) in weights.items()},
        read_weights=round(read),
        read_rows=_read_rows(s, ctx, kv_dtype),
    )


def _read_rows(s: Sizes, ctx: int, kv_dtype: str) -> int:
    """Rows that the last token of `ctx` reads: the raw window, the rows it chooses and all index rows to choose by, all
    rows of 128."""
    row, index = (
        Part(s.head_dim, kv_dtype, s.rope_dim).bytes(),
        Part(s.index_dim, "fp4" if kv_dtype == "fp8" else kv_dtype).bytes(),
    )
    of4 = ctx // OVERLAP
    chosen = min(of4, s.index_keep) * row + (of4 * index if of4 > s.index_keep else 0)
    raw = len(s.ratios) * min(ctx, s.window) * row
    return raw + s.ratios.count(OVERLAP) * chosen + s.ratios.count(128) * (ctx // 128) * row
