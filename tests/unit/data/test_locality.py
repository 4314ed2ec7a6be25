"""Which rank takes which sample of a global batch, by itself and in the loader."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotrec.data.all_hot import write_all_hot
from hotrec.data.chunks import Dataset
from hotrec.data.locality import NOBODY, ByOwner, ShardOwner, assign_by_owner
from hotrec.types import Feature, Partition, RowOrder, Schema, Table
from tests.unit.data.logs import (
    ONE_HOT_SCHEMA,
    SCHEMA,
    assert_holds,
    loader,
    samples_of,
    write_dataset,
)


def int64(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def owner_of_everything(
    schema: Schema, world_size: int, hot: dict[str, np.ndarray], hosts: Sequence[int] = ()
) -> ByOwner:
    shards = {}
    for table in schema.tables:
        block = -(-table.num_rows // world_size)
        ranks = range(-(-table.num_rows // block))
        shards[table.name] = [ShardOwner(rank * block, rank) for rank in ranks]
    return ByOwner(schema, shards, hot, hosts)


def test_samples_go_to_hosts_first() -> None:
    """Both samples read most from ranks 0 and 2, of one host, and more of rank 1 than of either."""
    owners, samples = int64(0, 0, 2, 2, 1, 1, 1, 0, 2, 1), int64(0, 0, 0, 0, 0, 0, 0, 1, 1, 1)
    rows, shares = np.arange(10), int64(1, 1, 0, 0)
    assert assign_by_owner(owners, rows, samples, shares).tolist() == [1, 0]
    hosts = int64(0, 1, 0, 1)
    assert assign_by_owner(owners, rows, samples, shares, hosts).tolist() == [0, 1]
    assert assign_by_owner(owners, rows, samples, int64(0, 1, 1, 0), hosts).tolist() == [2, 1]


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 40), st.integers(1, 5), st.integers(0, 200), st.integers(0, 2**31))
def test_every_rank_gets_its_share(num_samples, num_ranks, num_ids, seed) -> None:
    rng = np.random.default_rng(seed)
    num_ids = num_ids if num_samples else 0
    share, extra = divmod(num_samples, num_ranks)
    shares = share + (np.arange(num_ranks) < extra)
    owners = rng.integers(NOBODY, num_ranks, num_ids)
    rows, samples = rng.integers(0, 30, num_ids), rng.integers(0, max(num_samples, 1), num_ids)
    assigned = assign_by_owner(owners, rows, samples, shares)
    assert np.bincount(assigned, minlength=num_ranks).tolist() == shares.tolist()
    assert np.array_equal(assigned, assign_by_owner(owners, rows, samples, shares))
    # One host, or one rank per host: nothing changes. Other hosts: the shares stay.
    for hosts in (np.zeros(num_ranks, np.int64), rng.permutation(num_ranks)):
        same = assign_by_owner(owners, rows, samples, shares, hosts)
        assert np.array_equal(same, assigned)
    _, hosts = np.unique(rng.integers(0, 3, num_ranks), return_inverse=True)
    of_hosts = assign_by_owner(owners, rows, samples, shares, hosts)
    assert np.bincount(of_hosts, minlength=num_ranks).tolist() == shares.tolist()


def test_owners_are_those_of_the_shards_and_hot_rows_have_none() -> None:
    schema = Schema(
        dense=(),
        features=(Feature("x", "b"), Feature("y", "a"), Feature("z", "pooled")),
        tables=(Table("a", 10), Table("pooled", 3), Table("b", 7)),
    )
    shards = {"a": [ShardOwner(0, 0), ShardOwner(4, 1), ShardOwner(8, 2)], "b": [ShardOwner(0, 2)]}
    by_owner = ByOwner(schema, shards, {"a": int64(9, 0), "b": int64(6)})
    of_a = [-1, 0, 0, 0, 1, 1, 1, 1, 2, -1]
    of_b = [2, 2, 2, 2, 2, 2, -1]
    assert by_owner.owners(np.arange(20)).tolist() == [*of_a, -1, -1, -1, *of_b]
    # Rows 0 to 9 of a are stored as 0 7 4 1 8 5 2 9 6 3.
    spread = ByOwner(schema, shards, {"a": int64(9, 0), "b": int64(6)}, (), {"a": RowOrder(10)})
    of_a = [-1, 1, 1, 0, 2, 1, 0, 2, 1, -1]
    assert spread.owners(np.arange(20)).tolist() == [*of_a, -1, -1, -1, *of_b]
    # Feature-major: x reads b, y reads a, z reads a table without owners.
    values, lengths = int64(0, 6, 5, 3, 1), np.array([1, 1, 2, 0, 1, 0], np.int32)
    for assign in (by_owner, pickle.loads(pickle.dumps(by_owner))):
        # Sample 0 reads b's 0 of rank 2, and a's 5 and 3.
        assert assign(values, lengths, int64(0, 1, 1)).tolist() == [1, 2]
    # Sample 0 goes to the host of ranks 0 and 1, though rank 2 owns as much of it.
    on_hosts = ByOwner(schema, shards, {"a": int64(9, 0), "b": int64(6)}, ["x", "x", ("y", 1)])
    assert on_hosts(values, lengths, int64(1, 0, 1)).tolist() == [0, 2]


@pytest.mark.parametrize("first_rows", [[1], [0, 5, 5], [0, 6, 3]])
def test_shards_that_leave_rows_out_are_refused(first_rows) -> None:
    shards = {"t_a": [ShardOwner(first_row, 0) for first_row in first_rows]}
    with pytest.raises(ValueError, match=r"shards of table t_a: expected first rows increasing"):
        ByOwner(SCHEMA, shards, {})


@pytest.mark.parametrize("subset", [None, True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("schema", [SCHEMA, ONE_HOT_SCHEMA], ids=["multi_hot", "one_hot"])
def test_the_global_batches_stay_and_samples_stay_whole(
    tmp_path, schema, world_size, subset
) -> None:
    """All-hot batches stay as read, whoever owns their rows."""
    path, hot = tmp_path / "d", {"t_a": np.arange(6), "t_b": np.arange(600)}
    block = write_dataset(path, {"train": 45}, schema=schema)["train"]
    settings = {"world_size": world_size, "epochs": 2}
    if subset is not None:
        partition = Partition({"t_a": 10, "t_b": 1000}, hot)
        samples = write_all_hot(
            Dataset.open(path), "train", partition, partition_hash="p", output=tmp_path / "hot"
        )
        settings["subset"] = samples.subset(is_all_hot=subset)
    by_owner = owner_of_everything(schema, world_size, hot)
    as_read, assigned = (
        [list(loader(path, rank=rank, assign=assign, **settings)) for rank in range(world_size)]
        for assign in (None, by_owner)
    )
    has_moved = False
    for before, after in zip(zip(*as_read, strict=True), zip(*assigned, strict=True), strict=True):
        ids_before, ids_after = ([samples_of(b) for b in of_ranks] for of_ranks in (before, after))
        assert sorted(sum(ids_before, [])) == sorted(sum(ids_after, []))
        assert list(map(len, ids_before)) == list(map(len, ids_after))
        has_moved = has_moved or ids_before != ids_after
        for batch, samples in zip(after, ids_after, strict=True):
            assert batch.num_global_samples == before[0].num_global_samples
            if samples:
                assert_holds(batch, block, schema)
            else:
                assert batch.weights.tolist() == [0.0]
    assert has_moved == (world_size > 1 and not subset)


def remote_rows(values_FS: np.ndarray, ranks_S: np.ndarray, owner_of: ByOwner, size: int) -> int:
    """Distinct rows that a host of ``size`` ranks reads and another holds, over all hosts."""
    total = 0
    for host in range(4 // size):
        keys = values_FS[:, ranks_S // size == host] + np.arange(len(values_FS))[:, None] * 5000
        owners = owner_of.owners(np.unique(keys))
        total += int(np.count_nonzero((owners // size != host) & (owners != NOBODY)))
    return total


def test_skewed_samples_ask_for_fewer_rows_of_others() -> None:
    """Of other ranks; and where samples go to hosts first, of other hosts."""
    names = [f"t{index}" for index in range(8)]
    schema = Schema((), tuple(Feature(n, n) for n in names), tuple(Table(n, 5000) for n in names))
    rng = np.random.default_rng(1)
    prob = np.arange(1, 5001) ** -1.05
    values_FS = rng.permutation(5000)[rng.choice(5000, (8, 4 * 512), p=prob / prob.sum())]
    hot = {name: np.empty(0, np.int64) for name in names}
    by_rank, by_host = (owner_of_everything(schema, 4, hot, hosts) for hosts in ((), [0, 0, 1, 1]))
    lengths, shares = np.ones(values_FS.size, np.int32), np.full(4, 512)
    as_read = np.repeat(np.arange(4), 512)
    to_ranks, to_hosts = (by(values_FS.ravel(), lengths, shares) for by in (by_rank, by_host))
    remote = [remote_rows(values_FS, ranks, by_rank, 1) for ranks in (as_read, to_ranks)]
    assert remote[1] < 0.9 * remote[0], remote
    remote = [remote_rows(values_FS, ranks, by_rank, 2) for ranks in (to_ranks, to_hosts)]
    assert remote[1] < 0.97 * remote[0], remote
