import json
import subprocess
import sys
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from hotrec.data.all_hot import write_all_hot
from hotrec.data.chunks import Dataset
from hotrec.data.loader import num_steps
from hotrec.data.locality import ByOwner
from hotrec.data.tokens import ByTokens, SampleWork
from hotrec.types import Partition
from tests.unit.data.logs import (
    ONE_HOT_SCHEMA,
    SCHEMA,
    assert_holds,
    loader,
    random_block,
    samples_of,
    write_bad_id,
    write_blocks,
    write_dataset,
)

SIZES = {"train": 45, "valid": 9, "test": 0}
HOT = {"t_a": np.arange(9), "t_b": np.arange(900)}
BY_OWNER = ByOwner(SCHEMA, HOT, 2)
BY_TOKENS = ByTokens(SCHEMA.feature_names, SampleWork(1, {"bag": 1}))
ASSIGN = {"by_owner": BY_OWNER, "by_tokens": BY_TOKENS}
CUTS = ["all", "all_hot", "mixed", *ASSIGN]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("loader") / "dataset"
    write_dataset(path, SIZES)
    return path


@pytest.fixture(scope="module")
def cuts(path):
    """Settings of loaders by what they read."""
    partition = Partition({"t_a": 10, "t_b": 1000}, HOT)
    output = path.parent / "all_hot"
    dataset = Dataset.open(path)
    samples = write_all_hot(dataset, "train", partition, partition_hash="p", output=output)
    kinds = {"all_hot": True, "mixed": False}
    subsets = {name: {"subset": samples.subset(is_all_hot=kind)} for name, kind in kinds.items()}
    assigned = {name: {"assign": assign} for name, assign in ASSIGN.items()}
    return {"all": {}, **assigned, **subsets}


def assert_same_batch(one, other):
    for name in ("dense", "labels", "weights"):
        assert torch.equal(getattr(one, name), getattr(other, name))
    assert one.num_global_samples == other.num_global_samples
    assert one.is_all_hot == other.is_all_hot
    assert one.sparse.keys() == other.sparse.keys()
    assert torch.equal(one.sparse.values(), other.sparse.values())
    assert torch.equal(one.sparse.lengths(), other.sparse.lengths())


def test_a_rank_without_samples_gets_one_padding_sample(tmp_path):
    write_dataset(tmp_path / "d", {"train": 7})
    *_, last = loader(tmp_path / "d", batch_size=3, rank=1, world_size=2)
    assert last.num_global_samples == 1
    assert last.weights.tolist() == last.labels.tolist() == [0.0]
    assert last.dense.tolist() == [[0.0, 0.0]]
    assert last.sparse.stride() == 1
    assert last.sparse.values().numel() == 0
    assert last.sparse.lengths().tolist() == [0, 0, 0]


def start(path, world_size, num_workers, **settings):
    return [
        loader(path, rank=rank, world_size=world_size, num_workers=num_workers, **settings)
        for rank in range(world_size)
    ]


def take(ranks, most=None):
    """Some steps of all ranks, each a batch of every rank."""
    steps = [[*islice(batches, most)] for batches in ranks]
    return [*zip(*steps, strict=True)]


def samples_in(steps):
    return [sample for step in steps for batch in step for sample in samples_of(batch)]


@pytest.mark.slow
@settings(phases=[Phase.explicit, Phase.reuse, Phase.generate])  # to shrink takes minutes
@given(
    cut=st.sampled_from(CUTS),
    before=st.integers(1, 3),
    after=st.integers(1, 3),
    workers=st.tuples(st.sampled_from([0, 0, 1]), st.sampled_from([0, 0, 2])),
    batch_sizes=st.tuples(st.sampled_from([4, 7]), st.sampled_from([4, 7])),
    shuffle=st.booleans(),
    stop=st.integers(0, 12),
)
def test_cut_anywhere_any_ranks_go_on(
    path, cuts, cut, before, after, workers, batch_sizes, shuffle, stop
):
    """Every sample once an epoch; with the same ranks the same batches, unshuffled in order."""
    if cut == "by_owner":
        before = after = 2  # the owners are two ranks
    common = {"epochs": 2, "shuffle": shuffle, **cuts[cut]}
    first = start(path, before, workers[0], batch_size=batch_sizes[0], **common)
    taken = take(first, stop)
    state = json.loads(json.dumps(first[0].state_dict()))
    then = start(path, after, workers[1], batch_size=batch_sizes[1], **common)
    for batches in then:
        batches.load_state_dict(state)
    left = take(then)
    uncut = take(start(path, before, 0, batch_size=batch_sizes[0], **common))
    steps = num_steps(Dataset.open(path), "train", batch_sizes[0], before)
    assert cut in ("all_hot", "mixed") or len(uncut) == 2 * steps
    for step in [*taken, *left]:
        num = sum(len(samples_of(batch)) for batch in step)
        assert {batch.num_global_samples for batch in step} == {num}
    found, whole = samples_in(taken + left), samples_in(uncut)
    assert sorted(found) == sorted(whole)
    if cut == "all":
        assert sorted(whole) == sorted([*range(45), *range(45)])
    if not shuffle and cut == "all":
        assert found == [*range(45), *range(45)]
    if (before, batch_sizes[0]) == (after, batch_sizes[1]):
        for one, other in zip(taken + left, uncut, strict=True):
            for batch, expected in zip(one, other, strict=True):
                assert_same_batch(batch, expected)


