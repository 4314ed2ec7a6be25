"""Checks of specifications, before any file is opened; errors name the key that is wrong."""

from __future__ import annotations

import math

from hotrec.config.data import (
    CRITEO_COLUMNS,
    ColumnKind,
    ColumnSpec,
    DataSpec,
    Derive,
    Encoding,
    SourceFormat,
    SourceSpec,
    SplitKind,
    SplitSpec,
    SyntheticSpec,
    columns_of,
    tables_of,
)


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


def _require(key: str, ok: bool, expected: str, got: object, advice: str = "") -> None:
    if not ok:
        raise ValueError(f"{key}: expected {expected}, got {got!r}.{' ' if advice else ''}{advice}")


def check_source_spec(spec: SourceSpec, *, key: str = "source") -> None:
    """See ``check_data_spec``."""
    _require(f"{key}.files", bool(spec.files), "at least one path", spec.files)
    is_character = len(spec.separator) == 1 and spec.separator.isascii()
    is_separator = is_character and spec.separator not in '\n\r"'
    expected = "one ASCII character that is no quote and no line end"
    _require(f"{key}.separator", is_separator, expected, spec.separator)
    for name in ("rows_per_chunk", "block_mib"):
        value = getattr(spec, name)
        _require(f"{key}.{name}", value >= 1, ">= 1", value)
    columns = columns_of(spec)
    labels = [name for name, column in columns.items() if column.kind is ColumnKind.label]
    _require(f"{key}.columns", len(labels) == 1, "exactly one column of kind label", labels)
    for name, column in columns.items():
        _check_column(name, column, spec, key=f"{key}.columns.{name}")
    known = tables_of(spec)
    _require(f"{key}.columns", bool(known), "at least one categorical column", sorted(columns))
    for name in spec.tables:
        _require(f"{key}.tables.{name}", name in known, f"one of the tables {sorted(known)}", name)
    for name, table in known.items():
        where = f"{key}.tables.{name}" if name in spec.tables else f"{key}.table_defaults"
        _require(f"{where}.min_count", table.min_count >= 1, ">= 1", table.min_count)
        is_sized = table.encoding is not Encoding.hashing or table.num_rows >= 2
        _require(f"{where}.num_rows", is_sized, ">= 2 with hashing", table.num_rows)
    for name, join in spec.joins.items():
        where = f"{key}.joins.{name}"
        _require(f"{where}.files", bool(join.files), "at least one path", join.files)
        _require(f"{where}.on", bool(join.on), "a column of the log", join.on)
        is_table = join.format is not SourceFormat.criteo
        _require(f"{where}.format", is_table, "delimited, parquet or arrow", join.format.name)
    _check_split(spec.split, key=f"{key}.split")


def _check_column(name: str, column: ColumnSpec, spec: SourceSpec, *, key: str) -> None:
    kind, derive = column.kind, column.derive
    is_list = kind is ColumnKind.categorical_list
    is_categorical = is_list or kind is ColumnKind.categorical
    is_name = bool(name) and not set(name) & set("/\\.@ \t")
    _require(key, is_name, "a column name without '/', '\\', '.', '@' and blanks", name)
    is_free = name not in ("label", "dense") or kind is ColumnKind.label
    expected = "another name: 'label' and 'dense' are columns of every chunk"
    advice = "Rename the entry and give the log's name as its source."
    _require(key, is_free, expected, name, advice)
    is_table = is_categorical or not column.table
    _require(f"{key}.table", is_table, "none for this kind", column.table)
    _require(f"{key}.max_length", column.max_length >= 0, ">= 0", column.max_length)
    _require(f"{key}.fill", math.isfinite(column.fill), "a finite number", column.fill)
    is_separator = not is_list or len(column.separator) == 1
    _require(f"{key}.separator", is_separator, "one character", column.separator)
    of_time = (Derive.hour_of_day, Derive.day_of_week)
    is_derived = kind is ColumnKind.categorical or (kind is ColumnKind.dense and derive in of_time)
    is_possible = derive is Derive.none or is_derived
    _require(f"{key}.derive", is_possible, f"none for kind {kind.name}", derive.name)
    source = column.source or name
    is_known = spec.format is not SourceFormat.criteo or spec.joins or source in CRITEO_COLUMNS
    where = f"{key}.source" if column.source else key
    _require(where, bool(is_known), "one of label, I1..I13, C1..C26", source)


def _check_split(split: SplitSpec, *, key: str) -> None:
    if split.kind is SplitKind.time:
        _require(f"{key}.column", bool(split.column), "a column of the log", split.column)
        is_later = split.valid_from <= split.test_from
        expected = f">= valid_from, which is {split.valid_from}"
        _require(f"{key}.test_from", is_later, expected, split.test_from)
        return
    for name in ("valid_frac", "test_frac"):
        value = getattr(split, name)
        _require(f"{key}.{name}", 0.0 <= value < 1.0, "a fraction in 0..1", value)
    total = split.valid_frac + split.test_frac
    _require(f"{key}.valid_frac + test_frac", total < 1.0, "less than 1", total)


def check_synthetic_spec(spec: SyntheticSpec, *, key: str = "synthetic") -> None:
    """See ``check_data_spec``."""
    _require(f"{key}.num_rows", bool(spec.num_rows), "at least one table", spec.num_rows)
    for index, num_rows in enumerate(spec.num_rows):
        _require(f"{key}.num_rows[{index}]", num_rows >= 2, ">= 2 (row 0 is not drawn)", num_rows)
    num_lengths, num_tables = len(spec.mean_lengths), len(spec.num_rows)
    expected = f"none, one or {num_tables} values"
    _require(f"{key}.mean_lengths", num_lengths in (0, 1, num_tables), expected, num_lengths)
    for index, length in enumerate(spec.mean_lengths):
        where = f"{key}.mean_lengths[{index}]"
        _require(where, 0.0 < length < 10_000, "a mean in 0..10000", length)
    exponent = spec.zipf_exponent
    _require(f"{key}.zipf_exponent", 0.0 < exponent < 10, "in 0..10", exponent)
    _require(f"{key}.drift_frac", 0.0 <= spec.drift_frac <= 1, "in 0..1", spec.drift_frac)
    _require(f"{key}.click_rate", 0.0 < spec.click_rate < 1, "in 0..1", spec.click_rate)
    from_one = ("num_periods", "num_train", "rows_per_chunk", "num_hot_recorded")
    for name in (*from_one, "num_dense", "num_valid", "num_test", "signal", "seed"):
        value, least = getattr(spec, name), int(name in from_one)
        _require(f"{key}.{name}", value >= least, f">= {least}", value)
