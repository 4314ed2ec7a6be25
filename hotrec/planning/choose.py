"""Which rows are hot: the placement's policy on a profile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

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
from hotrec.types import Partition, Rows

MIB = 1 << 20


@dataclass(frozen=True)
class PolicyInputs:
    """What a policy needs to know beside the counts.

    Args:
        row_bytes: bytes of one row with its optimizer state, by table.
        global_batch_size: samples per step over all ranks.
        memory_bytes: of a device, for replicas.
        num_ranks: W.
        num_hosts: that they are on.
        dims: D by table.
        row_seconds: seconds of a cold row, both ways, and of a hot row in a dense all-reduce; asked
            for by SCARS alone.
    """

    row_bytes: Mapping[str, int]
    global_batch_size: int
    memory_bytes: int
    num_ranks: int
    num_hosts: int
    dims: Mapping[str, int]
    row_seconds: Callable[[], tuple[float, float]]


def choose_partition(placement: HotColdConfig, profile: Profile, inputs: PolicyInputs) -> Partition:
    """Follow a policy.

    Raises:
        ValueError: if it cannot be followed, or its hot rows exceed the device's memory.
    """
    partition = _follow_policy(placement, profile, inputs)
    # Beside the budget's bytes, which are the user's to choose, gradients must fit.
    grads = NUM_REPLICA_GRADIENTS * BYTES_PER_FLOAT
    trained = {table: size + grads * inputs.dims[table] for table, size in inputs.row_bytes.items()}
    check_hot_bytes(partition, trained, inputs.memory_bytes)
    return partition


def _follow_policy(placement: HotColdConfig, profile: Profile, inputs: PolicyInputs) -> Partition:
    counts, min_count = profile.counts, profile.sampling.min_count
    fixed: dict[str, Rows] = {}
    if isinstance(placement, PolicyConfig):
        fixed = fix_tables(
            counts,
            overrides=placement.overrides,
            small_table_rows=placement.small_table_rows,
            min_count=min_count,
        )
    match placement:
        case FractionPlacement():
            return choose_fraction(
                counts,
                hot_frac=placement.hot_frac,
                per_table=placement.per_table,
                fixed=fixed,
                min_count=min_count,
            )
        case CoveragePlacement():
            return choose_coverage(
                counts,
                coverage=placement.coverage_frac,
                per_table=placement.per_table,
                fixed=fixed,
                min_count=min_count,
            )
        case BudgetPlacement():
            return choose_budget(
                counts,
                budget_bytes=int(placement.hot_budget_mib * MIB),
                row_bytes=inputs.row_bytes,
                memory_bytes=inputs.memory_bytes,
                fixed=fixed,
                min_count=min_count,
            )
        case BreakEvenPlacement():
            return choose_min_accesses(
                counts,
                min_accesses_per_step=placement.min_accesses_per_step,
                global_batch_size=inputs.global_batch_size,
                num_samples=profile.num_samples,
                fixed=fixed,
                min_count=min_count,
            )
        case HugectrPlacement() | FaePlacement() | FreqCachePlacement() | ScarsPlacement():
            return _follow_rival(placement, profile, inputs, fixed)
        case AllHotPlacement():
            return choose_all_hot(counts)
        case AllColdPlacement():
            return choose_all_cold(counts)
    raise AssertionError(placement)


def _follow_rival(
    placement: PolicyConfig, profile: Profile, inputs: PolicyInputs, fixed: Mapping[str, Rows]
) -> Partition:
    """The policies of other systems."""
    counts, min_count = profile.counts, profile.sampling.min_count
    match placement:
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
                global_batch_size=inputs.global_batch_size,
                num_samples=profile.num_samples,
                fixed=fixed,
                min_count=min_count,
            )
        case FaePlacement():
            return choose_fae(
                counts,
                budget_bytes=int(placement.hot_budget_mib * MIB),
                row_bytes=inputs.row_bytes,
                small_table_bytes=int(placement.small_table_mib * MIB),
                fixed=fixed,
                min_count=min_count,
            )
        case FreqCachePlacement():
            return choose_freq_cache(
                counts,
                dims=inputs.dims,
                cached_frac=placement.cached_frac,
                fixed=fixed,
                min_count=min_count,
            )
        case ScarsPlacement():
            budget, (cold_row_s, hot_row_s) = placement.hot_budget_mib, inputs.row_seconds()
            return choose_scars(
                counts,
                memory_bytes=inputs.memory_bytes if budget is None else int(budget * MIB),
                row_bytes=inputs.row_bytes,
                num_samples=profile.num_samples,
                global_batch_size=inputs.global_batch_size,
                cold_row_s=cold_row_s,
                hot_row_s=hot_row_s,
                fixed=fixed,
                min_count=min_count,
            )
    raise AssertionError(placement)


def policy_parameters(placement: HotColdConfig) -> dict[str, object]:
    """The policy's own keys: what a report shows beside its name."""
    shared = {item for item in TieredConfig.__dataclass_fields__ if item != "kind"}
    return {
        name: getattr(value, "name", value)
        for name, value in vars(placement).items()
        if name not in shared
    }
