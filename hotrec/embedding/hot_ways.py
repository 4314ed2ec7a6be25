"""Three ways in which gradients of hot rows travel, each planned for one step.

The constructor exchanges slots and finds ``unions``; ``reduce`` sends the values. All dimensions
are in one message: by rank, of each dimension its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch.nn.functional import embedding_bag

from hotrec.routing.sorting import sort_keys
from hotrec.runtime.host_ints import HostInts, ints_on
from hotrec.runtime.wire import Wire

Counts = list[list[int]]  # rows that each rank touched, by dimension: (W, G)


class Way(Protocol):
    """One exchange of one step, planned."""

    unions: list[torch.Tensor]

    def reduce(self, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The mean gradients of the unions' rows."""
        ...


def _join(parts_G: Sequence[torch.Tensor]) -> torch.Tensor:
    flat = [part.reshape(-1) for part in parts_G]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _by_group(
    received: torch.Tensor, num_RG: Sequence[Sequence[int]], widths_G: Sequence[int]
) -> list[torch.Tensor]:
    """What all ranks sent, by dimension.

    Args:
        received: flat; by rank, of each dimension ``num`` items of ``width`` elements.
        num_RG: items of each rank, by dimension.
        widths_G: elements of an item.

    Returns:
        By dimension (sum over ranks of num, width), in rank order.
    """
    if len(widths_G) == 1:
        return [received.view(-1, widths_G[0])]
    sizes = [num * width for nums in num_RG for num, width in zip(nums, widths_G, strict=True)]
    parts = received.split(sizes)
    num_groups = len(widths_G)
    return [
        torch.cat(parts[group::num_groups]).view(-1, width) for group, width in enumerate(widths_G)
    ]


class _Sum:
    """Sums of rows by slot, in the order in which the rows come.

    Args:
        slots_K: int64 (K,), in rank order.
        num_hot: above every slot.
    """

    def __init__(self, slots_K: torch.Tensor, num_hot: int) -> None:
        sorted_K, self._order_K = sort_keys(slots_K, num_hot)
        self.slots_U, counts_U = torch.unique_consecutive(sorted_K, return_counts=True)
        self._offsets_U = counts_U.cumsum(0) - counts_U

    def __call__(self, grad_KD: torch.Tensor) -> torch.Tensor:
        if self.slots_U.numel() == 0:
            return grad_KD
        return embedding_bag(self._order_K, grad_KD, self._offsets_U, mode="sum")


