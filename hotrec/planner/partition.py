"""The partition artifact: hot rows on disk, with references to their dataset and profile."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hotrec.artifact import (
    Artifact,
    Verify,
    commit_artifact,
    read_artifact,
    scratch_directory,
)
from hotrec.cost_model.histogram import CountHistogram, order_all_rows, top_rows
from hotrec.cost_model.profile import Profile
from hotrec.planner.plan import SplitTables, read_table
from hotrec.types import (
    Partition,
    Placement,
    PopularRows,
    Rows,
)

KIND = "partition"
HOT_ROWS = "hot_rows.npz"
POPULAR_ROWS = "popular_rows.npz"


def summarize_partition(
    partition: Partition, profile: Profile, row_bytes: Mapping[str, int]
) -> dict[str, Any]:
    """Returns ``tables`` {table: summary} and their ``total`` for the manifest.

    ``coverage_train`` and ``coverage_heldout`` are the share of the lookups that hot rows serve,
    None without lookups.
    """
    parts = {"train": profile.counts, "heldout": profile.heldout}
    tables: dict[str, dict[str, Any]] = {}
    lookups = {part: [0, 0] for part in parts}
    for table, num_rows in partition.num_rows.items():
        hot, size = partition.hot(table), row_bytes[table]
        tables[table] = _summarize(num_rows, hot.size, hot.size * size) | {"row_bytes": size}
        for part, counts in parts.items():
            found = counts.get(table, np.empty(0, np.int64))
            num_hot, num_all = int(found[hot].sum()) if found.size else 0, int(found.sum())
            tables[table][f"coverage_{part}"] = num_hot / num_all if num_all else None
            lookups[part][0] += num_hot
            lookups[part][1] += num_all
    hot_bytes = sum(summary["hot_bytes"] for summary in tables.values())
    total = _summarize(partition.total_rows, partition.total_hot, hot_bytes)
    for part, (num_hot, num_all) in lookups.items():
        total[f"coverage_{part}"] = num_hot / num_all if num_all else None
    return {"tables": tables, "total": total}


def _summarize(num_rows: int, num_hot: int, hot_bytes: int) -> dict[str, Any]:
    return {
        "num_rows": num_rows,
        "hot_rows": num_hot,
        "hot_rows_frac": num_hot / num_rows if num_rows else 0.0,
        "hot_bytes": hot_bytes,
    }


def write_partition(
    placement: Placement,
    output: Path,
    *,
    parameters: Mapping[str, Any],
    summary: Mapping[str, Any],
    dataset_hash: str,
    profile_hash: str,
    planned_for: Mapping[str, int] | None = None,
) -> Artifact:
    """Writes a partition; reports read the policy's ``parameters`` and ``summary``.

    ``planned_for`` is num_ranks, ranks_per_host and batch_size of the plan.
    """
    partition = placement.partition
    tables = {
        name: {key: getattr(value, "value", value) for key, value in vars(table).items()}
        for name, table in placement.tables.items()
    }
    with scratch_directory(output, kind=KIND) as scratch:
        _write_rows(scratch / HOT_ROWS, {t: partition.hot(t) for t in partition.num_rows})
        if placement.popular_rows:
            _write_rows(scratch / POPULAR_ROWS, placement.popular_rows)
        return commit_artifact(
            scratch,
            output,
            kind=KIND,
            content={
                "policy": partition.policy,
                "parameters": dict(parameters),
                "planned_for": dict(planned_for or {}),
                "num_rows": {table: int(n) for table, n in partition.num_rows.items()},
                "placement": tables,
                **summary,
            },
            made_from={"dataset": dataset_hash, "profile": profile_hash},
        )


def _write_rows(path: Path, rows: Mapping[str, Rows] | Mapping[str, PopularRows]) -> None:
    # ``np.savez`` takes names as keywords and so fails for a table named "file".
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for table, of_table in rows.items():
            # A fixed time stamp: equal partitions have equal bytes, hence equal hashes.
            member = zipfile.ZipInfo(f"{table}.npy")
            with archive.open(member, "w", force_zip64=True) as file:
                np.lib.format.write_array(file, of_table, allow_pickle=False)


def _read_rows(artifact: Artifact, name: str) -> dict[str, Any]:
    if name not in artifact.files:
        return {}
    tables = artifact.content["num_rows"]  # of the manifest, not of this file
    with artifact.parsing(name), np.load(artifact.file(name), allow_pickle=False) as arrays:
        return {table: arrays[table] for table in tables}


def read_placement(path: Path) -> tuple[Placement, Artifact]:
    """Reads a partition with the exchange and tier of each table.

    Raises:
        ArtifactError: If it is missing, incomplete or altered, lists rows outside its tables, or
            lacks exchanges and tiers.
    """
    artifact = read_artifact(path, kind=KIND, verify=Verify.full)
    content = artifact.content
    with artifact.parsing():
        artifact.file(HOT_ROWS)
        hot_rows = _read_rows(artifact, HOT_ROWS)
        partition = Partition(dict(content["num_rows"]), hot_rows, policy=content["policy"])
        tables = {name: read_table(table) for name, table in content["placement"].items()}
        popular_rows = _read_rows(artifact, POPULAR_ROWS)
        return Placement(partition, tables, popular_rows), artifact


def most_accessed(
    split: SplitTables,
    counts: Mapping[str, Rows],
    histograms: Mapping[str, CountHistogram],
    policy: str,
) -> Placement:
    """Returns the placement of a split whose hot rows are the most accessed rows of each table.

    If there are too few seen rows, unseen rows are added.

    Args:
        split: The number of hot rows, and the placement of the others.
        counts: The profile's int64 (R,) counts by table.
        histograms: Their histograms.
        policy: Name of the policy that chose them, for reports.
    """
    hot_rows = {
        table: top_rows(rows, num_hot, histograms[table])
        if (num_hot := split.num_hot[table]) <= histograms[table].num_distinct
        else order_all_rows(rows)[:num_hot]
        for table, rows in counts.items()
    }
    partition = Partition({table: int(c.size) for table, c in counts.items()}, hot_rows, policy)
    return Placement(partition, dict(split.tables))
