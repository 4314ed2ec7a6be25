from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from hotrec.types import Feature, Partition, Schema, Table

SCHEMA = Schema(
    dense=("age",),
    features=(Feature("user", "users"), Feature("seen", "items", True), Feature("item", "items")),
    tables=(Table("users", 5), Table("items", 1 << 33)),
)


def test_schema_goes_through_json() -> None:
    again = Schema.from_json(json.loads(json.dumps(SCHEMA.to_json())))
    assert again == SCHEMA
    assert again.feature_names == ("user", "seen", "item")
    assert [feature.name for feature in again.features_of("items")] == ["seen", "item"]
    assert again.table("items").num_rows == 1 << 33


def test_unknown_table_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"one of the tables \['users', 'items'\], got 'shops'\."):
        SCHEMA.table("shops")


def test_partition_counts() -> None:
    partition = Partition(
        {"users": 5, "items": 7, "shops": 2},
        {"users": np.array([4, 0]), "items": np.empty(0, np.int64)},
    )
    assert [partition.num_hot(table) for table in partition.num_rows] == [2, 0, 0]
    assert partition.hot("users").tolist() == [4, 0]  # the order is the slots'
    assert partition.hot("shops").dtype == np.int64
    assert (partition.total_hot, partition.total_rows) == (2, 14)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([0, 5], r"table users: expected hot rows in 0\.\.4, got 5\."),
        ([-1], r"table users: expected hot rows in 0\.\.4, got -1\."),
        ([1, 2, 1, 1], r"table users: expected distinct hot rows, got 2 repeated\."),
        (np.array([1], np.int32), r"table users: expected an int64 vector .* got int32"),
        (np.array([1.0]), r"table users: expected an int64 vector .* got float64"),
        (np.array([[1]]), r"table users: expected an int64 vector .* of shape \(1, 1\)"),
    ],
)
def test_hot_rows_that_are_wrong_are_refused(rows: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Partition({"users": 5}, {"users": np.asarray(rows)})


def test_hot_rows_of_an_unknown_table_are_refused() -> None:
    with pytest.raises(ValueError, match=r"table shops: expected one of \['users'\], got 'shops'"):
        Partition({"users": 5}, {"shops": np.array([1])})
