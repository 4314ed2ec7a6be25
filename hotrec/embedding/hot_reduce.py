"""Averages the gradients of hot rows over the ranks by the cheapest of three reductions.

``HotReducer.plan`` exchanges slots, as integers, as soon as the ids are known; ``HotPlan.reduce``
then sends values only and sums in rank order, so that replicas stay bitwise equal.

Ranks of several hosts first sum inside their host, so a row crosses the network once per host that
touches it, and not once per rank; see ``HotReducer``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from hotrec.embedding.messages import (
    RowCounts,
    exchange_rows,
    gather_counts,
    gather_rows,
    row_counts,
)
from hotrec.embedding.update_rules import RowSums
from hotrec.routing.sorting import sort_keys
from hotrec.runtime.comm_thread import HostInts, ints_on
from hotrec.runtime.hosts import TwoLevelWire
from hotrec.runtime.wire import Wire
from hotrec.types import HotExchange, WireType

SLOT_BYTES = 4
Shapes = Sequence[tuple[int, int]]  # (H, D) of each dimension
Tensors = Sequence[torch.Tensor]
SparseGradient = tuple[torch.Tensor, torch.Tensor]  # slots (U,), rows (U, D)
# By dimension, the union of the ranks' slots, and a function from gradients to the union's means.
Reduction = tuple[list[torch.Tensor], Callable[[Tensors], list[torch.Tensor]]]


def hot_bytes(
    shapes: Shapes, counts: RowCounts, num_union_G: Sequence[float], value_bytes: int = 4
) -> dict[HotExchange, float]:
    """The bytes that the busiest rank sends in each reduction.

    With W ranks, D the dimension, H hot rows, U_r rows touched by rank r, ``union`` rows touched by
    any rank, and v bytes per value, summed over the dimensions:

        touched_rows  (W-1) max_r U_r (v D + 4)
                      every rank gathers and sums all ranks' rows
        owners        (W-1)/W max_r U_r (v D + 4)  to the owners of the rows, which sum them
                      + (W-1)/W union (v D + 4)    the sums, gathered by every rank
        dense         2 (W-1)/W H (v D + 1)        an all-reduce of all rows, and of at most a byte
                                                   per row: whether any rank touched it

    Owners send less than touched_rows when a row is touched by more than W/(W-1) ranks on average.
    """
    world_size = len(counts)
    row_bytes_G = [value_bytes * dim + SLOT_BYTES for _, dim in shapes]
    most = max(sum(n * size for n, size in zip(row, row_bytes_G, strict=True)) for row in counts)
    union = sum(num * size for num, size in zip(num_union_G, row_bytes_G, strict=True))
    dense = sum(num_hot * (value_bytes * dim + 1) for num_hot, dim in shapes)
    others = (world_size - 1) / world_size
    return {
        HotExchange.touched_rows: (world_size - 1) * most,
        HotExchange.owners: others * most + others * union,
        HotExchange.dense: 2 * others * dense,
    }


def estimate_unions(
    shapes: Shapes, counts: RowCounts, union_frac_G: Sequence[float]
) -> list[float]:
    """Estimate, by dimension, the number of rows that any rank touches.

    ``union_frac_G`` is the union divided by the sum of all ranks' U, in an earlier step.
    """
    return [
        min(num_hot, max(frac * sum(nums), *nums))
        for nums, frac, (num_hot, _) in zip(
            zip(*counts, strict=True), union_frac_G, shapes, strict=True
        )
    ]


def _gather_slots(shapes: Shapes, wire: Wire, slots: Tensors, counts: RowCounts) -> list[RowSums]:
    gathered = gather_rows(wire, [slots_U.int() for slots_U in slots], counts, [1] * len(shapes))
    return [
        RowSums(slots_K1.view(-1).long(), num_hot)
        for slots_K1, (num_hot, _) in zip(gathered, shapes, strict=True)
    ]


def _reduce_touched(shapes: Shapes, wire: Wire, slots: Tensors, counts: RowCounts) -> Reduction:
    """Every rank gathers and sums the rows of all ranks."""
    dims = [dim for _, dim in shapes]
    sums = _gather_slots(shapes, wire, slots, counts)

    def mean(grads: Tensors) -> list[torch.Tensor]:
        shares = [grad_UD / wire.world_size for grad_UD in grads]
        gathered = gather_rows(wire, shares, counts, dims)
        return [total(rows_KD) for total, rows_KD in zip(sums, gathered, strict=True)]

    return [total.rows_U for total in sums], mean


def _reduce_by_owner(
    shapes: Shapes, wire: Wire, slots: Tensors, rail: HotReducer | None = None
) -> tuple[HotExchange, Reduction]:
    """Rank s mod W owns slot s: it sums the rows of the slot, and every rank gathers the sums.

    With ``rail``, ``wire`` is that of a host and W its ranks. Between the sum and the gathering,
    owners of the same slots on all hosts average their sums by ``rail``, whose slot s div W is s.
    """
    dims, ones, world_size = [dim for _, dim in shapes], [1] * len(shapes), wire.world_size
    # Slots keep their order within each owner.
    by_owner = [sort_keys(slots_U % world_size, world_size) for slots_U in slots]
    num_to, num_from = _exchange_owner_counts(wire, [owner_U for owner_U, _ in by_owner])
    sent = [
        slots_U.index_select(0, order_U).int()
        for slots_U, (_, order_U) in zip(slots, by_owner, strict=True)
    ]
    sums = [
        RowSums(slots_K1.long().view(-1), num_hot)
        for slots_K1, (num_hot, _) in zip(
            exchange_rows(wire, sent, num_to, num_from, ones), shapes, strict=True
        )
    ]
    owned = [total.rows_U for total in sums]
    plan: HotPlan | None = None
    if rail is not None:
        plan = rail.plan([slots_O // world_size for slots_O in owned])
        owned = [union * world_size + wire.rank for union in plan.unions]
    num_owned = gather_counts(wire, ints_on(owned[0].device, [part.numel() for part in owned]))
    unordered = gather_rows(wire, [slots_O.int() for slots_O in owned], num_owned, ones)
    unions = [
        sort_keys(slots_K1.long().view(-1), num_hot)
        for slots_K1, (num_hot, _) in zip(unordered, shapes, strict=True)
    ]

    def mean(grads: Tensors) -> list[torch.Tensor]:
        sent = [
            grad_UD.index_select(0, order_U).div_(world_size)
            for grad_UD, (_, order_U) in zip(grads, by_owner, strict=True)
        ]
        arrived = exchange_rows(wire, sent, num_to, num_from, dims)
        totals = [total(rows_KD) for total, rows_KD in zip(sums, arrived, strict=True)]
        if plan is not None:
            totals = plan.mean(totals)
        gathered = gather_rows(wire, totals, num_owned, dims)
        return [
            rows_KD.index_select(0, order_K)
            for rows_KD, (_, order_K) in zip(gathered, unions, strict=True)
        ]

    exchange = HotExchange.owners if plan is None else plan.exchange
    return exchange, ([union for union, _ in unions], mean)


def _exchange_owner_counts(wire: Wire, owners: Tensors) -> tuple[RowCounts, RowCounts]:
    """The number of rows for each owner and from each rank, given the sorted owners."""
    num_groups, world_size = len(owners), wire.world_size
    owners_W = torch.arange(world_size, device=owners[0].device)
    ends_GW = torch.stack([torch.searchsorted(o, owners_W, right=True) for o in owners])
    num_to_WG = ends_GW.diff(prepend=ends_GW.new_zeros(num_groups, 1)).t().reshape(-1)
    sizes = [num_groups] * world_size
    received = wire.all_to_all(num_to_WG, sizes, sizes)
    # Both in one copy: on CUDA, each copy blocks the host once.
    counts = row_counts(HostInts(torch.cat([num_to_WG, received])).wait(), num_groups)
    return counts[:world_size], counts[world_size:]


def _reduce_dense(
    shapes: Shapes, wire: Wire, slots: Tensors, counts: RowCounts, buffer: torch.Tensor
) -> Reduction:
    """An all-reduce of all hot rows.

    ``buffer`` is float (sum of H D,), zero outside of this rank's slots; it is zero afterwards.
    """
    num_hot_G = [num_hot for num_hot, _ in shapes]
    parts = buffer.split([num_hot * dim for num_hot, dim in shapes])
    views = [part.view(-1, dim) for part, (_, dim) in zip(parts, shapes, strict=True)]
    # For few touched rows, their slots are a shorter message than a flag for every row.
    most = max(sum(nums) for nums in counts)
    if SLOT_BYTES * most * wire.world_size < 2 * sum(num_hot_G):
        unions = [total.rows_U for total in _gather_slots(shapes, wire, slots, counts)]
    else:
        # A byte counts up to 255 ranks.
        dtype = torch.uint8 if wire.world_size < 256 else torch.int32
        flags = torch.zeros(sum(num_hot_G), dtype=dtype, device=buffer.device)
        for flags_H, slots_U in zip(flags.split(num_hot_G), slots, strict=True):
            flags_H.index_fill_(0, slots_U, 1)
        wire.all_reduce(flags)
        unions = [flags_H.nonzero().view(-1) for flags_H in flags.split(num_hot_G)]

    def mean(grads: Tensors) -> list[torch.Tensor]:
        for grad_HD, slots_U, grad_UD in zip(views, slots, grads, strict=True):
            grad_HD.index_copy_(0, slots_U, grad_UD / wire.world_size)
        wire.all_reduce(buffer)
        means = []
        for grad_HD, union in zip(views, unions, strict=True):
            means.append(grad_HD.index_select(0, union))
            # Clears only the nonzero rows, not all H x D values.
            grad_HD.index_fill_(0, union, 0.0)
        return means

    return unions, mean


@dataclass(frozen=True)
class HotPlan:
    """How the gradients of one step are reduced; see ``HotReducer.plan``."""

    exchange: HotExchange  # touched_rows for one rank, which sends nothing
    unions: list[torch.Tensor]  # int64, ascending (for one rank, in their given order)
    mean: Callable[[Tensors], list[torch.Tensor]]

    @torch.no_grad()
    def reduce(self, grads: Tensors) -> list[SparseGradient]:
        """Average this rank's gradients of the planned slots, float32 (U, D), over the ranks, once.

        A rank that did not touch a row counts as zero. The unions and their gradients are bitwise
        equal on every rank; one rank alone gets its own tensors back.
        """
        return list(zip(self.unions, self.mean(grads), strict=True))


class HotReducer:
    """Averages gradients of hot rows over the ranks.

    Call it from one thread, in the same order on every rank. With auto, each step uses the
    reduction that sends the fewest bytes. Only the dense reduction needs memory of size H x D.

    With ``hosts``, ranks sum inside their host in fp32, each the slots s with s mod G its local
    rank; the reduction is chosen and made between the G-th parts of the hosts, in the wire's type,
    and the means are gathered inside. A host sends as much as a rank of the flat reduction would
    among one rank per host.
    """

    def __init__(
        self,
        shapes: Shapes,
        wire: Wire,
        exchange: HotExchange = HotExchange.auto,
        device: torch.device | str = "cpu",
        hosts: TwoLevelWire | None = None,
    ) -> None:
        self._shapes = list(shapes)
        self._inside = self._rail = None
        if hosts is not None:
            self._inside = inside = hosts.inside
            of_rail = [(len(range(inside.rank, h, inside.world_size)), dim) for h, dim in shapes]
            self._rail = HotReducer(of_rail, hosts.rail, exchange, device)
        self._wire = wire
        self._exchange = exchange
        self._device = torch.device(device)
        self._value_bytes = 4 if wire.wire_type is WireType.fp32 else 2
        # The union is known only after the exchange of slots, so the choice estimates it from the
        # last step's fraction, initially the largest possible one.
        self._union_frac_G = [1.0] * len(self._shapes)

    @torch.no_grad()
    def plan(
        self, slots: Tensors, counts: RowCounts | None = None, buffer: torch.Tensor | None = None
    ) -> HotPlan:
        """Exchange slots and choose the reduction, before the gradients exist.

        Args:
            slots: By dimension, the slots that this rank's batch touches, int64 (U,), distinct.
            counts: U of each rank and dimension, if already known.
            buffer: Memory for the dense reduction, float (sum of H D,), zero outside of the slots;
                by default the reducer's own.
        """
        if self._wire.world_size == 1:
            return HotPlan(HotExchange.touched_rows, list(slots), list)
        own = [slots_U.numel() for slots_U in slots]
        if counts is None and self._inside is None:
            counts = gather_counts(self._wire, ints_on(self._device, own))
        if counts is not None and counts[self._wire.rank] != own:
            raise ValueError(
                f"hot exchange counts of rank {self._wire.rank}: expected {own} (the numbers of "
                f"slots), got {counts[self._wire.rank]}. Use the same batch for the counts and the "
                "plan."
            )
        if self._inside is not None:
            exchange, (unions, mean) = _reduce_by_owner(
                self._shapes, self._inside, slots, self._rail
            )
            return HotPlan(exchange, unions, mean)
        assert counts is not None
        exchange = self._choose(counts)
        match exchange:
            case HotExchange.touched_rows:
                unions, mean = _reduce_touched(self._shapes, self._wire, slots, counts)
            case HotExchange.owners:
                _, (unions, mean) = _reduce_by_owner(self._shapes, self._wire, slots)
            case _:
                buffer = self._own_buffer if buffer is None else buffer
                unions, mean = _reduce_dense(self._shapes, self._wire, slots, counts, buffer)
        for group, (union, nums) in enumerate(zip(unions, zip(*counts, strict=True), strict=True)):
            if any(nums):
                self._union_frac_G[group] = union.numel() / sum(nums)
        return HotPlan(exchange, unions, mean)

    def _choose(self, counts: RowCounts) -> HotExchange:
        """The reduction that sends the fewest bytes; of equals, the first of the enumeration."""
        if self._exchange is not HotExchange.auto:
            return self._exchange
        unions = estimate_unions(self._shapes, counts, self._union_frac_G)
        costs = hot_bytes(self._shapes, counts, unions, self._value_bytes)
        return min(costs, key=lambda exchange: costs[exchange])

    @cached_property
    def _own_buffer(self) -> torch.Tensor:
        """All zeros between steps."""
        return torch.zeros(sum(h * dim for h, dim in self._shapes), device=self._device)

    def reduce(
        self,
        touched: Sequence[SparseGradient],
        counts: RowCounts | None = None,
        buffer: torch.Tensor | None = None,
    ) -> list[SparseGradient]:
        """``plan`` and ``HotPlan.reduce`` in one call."""
        plan = self.plan([slots_U for slots_U, _ in touched], counts, buffer)
        return plan.reduce([grad_UD for _, grad_UD in touched])
