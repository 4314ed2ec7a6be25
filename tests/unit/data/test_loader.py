import subprocess
import sys
from itertools import islice

import numpy as np
import pytest
import torch

from hotrec.data.chunks import Dataset, Jagged
from hotrec.data.loader import make_loader, num_steps
from tests.unit.data.logs import ONE_HOT_SCHEMA, SCHEMA, write_dataset

SIZES = {"train": 45, "valid": 9, "test": 0}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    path = tmp_path_factory.mktemp("loader") / "dataset"
    return path, write_dataset(path, SIZES)


def loader(path, split="train", **settings):
    defaults = {"batch_size": 4, "rank": 0, "world_size": 1, "seed": 5, "epochs": 1}
    return make_loader(path, split, **{**defaults, **settings})


def samples_of(batch) -> list[int]:
    """The number that each sample carries in its first dense column; padding left out."""
    return [int(n) for n, w in zip(batch.dense[:, 0], batch.weights, strict=True) if w == 1]


def assert_same_batch(one, other):
    assert torch.equal(one.dense, other.dense)
    assert torch.equal(one.labels, other.labels)
    assert torch.equal(one.weights, other.weights)
    assert one.num_global_samples == other.num_global_samples
    assert one.sparse.keys() == other.sparse.keys()
    assert torch.equal(one.sparse.values(), other.sparse.values())
    assert torch.equal(one.sparse.lengths(), other.sparse.lengths())


@pytest.mark.parametrize("schema", [SCHEMA, ONE_HOT_SCHEMA], ids=["multi_hot", "one_hot"])
def test_a_batch_holds_what_the_chunks_hold(tmp_path, schema):
    block = write_dataset(tmp_path / "d", {"train": 45}, schema=schema)["train"]
    num_seen = 0
    for batch in loader(tmp_path / "d"):
        samples = samples_of(batch)
        num_seen += len(samples)
        assert torch.equal(batch.labels, torch.from_numpy(block.label[samples]))
        assert torch.equal(batch.dense, torch.from_numpy(block.dense[samples]))
        assert batch.sparse.keys() == list(schema.feature_names)
        assert batch.sparse.stride() == len(samples)
        assert batch.sparse.values().dtype == torch.int64
        for name, jagged in batch.sparse.to_dict().items():
            ids = block.features[name]
            for position, sample in enumerate(samples):
                if isinstance(ids, Jagged):
                    expected = ids.values[ids.offsets[sample] : ids.offsets[sample + 1]]
                else:
                    expected = ids[sample : sample + 1]
                assert jagged.to_dense()[position].tolist() == expected.tolist()
    assert num_seen == 45


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_ranks_take_equal_steps_and_see_every_sample_once(dataset, world_size):
    path, _ = dataset
    ranks = [list(loader(path, rank=rank, world_size=world_size)) for rank in range(world_size)]
    steps = num_steps(Dataset.open(path), "train", 4, world_size)
    assert [len(batches) for batches in ranks] == [steps] * world_size
    seen = [sample for batches in ranks for batch in batches for sample in samples_of(batch)]
    assert sorted(seen) == list(range(45))
    for step in range(steps):
        size = sum(len(samples_of(batches[step])) for batches in ranks)
        assert [batches[step].num_global_samples for batches in ranks] == [size] * world_size


def test_a_rank_without_samples_gets_one_padding_sample(tmp_path):
    write_dataset(tmp_path / "d", {"train": 7})
    *_, last = loader(tmp_path / "d", batch_size=3, rank=1, world_size=2)
    assert last.num_global_samples == 1
    assert last.weights.tolist() == [0.0]
    assert last.labels.tolist() == [0.0]
    assert last.dense.tolist() == [[0.0, 0.0]]
    assert last.sparse.stride() == 1
    assert last.sparse.values().numel() == 0
    assert last.sparse.lengths().tolist() == [0, 0, 0]


def test_epochs_differ_and_an_endless_loader_goes_on(dataset):
    path, _ = dataset
    two = [samples_of(batch) for batch in loader(path, epochs=2)]
    assert len(two) == 24
    first, second = sum(two[:12], []), sum(two[12:], [])
    assert sorted(first) == sorted(second) == list(range(45))
    assert first != second
    endless = [samples_of(batch) for batch in islice(loader(path, epochs=None), 30)]
    assert endless[:24] == two


def test_evaluation_goes_through_the_files_in_order_and_can_be_repeated(dataset):
    path, _ = dataset
    evaluation = loader(path, "valid", shuffle=False, batch_size=100)
    assert [samples_of(batch) for batch in evaluation] == [list(range(9))]
    assert [samples_of(batch) for batch in evaluation] == [list(range(9))]


def test_drop_last_leaves_out_the_partial_step(dataset):
    path, _ = dataset
    batches = list(loader(path, drop_last=True))
    assert [len(samples_of(batch)) for batch in batches] == [4] * 11


def test_the_number_of_workers_changes_nothing(dataset):
    path, _ = dataset
    expected = list(loader(path, epochs=2))
    for num_workers in (1, 2):
        found = list(loader(path, epochs=2, num_workers=num_workers))
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same_batch(one, other)


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_a_saved_position_continues_exactly(dataset, num_workers):
    path, _ = dataset
    expected = list(loader(path, epochs=3))
    for stop in (0, 5, 12, 35):
        first = loader(path, epochs=3, num_workers=num_workers)
        batches = list(islice(first, stop))
        state = first.state_dict()
        resumed = loader(path, epochs=3, num_workers=num_workers)
        resumed.load_state_dict(state)
        batches += list(resumed)
        assert len(batches) == len(expected)
        for one, other in zip(batches, expected, strict=True):
            assert_same_batch(one, other)


