"""Splits of tables by a policy: the hot rows, and the memory of the cold ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from hotrec.cost_model.forms import BYTES_PER_FLOAT
from hotrec.cost_model.memory import NUM_REPLICA_GRADIENTS
from hotrec.cost_model.profile import Profile
from hotrec.planner.counted import CountedTables
from hotrec.planner.machine import Machine
from hotrec.types import (
    DEFAULT_LOAD_FRAC,
    ColdTier,
    Partition,
    Placement,
    PopularRows,
    RowFetch,
    Tier,
    WireType,
)


@dataclass(frozen=True)
class PolicyInputs:
    """Inputs of a policy besides the counts.

    Args:
        profile: The profile.
        machine: The ranks, with costs for a policy that needs them.
        row_bytes: Bytes of one row of each table, with its optimizer state.
        dim: Dimension D of the tables.
    """

    profile: Profile
    machine: Machine
    row_bytes: Mapping[str, int]
    dim: int

    @property
    def global_batch_size(self) -> int:
        return self.machine.batch_size * self.machine.world_size

    @property
    def row_seconds(self) -> tuple[float, float]:
        """Seconds to send a cold row and its gradient, and a hot row in a dense all-reduce."""
        assert self.machine.costs is not None
        costs, world = self.machine.costs, self.machine.world
        num_bytes = 2 * (world.num_ranks - 1) / world.num_ranks * BYTES_PER_FLOAT * self.dim
        to_all, reduce = (costs.collective(k, world) for k in ("all_to_all", "all_reduce"))
        return num_bytes * to_all.per_byte_s, num_bytes * reduce.per_byte_s


@dataclass(frozen=True)
class Policy:
    """A policy: it chooses the hot rows.

    Args:
        choose: Chooses the hot rows of the counted tables.
        overrides: Per table: hot, cold, a number of rows, or a fraction of its rows.
        small_table_rows: Tables with at most this number of rows are all hot.
        needs_costs: Whether it reads the costs of the machine.
    """

    choose: Callable[[CountedTables, PolicyInputs], Partition]
    overrides: Mapping[str, str | int | float] = field(default_factory=dict)
    small_table_rows: int = 0
    needs_costs: bool = False

    def partition(self, inputs: PolicyInputs) -> Partition:
        """Choose the hot rows.

        Raises:
            ValueError: If it cannot be satisfied, or its hot rows exceed the device's memory.
        """
        tables = CountedTables.of(
            inputs.profile.counts,
            min_count=inputs.profile.sampling.min_count,
            overrides=self.overrides,
            small_table_rows=self.small_table_rows,
        )
        partition = self.choose(tables, inputs)
        # Users budget for rows and their optimizer state; the gradients must fit too.
        grads = NUM_REPLICA_GRADIENTS * BYTES_PER_FLOAT * inputs.dim
        sizes = inputs.row_bytes.items()
        hot_bytes = sum(partition.num_hot(table) * (size + grads) for table, size in sizes)
        if hot_bytes > inputs.machine.replica_bytes:
            raise ValueError(
                f"partition ({partition.policy}): expected hot rows, with optimizer state and "
                f"gradients, of at most {inputs.machine.replica_bytes} bytes, the device's memory, "
                f"got {hot_bytes}. Choose fewer hot rows."
            )
        return partition


@dataclass(frozen=True)
class ColdRows:
    """The memory of the cold rows of a split, all in one tier.

    Args:
        tier: Memory of the cold rows.
        cache_load_frac: Fraction of the rows with slots; None for the default.
        row_type: Type of the rows behind slots.
        row_fetch: How these rows are fetched to the device.
    """

    tier: ColdTier = ColdTier.fused
    cache_load_frac: float | None = None
    row_type: WireType = WireType.fp32
    row_fetch: RowFetch = RowFetch.auto

    def place(
        self,
        partition: Partition,
        device: str,
        popular: Callable[[float], Mapping[str, PopularRows]] | None = None,
    ) -> Placement:
        """The placement of a partition.

        Args:
            partition: The hot rows.
            device: "cpu" or "cuda".
            popular: Chooses the initial rows of the slots for a fraction of rows with slots; None
                for empty slots.

        Raises:
            ValueError: If the device cannot read mapped memory.
        """
        if self.row_fetch is RowFetch.mapped and device == "cpu":
            raise ValueError(
                "placement.row_fetch: expected staged or auto on CPU (slots are host memory too), "
                "got mapped. Omit it, or train on CUDA."
            )
        has_slots = self.tier is ColdTier.cached
        load_frac = DEFAULT_LOAD_FRAC if self.cache_load_frac is None else self.cache_load_frac
        placed = Placement.alike(
            partition,
            Tier.CACHED if has_slots else Tier.DEVICE,
            load_frac,
            row_type=self.row_type,
            row_fetch=RowFetch.mapped if self.row_fetch is RowFetch.mapped else RowFetch.staged,
        )
        if not has_slots or popular is None:
            return placed
        return replace(placed, popular_rows=popular(load_frac))
