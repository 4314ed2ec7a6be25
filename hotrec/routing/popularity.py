"""Lookup counts of the rows of a group of tables, over all ranks.

A rank keeps the distinct rows of the batches that it routes. In a merge each row's lookups are sent
to one rank, its counter, and are added there to the decayed count of earlier ones. The memory
depends on the rows that were looked up, not on the tables.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from hotrec.routing.features import RoutedRows, hot_rows
from hotrec.routing.group import GroupRouter
from hotrec.routing.sorting import find_runs, sort_keys
from hotrec.runtime.ranks import rank, world_size
from hotrec.types import Partition, Rows

Counts = npt.NDArray[np.float64]

# Rows of batches that are stored before they are summed, to bound memory.
_MOST_PENDING = 1 << 22


@dataclass(frozen=True)
class CountedRows:
    """Rows (N,) of concatenated tables, ascending, and their decayed lookups (N,)."""

    keys: Rows
    counts: Counts

    @staticmethod
    def none() -> CountedRows:
        return CountedRows(np.empty(0, np.int64), np.empty(0))

    def sum(self, other: CountedRows) -> CountedRows:
        """The sum of both."""
        keys, run = np.unique(np.concatenate([self.keys, other.keys]), return_inverse=True)
        counts = np.bincount(run, np.concatenate([self.counts, other.counts]), keys.size)
        return CountedRows(keys, counts.astype(np.float64))

    def of(self, keys: Rows) -> Counts:
        """The counts of rows (M,); 0 for uncounted ones."""
        if self.keys.size == 0:
            return np.zeros(keys.size)
        at = np.minimum(np.searchsorted(self.keys, keys), self.keys.size - 1)
        return np.where(self.keys[at] == keys, self.counts[at], 0.0)

    def between(self, begin: int, end: int) -> CountedRows:
        """Those with keys from ``begin`` to below ``end``."""
        return self.select(np.arange(*np.searchsorted(self.keys, (begin, end))))

    def select(self, chosen: npt.NDArray[np.bool_] | Rows) -> CountedRows:
        return CountedRows(self.keys[chosen], self.counts[chosen])


class Popularity:
    """Counts the lookups of the rows of one embedding dimension.

    Args:
        router: Provides the tables, which are concatenated to number their rows.
        partition: Their hot rows.
        device: Where batches are routed.
    """

    def __init__(self, router: GroupRouter, partition: Partition, device: torch.device) -> None:
        self.tables = {table: partition.num_rows[table] for table in router.tables}
        ends = np.cumsum(list(self.tables.values())).tolist()
        self.begins = {t: end - n for (t, n), end in zip(self.tables.items(), ends, strict=True)}
        self._num_keys = ends[-1]
        self._hot_tables, self._cold_tables = router.hot_tables, router.cold_tables
        self._device = device
        self._pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._num_pending = 0
        self.counted = CountedRows.none()  # of the rows that this rank counts
        self.latest = CountedRows.none()  # the same, only since ``decay``
        self.follow(partition)

    def follow(self, partition: Partition) -> None:
        """Set another partition, after ``merge`` and before the next batch."""
        self.hot_keys = {t: hot_rows(partition, t) + self.begins[t] for t in self._hot_tables}
        self._key_of_slot = {t: keys.to(self._device) for t, keys in self.hot_keys.items()}

    @torch.no_grad()
    def add(self, routed: RoutedRows) -> None:
        """Count the lookups of a batch, without waiting for the device."""
        parts = routed.rows.values().split(routed.rows.length_per_key())
        num_hot = len(self._hot_tables)
        keys = [
            self._key_of_slot[table].index_select(0, slots)
            for table, slots in zip(self._hot_tables, parts[:num_hot], strict=True)
        ]
        keys += [
            rows + self.begins[table]
            for table, rows in zip(self._cold_tables, parts[num_hot:], strict=True)
        ]
        num_ids = routed.positions_K.new_full((1,), routed.positions_K.numel())
        lookups_U = torch.cat([routed.row_offsets_U, num_ids]).diff()
        self._pending.append((torch.cat(keys), lookups_U))
        self._num_pending += lookups_U.numel()
        if self._num_pending > _MOST_PENDING:
            self._pending = [self._sum_pending()]
            self._num_pending = self._pending[0][0].numel()

    def _sum_pending(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The distinct rows int64 (N,), ascending, and their lookups int64 (N,)."""
        if not self._pending:
            nothing = torch.empty(0, dtype=torch.int64, device=self._device)
            return nothing, nothing
        keys, lookups = (torch.cat(parts) for parts in zip(*self._pending, strict=True))
        sorted_keys, order = sort_keys(keys, self._num_keys)
        runs = find_runs(sorted_keys)
        num = int(runs.num)
        summed = lookups.new_zeros(num).index_add_(0, runs.run_K, lookups[order])
        return runs.keys[:num], summed

    def merge(self) -> None:
        """Add the lookups of the batches since the last time to their counters'; collective."""
        keys, lookups = self._sum_pending()
        self._pending, self._num_pending = [], 0
        num_ranks = world_size()
        if num_ranks > 1:
            keys, lookups = _exchange(keys, lookups, num_ranks)
        arrived = CountedRows(keys.cpu().numpy(), lookups.cpu().numpy().astype(np.float64))
        self.counted = self.counted.sum(arrived)
        self.latest = self.latest.sum(arrived)

    def decay(self, factor: float, most: int) -> None:
        """Decay all counts, and drop all but about ``most`` rows with the highest counts."""
        counted = CountedRows(self.counted.keys, self.counted.counts * factor)
        if counted.keys.size > most:
            least = np.partition(counted.counts, -most)[-most]
            counted = counted.select(counted.counts >= least)
            if counted.keys.size > 2 * most:  # nearly all are equally rare
                counted = counted.select(counted.counts > least)
        self.counted = counted
        self.latest = CountedRows.none()

    def restore(self, counted: CountedRows) -> None:
        """Restore counts from any ranks; each rank keeps the rows that it counts."""
        self._pending, self._num_pending = [], 0
        self.counted = counted.select(counted.keys % world_size() == rank())


def _exchange(
    keys: torch.Tensor, lookups: torch.Tensor, num_ranks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Send every row with its lookups to its counter, rank ``key % num_ranks``."""
    owner, order = sort_keys(keys % num_ranks, num_ranks)
    leaving = torch.stack([keys[order], lookups[order]], dim=1)
    num_to = torch.bincount(owner, minlength=num_ranks)
    num_from = torch.empty_like(num_to)
    dist.all_to_all_single(num_from, num_to)
    sizes_to, sizes_from = num_to.tolist(), num_from.tolist()
    arriving = leaving.new_empty(sum(sizes_from), 2)
    dist.all_to_all_single(arriving, leaving, sizes_from, sizes_to)
    return arriving[:, 0].contiguous(), arriving[:, 1].contiguous()
