"""Splits of tables by a policy: the hot rows, and the memory of the cold ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from hotrec.config.groups import (
    AllColdPlacement,
    AllHotPlacement,
    BudgetPlacement,
    CoveragePlacement,
    FaePlacement,
    FractionPlacement,
    FreqCachePlacement,
    PolicyConfig,
    ScarsPlacement,
    TieredConfig,
)
from hotrec.cost_model.costs import Costs
from hotrec.cost_model.profile import Profile
from hotrec.cost_model.step import BYTES_PER_FLOAT
from hotrec.planner.counted import CountedTables
from hotrec.planner.machine import Machine
from hotrec.planner.paper_policies import choose_fae, choose_freq_cache, choose_scars
from hotrec.planner.policies import (
    choose_all_cold,
    choose_all_hot,
    choose_budget,
    choose_coverage,
    choose_fraction,
)
from hotrec.runtime.memory import MIB
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

CACHED_FRAC = 0.015  # of the embedding parameters, as in arXiv 2208.05321


def choose_hot(
    placement: TieredConfig,
    profile: Profile,
    machine: Machine,
    row_bytes: Mapping[str, int],
    dim: int,
    costs: Costs | None = None,
) -> Partition:
    """Choose the hot rows by the configured policy.

    Args:
        placement: The policy.
        profile: The profile.
        machine: The ranks.
        row_bytes: Bytes of one row of each table, with its optimizer state.
        dim: Dimension D of the tables.
        costs: Costs of the machine, for SCARS.

    Raises:
        ValueError: If it cannot be satisfied, or its hot rows exceed the device's memory.
    """
    limit = machine.replica_bytes
    budget = getattr(placement, "hot_budget_mib", None)
    budget_bytes = limit if budget is None else int(budget * MIB)
    given = placement if isinstance(placement, PolicyConfig) else PolicyConfig(placement.kind)
    tables = CountedTables.of(
        profile.counts,
        overrides=given.overrides,
    )
    match placement:
        case FractionPlacement(hot_frac=hot_frac):
            partition = choose_fraction(tables, hot_frac=hot_frac)
        case CoveragePlacement(coverage_frac=coverage):
            partition = choose_coverage(tables, coverage=coverage)
        case BudgetPlacement():
            if budget_bytes > limit:
                raise ValueError(
                    f"budget_bytes: expected at most the {limit} bytes of device memory, got "
                    f"{budget_bytes}. Lower the hot budget."
                )
            partition = choose_budget(tables, budget_bytes=budget_bytes, row_bytes=row_bytes)
        case FaePlacement():
            partition = choose_fae(
                tables,
                budget_bytes=budget_bytes,
                row_bytes=row_bytes,
                small_table_bytes=MIB,
            )
        case FreqCachePlacement():
            dims = dict.fromkeys(profile.counts, dim)
            partition = choose_freq_cache(tables, dims=dims, cached_frac=CACHED_FRAC)
        case ScarsPlacement():
            assert costs is not None, placement
            cold_row_s, hot_row_s = _row_seconds(costs, machine, dim)
            partition = choose_scars(
                tables,
                memory_bytes=budget_bytes,
                row_bytes=row_bytes,
                num_samples=profile.num_samples,
                global_batch_size=machine.batch_size * machine.world_size,
                cold_row_s=cold_row_s,
                hot_row_s=hot_row_s,
            )
        case AllHotPlacement():
            partition = choose_all_hot(profile.counts)
        case AllColdPlacement():
            partition = choose_all_cold(profile.counts)
        case _:
            raise AssertionError(placement)
    hot_bytes = sum(partition.num_hot(table) * size for table, size in row_bytes.items())
    if hot_bytes > limit:
        raise ValueError(
            f"partition ({partition.policy}): expected hot rows, with optimizer state, of at most "
            f"{limit} bytes, the device's memory, got {hot_bytes}. Choose fewer hot rows."
        )
    return partition


def _row_seconds(costs: Costs, machine: Machine, dim: int) -> tuple[float, float]:
    """Seconds to send a cold row and its gradient, and a hot row in a dense all-reduce."""
    world = machine.world
    num_bytes = 2 * (world.num_ranks - 1) / world.num_ranks * BYTES_PER_FLOAT * dim
    to_all, reduce = (costs.collective(k, world) for k in ("all_to_all", "all_reduce"))
    return num_bytes * to_all.per_byte_s, num_bytes * reduce.per_byte_s


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
