"""The workload that calibration measures: tables, batches, routers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.assemble.model import ModelSpec
from hotrec.bench.cases import Subject
from hotrec.bench.samples import ZipfTables
from hotrec.cost_model.skew import DEFAULT_EXPONENT
from hotrec.planner.policies import choose_all_cold, choose_fraction
from hotrec.routing.features import Column, RoutedRows
from hotrec.routing.router import Router
from hotrec.runtime.hosts import FoundHosts
from hotrec.runtime.ranks import Group, Ranks
from hotrec.types import Partition, Rows, Schema

T = TypeVar("T")
# Each call reads another batch, like each step, or its rows would still be in the CPU cache. Enough
# for all calls of one size, warm-up included; for large batches a few fill that cache too, and
# drawing and routing more would take longer than timing them.
NUM_SAMPLES, MIN_SAMPLES, SAMPLED_IDS = 10, 3, 1 << 21
# Smaller batches are measured with this many ids, or the cost of the call would hide that of ids.
MIN_IDS = 8192
# Twice a batch is also measured, unless it has more ids.
MAX_IDS = 1 << 20
# Maximum bytes that are copied or moved at once: the rows of a step, which are fewer than its ids.
MAX_MOVED_BYTES = 64 << 20
# Bytes per row in ZipfTables and in a router's map.
SAMPLED_ROW_BYTES = 20


@dataclass(frozen=True)
class CalibrationTarget:
    """Model and batch for which costs are measured.

    Args:
        subject: Model, optimizers and batch size, on a separate table for each feature
            (``table_per_feature``); a shared table counts once for each of its features.
        cap_bytes: Memory per rank for tables; the largest tables are cut to fit.
        zipf_exponents: Skew of the ids of each feature (``fit_zipf_exponent``), which determines
            how often a batch repeats a row; None for DEFAULT_EXPONENT.
        bag_lengths: Lengths of some of the data's bags, by feature, to draw from; None for one id
            each. The cost of a bag is part of the cost of its ids, so it depends on these.
    """

    subject: Subject
    cap_bytes: int = 256 << 20
    zipf_exponents: Sequence[float] | None = None
    bag_lengths: Sequence[Rows] | None = None

    @property
    def spec(self) -> ModelSpec:
        return self.subject.spec

    @property
    def schema(self) -> Schema:
        return self.spec.schema

    @property
    def table_rows(self) -> list[int]:
        """By feature."""
        return [table.num_rows for table in self.schema.tables]

    @property
    def batch_size(self) -> int:
        return self.subject.batch_size

    @property
    def seed(self) -> int:
        """Of the weights and of the samples."""
        return self.spec.seed

    @property
    def dim(self) -> int:
        return self.spec.architecture.embedding_dim

    @property
    def ids_per_sample(self) -> float:
        """Mean ids of a sample, of all features; at least one."""
        if self.bag_lengths is None:
            return float(len(self.table_rows))
        return max(1.0, sum(float(lengths.mean()) for lengths in self.bag_lengths))

    @property
    def exponents(self) -> Sequence[float]:
        """By feature."""
        if self.zipf_exponents is None:
            return [DEFAULT_EXPONENT] * len(self.table_rows)
        return self.zipf_exponents

    def samples(self, table_rows: Sequence[int]) -> ZipfTables:
        """Samples like the target's, on tables of these sizes."""
        return ZipfTables(
            table_rows,
            exponent=self.exponents,
            num_dense=len(self.schema.dense),
            seed=self.seed,
            columns=self.schema,
            bag_lengths=self.bag_lengths,
        )


