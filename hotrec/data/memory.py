"""Tables in memory, of any library, as Arrow tables and Parquet."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow.interchange import from_dataframe


def to_arrow(table: Any) -> pa.Table:
    """A table in memory as an Arrow table; NaN becomes missing, a pandas index is dropped.

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
    try:
        if is_pandas:
            found = pa.Table.from_pandas(table, preserve_index=False)
        else:
            found = pa.table(table) if is_arrow else from_dataframe(table)
        names = found.column_names
        if len(set(names)) < len(names):
            raise ValueError(f"a name occurs twice in {names}")
        return pa.Table.from_arrays([_plain(column) for column in found.columns], names)
    except (pa.ArrowException, TypeError, ValueError) as error:
        reason = "; ".join(map(str, error.args)).removesuffix(".")
        raise ValueError(
            "table: expected columns of equal length, unique names and Arrow types, got an error: "
            f"{reason}. Correct the column."
        ) from error


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column without NaN, and without polars' categories, which Parquet does not support."""
    if pa.types.is_floating(column.type):
        return pc.if_else(pc.is_nan(column), pa.scalar(None, column.type), column)
    if pa.types.is_dictionary(column.type) and pa.types.is_string_view(column.type.value_type):
        parts = [(part.indices, part.dictionary.cast(pa.string())) for part in column.chunks]
        kind = pa.dictionary(column.type.index_type, pa.string())
        return pa.chunked_array([pa.DictionaryArray.from_arrays(*part) for part in parts], kind)
    return column


def write_table(table: pa.Table, file: Path) -> None:
    """Write Parquet that is read back with its own types: all text types become plain text."""
    pq.write_table(table, file, store_schema=False)
