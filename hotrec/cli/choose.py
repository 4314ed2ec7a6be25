"""Which rows are hot: the placement's policy on a profile, or a saved partition."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hotrec.artifact import Artifact, check_made_from
from hotrec.cli.schema import (
    AllColdPlacement,
    AllHotPlacement,
    BreakEvenPlacement,
    BudgetPlacement,
    CoveragePlacement,
    FractionPlacement,
    HotColdConfig,
    PolicyConfig,
    SavedPlacement,
)
from hotrec.data.chunks import Dataset
from hotrec.placement.partition import (
    check_partition,
    read_partition,
    summarize_partition,
    write_partition,
)
from hotrec.placement.policies import (
    check_hot_bytes,
    choose_all_cold,
    choose_all_hot,
    choose_budget,
    choose_coverage,
    choose_fraction,
    choose_min_accesses,
    fix_tables,
)
from hotrec.placement.profile import Profile, read_profile
from hotrec.types import Partition

MIB = 1 << 20


@dataclass(frozen=True)
class Terms:
    """What a policy needs to know beside the counts.

    Args:
        row_bytes: bytes of one row with its optimizer state, by table.
        global_batch_size: samples per step over all ranks.
        memory_bytes: of a device, for replicas.
    """

    row_bytes: Mapping[str, int]
    global_batch_size: int
    memory_bytes: int


def obtain_partition(
    placement: HotColdConfig, dataset: Dataset, profile_dir: Path, output: Path, terms: Terms
) -> tuple[Partition, Artifact]:
    """The partition that a placement asks for, as an artifact.

    Args:
        output: where a newly chosen partition is written; a saved one stays where it is.

    Raises:
        ArtifactError: if the profile or the saved partition is missing, or of another dataset.
        ValueError: if the policy cannot be followed, or the hot rows exceed the device's memory.
    """
    num_rows = {table.name: table.num_rows for table in dataset.schema.tables}
    if isinstance(placement, SavedPlacement):
        partition, artifact = read_partition(Path(placement.partition_dir))
        dataset_hash = dataset.artifact.content_hash
        check_partition(artifact, dataset_hash=dataset_hash, num_rows=num_rows)
    else:
        profile, profile_artifact = read_profile(profile_dir)
        check_made_from(profile_artifact, dataset.artifact)
        partition = choose_partition(placement, profile, terms)
        artifact = write_partition(
            partition,
            output,
            parameters=_parameters(placement),
            summary=summarize_partition(partition, profile, terms.row_bytes),
            dataset_hash=dataset.artifact.content_hash,
            profile_hash=profile_artifact.content_hash,
        )
    return partition, artifact


def choose_partition(placement: HotColdConfig, profile: Profile, terms: Terms) -> Partition:
    """Follow a policy.

    Raises:
        ValueError: if it cannot be followed, or its hot rows exceed the device's memory.
    """
    partition = _follow_policy(placement, profile, terms)
    check_hot_bytes(partition, terms.row_bytes, terms.memory_bytes)
    return partition


def _follow_policy(placement: HotColdConfig, profile: Profile, terms: Terms) -> Partition:
    counts, min_count = profile.counts, profile.sampling.min_count
    fixed = {}
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
                row_bytes=terms.row_bytes,
                memory_bytes=terms.memory_bytes,
                fixed=fixed,
                min_count=min_count,
            )
        case BreakEvenPlacement():
            return choose_min_accesses(
                counts,
                min_accesses_per_step=placement.min_accesses_per_step,
                global_batch_size=terms.global_batch_size,
                num_samples=profile.num_samples,
                fixed=fixed,
                min_count=min_count,
            )
        case AllHotPlacement():
            return choose_all_hot(counts)
        case AllColdPlacement():
            return choose_all_cold(counts)
    raise AssertionError(placement)


def _parameters(placement: HotColdConfig) -> dict[str, object]:
    """The policy's own keys: what a report shows beside its name."""
    shared = {item for item in HotColdConfig.__dataclass_fields__ if item != "kind"}
    return {
        name: getattr(value, "name", value)
        for name, value in vars(placement).items()
        if name not in shared
    }