class TouchedRows:
    """Every rank gathers the rows of all ranks."""

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        wire: Wire,
        slots: Sequence[torch.Tensor],
        num_touched_WG: Counts,
    ) -> None:
        self._wire, self._num_WG = wire, num_touched_WG
        self._dims = [dim for _, dim in shapes]
        sizes = [sum(nums) for nums in num_touched_WG]
        received = wire.all_gather_joined(_join(slots).int(), sizes).long()
        of_groups = _by_group(received, num_touched_WG, [1] * len(shapes))
        self._sums = [
            _Sum(slots_K1.view(-1), num_hot)
            for slots_K1, (num_hot, _) in zip(of_groups, shapes, strict=True)
        ]
        self.unions = [total.slots_U for total in self._sums]

    def reduce(self, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        wire = self._wire
        message = _join([grad_UD / wire.world_size for grad_UD in grads])
        sizes = [
            sum(num * dim for num, dim in zip(nums, self._dims, strict=True))
            for nums in self._num_WG
        ]
        received = wire.all_gather_joined(message, sizes)
        of_groups = _by_group(received, self._num_WG, self._dims)
        return [total(rows_KD) for total, rows_KD in zip(self._sums, of_groups, strict=True)]


class Owners:
    """Rows go to the owners of their slots, which add them up; every rank gathers the sums."""

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        wire: Wire,
        slots: Sequence[torch.Tensor],
    ) -> None:
        self._wire = wire
        self._dims = [dim for _, dim in shapes]
        world_size = wire.world_size
        # By owner; slots stay ascending within each.
        by_owner = [sort_keys(slots_U % world_size, world_size) for slots_U in slots]
        self._orders = [order_U for _, order_U in by_owner]
        owners_W = torch.arange(world_size, device=slots[0].device)
        ends_GW = torch.stack([torch.searchsorted(s, owners_W, right=True) for s, _ in by_owner])
        num_to_WG = ends_GW.diff(prepend=ends_GW.new_zeros(len(shapes), 1)).t().reshape(-1)
        sizes = [len(shapes)] * world_size
        received = wire.all_to_all(num_to_WG, sizes, sizes)
        nums = HostInts(torch.cat([num_to_WG, received])).wait()
        rows = [nums[at : at + len(shapes)] for at in range(0, len(nums), len(shapes))]
        self._num_to_WG: Counts = rows[:world_size]
        self._num_from_WG: Counts = rows[world_size:]
        for_owners = [
            slots_U.index_select(0, order_U)
            for slots_U, order_U in zip(slots, self._orders, strict=True)
        ]
        ones = [1] * len(shapes)
        arrived = self._send([slots_U.int() for slots_U in for_owners], ones)
        self._sums = [
            _Sum(slots_K1.long().view(-1), num_hot)
            for slots_K1, (num_hot, _) in zip(arrived, shapes, strict=True)
        ]
        mine = [total.slots_U for total in self._sums]
        num_mine = ints_on(mine[0].device, [union.numel() for union in mine])
        nums = HostInts(wire.all_gather_joined(num_mine, sizes)).wait()
        self._num_owned_WG: Counts = [
            nums[at : at + len(shapes)] for at in range(0, len(nums), len(shapes))
        ]
        unordered = self._gather([slots_U.int() for slots_U in mine], ones)
        ordered = [
            sort_keys(slots_K1.long().view(-1), num_hot)
            for slots_K1, (num_hot, _) in zip(unordered, shapes, strict=True)
        ]
        self.unions = [union for union, _ in ordered]
        self._union_orders = [order for _, order in ordered]

    def _send(self, parts_G: list[torch.Tensor], widths_G: list[int]) -> list[torch.Tensor]:
        """Send items, sorted by owner, to the owners; what arrived, by dimension."""
        sizes_to, sizes_from = (
            [sum(num * width for num, width in zip(nums, widths_G, strict=True)) for nums in num_WG]
            for num_WG in (self._num_to_WG, self._num_from_WG)
        )
        message = parts_G[0].reshape(-1)
        if len(parts_G) > 1:
            pieces = [
                part.split([nums[group] for nums in self._num_to_WG])
                for group, part in enumerate(parts_G)
            ]
            message = _join([piece for of_owner in zip(*pieces, strict=True) for piece in of_owner])
        received = self._wire.all_to_all(message, sizes_to, sizes_from)
        return _by_group(received, self._num_from_WG, widths_G)

    def _gather(self, parts_G: list[torch.Tensor], widths_G: list[int]) -> list[torch.Tensor]:
        """Items of all owners, by dimension."""
        sizes = [
            sum(num * width for num, width in zip(nums, widths_G, strict=True))
            for nums in self._num_owned_WG
        ]
        received = self._wire.all_gather_joined(_join(parts_G), sizes)
        return _by_group(received, self._num_owned_WG, widths_G)

    def reduce(self, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        for_owners = [
            grad_UD.index_select(0, order_U).div_(self._wire.world_size)
            for grad_UD, order_U in zip(grads, self._orders, strict=True)
        ]
        arrived = self._send(for_owners, self._dims)
        sums = [total(rows_KD) for total, rows_KD in zip(self._sums, arrived, strict=True)]
        gathered = self._gather(sums, self._dims)
        return [
            rows_KD.index_select(0, order_K)
            for rows_KD, order_K in zip(gathered, self._union_orders, strict=True)
        ]


class Dense:
    """An all-reduce of all hot rows, in a buffer that is kept from step to step.

    Args:
        kept: empty, or the buffer; all zeros, and left so.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        wire: Wire,
        slots: Sequence[torch.Tensor],
        kept: list[torch.Tensor],
    ) -> None:
        self._shapes, self._wire, self._slots, self._kept = shapes, wire, slots, kept
        # A byte counts to 255 ranks.
        dtype = torch.uint8 if wire.world_size < 256 else torch.int32
        flags = torch.zeros(sum(h for h, _ in shapes), dtype=dtype, device=slots[0].device)
        of_groups = flags.split([num_hot for num_hot, _ in shapes])
        for flags_H, slots_U in zip(of_groups, slots, strict=True):
            flags_H.index_fill_(0, slots_U, 1)
        wire.all_reduce(flags)
        self.unions = [flags_H.nonzero().view(-1) for flags_H in of_groups]

    def reduce(self, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        sizes = [num_hot * dim for num_hot, dim in self._shapes]
        if not self._kept:
            self._kept.append(torch.zeros(sum(sizes), device=grads[0].device))
        buffer = self._kept[0]
        of_groups = [
            flat.view(-1, dim)
            for flat, (_, dim) in zip(buffer.split(sizes), self._shapes, strict=True)
        ]
        for grad_HD, slots_U, grad_UD in zip(of_groups, self._slots, grads, strict=True):
            grad_HD.index_copy_(0, slots_U, grad_UD / self._wire.world_size)
        self._wire.all_reduce(buffer)
        found = []
        for grad_HD, union in zip(of_groups, self.unions, strict=True):
            found.append(grad_HD.index_select(0, union))
            grad_HD.index_fill_(0, union, 0.0)
        return found
