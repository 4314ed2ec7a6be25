"""Checks of specifications: what cannot be carried out is refused, with the key of the culprit.

Everything that can be known without looking at a file is found here, before any file is opened.
"""

from __future__ import annotations

import math

from hotrec.config.data import (
    CRITEO_COLUMNS,
    ColumnKind,
    ColumnSpec,
    DataSpec,
    Derive,
    Encoding,
    JoinSpec,
    SourceFormat,
    SourceSpec,
    SplitKind,
    SyntheticSpec,
    TableSpec,
    columns_of,
    tables_of,
)

_TIME_DERIVATIONS = (Derive.hour_of_day, Derive.day_of_week)


def check_data_spec(spec: DataSpec, *, key: str = "data") -> None:
    """Refuse a specification that cannot be carried out.

    Args:
        spec: the specification.
        key: where it stands in the configuration; messages begin with it.

    Raises:
        ValueError: naming the key, what is expected there, and what was found.
    """
    given = [name for name in ("source", "synthetic") if getattr(spec, name) is not None]
    if len(given) != 1:
        raise ValueError(
            f"{key}: expected exactly one of source and synthetic, got {given or 'none'}. "
            "Choose a dataset, e.g. data=kuairand."
        )
    if spec.source is not None:
        check_source_spec(spec.source, key=f"{key}.source")
    if spec.synthetic is not None:
        check_synthetic_spec(spec.synthetic, key=f"{key}.synthetic")


def _require(condition: bool, key: str, expected: str, got: object, advice: str = "") -> None:
    if not condition:
        raise ValueError(f"{key}: expected {expected}, got {got!r}.{' ' if advice else ''}{advice}")


def check_source_spec(spec: SourceSpec, *, key: str = "source") -> None:
    """See ``check_data_spec``."""
    _require(bool(spec.files), f"{key}.files", "at least one path", spec.files)
    _require(
        len(spec.separator) == 1 and spec.separator.isascii() and spec.separator not in '\n\r"',
        f"{key}.separator",
        "one ASCII character that is no quote and no line end",
        spec.separator,
    )
    for name, limit in (("rows_per_chunk", 1), ("block_mib", 1)):
        value = getattr(spec, name)
        _require(value >= limit, f"{key}.{name}", f">= {limit}", value)
    columns = columns_of(spec)
    labels = [name for name, column in columns.items() if column.kind is ColumnKind.label]
    _require(len(labels) == 1, f"{key}.columns", "exactly one column of kind label", labels)
    for name, column in columns.items():
        _check_column(name, column, spec, key=f"{key}.columns.{name}")
    known = tables_of(spec)
    _require(bool(known), f"{key}.columns", "at least one categorical column", sorted(columns))
    for name in spec.tables:
        _require(name in known, f"{key}.tables.{name}", f"one of the tables {sorted(known)}", name)
    for name, table in known.items():
        where = f"{key}.tables.{name}" if name in spec.tables else f"{key}.table_defaults"
        _check_table(table, key=where)
    for name, join in spec.joins.items():
        _check_join(join, key=f"{key}.joins.{name}")
    _check_split(spec, key=f"{key}.split")


