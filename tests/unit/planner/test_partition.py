import numpy as np
import pytest

from hotrec.artifact import ArtifactError, commit_artifact, scratch_directory
from hotrec.cost_model.profile import Profile, Sampling
from hotrec.planner.partition import (
    most_accessed,
    read_placement,
    summarize_partition,
    write_partition,
)
from hotrec.planner.plan import SplitTables
from hotrec.types import (
    POPULAR_ROW,
    Exchange,
    HotExchange,
    Partition,
    Placement,
    RowFetch,
    Sharding,
    TablePlacement,
    Tier,
)

# A table may be called "file", which np.savez cannot take as a name.
COUNTS = {"file": np.array([5, 0, 3, 2]), "t/x": np.array([0, 0]), "big": np.arange(10)}
HELDOUT = {"file": np.array([1, 1, 0, 2]), "t/x": np.array([0, 0]), "big": np.arange(10)[::-1]}
ROW_BYTES = {"file": 100, "t/x": 10, "big": 1}
PROFILE = Profile(10, 4, 14, Sampling(), COUNTS, HELDOUT)
PARTITION = Partition(
    {"file": 4, "t/x": 2, "big": 10},
    {"file": np.array([0, 2]), "big": np.array([9, 8, 7])},
    policy="by hand",
)


TABLES = {
    "file": TablePlacement(tier=Tier.HOST_CACHED, cache_load_frac=0.3),
    "t/x": TablePlacement(Exchange.POOLED, Sharding.TABLE_WISE),
    "big": TablePlacement(),
}


def write(path):
    return write_partition(
        Placement(PARTITION, TABLES, is_hot_dense=True),
        path,
        parameters={"budget_bytes": 5},
        summary=summarize_partition(PARTITION, PROFILE, ROW_BYTES),
        dataset_hash="d1",
        profile_hash="p1",
    )


def test_summary_by_hand():
    summary = summarize_partition(PARTITION, PROFILE, ROW_BYTES)
    assert summary["tables"]["file"] == {
        "num_rows": 4,
        "hot_rows": 2,
        "hot_rows_frac": 0.5,
        "hot_bytes": 200,
        "row_bytes": 100,
        "coverage_train": 0.8,
        "coverage_heldout": 0.25,
    }
    assert summary["tables"]["t/x"]["coverage_train"] is None
    assert summary["tables"]["t/x"]["hot_rows"] == 0
    assert summary["total"] == {
        "num_rows": 16,
        "hot_rows": 5,
        "hot_rows_frac": 5 / 16,
        "hot_bytes": 203,
        "coverage_train": pytest.approx((8 + 24) / (10 + 45)),
        "coverage_heldout": pytest.approx((1 + 3) / (4 + 45)),
    }


def test_summary_without_heldout_data():
    profile = Profile(10, 0, 10, Sampling(), COUNTS)
    summary = summarize_partition(PARTITION, profile, ROW_BYTES)
    assert summary["total"]["coverage_heldout"] is None
    assert summary["tables"]["file"]["coverage_heldout"] is None


def test_the_most_accessed_rows_are_hot():
    """As many of each table as the split has, rows that were never seen last, ties by number."""
    tables = {**TABLES, "t/x": TablePlacement()}
    split = SplitTables({"file": 2, "t/x": 1, "big": 10}, tables, HotExchange.dense)
    found = most_accessed(split, COUNTS, PROFILE.build_histograms(), "by cost")
    rows = {"file": [0, 2], "t/x": [0], "big": [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]}
    assert {table: found.partition.hot(table).tolist() for table in COUNTS} == rows
    assert found.partition.num_rows == PARTITION.num_rows
    assert (found.tables, found.is_hot_dense) == (tables, True)
    assert found.partition.policy == "by cost"


def test_artifact_round_trip(tmp_path):
    artifact = write(tmp_path / "partition")
    placement, again = read_placement(tmp_path / "partition")
    assert again.content_hash == artifact.content_hash == write(tmp_path / "b").content_hash
    assert again.made_from == {"dataset": "d1", "profile": "p1"}
    assert again.content["policy"] == placement.partition.policy == "by hand"
    assert again.content["parameters"] == {"budget_bytes": 5}
    assert placement.partition.num_rows == PARTITION.num_rows
    assert (placement.tables, placement.is_hot_dense) == (TABLES, True)
    for table in PARTITION.num_rows:
        assert placement.partition.hot(table).dtype == np.int64
        assert placement.partition.hot(table).tolist() == PARTITION.hot(table).tolist()


def test_popular_rows_round_trip(tmp_path):
    popular = {
        "file": np.array([(1, 0.5), (3, 1)], POPULAR_ROW),
        "t/x": np.array([(0, 0.25)], POPULAR_ROW),
        "big": np.empty(0, POPULAR_ROW),
    }
    slots = TablePlacement(tier=Tier.CACHED, cache_load_frac=0.5, row_fetch=RowFetch.mapped)
    placed = Placement(PARTITION, dict.fromkeys(TABLES, slots), popular_rows=popular)
    given = {"parameters": {}, "summary": {}, "dataset_hash": "d1", "profile_hash": "p1"}
    write_partition(placed, tmp_path / "p", **given)
    found, _ = read_placement(tmp_path / "p")
    assert found.tables == placed.tables
    assert {t: rows.tolist() for t, rows in found.popular_rows.items()} == {
        "file": [(1, 0.5), (3, 1)], "t/x": [(0, 0.25)], "big": [],
    }  # fmt: skip


def test_partitions_of_before_there_were_two_ways_to_fetch_are_read(tmp_path):
    table = {"exchange": "rows", "sharding": "row_wise", "tier": "cached", "row_type": "fp32"}
    tables = {"t": {**table, "cache_load_frac": 0.5}}
    with scratch_directory(tmp_path / "p", kind="partition") as scratch:
        np.savez(scratch / "hot_rows.npz", t=np.array([2]))
        content = {
            **{"policy": "by hand", "num_rows": {"t": 7}},
            "placement": {"is_hot_dense": False, "tables": tables},
        }
        commit_artifact(scratch, tmp_path / "p", kind="partition", content=content)
    assert read_placement(tmp_path / "p")[0].tables["t"].row_fetch is RowFetch.staged


def test_altered_hot_rows_are_found(tmp_path):
    write(tmp_path / "p")
    path = tmp_path / "p" / "hot_rows.npz"
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(ArtifactError, match=r"hot_rows\.npz: expected checksum"):
        read_placement(tmp_path / "p")


def test_rows_outside_their_table_are_found(tmp_path):
    with scratch_directory(tmp_path / "p", kind="partition") as scratch:
        np.savez(scratch / "hot_rows.npz", t=np.array([7]))
        content = {"policy": "by hand", "num_rows": {"t": 7}}
        commit_artifact(scratch, tmp_path / "p", kind="partition", content=content)
    with pytest.raises(ArtifactError, match=r"expected hot rows in 0\.\.6, got 7"):
        read_placement(tmp_path / "p")
