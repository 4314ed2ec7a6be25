import numpy as np
import pytest

from hotrec.artifact import ArtifactError
from hotrec.cost_model.profile import Profile, Sampling
from hotrec.planning.partition import (
    check_partition,
    read_partition,
    summarize_partition,
    write_partition,
)
from hotrec.planning.policies import choose_budget, choose_fraction
from hotrec.types import Partition, Placement

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


def write(path, partition=PARTITION, dataset_hash="d1"):
    return write_partition(
        Placement.alike(partition),
        path,
        parameters={"budget_bytes": 5},
        summary=summarize_partition(partition, PROFILE, ROW_BYTES),
        dataset_hash=dataset_hash,
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


def test_artifact_round_trip(tmp_path):
    artifact = write(tmp_path / "partition")
    partition, again = read_partition(tmp_path / "partition")
    assert again.content_hash == artifact.content_hash
    assert again.made_from == {"dataset": "d1", "profile": "p1"}
    assert again.content["policy"] == partition.policy == "by hand"
    assert again.content["parameters"] == {"budget_bytes": 5}
    assert partition.num_rows == {"file": 4, "t/x": 2, "big": 10}
    for table in PARTITION.num_rows:
        assert partition.hot(table).dtype == np.int64
        assert partition.hot(table).tolist() == PARTITION.hot(table).tolist()


def test_same_partition_has_the_same_hash(tmp_path):
    assert write(tmp_path / "a").content_hash == write(tmp_path / "b").content_hash
    other = choose_fraction(COUNTS, hot_frac=0.5)
    assert write(tmp_path / "c", other).content_hash != write(tmp_path / "a").content_hash


def test_large_partition_survives(tmp_path):
    counts = {"t": np.random.default_rng(0).integers(0, 1000, 300_000)}
    partition = choose_budget(counts, budget_bytes=100_000 * 68, row_bytes={"t": 68})
    write_partition(
        Placement.alike(partition),
        tmp_path / "p",
        parameters={},
        summary={},
        dataset_hash="d",
        profile_hash="p",
    )
    assert np.array_equal(read_partition(tmp_path / "p")[0].hot("t"), partition.hot("t"))
    assert partition.num_hot("t") == 100_000


def test_check_accepts_its_own_dataset(tmp_path):
    check_partition(write(tmp_path / "p"), dataset_hash="d1", num_rows=PARTITION.num_rows)


@pytest.mark.parametrize(
    ("dataset_hash", "num_rows", "message"),
    [
        ("d2", {"file": 4, "t/x": 2, "big": 10}, "made from dataset d2, got one made from d1"),
        ("d1", {"file": 5, "t/x": 2, "big": 10}, "table file: expected 5 rows .* got 4"),
        ("d1", {"file": 4, "t/x": 2}, "table big: expected None rows .* got 10"),
        ("d1", {"file": 4, "t/x": 2, "big": 10, "z": 1}, "table z: expected 1 rows .* got None"),
    ],
)
def test_check_refuses_another_dataset(tmp_path, dataset_hash, num_rows, message):
    artifact = write(tmp_path / "p")
    with pytest.raises(ArtifactError, match=message):
        check_partition(artifact, dataset_hash=dataset_hash, num_rows=num_rows)


def test_altered_hot_rows_are_found(tmp_path):
    write(tmp_path / "p")
    path = tmp_path / "p" / "hot_rows.npz"
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(ArtifactError, match=r"hot_rows\.npz: expected checksum"):
        read_partition(tmp_path / "p")


def test_a_cut_archive_is_found(tmp_path):
    write(tmp_path / "p")
    path = tmp_path / "p" / "hot_rows.npz"
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(ArtifactError, match="expected .* bytes, got 50"):
        read_partition(tmp_path / "p", verify="size")
