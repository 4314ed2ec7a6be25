"""Which rank takes which sample of a global batch, by itself and in the loader."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotrec.data.all_hot import write_all_hot
from hotrec.data.chunks import Dataset
from hotrec.data.locality import NOBODY, ByOwner, assign_by_owner
from hotrec.data.tokens import ByTokens, SampleWork, assign_by_work
from hotrec.types import Feature, Partition, RowShares, Schema, Table
from tests.unit.data.logs import (
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
    return ByOwner(schema, {t.name: int64() for t in schema.tables} | hot, world_size, hosts)


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


def test_rows_have_the_owners_of_their_shares_and_hot_rows_have_none() -> None:
    schema = Schema(
        dense=(),
        features=(Feature("x", "b"), Feature("y", "a"), Feature("z", "pooled")),
        tables=(Table("a", 10), Table("pooled", 3), Table("b", 7)),
    )
    hot = {"a": int64(9, 0), "b": int64(6)}
    by_owner = ByOwner(schema, hot, 3)
    shifts = [RowShares(table, 3).shift for table in "ab"]
    assert shifts == [0, 2]
    of_a, of_b = [-1, 1, 2, 0, 1, 2, 0, 1, 2, -1], [2, 0, 1, 2, 0, 1, -1]
    assert by_owner.owners(np.arange(20)).tolist() == [*of_a, -1, -1, -1, *of_b]
    # Feature-major: x reads b, y reads a, z reads a table without owners.
    values, lengths = int64(0, 6, 4, 3, 1), np.array([1, 1, 2, 0, 1, 0], np.int32)
    for assign in (by_owner, pickle.loads(pickle.dumps(by_owner))):
        # Sample 0 reads b's 0 of rank 2, and a's 4 and 3 of ranks 1 and 0.
        assert assign(values, lengths, int64(0, 1, 1)).tolist() == [1, 2]
    # Sample 0 goes to the host of ranks 0 and 1, though rank 2 owns as much of it.
    on_hosts = ByOwner(schema, hot, 3, ["x", "x", ("y", 1)])
    assert on_hosts(values, lengths, int64(1, 0, 1)).tolist() == [0, 2]


WORK = SampleWork(5, {"a": 1, "bag": 2}, {"bag": 3})
BY_TOKENS = ByTokens(SCHEMA.feature_names, WORK)


def loads_of(work: np.ndarray, ranks: np.ndarray, num_ranks: int) -> list[int]:
    return [int(work[ranks == rank].sum()) for rank in range(num_ranks)]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 10**12), max_size=60), st.integers(1, 9))
def test_every_sample_once_and_no_rank_much_busier(values, num_ranks) -> None:
    work = np.array(values, np.int64)
    ranks = assign_by_work(work, num_ranks)
    loads = loads_of(work, ranks, num_ranks)
    assert sum(loads) == sum(values)
    assert np.bincount(ranks, minlength=num_ranks).size == num_ranks
    if len(values) >= num_ranks:
        assert min(np.bincount(ranks, minlength=num_ranks)) >= 1
    # Of any list schedule: the last sample of the busiest rank came to the least busy one.
    assert max(loads) * num_ranks <= sum(values) + (num_ranks - 1) * max(values, default=0)
    assert np.array_equal(ranks, assign_by_work(work, num_ranks))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=7), st.integers(2, 3))
def test_the_busiest_rank_keeps_to_grahams_bound(values, num_ranks) -> None:
    work = np.array(values, np.int64)
    best = min(
        max(loads_of(work, np.array(ranks), num_ranks))
        for ranks in product(range(num_ranks), repeat=len(values))
    )
    most = max(loads_of(work, assign_by_work(work, num_ranks), num_ranks))
    assert 3 * num_ranks * most <= (4 * num_ranks - 1) * best


def test_work_is_counted_from_lengths() -> None:
    lengths = np.array([1, 1, 1, 9, 9, 9, 0, 2, 40_000], np.int32)  # a, b and bag of three samples
    assert WORK.of(SCHEMA.feature_names, lengths).tolist() == [
        6,
        6 + 4 + 12,
        6 + 80_000 + 3 * 16 * 10**8,
    ]
    assert SampleWork().of(SCHEMA.feature_names, lengths).tolist() == [1, 1, 1]
    assert WORK.of(SCHEMA.feature_names, np.empty(0, np.int32)).tolist() == []


HOT = {"t_a": np.arange(9), "t_b": np.arange(900)}


@pytest.mark.parametrize("is_by_owner", [True, False])
@pytest.mark.parametrize(
    ("world_size", "subset"), [(1, None), (2, True), (3, None), (3, False), (8, True), (8, None)]
)
def test_global_batches_stay_and_samples_stay_whole(
    tmp_path, world_size, subset, is_by_owner
) -> None:
    """Those of all-hot samples stay as read, whoever owns the rows; else work becomes even."""
    path, given = tmp_path / "d", {"world_size": world_size, "epochs": 2}
    block = write_dataset(path, {"train": 45})["train"]
    if subset is not None:
        partition = Partition({"t_a": 10, "t_b": 1000}, HOT)
        samples = write_all_hot(
            Dataset.open(path), "train", partition, partition_hash="p", output=tmp_path / "hot"
        )
        given["subset"] = samples.subset(is_all_hot=subset)
    assign = owner_of_everything(SCHEMA, world_size, HOT) if is_by_owner else BY_TOKENS
    steps = []
    for chosen in (None, pickle.loads(pickle.dumps(assign))):
        ranks = [loader(path, rank=rank, assign=chosen, **given) for rank in range(world_size)]
        for of_rank in ranks:
            of_rank.add_work(WORK)
        steps.append([*zip(*ranks, strict=True)])
    largest, has_moved = [], False
    for before, after in zip(*steps, strict=True):
        samples_before, samples_after = ([*map(samples_of, step)] for step in (before, after))
        whole = sum(samples_before, [])
        assert sorted(whole) == sorted(sum(samples_after, []))
        has_moved |= samples_before != samples_after
        if is_by_owner:
            assert [*map(len, samples_before)] == [*map(len, samples_after)]
        for batch, samples in zip(after, samples_after, strict=True):
            assert batch.num_global_samples == len(whole)
            assert samples == [sample for sample in whole if sample in samples]  # their order
            if samples:
                assert_holds(batch, block)
            else:
                assert len(whole) < world_size
                assert (batch.weights.tolist(), batch.work) == ([0.0], 0)
        works = [[batch.work for batch in step] for step in (before, after)]
        assert sum(works[0]) == sum(works[1])
        largest.append([max(work) for work in works])
    as_read, assigned = np.sum(largest, axis=0)
    if is_by_owner:
        assert has_moved == (world_size > 1 and not subset)
    else:
        assert assigned == as_read if world_size == 1 else assigned < as_read


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
