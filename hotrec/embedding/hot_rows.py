"""This rank's replica of the hot rows, its gradient, and the touched rows.

DDP would all-reduce the gradient of every hot row. A communication hook instead passes the rows
that the batch touched to ``HotReducer``, which look-ahead calls without DDP.
"""

# No `from __future__ import annotations`: DDP reads the hook's annotations as objects.

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.embedding.flat import flat_rows, table_begins
from hotrec.embedding.hot_reduce import HotReducer
from hotrec.runtime.comm_thread import CommunicationThread
from hotrec.runtime.hosts import TwoLevelWire, make_two_levels
from hotrec.runtime.ranks import Group, finish_others, world_size
from hotrec.runtime.stages import mark
from hotrec.runtime.traffic import counted_by_sender
from hotrec.runtime.wire import Wire
from hotrec.types import WireType


class _ReadHot(torch.autograd.Function):
    """Reads hot rows; backward adds their gradients to ``weight.grad`` in place.

    Autograd's own backward would pass twice over H x D values for the few touched rows. Returning
    no gradient still runs the parameter's accumulation node, which DDP's hook needs.
    """

    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, replicas: "HotReplicas", slots_U: torch.Tensor
    ) -> torch.Tensor:
        ctx.replicas, ctx.slots_U = replicas, slots_U
        return replicas.rows.index_select(0, slots_U)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None, None]:
        mark("grads_exchange")
        weight = ctx.replicas.weight
        ctx.replicas.touched.append(ctx.slots_U)
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        weight.grad.view(-1, ctx.replicas.dim).index_add_(0, ctx.slots_U, grads[0])
        mark("hot_exchange")
        return None, None, None


