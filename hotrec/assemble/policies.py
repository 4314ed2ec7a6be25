"""The configured policies: which rows are hot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hotrec.config.groups import (
    AllColdPlacement,
    AllHotPlacement,
    BreakEvenPlacement,
    BudgetPlacement,
    CoveragePlacement,
    FaePlacement,
    FractionPlacement,
    FreqCachePlacement,
    HotColdConfig,
    PolicyConfig,
    ScarsPlacement,
    TieredConfig,
)
from hotrec.cost_model.forms import BYTES_PER_FLOAT
from hotrec.cost_model.memory import NUM_REPLICA_GRADIENTS
from hotrec.cost_model.profile import Profile
from hotrec.planner.counted import CountedTables
from hotrec.planner.machine import Machine
from hotrec.planner.paper_policies import choose_fae, choose_freq_cache, choose_scars
from hotrec.planner.policies import (
    choose_all_cold,
    choose_all_hot,
    choose_budget,
    choose_coverage,
    choose_fraction,
    choose_min_accesses,
)
from hotrec.runtime.memory import MIB
from hotrec.types import Partition


def choose_partition(
    placement: HotColdConfig,
    profile: Profile,
    machine: Machine,
    *,
    row_bytes: Mapping[str, int],
    dim: int,
) -> Partition:
    """Applies a configured policy.

    Args:
        machine: The ranks, with costs for SCARS.
        row_bytes: Bytes of one row of each table, with its optimizer state.

    Raises:
        ValueError: If the policy cannot be satisfied, or its hot rows exceed the device's memory.
    """
    partition = _apply(placement, profile, machine, row_bytes, dim)
    # Users budget for rows and their optimizer state; the gradients must fit too.
    grads = NUM_REPLICA_GRADIENTS * BYTES_PER_FLOAT * dim
    hot_bytes = sum(partition.num_hot(t) * (size + grads) for t, size in row_bytes.items())
    if hot_bytes > machine.replica_bytes:
        raise ValueError(
            f"partition ({partition.policy}): expected hot rows, with optimizer state and "
            f"gradients, of at most {machine.replica_bytes} bytes, the device's memory, got "
            f"{hot_bytes}. Choose fewer hot rows."
        )
    return partition


def _apply(
    placement: HotColdConfig,
    profile: Profile,
    machine: Machine,
    row_bytes: Mapping[str, int],
    dim: int,
) -> Partition:
    given: dict[str, Any] = {}
    if isinstance(placement, PolicyConfig):
        given = {"overrides": placement.overrides, "small_table_rows": placement.small_table_rows}
    tables = CountedTables.of(profile.counts, min_count=profile.sampling.min_count, **given)
    match placement:
        case FractionPlacement(hot_frac=hot_frac, per_table=per_table):
            return choose_fraction(tables, hot_frac=hot_frac, per_table=per_table)
        case CoveragePlacement(coverage_frac=coverage, per_table=per_table):
            return choose_coverage(tables, coverage=coverage, per_table=per_table)
        case BudgetPlacement(hot_budget_mib=budget):
            budget_bytes = int(budget * MIB)
            if budget_bytes > machine.replica_bytes:
                raise ValueError(
                    f"budget_bytes: expected at most the {machine.replica_bytes} bytes of device "
                    f"memory, got {budget_bytes}. Lower the hot budget."
                )
            return choose_budget(tables, budget_bytes=budget_bytes, row_bytes=row_bytes)
        case BreakEvenPlacement(min_accesses_per_step=accesses):
            return choose_min_accesses(
                tables,
                min_accesses_per_step=accesses,
                global_batch_size=machine.batch_size * machine.world_size,
                num_samples=profile.num_samples,
            )
        case FaePlacement(hot_budget_mib=budget, small_table_mib=small):
            return choose_fae(
                tables,
                budget_bytes=int(budget * MIB),
                row_bytes=row_bytes,
                small_table_bytes=int(small * MIB),
            )
        case FreqCachePlacement(cached_frac=frac):
            dims = dict.fromkeys(profile.counts, dim)
            return choose_freq_cache(tables, dims=dims, cached_frac=frac)
        case ScarsPlacement(hot_budget_mib=budget):
            cold_row_s, hot_row_s = _row_seconds(machine, dim)
            return choose_scars(
                tables,
                memory_bytes=machine.replica_bytes if budget is None else int(budget * MIB),
                row_bytes=row_bytes,
                num_samples=profile.num_samples,
                global_batch_size=machine.batch_size * machine.world_size,
                cold_row_s=cold_row_s,
                hot_row_s=hot_row_s,
            )
        case AllHotPlacement():
            return choose_all_hot(profile.counts)
        case AllColdPlacement():
            return choose_all_cold(profile.counts)
    raise AssertionError(placement)


def _row_seconds(machine: Machine, dim: int) -> tuple[float, float]:
    """Seconds to send a cold row and its gradient, and a hot row in a dense all-reduce."""
    assert machine.costs is not None
    world = machine.world
    num_bytes = 2 * (world.num_ranks - 1) / world.num_ranks * BYTES_PER_FLOAT * dim
    to_all, reduce = (machine.costs.collective(k, world) for k in ("all_to_all", "all_reduce"))
    return num_bytes * to_all.per_byte_s, num_bytes * reduce.per_byte_s


def policy_parameters(placement: HotColdConfig) -> dict[str, object]:
    """Returns the configuration keys of this policy alone, which reports show with its name."""
    shared = {item for item in TieredConfig.__dataclass_fields__ if item != "kind"}
    return {
        name: getattr(value, "name", value)
        for name, value in vars(placement).items()
        if name not in shared
    }
