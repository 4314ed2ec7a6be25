"""Exchange of the hot replicas' gradients, as a DDP communication hook.

TorchRec wraps data-parallel lookups in DDP, which all-reduces the gradient of every hot row,
touched or not. The hook sends just the rows that the rank's batch touched: each rank gathers all
ranks' (slot, gradient row) pairs and adds them up in rank order, so all replicas stay bitwise
equal.
Sent per rank: (W - 1) x U x (D + 1) x 4 bytes, U the touched hot rows of the largest rank, against
2 (W - 1) / W x H x D x 4 for the dense all-reduce of H hot rows.
"""

# No `from __future__ import annotations`: DDP reads the hook's annotations as objects.

from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.embedding.flat import flat_rows, table_begins


class HotExchange(Enum):
    """How gradients of hot rows travel."""

    TOUCHED_ROWS = "touched_rows"
    DENSE = "dense"


class _ReadHot(torch.autograd.Function):
    """Reads hot rows; backward adds their gradients to ``weight.grad`` in place.

    Autograd's own backward makes a zero gradient of all H rows and adds it to ``weight.grad``: two
    passes over H x D values for the few rows that a batch touches. Returning no gradient still runs
    the parameter's accumulation node, which is what tells DDP that the gradient is there.
    """

    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, replicas: "HotReplicas", slots_U: torch.Tensor
    ) -> torch.Tensor:
        ctx.replicas, ctx.slots_U = replicas, slots_U
        return replicas.rows.index_select(0, slots_U)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None, None]:
        weight = ctx.replicas.weight
        ctx.replicas.note_touched(ctx.slots_U)
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        weight.grad.view(-1, ctx.replicas.dim).index_add_(0, ctx.slots_U, grads[0])
        return None, None, None