class HotReplicas:
    """This rank's replica of the hot rows of one embedding dimension.

    ``weight`` is the flat parameter float (H * D,) of TorchRec's dense kernel, whose tables have
    ``num_rows_T`` hot rows; DDP's hook reduces its gradient.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        num_rows_T: list[int],
        dim: int,
        group: dist.ProcessGroup,
        wire_type: WireType = WireType.fp32,
    ) -> None:
        self.weight = weight
        self.num_rows_T = num_rows_T
        self.dim = dim
        self._group = group
        self._world_size = dist.get_world_size(group)
        self._wire_type = wire_type
        # Made by the first training forward; look-ahead uses its own reducer.
        self._reducer: HotReducer | None = None
        self._thread: CommunicationThread | None = None
        self._own_group: Group | None = None
        self._hosts: TwoLevelWire | None = None
        self.begins_T = table_begins(num_rows_T).to(weight.device)
        # Distinct flat slots int64 (U,) with gradients of backward passes that the hook has not
        # reduced.
        self.touched: list[torch.Tensor] = []
        self._updated: list[torch.Tensor] = []
        self._reduced: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def rows(self) -> torch.Tensor:
        """The replicated rows, float (H, D), sharing the parameter's memory."""
        return self.weight.detach().view(-1, self.dim)

    def __call__(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Read float (U, D) at distinct slots of each table, instead of FBGEMM's dense lookup."""
        slots_U = flat_rows(features, self.begins_T)
        if self._reducer is None and self._world_size > 1 and torch.is_grad_enabled():
            self._reducer = self._make_reducer()
        out: torch.Tensor = _ReadHot.apply(self.weight, self, slots_U)
        return out

    def _make_reducer(self) -> HotReducer:
        """Create the hook's reducer; a collective on CPU, where the reducer runs in a thread."""
        group, device = self._group, self.weight.device
        if device.type == "cpu":
            # The main thread runs TorchRec's collectives meanwhile.
            with counted_by_sender():  # connecting the group belongs to no step's traffic
                self._own_group = Group("hot gradients", [dist.get_process_group_ranks(group)])
            self._thread = CommunicationThread(device, "hot gradients")
            weakref.finalize(self, self._thread.close)
        wire = Wire(self._own_group or group, self._wire_type)
        if wire.world_size == world_size():
            with counted_by_sender():
                self._hosts = make_two_levels(self._wire_type, "hot gradients")
        shapes = [(sum(self.num_rows_T), self.dim)]
        return HotReducer(shapes, wire, self._hosts)

    def close(self) -> None:
        """Stop the hook's thread and close its groups; the next training forward makes new ones."""
        after = None
        if self._thread is not None and self._own_group is not None:
            self._thread.close()
            after = self._thread.join
            self._own_group.close(after)
        if self._hosts is not None:
            self._hosts.close(after)
        self._reducer = self._thread = self._own_group = self._hosts = None

    def set_reduced(self, slots_U: torch.Tensor, grad_UD: torch.Tensor) -> None:
        """Set the gradient of the next update, which overwrites it; replaces ``weight.grad``."""
        if self._reduced is not None:
            raise RuntimeError(
                f"hot gradient of dimension {self.dim}: expected an optimizer step before the next "
                "gradient, got a second gradient. Call step() or zero_grad() first."
            )
        self._reduced = (slots_U, grad_UD)

    @torch.no_grad()
    def take_gradient(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return and clear the slots int64 (U,) and gradients float (U, D) of the next update."""
        reduced, self._reduced = self._reduced, None
        slots_U, grad = self.take_updated(), self.weight.grad
        if reduced is not None:
            return reduced
        if grad is None:
            return slots_U[:0], self.rows[:0]
        grad_UD = grad.view(-1, self.dim).index_select(0, slots_U)
        self._clear_gradient(slots_U)
        return slots_U, grad_UD

    def drop_gradient(self) -> None:
        """Drop the gradient of the next update."""
        self._reduced = None
        self._clear_gradient(self.take_updated())

    @torch.no_grad()
    def _clear_gradient(self, slots_U: torch.Tensor) -> None:
        """Zero these rows of the gradient; all others are already zero."""
        if self.weight.grad is not None:
            self.weight.grad.view(-1, self.dim).index_fill_(0, slots_U, 0.0)

    def take_updated(self) -> torch.Tensor:
        """Return and clear the slots of all ranks with gradients in ``weight.grad``; ascending."""
        updated, self._updated = self._updated, []
        nothing = torch.empty(0, dtype=torch.int64, device=self.weight.device)
        return updated[0] if updated else nothing

    def reduce_gradient(
        self, state: None, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        """Average the ranks' gradients in the bucket's buffer; DDP's communication hook."""
        future = self._reduce(bucket)
        mark("hot_exchange")
        return future

    def _reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        if buffer.numel() != self.weight.numel():
            raise RuntimeError(
                f"hot exchange bucket {bucket.index()}: expected the {self.weight.numel()} values "
                f"of one hot parameter, got {buffer.numel()}. Report this with the output of "
                "`hotrec doctor`."
            )
        slots_U = self._take_touched()
        if self._thread is not None:
            # Backward continues with the update of the cold rows; DDP waits at the end of it. The
            # future returned by `then` propagates exceptions of its function.
            started: torch.futures.Future[None] = torch.futures.Future()
            reduced = started.then(lambda _: self._reduce_rows(buffer, slots_U))
            self._thread.submit(lambda: started.set_result(None))
            return reduced
        self._reduce_rows(buffer, slots_U)
        # On CUDA DDP waits for the current stream.
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[buffer.device] if buffer.is_cuda else None
        )
        future.set_result(buffer)
        return future

    @torch.no_grad()
    def _reduce_rows(self, buffer: torch.Tensor, slots_U: torch.Tensor) -> torch.Tensor:
        if self._reducer is not None:
            grad_HD = buffer.view(-1, self.dim)
            touched = (slots_U, grad_HD.index_select(0, slots_U))
            # The union includes this rank's own rows.
            [(slots_U, mean_UD)] = self._reducer.reduce([touched])
            grad_HD.index_copy_(0, slots_U, mean_UD)
        self._updated = [slots_U]
        return buffer

    def _take_touched(self) -> torch.Tensor:
        """Return and clear the slots to reduce."""
        touched, self.touched = self.touched, []
        if len(touched) == 1 and not self._updated:
            return touched[0]
        # With gradient accumulation, rows reduced by an earlier backward may still await their
        # update. Every rank sends those too; otherwise the mean would count them once per rank that
        # touches them again.
        return torch.cat(touched + self._updated).unique()

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
