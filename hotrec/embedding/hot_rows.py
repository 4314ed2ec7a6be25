"""This rank's replica of the hot rows, and the gradient of its next update."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from hotrec.embedding.flat import table_begins
from hotrec.runtime.ranks import finish_others


class HotReplicas:
    """This rank's replica of the hot rows of one embedding dimension.

    ``weight`` is flat, float (H * D,), of tables that have ``num_rows_T`` hot rows. It has no
    gradient of its own: only rows that a batch reads have one.
    """

    def __init__(
        self, weight: nn.Parameter, num_rows_T: list[int], dim: int, group: dist.ProcessGroup
    ) -> None:
        self.weight = weight
        self.num_rows_T = num_rows_T
        self.dim = dim
        self._group = group
        self._world_size = dist.get_world_size(group)
        self.begins_T = table_begins(num_rows_T).to(weight.device)
        self.reduced: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def rows(self) -> torch.Tensor:
        """The replicated rows, float (H, D), sharing the parameter's memory."""
        return self.weight.detach().view(-1, self.dim)

    def check_updated(self) -> None:
        """Raise RuntimeError if a gradient awaits its update: a second one would replace it."""
        if self.reduced is not None:
            raise RuntimeError(
                f"hot gradient of dimension {self.dim}: expected an optimizer step before the next "
                "gradient, got a second gradient. Call step() or zero_grad() first."
            )

    def take_gradient(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return and clear the slots int64 (U,) and gradients float (U, D) of the next update."""
        reduced, self.reduced = self.reduced, None
        return (self.begins_T[:0], self.rows[:0]) if reduced is None else reduced

    @torch.no_grad()
    def checksum(self) -> torch.Tensor:
        """A checksum int64 () over the bits of the replica."""
        total = torch.zeros((), dtype=torch.int64, device=self.weight.device)
        # In pieces, since temporary tensors are as large as their input.
        for part in self.weight.detach().view(torch.int32).split(1 << 22):
            factors = torch.arange(part.numel(), device=part.device) % 65521 + 1
            total = total * 31 + (part.long() * factors).sum()
        return total

    def broadcast(self) -> None:
        """Make all replicas equal to rank 0's."""
        if self._world_size > 1:
            dist.broadcast(self.weight.detach(), group=self._group, group_src=0)

    def check_equal(self) -> None:
        """Raise RuntimeError on every rank if a replica differs."""
        mine = self.checksum().view(1)
        sums = torch.empty(self._world_size, dtype=mine.dtype, device=mine.device)
        finish_others()
        dist.all_gather_into_tensor(sums, mine, group=self._group)
        if (sums != sums[0]).any():
            raise RuntimeError(
                f"hot replicas of dimension {self.dim}: expected equal checksums on all ranks, got "
                f"{sums.tolist()}. Restart from a checkpoint."
            )
