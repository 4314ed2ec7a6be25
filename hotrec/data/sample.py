"""A sample of an unknown log: its format, its columns, some of its rows."""

from __future__ import annotations

import csv
import glob
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import polars as pl
import pyarrow as pa

from hotrec.config.data import SourceFormat
from hotrec.data import text
from hotrec.data.files import beginning_of, find_files, locate
from hotrec.data.readers import (
    LogFormat,
    column_names,
    count_samples,
    open_arrow,
    open_parquet,
    partition_of,
)

# A log of at most this size is read completely, a larger one in this number of evenly spread
# pieces.
MAX_TEXT_BYTES, MAX_ROWS = 32 << 20, 500_000
NUM_PIECES = 32
_SEPARATORS = ",\t;|"
_SUFFIXES = {
    SourceFormat.parquet: (".parquet", ".pq"),
    SourceFormat.arrow: (".arrow", ".feather", ".ipc"),
    SourceFormat.delimited: (".csv", ".tsv", ".txt", ".tab"),
    SourceFormat.json: (".jsonl", ".ndjson", ".json"),
}
# The first bytes of files, independent of their names.
_BEGINNINGS = {
    SourceFormat.parquet: re.compile(rb"PAR1"),
    SourceFormat.arrow: re.compile(rb"ARROW1"),
    SourceFormat.json: re.compile(rb"(\xef\xbb\xbf)?\s*[{\[]"),
    SourceFormat.criteo: re.compile(rb"[01](\t-?[0-9]*){13}(\t([0-9a-f]{8})?){26}\r?\n"),
}
_COMPRESSIONS = (".gz", ".zst", ".bz2")
_COMPRESSION = 4  # assumed ratio, to guess the length of the unread part
_PIECE_BYTES = 1 << 20
T = TypeVar("T")


@dataclass(frozen=True)
class Sample:
    """Rows of a log.

    Args:
        files: Value for ``data.source.files``.
        format: How the log is stored.
        separator: The character between two columns of text; otherwise a comma.
        table: Rows, in the order of the log. All columns of text logs are texts.
        num_rows: Rows of the whole log, estimated for partly read text.
        num_bad: Unreadable lines, where the whole log was read.
        fault: The place of the first of them, what was expected there, and what it is.
        partitions: The columns from names of directories.
    """

    files: list[str]
    format: SourceFormat
    separator: str
    table: pl.DataFrame
    num_rows: int
    num_bad: int = 0
    fault: str = ""
    partitions: tuple[str, ...] = ()

    @property
    def is_text(self) -> bool:
        return self.format not in (SourceFormat.parquet, SourceFormat.arrow)

    @property
    def is_whole(self) -> bool:
        return self.num_rows == len(self.table) + self.num_bad


def read_sample(path: str) -> Sample:
    """Read a sample of a file, of the files in a directory and below it, or of a pattern's files.

    Raises:
        ValueError: If there is no file, files are of several formats, or one cannot be read.
    """
    pattern, log_format = _pattern_and_format(path)
    files = find_files([pattern], log_format, key="path")
    log_format = _by_beginning(files[0], log_format)
    partitions = tuple(dict.fromkeys(name for file in files for name in partition_of(file)))
    if log_format in (SourceFormat.parquet, SourceFormat.arrow):
        table, num_rows = _read_tables(files, log_format)
        return Sample([pattern], log_format, ",", table, num_rows, partitions=partitions)
    separator = _find_separator(files[0]) if log_format is SourceFormat.delimited else "\t"
    table, num_rows, num_bad, fault = _read_text(files, log_format, separator)
    return Sample([pattern], log_format, separator, table, num_rows, num_bad, fault, partitions)


def _suffix_of(path: Path) -> str:
    """The end of the name: ".csv", or ".csv.gz"."""
    if path.suffix in _COMPRESSIONS:
        return path.with_suffix("").suffix + path.suffix
    return path.suffix


def _format_of(path: Path) -> SourceFormat | None:
    suffix = _suffix_of(path).removesuffix(path.suffix if path.suffix in _COMPRESSIONS else "")
    return next((kind for kind, suffixes in _SUFFIXES.items() if suffix in suffixes), None)


def _by_beginning(file: Path, log_format: SourceFormat) -> SourceFormat:
    """The format that the first bytes of a file show, if its name suggests another one."""
    with text.open_text(file) as stream:
        data = stream.read(1 << 14)
    if log_format in (SourceFormat.delimited, SourceFormat.json):
        matching = (kind for kind, beginning in _BEGINNINGS.items() if beginning.match(data))
        return next(matching, SourceFormat.delimited)
    return log_format


