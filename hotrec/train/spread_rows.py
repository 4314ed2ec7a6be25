"""Tensors whose rows are spread over their owners, read in the order of original ids.

A rank writes the block of original rows with the same numbers as the stored rows that it owns, as
it would if rows were not spread: so files do not depend on the order in which rows are stored.
These rows are on all ranks, which exchange them a chunk at a time, all in the same steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from hotrec.embedding.canonical import TensorPart, TensorParts
from hotrec.runtime.ranks import all_gather_object, rank
from hotrec.types import RowOrder

# Reads rows int64 (K,) of a part's value, in the type of the files, on the host.
ReadRows = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class SpreadTensor:
    """A tensor with spread rows.

    Args:
        part: This rank's part, without rows if it owns none.
        order: The order in which rows are stored.
        blocks: The first row and the number of rows of each rank's block.
    """

    part: TensorPart
    order: RowOrder
    blocks: tuple[tuple[int, int], ...]

    @property
    def most_rows(self) -> int:
        """The rows of the largest block."""
        return max(num_rows for _, num_rows in self.blocks)


def gather_spread(parts: TensorParts) -> dict[str, SpreadTensor]:
    """The tensors with spread rows, by name, in the same order on every rank; collective."""
    own = {
        part.name: (part.first[0], part.value.shape[0], _without_rows(part))
        for part in parts.parts
        if part.order is not None
    }
    of_ranks: list[Mapping[str, tuple[int, int, TensorPart]]] = all_gather_object(own)
    mine = {part.name: part for part in parts.parts if part.order is not None}
    tensors: dict[str, SpreadTensor] = {}
    for name in dict.fromkeys(name for found in of_ranks for name in found):
        nothing = next(found[name][2] for found in of_ranks if name in found)
        assert nothing.order is not None
        blocks = tuple(found[name][:2] if name in found else (0, 0) for found in of_ranks)
        tensors[name] = SpreadTensor(mine.get(name, nothing), nothing.order, blocks)
    return tensors


def _without_rows(part: TensorPart) -> TensorPart:
    empty = part.value.new_empty((0, *part.value.shape[1:]), device="cpu")
    return replace(part, value=empty, first=(0,) * len(part.first))


class OriginalRows:
    """Reads the rows of this rank's block, a step after the other, with all ranks.

    Args:
        tensor: The tensor.
        read: Reads rows that this rank owns.
        step: Rows of each block that are read in one step.
        group: All ranks, with a backend for the host.
    """

    def __init__(
        self, tensor: SpreadTensor, read: ReadRows, step: int, group: dist.ProcessGroup
    ) -> None:
        self._order, self._blocks = tensor.order, tensor.blocks
        self._first = tensor.part.first[0]
        self._num_rows = tensor.part.value.shape[0]
        self._read, self._step, self._group = read, step, group
        firsts = torch.tensor([first for first, num_rows in tensor.blocks if num_rows])
        ranks = [at for at, (_, num_rows) in enumerate(tensor.blocks) if num_rows]
        self._firsts_S, by_row = firsts.sort()
        self._ranks_S = torch.tensor(ranks)[by_row]
        self._at = 0
        # Original rows that this rank owns, ascending, and their places here; from the first step.
        self._own: tuple[torch.Tensor, torch.Tensor] | None = None

    def read_next(self) -> torch.Tensor:
        """The next ``step`` rows of this rank's block, fewer at its end; collective."""
        if self._own is None:
            stored = torch.arange(self._first, self._first + self._num_rows)
            rows, places = self._order.original(stored).sort()
            self._own = (rows, places)
        rows, places = self._own
        ranges = torch.tensor(
            [
                (first + min(self._at, num_rows), first + min(self._at + self._step, num_rows))
                for first, num_rows in self._blocks
            ]
        )
        bounds = torch.searchsorted(rows, ranges).tolist()
        leaving = self._read(torch.cat([places[low:high] for low, high in bounds]))
        begin, end = ranges[rank()].tolist()
        stored = self._order.stored(torch.arange(begin, end))
        shard_K = torch.searchsorted(self._firsts_S, stored, right=True) - 1
        owner_K, place_K = self._ranks_S[shard_K].sort(stable=True)
        num_from_W = torch.bincount(owner_K, minlength=len(self._blocks)).tolist()
        arriving = leaving.new_empty((end - begin, *leaving.shape[1:]))
        num_to_W = [high - low for low, high in bounds]
        dist.all_to_all_single(arriving, leaving, num_from_W, num_to_W, group=self._group)
        self._at += self._step
        if self._at >= max(num_rows for _, num_rows in self._blocks):
            self._own = None
        return torch.empty_like(arriving).index_copy_(0, place_K, arriving)
