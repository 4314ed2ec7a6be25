"""Tables in memory, of any library, as Arrow tables and Parquet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow.interchange import from_dataframe


def to_arrow(table: Any, is_read: Callable[[str], bool] = lambda name: True) -> pa.Table:
    """A table in memory as an Arrow table; NaN becomes missing, a pandas index is dropped.

    Args:
        table: The table.
        is_read: Whether a column is read; another one without a type of Arrow becomes missing.

    Raises:
        ValueError: If it is not a table, a name occurs twice, or Arrow has no type for a column.
    """
    is_pandas = type(table).__module__.partition(".")[0] == "pandas" and hasattr(table, "columns")
    is_arrow = isinstance(table, Mapping) or hasattr(table, "__arrow_c_stream__")
    if not (is_pandas or is_arrow or hasattr(table, "__dataframe__")):
        raise ValueError(
            "table: expected a DataFrame, an Arrow table or a dict of columns, got "
            f"{type(table).__name__}. Convert it to a table, for example with pyarrow.table."
        )
    where = "table"
    try:
        if is_pandas or isinstance(table, Mapping):
            names = [str(name) for name in (table.columns if is_pandas else table)]
            values = (
                [table.iloc[:, at] for at in range(len(names))] if is_pandas else table.values()
            )
        else:
            found = pa.table(table) if is_arrow else from_dataframe(table)
            names, values = found.column_names, found.columns
        if len(set(names)) < len(names):
            raise ValueError(f"a name occurs twice in {names}")
        columns = {}
        for name, of in zip(names, values, strict=True):
            where = f"table column {name}"
            try:
                columns[name] = _plain(of)
            except (pa.ArrowException, TypeError, ValueError):
                if is_read(name):
                    raise
                columns[name] = pa.nulls(len(of))
        where = "table"
        return pa.table(columns)
    except (pa.ArrowException, TypeError, ValueError) as error:
        reason = "; ".join(map(str, error.args)).removesuffix(".")
        raise ValueError(
            f"{where}: expected columns of equal length, unique names and Arrow types, got an "
            f"error: {reason}. Correct the column."
        ) from error


def _plain(values: Any) -> pa.Array | pa.ChunkedArray:
    """A column without NaN, and of a type that Parquet has and that keeps its unit."""
    is_arrow = isinstance(values, pa.Array | pa.ChunkedArray)
    column = values if is_arrow else pa.array(values, from_pandas=True)
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if isinstance(kind, pa.BaseExtensionType) and kind.extension_name.startswith("pandas."):
        raise ValueError(f"type {kind.extension_name}, such as {values[0]}; text may be meant")
    if pa.types.is_duration(kind):
        raise ValueError(f"type {kind}; numbers of seconds may be meant")
    if pa.types.is_floating(kind) and kind == column.type:
        return pc.if_else(pc.is_nan(column), pa.scalar(None, kind), column)
    if pa.types.is_string_view(kind) and kind != column.type:  # polars' categories
        return column.cast(pa.dictionary(column.type.index_type, pa.string()))
    return column


def write_table(table: pa.Table, file: Path) -> None:
    """Write Parquet that is read back with its own types: all text types become plain text."""
    pq.write_table(table, file, store_schema=False)
