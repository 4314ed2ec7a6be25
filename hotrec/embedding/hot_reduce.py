"""Averages the gradients of hot rows over the ranks by the cheapest of three reductions.

A reduction has two steps. ``HotReducer.plan`` needs the touched slots only, which are known as soon
as the ids are: it exchanges slots and finds their union. ``reduce_planned`` then sends values only,
all dimensions in one message, and sums rows in rank order, so that replicas stay bitwise equal.
Slots are sent as integers: a 16-bit wire rounds values only.

With W ranks, D the dimension, H hot rows, U_r rows touched by rank r, ``union`` rows touched by any
rank, and v bytes per value on the wire (4, or 2 with a 16-bit wire), the busiest rank sends, summed
over the dimensions:

    all-gather   (W-1) max_r U_r (v D + 4)
                 every rank gathers and sums all ranks' rows
    owners       (W-1)/W max_r U_r (v D + 4)  to the owners of the rows, which sum them
                 + (W-1)/W union (v D + 4)    the sums, gathered by every rank
    dense        2 (W-1)/W H (v D + 1)        an all-reduce of all rows, and of at most a byte per
                                              row that says whether some rank touched it

Rank s mod W owns slot s. With two ranks, owners never send less than the all-gather; with more they
do when a row is touched by more than W/(W-1) ranks on average.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import embedding_bag

from hotrec.embedding.messages import RowCounts, message_sizes, pack, row_counts, unpack
from hotrec.routing.sorting import sort_keys
from hotrec.runtime.comm_thread import HostInts, ints_on
from hotrec.runtime.wire import Wire
from hotrec.types import HotExchange, WireType

SLOT_BYTES = 4
# Seconds of a collective by the bytes that the busiest rank sends.
Seconds = Mapping[str, Callable[[float], float]]
Shapes = Sequence[tuple[int, int]]  # (H, D) of each dimension
SparseGradient = tuple[torch.Tensor, torch.Tensor]  # slots (U,), rows (U, D)


def hot_messages(
    shapes: Shapes,
    num_touched_RG: Sequence[Sequence[int]],
    num_union_G: Sequence[float],
    value_bytes: int,
) -> dict[HotExchange, dict[str, float]]:
    """The bytes that each reduction sends, by the formulas of the module.

    Args:
        shapes: H and D of each dimension.
        num_touched_RG: U of each rank and dimension.
        num_union_G: The number of rows that some rank touched, by dimension.
        value_bytes: The size of a value on the wire.

    Returns:
        For each exchange but AUTO, bytes by collective, see ``hotrec.runtime.traffic``.
    """
    world_size = len(num_touched_RG)
    row_bytes_G = [value_bytes * dim + SLOT_BYTES for _, dim in shapes]
    most = max(
        sum(num * size for num, size in zip(nums, row_bytes_G, strict=True))
        for nums in num_touched_RG
    )
    union = sum(num * size for num, size in zip(num_union_G, row_bytes_G, strict=True))
    dense = sum(num_hot * (value_bytes * dim + 1) for num_hot, dim in shapes)
    others = (world_size - 1) / world_size
    return {
        HotExchange.touched_rows: {"all_gather": (world_size - 1) * most},
        HotExchange.owners: {"all_to_all": others * most, "all_gather": others * union},
        HotExchange.dense: {"all_reduce": 2 * others * dense},
    }


def estimate_unions(
    shapes: Shapes, num_touched_RG: Sequence[Sequence[int]], union_frac_G: Sequence[float]
) -> list[float]:
    """Estimate the number of rows that some rank touches, from an earlier step's fraction.

    Args:
        shapes: H and D of each dimension.
        num_touched_RG: U of each rank and dimension.
        union_frac_G: The union divided by the sum of all ranks' U, by dimension; at most 1.
    """
    return [
        min(num_hot, max(frac * sum(nums), *nums))
        for nums, frac, (num_hot, _) in zip(
            zip(*num_touched_RG, strict=True), union_frac_G, shapes, strict=True
        )
    ]


def choose_exchange(
    shapes: Shapes,
    num_touched_RG: Sequence[Sequence[int]],
    num_union_G: Sequence[float],
    value_bytes: int = 4,
    seconds: Seconds | None = None,
) -> HotExchange:
    """Choose the cheapest reduction, the first in the enumeration's order among equals.

    Args:
        seconds: Costs of the collectives, the same on every rank; None to choose by bytes.
    """

    def cost(sent: Mapping[str, float]) -> float:
        if seconds is None:
            return sum(sent.values())
        return sum(seconds[name](num_bytes) for name, num_bytes in sent.items())

    messages = hot_messages(shapes, num_touched_RG, num_union_G, value_bytes)
    costs = {exchange: cost(sent) for exchange, sent in messages.items()}
    return min(costs, key=lambda exchange: costs[exchange])


class _SlotSum:
    """Sums rows by slot, in their order.

    Args:
        slots_K: Slots int64 (K,), in rank order.
        num_hot: The upper bound of the slots.
    """

    def __init__(self, slots_K: torch.Tensor, num_hot: int) -> None:
        sorted_K, self._order_K = sort_keys(slots_K, num_hot)
        self.slots_U, counts_U = torch.unique_consecutive(sorted_K, return_counts=True)
        self._offsets_U = counts_U.cumsum(0) - counts_U

    def __call__(self, grad_KD: torch.Tensor) -> torch.Tensor:
        if self.slots_U.numel() == 0:
            return grad_KD
        # Bags are summed front to back and the sort is stable, so sums are in rank order.
        return embedding_bag(self._order_K, grad_KD, self._offsets_U, mode="sum")


def _gather(
    wire: Wire, parts: Sequence[torch.Tensor], counts: RowCounts, widths: Sequence[int]
) -> list[torch.Tensor]:
    """Gather all ranks' items by dimension, (items, width) in rank order."""
    message = pack(parts, [counts[wire.rank]], widths)
    return unpack(wire.all_gather_joined(message, message_sizes(counts, widths)), counts, widths)