@pytest.mark.parametrize("schema", [SCHEMA, ONE_HOT_SCHEMA], ids=["multi_hot", "one_hot"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_endless_loader_has_all_samples_of_each_epoch_in_another_order(
    tmp_path, schema, num_workers
):
    block = write_dataset(tmp_path / "d", {"train": 45}, schema=schema)["train"]
    settings = {"epochs": None, "num_workers": num_workers}
    batches = [*islice(loader(tmp_path / "d", **settings), 24)]
    for batch in batches:
        assert_holds(batch, block, schema)
    first, second = (sum(map(samples_of, part), []) for part in (batches[:12], batches[12:]))
    assert sorted(first) == sorted(second) == list(range(45))
    assert first != second
    routed = loader(tmp_path / "d", transform=total_ids, drop_last=True, **settings)
    totals = [total_ids(batch.sparse) for batch in batches[:11]]
    assert [batch.sparse for batch in islice(routed, 11)] == totals
    *_, last = loader(tmp_path / "d", drop_last=True)
    assert len(samples_of(last)) == 4


def total_ids(ids) -> int:
    """Stands for a router."""
    return int(ids.values().sum())


@pytest.mark.parametrize(
    ("saved", "change", "key"),
    [
        ("all", {"seed": 6}, "seed"),
        ("all", {"shuffle": False}, "shuffle"),
        ("all_hot", {}, "samples"),
        ("all", "all_hot", "samples"),
        ("all_hot", "mixed", "is_all_hot"),
    ],
)
def test_a_position_in_another_order_is_refused(path, cuts, saved, change, key):
    first = loader(path, **{"world_size": 2, **cuts[saved]})
    change = cuts[change] if isinstance(change, str) else change
    resumed = loader(path, **{"world_size": 2, **change})
    with pytest.raises(ValueError, match=f"loader state {key}: expected"):
        resumed.load_state_dict(first.state_dict())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 23, "world_size": 2}, "46 .*got 45"),
        ({"split": "test", "shuffle": False}, "split test: expected"),
        ({"batch_size": 0}, "batch_size"),
        ({"rank": 1}, "rank"),
    ],
)
def test_what_cannot_be_loaded_is_refused(path, settings, message):
    with pytest.raises(ValueError, match=message):
        loader(path, **settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schema", "feature", "row", "num_workers"),
    [(SCHEMA, "bag", 1000, 0), (SCHEMA, "a", -1, 0), (ONE_HOT_SCHEMA, "b", 1000, 1)],
)
def test_an_id_outside_its_table_is_named(tmp_path, schema, feature, row, num_workers):
    write_bad_id(tmp_path / "d", feature, row, schema)
    where = rf"row {row} in feature {feature} \(chunk chunks/train-00001\.arrow, sample 7\)"
    with pytest.raises(ValueError, match=rf"table t_.: expected .*, got {where}"):
        list(loader(tmp_path / "d", num_workers=num_workers))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_bad_id_stops_all_ranks_at_once(tmp_path, rank):
    """All of them read it, not the one alone that gets the sample."""
    write_bad_id(tmp_path / "d", "a", 10)
    batches = loader(tmp_path / "d", batch_size=10, rank=rank, world_size=2, assign=BY_OWNER)
    with pytest.raises(ValueError, match="table t_a: expected .* got row 10"):
        next(iter(batches))


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        ("label", np.nan, "label: expected 0 or 1, got nan"),
        ("label", 2.0, "label: expected 0 or 1, got 2.0"),
        ("dense", np.inf, "dense column d1: expected a finite number, got inf"),
    ],
)
def test_labels_and_dense_values_are_checked(tmp_path, where, value, message):
    block = random_block(9)
    (block.label if where == "label" else block.dense[:, 1])[4] = value
    write_blocks(tmp_path / "d", {"train": [block]}, 9)
    with pytest.raises(ValueError, match=rf"{message} \(chunk .*train-00000\.arrow, sample 4\)"):
        list(loader(tmp_path / "d"))


LEFT_OPEN = """
import multiprocessing, os, signal, sys
from hotrec.data.loader import make_loader
loader = make_loader(sys.argv[1], "train", batch_size=4, rank=0, world_size=1, num_workers=2)
batches = iter(loader)
next(batches)
for worker in multiprocessing.active_children():
    os.system(f"kill -TERM {worker.pid}")  # from another process: it must not end the worker
for step in range(20):
    next(batches)
print("alive")
sys.keep = batches  # so that it is still there at exit, as it is in a traceback
"""


@pytest.mark.slow
def test_workers_outlive_other_peoples_sigterm_but_not_their_rank(path):
    # The environment of the tests may ignore SIGTERM, which children inherit.
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LEFT_OPEN, str(path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "alive\n", done.stderr
    assert done.returncode == 0


KILLED = """
import multiprocessing, os, signal, sys
from hotrec.data.loader import make_loader
loader = make_loader(sys.argv[1], "train", batch_size=4, rank=0, world_size=1, num_workers=2)
batches = iter(loader)
next(batches)
print("killed", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_workers_end_after_their_rank_was_killed(path):
    command = [sys.executable, "-W", "ignore", "-c", KILLED, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"killed\n"
        process.stdout.read()  # until its workers, which hold it open, have ended


@pytest.mark.parametrize("num_taken", [0, 1, 3])
def test_kept_workers_begin_anew_each_time(path, num_taken):
    """However much of an iteration was taken: what they made ahead is thrown away."""
    expected = list(loader(path, "valid", shuffle=False))
    kept = loader(path, "valid", shuffle=False, num_workers=2, keep_workers=True)
    workers = set()
    for _ in range(3):
        iterator = iter(kept)
        workers.add(tuple(worker.pid for worker in kept._iterator._workers))
        list(islice(iterator, num_taken))
    for one, other in zip(kept, expected, strict=True):
        assert_same_batch(one, other)
    assert len(workers) == 1
