"""Readers: the files of a log -> blocks of raw columns, checked, for every format.

An unreadable sample raises an error that names the file and the line, or is skipped and counted, as
specified. Memory is bounded by the block, not by the file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from hotrec.config.data import (
    CRITEO_COLUMNS,
    TEXT_FORMATS,
    ColumnKind,
    ColumnSpec,
    OnBadLine,
    SourceFormat,
    TimeUnit,
)
from hotrec.data import json_lines, text
from hotrec.data.columns import (
    ID,
    LARGEST,
    LINE,
    MS_PER_UNIT,
    NUMBER,
    NUMBERS,
    Ids,
    Mask,
    RawBlock,
    any_of_lists,
    ids_from_arrow,
    is_list,
    is_text,
    items_of,
    labels_from_texts,
    number_lists_from_arrow,
    number_lists_from_texts,
    numbers_from_arrow,
    numbers_from_texts,
    stored,
    times_from_arrow,
    times_from_texts,
    vectors_of,
)
from hotrec.data.expr import columns_read_by, compute
from hotrec.data.files import beginning_of, is_local, is_partition, open_file
from hotrec.data.value_types import (
    ValueType,
    ValueTypes,
    are_epochs,
    times_of_another_unit,
    type_of_ids,
    type_of_times,
)
from hotrec.types import Float64s, Rows

_NO_PARTITION = ("", "__HIVE_DEFAULT_PARTITION__")
_NUMBER = ColumnSpec(ColumnKind.dense)
_ARROW_MAGIC_BYTES = 8  # with padding
_ROWS_PER_BLOCK = 131_072
_NUM_SHOWN, _SHOWN, _FEW = 8, 80, 100


@dataclass(frozen=True)
class Wanted:
    """The columns to read of a log or a side table.

    Args:
        ids: Columns whose values are ids, or lists of ids if the file has lists.
        numbers: Columns whose values are numbers. A column may be in both.
        labels: Number columns that must be labels.
        weights: Number columns that must be at least 0.
        required: Number columns without missing values, besides these.
        times: Number columns that may hold times, with their forms as in
            ``hotrec.config.data.SourceSpec``; they become milliseconds since 1970.
        columns: The format of number columns, and the length of vectors, unless they are plain
            numbers.
        single: Id columns that may not be lists.
        lists: Columns whose values are lists of numbers. A column may also be in ``ids``.
        kept: Columns to pass through unchanged.
    """

    ids: tuple[str, ...]
    numbers: tuple[str, ...]
    labels: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    times: Mapping[str, str] = field(default_factory=dict)
    columns: Mapping[str, ColumnSpec] = field(default_factory=dict)
    single: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys((*self.ids, *self.numbers, *self.lists, *self.kept)))

    def column(self, name: str) -> ColumnSpec:
        """How a number column is read."""
        return self.columns.get(name, _NUMBER)

    def is_text(self, name: str) -> bool:
        """Whether a column is read as text where files are text."""
        column = self.column(name)
        is_iso = self.times.get(name) == TimeUnit.iso
        is_number = name in self.numbers and name not in self.ids and name not in self.labels
        return not is_number or is_iso or column.width > 0


@dataclass(frozen=True)
class LogFormat:
    """How the files of a log or a side table are stored; see ``hotrec.config.data.SourceSpec``."""

    format: SourceFormat
    separator: str = "\t"
    null_values: tuple[str, ...] = ("",)
    on_bad_line: OnBadLine = OnBadLine.error
    block_bytes: int = 8 << 20
    exprs: Mapping[str, str] = field(default_factory=dict)  # of computed columns, by name


def column_names(path: Path, log_format: LogFormat) -> tuple[str, ...]:
    """The columns that a file has, without those of its path.

    Raises:
        ValueError: if it is unreadable, or two columns have the same name.
    """
    match log_format.format:
        case SourceFormat.criteo:
            return CRITEO_COLUMNS
        case SourceFormat.delimited:
            return text.read_header(path, log_format.separator)
        case SourceFormat.json:
            return json_lines.read_names(path)
        case SourceFormat.parquet | SourceFormat.arrow:
            is_parquet = log_format.format is SourceFormat.parquet
            with _naming(path, "names of columns"):
                schema = open_parquet(path).schema_arrow if is_parquet else open_arrow(path).schema
                names = tuple(schema.names)
            text.check_names(names, path)
            return names


def partition_of(path: Path) -> dict[str, str | None]:
    """The columns in a file's path, in directories named key=value; None for a missing value."""
    found = (part.partition("=") for part in path.parts[:-1] if is_partition(part))
    values = {unquote(key): unquote(value) for key, _, value in found}
    return {key: None if value in _NO_PARTITION else value for key, value in values.items()}


