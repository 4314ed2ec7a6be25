"""Prefetched batches, their row requests, and rows sorted into classes that are sent together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hotrec.embedding.hot_reduce import HotPlan
from hotrec.embedding.messages import RowCounts
from hotrec.embedding.prefetch.owned_rows import RequestedRows
from hotrec.routing.features import RoutedFeatures, RoutedGroup
from hotrec.routing.sorting import sort_keys
from hotrec.runtime.comm_thread import CommunicationFuture
from hotrec.runtime.host_ints import HostInts, ints_on


@dataclass
class Selection:
    """Some of the rows of each group."""

    indices: list[torch.Tensor | None]  # int64, in rank order; None for all rows in order
    counts: RowCounts

    def of(self, group: int, values: torch.Tensor) -> torch.Tensor:
        """Select from a group's (rows, ...) values."""
        index = self.indices[group]
        return values if index is None else values.index_select(0, index)


class RowsByClass:
    """The rows of each group, sorted by rank and, within a rank, by class.

    Both sides of an exchange sort the same rows by the same classes, so a range of classes has the
    same rows in the same order on both. Selecting one does not wait for the device, since
    ``read_class_ends`` copies the ends of classes to the host.

    Args:
        classes: The class of each row, in 0..num_classes - 1, for each group in rank order.
        num_classes: The number of classes.
        counts: The number of rows of each rank and group.
    """

    def __init__(
        self, classes: Sequence[torch.Tensor], num_classes: int, counts: RowCounts
    ) -> None:
        num_ranks, device = len(counts), classes[0].device
        self._num_classes = num_classes
        self._num_ranks = num_ranks
        self.orders: list[torch.Tensor] = []
        ends = []
        lengths = ints_on(device, [n for row in counts for n in row]).view(num_ranks, -1)
        first_key_W = torch.arange(0, num_ranks * num_classes, num_classes, device=device)
        bounds = torch.arange(1, num_ranks * num_classes + 1, device=device)
        for group, class_K in enumerate(classes):
            key_K = class_K + torch.repeat_interleave(
                first_key_W, lengths[:, group], output_size=class_K.numel()
            )
            sorted_K, order_K = sort_keys(key_K, num_ranks * num_classes)
            self.orders.append(order_K)
            ends.append(torch.searchsorted(sorted_K, bounds))
        self.ends = torch.cat(ends)
        self.ends_here: list[int] = []

    def select(self, first: int, end: int) -> Selection:
        """The rows of the classes first..end - 1."""
        size = self._num_ranks * self._num_classes
        indices: list[torch.Tensor | None] = []
        counts: RowCounts = [[] for _ in range(self._num_ranks)]
        for group, order_K in enumerate(self.orders):
            ends = [0, *self.ends_here[group * size : (group + 1) * size]]
            pieces = []
            for rank, row in enumerate(counts):
                begin = ends[rank * self._num_classes + first]
                until = ends[rank * self._num_classes + end]
                pieces.append(order_K[begin:until])
                row.append(until - begin)
            indices.append(pieces[0] if len(pieces) == 1 else torch.cat(pieces))
        return Selection(indices, counts)


def read_class_ends(parts: Sequence[RowsByClass]) -> None:
    """Read the ends of the classes of all parts from the device, in one copy."""
    ends = HostInts(torch.cat([part.ends for part in parts])).wait()
    for part in parts:
        part.ends_here, ends = ends[: part.ends.numel()], ends[part.ends.numel() :]


Sides = tuple[RowsByClass, RowsByClass]  # the requested rows, and those requested from this rank


@dataclass
class RowRequest:
    """The cold rows of a batch on both sides of the exchange, by group."""

    requested: list[RequestedRows]
    num_requested: RowCounts  # from each rank
    num_served: RowCounts  # that each rank requests from this one
    positions: list[torch.Tensor]  # of the rows requested from this rank, int64 (R,), in rank order
    # Class 0 is a lag of 1, the last class depth + 1 or more.
    by_lag: Sides | None = None
    # Class 0 are the urgent rows, which some rank reads in the next batch too, class 1 the others;
    # None until there is a next batch.
    by_need: Sides | None = None

    def select(self, sides: Sides | None, first: int, end: int) -> tuple[Selection, Selection]:
        """The requested and the served rows of some classes, or all where there are no classes."""
        if sides is not None:
            return sides[0].select(first, end), sides[1].select(first, end)
        indices: list[torch.Tensor | None] = [None] * len(self.requested)
        return Selection(indices, self.num_requested), Selection(indices, self.num_served)


@dataclass
class PrefetchedBatch:
    """One batch of this rank; groups are the embedding dimensions of all collections."""

    number: int  # the same on all ranks
    features: Any  # that the model is called with
    routed: list[RoutedFeatures]  # by collection
    groups: list[RoutedGroup]
    will_update: bool
    is_all_hot: bool  # whether no rank's batch reads a cold row
    num_hot: list[int]  # distinct hot rows of each group
    rows: list[torch.Tensor]  # float (U, D), hot rows first; filled while the batch waits
    request: RowRequest | None = None  # None if no cold rows are exchanged
    hot_counts: RowCounts = field(default_factory=list)  # [rank][group with hot rows]
    hot_plan: HotPlan | None = None  # None without hot rows, and in evaluation
    first_rows: CommunicationFuture[None] | None = None  # all rows but those with a lag of 1
    all_rows: CommunicationFuture[None] | None = None


@dataclass(frozen=True)
class Gradients:
    """The gradients of a step's rows, by group."""

    rows: Sequence[torch.Tensor]  # float (U, D), of this rank's share of the loss
    learning_rates: Sequence[float]  # of the owned rows in this step
    num_updates: int  # before this step
