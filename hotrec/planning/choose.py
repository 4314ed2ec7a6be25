"""Applies the configured policy to a profile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
    HugectrPlacement,
    PolicyConfig,
    ScarsPlacement,
    TieredConfig,
)
from hotrec.cost_model.forms import BYTES_PER_FLOAT
from hotrec.cost_model.memory import NUM_REPLICA_GRADIENTS
from hotrec.cost_model.profile import Profile
from hotrec.planning.baselines import (
    choose_fae,
    choose_freq_cache,
    choose_hugectr,
    choose_scars,
    hugectr_threshold,
)
from hotrec.planning.policies import (
    check_hot_bytes,
    choose_all_cold,
    choose_all_hot,
    choose_budget,
    choose_coverage,
    choose_fraction,
    choose_min_accesses,
    fix_tables,
)
from hotrec.types import Partition

MIB = 1 << 20


@dataclass(frozen=True)
class PolicyInputs:
    """What policies depend on besides the counts.

    Args:
        row_bytes: Bytes of one row of each table, with its optimizer state.
        global_batch_size: Samples of a step over all ranks.
        memory_bytes: Memory of a device for replicated rows.
        num_ranks: World size.
        num_hosts: The number of hosts.
        dims: Embedding dim of each table.
        row_seconds: Returns the seconds to exchange a cold row and its gradient, and those of a
            hot row in a dense all-reduce. Only SCARS calls it.
    """

    row_bytes: Mapping[str, int]
    global_batch_size: int
    memory_bytes: int
    num_ranks: int
    num_hosts: int
    dims: Mapping[str, int]
    row_seconds: Callable[[], tuple[float, float]]


def choose_partition(placement: HotColdConfig, profile: Profile, inputs: PolicyInputs) -> Partition:
    """Applies a policy.

    Raises:
        ValueError: If the policy cannot be satisfied, or its hot rows exceed the device's memory.
    """
    partition = _apply(placement, profile, inputs)
    # Users budget for rows and their optimizer state; the gradients must fit too.
    grads = NUM_REPLICA_GRADIENTS * BYTES_PER_FLOAT
    trained = {table: size + grads * inputs.dims[table] for table, size in inputs.row_bytes.items()}
    check_hot_bytes(partition, trained, inputs.memory_bytes)
    return partition


def _apply(placement: HotColdConfig, profile: Profile, inputs: PolicyInputs) -> Partition:
    counts = profile.counts
    given: dict[str, Any] = {}
    if isinstance(placement, PolicyConfig):
        given["min_count"] = profile.sampling.min_count
        given["fixed"] = fix_tables(
            counts,
            overrides=placement.overrides,
            small_table_rows=placement.small_table_rows,
            min_count=profile.sampling.min_count,
        )
    rates: dict[str, Any] = {
        "global_batch_size": inputs.global_batch_size,
        "num_samples": profile.num_samples,
    }
    match placement:
        case FractionPlacement(hot_frac=hot_frac, per_table=per_table):
            return choose_fraction(counts, hot_frac=hot_frac, per_table=per_table, **given)
        case CoveragePlacement(coverage_frac=coverage, per_table=per_table):
            return choose_coverage(counts, coverage=coverage, per_table=per_table, **given)
        case BudgetPlacement():
            return choose_budget(
                counts,
                budget_bytes=int(placement.hot_budget_mib * MIB),
                row_bytes=inputs.row_bytes,
                memory_bytes=inputs.memory_bytes,
                **given,
            )
        case BreakEvenPlacement(min_accesses_per_step=accesses):
            return choose_min_accesses(counts, min_accesses_per_step=accesses, **rates, **given)
        case HugectrPlacement():
            threshold = hugectr_threshold(
                placement.link,
                num_ranks=inputs.num_ranks,
                num_hosts=inputs.num_hosts,
                global_batch_size=inputs.global_batch_size,
                all_to_all_bytes_per_s=placement.all_to_all_bytes_per_s,
                all_reduce_bytes_per_s=placement.all_reduce_bytes_per_s,
                efficiency=placement.efficiency,
                max_duplicate_prob=placement.max_duplicate_prob,
            )
            return choose_hugectr(
                counts,
                min_accesses_per_step=threshold,
                num_ranks=inputs.num_ranks,
                **rates,
                **given,
            )
        case FaePlacement():
            return choose_fae(
                counts,
                budget_bytes=int(placement.hot_budget_mib * MIB),
                row_bytes=inputs.row_bytes,
                small_table_bytes=int(placement.small_table_mib * MIB),
                **given,
            )
        case FreqCachePlacement(cached_frac=frac):
            return choose_freq_cache(counts, dims=inputs.dims, cached_frac=frac, **given)
        case ScarsPlacement(hot_budget_mib=budget):
            cold_row_s, hot_row_s = inputs.row_seconds()
            return choose_scars(
                counts,
                memory_bytes=inputs.memory_bytes if budget is None else int(budget * MIB),
                row_bytes=inputs.row_bytes,
                cold_row_s=cold_row_s,
                hot_row_s=hot_row_s,
                **rates,
                **given,
            )
        case AllHotPlacement():
            return choose_all_hot(counts)
        case AllColdPlacement():
            return choose_all_cold(counts)
    raise AssertionError(placement)


def policy_parameters(placement: HotColdConfig) -> dict[str, object]:
    """Returns the configuration keys of this policy alone, which reports show with its name."""
    shared = {item for item in TieredConfig.__dataclass_fields__ if item != "kind"}
    return {
        name: getattr(value, "name", value)
        for name, value in vars(placement).items()
        if name not in shared
    }
