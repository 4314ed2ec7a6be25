"""Rows of a batch that other batches read too, and the others, on both sides of an exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hotrec.embedding.messages import RowCounts
from hotrec.routing.sorting import sort_keys
from hotrec.runtime.comm_thread import HostInts

# Classes of rows: those that some rank also reads in a batch next to this one, and the rest.
URGENT, REST = 0, 1
NUM_CLASSES = 2


@dataclass
class Selection:
    """Some of the rows of each group."""

    indices: list[torch.Tensor | None]  # int64, in rank order; None for all rows in order
    counts: RowCounts

    def of(self, group: int, values: torch.Tensor) -> torch.Tensor:
        """Select from a group's (rows, ...) values."""
        index = self.indices[group]
        return values if index is None else values.index_select(0, index)

    def among(self, group: int, order_U: torch.Tensor | None) -> torch.Tensor | None:
        """The selected rows of ``order_U``, None for 0..U - 1; None for all of these."""
        return self.indices[group] if order_U is None else self.of(group, order_U)


class RowsByClass:
    """The rows of each group, sorted by rank and, within a rank, by class; see ``sort_by_class``.

    Both sides of an exchange sort the same rows by the same classes, so a class has the same rows
    in the same order on both. Selecting one does not wait for the device.
    """

    def __init__(self, classes: Sequence[torch.Tensor], counts: RowCounts) -> None:
        self.classes, self.counts = classes, counts
        self.orders: list[torch.Tensor] = []
        self.ends: list[list[int]] = []  # by group, of the classes of each rank

    def select(self, chosen: int) -> Selection:
        """The rows of a class."""
        indices: list[torch.Tensor | None] = []
        counts: RowCounts = [[] for _ in self.counts]
        for order_K, ends in zip(self.orders, self.ends, strict=True):
            bounds, pieces = [0, *ends], []
            for rank, row in enumerate(counts):
                at = NUM_CLASSES * rank + chosen
                begin, until = bounds[at : at + 2]
                pieces.append(order_K[begin:until])
                row.append(until - begin)
            indices.append(pieces[0] if len(pieces) == 1 else torch.cat(pieces))
        return Selection(indices, counts)


def sort_by_class(parts: Sequence[RowsByClass]) -> None:
    """Sort the rows of all parts at once, and read the ends of classes in one copy."""
    groups = [
        (part, group, class_K) for part in parts for group, class_K in enumerate(part.classes)
    ]
    sizes = [row[group] for part, group, _ in groups for row in part.counts]
    num_keys = NUM_CLASSES * len(sizes)
    keys = torch.cat([class_K for _, _, class_K in groups]).long()
    torch._foreach_add_(keys.split(sizes), list(range(0, num_keys, NUM_CLASSES)))
    sorted_K, order_K = sort_keys(keys, num_keys)
    ends_here = HostInts(
        torch.searchsorted(sorted_K, torch.arange(1, num_keys + 1, device=keys.device))
    ).wait()
    begin = at = 0
    for part, _, class_K in groups:
        end, until = begin + class_K.numel(), at + NUM_CLASSES * len(part.counts)
        part.orders.append(order_K[begin:end] - begin if begin else order_K[begin:end])
        part.ends.append([value - begin for value in ends_here[at:until]])
        begin, at = end, until


Sides = tuple[RowsByClass, RowsByClass]  # the requested rows, and those requested from this rank


@dataclass
class Hop:
    """The rows of a batch on both sides of one exchange, by group, in the order of its ranks.

    Requested rows are those of the batch or, on a relay, the union of what its host requests.
    """

    orders: list[torch.Tensor | None]  # of the requested rows; None for 0..U - 1
    places: list[torch.Tensor]  # int64 (R,) of the served rows: at their owner, or in the union
    num_requested: RowCounts  # from each rank
    num_served: RowCounts  # that each rank requests from this one
    by_last: Sides | None = None  # urgent are those that some rank reads in the last batch too
    by_next: Sides | None = None  # in the next batch too; None until there is one

    def select(self, sides: Sides | None, chosen: int | None) -> tuple[Selection, Selection]:
        """The requested and the served rows of a class; all for None, or without classes."""
        if sides is not None and chosen is not None:
            return sides[0].select(chosen), sides[1].select(chosen)
        indices: list[torch.Tensor | None] = [None] * len(self.orders)
        return Selection(indices, self.num_requested), Selection(indices, self.num_served)

    def spread(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """From the rows of a union to those that are served of it."""
        return [v.index_select(0, places) for v, places in zip(values, self.places, strict=True)]
