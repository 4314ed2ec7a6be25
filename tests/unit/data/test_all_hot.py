from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hotrec.artifact import MANIFEST, ArtifactError, scratch_directory
from hotrec.data import all_hot
from hotrec.data.all_hot import count_steps_of_kinds, read_all_hot, write_all_hot
from hotrec.data.chunks import Block, ChunkWriter, Dataset, Jagged, commit_dataset
from hotrec.data.loader import make_loader
from hotrec.types import Partition
from tests.unit.data.logs import ONE_HOT_SCHEMA, SCHEMA, random_block, write_dataset

NUM_ROWS = {"t_a": 10, "t_b": 1000}
HASH = "p" * 64


def partition_of(num_a: int, num_b: int, seed: int = 0) -> Partition:
    rng = np.random.default_rng(seed)
    hot = {
        table: rng.permutation(NUM_ROWS[table])[:num].astype(np.int64)
        for table, num in (("t_a", num_a), ("t_b", num_b))
    }
    return Partition(NUM_ROWS, hot)


def expected_all_hot(block: Block, partition: Partition, schema) -> list[bool]:
    """One sample after the other, by sets."""
    hot = {table: set(partition.hot(table).tolist()) for table in NUM_ROWS}
    kinds = []
    for sample in range(len(block)):
        is_all_hot = True
        for feature in schema.features:
            ids = block.features[feature.name]
            if isinstance(ids, Jagged):
                bag = ids.values[ids.offsets[sample] : ids.offsets[sample + 1]].tolist()
            else:
                bag = [int(ids[sample])]
            is_all_hot = is_all_hot and hot[feature.table].issuperset(bag)
        kinds.append(is_all_hot)
    return kinds


def find(folder: Path, partition: Partition, name: str = "all_hot", split: str = "train"):
    dataset = Dataset.open(folder / "d")
    return write_all_hot(dataset, split, partition, partition_hash=HASH, output=folder / name)


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
    expected = expected_all_hot(block, partition, schema)
    assert kinds_found(samples) == expected
    assert samples.num_samples == num_samples
    assert samples.frac == (sum(expected) / num_samples if num_samples else 0)
    for kind in (True, False):
        assert samples.subset(is_all_hot=kind).num_samples == expected.count(kind)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("all_hot")
    write_dataset(path / "d", {"train": 90, "valid": 9})
    find(path, partition_of(8, 900))
    return path


def read(folder: Path, **changes):
    dataset = Dataset.open(changes.get("dataset", folder / "d"))
    return read_all_hot(
        dataset,
        changes.get("split", "train"),
        partition_hash=changes.get("partition_hash", HASH),
        path=folder / "all_hot",
    )


def test_what_was_kept_is_read_back(folder):
    again = find(folder, partition_of(8, 900), "again")
    kept = read(folder)
    assert kept.artifact.content_hash == again.artifact.content_hash
    assert kinds_found(kept) == kinds_found(again)
    assert 0 < sum(kept.num_all_hot) < 90


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"partition_hash": "q" * 64}, "all-hot samples of the partition qqqq.* got those of pppp"),
        ({"split": "valid"}, "all-hot samples of split valid, got those of train"),
        ({"dataset": "other"}, "all-hot samples of the dataset"),
    ],
)
def test_stale_ones_are_refused(folder, tmp_path, change, message):
    if "dataset" in change:
        write_dataset(tmp_path / "other", {"train": 80})
        change = {"dataset": tmp_path / "other"}
    with pytest.raises(ArtifactError, match=message):
        read(folder, **change)


def test_altered_ones_are_refused(tmp_path):
    write_dataset(tmp_path / "d", {"train": 90})
    find(tmp_path, partition_of(8, 900))
    bits = tmp_path / "all_hot" / all_hot.BITS
    content = bytearray(bits.read_bytes())
    content[-1] ^= 255
    bits.write_bytes(content)
    with pytest.raises(ArtifactError, match="changed after"):
        read(tmp_path)


def test_the_manifest_names_what_it_was_made_from(folder):
    manifest = json.loads((folder / "all_hot" / MANIFEST).read_text())
    dataset = Dataset.open(folder / "d")
    assert manifest["made_from"] == {"dataset": dataset.artifact.content_hash, "partition": HASH}


def test_a_partition_of_other_tables_is_refused(folder):
    other = Partition({"t_a": 10, "t_b": 999})
    with pytest.raises(ValueError, match="partition: expected the tables and rows"):
        find(folder, other, "other")
    assert not (folder / "other").exists()


@pytest.mark.parametrize(("feature", "row"), [("a", -1), ("b", 1000), ("bag", 1000)])
def test_an_id_outside_its_table_is_refused(tmp_path, feature, row):
    block = random_block(20)
    ids = block.features[feature]
    if isinstance(ids, Jagged):
        ids.values[-1] = row
    else:
        ids[15] = row
    with scratch_directory(tmp_path / "d", kind="dataset") as scratch:
        writer = ChunkWriter(scratch, "train", SCHEMA, 8)
        writer.write(block)
        commit_dataset(scratch, tmp_path / "d", SCHEMA, {"train": writer.close()}, {})
    with pytest.raises(ValueError, match=rf"got row {row} in feature {feature} \(chunk .*arrow\)"):
        find(tmp_path, partition_of(8, 900))


