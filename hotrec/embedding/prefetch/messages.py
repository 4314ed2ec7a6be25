"""Prefetched batches, their row requests, and rows sorted into classes that are sent together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.embedding.hot_reduce import HotPlan
from hotrec.embedding.messages import RowCounts
from hotrec.embedding.prefetch.owned_rows import RequestedRows
from hotrec.routing.features import RoutedFeatures, RoutedGroup
from hotrec.routing.sorting import sort_keys
from hotrec.runtime.comm_thread import CommunicationFuture, HostInts, ints_on

# The lag of a row that no recent batch has read.
LONG_AGO = 255


@dataclass
class RowRequest:
    """The cold rows of a batch on both sides of the exchange, by group.

    Args:
        requested: The rows that this rank requests from the owners.
        num_requested: The number of rows requested from each rank.
        num_served: The number of rows that each rank requests from this one.
        positions: The rows requested from this rank, int64 (R,), in rank order.
        requested_by_lag: The requested rows, in the order of their owners, by lag: class 0 is a lag
            of 1, the last class ``depth`` + 1 or more.
        served_by_lag: The same for the rows requested from this rank.
        requested_by_need: The requested rows: class 0 are the urgent ones, which some rank reads in
            the next batch too, class 1 the others; None until there is a next batch.
        served_by_need: The same for the rows requested from this rank.
    """

    requested: list[RequestedRows]
    num_requested: RowCounts
    num_served: RowCounts
    positions: list[torch.Tensor]
    requested_by_lag: RowsByClass | None = None
    served_by_lag: RowsByClass | None = None
    requested_by_need: RowsByClass | None = None
    served_by_need: RowsByClass | None = None


@dataclass
class PrefetchedBatch:
    """One batch of this rank.

    Args:
        number: The batch's number, the same on all ranks.
        features: The features that the model is called with.
        routed: The routed features of each collection.
        groups: The routed ids of each embedding dimension of each collection.
        will_update: Whether the model is in training mode.
        is_all_hot: Whether no rank's batch reads a cold row.
        rows: The rows of each group, float (U, D), hot rows first; filled while the batch waits.
        request: The request of cold rows; None if none are exchanged.
        hot_counts: The number of touched hot rows, [rank][group with hot rows].
        hot_plan: How their gradients are reduced; None without any, and in evaluation.
        first_rows: Done when all rows but those with a lag of 1 have arrived.
        all_rows: Done when all rows have arrived.
    """

    number: int
    features: Any
    routed: list[RoutedFeatures]
    groups: list[RoutedGroup]
    will_update: bool
    is_all_hot: bool
    rows: list[torch.Tensor]
    request: RowRequest | None = None
    hot_counts: RowCounts = field(default_factory=list)
    hot_plan: HotPlan | None = None
    first_rows: CommunicationFuture[None] | None = None
    all_rows: CommunicationFuture[None] | None = None


def num_hot_rows(rows: KeyedJaggedTensor, num_hot_keys: int) -> int:
    """The number of distinct hot rows of a routed group."""
    return sum(rows.length_per_key()[:num_hot_keys])


@dataclass(frozen=True)
class Gradients:
    """The gradients of a step's rows.

    Args:
        rows: The gradients of each group, float (U, D), of this rank's share of the loss.
        learning_rates: The learning rate of each group's owned rows in this step.
        num_updates: The number of previous steps.
    """

    rows: Sequence[torch.Tensor]
    learning_rates: Sequence[float]
    num_updates: int


@dataclass
class Selection:
    """Some of the rows of each group.

    Args:
        indices: Indices int64 of each group, in rank order; None for all rows in order.
        counts: The number of rows of each rank and group.
    """

    indices: list[torch.Tensor | None]
    counts: RowCounts

    def of(self, group: int, values: torch.Tensor) -> torch.Tensor:
        """Select from a group's (rows, ...) values."""
        index = self.indices[group]
        return values if index is None else values.index_select(0, index)


def select_all(counts: RowCounts) -> Selection:
    """Select all rows, ``counts`` by rank and group."""
    return Selection([None] * len(counts[0]), counts)


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
        num_ranks, num_groups = len(counts), len(classes)
        self._num_classes = num_classes
        self.orders: list[torch.Tensor] = []
        ends = []
        device = classes[0].device
        lengths = ints_on(device, [n for row in counts for n in row]).view(num_ranks, num_groups)
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
        self._ends_here: list[list[int]] = []

    def set_ends(self, ends: Sequence[int]) -> None:
        """Set the ends of the classes, read by the host."""
        size = len(ends) // len(self.orders)
        self._ends_here = [[0, *ends[begin : begin + size]] for begin in range(0, len(ends), size)]

    def select(self, first: int, end: int) -> Selection:
        """The rows of the classes first..end - 1."""
        num_classes, size = self._num_classes, len(self._ends_here[0]) - 1
        indices: list[torch.Tensor | None] = []
        counts: RowCounts = [[] for _ in range(size // num_classes)]
        for ends, order_K in zip(self._ends_here, self.orders, strict=True):
            pieces = []
            for rank, row in enumerate(counts):
                begin = ends[rank * num_classes + first]
                until = ends[rank * num_classes + end]
                pieces.append(order_K[begin:until])
                row.append(until - begin)
            indices.append(pieces[0] if len(pieces) == 1 else torch.cat(pieces))
        return Selection(indices, counts)


def read_class_ends(parts: Sequence[RowsByClass]) -> None:
    """Read the ends of the classes of all parts from the device, in one copy."""
    ends = HostInts(torch.cat([part.ends for part in parts])).wait()
    for part in parts:
        part.set_ends(ends[: part.ends.numel()])
        ends = ends[part.ends.numel() :]
