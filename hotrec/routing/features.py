"""Routed features: the distinct rows that a batch reads, and their bags."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from hotrec.types import Partition


@dataclass(frozen=True)
class Column:
    """One pooled output: a feature read from a table.

    Args:
        name: The key in the output ``KeyedTensor``, named as in TorchRec: the feature, or
            "feature@table" if several tables read it.
        feature: The key in the input ``KeyedJaggedTensor``.
        table: The table to read.
        is_mean: Whether pooling is by mean, else by sum.
    """

    name: str
    feature: str
    table: str
    is_mean: bool


def hot_name(table: str) -> str:
    """The name of the table of hot replicas, and of its feature."""
    return f"{table}_hot"


def hot_rows(partition: Partition, table: str) -> torch.Tensor:
    """Copy the hot rows of a table in slot order, int64 (H,)."""
    return torch.from_numpy(np.array(partition.hot(table), order="C"))


@dataclass
class RoutedGroup(Pipelineable):
    """The routed ids of all columns of one embedding dimension.

    Args:
        rows: The distinct rows of each table, int64 (U,) with stride 1: hot slots by hot table,
            then rows by cold table, with ``length_per_key`` on the host too.
        positions_K: The index of each id among the U rows, int64, in the order of the bags; bag
            ``b * F + f`` is sample b of column f.
        bag_offsets: The start of each bag in ``positions_K``, int64 (B * F,).
        bags_K: The bag of each id, int64, sorted by row.
        row_offsets_U: The start of each row in ``bags_K``, int64.
        scales_K: The factor of each id in the order of the bags, float32 (per-sample weight, and
            1 / length of the bag for mean pooling); None if all are 1.
        row_scales_K: The same factors in the order of ``bags_K``.
        num_hot_lookups: The number of hot ids, int64 ().
        longest_bag: An upper bound of the number of ids in a bag, on the host.
        longest_row: An upper bound of the number of ids that read the same row, on the host.
    """

    rows: KeyedJaggedTensor
    positions_K: torch.Tensor
    bag_offsets: torch.Tensor
    bags_K: torch.Tensor
    row_offsets_U: torch.Tensor
    scales_K: torch.Tensor | None
    row_scales_K: torch.Tensor | None
    num_hot_lookups: torch.Tensor
    longest_bag: int
    longest_row: int

    def _map(self, method: str, *args: object, **kwargs: object) -> RoutedGroup:
        moved = {name: getattr(value, method)(*args, **kwargs) for name, value in self._on_device()}
        return replace(self, **moved)

    def _on_device(self) -> Iterator[tuple[str, Any]]:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, torch.Tensor | KeyedJaggedTensor):
                yield item.name, value

    def to(self, device: torch.device, non_blocking: bool = False) -> RoutedGroup:
        return self._map("to", device, non_blocking=non_blocking)

    def pin_memory(self) -> RoutedGroup:
        return self._map("pin_memory")

    def record_stream(self, stream: torch.Stream) -> None:
        for _, value in self._on_device():
            value.record_stream(stream)


@dataclass
class RoutedFeatures(Pipelineable):
    """The routed form of a ``KeyedJaggedTensor``: one group per embedding dimension.

    Args:
        groups: The groups in the order of the collection's dimensions.
        batch_size: The batch size B.
        fingerprint: The router's fingerprint, so that a collection can reject another router's.
        pooled: The ids of the columns that are pooled on their tables' owners, jagged (F, B), with
            the columns' names as keys; None if there are none.
    """

    groups: list[RoutedGroup]
    batch_size: int
    fingerprint: int
    pooled: KeyedJaggedTensor | None = None

    def stride(self) -> int:
        """The number of samples in the batch, as in ``KeyedJaggedTensor``."""
        return self.batch_size

    @property
    def num_distinct(self) -> list[int]:
        """U of each group; ``Router.count_distinct`` adds the rows pooled on their owners."""
        return [group.rows.values().numel() for group in self.groups]

    @property
    def num_lookups(self) -> int:
        """The number of ids in the batch, in all columns."""
        num_pooled = 0 if self.pooled is None else self.pooled.values().numel()
        return num_pooled + sum(group.positions_K.numel() for group in self.groups)

    def num_hot_lookups(self) -> int:
        """The number of hot ids in the batch (waits for the device)."""
        return sum(int(group.num_hot_lookups) for group in self.groups)

    def to(self, device: torch.device, non_blocking: bool = False) -> RoutedFeatures:
        pooled = self.pooled
        return replace(
            self,
            groups=[group.to(device, non_blocking=non_blocking) for group in self.groups],
            pooled=None if pooled is None else pooled.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> RoutedFeatures:
        return replace(
            self,
            groups=[group.pin_memory() for group in self.groups],
            pooled=None if self.pooled is None else self.pooled.pin_memory(),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        for group in self.groups:
            group.record_stream(stream)
        if self.pooled is not None:
            self.pooled.record_stream(stream)
