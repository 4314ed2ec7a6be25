"""Columns computed from those of a log: expressions of Polars SQL, evaluated row by row."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import polars as pl
import pyarrow as pa

from hotrec.data.chunks import one_array

_WHOLE_BELOW = 2.0**53  # a larger float stands for several integers
_OVER_ROWS = re.compile(r"\bover\b", re.IGNORECASE)


def columns_read_by(name: str, sql: str) -> tuple[str, ...]:
    """The columns that an expression reads.

    Raises:
        ValueError: If it is none, reads no column, or reads other rows.
    """
    try:
        columns = tuple(dict.fromkeys(pl.sql_expr(sql).meta.root_names()))
        got = "one of other rows" if _OVER_ROWS.search(sql) else "no column"
    except pl.exceptions.PolarsError as error:
        columns, got = (), str(error).splitlines()[0].removesuffix(".")
    if not columns or _OVER_ROWS.search(sql):
        raise ValueError(
            f"data.source.expr.{name}: expected an expression of Polars SQL over columns of a row, "
            f"got {got} in {sql!r}. Correct it."
        )
    return columns


def compute(
    table: pa.Table, exprs: Mapping[str, str], *, are_texts: bool, until_bad: bool
) -> tuple[pa.Table, list[tuple[int, str, str]]]:
    """A table with its computed columns, and which rows are bad.

    Args:
        table: The columns of some rows.
        exprs: The expressions by name.
        are_texts: Whether expressions read texts, as of text files, and not what Arrow holds.
        until_bad: Whether to stop at the first bad row.

    Returns:
        The table, with nulls in bad rows; for each bad row its number, the name of the column, and
        what the row has.

    Raises:
        ValueError: If an expression has no value for each row.
    """
    bad: list[tuple[int, str, str]] = []
    for name, sql in exprs.items():
        rows = pl.DataFrame(table.select(columns_read_by(name, sql)))
        rows = _as_texts(rows) if are_texts else rows.cast({pl.Categorical: pl.String})
        parts = []
        for part in _parts(rows, pl.sql_expr(sql).alias(name), name):
            parts.append(part)
            if part[1] is None:
                bad.append((part[0], name, f"{rows.row(part[0], named=True)}"))
                if until_bad:
                    return table, bad
        values = pl.concat([of for _, of in parts if of is not None] or [pl.Series(name, [None])])
        made = [of if of is not None else pl.Series(name, [None], values.dtype) for _, of in parts]
        column = pl.concat(made).to_frame().to_arrow(compat_level=pl.CompatLevel.oldest())
        table = table.append_column(name, one_array(column.column(0)))
    return table, bad


def _as_texts(rows: pl.DataFrame) -> pl.DataFrame:
    """The rows with texts, of numbers of JSON as they are written there."""
    for values in rows.select(pl.col(pl.Float64)):
        if (values.abs() >= _WHOLE_BELOW).any():
            raise ValueError(
                f"data.source.expr: expected numbers below 2^53 in field {values.name}, got "
                f"{values.abs().max():.0f}, whose last digits may be lost. Write them as text."
            )
    whole = pl.col(pl.Float64).cast(pl.String).str.strip_suffix(".0")
    return rows.with_columns(whole).cast(pl.String)


def _parts(
    rows: pl.DataFrame, expr: pl.Expr, name: str, first: int = 0
) -> Iterator[tuple[int, pl.Series | None]]:
    """The values of consecutive rows, with the number of the first; None for a bad row."""
    try:
        values = rows.select(expr).to_series()
    except pl.exceptions.PolarsError:
        if len(rows) == 1:
            yield first, None
            return
        half = len(rows) // 2
        yield from _parts(rows[:half], expr, name, first)
        yield from _parts(rows[half:], expr, name, first + half)
        return
    if len(values) != len(rows):
        raise ValueError(
            f"data.source.expr.{name}: expected a value for each row, got {len(values)} for "
            f"{len(rows)} rows. Compute it from columns of the row."
        )
    yield first, values
