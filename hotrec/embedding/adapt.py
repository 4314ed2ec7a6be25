"""A hot set that follows the data: rows move between replica and shard during training.

At a fixed interval of steps all ranks choose the same swaps of rows from decayed counts of lookups,
and move weights and optimizer state unchanged: nothing is reset or reallocated, and values change
only where cold rows are kept in half precision. A table keeps its number of hot rows. The owner of
a row that becomes cold copies its own replica into its shard without traffic; a row that becomes
hot is broadcast by its owner.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchrec.optim.keyed import KeyedOptimizer

from hotrec.embedding.canonical import TensorPart, canonical_parts, plain_name
from hotrec.embedding.tables import sharded_collections
from hotrec.routing.popularity import CountedRows, Counts, Popularity
from hotrec.runtime.ranks import all_gather_object, rank, world_size
from hotrec.types import Rows, RowShares

# A swap must gain more lookups than this many standard deviations of the difference of two counts,
# which are Poisson distributed: otherwise rows would move back and forth by chance.
_DEVIATIONS = 1.0
# Counted rows that are kept at a decision, times the number of hot rows.
_KEPT = 4
_MIN_KEPT = 1 << 16


@dataclass(frozen=True)
class Swaps:
    """Rows int64 (M,) of a table that become hot, in the slots (M,) of rows that become cold."""

    rows: Rows
    slots: Rows
    old_rows: Rows


@dataclass(frozen=True)
class HotSetDecision:
    """A decision of all ranks and its effect.

    Args:
        num_moved: Rows that became hot; the same number became cold.
        moved_bytes: Weights and state that their owners broadcast.
        hot_share: Share of the lookups since the last decision that read hot rows.
        best_share: The same share for the best hot rows in hindsight, with as many per table: an
            upper bound.
        pause_s: Time for which training was paused on this rank.
    """

    num_moved: int
    moved_bytes: int
    hot_share: float
    best_share: float
    pause_s: float


@dataclass(frozen=True)
class _Found:
    """A rank's counts of a table's rows; each row is counted by one rank.

    Args:
        hot: Decayed lookups (H,) of the hot rows by slot.
        cold: Cold rows and their decayed lookups.
        num_hot: Lookups of hot rows since the last decision.
        histogram: Numbers of lookups since the last decision, and the number of rows with each.
    """

    hot: Counts
    cold: CountedRows
    num_hot: float
    histogram: tuple[Counts, Rows]


@dataclass(frozen=True)
class _AdaptedTable:
    """A table with hot and cold rows.

    Args:
        path: The prefix of its collection's names.
        name: Its own name.
        key: The canonical name of its weights.
        counter: Counts its rows.
        row_floats: Floats of a row with its optimizer state, divided by those of the row.
    """

    path: str
    name: str
    key: str
    counter: Popularity
    row_floats: float

    def hot_keys(self) -> Rows:
        keys: Rows = self.counter.hot_keys[self.name].numpy()
        return keys

    def part_of(self, counted: CountedRows) -> CountedRows:
        """The counted rows that belong to this table."""
        begin = self.counter.begins[self.name]
        return counted.between(begin, begin + self.counter.tables[self.name])

    def found(self, most: int) -> _Found:
        """This rank's counts; of the cold rows, only the ``most`` with the most lookups."""
        counted, latest = self.part_of(self.counter.counted), self.part_of(self.counter.latest)
        hot_keys = self.hot_keys()
        cold = counted.select(~np.isin(counted.keys, hot_keys, assume_unique=True))
        most = min(most, hot_keys.size)
        if cold.keys.size > most:
            cold = cold.select(np.sort(np.argpartition(cold.counts, -most)[-most:]))
        return _Found(
            counted.of(hot_keys),
            cold,
            float(latest.of(hot_keys).sum()),
            np.unique(latest.counts, return_counts=True),
        )

    def owner_of(self, rows: Rows) -> Rows:
        """The rank that owns each row, int64 (M,)."""
        return RowShares(self.name, world_size()).owners(rows)