def test_a_position_survives_saving_as_a_file(dataset, tmp_path):
    path, _ = dataset
    first = loader(path, num_workers=2)
    expected = [samples_of(batch) for batch in first]
    first = loader(path, num_workers=2)
    head = [samples_of(batch) for batch in islice(first, 7)]
    torch.save(first.state_dict(), tmp_path / "state")
    resumed = loader(path, num_workers=2)
    resumed.load_state_dict(torch.load(tmp_path / "state", weights_only=False))
    assert head + [samples_of(batch) for batch in resumed] == expected


@pytest.mark.parametrize(
    "change", [{"batch_size": 5}, {"seed": 6}, {"shuffle": False}, {"world_size": 2}]
)
def test_a_position_of_another_run_is_refused(dataset, change):
    path, _ = dataset
    first = loader(path)
    next(iter(first))
    resumed = loader(path, **change)
    resumed.load_state_dict(first.state_dict())
    [name] = change
    with pytest.raises(ValueError, match=f"loader state {name}: expected"):
        next(iter(resumed))


def total_ids(ids) -> int:
    return int(ids.values().sum())


def test_the_transform_is_applied_in_the_worker(dataset):
    path, _ = dataset
    plain = [total_ids(batch.sparse) for batch in loader(path)]
    routed = loader(path, transform=total_ids, num_workers=1)
    assert [batch.sparse for batch in routed] == plain


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 46}, r"at least 46 samples \(batch size 46 on 1 ranks\), got 45"),
        ({"batch_size": 23, "world_size": 2}, "at least 46 samples"),
        ({"split": "test", "shuffle": False}, "split test: expected at least 1 samples"),
        ({"batch_size": 0}, "expected batch_size >= 1"),
        ({"rank": 1}, "0 <= rank < world_size"),
        ({"world_size": 0}, "world_size 0"),
    ],
)
def test_what_cannot_be_loaded_is_refused(dataset, settings, message):
    path, _ = dataset
    with pytest.raises(ValueError, match=message):
        loader(path, **settings)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("schema", "feature", "row"),
    [(SCHEMA, "bag", 1000), (SCHEMA, "a", -1), (ONE_HOT_SCHEMA, "b", 1000)],
)
def test_an_id_outside_its_table_is_named(tmp_path, schema, feature, row, num_workers):
    from hotrec.artifact import scratch_directory
    from hotrec.data.chunks import ChunkWriter, commit_dataset
    from tests.unit.data.logs import random_block

    block = random_block(20, schema)
    ids = block.features[feature]
    if isinstance(ids, Jagged):
        ids.values[ids.offsets[15]] = row
        assert ids.offsets[16] > ids.offsets[15]
    else:
        ids[15] = row
    with scratch_directory(tmp_path / "d", kind="dataset") as scratch:
        writer = ChunkWriter(scratch, "train", schema, 8)
        writer.write(block)
        commit_dataset(scratch, tmp_path / "d", schema, {"train": writer.close()}, {})
    table = next(f.table for f in schema.features if f.name == feature)
    with pytest.raises(
        ValueError,
        match=rf"table {table}: expected rows in 0\.\.\d+, got row {row} in feature {feature} "
        r"\(chunk chunks/train-00001\.arrow, sample 7\)",
    ):
        list(loader(tmp_path / "d", num_workers=num_workers))


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        ("label", np.nan, "label: expected 0 or 1, got nan"),
        ("label", 2.0, "label: expected 0 or 1, got 2.0"),
        ("dense", np.inf, "dense column d1: expected a finite number, got inf"),
    ],
)
def test_labels_and_dense_values_are_checked(tmp_path, where, value, message):
    from hotrec.artifact import scratch_directory
    from hotrec.data.chunks import ChunkWriter, commit_dataset
    from tests.unit.data.logs import random_block

    block = random_block(9)
    (block.label if where == "label" else block.dense[:, 1])[4] = value
    with scratch_directory(tmp_path / "d", kind="dataset") as scratch:
        writer = ChunkWriter(scratch, "train", SCHEMA, 9)
        writer.write(block)
        commit_dataset(scratch, tmp_path / "d", SCHEMA, {"train": writer.close()}, {})
    with pytest.raises(ValueError, match=rf"{message} \(chunk .*train-00000\.arrow, sample 4\)"):
        list(loader(tmp_path / "d"))


LEFT_OPEN = """
import os, signal, sys
from hotrec.data.loader import make_loader
loader = make_loader(sys.argv[1], "train", batch_size=4, rank=0, world_size=1, num_workers=2)
batches = iter(loader)
next(batches)
for worker in batches._workers:
    os.system(f"kill -TERM {worker.pid}")  # from another process: it must not end the worker
for step in range(20):
    next(batches)
print("alive")
sys.keep = batches  # so that it is still there at exit, as it is in a traceback
"""


def test_workers_outlive_other_peoples_sigterm_but_not_their_rank(dataset):
    path, _ = dataset
    # The environment of the tests may ignore SIGTERM, which children inherit.
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LEFT_OPEN, str(path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "alive\n", done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize("num_taken", [0, 1, 3])
def test_kept_workers_begin_anew_each_time(dataset, num_taken):
    """However much of an iteration was taken: what they made ahead is thrown away."""
    path, _ = dataset
    expected = list(loader(path, "valid", shuffle=False))
    kept = loader(path, "valid", shuffle=False, num_workers=2, keep_workers=True)
    workers = set()
    for _ in range(3):
        iterator = iter(kept)
        workers.add(tuple(worker.pid for worker in iterator._workers))
        list(islice(iterator, num_taken))
    for one, other in zip(kept, expected, strict=True):
        assert_same_batch(one, other)
    assert len(workers) == 1
