"""Rows of several embedding dimensions ("groups") in one message per rank.

The part for one rank contains the rows of all groups, group by group. With one group nothing is
copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hotrec.runtime.comm_thread import HostInts
from hotrec.runtime.wire import Wire

RowCounts = list[list[int]]  # number of rows, [rank][group]


def row_counts(values: Sequence[int], num_groups: int) -> RowCounts:
    """Split flat counts, rank by rank, into those of each rank."""
    if num_groups == 0:
        return []
    return [list(values[at : at + num_groups]) for at in range(0, len(values), num_groups)]


def exchange_counts(wire: Wire, num_to: torch.Tensor) -> tuple[RowCounts, RowCounts]:
    """The numbers of rows to each rank, int64 (W, G), and of those from each rank."""
    world_size, num_groups = num_to.shape
    sizes, sent = [num_groups] * world_size, num_to.reshape(-1)
    received = wire.all_to_all(sent, sizes, sizes)
    # Both in one copy: on CUDA, each copy blocks the host once.
    counts = row_counts(HostInts(torch.cat([sent, received])).wait(), num_groups)
    return counts[:world_size], counts[world_size:]


def message_sizes(counts: RowCounts, dims: Sequence[int]) -> list[int]:
    """The number of elements of the part for, or from, each rank."""
    return [sum(n * d for n, d in zip(row, dims, strict=True)) for row in counts]


def pack(parts: Sequence[torch.Tensor], counts: RowCounts, dims: Sequence[int]) -> torch.Tensor:
    """Arrange the rows of each group, (rows over all ranks, D) in rank order, by rank; flat."""
    if len(parts) == 1:
        return parts[0].reshape(-1)
    split = [
        part.reshape(-1).split([row[group] * dims[group] for row in counts])
        for group, part in enumerate(parts)
    ]
    return torch.cat([of_group[rank] for rank in range(len(counts)) for of_group in split])


def unpack(message: torch.Tensor, counts: RowCounts, dims: Sequence[int]) -> list[torch.Tensor]:
    """The rows of each group, (rows over all ranks, D), in rank order."""
    if len(dims) == 1:
        return [message.view(-1, dims[0])]
    pieces = message.split([n * d for row in counts for n, d in zip(row, dims, strict=True)])
    return [torch.cat(pieces[group :: len(dims)]).view(-1, dim) for group, dim in enumerate(dims)]


def exchange_rows(
    wire: Wire,
    parts: Sequence[torch.Tensor],
    num_to: RowCounts,
    num_from: RowCounts,
    dims: Sequence[int],
) -> list[torch.Tensor]:
    """Send the rows of each group, in rank order, to all ranks, and return the received ones.

    One rank gets its own tensors back.
    """
    if wire.world_size == 1:
        return [part.view(-1, dim) for part, dim in zip(parts, dims, strict=True)]
    received = wire.all_to_all(
        pack(parts, num_to, dims), message_sizes(num_to, dims), message_sizes(num_from, dims)
    )
    return unpack(received, num_from, dims)


def gather_rows(
    wire: Wire, parts: Sequence[torch.Tensor], counts: RowCounts, dims: Sequence[int]
) -> list[torch.Tensor]:
    """Gather the rows of all ranks by group."""
    message = pack(parts, [counts[wire.rank]], dims)
    return unpack(wire.all_gather_joined(message, message_sizes(counts, dims)), counts, dims)


def gather_counts(wire: Wire, counts_G: torch.Tensor) -> RowCounts:
    """Gather int64 (G,) counts of all ranks."""
    sizes = [counts_G.numel()] * wire.world_size
    gathered = HostInts(wire.all_gather_joined(counts_G, sizes)).wait()
    return row_counts(gathered, counts_G.numel())
