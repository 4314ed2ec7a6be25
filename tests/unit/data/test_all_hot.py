from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hotrec.artifact import ArtifactError
from hotrec.data import all_hot
from hotrec.data.all_hot import read_all_hot, write_all_hot
from hotrec.data.chunks import Dataset
from hotrec.types import Partition
from tests.unit.data.logs import (
    ONE_HOT_SCHEMA,
    SCHEMA,
    bag,
    write_dataset,
)

NUM_ROWS = {"t_a": 10, "t_b": 1000}
HASH = "p" * 64


def partition_of(num_a: int, num_b: int, seed: int = 0) -> Partition:
    rng = np.random.default_rng(seed)
    hot = {
        table: rng.permutation(NUM_ROWS[table])[:num].astype(np.int64)
        for table, num in (("t_a", num_a), ("t_b", num_b))
    }
    return Partition(NUM_ROWS, hot)


def find(folder: Path, partition: Partition, name: str = "all_hot"):
    dataset = Dataset.open(folder / "d")
    return write_all_hot(dataset, "train", partition, partition_hash=HASH, output=folder / name)


def kinds_found(samples) -> list[bool]:
    """The kind of every sample, in the order of the files."""
    kinds = []
    for chunk, size in enumerate(samples.chunk_sizes):
        rows = {kind: samples.subset(is_all_hot=kind).rows(chunk) for kind in (True, False)}
        assert sorted([*rows[True], *rows[False]]) == list(range(size))
        assert all(list(part) == sorted(part) for part in rows.values())
        kinds += [row in set(rows[True].tolist()) for row in range(size)]
    return kinds


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 60),
    st.integers(0, 10),
    st.sampled_from([0, 1, 300, 700, 999, 1000]),
    st.sampled_from([SCHEMA, ONE_HOT_SCHEMA]),
    st.sampled_from([1, 3, 8, 1 << 16]),
)
@example(60, 10, 700, SCHEMA, 3)  # chunks of 7, so bags that do not start at the chunk's first id
def test_kinds_are_those_of_a_plain_loop(
    tmp_path_factory, num_samples, num_a, num_b, schema, samples_at_once
):
    folder = tmp_path_factory.mktemp("kinds")
    block = write_dataset(folder / "d", {"train": num_samples}, schema=schema)["train"]
    partition = partition_of(num_a, num_b, seed=num_samples)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(all_hot, "_SAMPLES_AT_ONCE", samples_at_once)
        samples = find(folder, partition)
    hot = {table: set(partition.hot(table).tolist()) for table in NUM_ROWS}
    expected = [
        all(hot[f.table].issuperset(bag(block.features[f.name], i)) for f in schema.features)
        for i in range(num_samples)
    ]
    assert kinds_found(samples) == expected
    assert samples.num_samples == num_samples
    assert samples.frac == (sum(expected) / num_samples if num_samples else 0)
    for kind in (True, False):
        assert samples.subset(is_all_hot=kind).num_samples == expected.count(kind)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("all_hot")
    write_dataset(path / "d", {"train": 90, "valid": 9})
    write_dataset(path / "other", {"train": 80})
    find(path, partition_of(8, 900))
    return path


def read(folder: Path, dataset: str = "d", split: str = "train", partition_hash: str = HASH):
    opened = Dataset.open(folder / dataset)
    return read_all_hot(opened, split, partition_hash=partition_hash, path=folder / "all_hot")


def test_what_was_kept_is_read_back(folder):
    again, kept = find(folder, partition_of(8, 900), "again"), read(folder)
    assert kept.artifact.content_hash == again.artifact.content_hash
    assert kinds_found(kept) == kinds_found(again)
    assert 0 < sum(kept.num_all_hot) < 90


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"partition_hash": "q" * 64}, "partition qqqq.* got those of pppp"),
        ({"split": "valid"}, "split valid, got those of train"),
        ({"dataset": "other"}, "of the dataset"),
    ],
)
def test_stale_ones_are_refused(folder, change, message):
    with pytest.raises(ArtifactError, match=f"expected .*{message}"):
        read(folder, **change)
    with pytest.raises(ValueError, match="partition: expected"):
        find(folder, Partition({"t_a": 10, "t_b": 999}), "absent")


# Batches of one kind.
