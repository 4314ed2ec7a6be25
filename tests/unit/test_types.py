"""Schemas and partitions."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from hotrec.types import Feature, Partition, Schema, Table


def test_schema_goes_through_json() -> None:
    features = Feature("user", "users"), Feature("seen", "items", True), Feature("item", "items")
    schema = Schema(("age",), features, (Table("users", 5), Table("items", 1 << 33)))
    again = Schema.from_json(json.loads(json.dumps(schema.to_json())))
    assert again == schema
    assert [feature.name for feature in again.features_of("items")] == ["seen", "item"]
    assert again.table("items").num_rows == 1 << 33
    with pytest.raises(ValueError, match=r"'users', 'items'.*, got 'shops'"):
        again.table("shops")


def test_partition_counts() -> None:
    hot = {"users": np.array([4, 0]), "items": np.empty(0, np.int64)}
    partition = Partition({"users": 5, "items": 7, "shops": 2}, hot)
    assert [partition.num_hot(table) for table in partition.num_rows] == [2, 0, 0]
    assert partition.hot("users").tolist() == [4, 0]  # the order is the slots'
    assert (partition.total_hot, partition.total_rows) == (2, 14)


@pytest.mark.parametrize(
    ("table", "rows", "got"),
    [
        ("users", [0, 5], "5"),
        ("users", [-1], "-1"),
        ("users", [1, 2, 1, 1], "2 repeated"),
        ("users", np.array([1], np.int32), ".*int32"),
        ("users", np.array([[1]]), r".*\(1, 1\)"),
        ("shops", [1], "'shops'"),
    ],
)
def test_hot_rows_that_are_wrong_are_refused(table: str, rows: Any, got: str) -> None:
    with pytest.raises(ValueError, match=rf"^partition table {table}: expected .*, got {got}"):
        Partition({"users": 5}, {table: np.asarray(rows)})
