"""Readers: the files of a log -> blocks of raw columns, checked, whatever the format.

A sample that cannot be read raises an error that names the file and the line, or is left out and
counted, as specified. Memory is bounded by the block, not by the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hotrec.config.data import CRITEO_COLUMNS, OnBadLine, SourceFormat, TimeUnit
from hotrec.data import text
from hotrec.data.columns import (
    MS_PER_UNIT,
    Float64s,
    Lists,
    RawBlock,
    Texts,
    ids_from_arrow,
    item_type,
    numbers_from_arrow,
    numbers_from_texts,
    times_from_arrow,
    times_from_texts,
)
from hotrec.data.files import find_paths, is_local, open_file
from hotrec.types import Rows

_SUFFIXES = {
    SourceFormat.parquet: (".parquet", ".pq"),
    SourceFormat.arrow: (".arrow", ".feather", ".ipc"),
}
_ARROW_MAGIC_BYTES = 8  # with padding
_ROWS_PER_BLOCK = 131_072
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Wanted:
    """The columns to read of a log or a side table.

    Args:
        ids: Columns whose values are ids, or lists of ids if the file has lists.
        numbers: Columns whose values are numbers. A column may be in both.
        labels: Number columns that must be 0 or 1.
        weights: Number columns that must be at least 0.
        required: Number columns without missing values, besides these.
        times: Number columns that may hold times, with their units; they become milliseconds since
            1970. Those of texts are among ``ids``, too.
    """

    ids: tuple[str, ...]
    numbers: tuple[str, ...]
    labels: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    times: Mapping[str, TimeUnit] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys((*self.ids, *self.numbers)))


@dataclass(frozen=True)
class LogFormat:
    """How the files of a log or a side table are stored; see ``hotrec.config.data.SourceSpec``."""

    format: SourceFormat
    separator: str = "\t"
    null_values: tuple[str, ...] = ("",)
    on_bad_line: OnBadLine = OnBadLine.error
    block_bytes: int = 8 << 20


def find_files(patterns: list[str], log_format: SourceFormat, *, key: str = "files") -> list[Path]:
    """The files that match paths, directories and patterns, in order; remote ones as UPaths.

    Raises:
        ValueError: if one of them matches no file, or see ``find_paths``.
    """
    files: list[Path] = []
    for pattern in patterns:
        found = find_paths(pattern, _SUFFIXES.get(log_format), key=key)
        if not found:
            raise ValueError(
                f"{key}: expected files of format {log_format.name} at {pattern!r} "
                f"(current directory {Path.cwd()}), got none. Correct the path or the pattern."
            )
        files += found
    return files


def column_names(path: Path, log_format: LogFormat) -> tuple[str, ...]:
    """The columns that a file has.

    Raises:
        ValueError: if it cannot be read.
    """
    match log_format.format:
        case SourceFormat.criteo:
            return CRITEO_COLUMNS
        case SourceFormat.delimited:
            return text.read_header(path, log_format.separator)
        case SourceFormat.parquet:
            return tuple(open_parquet(path).schema_arrow.names)
        case SourceFormat.arrow:
            return tuple(open_arrow(path).schema.names)


def count_samples(path: Path, log_format: LogFormat) -> int:
    """Lines or rows of a file, bad ones included, without parsing it."""
    match log_format.format:
        case SourceFormat.criteo:
            return text.count_lines(path)
        case SourceFormat.delimited:
            return text.count_lines(path) - 1
        case SourceFormat.parquet:
            return int(open_parquet(path).metadata.num_rows)
        case SourceFormat.arrow:
            return sum(batch.num_rows for batch in _arrow_batches(path))


def read_blocks(path: Path, log_format: LogFormat, wanted: Wanted) -> Iterator[RawBlock]:
    """The samples of one file, in order, in blocks.

    Raises:
        ValueError: for a file that is empty, damaged or lacks a column, and, unless bad lines are
            skipped, for a sample that cannot be read; the message names the file and the line.
    """
    names = column_names(path, log_format)
    missing = [name for name in wanted.names if name not in names]
    if missing:
        raise ValueError(
            f"{path}: expected the columns {missing}, got {list(names)}. "
            "Correct the columns of the specification."
        )
    if log_format.format in (SourceFormat.criteo, SourceFormat.delimited):
        blocks = _text_blocks(path, log_format, wanted, names)
    else:
        blocks = _table_blocks(path, log_format, wanted)
    for block in blocks:
        yield _checked(block, path, wanted, log_format.on_bad_line)


def _text_blocks(
    path: Path, log_format: LogFormat, wanted: Wanted, names: tuple[str, ...]
) -> Iterator[RawBlock]:
    is_delimited = log_format.format is SourceFormat.delimited
    types = dict.fromkeys(wanted.numbers, text.NUMBER) | dict.fromkeys(wanted.ids, text.TEXT)
    layout = text.Layout(
        names, log_format.separator, is_delimited, tuple(log_format.null_values), types
    )
    for lines in text.read_lines(path, log_format.block_bytes, has_header=is_delimited):
        table = text.parse(lines, layout)
        numbers = np.arange(lines.first_line, lines.first_line + lines.num_lines)
        num_skipped = 0
        if table is None:
            table, numbers = _parse_around_bad_lines(path, lines, layout, log_format.on_bad_line)
            num_skipped = lines.num_lines - numbers.size
        yield _block(table, wanted, path, numbers, num_skipped)


def _parse_around_bad_lines(
    path: Path, lines: text.Lines, layout: text.Layout, on_bad_line: OnBadLine
) -> tuple[pa.Table, Rows]:
    bad, kept, numbers = text.find_bad_lines(lines, layout)
    if bad and on_bad_line is OnBadLine.error:
        raise _bad_line_error(path, *bad[0])
    if not numbers:
        empty = {name: pa.array([], kind) for name, kind in layout.wanted.items()}
        return pa.table(empty), np.empty(0, np.int64)
    table = text.parse(kept, layout)
    if table is None:
        raise ValueError(
            f"{path} lines {numbers[0]} to {numbers[-1]}: expected {len(layout.names)} columns "
            f"separated by {layout.separator!r}, got lines that pyarrow cannot parse. "
            "Look for stray quotes and carriage returns."
        )
    return table, np.array(numbers, np.int64)


def open_parquet(path: Path) -> pq.ParquetFile:
    """Open a Parquet file.

    Raises:
        ValueError: if it is none.
    """
    try:
        return pq.ParquetFile(path if is_local(path) else open_file(path))
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"{path}: expected a Parquet file, got {error}. Fetch it again."
        ) from error


def open_arrow(path: Path) -> pa.RecordBatchFileReader | pa.RecordBatchStreamReader:
    """Open an Arrow IPC file or stream.

    Raises:
        ValueError: if it is neither.
    """
    try:
        source = open_file(path)
        try:
            reader = pa.ipc.open_file(source)
        except pa.ArrowInvalid:
            source.seek(0)
            return pa.ipc.open_stream(source)
        # A file has its schema twice. Only the one at the end is needed, but damage shows here.
        source.seek(_ARROW_MAGIC_BYTES)
        if not pa.ipc.open_stream(source).schema.equals(reader.schema):
            raise pa.ArrowInvalid("different schemas at its beginning and end")
        return reader
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"{path}: expected an Arrow IPC file or stream, got {error}. Fetch it again."
        ) from error


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
        for start in range(0, batch.num_rows, _ROWS_PER_BLOCK):
            yield batch.select(names).slice(start, _ROWS_PER_BLOCK)


def _table_blocks(path: Path, log_format: LogFormat, wanted: Wanted) -> Iterator[RawBlock]:
    number = 1
    try:
        for batch in _batches(path, log_format, wanted.names):
            if batch.num_rows:
                yield _block(batch, wanted, path, np.arange(number, number + batch.num_rows))
            number += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: expected a whole file, got {error}. Fetch it again.") from error
    if number == 1:
        raise ValueError(f"{path}: expected rows, got none. Remove the empty file from the list.")


def _block(
    table: pa.Table | pa.RecordBatch, wanted: Wanted, path: Path, lines: Rows, num_skipped: int = 0
) -> RawBlock:
    ids: dict[str, Texts | Lists] = {}
    numbers: dict[str, Float64s] = {}
    for name in wanted.names:
        column = table.column(name)
        _check_type(column.type, name, wanted, path)
        try:
            if name in wanted.ids:
                ids[name] = ids_from_arrow(column)
            if name in wanted.numbers:
                numbers[name] = _numbers(column, ids.get(name), wanted.times.get(name))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise ValueError(
                f"{path} lines {lines[0]} to {lines[-1]}: expected "
                f"{'numbers' if name in wanted.numbers else 'ids'} in column {name}, got {error}. "
                "Correct the values, or the columns of the specification."
            ) from error
    return RawBlock(lines, ids, numbers, num_skipped)


def _numbers(
    column: pa.ChunkedArray | pa.Array, found: Texts | Lists | None, unit: TimeUnit | None
) -> Float64s:
    """A column as numbers, given its texts if it is read as ids, too, and its unit if of times."""
    if unit is not None and pa.types.is_temporal(column.type):
        return times_from_arrow(column)
    if isinstance(found, Texts):
        if unit is TimeUnit.iso:
            return times_from_texts(found)
        numbers = numbers_from_texts(found)
    else:
        numbers = numbers_from_arrow(column)
    return numbers if unit is None else numbers * MS_PER_UNIT[unit]


def _check_type(kind: pa.DataType, name: str, wanted: Wanted, path: Path) -> None:
    """Refuse types whose values could be read, but not as what they are."""
    if name in wanted.ids and pa.types.is_floating(item_type(kind)):
        raise ValueError(
            f"{path} column {name}: expected ids, which are integers or texts, got type {kind}. "
            "Cast the column to integers."
        )
    if name in wanted.numbers and name not in wanted.times and pa.types.is_temporal(kind):
        raise ValueError(
            f"{path} column {name}: expected numbers, got type {kind}. "
            "Cast the column to integers, or set derive to hour_of_day or day_of_week."
        )
    is_iso = wanted.times.get(name) is TimeUnit.iso
    if is_iso and not pa.types.is_temporal(kind) and not _is_text(kind):
        raise ValueError(
            f"{path} column {name}: expected texts as data.source.times says, got type {kind}. "
            f"Set data.source.times.{name} to s, ms, us or ns."
        )


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _bad_line_error(path: Path, number: int, expected: str, got: str) -> ValueError:
    return ValueError(
        f"{path} line {number}: expected {expected}, got {got}. "
        "Fix the line, or set on_bad_line=skip to leave such lines out."
    )


def _checked(block: RawBlock, path: Path, wanted: Wanted, on_bad_line: OnBadLine) -> RawBlock:
    """Refuse or leave out samples with a label or number that cannot be used."""
    is_bad = np.zeros(len(block), bool)
    for name in wanted.numbers:
        values = block.numbers[name]
        if name in wanted.labels:
            is_bad_here = (values != 0) & (values != 1)
            expected = "a label of 0 or 1"
        elif name in wanted.weights:
            is_bad_here = ~((values >= 0) & (values <= _LARGEST))
            expected = "a weight of at least 0"
        elif name in wanted.required:
            is_bad_here = ~(np.abs(values) <= _LARGEST)
            expected = "a finite number"
        else:
            is_bad_here = np.abs(values) > _LARGEST
            expected = "a finite number or nothing"
        if is_bad_here.any() and on_bad_line is OnBadLine.error:
            at = int(np.argmax(is_bad_here))
            # NaN stands for nothing here, and what was NaN is infinite.
            got = "nothing" if np.isnan(values[at]) else f"{values[at]}"
            got = "inf or nan" if got == "inf" else got
            if wanted.times.get(name) is TimeUnit.iso:
                expected = "a time such as 2024-05-01T12:30:00"
            texts = block.ids.get(name)
            if isinstance(texts, Texts) and texts.codes[at] >= 0:
                got = repr(texts.values[int(texts.codes[at])].as_py())
            expected = f"{expected} in column {name}"
            raise _bad_line_error(path, int(block.lines[at]), expected, got)
        is_bad |= is_bad_here
    return block.keep(~is_bad) if is_bad.any() else block