def cut_tables(table_rows: Sequence[int], max_rows: int) -> list[int]:
    """Cut the largest tables to a common size so that all have at most ``max_rows`` together.

    Small tables keep their size, since it determines whether they stay in the CPU cache.
    """
    left, height = max_rows, 0
    for number, rows in enumerate(sorted(table_rows)):
        height = max(1, left // (len(table_rows) - number))
        if rows > height:
            return [min(rows, height) for rows in table_rows]
        left -= rows
    return list(table_rows)


@dataclass
class CalibrationWorkload:
    """Batches and modules of a target on this rank, shared by the probes.

    ``alone`` is the process group of this rank alone (``group_alone``). ``hosts`` are those between
    which whole steps are predicted; None for the ranks' own.
    """

    target: CalibrationTarget
    ranks: Ranks
    alone: Group
    hosts: FoundHosts | None = None
    _built: dict[str, tuple[object, Any]] = field(default_factory=dict)
    _drawn: dict[tuple[int, int], list[KeyedJaggedTensor]] = field(default_factory=dict)
    _routed: dict[tuple[int, int], list[RoutedRows]] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return self.ranks.device

    @property
    def dim(self) -> int:
        return self.target.dim

    @property
    def num_columns(self) -> int:
        return len(self.target.table_rows)

    @property
    def num_ids(self) -> int:
        """Mean number of ids in a batch."""
        return round(self.target.batch_size * self.target.ids_per_sample)

    def sizes(self) -> list[tuple[int, int]]:
        """(ids, dimension) to measure: a sixteenth to twice a batch, at D and a quarter of it."""
        max_ids = max(self.num_ids, MIN_IDS)
        ids = [max_ids // part for part in (16, 4, 1)]
        other = self.dim // 16 * 4 if self.dim >= 16 else 2 * self.dim
        found = [(k, dim) for dim in (other, self.dim) for k in ids]
        return [*found, (2 * max_ids, self.dim)] if 2 * max_ids <= MAX_IDS else found

    def moved_rows(self, row_bytes: int) -> list[int]:
        """Numbers of rows to measure copies with: of the ids above, at most MAX_MOVED_BYTES."""
        max_rows = min(max(self.num_ids, MIN_IDS), MAX_MOVED_BYTES // row_bytes)
        return [max(1, max_rows // part) for part in (16, 4, 1)]

    @cached_property
    def samples(self) -> ZipfTables:
        """Batches that read the whole tables."""
        max_rows = self.target.cap_bytes // SAMPLED_ROW_BYTES
        return self.target.samples(cut_tables(self.target.table_rows, max_rows))

    @cached_property
    def own_samples(self) -> ZipfTables:
        """Batches that read this rank's shard of every table."""
        share = [-(-rows // self.ranks.world_size) for rows in self.target.table_rows]
        return self.target.samples(cut_tables(share, self.target.cap_bytes // (4 * self.dim)))

    @cached_property
    def hot_partition(self) -> Partition:
        """The most accessed half of the rows, or fewer if memory is short.

        A small replica would fit the CPU cache and make hot rows look too cheap.
        """
        counts = self.samples.count(100 * self.target.batch_size)
        total = sum(len(rows) for rows in counts.values())
        hot_frac = min(0.5, self.target.cap_bytes / (8 * self.dim) / total)
        return choose_fraction(counts, hot_frac=max(hot_frac, 1 / total))

    @cached_property
    def router(self) -> Router:
        """Router of the whole tables, with hot rows."""
        return self._router(self.samples, self.hot_partition)

    @cached_property
    def router_on_cpu(self) -> Router:
        """The same for loader workers."""
        return self._router(self.samples, self.hot_partition, torch.device("cpu"))

    @cached_property
    def own_router(self) -> Router:
        """Router of this rank's shards, all rows cold."""
        return self._router(self.own_samples, choose_all_cold(self.own_samples.count(1)))

    def _router(
        self, samples: ZipfTables, partition: Partition, device: torch.device | None = None
    ) -> Router:
        names = samples.schema.feature_names
        columns = [Column(name, name, name, is_mean=False) for name in names]
        return Router({self.dim: columns}, partition).to(device or self.device)

    def features(self, samples: ZipfTables, num_ids: int) -> list[KeyedJaggedTensor]:
        """Batches of about ``num_ids`` ids each."""
        batch_size = max(1, int(num_ids / self.target.ids_per_sample))
        key = (id(samples), batch_size)
        if key not in self._drawn:
            rank, world_size = self.ranks.rank, self.ranks.world_size
            batches = samples.batches(
                max(MIN_SAMPLES, min(NUM_SAMPLES, SAMPLED_IDS // num_ids)),
                batch_size=batch_size,
                rank=rank,
                world_size=world_size,
            )
            self._drawn[key] = [batch.sparse.to(self.device) for batch in batches]
        return self._drawn[key]

    def routed(self, router: Router, samples: ZipfTables, num_ids: int) -> list[RoutedRows]:
        """These batches, routed by ``router``."""
        key = (id(router), num_ids)
        if key not in self._routed:
            batches = self.features(samples, num_ids)
            self._routed[key] = [router(features).groups[0] for features in batches]
        return self._routed[key]

    def once(self, kind: str, key: object, build: Callable[[], T]) -> T:
        """The result of ``build``, cached until the same kind is requested with another key."""
        if kind not in self._built or self._built[kind][0] != key:
            self._built.pop(kind, None)  # frees the memory before the next is built
            self._built[kind] = (key, build())
        built: T = self._built[kind][1]
        return built


def group_alone(ranks: Ranks) -> Group:
    """A process group of this rank alone; collective."""
    return Group("alone", [[rank] for rank in range(ranks.world_size)])