def _gather_slots(
    shapes: Shapes, wire: Wire, slots: Sequence[torch.Tensor], counts: RowCounts
) -> list[_SlotSum]:
    slots_32 = [slots_U.int() for slots_U in slots]
    return [
        _SlotSum(slots_K1.view(-1).long(), num_hot)
        for slots_K1, (num_hot, _) in zip(
            _gather(wire, slots_32, counts, [1] * len(shapes)), shapes, strict=True
        )
    ]


class AllGatherReduction:
    """Every rank gathers and sums the rows of all ranks.

    Args:
        shapes: (H, D) of each dimension.
        wire: To the other ranks.
        slots: int64 (U,), distinct, of each dimension.
        counts: U of each rank.
    """

    def __init__(
        self, shapes: Shapes, wire: Wire, slots: Sequence[torch.Tensor], counts: RowCounts
    ) -> None:
        self._wire, self._counts = wire, counts
        self._dims = [dim for _, dim in shapes]
        self._sums = _gather_slots(shapes, wire, slots, counts)
        self.unions = [total.slots_U for total in self._sums]

    def reduce(self, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        shares = [grad_UD / self._wire.world_size for grad_UD in grads]
        gathered = _gather(self._wire, shares, self._counts, self._dims)
        return [total(rows_KD) for total, rows_KD in zip(self._sums, gathered, strict=True)]


class OwnerReduction:
    """The owners of the slots sum their rows, and every rank gathers the sums.

    Args:
        shapes: (H, D) of each dimension.
        wire: To the other ranks.
        slots: int64 (U,), distinct, of each dimension.
    """

    def __init__(self, shapes: Shapes, wire: Wire, slots: Sequence[torch.Tensor]) -> None:
        self._wire = wire
        self._dims = [dim for _, dim in shapes]
        ones, world_size = [1] * len(shapes), wire.world_size
        # Slots keep their order within each owner.
        by_owner = [sort_keys(slots_U % world_size, world_size) for slots_U in slots]
        self._orders = [order_U for _, order_U in by_owner]
        self._num_to, self._num_from = self._exchange_counts([owner_U for owner_U, _ in by_owner])
        for_owners = [
            slots_U.index_select(0, order_U).int()
            for slots_U, order_U in zip(slots, self._orders, strict=True)
        ]
        self._sums = [
            _SlotSum(slots_K1.long().view(-1), num_hot)
            for slots_K1, (num_hot, _) in zip(self._send(for_owners, ones), shapes, strict=True)
        ]
        owned = [total.slots_U for total in self._sums]
        num_owned = ints_on(owned[0].device, [slots_O.numel() for slots_O in owned])
        sizes = [len(shapes)] * world_size
        self._num_owned = row_counts(
            HostInts(wire.all_gather_joined(num_owned, sizes)).wait(), len(shapes)
        )
        unordered = _gather(wire, [slots_O.int() for slots_O in owned], self._num_owned, ones)
        ordered = [
            sort_keys(slots_K1.long().view(-1), num_hot)
            for slots_K1, (num_hot, _) in zip(unordered, shapes, strict=True)
        ]
        self.unions = [union for union, _ in ordered]
        self._union_orders = [order for _, order in ordered]

    def _exchange_counts(self, owners: Sequence[torch.Tensor]) -> tuple[RowCounts, RowCounts]:
        """The number of rows for each owner and from each rank, given the sorted owners."""
        num_groups, world_size = len(owners), self._wire.world_size
        owners_W = torch.arange(world_size, device=owners[0].device)
        ends_GW = torch.stack([torch.searchsorted(o, owners_W, right=True) for o in owners])
        num_to_WG = ends_GW.diff(prepend=ends_GW.new_zeros(num_groups, 1)).t().reshape(-1)
        sizes = [num_groups] * world_size
        received = self._wire.all_to_all(num_to_WG, sizes, sizes)
        # Both in one copy: on CUDA each makes the host wait once.
        counts = row_counts(HostInts(torch.cat([num_to_WG, received])).wait(), num_groups)
        return counts[:world_size], counts[world_size:]

    def _send(self, parts: Sequence[torch.Tensor], widths: Sequence[int]) -> list[torch.Tensor]:
        """Send items, sorted by owner, to the owners and return the received ones by dimension."""
        received = self._wire.all_to_all(
            pack(parts, self._num_to, widths),
            message_sizes(self._num_to, widths),
            message_sizes(self._num_from, widths),
        )
        return unpack(received, self._num_from, widths)

    def reduce(self, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        for_owners = [
            grad_UD.index_select(0, order_U).div_(self._wire.world_size)
            for grad_UD, order_U in zip(grads, self._orders, strict=True)
        ]
        arrived = self._send(for_owners, self._dims)
        sums = [total(rows_KD) for total, rows_KD in zip(self._sums, arrived, strict=True)]
        gathered = _gather(self._wire, sums, self._num_owned, self._dims)
        return [
            rows_KD.index_select(0, order_K)
            for rows_KD, order_K in zip(gathered, self._union_orders, strict=True)
        ]


class DenseReduction:
    """An all-reduce of all hot rows.

    Args:
        shapes: (H, D) of each dimension.
        wire: To the other ranks.
        slots: int64 (U,), distinct, of each dimension.
        counts: U of each rank.
        buffer: Float (sum of H D,), zero outside of this rank's slots; ``reduce`` sets it to zero.
    """

    def __init__(
        self,
        shapes: Shapes,
        wire: Wire,
        slots: Sequence[torch.Tensor],
        counts: RowCounts,
        buffer: torch.Tensor,
    ) -> None:
        self._wire, self._slots, self._buffer = wire, slots, buffer
        sizes = [num_hot * dim for num_hot, dim in shapes]
        self._views = [
            flat.view(-1, dim) for flat, (_, dim) in zip(buffer.split(sizes), shapes, strict=True)
        ]
        num_hot, most = sum(h for h, _ in shapes), max(sum(nums) for nums in counts)
        # For few touched rows, their slots are a shorter message than a flag for every row.
        if SLOT_BYTES * most * wire.world_size < 2 * num_hot:
            self.unions = [total.slots_U for total in _gather_slots(shapes, wire, slots, counts)]
        else:
            self.unions = self._all_reduce_flags([h for h, _ in shapes])

    def _all_reduce_flags(self, num_hot_G: list[int]) -> list[torch.Tensor]:
        # A byte counts up to 255 ranks.
        dtype = torch.uint8 if self._wire.world_size < 256 else torch.int32
        flags = torch.zeros(sum(num_hot_G), dtype=dtype, device=self._buffer.device)
        flags_G = flags.split(num_hot_G)
        for flags_H, slots_U in zip(flags_G, self._slots, strict=True):
            flags_H.index_fill_(0, slots_U, 1)
        self._wire.all_reduce(flags)
        return [flags_H.nonzero().view(-1) for flags_H in flags_G]

    def reduce(self, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        for grad_HD, slots_U, grad_UD in zip(self._views, self._slots, grads, strict=True):
            grad_HD.index_copy_(0, slots_U, grad_UD / self._wire.world_size)
        self._wire.all_reduce(self._buffer)
        means = []
        for grad_HD, union in zip(self._views, self.unions, strict=True):
            means.append(grad_HD.index_select(0, union))
            # Clears only the nonzero rows, not all H x D values.
            grad_HD.index_fill_(0, union, 0.0)
        return means


# The reduction of a step. The constructor exchanges slots and finds ``unions``; ``reduce`` returns
# the mean gradients of these rows.
Reduction = AllGatherReduction | OwnerReduction | DenseReduction


@dataclass(frozen=True)
class HotPlan:
    """How the gradients of one step will be reduced; see ``HotReducer.plan``.

    Args:
        exchange: The chosen reduction; TOUCHED_ROWS for one rank, which sends nothing.
        unions: By dimension, the slots that some rank touched, int64, ascending (for one rank, in
            their given order).
        slots: This rank's slots.
        reduction: None for one rank.
    """

    exchange: HotExchange
    unions: list[torch.Tensor]
    slots: list[torch.Tensor]
    reduction: Reduction | None


class HotReducer:
    """Averages gradients of hot rows over the ranks.

    Call it from one thread, in the same order on every rank. Only DENSE allocates or reads anything
    of size H x D.

    Args:
        shapes: (H, D) of each dimension.
        wire: To the other ranks.
        exchange: AUTO chooses the cheapest reduction in every step, the same on every rank.
        seconds: Costs of the collectives, the same on every rank; None to choose by bytes.
        device: Of slots and gradients.

    Raises:
        ValueError: if AUTO is to choose by seconds and those of some collective are missing.
    """

    def __init__(
        self,
        shapes: Shapes,
        wire: Wire,
        exchange: HotExchange = HotExchange.auto,
        seconds: Seconds | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self._shapes = list(shapes)
        self._wire = wire
        self._exchange = exchange
        self._seconds = seconds
        self._device = torch.device(device)
        self._value_bytes = 4 if wire.wire_type is WireType.fp32 else 2
        # The union is known only after the exchange of slots, so the choice estimates it from the
        # last step's fraction, at first from the largest possible one.
        self._union_frac_G = [1.0] * len(self._shapes)
        self._dense_buffer: torch.Tensor | None = None  # all zeros between steps
        wanted = {"all_gather", "all_to_all", "all_reduce"}
        if seconds is not None and exchange is HotExchange.auto and not wanted <= set(seconds):
            raise ValueError(
                f"hot exchange seconds: expected the collectives {sorted(wanted)}, got "
                f"{sorted(seconds)}. Pass all of them, or none to choose by bytes."
            )

    def exchange_counts(self, num_touched_G: Sequence[int]) -> RowCounts:
        """Gather the number of rows that each rank's batch touches, by dimension."""
        self._check_num(len(num_touched_G), "counts")
        sizes = [len(num_touched_G)] * self._wire.world_size
        own = ints_on(self._device, num_touched_G)
        gathered = HostInts(self._wire.all_gather_joined(own, sizes)).wait()
        return row_counts(gathered, len(num_touched_G))

    @torch.no_grad()
    def plan(
        self,
        slots: Sequence[torch.Tensor],
        counts: RowCounts | None = None,
        dense_buffer: torch.Tensor | None = None,
    ) -> HotPlan:
        """Exchange slots and choose the reduction, before the gradients exist.

        Args:
            slots: By dimension, the slots that this rank's batch touches, int64 (U,), distinct.
            counts: U of each rank and dimension, if already known.
            dense_buffer: Memory for DENSE, see ``DenseReduction``; by default the reducer's own.

        Raises:
            ValueError: if the number of tensors is not that of dimensions, or this rank's counts
                differ from its slots.
        """
        slots = list(slots)
        self._check_num(len(slots), "slots")
        if self._wire.world_size == 1:
            return HotPlan(HotExchange.touched_rows, slots, slots, None)
        own = [slots_U.numel() for slots_U in slots]
        if counts is None:
            counts = self.exchange_counts(own)
        if counts[self._wire.rank] != own:
            raise ValueError(
                f"hot exchange counts of rank {self._wire.rank}: expected {own}, the slots given, "
                f"got {counts[self._wire.rank]}. Count and plan the same batch."
            )
        exchange = self._choose(counts)
        reduction: Reduction
        match exchange:
            case HotExchange.touched_rows:
                reduction = AllGatherReduction(self._shapes, self._wire, slots, counts)
            case HotExchange.owners:
                reduction = OwnerReduction(self._shapes, self._wire, slots)
            case _:
                buffer = self._own_buffer() if dense_buffer is None else dense_buffer
                reduction = DenseReduction(self._shapes, self._wire, slots, counts, buffer)
        self._note_unions(counts, [union.numel() for union in reduction.unions])
        return HotPlan(exchange, reduction.unions, slots, reduction)

    def _choose(self, counts: RowCounts) -> HotExchange:
        if self._exchange is not HotExchange.auto:
            return self._exchange
        unions = estimate_unions(self._shapes, counts, self._union_frac_G)
        return choose_exchange(self._shapes, counts, unions, self._value_bytes, self._seconds)

    def _note_unions(self, counts: RowCounts, num_union_G: Sequence[int]) -> None:
        for group, num_union in enumerate(num_union_G):
            total = sum(nums[group] for nums in counts)
            if total:
                self._union_frac_G[group] = num_union / total

    def _own_buffer(self) -> torch.Tensor:
        if self._dense_buffer is None:
            num_values = sum(num_hot * dim for num_hot, dim in self._shapes)
            self._dense_buffer = torch.zeros(num_values, device=self._device)
        return self._dense_buffer

    @torch.no_grad()
    def reduce_planned(self, grads: Sequence[torch.Tensor], plan: HotPlan) -> list[SparseGradient]:
        """Average over the ranks; a rank that did not touch a row counts as zero.

        Args:
            grads: By dimension, this rank's gradients of the planned slots, float32 (U, D).
            plan: The plan of this step, to be used once.

        Returns:
            By dimension, the slots that some rank touched, int64, ascending, and their gradients
            float32, bitwise equal on every rank. One rank alone gets its own tensors back.

        Raises:
            ValueError: if the gradients do not fit the plan's slots.
        """
        self._check_num(len(grads), "gradients")
        for (num_hot, dim), slots_U, grad_UD in zip(self._shapes, plan.slots, grads, strict=True):
            if grad_UD.shape != (slots_U.numel(), dim) or grad_UD.dtype != torch.float32:
                raise ValueError(
                    f"hot gradients ({num_hot} hot rows of dimension {dim}): expected float32 "
                    f"({slots_U.numel()}, {dim}) for the planned slots, got {grad_UD.dtype} "
                    f"{tuple(grad_UD.shape)}. Plan and reduce the same batch."
                )
        means = list(grads) if plan.reduction is None else plan.reduction.reduce(grads)
        return list(zip(plan.unions, means, strict=True))

    def reduce(
        self,
        touched: Sequence[SparseGradient],
        counts: RowCounts | None = None,
        dense_buffer: torch.Tensor | None = None,
    ) -> list[SparseGradient]:
        """``plan`` and ``reduce_planned`` in one call.

        Args:
            touched: By dimension, slots int64 (U,), distinct, and gradients float32 (U, D).
            counts: As for ``plan``.
            dense_buffer: As for ``plan``.
        """
        plan = self.plan([slots_U for slots_U, _ in touched], counts, dense_buffer)
        return self.reduce_planned([grad_UD for _, grad_UD in touched], plan)

    def _check_num(self, num: int, what: str) -> None:
        if num != len(self._shapes):
            raise ValueError(
                f"hot exchange {what}: expected one for each of {len(self._shapes)} embedding "
                f"dimensions, got {num}. Pass empty tensors where a batch touches nothing."
            )
