"""What routing makes: the rows a batch reads, where each goes, ids that travel as they are."""

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
        name: key in the output ``KeyedTensor`` (the feature, or "feature@table" if several tables
            read it), as TorchRec names it.
        feature: key in the input ``KeyedJaggedTensor``.
        table: table that is read.
        is_mean: mean pooling, else sum.
    """

    name: str
    feature: str
    table: str
    is_mean: bool


def hot_name(table: str) -> str:
    """The name of the table of hot replicas, and of its feature."""
    return f"{table}_hot"


def hot_rows(partition: Partition, table: str) -> torch.Tensor:
    """The hot rows of a table in slot order, int64 (H,): a copy, whatever memory they come from."""
    return torch.from_numpy(np.array(partition.hot(table), order="C"))


@dataclass
class RoutedGroup(Pipelineable):
    """The routed ids of all columns of one embedding dimension.

    Args:
        rows: stride 1; keys are the hot tables, then the cold tables; values int64 (U,), distinct
            within a table: hot slots, then rows. It knows its lengths on the host too
            (``length_per_key``), so that nobody has to ask the device for them.
        positions_K: int64, index into the U looked-up rows (hot ones first), in the order of the
            bags; bag ``b * F + f`` is sample b of column f.
        bag_offsets: int64 (B * F,), where each bag starts in ``positions_K``.
        bags_K: int64, the same ids sorted by row: the bag of each.
        row_offsets_U: int64, where each row starts in ``bags_K``.
        scales_K: float32 in the order of the bags, factor of each id (per-sample weight, 1 / length
            of the bag for mean pooling), or None if all are 1.
        row_scales_K: the same factors in the order of ``bags_K``.
        num_hot_lookups: int64 (), how many of the K ids are hot.
        longest_bag: at least the ids of the longest bag, on the host.
        longest_row: at least the ids that read the row which most of them read.
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
    """What the router makes of a ``KeyedJaggedTensor``: one group per embedding dimension.

    Args:
        groups: in the order of the collection's dimensions.
        batch_size: B.
        fingerprint: of the router, so that a collection can refuse what another one's made.
        pooled: the ids of the columns that are pooled where their tables live, jagged (F, B), keys
            are the columns' names; None if there are none.
    """

    groups: list[RoutedGroup]
    batch_size: int
    fingerprint: int
    pooled: KeyedJaggedTensor | None = None

    def stride(self) -> int:
        """Samples in the batch, as ``KeyedJaggedTensor.stride`` says it."""
        return self.batch_size

    @property
    def num_distinct(self) -> list[int]:
        """U of each group: the distinct rows of this rank's batch that are exchanged as rows.

        ``Router.count_distinct`` adds the rows that are pooled where they live.
        """
        return [group.rows.values().numel() for group in self.groups]

    @property
    def num_lookups(self) -> int:
        """K: ids of the batch, in all columns."""
        num_pooled = 0 if self.pooled is None else self.pooled.values().numel()
        return num_pooled + sum(group.positions_K.numel() for group in self.groups)

    def num_hot_lookups(self) -> int:
        """Ids of the batch that are hot (waits for the device)."""
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
