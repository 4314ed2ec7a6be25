"""Rows of several groups in one message per rank.

A message to a rank holds the rows of all groups, one group after the other; groups differ in their
dimension. Within a group everything is in rank order. With one group nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

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


class Selection:
    """Some of the rows of each group.

    Args:
        masks: bool (rows,) of each group, rows in rank order; None for all of them.
        counts: rows of each group of each rank.
    """

    def __init__(self, masks: Sequence[torch.Tensor | None], counts: Counts) -> None:
        self.indices: list[torch.Tensor | None] = []
        self.counts: Counts = [list(row) for row in counts]
        for group, mask in enumerate(masks):
            if mask is None:
                self.indices.append(None)
                continue
            index = mask.nonzero().squeeze(1)
            self.indices.append(index)
            lengths = torch.tensor([row[group] for row in counts], device=mask.device)
            # Of each rank, the chosen rows that stand before its end.
            before = torch.searchsorted(index, lengths.cumsum(0)).tolist()
            for rank, row in enumerate(self.counts):
                row[group] = before[rank] - (before[rank - 1] if rank else 0)

    def of(self, group: int, values: torch.Tensor) -> torch.Tensor:
        """The chosen ones of a group's (rows, ...) values."""
        index = self.indices[group]
        return values if index is None else values.index_select(0, index)