# Batches of one kind.


def loader(folder: Path, kind: bool | None, **changes):
    arguments = {"batch_size": 4, "rank": 0, "world_size": 1, "seed": 5, "epochs": 1, **changes}
    subset = None if kind is None else read(folder).subset(is_all_hot=kind)
    return make_loader(folder / "d", "train", subset=subset, **arguments)


def numbers(batch) -> list[int]:
    return [int(n) for n, w in zip(batch.dense[:, 0], batch.weights, strict=True) if w == 1]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_an_epoch_of_both_kinds_holds_every_sample_once(folder, world_size):
    kinds = kinds_found(read(folder))
    steps = count_steps_of_kinds(read(folder), batch_size=4, world_size=world_size)
    seen = []
    for is_all_hot, num_steps in zip((True, False), steps, strict=True):
        ranks = [
            list(loader(folder, is_all_hot, rank=rank, world_size=world_size))
            for rank in range(world_size)
        ]
        assert [len(batches) for batches in ranks] == [num_steps] * world_size
        for step in range(num_steps):
            batches = [batches[step] for batches in ranks]
            of_step = [number for batch in batches for number in numbers(batch)]
            assert [batch.num_global_samples for batch in batches] == [len(of_step)] * world_size
            assert [batch.is_all_hot for batch in batches] == [is_all_hot] * world_size
            assert [kinds[number] for number in of_step] == [is_all_hot] * len(of_step)
            if step < num_steps - 1:
                assert len(of_step) == 4 * world_size
            seen += of_step
    assert sorted(seen) == list(range(90))


def test_ids_of_all_hot_batches_are_hot(folder):
    partition = partition_of(8, 900)
    hot = {f.name: set(partition.hot(f.table).tolist()) for f in SCHEMA.features}
    num_cold = {}
    for kind in (True, False):
        batches = list(loader(folder, kind))
        num_cold[kind] = [
            sum(
                number not in hot[name]
                for name, jagged in batch.sparse.to_dict().items()
                for number in jagged.values().tolist()
            )
            for batch in batches
        ]
    assert set(num_cold[True]) == {0}
    assert min(num_cold[False]) > 0


def test_epochs_differ(folder):
    num_steps, _ = count_steps_of_kinds(read(folder), batch_size=4, world_size=1)
    two = [numbers(batch) for batch in loader(folder, True, epochs=2)]
    first, second = sum(two[:num_steps], []), sum(two[num_steps:], [])
    assert sorted(first) == sorted(second)
    assert first != second


def test_fewer_samples_than_a_global_batch_make_one_step(folder):
    num_mixed = 90 - sum(read(folder).num_all_hot)
    ranks = [loader(folder, False, batch_size=50, rank=rank, world_size=4) for rank in range(4)]
    batches = [list(batches) for batches in ranks]
    assert [len(of_rank) for of_rank in batches] == [1] * 4
    assert sum(len(numbers(batch)) for [batch] in batches) == num_mixed
    assert [batch.num_global_samples for [batch] in batches] == [num_mixed] * 4


def test_a_rank_without_samples_gets_a_padding_sample_of_the_kind(folder):
    num_all_hot = sum(read(folder).num_all_hot)
    world_size = num_all_hot - 1  # so that the last step holds one sample
    *_, last = loader(folder, True, batch_size=1, rank=1, world_size=world_size)
    assert last.is_all_hot
    assert last.num_global_samples == 1
    assert last.weights.tolist() == [0.0]
    assert last.sparse.values().numel() == 0


@pytest.mark.parametrize(("kind", "num_hot"), [(True, (10, 1000)), (False, (0, 1000))])
def test_where_all_samples_are_of_one_kind_the_order_is_the_ordinary_one(tmp_path, kind, num_hot):
    write_dataset(tmp_path / "d", {"train": 50})
    samples = find(tmp_path, partition_of(*num_hot))
    assert samples.frac == float(kind)
    assert samples.subset(is_all_hot=not kind).num_samples == 0
    found = [numbers(batch) for batch in loader(tmp_path, kind, epochs=2)]
    assert found == [numbers(batch) for batch in loader(tmp_path, None, epochs=2)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_saved_position_continues_exactly(folder, num_workers):
    expected = [numbers(batch) for batch in loader(folder, True, epochs=2)]
    for stop in (3, len(expected) // 2):
        first = loader(folder, True, epochs=2, num_workers=num_workers)
        found = [numbers(batch) for batch in islice(first, stop)]
        resumed = loader(folder, True, epochs=2, num_workers=num_workers)
        resumed.load_state_dict(first.state_dict())
        found += [numbers(batch) for batch in resumed]
        assert found == expected


@pytest.mark.parametrize(("saved", "loaded"), [(True, False), (None, True), (True, None)])
def test_a_position_in_other_samples_is_refused(folder, saved, loaded):
    first = loader(folder, saved)
    next(iter(first))
    resumed = loader(folder, loaded)
    resumed.load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match=r"loader state (samples|is_all_hot): expected"):
        next(iter(resumed))