def _pattern_and_format(path: str) -> tuple[str, SourceFormat]:
    directory = locate(path, "path")
    if not directory.is_dir():
        return path, _format_of(directory) or SourceFormat.delimited
    depth = len(directory.parts)
    files = [
        file
        for file in sorted(directory.rglob("*"))
        if file.is_file() and not any(part.startswith((".", "_")) for part in file.parts[depth:])
    ]
    formats = {_suffix_of(file): found for file in files if (found := _format_of(file))}
    if len(formats) != 1:
        raise ValueError(
            f"path: expected files of one format in {path}, got {sorted(formats) or 'none'} among "
            f"{len(files)} files. Name a pattern such as '{path}/*.csv'."
        )
    [(suffix, log_format)] = formats.items()
    is_flat = all(file.parent == directory for file in files)
    pattern = locate(glob.escape(path), "path") / ("" if is_flat else "**") / f"*{suffix}"
    return str(pattern), log_format


def _spread(items: Sequence[T], num: int) -> list[T]:
    """At most ``num`` of the items, evenly spread, the first and the last among them."""
    if len(items) <= num:
        return list(items)
    return [items[round(index * (len(items) - 1) / (num - 1))] for index in range(num)]


def _with_partition(table: pl.DataFrame, file: Path) -> pl.DataFrame:
    """A table with the additional columns from its path."""
    more = {name: of for name, of in partition_of(file).items() if name not in table.columns}
    return table.with_columns(pl.lit(of, pl.String).alias(name) for name, of in more.items())


def _together(tables: list[pl.DataFrame]) -> pl.DataFrame:
    """Concatenated tables; a column of several types becomes text, as ids are read."""
    types: dict[str, set[pl.DataType]] = {}
    for table in tables:
        for name, kind in table.schema.items():
            types.setdefault(name, set()).add(kind)
    odd = {n for n, of in types.items() if len(of) > 1 and not all(t.is_integer() for t in of)}
    texts = [
        table.with_columns(pl.col(name).cast(pl.String) for name in table.columns if name in odd)
        for table in tables
    ]
    return pl.concat(texts, how="diagonal_relaxed").select(list(types))


# Parquet and Arrow.


def _read_tables(files: list[Path], log_format: SourceFormat) -> tuple[pl.DataFrame, int]:
    for file in files:
        column_names(file, LogFormat(log_format))  # refuses names that occur twice
    num_rows = sum(count_samples(file, LogFormat(log_format)) for file in files)
    if num_rows == 0:
        raise ValueError(f"path: expected rows, got none in {len(files)} files. Name another path.")
    pieces = [(file, piece) for file in files for piece in range(_num_pieces(file, log_format))]
    most = num_rows
    if num_rows > MAX_ROWS:
        pieces = _spread(pieces, NUM_PIECES)
        most = MAX_ROWS // len(pieces)
    tables = [
        _with_partition(_frame(_piece(file, piece, log_format).slice(0, most)), file)
        for file, piece in pieces
    ]
    return _together(tables), num_rows


def _frame(table: pa.Table) -> pl.DataFrame:
    """An Arrow table with the columns whose type polars has; others are empty structures."""

    def series(name: str) -> pl.Series:
        try:
            return pl.Series(name, table.column(name))
        except (pl.exceptions.PolarsError, pa.ArrowException, TypeError, ValueError):
            return pl.Series(name, [None] * len(table), pl.Struct({}))

    return pl.DataFrame([series(name) for name in table.column_names])


def _num_pieces(file: Path, log_format: SourceFormat) -> int:
    if log_format is SourceFormat.parquet:
        return int(open_parquet(file).num_row_groups)
    reader = open_arrow(file)
    # A stream cannot be divided.
    is_file = isinstance(reader, pa.RecordBatchFileReader)
    return int(reader.num_record_batches) if is_file else 1


def _piece(file: Path, piece: int, log_format: SourceFormat) -> pa.Table:
    if log_format is SourceFormat.parquet:
        return open_parquet(file).read_row_group(piece)
    reader = open_arrow(file)
    if isinstance(reader, pa.RecordBatchFileReader):
        return pa.Table.from_batches([reader.get_batch(piece)])
    return reader.read_all()


# Text.


def _find_separator(file: Path) -> str:
    """The character that divides the header, and every line after it, into the most columns."""
    with text.open_text(file) as stream:
        lines = stream.read(1 << 16).decode("utf-8-sig", errors="replace").splitlines()[:20]
    lines = lines[:-1] if len(lines) > 2 else lines  # the last one may be cut

    def num_columns(separator: str) -> tuple[bool, int]:
        counts = [len(row) for row in csv.reader(lines, delimiter=separator) if row]
        return len(set(counts)) == 1 and counts[0] > 1, counts[0] if counts else 0

    best = max(_SEPARATORS, key=num_columns)
    if num_columns(best)[1] < 2:
        seen = lines[:1] if lines and lines[0].isprintable() else beginning_of(file)
        raise ValueError(
            f"{file} line 1: expected the names of at least two columns, separated by one of "
            f"{list(_SEPARATORS)}, got {seen}. Put the names into the first line."
        )
    return best


