"""Averages the gradients of hot rows over the ranks: the owner of a row sums, every rank gathers.

``HotReducer.plan`` exchanges slots, as integers, as soon as the ids are known; ``HotPlan.reduce``
then sends values only and sums in rank order, so that replicas stay bitwise equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hotrec.embedding.messages import (
    exchange_counts,
    exchange_rows,
    gather_counts,
    gather_rows,
)
from hotrec.embedding.update_rules import RowSums
from hotrec.routing.sorting import sort_keys
from hotrec.runtime.comm_thread import ints_on
from hotrec.runtime.hosts import TwoLevelWire
from hotrec.runtime.wire import Wire

Shapes = Sequence[tuple[int, int]]  # (H, D) of each dimension
Tensors = Sequence[torch.Tensor]
SparseGradient = tuple[torch.Tensor, torch.Tensor]  # slots (U,), rows (U, D)


def _num_to(owners: Tensors, world_size: int) -> torch.Tensor:
    """The number of rows for each owner, int64 (W, G), given the sorted owners of each group."""
    owners_W = torch.arange(world_size, device=owners[0].device)
    ends_GW = torch.stack([torch.searchsorted(o, owners_W, right=True) for o in owners])
    return ends_GW.diff(prepend=ends_GW.new_zeros(len(owners), 1)).t()


@dataclass(frozen=True)
class HotPlan:
    """How the gradients of one step are reduced; see ``HotReducer.plan``."""

    unions: list[torch.Tensor]  # by dimension, the slots that any rank touches, int64, ascending
    mean: Callable[[Tensors], list[torch.Tensor]]

    @torch.no_grad()
    def reduce(self, grads: Tensors) -> list[SparseGradient]:
        """Average this rank's gradients of the planned slots, float32 (U, D), over the ranks, once.

        A rank that did not touch a row counts as zero. The unions and their gradients are bitwise
        equal on every rank.
        """
        return list(zip(self.unions, self.mean(grads), strict=True))


class HotReducer:
    """Averages gradients of hot rows over the ranks.

    Call it from one thread, in the same order on every rank. Of W ranks, rank s mod W owns slot s:
    it sums the rows of the slot, and every rank gathers the sums. A rank that touches U rows of
    dimension D, of ``union`` that any rank touches, sends with v bytes per value
    (W-1)/W (U + union) (v D + 4) bytes.

    With ``hosts``, the ranks of a host do so in fp32. Between the sum and the gathering, the owners
    of the same slots average their sums over the hosts in the wire's type, as ranks of a reducer
    whose slot s div W is s. So a row crosses the network once per host that touches it, and not
    once per rank.
    """

    def __init__(self, shapes: Shapes, wire: Wire, hosts: TwoLevelWire | None = None) -> None:
        self._shapes = list(shapes)
        self._wire = wire
        self._rail: HotReducer | None = None
        if hosts is not None:
            self._wire = inside = hosts.inside
            of_rail = [(len(range(inside.rank, h, inside.world_size)), dim) for h, dim in shapes]
            self._rail = HotReducer(of_rail, hosts.rail)

    @torch.no_grad()
    def plan(self, slots: Tensors) -> HotPlan:
        """Exchange the slots that this rank's batch touches, before the gradients exist.

        They are int64 (U,) by dimension, and distinct.
        """
        wire, world_size = self._wire, self._wire.world_size
        dims, ones = [dim for _, dim in self._shapes], [1] * len(self._shapes)
        # Slots keep their order within each owner.
        by_owner = [sort_keys(slots_U % world_size, world_size) for slots_U in slots]
        owners = [owner_U for owner_U, _ in by_owner]
        num_to, num_from = exchange_counts(wire, _num_to(owners, world_size))
        sent = [
            slots_U.index_select(0, order_U).int()
            for slots_U, (_, order_U) in zip(slots, by_owner, strict=True)
        ]
        sums = [
            RowSums(slots_K1.long().view(-1), num_hot)
            for slots_K1, (num_hot, _) in zip(
                exchange_rows(wire, sent, num_to, num_from, ones), self._shapes, strict=True
            )
        ]
        owned = [total.rows_U for total in sums]
        on_rail: HotPlan | None = None
        if self._rail is not None:
            on_rail = self._rail.plan([slots_O // world_size for slots_O in owned])
            owned = [union * world_size + wire.rank for union in on_rail.unions]
        num_owned = gather_counts(wire, ints_on(owned[0].device, [part.numel() for part in owned]))
        unordered = gather_rows(wire, [slots_O.int() for slots_O in owned], num_owned, ones)
        unions = [
            sort_keys(slots_K1.long().view(-1), num_hot)
            for slots_K1, (num_hot, _) in zip(unordered, self._shapes, strict=True)
        ]

        def mean(grads: Tensors) -> list[torch.Tensor]:
            sent = [
                grad_UD.index_select(0, order_U).div_(world_size)
                for grad_UD, (_, order_U) in zip(grads, by_owner, strict=True)
            ]
            arrived = exchange_rows(wire, sent, num_to, num_from, dims)
            totals = [total(rows_KD) for total, rows_KD in zip(sums, arrived, strict=True)]
            if on_rail is not None:
                totals = on_rail.mean(totals)
            gathered = gather_rows(wire, totals, num_owned, dims)
            return [
                rows_KD.index_select(0, order_K)
                for rows_KD, (_, order_K) in zip(gathered, unions, strict=True)
            ]

        return HotPlan([union for union, _ in unions], mean)

    def reduce(self, touched: Sequence[SparseGradient]) -> list[SparseGradient]:
        """``plan`` and ``HotPlan.reduce`` in one call."""
        plan = self.plan([slots_U for slots_U, _ in touched])
        return plan.reduce([grad_UD for _, grad_UD in touched])
