"""What a compaction will do, decided before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..nodes import Node, size_of


@dataclass(frozen=True)
class Plan:
    """The new surface and what it leaves out.

    `surface`: arranged by the writer; new nodes have the number 0. `checkpoint`: the new node that stands for
    `replaced`, in order. `kept_tail`: tokens that stay behind the checkpoint. `spills`: nodes that stay as a preview,
    in their whole form, each with the place of the spill that holds it ("" where there is none).
    """

    surface: tuple[Node, ...]
    checkpoint: Node
    replaced: tuple[Node, ...]
    kept_tail: int
    spills: tuple[tuple[Node, str], ...] = ()

    @property
    def archived(self) -> tuple[Node, ...]:
        """The nodes that belong into the spill: the replaced ones, and previewed ones in their whole form."""
        return (*self.replaced, *(node for node, _ in self.spills))

    @property
    def size(self) -> int:
        """The tokens of the new surface."""
        return size_of(self.surface)


@dataclass(frozen=True)
class Refusal:
    """Why there is no plan. `kind`: "nothing" (there is nothing to compact, no failure), "shrink" (the checkpoint would
    not be smaller than what it stands for) or "landing" (the result would be too near to the trigger)."""

    kind: str
    reason: str


def checkpoint_data(
    number: int, summary: str, ledger: Sequence[dict[str, object]], locator: str | None
) -> dict[str, object]:
    """The `data` of a checkpoint node."""
    return {"number": number, "summary": summary, "ledger": list(ledger), "spills": [locator] if locator else []}