def _read_text(
    files: list[Path], log_format: SourceFormat, separator: str
) -> tuple[pl.DataFrame, int, int, str]:
    """Rows, an estimate of all rows, the number of bad lines, and the first of them."""
    sizes = [file.stat().st_size for file in files]
    is_compressed, is_large = files[0].suffix in _COMPRESSIONS, sum(sizes) > MAX_TEXT_BYTES
    read = _spread(files, NUM_PIECES) if is_large else files
    most = MAX_TEXT_BYTES // (len(read) if is_large or is_compressed else 1)
    is_whole, num_bytes, num_bad, fault, tables = len(read) == len(files), 0, 0, "", []
    for file in read:
        for lines, is_last in _pieces(file, most, log_format, is_compressed=is_compressed):
            is_whole &= is_last
            if not is_last and is_compressed:
                break
            num_bytes += len(lines.data)
            table, bad = _parse(lines, file, log_format, separator)
            num_bad += len(bad)
            if bad and not fault:
                at = f"{file} line {bad[0].line}" if is_last else f"{file}"
                fault = f"{at}: expected {bad[0].expected}, got {bad[0].got}"
            tables.append(_with_partition(table, file))
    num_rows = sum(map(len, tables)) + num_bad
    if num_bad == num_rows:
        raise ValueError(
            f"{fault}; none of {num_bad} lines can be read. Correct the file: text must be UTF-8, "
            "and quotes must be closed."
        )
    if not is_whole:
        num_bad, fault = 0, ""  # pieces begin and end inside of records
        all_bytes = sum(sizes) * (_COMPRESSION if is_compressed else 1)
        num_rows = max(num_rows + 1, all_bytes * num_rows // num_bytes)
    return _together(tables), num_rows, num_bad, fault


def _pieces(
    file: Path, most: int, log_format: SourceFormat, *, is_compressed: bool
) -> Iterator[tuple[text.Lines, bool]]:
    """Whole lines of a file, in all at most ``most`` bytes, and whether they are all of it."""
    size, has_header = file.stat().st_size, log_format is SourceFormat.delimited
    if size <= most or is_compressed:
        for lines in text.read_lines(file, most, has_header=has_header):
            yield lines, most > 0
            most -= len(lines.data)
        return
    num = max(2, most // _PIECE_BYTES)
    with file.open("rb") as stream:
        for offset in (index * (size - _PIECE_BYTES) // (num - 1) for index in range(num)):
            stream.seek(offset)
            data = stream.read(_PIECE_BYTES)
            # The first line is the header or a part of one, and the last may be cut.
            first, last = data.find(b"\n") + 1, data.rfind(b"\n") + 1
            if 0 < first < last:
                yield text.Lines(data[first:last], 1, data.count(b"\n", first, last)), False


def _parse(
    lines: text.Lines, file: Path, log_format: SourceFormat, separator: str
) -> tuple[pl.DataFrame, list[text.Bad]]:
    """The rows of lines, and the bad ones."""
    if log_format is SourceFormat.json:
        return _parse_json(lines)
    names, is_quoted = column_names(file, LogFormat(log_format, separator)), True
    is_quoted = log_format is SourceFormat.delimited
    layout = text.Layout(names, separator, is_quoted, (), dict.fromkeys(names, text.TEXT))
    parsed = list(text.parse_lines([lines], layout))
    tables = pa.concat_tables([of.table for of in parsed]).unify_dictionaries()
    frame = pl.DataFrame(tables).cast(pl.String)
    return frame, [bad for of in parsed for bad in of.bad]


def _parse_json(lines: text.Lines) -> tuple[pl.DataFrame, list[text.Bad]]:
    """Objects as texts: numbers, lists and objects as they are written in JSON."""
    rows, bad = [], []
    for number, line in enumerate(lines.data.split(b"\n")[:-1], lines.first_line):
        try:
            found = json.loads(line.decode("utf-8-sig"))
        except ValueError:
            found = None
        if isinstance(found, dict):
            rows.append({name: _written(value) for name, value in found.items()})
        else:
            bad.append(text.Bad(number, "a JSON object", repr(line[:80])))
    names = dict.fromkeys(name for row in rows for name in row)
    return pl.DataFrame(rows, schema=dict.fromkeys(names, pl.String)), bad


def _written(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)