@contextmanager
def _naming(path: Path, expected: str) -> Iterator[None]:
    """Errors of Arrow and of the file system as ours, with the file."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path}: expected {expected}, got {_one_line(error)}, and {beginning_of(path)}. "
            "Rename it, or download it again."
        ) from error


def _one_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0].removesuffix(".")


def count_samples(path: Path, log_format: LogFormat) -> int:
    """Lines or rows of a file, bad ones included, without parsing it."""
    match log_format.format:
        case SourceFormat.criteo | SourceFormat.json:
            return text.count_lines(path)
        case SourceFormat.delimited:
            return text.count_lines(path) - 1
        case SourceFormat.parquet:
            return int(open_parquet(path).metadata.num_rows)
        case SourceFormat.arrow:
            with _naming(path, "a whole file"):
                return sum(batch.num_rows for batch in _arrow_batches(path))


def read_blocks(path: Path, log_format: LogFormat, wanted: Wanted) -> Iterator[RawBlock]:
    """The samples of one file, in order, in blocks.

    Raises:
        ValueError: for a file that is empty, damaged or lacks a column, and, unless bad lines are
            skipped, for an unreadable sample; the message names the file and the line.
    """
    names, partition = column_names(path, log_format), partition_of(path)
    exprs = {name: sql for name, sql in log_format.exprs.items() if name in wanted.names}
    roots = _columns_read_by(exprs)
    read = list(dict.fromkeys((*(name for name in wanted.names if name not in exprs), *roots)))
    partition = {n: of for n, of in partition.items() if n not in names and n in read}
    # Not every object has all fields, so missing ones of JSON are reported at the end.
    has_names = log_format.format is not SourceFormat.json
    missing = [name for name in read if has_names and name not in {*names, *partition}]
    if missing:
        raise ValueError(
            f"{path}: expected the columns {missing}, got {[*names, *partition]}. "
            "Correct the columns of the specification."
        )
    of_file = [name for name in read if name not in partition]
    if log_format.format in TEXT_FORMATS:
        tables = _text_tables(path, log_format, wanted, names, of_file, roots)
    else:
        tables = _tables(path, log_format, of_file)
    for parsed in tables:
        if parsed.bad and log_format.on_bad_line is OnBadLine.error:
            bad = parsed.bad[0]
            raise _bad_line_error(path, bad.line, bad.expected, bad.got)
        if parsed.lines.size or parsed.bad:
            table = _with_partition(parsed.table, partition)
            if exprs:
                table, parsed = _with_exprs(table, parsed, exprs, path, log_format)
            yield _block(table, parsed, wanted, path, log_format.on_bad_line)


def _text_tables(
    path: Path,
    log_format: LogFormat,
    wanted: Wanted,
    names: tuple[str, ...],
    of_file: list[str],
    roots: list[str],
) -> Iterator[text.Parsed]:
    is_delimited, nulls = log_format.format is SourceFormat.delimited, log_format.null_values
    lines = text.read_lines(path, log_format.block_bytes, has_header=is_delimited)
    if log_format.format is SourceFormat.json:
        # Columns that are only passed through keep all digits too.
        numbers = {*wanted.numbers, *wanted.lists, *roots}
        ids = tuple(name for name in of_file if name in wanted.ids or name not in numbers)
        return json_lines.parse_lines(path, lines, ids, tuple(of_file), nulls)
    # An expression reads texts, whatever else a column is read as.
    are_texts = {name for name in of_file if name in roots or wanted.is_text(name)}
    types = {name: text.TEXT if name in are_texts else text.NUMBER for name in of_file}
    layout = text.Layout(names, log_format.separator, is_delimited, nulls, types)
    return text.parse_lines(lines, layout)


def _with_partition(table: pa.Table, partition: Mapping[str, str | None]) -> pa.Table:
    for name, value in partition.items():
        value_of_all = pa.array([value], pa.string()).take(pa.array(np.zeros(len(table), int)))
        table = table.append_column(name, value_of_all)
    return table


def _columns_read_by(exprs: Mapping[str, str]) -> list[str]:
    return [column for name, sql in exprs.items() for column in columns_read_by(name, sql)]


def _with_exprs(
    table: pa.Table,
    parsed: text.Parsed,
    exprs: Mapping[str, str],
    path: Path,
    log_format: LogFormat,
) -> tuple[pa.Table, text.Parsed]:
    """A block with its computed columns, without rows for which one cannot be computed."""
    is_error = log_format.on_bad_line is OnBadLine.error
    are_texts = log_format.format in TEXT_FORMATS
    table, bad = compute(table, exprs, are_texts=are_texts, until_bad=is_error)
    if not bad:
        return table, parsed
    if is_error:
        at, name, row = bad[0]
        expected = f"a row that data.source.expr.{name} can read"
        raise _bad_line_error(
            path, int(parsed.lines[at]), expected, row, "correct the expression, "
        )
    rows = np.array(sorted({at for at, *_ in bad}))
    is_kept = ~np.isin(np.arange(len(table)), rows)
    more = (text.Bad(int(line), "", "") for line in parsed.lines[rows])
    parsed = text.Parsed(table, parsed.lines[is_kept], (*parsed.bad, *more))
    return table.filter(pa.array(is_kept)), parsed


def open_parquet(path: Path) -> pq.ParquetFile:
    """Open a Parquet file.

    Raises:
        ValueError: if it is not one.
    """
    with _naming(path, "a Parquet file"):
        return pq.ParquetFile(path if is_local(path) else open_file(path))


def open_arrow(path: Path) -> pa.RecordBatchFileReader | pa.RecordBatchStreamReader:
    """Open an Arrow IPC file or stream.

    Raises:
        ValueError: if it is neither.
    """
    with _naming(path, "an Arrow IPC file or stream"):
        source = open_file(path)
        try:
            reader = pa.ipc.open_file(source)
        except pa.ArrowInvalid:
            source.seek(0)
            return pa.ipc.open_stream(source)
        # A file contains its schema twice. Only the one at the end is needed, but a difference
        # shows damage.
        source.seek(_ARROW_MAGIC_BYTES)
        if not pa.ipc.open_stream(source).schema.equals(reader.schema):
            raise pa.ArrowInvalid("different schemas at its beginning and end")
        return reader


def _arrow_batches(path: Path) -> Iterator[pa.RecordBatch]:
    reader = open_arrow(path)
    if isinstance(reader, pa.RecordBatchFileReader):
        yield from (reader.get_batch(index) for index in range(reader.num_record_batches))
    else:
        yield from reader


def _batches(path: Path, log_format: LogFormat, names: list[str]) -> Iterator[pa.RecordBatch]:
    if log_format.format is SourceFormat.parquet:
        yield from open_parquet(path).iter_batches(_ROWS_PER_BLOCK, columns=names)
        return
    for batch in _arrow_batches(path):
        chosen = batch.select(names)
        for name in names:  # nothing else checks the file's statistics
            with _naming(path, f"integers in column {name}"):
                chosen.column(name).validate(full=True)
        for start in range(0, batch.num_rows, _ROWS_PER_BLOCK):
            yield chosen.slice(start, _ROWS_PER_BLOCK)


def _tables(path: Path, log_format: LogFormat, names: list[str]) -> Iterator[text.Parsed]:
    number = 1
    with _naming(path, "a whole file"):
        for batch in _batches(path, log_format, names):
            table = pa.Table.from_batches([batch])
            yield text.Parsed(table, np.arange(number, number + batch.num_rows))
            number += batch.num_rows
    if number == 1:
        raise ValueError(f"{path}: expected rows, got none. Remove the empty file from the list.")


def _block(
    table: pa.Table, parsed: text.Parsed, wanted: Wanted, path: Path, on_bad_line: OnBadLine
) -> RawBlock:
    lines = parsed.lines
    columns: dict[str, Any] = {LINE: lines}
    texts: dict[str, pa.Array] = {}
    is_bad = np.zeros(lines.size, bool)
    types: dict[str, tuple[str, pa.Array]] = {}
    for name in dict.fromkeys((*wanted.ids, *wanted.numbers, *wanted.lists)):
        try:
            column = stored(table.column(name))
            _check_type(column.type, name, wanted, path)
            reading = _read(column, name, wanted)
        except (pa.ArrowException, UnicodeDecodeError) as error:
            where = f"{path} lines {lines[0]} to {lines[-1]}" if lines.size else f"{path}"
            raise ValueError(
                f"{where}: expected {'numbers' if name in wanted.numbers else 'ids'} in column "
                f"{name}, got {_one_line(error)}. Correct the values, or the columns of the "
                "specification."
            ) from error
        value_type = _value_type(column.type, reading, name, wanted)
        if value_type is not None:
            types[name] = value_type, column
        if name in wanted.ids and reading.raw is not None:
            columns[f"{ID}{name}"], texts[name] = reading.raw.codes, reading.raw.texts
        if reading.numbers is not None:
            columns[f"{NUMBER}{name}"] = reading.numbers
        if reading.lists is not None:
            columns[f"{NUMBERS}{name}"] = reading.lists
        if reading.is_bad.any() and on_bad_line is OnBadLine.error:
            at = int(np.argmax(reading.is_bad))
            expected, remedy = _expected(name, wanted)
            expected = f"{expected} in column {name}"
            raise _bad_line_error(path, int(lines[at]), expected, reading.got(at), remedy)
        is_bad |= reading.is_bad
    # Skipped samples have no say in what the values of a column mean.
    used = np.flatnonzero(~is_bad)
    value_types = ValueTypes()
    for name, (value_type, column) in types.items() if used.size else ():
        seen = f"{_example(column, used)} of type {column.type}"
        value_types[name] = ValueType(value_type, seen, f"{path}")
    kept = {name: stored(table.column(name)) for name in wanted.kept}
    block = RawBlock(pl.DataFrame(columns), texts, len(parsed.bad), kept, value_types)
    return block.keep(~is_bad) if is_bad.any() else block


def _example(column: pa.Array, samples: Rows) -> str:
    """The first value of a few samples, for a message; "" if there is none."""
    values = column.take(pa.array(samples[:_FEW])).drop_null()
    while is_list(values.type) or pa.types.is_dictionary(values.type):
        values = values.flatten() if is_list(values.type) else values.dictionary_decode()
        values = values.drop_null()
    if pa.types.is_timestamp(values.type):
        values = values.cast(pa.timestamp(values.type.unit))  # an unknown zone has no text
    if pa.types.is_temporal(values.type):
        # Python has no nanoseconds and no years after 9999.
        values = values[:1].cast(pa.string())
    return f", such as {values[0].as_py()}" if len(values) else ""


@dataclass(frozen=True)
class _Reading:
    """A column as texts, numbers and lists of numbers, where it is read as these.

    Args:
        raw: The texts, or lists of them.
        numbers: The numbers, or vectors.
        lists: The lists of numbers.
        is_bad: Which samples cannot be used.
        ms_per_unit: The factor of numbers that are times.
    """

    raw: Ids | None
    numbers: Float64s | None
    lists: pl.Series | None
    is_bad: Mask
    ms_per_unit: float = 1.0

    def got(self, at: int) -> str:
        """The value of a sample, for a message."""
        raw = self.raw
        value = None if raw is None else Ids(raw.texts, raw.codes[at : at + 1]).values()[0]
        if isinstance(value, str):
            return repr(value[:_SHOWN])
        if isinstance(value, pl.Series):
            return f"{len(value)} values: {value[:_NUM_SHOWN].to_list()}"
        number = math.nan if self.numbers is None else self.numbers[at]
        if np.ndim(number):
            return "a vector of another length, or with inf or nan"
        # NaN means a missing value here; an original NaN is infinite.
        got = "nothing" if np.isnan(number) else f"{number / self.ms_per_unit}"
        return "inf or nan" if got == "inf" else got


def _value_type(kind: pa.DataType, reading: _Reading, name: str, wanted: Wanted) -> str | None:
    """What the values of a column mean, if there are any and types differ in it."""
    may_be_lists = name not in wanted.single and not is_list(kind)
    while is_list(kind) or pa.types.is_dictionary(kind):
        kind = kind.value_type
    values = None if reading.raw is None else reading.raw.texts
    if name in wanted.times and reading.numbers is not None:
        return type_of_times(kind, values, reading.numbers, wanted.times[name])
    return None if values is None else type_of_ids(kind, values, may_be_lists=may_be_lists)


def _read(column: pa.Array, name: str, wanted: Wanted) -> _Reading:
    how, unit, kind = wanted.column(name), wanted.times.get(name), column.type
    is_time = unit is not None and pa.types.is_temporal(kind)
    is_number, are_lists = name in wanted.numbers, name in wanted.lists
    reads_text = is_text(kind) or pa.types.is_null(kind)
    reads_text |= not is_list(kind) if are_lists else wanted.is_text(name) and not how.width
    raw, is_bad = None, np.zeros(len(column), bool)
    if name in wanted.ids or (reads_text and not is_time):
        raw, is_odd = ids_from_arrow(column)
        is_bad = is_odd if name in wanted.ids or not is_number else is_bad
    if are_lists or how.width:
        lists = (
            number_lists_from_arrow(column)
            if raw is None or raw.is_list
            else number_lists_from_texts(raw, how.separator)
        )
        if not are_lists:
            vectors = vectors_of(lists, how.width)
            return _Reading(raw, vectors, None, is_bad | (np.abs(vectors) > LARGEST).any(axis=1))
        items, offsets = items_of(lists)
        is_large = np.abs(items.to_numpy()) > LARGEST
        return _Reading(raw, None, lists, is_bad | any_of_lists(is_large, offsets))
    if not is_number:
        return _Reading(raw, None, None, is_bad)
    scale = 1.0
    if is_time:
        numbers = times_from_arrow(column)
    elif raw is None or raw.is_list:
        numbers = numbers_from_arrow(column)
    elif name in wanted.labels:
        numbers = labels_from_texts(raw)
    elif unit == TimeUnit.iso:
        numbers = times_from_texts(raw)
    else:
        numbers = numbers_from_texts(raw)
    if unit not in (None, TimeUnit.iso) and not is_time:
        scale = MS_PER_UNIT[TimeUnit(unit)]
        numbers = numbers * scale
    if name in wanted.labels:
        is_bad = ~np.isfinite(numbers)
    elif name in wanted.weights:
        is_bad = ~((numbers >= 0) & (numbers <= LARGEST))
    else:
        is_bad = is_bad | (np.abs(numbers) > LARGEST)
        if unit not in (None, TimeUnit.iso) and not is_time and are_epochs(numbers).any():
            is_bad |= times_of_another_unit(numbers)
        if name in wanted.required:
            is_bad |= np.isnan(numbers)
    return _Reading(raw, numbers, None, is_bad, scale)


def _expected(name: str, wanted: Wanted) -> tuple[str, str]:
    """The expected form of a column's values, and the setting for other forms."""
    how, unit = wanted.column(name), wanted.times.get(name)
    if name in wanted.lists:
        return "a list of finite numbers", ""
    if name not in wanted.numbers:
        return "an id that is an integer or a text", "store ids as integers, "
    if name in wanted.labels:
        return "a label of 0 or 1", "read it with an expr, "
    if name in wanted.weights:
        return "a weight of at least 0", ""
    if unit == TimeUnit.iso:
        return "a time such as 2024-05-01T12:30:00", f"set data.source.times.{name}, "
    if unit is not None:
        return f"a time in {unit}", f"set data.source.times.{name}, "
    if how.width:
        return f"{how.width} finite numbers or a missing value", ""
    return "a finite number or a missing value", "read it with an expr, "


