"""Decayed counts of the lookups of rows, on one rank."""

from __future__ import annotations

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.routing.features import Column
from hotrec.routing.popularity import CountedRows, Popularity
from hotrec.routing.router import Router
from hotrec.types import Partition

NUM_ROWS = {"a": 10, "b": 6, "c": 3}
HOT = {"a": np.array([7, 2]), "b": np.array([5]), "c": np.array([1, 0, 2])}


def count(ids: dict[str, list[int]], router: Router, counter: Popularity) -> None:
    [group] = router.groups
    values = torch.tensor(sum(ids.values(), []))
    features = KeyedJaggedTensor.from_lengths_sync(
        keys=list(ids), values=values, lengths=torch.tensor([len(of) for of in ids.values()])
    )
    routed = router(features)
    counter.add(routed.groups[0])


def lookups(counter: Popularity) -> dict[int, float]:
    return dict(zip(counter.counted.keys.tolist(), counter.counted.counts.tolist(), strict=True))


def test_lookups_are_counted_by_row_and_fade() -> None:
    columns = {4: [Column(name, name, name, False) for name in NUM_ROWS]}
    partition = Partition(NUM_ROWS, HOT)
    router = Router(columns, partition)
    counter = Popularity(router.groups[4], partition, torch.device("cpu"))
    count({"a": [7, 7, 3], "b": [0], "c": [2]}, router, counter)
    count({"a": [7, 2], "b": [5, 0], "c": []}, router, counter)
    counter.merge()
    assert lookups(counter) == {2: 1, 3: 1, 7: 3, 10: 2, 15: 1, 18: 1}
    counter.decay(0.5, most=100)
    moved = Partition(NUM_ROWS, {**HOT, "a": np.array([3, 2])})
    router.follow(moved)
    counter.follow(moved)
    count({"a": [3, 7], "b": [], "c": [1]}, router, counter)
    counter.merge()
    assert lookups(counter) == {2: 0.5, 3: 1.5, 7: 2.5, 10: 1, 15: 0.5, 17: 1, 18: 0.5}
    assert dict(zip(counter.latest.keys, counter.latest.counts, strict=True)) == {3: 1, 7: 1, 17: 1}
    counter.decay(1.0, most=3)
    assert lookups(counter) == {3: 1.5, 7: 2.5, 10: 1, 17: 1}  # ties stay


def test_counts_are_bounded_though_most_rows_are_as_rare() -> None:
    partition = Partition({"a": 1000})
    router = Router({4: [Column("a", "a", "a", False)]}, partition)
    counter = Popularity(router.groups[4], partition, torch.device("cpu"))
    counter.restore(CountedRows(np.arange(1000), np.r_[5.0, 4.0, np.ones(998)]))
    counter.decay(0.5, most=10)
    assert lookups(counter) == {0: 2.5, 1: 2.0}
