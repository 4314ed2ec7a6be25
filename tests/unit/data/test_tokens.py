"""Which rank takes which sample, so that all have the same work: by itself and in the loader."""

from __future__ import annotations

import pickle
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotrec.data.all_hot import write_all_hot
from hotrec.data.chunks import Dataset
from hotrec.data.tokens import ByTokens, SampleWork, assign_by_work
from hotrec.types import Partition
from tests.unit.data.logs import SCHEMA, assert_holds, loader, samples_of, write_dataset

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


@pytest.mark.parametrize(
    ("world_size", "subset"), [(1, None), (2, True), (3, None), (3, False), (8, True)]
)
def test_global_batches_stay_and_work_is_even(tmp_path, world_size, subset) -> None:
    path, given = tmp_path / "d", {"world_size": world_size, "epochs": 2}
    block = write_dataset(path, {"train": 45})["train"]
    if subset is not None:
        hot = {"t_a": np.arange(9), "t_b": np.arange(900)}
        partition = Partition({"t_a": 10, "t_b": 1000}, hot)
        samples = write_all_hot(
            Dataset.open(path), "train", partition, partition_hash="p", output=tmp_path / "hot"
        )
        given["subset"] = samples.subset(is_all_hot=subset)
    assign = pickle.loads(pickle.dumps(BY_TOKENS))
    steps = []
    for settings_ in ({}, {"assign": assign}):
        ranks = [loader(path, rank=rank, **given, **settings_) for rank in range(world_size)]
        for of_rank in ranks:
            of_rank.add_work(WORK)
        steps.append([*zip(*ranks, strict=True)])
    largest = []
    for before, after in zip(*steps, strict=True):
        samples_before, samples_after = ([*map(samples_of, step)] for step in (before, after))
        whole = sum(samples_before, [])
        assert sorted(whole) == sorted(sum(samples_after, []))
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
    as_read, by_tokens = np.sum(largest, axis=0)
    assert by_tokens == as_read if world_size == 1 else by_tokens < as_read