def _check_column(name: str, column: ColumnSpec, spec: SourceSpec, *, key: str) -> None:
    is_categorical = column.kind in (ColumnKind.categorical, ColumnKind.categorical_list)
    _require(
        bool(name) and not set(name) & set("/\\.@ \t"),
        key,
        "a column name without '/', '\\', '.', '@' and blanks",
        name,
    )
    _require(
        name not in ("label", "dense") or column.kind is ColumnKind.label,
        key,
        "another name: 'label' and 'dense' are columns of every chunk",
        name,
        "Rename the entry and give the log's name as its source.",
    )
    _require(is_categorical or not column.table, f"{key}.table", "none for this kind", column.table)
    _require(column.max_length >= 0, f"{key}.max_length", ">= 0", column.max_length)
    _require(math.isfinite(column.fill), f"{key}.fill", "a finite number", column.fill)
    _require(
        column.kind is not ColumnKind.categorical_list or len(column.separator) == 1,
        f"{key}.separator",
        "one character",
        column.separator,
    )
    _require(
        column.derive is Derive.none
        or column.kind is ColumnKind.categorical
        or (column.kind is ColumnKind.dense and column.derive in _TIME_DERIVATIONS),
        f"{key}.derive",
        f"none for kind {column.kind.name}",
        column.derive.name,
    )
    source = column.source or name
    _require(
        spec.format is not SourceFormat.criteo or bool(spec.joins) or source in CRITEO_COLUMNS,
        f"{key}.source" if column.source else key,
        "one of label, I1..I13, C1..C26",
        source,
    )


def _check_table(table: TableSpec, *, key: str) -> None:
    _require(table.min_count >= 1, f"{key}.min_count", ">= 1", table.min_count)
    if table.encoding is Encoding.hashing:
        _require(table.num_rows >= 2, f"{key}.num_rows", ">= 2 with hashing", table.num_rows)


def _check_join(join: JoinSpec, *, key: str) -> None:
    _require(bool(join.files), f"{key}.files", "at least one path", join.files)
    _require(bool(join.on), f"{key}.on", "a column of the log", join.on)
    _require(
        join.format is not SourceFormat.criteo,
        f"{key}.format",
        "delimited, parquet or arrow",
        join.format.name,
    )


def _check_split(spec: SourceSpec, *, key: str) -> None:
    split = spec.split
    if split.kind is SplitKind.time:
        _require(bool(split.column), f"{key}.column", "a column of the log", split.column)
        _require(
            split.valid_from <= split.test_from,
            f"{key}.test_from",
            f">= valid_from, which is {split.valid_from}",
            split.test_from,
        )
        return
    for name in ("valid_frac", "test_frac"):
        value = getattr(split, name)
        _require(0.0 <= value < 1.0, f"{key}.{name}", "a fraction in 0..1", value)
    total = split.valid_frac + split.test_frac
    _require(total < 1.0, f"{key}.valid_frac + test_frac", "less than 1", total)


def check_synthetic_spec(spec: SyntheticSpec, *, key: str = "synthetic") -> None:
    """See ``check_data_spec``."""
    _require(bool(spec.num_rows), f"{key}.num_rows", "at least one table", spec.num_rows)
    for index, num_rows in enumerate(spec.num_rows):
        _require(num_rows >= 2, f"{key}.num_rows[{index}]", ">= 2 (row 0 is not drawn)", num_rows)
    _require(
        len(spec.mean_lengths) in (0, 1, len(spec.num_rows)),
        f"{key}.mean_lengths",
        f"none, one or {len(spec.num_rows)} values",
        len(spec.mean_lengths),
    )
    for index, length in enumerate(spec.mean_lengths):
        _require(
            0.0 < length < 10_000, f"{key}.mean_lengths[{index}]", "a mean in 0..10000", length
        )
    _require(0.0 < spec.zipf_exponent < 10, f"{key}.zipf_exponent", "in 0..10", spec.zipf_exponent)
    _require(0.0 <= spec.drift_frac <= 1, f"{key}.drift_frac", "in 0..1", spec.drift_frac)
    _require(0.0 < spec.click_rate < 1, f"{key}.click_rate", "in 0..1", spec.click_rate)
    limits = {
        "num_periods": 1,
        "num_dense": 0,
        "num_train": 1,
        "num_valid": 0,
        "num_test": 0,
        "rows_per_chunk": 1,
        "num_hot_recorded": 1,
        "signal": 0,
        "seed": 0,
    }
    for name, limit in limits.items():
        value = getattr(spec, name)
        _require(value >= limit, f"{key}.{name}", f">= {limit}", value)
