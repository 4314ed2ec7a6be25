"""Rows of several groups in one message per rank.

A message to a rank holds the rows of all groups, one group after the other; groups differ in their
dimension. Within a group everything is in rank order. With one group nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hotrec.routing.sorting import sort_keys
from hotrec.runtime.host_ints import HostInts, ints_on

Counts = list[list[int]]  # [rank][group], rows


def sizes(counts: Counts, dims: Sequence[int]) -> list[int]:
    """Elements of the message to or from each rank."""
    return [sum(n * d for n, d in zip(row, dims, strict=True)) for row in counts]


def pack(parts: Sequence[torch.Tensor], counts: Counts, dims: Sequence[int]) -> torch.Tensor:
    """Lay the rows of all groups out rank by rank.

    Args:
        parts: of each group (rows over all ranks, D), or (rows,) where D is 1; in rank order.
        counts: rows of each group for each rank.
        dims: D of each group.

    Returns:
        Flat, ``sizes(counts, dims)`` elements for each rank.
    """
    if len(parts) == 1:
        return parts[0].reshape(-1)
    split = [
        part.reshape(-1).split([row[group] * dims[group] for row in counts])
        for group, part in enumerate(parts)
    ]
    return torch.cat([of_group[rank] for rank in range(len(counts)) for of_group in split])


def unpack(message: torch.Tensor, counts: Counts, dims: Sequence[int]) -> list[torch.Tensor]:
    """The rows of each group, (rows over all ranks, D), in rank order."""
    if len(dims) == 1:
        return [message.view(-1, dims[0])]
    pieces = message.split([n * d for row in counts for n, d in zip(row, dims, strict=True)])
    return [torch.cat(pieces[group :: len(dims)]).view(-1, dim) for group, dim in enumerate(dims)]


@dataclass
class Selection:
    """Some of the rows of each group.

    Args:
        indices: int64, of each group, in rank order; None for all rows as they are.
        counts: rows of each group of each rank.
    """

    indices: list[torch.Tensor | None]
    counts: Counts

    def of(self, group: int, values: torch.Tensor) -> torch.Tensor:
        """The chosen ones of a group's (rows, ...) values."""
        index = self.indices[group]
        return values if index is None else values.index_select(0, index)


class ByClass:
    """The rows of each group, sorted by rank and, within a rank, by class.

    Both sides of an exchange sort the same rows by the same classes, so any range of classes is the
    same rows in the same order on both, and choosing one asks the device nothing: the numbers of
    all classes come to the host together, see ``read_together``.

    Args:
        classes: integers (rows,) of each group, one at least, rows in rank order, each in
            0..num_classes - 1.
        num_classes: C.
        counts: rows of each group of each rank.
    """

    def __init__(self, classes: Sequence[torch.Tensor], num_classes: int, counts: Counts) -> None:
        num_ranks, num_groups = len(counts), len(classes)
        self._num_classes = num_classes
        self.orders: list[torch.Tensor] = []
        ends = []
        device = classes[0].device
        lengths = ints_on(device, [n for row in counts for n in row]).view(num_ranks, num_groups)
        first_key_W = torch.arange(0, num_ranks * num_classes, num_classes, device=device)
        bounds = torch.arange(1, num_ranks * num_classes + 1, device=device)
        for group, class_K in enumerate(classes):
            key_K = class_K + torch.repeat_interleave(
                first_key_W, lengths[:, group], output_size=class_K.numel()
            )
            sorted_K, order_K = sort_keys(key_K, num_ranks * num_classes)
            self.orders.append(order_K)
            ends.append(torch.searchsorted(sorted_K, bounds))
        self.ends = torch.cat(ends)
        self._ends_here: list[list[int]] = []

    def take(self, ends: Sequence[int]) -> None:
        """Note where the classes end, now that the host knows."""
        size = len(ends) // len(self.orders)
        self._ends_here = [[0, *ends[begin : begin + size]] for begin in range(0, len(ends), size)]

    def select(self, first: int, end: int) -> Selection:
        """The rows of the classes first..end - 1."""
        num_classes, size = self._num_classes, len(self._ends_here[0]) - 1
        indices: list[torch.Tensor | None] = []
        counts: Counts = [[] for _ in range(size // num_classes)]
        for ends, order_K in zip(self._ends_here, self.orders, strict=True):
            pieces = []
            for rank, row in enumerate(counts):
                begin = ends[rank * num_classes + first]
                until = ends[rank * num_classes + end]
                pieces.append(order_K[begin:until])
                row.append(until - begin)
            indices.append(pieces[0] if len(pieces) == 1 else torch.cat(pieces))
        return Selection(indices, counts)


def read_together(parts: Sequence[ByClass]) -> None:
    """Bring the numbers of all classes to the host in one copy."""
    ends = HostInts(torch.cat([part.ends for part in parts])).wait()
    for part in parts:
        part.take(ends[: part.ends.numel()])
        ends = ends[part.ends.numel() :]