class HotReplicas:
    """This rank's replica of the hot rows of one embedding dimension.

    Args:
        weight: the flat parameter float (H * D,) of TorchRec's dense kernel.
        num_rows_T: hot rows of each table, in the order of the parameter.
        dim: D.
        group: the process group that holds the replicas.
        exchange: what travels.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        num_rows_T: list[int],
        dim: int,
        group: dist.ProcessGroup,
        exchange: HotExchange,
    ) -> None:
        self.weight = weight
        self.num_rows_T = num_rows_T
        self.dim = dim
        self._group = group
        self._exchange = exchange
        self._begins_T = table_begins(num_rows_T).to(weight.device)
        self._touched: list[torch.Tensor] = []
        self._updated: list[torch.Tensor] = []

    @property
    def rows(self) -> torch.Tensor:
        """The replicated rows, float (H, D), sharing the parameter's memory."""
        return self.weight.detach().view(-1, self.dim)

    def __call__(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Read rows of the replica, in place of FBGEMM's dense lookup.

        Args:
            features: (T, 1) one feature per hot table; values are distinct slots of the table.

        Returns:
            float (U, D).
        """
        slots_U = flat_rows(features, self._begins_T)
        out: torch.Tensor = _ReadHot.apply(self.weight, self, slots_U)
        return out

    def note_touched(self, slots_U: torch.Tensor) -> None:
        """Remember the slots whose gradients a backward pass adds, until they are reduced."""
        self._touched.append(slots_U)

    def take_updated(self) -> torch.Tensor:
        """The slots, over all ranks, whose gradients are in ``weight.grad``; int64, ascending.

        Forgets them: the next call answers for the next steps.
        """
        updated, self._updated = self._updated, []
        return updated[0] if updated else torch.empty(0, dtype=torch.int64)

    def reduce_gradient(
        self, state: None, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        """The communication hook: the mean of the ranks' gradients, in the bucket's buffer."""
        buffer = bucket.buffer()
        if buffer.numel() != self.weight.numel():
            raise RuntimeError(
                f"hot exchange bucket {bucket.index()}: expected the {self.weight.numel()} values "
                f"of one hot parameter, got {buffer.numel()}. Report this with the versions that "
                "`hotrec doctor` prints."
            )
        # Rows that an earlier backward reduced may still wait for their update (gradient
        # accumulation): every rank sends those too, or the mean would count them once per rank
        # that touched them again.
        touched = self._touched + self._updated
        self._touched = []
        slots_U = touched[0] if len(touched) == 1 else torch.cat(touched).unique()
        grad_HD = buffer.view(-1, self.dim)
        if self._exchange is HotExchange.DENSE:
            union = self._all_slots(slots_U)
            dist.all_reduce(buffer, group=self._group)
            buffer.div_(dist.get_world_size(self._group))
        else:
            union = self._add_touched(grad_HD, slots_U)
        self._updated = [union]
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(buffer)
        return future

    def _gather(self, values_UX: torch.Tensor) -> list[torch.Tensor]:
        """Rows of every rank, in rank order; ranks may hold different numbers of them."""
        world_size = dist.get_world_size(self._group)
        count = torch.tensor([values_UX.shape[0]], device=values_UX.device)
        counts = torch.empty(world_size, dtype=count.dtype, device=count.device)
        dist.all_gather_into_tensor(counts, count, group=self._group)
        num_rows = counts.tolist()
        most = max(num_rows)
        sent = values_UX.new_zeros(most, *values_UX.shape[1:])
        sent[: values_UX.shape[0]] = values_UX
        received = values_UX.new_empty(world_size * most, *values_UX.shape[1:])
        dist.all_gather_into_tensor(received, sent, group=self._group)
        return [received[r * most : r * most + num] for r, num in enumerate(num_rows)]

    def _all_slots(self, slots_U: torch.Tensor) -> torch.Tensor:
        if dist.get_world_size(self._group) == 1:
            return slots_U
        return torch.cat(self._gather(slots_U.int())).long().unique()

    def _add_touched(self, grad_HD: torch.Tensor, slots_U: torch.Tensor) -> torch.Tensor:
        world_size = dist.get_world_size(self._group)
        if world_size == 1:
            return slots_U
        # One message: the slot travels as the bits of a leading float.
        message = grad_HD.new_empty(slots_U.numel(), self.dim + 1)
        message[:, 0] = slots_U.int().view(torch.float32)
        torch.index_select(grad_HD, 0, slots_U, out=message[:, 1:])
        message[:, 1:] /= world_size
        gathered = self._gather(message)
        slots = [part[:, 0].contiguous().view(torch.int32).long() for part in gathered]
        grad_HD.index_fill_(0, slots_U, 0.0)
        for slots_of_rank, part in zip(slots, gathered, strict=True):
            # Contiguous: index_add_ of a strided source takes three times as long on CPU.
            grad_HD.index_add_(0, slots_of_rank, part[:, 1:].contiguous())
        return torch.cat(slots).unique()

    @torch.no_grad()
    def clear_gradient(self, slots_U: torch.Tensor) -> None:
        """Zero the gradient rows that an update used; the others are zero already."""
        if self.weight.grad is not None:
            self.weight.grad.view(-1, self.dim).index_fill_(0, slots_U, 0.0)

    @torch.no_grad()
    def checksum(self) -> torch.Tensor:
        """int64 (): a sum over the bits of the replica, the same on ranks with equal replicas."""
        bits = self.weight.detach().view(torch.int32).long()
        return (bits * (torch.arange(bits.numel(), device=bits.device) % 65521 + 1)).sum()

    def broadcast(self) -> None:
        """Make all replicas equal to rank 0's."""
        if dist.get_world_size(self._group) > 1:
            dist.broadcast(self.weight.detach(), group=self._group, group_src=0)

    def check_equal(self) -> None:
        """Compare the replicas of all ranks.

        Raises:
            RuntimeError: on every rank, if one differs.
        """
        world_size = dist.get_world_size(self._group)
        mine = self.checksum().view(1)
        sums = torch.empty(world_size, dtype=mine.dtype, device=mine.device)
        dist.all_gather_into_tensor(sums, mine, group=self._group)
        if (sums != sums[0]).any():
            raise RuntimeError(
                f"hot replicas of dimension {self.dim}: expected equal checksums on all ranks, got "
                f"{sums.tolist()}. A rank updated its replica alone; restart from a checkpoint."
            )
