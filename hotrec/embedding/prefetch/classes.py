"""Rows of a batch by class, such as how soon they are final, on both sides of an exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from hotrec.embedding.messages import RowCounts
from hotrec.routing.sorting import sort_keys
from hotrec.runtime.comm_thread import HostInts


@dataclass
class Selection:
    """Some of the rows of each group."""

    indices: list[torch.Tensor | None]  # int64, in rank order; None for all rows in order
    counts: RowCounts

    def of(self, group: int, values: torch.Tensor) -> torch.Tensor:
        """Select from a group's (rows, ...) values."""
        index = self.indices[group]
        return values if index is None else values.index_select(0, index)

    def rows(self, group: int, order_U: torch.Tensor | None) -> torch.Tensor | None:
        """The selected rows of ``order_U``; None for 0..U - 1."""
        return self.indices[group] if order_U is None else self.of(group, order_U)


class RowsByClass:
    """The rows of each group, sorted by rank and, within a rank, by class; see ``sort_by_class``.

    Both sides of an exchange sort the same rows by the same classes, so a range of classes has the
    same rows in the same order on both. Selecting a range does not wait for the device.
    """

    def __init__(
        self, classes: Sequence[torch.Tensor], num_classes: int, counts: RowCounts
    ) -> None:
        self.classes, self.num_classes, self.counts = classes, num_classes, counts
        self.orders: list[torch.Tensor] = []
        self.ends: list[list[int]] = []  # by group, of the classes of each rank

    def select(self, first: int, end: int) -> Selection:
        """The rows of the classes first..end - 1."""
        indices: list[torch.Tensor | None] = []
        counts: RowCounts = [[] for _ in self.counts]
        for order_K, ends in zip(self.orders, self.ends, strict=True):
            bounds, pieces = [0, *ends], []
            for rank, row in enumerate(counts):
                begin = bounds[rank * self.num_classes + first]
                until = bounds[rank * self.num_classes + end]
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
    widths = [part.num_classes for part, _, _ in groups for _ in part.counts]
    *firsts, num_keys = accumulate(widths, initial=0)
    keys = torch.cat([class_K for _, _, class_K in groups]).long()
    torch._foreach_add_(keys.split(sizes), firsts)
    sorted_K, order_K = sort_keys(keys, num_keys)
    ends_here = HostInts(
        torch.searchsorted(sorted_K, torch.arange(1, num_keys + 1, device=keys.device))
    ).wait()
    begin = at = 0
    for part, _, class_K in groups:
        end, until = begin + class_K.numel(), at + part.num_classes * len(part.counts)
        part.orders.append(order_K[begin:end] - begin if begin else order_K[begin:end])
        part.ends.append([value - begin for value in ends_here[at:until]])
        begin, at = end, until


Sides = tuple[RowsByClass, RowsByClass]  # the requested rows, and those requested from this rank


@dataclass
class Hop:
    """The rows of a batch on both sides of one exchange, by group, in the order of its ranks."""

    num_requested: RowCounts  # from each rank
    num_served: RowCounts  # that each rank requests from this one
    # Class 0 is a lag of 1, the last class depth + 1 or more.
    by_lag: Sides | None = None
    # Class 0 are the urgent rows, which some rank reads in the next batch too, class 1 the others;
    # None until there is a next batch.
    by_need: Sides | None = None

    def select(self, sides: Sides | None, first: int, end: int) -> tuple[Selection, Selection]:
        """The requested and the served rows of some classes, or all if there are no classes."""
        if sides is not None:
            return sides[0].select(first, end), sides[1].select(first, end)
        indices: list[torch.Tensor | None] = [None] * len(self.num_requested[0])
        return Selection(indices, self.num_requested), Selection(indices, self.num_served)
