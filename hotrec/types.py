"""Value objects that travel between the stages, and the legend of shapes and units.

Only the standard library and numpy, so that every stage can import them in milliseconds.

Shapes: B batch per rank, F sparse features, N dense features, D embedding dim, K ids in a jagged
batch, U distinct rows, R rows of a table, H hot rows, C cold rows, W ranks.
Units: counts are ``num_*``, sizes ``*_bytes``, times ``*_s`` (seconds), rates ``*_per_s``,
fractions ``*_frac`` (0..1). ``batch`` is per rank, ``global_batch`` over all ranks, ``step`` one
update. Ids: ``raw_id`` (value in the log) -> ``row`` (0..num_rows-1) -> ``hot_slot`` (0..H-1) or
``cold_row`` (the row itself: cold tables keep all their rows, in original ids).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Table:
    """An embedding table: ``num_rows`` rows, of which row 0 is the out-of-vocabulary row."""

    name: str
    num_rows: int


@dataclass(frozen=True)
class Feature:
    """A categorical column. Several features may read one table."""

    name: str
    table: str
    is_multi_hot: bool = False


@dataclass(frozen=True)
class Schema:
    """What a sample holds: dense columns, categorical features, and the tables they index."""

    dense: tuple[str, ...]
    features: tuple[Feature, ...]
    tables: tuple[Table, ...]

    @property
    def feature_names(self) -> tuple[str, ...]:
        return tuple(feature.name for feature in self.features)

    def table(self, name: str) -> Table:
        for table in self.tables:
            if table.name == name:
                return table
        known = [table.name for table in self.tables]
        raise ValueError(f"schema: expected one of the tables {known}, got {name!r}.")

    def features_of(self, table: str) -> tuple[Feature, ...]:
        return tuple(feature for feature in self.features if feature.table == table)

    def to_json(self) -> dict[str, Any]:
        return {
            "dense": list(self.dense),
            "features": [vars(feature) for feature in self.features],
            "tables": [vars(table) for table in self.tables],
        }

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Schema:
        return Schema(
            dense=tuple(document["dense"]),
            features=tuple(Feature(**feature) for feature in document["features"]),
            tables=tuple(Table(**table) for table in document["tables"]),
        )


@dataclass(frozen=True)
class Partition:
    """The hot/cold split of the rows of every table.

    Args:
        num_rows: rows of each table, by table name.
        hot_rows: int64 (H,) per table: the hot rows, in falling order of access count, ties by row
            number. The position of a row in this array is its ``hot_slot``. A table that is not in
            the mapping, or has an empty array, is all cold.
        policy: how it was made, for reports.

    Raises:
        ValueError: if a hot row is outside its table or listed twice.
    """

    num_rows: Mapping[str, int]
    hot_rows: Mapping[str, Rows] = field(default_factory=dict)
    policy: str = "custom"

    def __post_init__(self) -> None:
        for table, rows in self.hot_rows.items():
            if table not in self.num_rows:
                raise ValueError(
                    f"partition table {table}: expected one of {sorted(self.num_rows)}, "
                    f"got {table!r}."
                )
            if rows.dtype != np.int64 or rows.ndim != 1:
                raise ValueError(
                    f"partition table {table}: expected an int64 vector of hot rows, "
                    f"got {rows.dtype} of shape {rows.shape}."
                )
            if rows.size == 0:
                continue
            if rows.min() < 0 or rows.max() >= self.num_rows[table]:
                outside = rows[(rows < 0) | (rows >= self.num_rows[table])][0]
                raise ValueError(
                    f"partition table {table}: expected hot rows in 0..{self.num_rows[table] - 1}, "
                    f"got {outside}. Make the partition again from this dataset's profile."
                )
            if np.unique(rows).size != rows.size:
                raise ValueError(
                    f"partition table {table}: expected distinct hot rows, "
                    f"got {rows.size - np.unique(rows).size} repeated."
                )

    def hot(self, table: str) -> Rows:
        """The hot rows of one table, int64 (H,), position = hot slot."""
        return self.hot_rows.get(table, np.empty(0, np.int64))

    def num_hot(self, table: str) -> int:
        return int(self.hot(table).size)

    @property
    def total_hot(self) -> int:
        return sum(self.num_hot(table) for table in self.num_rows)

    @property
    def total_rows(self) -> int:
        return sum(self.num_rows.values())
