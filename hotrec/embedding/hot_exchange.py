"""The hot replicas of a rank, and the exchange of their gradients as a DDP communication hook.

TorchRec wraps data-parallel lookups in DDP, which all-reduces the gradient of every hot row,
touched or not. The hook sends just the rows that the rank's batch touched, by the ways of
``hotrec.embedding.hot_choice``. Touched rows: each rank gathers all ranks' (slot, gradient row)
pairs, while backward goes on, and adds them up in rank order, so all replicas stay bitwise equal;
padded to the largest rank's U rows, so (W - 1) x U x (D + 1) x 4 bytes per rank. Owners: see
``hotrec.embedding.hot_reduce``, which look-ahead uses without this hook.
"""

# No `from __future__ import annotations`: DDP reads the hook's annotations as objects.

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.embedding.flat import flat_rows, table_begins
from hotrec.embedding.hot_choice import HotChooser
from hotrec.embedding.hot_reduce import HotReducer
from hotrec.routing.sorting import sort_keys
from hotrec.runtime.host_ints import HostInts
from hotrec.runtime.stages import mark
from hotrec.runtime.wire import Wire
from hotrec.types import HotExchange as HotExchange
from hotrec.types import WireType


def _future(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """A future that, on CUDA, also waits for what the stream still has to do."""
    return torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)


class HotCounts:
    """How many hot rows each rank's batch touches; on its way from the exchange of ids on.

    Asked for so early that backward neither waits for a small message behind large ones nor, on
    CUDA, for all that the device still has to do.
    """

    def __init__(self, num_rows: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self._mine = torch.full((1,), num_rows, device=device)
        self._all = self._mine.new_empty(dist.get_world_size(group))
        self._work = dist.all_gather_into_tensor(self._all, self._mine, group, async_op=True)
        self._counts: HostInts | None = None
        if device.type == "cuda":
            self._work.wait()  # holds up the stream, not the host
            self._counts = HostInts(self._all)

    def wait(self) -> list[int]:
        if self._counts is None:
            self._work.wait()
            self._counts = HostInts(self._all)
        return self._counts.wait()


def pack_rows(
    grad_HD: torch.Tensor, slots_U: torch.Tensor, num_rows: int, world_size: int
) -> torch.Tensor:
    """The message of a rank: its touched rows' share of the mean gradient.

    Args:
        grad_HD: float (H, D), the rank's gradient.
        slots_U: int64 (U,), the rows it touched.
        num_rows: at least U; the message is padded to so many rows.
        world_size: W, of the mean.

    Returns:
        float (num_rows, D + 1); the slot travels as the bits of a leading float.
    """
    num_touched = slots_U.numel()
    message = grad_HD.new_zeros(num_rows, grad_HD.shape[1] + 1)
    message[:num_touched, 0] = slots_U.int().view(torch.float32)
    message[:num_touched, 1:] = grad_HD.index_select(0, slots_U).div_(world_size)
    return message


def add_rows(
    grad_HD: torch.Tensor, slots_U: torch.Tensor, parts: list[torch.Tensor]
) -> torch.Tensor:
    """Replace the rank's own gradient rows by the sums over all ranks' messages, in rank order.

    Args:
        grad_HD: float (H, D), written in place.
        slots_U: int64 (U,), the rank's own rows.
        parts: of each rank, without padding, see ``pack_rows``.

    Returns:
        The slots of all ranks, int64, distinct, ascending.
    """
    slots = [part[:, 0].contiguous().view(torch.int32).long() for part in parts]
    grad_HD.index_fill_(0, slots_U, 0.0)
    for slots_of_rank, part in zip(slots, parts, strict=True):
        # Contiguous: index_add_ of a strided source takes three times as long on CPU.
        grad_HD.index_add_(0, slots_of_rank, part[:, 1:].contiguous())
    union, _ = sort_keys(torch.cat(slots), grad_HD.shape[0])
    return torch.unique_consecutive(union)


@dataclass(frozen=True)
class _Touched:
    """Flat slots, distinct, int64 (U,); ``counts`` is None where no gradient will follow."""

    slots_U: torch.Tensor
    counts: HotCounts | None


class _ReadHot(torch.autograd.Function):
    """Reads hot rows; backward adds their gradients to ``weight.grad`` in place.

    Autograd's own backward makes a zero gradient of all H rows and adds it to ``weight.grad``: two
    passes over H x D values for the few rows that a batch touches. Returning no gradient still runs
    the parameter's accumulation node, which is what tells DDP that the gradient is there.
    """

    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, replicas: "HotReplicas", touched: "_Touched"
    ) -> torch.Tensor:
        ctx.replicas, ctx.touched = replicas, touched
        return replicas.rows.index_select(0, touched.slots_U)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None, None]:
        mark("grads_exchange")
        weight = ctx.replicas.weight
        ctx.replicas.note_touched(ctx.touched)
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        weight.grad.view(-1, ctx.replicas.dim).index_add_(0, ctx.touched.slots_U, grads[0])
        mark("hot_exchange")
        return None, None, None


