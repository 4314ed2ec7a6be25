"""What is calibrated for, and samples of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import cycle
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.bench.samples import ZipfTables
from hotrec.config.groups import ModelConfig, OptimizerConfig
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.planning.policies import choose_all_cold, choose_fraction
from hotrec.planning.unsharded import optimizer_specs
from hotrec.routing.features import Column
from hotrec.routing.router import Router
from hotrec.runtime.ranks import Ranks, new_group
from hotrec.types import Partition

T = TypeVar("T")
# Each call reads other samples, as each step does: rows that an earlier repeat has read would be
# found in the processor's cache. Enough for the calls of a size, warm-up included.
NUM_SAMPLES = 10
# A batch with fewer is measured as if it had so many: else ids drown in what a call costs.
LEAST_IDS = 8192
# Bytes of a row in ZipfTables and in a router's map.
SAMPLED_ROW_BYTES = 20


@dataclass(frozen=True)
class CalibrationTarget:
    """What the costs are to be of.

    Args:
        table_rows: rows of the table that each feature reads; a shared table once per feature.
        model: dense layers, embedding_dim.
        optimizer: of rows and dense layers.
        num_dense: N, dense columns.
        batch_size: B, per rank.
        zipf_exponent: skew of the ids; how often a batch reads the same row decides what an id
            costs to route, to pool and to update.
        cap_bytes: memory of a rank for tables; larger ones are cut, the largest first.
        seed: of the samples.
    """

    table_rows: Sequence[int]
    model: ModelConfig
    optimizer: OptimizerConfig
    num_dense: int
    batch_size: int
    zipf_exponent: float = 1.05
    cap_bytes: int = 256 << 20
    seed: int = 0


def cut_tables(table_rows: Sequence[int], most_rows: int) -> list[int]:
    """Cut the largest tables to one height, so that all together have at most ``most_rows``.

    Small tables, whose rows stay in the processor's cache, stay as they are; none goes below 1.
    """
    left, height = most_rows, 0
    for number, rows in enumerate(sorted(table_rows)):
        height = max(1, left // (len(table_rows) - number))
        if rows > height:
            return [min(rows, height) for rows in table_rows]
        left -= rows
    return list(table_rows)


@dataclass
class CalibrationWorkload:
    """A subject on a rank: its tables, its samples, and what is built for the probes.

    Args:
        subject: what it is.
        ranks: this rank.
        alone: a process group of this rank alone.
    """

    subject: CalibrationTarget
    ranks: Ranks
    alone: dist.ProcessGroup
    _built: dict[str, tuple[object, Any]] = field(default_factory=dict)
    _drawn: dict[tuple[int, int], list[KeyedJaggedTensor]] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return self.ranks.device

    @property
    def dim(self) -> int:
        return self.subject.model.embedding_dim

    @property
    def num_columns(self) -> int:
        return len(self.subject.table_rows)

    @property
    def num_ids(self) -> int:
        """Ids of a batch, one per feature and sample."""
        return self.subject.batch_size * self.num_columns

    @cached_property
    def specs(self) -> tuple[OptimizerSpec, OptimizerSpec]:
        return optimizer_specs(self.subject.optimizer)

    def sizes(self) -> list[tuple[int, int]]:
        """Ids and dimensions: a sixteenth to twice a batch, at D and at a quarter of it."""
        most = max(self.num_ids, LEAST_IDS)
        ids = [most // part for part in (16, 4, 1)]
        other = self.dim // 16 * 4 if self.dim >= 16 else 2 * self.dim
        return [(k, dim) for dim in (other, self.dim) for k in ids] + [(2 * most, self.dim)]

    @cached_property
    def samples(self) -> ZipfTables:
        """Of the whole tables, as a batch reads them."""
        most_rows = self.subject.cap_bytes // SAMPLED_ROW_BYTES
        return self._zipf(cut_tables(self.subject.table_rows, most_rows))

    @cached_property
    def own_samples(self) -> ZipfTables:
        """Of the rank's share of every table: what it holds, and is asked for."""
        share = [-(-rows // self.ranks.world_size) for rows in self.subject.table_rows]
        return self._zipf(cut_tables(share, self.subject.cap_bytes // (4 * self.dim)))

    def _zipf(self, table_rows: Sequence[int]) -> ZipfTables:
        return ZipfTables(
            table_rows,
            exponent=self.subject.zipf_exponent,
            num_dense=self.subject.num_dense,
            seed=self.subject.seed,
        )

    @property
    def own_rows(self) -> list[int]:
        return [table.num_rows for table in self.own_samples.schema.tables]

    @cached_property
    def hot_partition(self) -> Partition:
        """The most looked-up half of the rows, as far as the memory goes.

        A replica that fits the processor's cache would make rows look cheaper than they are.
        """
        counts = self.samples.count(100 * self.subject.batch_size)
        total = sum(len(rows) for rows in counts.values())
        hot_frac = min(0.5, self.subject.cap_bytes / (8 * self.dim) / total)
        return choose_fraction(counts, hot_frac=max(hot_frac, 1 / total))

    @cached_property
    def router(self) -> Router:
        """Routes ids of the whole tables, hot and cold."""
        return self.router_of(self.samples, self.hot_partition)

    @cached_property
    def own_router(self) -> Router:
        """Routes ids of the rank's share, all cold."""
        none = choose_all_cold(self.own_samples.count(1))
        return self.router_of(self.own_samples, none)

    def router_of(self, samples: ZipfTables, partition: Partition) -> Router:
        """Routes ids of these tables, on the device."""
        names = samples.schema.feature_names
        columns = [Column(name, name, name, is_mean=False) for name in names]
        return Router({self.dim: columns}, partition).to(self.device)

    def features(self, samples: ZipfTables, num_ids: int) -> list[KeyedJaggedTensor]:
        """Batches with about so many ids, NUM_SAMPLES of them."""
        batch_size = max(1, num_ids // self.num_columns)
        key = (id(samples), batch_size)
        if key not in self._drawn:
            batches = samples.batches(
                NUM_SAMPLES,
                batch_size=batch_size,
                rank=self.ranks.rank,
                world_size=self.ranks.world_size,
            )
            self._drawn[key] = [batch.sparse.to(self.device) for batch in batches]
        return self._drawn[key]

    def once(self, kind: str, key: object, build: Callable[[], T]) -> T:
        """What ``build`` makes, kept until the same kind is asked for with another key."""
        held = self._built.get(kind)
        if held is None or held[0] != key:
            self._built.pop(kind, None)  # frees the memory before the next is built
            held = (key, build())
            self._built[kind] = held
        built: T = held[1]
        return built


def in_turn(values: Sequence[T]) -> Iterator[T]:
    """The values again and again."""
    return cycle(values)


def group_alone(ranks: Ranks) -> dist.ProcessGroup:
    """A process group of this rank alone; collective."""
    groups = [new_group([rank]) for rank in range(ranks.world_size)]
    alone: dist.ProcessGroup = groups[ranks.rank]
    return alone
