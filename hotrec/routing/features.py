"""Routed features: the distinct rows that a batch reads, and their bags or sequences."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from hotrec.types import Partition


@dataclass(frozen=True)
class Column:
    """One output: a feature read from a table; a pooled one by mean or else by sum.

    ``name`` is the key in the output, as in TorchRec: the feature, or "feature@table" if several
    tables read it.
    """

    name: str
    feature: str
    table: str
    is_mean: bool


def hot_name(table: str) -> str:
    """The name of the table of hot replicas, and of its feature."""
    return f"{table}_hot"


def find_means(columns: Sequence[Column]) -> torch.Tensor | None:
    """The columns that are pooled by mean, bool (F,); None if there are none."""
    is_mean = [column.is_mean for column in columns]
    return torch.tensor(is_mean) if any(is_mean) else None


T = TypeVar("T")


def copy_to(router: T, device: torch.device) -> T:
    """A shallow copy with its tensors on a device."""
    moved = copy.copy(router)
    for name, value in vars(router).items():
        if isinstance(value, torch.Tensor):
            setattr(moved, name, value.to(device))
    return moved


def hot_rows(partition: Partition, table: str) -> torch.Tensor:
    """Copy the hot rows of a table in slot order, int64 (H,)."""
    return torch.from_numpy(np.array(partition.hot(table), order="C"))


@dataclass
class RoutedRows(Pipelineable):
    """The distinct rows of all columns of one embedding dimension; indices are int64.

    ``rows`` are the distinct rows (U,) of each table with stride 1: hot slots by hot table, then
    rows by cold table.
    """

    rows: KeyedJaggedTensor  # with length_per_key also on the host
    positions_K: torch.Tensor  # of each id among the U rows, in the order of the output
    row_offsets_U: torch.Tensor  # the start of each row among the ids sorted by row
    num_hot_lookups: torch.Tensor  # hot ids, ()
    longest_row: int  # an upper bound of the ids that read the same row

    def _map(self, method: str, *args: object, **kwargs: object) -> Self:
        moved = {name: getattr(value, method)(*args, **kwargs) for name, value in self._on_device()}
        return replace(self, **moved)

    def _on_device(self) -> Iterator[tuple[str, Any]]:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, torch.Tensor | KeyedJaggedTensor):
                yield item.name, value

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        return self._map("to", device, non_blocking=non_blocking)

    def pin_memory(self) -> Self:
        return self._map("pin_memory")

    def record_stream(self, stream: torch.Stream) -> None:
        for _, value in self._on_device():
            value.record_stream(stream)


@dataclass
class RoutedGroup(RoutedRows):
    """Rows that are pooled: ids in the order of the bags, ``b * F + f`` for sample b of column f.

    A factor is the per-sample weight, and 1 / length of the bag for mean pooling.
    """

    bag_offsets: torch.Tensor  # the start of each bag in positions_K, (B * F,)
    bags_K: torch.Tensor  # the bag of each id, sorted by row
    scales_K: torch.Tensor | None  # factors in the order of the bags, float32; None if all are 1
    row_scales_K: torch.Tensor | None  # in the order of bags_K
    longest_bag: int  # an upper bound of the ids in a bag


@dataclass
class RoutedSequences(RoutedRows):
    """Rows that are not pooled: ids in the order of the features (feature-major)."""

    by_row_K: torch.Tensor  # the ids sorted by row, as places in positions_K
    lengths_FB: torch.Tensor  # in the features' type
    ids_K: torch.Tensor | None  # as in the features; None unless the output contains them
    num_ids_F: list[int]  # of each column
    is_part: bool = False  # of a batch: rows that it does not read may not have arrived


@dataclass
class RoutedFeatures(Pipelineable):
    """The routed form of a ``KeyedJaggedTensor``."""

    groups: list[RoutedRows]  # by embedding dimension
    batch_size: int
    fingerprint: int  # the router's, so that a collection can reject another router's
    pooled: KeyedJaggedTensor | None = None  # of the columns pooled on their tables' owners

    def stride(self) -> int:
        """The number of samples in the batch, as in ``KeyedJaggedTensor``."""
        return self.batch_size

    @property
    def num_lookups(self) -> int:
        """The number of ids in the batch, in all columns."""
        num_pooled = 0 if self.pooled is None else self.pooled.values().numel()
        return num_pooled + sum(group.positions_K.numel() for group in self.groups)

    def num_hot_lookups(self) -> int:
        """The number of hot ids in the batch (waits for the device)."""
        return sum(int(group.num_hot_lookups) for group in self.groups)

    def _map(self, method: str, *args: object, **kwargs: object) -> RoutedFeatures:
        def moved(part: Any) -> Any:
            return getattr(part, method)(*args, **kwargs)

        pooled = None if self.pooled is None else moved(self.pooled)
        return replace(self, groups=[moved(group) for group in self.groups], pooled=pooled)

    def to(self, device: torch.device, non_blocking: bool = False) -> RoutedFeatures:
        return self._map("to", device, non_blocking=non_blocking)

    def pin_memory(self) -> RoutedFeatures:
        return self._map("pin_memory")

    def record_stream(self, stream: torch.Stream) -> None:
        for part in (*self.groups, self.pooled):
            if part is not None:
                part.record_stream(stream)