class HotReplicas:
    """This rank's replica of the hot rows of one embedding dimension.

    Args:
        weight: the flat parameter float (H * D,) of TorchRec's dense kernel.
        num_rows_T: hot rows of each table, in the order of the parameter.
        dim: D.
        group: the process group that holds the replicas.
        exchange: what travels.
        wire_type: of gradients in the hook; in 16 bits nothing of it overlaps with backward.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        num_rows_T: list[int],
        dim: int,
        group: dist.ProcessGroup,
        exchange: HotExchange,
        wire_type: WireType = WireType.fp32,
    ) -> None:
        self.weight = weight
        self.num_rows_T = num_rows_T
        self.dim = dim
        self._group = group
        self._world_size = dist.get_world_size(group)
        self._exchange = exchange
        self._shape = (sum(num_rows_T), dim)
        self._wire_type = wire_type
        self._chooser = HotChooser([self._shape], exchange)
        self._reducer: HotReducer | None = None
        self._begins_T = table_begins(num_rows_T).to(weight.device)
        self._touched: list[_Touched] = []
        self._updated: list[torch.Tensor] = []
        self._reduced: tuple[torch.Tensor, torch.Tensor] | None = None
        self._asked: HotCounts | None = None

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
        counts, self._asked = self._asked, None
        if counts is None:
            counts = self.ask_counts(slots_U.numel())
        out: torch.Tensor = _ReadHot.apply(self.weight, self, _Touched(slots_U, counts))
        return out

    def ask_counts(self, num_rows: int) -> HotCounts | None:
        """Ask every rank how many hot rows its batch touches; None where no gradient will follow.

        Args:
            num_rows: that this rank's batch touches.
        """
        if not torch.is_grad_enabled() or self._world_size == 1:
            return None
        return HotCounts(num_rows, self._group, self.weight.device)

    def expect(self, counts: HotCounts | None) -> None:
        """Take the counts of the batch whose rows are read next."""
        self._asked = counts

    def note_touched(self, touched: _Touched) -> None:
        """Remember the slots whose gradients a backward pass adds, until they are reduced."""
        self._touched.append(touched)

    def set_reduced(self, slots_U: torch.Tensor, grad_UD: torch.Tensor) -> None:
        """Hand over a gradient that is reduced already; ``weight.grad`` is then not used.

        Args:
            slots_U: int64 (U,), distinct, the same on every rank.
            grad_UD: float (U, D), the mean over the ranks; the update overwrites it.

        Raises:
            RuntimeError: if the last one still waits for its update.
        """
        if self._reduced is not None:
            raise RuntimeError(
                f"hot gradient of dimension {self.dim}: expected the last one to be used, got "
                "another before the optimizer's step. Step or zero_grad first."
            )
        self._reduced = (slots_U, grad_UD)

    @torch.no_grad()
    def take_gradient(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What the next update is of: slots int64 (U,) and gradients float (U, D); forgets it."""
        reduced, self._reduced = self._reduced, None
        slots_U, grad = self.take_updated(), self.weight.grad
        if reduced is not None:
            return reduced
        if grad is None:
            return slots_U[:0], self.rows[:0]
        grad_UD = grad.view(-1, self.dim).index_select(0, slots_U)
        self.clear_gradient(slots_U)
        return slots_U, grad_UD

    def drop_gradient(self) -> None:
        """Forget the gradient that no update used."""
        self._reduced = None
        self.clear_gradient(self.take_updated())

    def take_updated(self) -> torch.Tensor:
        """The slots, over all ranks, whose gradients are in ``weight.grad``; int64, ascending.

        Forgets them: the next call answers for the next steps.
        """
        updated, self._updated = self._updated, []
        if updated:
            return updated[0]
        return torch.empty(0, dtype=torch.int64, device=self.weight.device)

    def reduce_gradient(
        self, state: None, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        """The communication hook: the mean of the ranks' gradients, in the bucket's buffer."""
        future = self._reduce(bucket)
        mark("hot_exchange")
        return future

    def _reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        if buffer.numel() != self.weight.numel():
            raise RuntimeError(
                f"hot exchange bucket {bucket.index()}: expected the {self.weight.numel()} values "
                f"of one hot parameter, got {buffer.numel()}. Report this with the versions that "
                "`hotrec doctor` prints."
            )
        slots_U, counts = self._take_touched()
        future = _future(buffer)
        if counts is None:
            self._updated = [slots_U]
            future.set_result(buffer)
            return future
        num_rows = counts.wait()
        exchange = self._chooser.choose([[num] for num in num_rows])
        if exchange is HotExchange.owners or self._wire_type is not WireType.fp32:
            self._reduce_by_messages(buffer, slots_U, num_rows)
        elif exchange is HotExchange.touched_rows:
            return self._exchange_touched(buffer, slots_U, num_rows)
        else:
            self._reduce_dense(buffer, slots_U, num_rows)
        self._note_union(num_rows)
        future.set_result(buffer)
        return future

    def _note_union(self, num_rows: list[int]) -> None:
        self._chooser.note([[num] for num in num_rows], [self._updated[0].numel()])

    def _reduce_dense(
        self, buffer: torch.Tensor, slots_U: torch.Tensor, num_rows: list[int]
    ) -> None:
        slots = slots_U.new_zeros(max(num_rows))
        slots[: slots_U.numel()] = slots_U
        gathered = slots.new_empty(self._world_size * slots.numel())
        dist.all_gather_into_tensor(gathered, slots, group=self._group)
        dist.all_reduce(buffer, group=self._group)
        buffer.div_(self._world_size)
        self._updated = [torch.cat(self._parts(gathered, num_rows)).unique()]

    @torch.no_grad()
    def _reduce_by_messages(
        self, buffer: torch.Tensor, slots_U: torch.Tensor, num_rows: list[int]
    ) -> None:
        if self._reducer is None:
            is_plain = self._wire_type is WireType.fp32
            self._reducer = HotReducer(
                [self._shape],
                Wire(self._group, self._wire_type),
                HotExchange.owners if is_plain else self._exchange,
                device=self.weight.device,
            )
        grad_HD = buffer.view(-1, self.dim)
        touched = (slots_U, grad_HD.index_select(0, slots_U))
        [(union, mean_UD)] = self._reducer.reduce([touched], [[num] for num in num_rows])
        # The rank's own rows are among the union.
        grad_HD.index_copy_(0, union, mean_UD)
        self._updated = [union]

    def _take_touched(self) -> tuple[torch.Tensor, HotCounts | None]:
        """The slots to reduce, and the ranks' numbers of them; None for one rank."""
        touched, self._touched = self._touched, []
        if len(touched) == 1 and not self._updated:
            return touched[0].slots_U, touched[0].counts
        # Rows that an earlier backward reduced may still wait for their update (gradient
        # accumulation): every rank sends those too, or the mean would count them once per rank
        # that touched them again.
        slots_U = torch.cat([part.slots_U for part in touched] + self._updated).unique()
        with torch.enable_grad():
            return slots_U, self.ask_counts(slots_U.numel())

    def _parts(self, gathered: torch.Tensor, num_rows: list[int]) -> list[torch.Tensor]:
        """What each rank sent, without the padding to the largest."""
        most = max(num_rows)
        return [gathered[r * most : r * most + num] for r, num in enumerate(num_rows)]

    def _exchange_touched(
        self, buffer: torch.Tensor, slots_U: torch.Tensor, num_rows: list[int]
    ) -> torch.futures.Future[torch.Tensor]:
        grad_HD = buffer.view(-1, self.dim)
        message = pack_rows(grad_HD, slots_U, max(num_rows), self._world_size)
        gathered = message.new_empty(self._world_size * message.shape[0], self.dim + 1)

        @torch.no_grad()
        def add_up() -> torch.Tensor:
            parts = self._parts(gathered, num_rows)
            self._updated = [add_rows(grad_HD, slots_U, parts)]
            self._note_union(num_rows)
            return buffer

        def arrived(done: torch.futures.Future[Any]) -> torch.Tensor:
            done.wait()  # raises what the exchange failed with; the buffer would hold anything
            return add_up()

        work = dist.all_gather_into_tensor(gathered, message, self._group, async_op=True)
        if not buffer.is_cuda:
            # Backward goes on, with the update of the cold rows; DDP waits at its end.
            return work.get_future().then(arrived)
        work.wait()  # holds up the stream, not the host
        future = _future(buffer)
        future.set_result(add_up())
        return future

    @torch.no_grad()
    def clear_gradient(self, slots_U: torch.Tensor) -> None:
        """Zero the gradient rows that an update used; the others are zero already."""
        if self.weight.grad is not None:
            self.weight.grad.view(-1, self.dim).index_fill_(0, slots_U, 0.0)

    @torch.no_grad()
    def checksum(self) -> torch.Tensor:
        """int64 (): a sum over the bits of the replica, the same on ranks with equal replicas."""
        total = torch.zeros((), dtype=torch.int64, device=self.weight.device)
        # Piece by piece: the sums of a replica of gigabytes need no memory of that size.
        for part in self.weight.detach().view(torch.int32).split(1 << 22):
            total = total * 31 + (part.long() * self._checksum_factors(part.numel())).sum()
        return total

    def _checksum_factors(self, num_values: int) -> torch.Tensor:
        return torch.arange(num_values, device=self.weight.device) % 65521 + 1

    def broadcast(self) -> None:
        """Make all replicas equal to rank 0's."""
        if self._world_size > 1:
            dist.broadcast(self.weight.detach(), group=self._group, group_src=0)

    def check_equal(self) -> None:
        """Compare the replicas of all ranks.

        Raises:
            RuntimeError: on every rank, if one differs.
        """
        mine = self.checksum().view(1)
        sums = torch.empty(self._world_size, dtype=mine.dtype, device=mine.device)
        dist.all_gather_into_tensor(sums, mine, group=self._group)
        if (sums != sums[0]).any():
            raise RuntimeError(
                f"hot replicas of dimension {self.dim}: expected equal checksums on all ranks, got "
                f"{sums.tolist()}. A rank updated its replica alone; restart from a checkpoint."
            )