class AdaptiveHotSet:
    """Adapts the hot rows of a sharded model to its training batches.

    Ids must be routed by the ranks, not by loader workers. Call ``adapt`` between steps, with the
    pipeline drained. ``state_dict`` and ``load_state_dict`` save and restore hot rows and counts;
    the number of ranks may differ.

    Args:
        model: The sharded model.
        optimizer: Its optimizer.
        decay: Factor applied to the counts at each decision, in [0, 1).
        max_rows: Maximum number of rows that become hot in one decision.

    Raises:
        ValueError: If no table has hot and cold rows.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: KeyedOptimizer,
        *,
        decay: float = 0.5,
        max_rows: int = 65_536,
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._decay, self._max_rows = decay, max_rows
        self._collections = dict(sharded_collections(model))
        self._counters = {
            path: collection.count_lookups() for path, collection in self._collections.items()
        }
        self._tables = self._find_tables()
        if not self._tables:
            raise ValueError(
                "placement.adapt_every_steps: expected a table with hot and cold rows, got none. "
                "Set it to 0, or choose a placement with such tables (placement=coverage)."
            )

    def _find_tables(self) -> list[_AdaptedTable]:
        """The tables whose rows can move."""
        parts = canonical_parts(self._model, self._optimizer).parts
        widths: dict[str, list[int]] = {}
        for part in parts:
            if part.rows is not None:
                of_table = widths.setdefault(part.name.partition("/")[0], [])
                of_table.append(math.prod(part.shape[1:]))
        tables = []
        for path, counters in self._counters.items():
            for counter in counters:
                for name, keys in counter.hot_keys.items():
                    key = plain_name(path, self._collections[path].prefix, name)
                    if keys.numel() < counter.tables[name]:
                        floats = sum(widths[key]) / self._dim(path, name)
                        tables.append(_AdaptedTable(path, name, key, counter, floats))
        return tables

    def _dim(self, path: str, table: str) -> int:
        configs = self._collections[path].tables
        return next(int(c.embedding_dim) for c in configs if c.name == table)

    def _all_counters(self) -> list[Popularity]:
        return [counter for counters in self._counters.values() for counter in counters]

    def adapt(self) -> HotSetDecision:
        """Choose the new hot rows and move them; collective."""
        start = time.perf_counter()
        for counter in self._all_counters():
            counter.merge()
        swaps, hot_share, best_share = self._decide()
        num_bytes = self._move(swaps) if swaps else 0
        for counter in self._all_counters():
            num_hot = sum(keys.numel() for keys in counter.hot_keys.values())
            counter.decay(self._decay, max(_KEPT * num_hot // world_size(), _MIN_KEPT))
        num_moved = sum(swap.rows.size for swap in swaps.values())
        pause_s = time.perf_counter() - start
        return HotSetDecision(num_moved, num_bytes, hot_share, best_share, pause_s)

    def _decide(self) -> tuple[dict[str, Swaps], float, float]:
        """The swaps by table, the share of hot lookups, and the best share; equal on all ranks."""
        own = [table.found(self._max_rows) for table in self._tables]
        of_ranks = all_gather_object((own, self._all_and_hot_lookups()))
        num_lookups, num_hot = np.sum([totals for _, totals in of_ranks], axis=0)
        num_best = num_hot
        found = {}
        for at, table in enumerate(self._tables):
            counts = [of_rank[at] for of_rank, _ in of_ranks]
            hot_counts = np.sum([of_rank.hot for of_rank in counts], axis=0)
            cold = CountedRows(
                np.concatenate([of_rank.cold.keys for of_rank in counts]),
                np.concatenate([of_rank.cold.counts for of_rank in counts]),
            )
            # A lookup of a cold row by a rank other than its owner moves the row and its gradient,
            # so a swap saves 2 (1 - 1 / W) rows per lookup gained, within the period that the
            # counts cover. The move sends the row with its state to W - 1 ranks.
            min_gain = world_size() / 2 * table.row_floats
            found[table.key] = choose_swaps(hot_counts, cold, min_gain)
            num_best += _best_sum([of_rank.histogram for of_rank in counts], hot_counts.size)
            num_best -= sum(of_rank.num_hot for of_rank in counts)
        num_lookups = max(num_lookups, 1.0)
        return self._limit(found), num_hot / num_lookups, num_best / num_lookups

    def _all_and_hot_lookups(self) -> tuple[float, float]:
        """The lookups since the last decision that this rank counts, and those of hot rows."""
        counters = self._all_counters()
        num_hot = sum(
            float(counter.latest.of(keys.numpy()).sum())
            for counter in counters
            for keys in counter.hot_keys.values()
        )
        return sum(float(counter.latest.counts.sum()) for counter in counters), num_hot

    def _limit(self, found: Mapping[str, tuple[Rows, Rows, Counts]]) -> dict[str, Swaps]:
        """The swaps with the largest gains over all tables."""
        gains = np.concatenate([gain for _, _, gain in found.values()])
        least = 0.0
        if gains.size > self._max_rows:
            least = float(np.partition(gains, -self._max_rows)[-self._max_rows])
        swaps, left = {}, self._max_rows
        for table in self._tables:
            slots, keys, gain = found[table.key]
            num = min(int(np.count_nonzero(gain >= least)), left)  # gains fall
            if num:
                begin, hot_keys = table.counter.begins[table.name], table.hot_keys()
                chosen = slots[:num]
                swaps[table.key] = Swaps(keys[:num] - begin, chosen, hot_keys[chosen] - begin)
                left -= num
        return swaps

    @torch.no_grad()
    def _move(self, swaps: Mapping[str, Swaps]) -> int:
        """Move rows with state and route by the new partition; returns the bytes broadcast."""
        parts = canonical_parts(self._model, self._optimizer).parts
        hot = [part for part in parts if part.rows is not None]
        shards = {part.name: part for part in parts if part.is_shard}
        for part in hot:
            swap = swaps.get(part.name.partition("/")[0])
            if swap is not None and part.name in shards:
                _demote(swap, part, shards[part.name])
        num_bytes = self._promote(swaps, hot, shards)
        for path, collection in self._collections.items():
            of_path = [table for table in self._tables if table.path == path]
            rows = dict(collection.partition.hot_rows)
            moved: dict[str, Rows] = {}
            for table in of_path:
                if table.key in swaps:
                    swap = swaps[table.key]
                    rows[table.name] = rows[table.name].copy()
                    rows[table.name][swap.slots] = swap.rows
                    moved[table.name] = np.concatenate([swap.rows, swap.old_rows])
            self._set_hot_rows(path, rows)
            collection.refresh_cached_rows(moved)
        return num_bytes

    def _promote(
        self,
        swaps: Mapping[str, Swaps],
        hot: Sequence[TensorPart],
        shards: Mapping[str, TensorPart],
    ) -> int:
        """Broadcast the rows that become hot from their owners into the replicas' slots."""
        owners = {t.key: t.owner_of(swaps[t.key].rows) for t in self._tables if t.key in swaps}
        num_bytes = 0
        for source in range(world_size()):
            arriving: list[tuple[torch.Tensor, torch.Tensor]] = []
            leaving: list[torch.Tensor] = []
            size = 0
            for part in hot:
                key = part.name.partition("/")[0]
                if key not in swaps or not (owners[key] == source).any():
                    continue
                chosen = np.flatnonzero(owners[key] == source)
                slots = torch.from_numpy(swaps[key].slots[chosen]).to(part.value.device)
                arriving.append((part.value, slots))
                size += chosen.size * math.prod(part.value.shape[1:])
                if source == rank():
                    shard = shards[part.name]
                    rows = torch.from_numpy(shard.places(swaps[key].rows[chosen])[0])
                    found = shard.value.index_select(0, rows.to(shard.value.device))
                    # Host rows may be in half precision, replicas are not.
                    leaving.append(found.to(part.value.device, part.value.dtype).reshape(-1))
            if size == 0:
                continue
            device = hot[0].value.device
            packed = torch.cat(leaving) if leaving else torch.empty(size, device=device)
            if world_size() > 1:
                dist.broadcast(packed, source)
            num_bytes += packed.numel() * packed.element_size()
            for replica, slots in arriving:
                shape = (slots.numel(), *replica.shape[1:])
                values, packed = packed.split([math.prod(shape), packed.numel() - math.prod(shape)])
                replica.index_copy_(0, slots, values.view(shape))
        return num_bytes

    def _set_hot_rows(self, path: str, hot_rows: Mapping[str, Rows]) -> None:
        collection = self._collections[path]
        collection.follow(replace(collection.partition, hot_rows=hot_rows))
        for counter in self._counters[path]:
            counter.follow(collection.partition)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Hot rows, and the counts of this rank's counted rows, by table; collective."""
        for counter in self._all_counters():
            counter.merge()
        state: dict[str, torch.Tensor] = {}
        for table in self._tables:
            begin = table.counter.begins[table.name]
            counted = table.part_of(table.counter.counted)
            state[f"{table.key}/hot_rows"] = torch.from_numpy(table.hot_keys() - begin)
            state[f"{table.key}/counted_rows"] = torch.from_numpy(counted.keys - begin)
            state[f"{table.key}/counts"] = torch.from_numpy(counted.counts)
        return state

    def _check_state(self, of_ranks: Sequence[Mapping[str, torch.Tensor]]) -> None:
        for table in self._tables:
            num_rows = self._collections[table.path].partition.num_rows[table.name]
            for state in of_ranks:
                if f"{table.key}/hot_rows" in state:
                    what = f"hot rows of table {table.name}"
                    _check_rows(what, state[f"{table.key}/hot_rows"], num_rows)
                if f"{table.key}/counts" in state:
                    what = f"counted rows of table {table.name}"
                    counted = state[f"{table.key}/counted_rows"]
                    _check_rows(what, counted, num_rows)
                    counts = state[f"{table.key}/counts"].numpy()
                    is_count = np.isfinite(counts).all() and (counts >= 0).all()
                    if counts.shape != tuple(counted.shape) or not is_count:
                        raise ValueError(
                            f"{what}: expected a finite count >= 0 for each row, got others"
                        )

    def load_state_dict(self, of_ranks: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Restore hot rows and counts before the model's tensors are loaded.

        Tables that now have another number of hot rows keep their current ones.

        Args:
            of_ranks: What ``state_dict`` returned on each rank.

        Raises:
            ValueError: If rows are outside their table or repeated, or a count is invalid.
        """
        self._check_state(of_ranks)
        for path in self._collections:
            rows = dict(self._collections[path].partition.hot_rows)
            for table in self._tables:
                saved = of_ranks[0].get(f"{table.key}/hot_rows") if of_ranks else None
                if table.path != path or saved is None:
                    continue
                if saved.numel() == rows[table.name].size:
                    rows[table.name] = saved.numpy()
            self._set_hot_rows(path, rows)
        counted: dict[int, CountedRows] = {}
        for table in self._tables:
            for state in of_ranks:
                if f"{table.key}/counts" in state:
                    keys = state[f"{table.key}/counted_rows"] + table.counter.begins[table.name]
                    part = CountedRows(keys.numpy(), state[f"{table.key}/counts"].numpy())
                    before = counted.get(id(table.counter), CountedRows.none())
                    counted[id(table.counter)] = before.sum(part)
        for counter in self._all_counters():
            counter.restore(counted.get(id(counter), CountedRows.none()))


def _check_rows(what: str, rows: torch.Tensor, num_rows: int) -> None:
    found = np.asarray(rows)
    if found.dtype.kind != "i" or found.ndim != 1 or np.unique(found).size != found.size:
        raise ValueError(f"{what}: expected distinct row numbers, got others")
    if found.size and not 0 <= found.min() <= found.max() < num_rows:
        raise ValueError(
            f"{what}: expected rows in 0..{num_rows - 1}, got {found.min()} to {found.max()}"
        )


def _best_sum(histograms: Sequence[tuple[Counts, Rows]], num_rows: int) -> float:
    """The lookups of the ``num_rows`` most-read rows, from histograms of lookups per row."""
    counts = np.concatenate([counts for counts, _ in histograms])
    nums = np.concatenate([nums for _, nums in histograms])
    order = np.argsort(-counts)
    taken = np.minimum(nums[order].cumsum(), num_rows)
    return float(np.diff(taken, prepend=0) @ counts[order])


def choose_swaps(
    hot_counts: Counts, cold: CountedRows, min_gain: float
) -> tuple[Rows, Rows, Counts]:
    """Pair the cold rows with the most lookups with the slots of the hot rows with the fewest.

    Args:
        hot_counts: The lookups (H,) of the hot rows by slot.
        cold: Cold rows and their lookups.
        min_gain: Minimum number of lookups that a swap must gain.

    Returns:
        Slots (M,), the keys (M,) that move into them, and the lookups gained (M,), descending.
    """
    best = np.lexsort((cold.keys, -cold.counts))[: hot_counts.size]
    worst = np.argsort(hot_counts, kind="stable")[: best.size]
    up, down = cold.counts[best], hot_counts[worst]
    gain = up - down
    pays = gain > np.maximum(min_gain, _DEVIATIONS * np.sqrt(up + down))
    num = int(np.count_nonzero(pays))  # once a bound fails, it fails for the rest
    return worst[:num], cold.keys[best[:num]], gain[:num]


def _demote(swap: Swaps, replica: TensorPart, shard: TensorPart) -> None:
    """Copy the rows that become cold and that this rank owns from its replica."""
    place, own = shard.places(swap.old_rows)
    slots = torch.from_numpy(swap.slots[own]).to(replica.value.device)
    rows = torch.from_numpy(place[own]).to(shard.value.device)
    values = replica.value.index_select(0, slots)
    shard.value.index_copy_(0, rows, values.to(shard.value.device, shard.value.dtype))