def _check_type(kind: pa.DataType, name: str, wanted: Wanted, path: Path) -> None:
    """Refuse types whose values could be read, but with another meaning."""
    what = "numbers" if name in wanted.numbers else "ids"
    width, form = wanted.column(name).width, wanted.times.get(name)
    item = kind
    while is_list(item) or pa.types.is_dictionary(item):
        if is_list(item) and item is not kind and is_list(kind):
            break
        item = item.value_type
    if is_list(item) or pa.types.is_nested(item) or pa.types.is_interval(item):
        raise ValueError(
            f"{path} column {name}: expected {what}, got type {kind}. Convert its content to "
            "columns, or omit it."
        )
    if is_list(kind) and (name in wanted.single or (what == "numbers" and not width)):
        advice = "Set its kind to categorical_list or sequence."
        if what == "numbers":
            advice = (
                f"Set width, of a dense column, to {getattr(kind, 'list_size', 'their length')}."
            )
        raise ValueError(
            f"{path} column {name}: expected one {what[:-1]} per sample, got lists of type {kind}. "
            f"{advice}"
        )
    if width and not is_list(kind) and not is_text(kind) and not pa.types.is_null(kind):
        raise ValueError(
            f"{path} column {name}: expected lists of {width} numbers, got type {kind}. "
            "Set its width to 0."
        )
    if name in wanted.numbers and form is None and pa.types.is_temporal(item):
        raise ValueError(
            f"{path} column {name}: expected numbers, got type {kind}. "
            "Cast the column to integers, or set derive to hour_of_day or day_of_week."
        )
    is_time = pa.types.is_temporal(kind) or is_text(kind) or pa.types.is_null(kind)
    if form == TimeUnit.iso and not is_time:
        raise ValueError(
            f"{path} column {name}: expected text, as in data.source.times, got type {kind}. Set "
            f"data.source.times.{name} to s, ms, us or ns."
        )


def _bad_line_error(
    path: Path, number: int, expected: str, got: str, remedy: str = ""
) -> ValueError:
    return ValueError(
        f"{path} line {number}: expected {expected}, got {got}. Fix the line, {remedy}or set "
        "on_bad_line=skip to skip such lines."
    )
