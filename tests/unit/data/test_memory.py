"""Tables of any library become Arrow tables that every reader knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hotrec.data.memory import to_arrow, write_table

COLUMNS = {"id": ["a", None, "b"], "x": [1.5, float("nan"), None], "n": [1, 2, 3]}
EXPECTED = {"id": ["a", None, "b"], "x": [1.5, None, None], "n": [1, 2, 3]}


class Stream:
    """What polars and others have."""

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return pa.table(COLUMNS).__arrow_c_stream__(requested_schema)


class Interchange:
    """What other libraries have."""

    def __dataframe__(self, **options: Any) -> Any:
        return pa.table(COLUMNS).__dataframe__(**options)


@pytest.mark.parametrize(
    "table",
    [
        COLUMNS,
        {**COLUMNS, "x": np.array([1.5, np.nan, np.nan]), "n": np.arange(1, 4)},
        pa.table(COLUMNS),
        pa.record_batch(COLUMNS),
        Stream(),
        Interchange(),
    ],
    ids=lambda table: type(table).__name__,
)
def test_tables_of_any_kind(table: Any) -> None:
    assert to_arrow(table).to_pydict() == EXPECTED


@pytest.mark.slow  # needs dev.lock
def test_a_table_of_pandas_without_its_index() -> None:
    import pandas

    table = pandas.DataFrame({**COLUMNS, "kind": pandas.Categorical(["u", None, "v"])})
    found = to_arrow(table[table["n"] > 1])
    assert found.to_pydict() == {
        **{name: values[1:] for name, values in EXPECTED.items()},
        "kind": [None, "v"],
    }


@pytest.mark.slow  # needs dev.lock
def test_a_table_of_polars_with_its_categories(tmp_path: Path) -> None:
    import polars

    table = polars.DataFrame(COLUMNS, strict=False).with_columns(
        polars.Series("kind", ["u", None, "v"], dtype=polars.Categorical),
        polars.Series("many", [["u"], [], ["v", "w"]]),
    )
    write_table(to_arrow(table), tmp_path / "table.parquet")
    found = pq.read_table(tmp_path / "table.parquet")
    assert found.to_pydict() == {
        **EXPECTED, "kind": ["u", None, "v"], "many": [["u"], [], ["v", "w"]]
    }  # fmt: skip
    assert to_arrow(table.clear()).num_rows == 0
    assert found.schema.field("kind").type == pa.string()
    assert found.schema.field("many").type.value_type == pa.string()


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ([1, 2], "got list."),
        (None, "got NoneType."),
        ({"a": [1], "b": [1, 2]}, "length"),
        ({"good": [1, 2], "bad": [1, "x"]}, "column bad: "),
        ({"good": [1], "bad": [object()]}, "column bad: "),
        ({"good": [1], "bad": pa.array([1], pa.duration("s"))}, "column bad: "),
        ({"a": np.zeros((2, 2))}, "1-dimensional"),
        ({"a": object()}, "object"),
        (pa.table([[1], [2]], names=["a", "a"]), "twice in ['a', 'a']"),
    ],
)
def test_what_is_no_table_is_refused(table: Any, said: str) -> None:
    with pytest.raises(ValueError, match=r"^table( column \w+)?: expected .*, got ") as caught:
        to_arrow(table)
    assert said in str(caught.value)
