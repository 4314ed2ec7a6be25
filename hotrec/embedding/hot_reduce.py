"""The mean over the ranks of the hot rows' gradients, without a dense gradient.

What travels is settled in two parts. ``plan`` needs the touched slots alone, which are known as
soon as the ids are: it exchanges slots and finds the union. ``reduce_planned`` then sends values
and nothing else, all dimensions in one message, and adds rows up in rank order, so that replicas
stay bitwise equal; ``reduce`` does both at once. Slots are integers in messages of their own: a
16-bit wire rounds values only.

What each way sends: ``hotrec.embedding.hot_choice``; the ways: ``hotrec.embedding.hot_ways``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hotrec.embedding.hot_choice import HotChooser, Seconds
from hotrec.embedding.hot_ways import Counts, Dense, Owners, TouchedRows, Way
from hotrec.runtime.host_ints import HostInts, ints_on
from hotrec.runtime.wire import Wire
from hotrec.types import HotExchange, WireType

Rows = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class HotPlan:
    """How the gradients of one step will travel; see ``HotReducer.plan``.

    Args:
        exchange: what was chosen; TOUCHED_ROWS for one rank, which sends nothing.
        unions: by dimension, the slots that some rank touched, int64, ascending (of one rank, as
            they were given).
        slots: this rank's.
        way: None for one rank.
    """

    exchange: HotExchange
    unions: list[torch.Tensor]
    slots: list[torch.Tensor]
    way: Way | None


class HotReducer:
    """Adds up gradients of hot rows over the ranks.

    Calls must come in the same order on every rank, all in one thread. Nothing of size H x D is
    made or read, except by DENSE.

    Args:
        shapes: (H, D) of each dimension.
        wire: to the other ranks.
        exchange: AUTO chooses in every step, see ``HotChooser``.
        seconds: of collectives by the bytes that the busiest rank sends, the same on every rank;
            None to choose by bytes.
        device: of slots and gradients.

    Raises:
        ValueError: if AUTO is to choose by seconds of which some collective's are missing.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        wire: Wire,
        exchange: HotExchange = HotExchange.auto,
        seconds: Seconds | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self._shapes = list(shapes)
        self._wire = wire
        self._device = device
        value_bytes = 4 if wire.wire_type is WireType.fp32 else 2
        self._chooser = HotChooser(self._shapes, exchange, value_bytes, seconds)
        self._dense: list[torch.Tensor] = []  # kept, all zeros between steps

    def exchange_counts(self, num_touched_G: Sequence[int]) -> Counts:
        """Tell all ranks how many rows this rank's batch touches, by dimension; U of each rank."""
        self._check_num(len(num_touched_G), "counts")
        num_groups = len(num_touched_G)
        sizes = [num_groups] * self._wire.world_size
        mine = ints_on(torch.device(self._device), num_touched_G)
        nums = HostInts(self._wire.all_gather_joined(mine, sizes)).wait()
        return [nums[at : at + num_groups] for at in range(0, len(nums), num_groups)]

    @torch.no_grad()
    def plan(self, slots: Sequence[torch.Tensor], counts: Counts | None = None) -> HotPlan:
        """Exchange what can be known before the gradients are there.

        Args:
            slots: by dimension, the slots that this rank's batch touches, int64 (U,), distinct.
            counts: U of each rank, by dimension, where that is known already.

        Raises:
            ValueError: if there are not as many tensors as dimensions, or the counts of this rank
                are others.
        """
        slots = list(slots)
        self._check_num(len(slots), "slots")
        if self._wire.world_size == 1:
            return HotPlan(HotExchange.touched_rows, slots, slots, None)
        mine = [slots_U.numel() for slots_U in slots]
        if counts is None:
            counts = self.exchange_counts(mine)
        if counts[self._wire.rank] != mine:
            raise ValueError(
                f"hot exchange counts of rank {self._wire.rank}: expected {mine}, the slots given, "
                f"got {counts[self._wire.rank]}. Count and plan the same batch."
            )
        exchange = self._chooser.choose(counts)
        way: Way
        match exchange:
            case HotExchange.touched_rows:
                way = TouchedRows(self._shapes, self._wire, slots, counts)
            case HotExchange.owners:
                way = Owners(self._shapes, self._wire, slots)
            case _:
                way = Dense(self._shapes, self._wire, slots, self._dense)
        self._chooser.note(counts, [union.numel() for union in way.unions])
        return HotPlan(exchange, way.unions, slots, way)

    @torch.no_grad()
    def reduce_planned(self, grads: Sequence[torch.Tensor], plan: HotPlan) -> list[Rows]:
        """The mean over the ranks, in which a rank that did not touch a row counts as zero.

        Args:
            grads: by dimension, this rank's gradients of the planned slots, float32 (U, D).
            plan: of this step; used once.

        Returns:
            By dimension, the slots that some rank touched, int64, ascending, and their gradients
            float32, the same bits on every rank. One rank gets back the very tensors that it gave.

        Raises:
            ValueError: if gradients are not of the plan's slots.
        """
        self._check_num(len(grads), "gradients")
        for (num_hot, dim), slots_U, grad_UD in zip(self._shapes, plan.slots, grads, strict=True):
            if grad_UD.shape != (slots_U.numel(), dim) or grad_UD.dtype != torch.float32:
                raise ValueError(
                    f"hot gradients ({num_hot} hot rows of dimension {dim}): expected float32 "
                    f"({slots_U.numel()}, {dim}) for the planned slots, got {grad_UD.dtype} "
                    f"{tuple(grad_UD.shape)}. Plan and reduce the same batch."
                )
        means = list(grads) if plan.way is None else plan.way.reduce(grads)
        return list(zip(plan.unions, means, strict=True))

    def reduce(self, touched: Sequence[Rows], counts: Counts | None = None) -> list[Rows]:
        """``plan`` and ``reduce_planned``.

        Args:
            touched: by dimension, slots int64 (U,), distinct, and gradients float32 (U, D).
            counts: as for ``plan``.
        """
        plan = self.plan([slots_U for slots_U, _ in touched], counts)
        return self.reduce_planned([grad_UD for _, grad_UD in touched], plan)

    def _check_num(self, num: int, what: str) -> None:
        if num != len(self._shapes):
            raise ValueError(
                f"hot exchange {what}: expected one for each of {len(self._shapes)} embedding "
                f"dimensions, got {num}. Pass empty tensors where a batch touches nothing."
            )
