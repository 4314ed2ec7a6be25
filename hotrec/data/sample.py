"""A sample of an unknown log: its format, its columns, some of its rows."""

from __future__ import annotations

import csv
import glob
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from hotrec.config.data import SourceFormat
from hotrec.data import text
from hotrec.data.columns import is_list, texts_from_arrow
from hotrec.data.files import beginning_of, locate
from hotrec.data.readers import (
    LogFormat,
    column_names,
    count_samples,
    find_files,
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
_SHOWN = 80
_COMPRESSION = 4  # assumed ratio, to guess the length of the unread part
_BLOCK_BYTES, _PIECE_BYTES = 4 << 20, 1 << 20
T = TypeVar("T")


@dataclass(frozen=True)
class Sample:
    """Rows of a log.

    Args:
        files: Value for ``data.source.files``.
        format: How the log is stored.
        separator: The character between two columns of text; otherwise a comma.
        table: Rows, in the order of the log. Columns of text logs are texts without missing values.
        num_rows: Rows of the whole log, estimated for partly read text.
        num_bad: Unreadable lines of the sample.
        fault: The place of the first of them, what was expected there, and what it is.
        partitions: The columns from names of directories.
        unread: The content of unsupported columns.
    """

    files: list[str]
    format: SourceFormat
    separator: str
    table: pa.Table
    num_rows: int
    num_bad: int
    fault: str = ""
    partitions: tuple[str, ...] = ()
    unread: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        return self.num_rows == self.table.num_rows + self.num_bad


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
        table, num_rows = _sample_tables(files, log_format)
        return Sample([pattern], log_format, ",", table, num_rows, 0, "", partitions)
    separator = _find_separator(files[0]) if log_format is SourceFormat.delimited else "\t"
    sample = _sample_text(files, log_format, separator)
    return replace(sample, files=[pattern], partitions=partitions)


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
        for found, beginning in _BEGINNINGS.items():
            if beginning.match(data):
                return found
        return SourceFormat.delimited
    return log_format


def _pattern_and_format(path: str) -> tuple[str, SourceFormat]:
    directory = locate(path, "path")
    if not directory.is_dir():
        return path, _format_of(directory) or SourceFormat.delimited
    files = [
        file
        for file in sorted(directory.rglob("*"))
        if file.is_file() and not any(p.startswith((".", "_")) for p in _parts(file, directory))
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


def _parts(file: Path, directory: Path) -> tuple[str, ...]:
    """The names of a file and of its directories below this one."""
    return file.parts[len(directory.parts) :]


def _spread(items: Sequence[T], num: int) -> list[T]:
    """At most ``num`` of the items, evenly spread, the first and the last among them."""
    if len(items) <= num:
        return list(items)
    return [items[round(index * (len(items) - 1) / (num - 1))] for index in range(num)]


# Parquet and Arrow.


def _sample_tables(files: list[Path], log_format: SourceFormat) -> tuple[pa.Table, int]:
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
        _with_partition(_piece(file, piece, log_format).slice(0, most), file)
        for file, piece in pieces
    ]
    return _together(tables), num_rows


def _with_partition(table: pa.Table, file: Path) -> pa.Table:
    """A table with the additional columns from its path."""
    for name, value in partition_of(file).items():
        if name not in table.column_names:
            table = table.append_column(name, pa.array([value] * table.num_rows, pa.string()))
    return table


def _together(tables: list[pa.Table]) -> pa.Table:
    """Concatenated tables; a column of several types becomes text, as ids are read."""
    names = list(dict.fromkeys(name for table in tables for name in table.column_names))
    for name in names:
        kinds = {table.schema.field(name).type for table in tables if name in table.column_names}
        try:
            pa.unify_schemas(
                [pa.schema([(name, kind)]) for kind in kinds], promote_options="permissive"
            )
        except pa.ArrowException:
            tables = [_with_texts(table, name) for table in tables]
    return pa.concat_tables(tables, promote_options="permissive").select(names)


def _with_texts(table: pa.Table, name: str) -> pa.Table:
    if name not in table.column_names:
        return table
    index, column = table.column_names.index(name), table.column(name)
    if not is_list(column.type):
        texts = texts_from_arrow(column)
        column = texts.values.take(pa.array(texts.codes, mask=texts.codes < 0))
    return table.set_column(index, name, column)


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


@dataclass
class _Read:
    """The text read so far, and the unreadable lines."""

    tables: list[pa.Table] = field(default_factory=list)
    objects: list[dict[str, Any]] = field(default_factory=list)
    num_bytes: int = 0
    num_bad: int = 0
    fault: str = ""
    is_whole: bool = True

    @property
    def num_read(self) -> int:
        return self.num_bad + len(self.objects) + sum(map(len, self.tables))

    def limited(self, blocks: Iterator[text.Lines], num_bytes: int) -> Iterator[text.Lines]:
        """The blocks of a file up to this many bytes."""
        for lines in blocks:
            if num_bytes <= 0:
                self.is_whole = False
                return
            num_bytes -= len(lines.data)
            self.num_bytes += len(lines.data)
            yield lines

    def note(self, bad: Sequence[text.Bad], file: Path, *, has_numbers: bool) -> None:
        self.num_bad += len(bad)
        if bad and not self.fault:
            at = f"{file} line {bad[0].line}" if has_numbers else f"{file}"
            self.fault = f"{at}: expected {bad[0].expected}, got {bad[0].got}"


def _sample_text(files: list[Path], log_format: SourceFormat, separator: str) -> Sample:
    sizes = {file: file.stat().st_size for file in files}
    total_bytes, is_compressed = sum(sizes.values()), files[0].suffix in _COMPRESSIONS
    found = _Read(is_whole=total_bytes <= MAX_TEXT_BYTES)
    read = files if found.is_whole else _spread(files, NUM_PIECES)
    most = MAX_TEXT_BYTES // (1 if found.is_whole and not is_compressed else len(read))
    has_header = log_format is SourceFormat.delimited
    for file in read:
        if sizes[file] > most and not is_compressed:
            found.is_whole = False
            for lines, is_last in _pieces(file, sizes[file], most):
                found.num_bytes += len(lines.data)
                _read([lines], file, log_format, separator, found, is_piece=True, is_end=is_last)
        else:
            blocks = text.read_lines(file, _BLOCK_BYTES, has_header=has_header)
            _read(found.limited(blocks, most), file, log_format, separator, found)
    if found.num_bad == found.num_read:
        raise ValueError(
            f"{found.fault}; none of {found.num_read} lines can be read. Correct the file: text "
            "must be UTF-8, and quotes must be closed."
        )
    num_rows = found.num_read
    if not found.is_whole:
        all_bytes = total_bytes * (_COMPRESSION if is_compressed else 1)
        num_rows = max(num_rows + 1, all_bytes * num_rows // found.num_bytes)
    unread: dict[str, str] = {}
    if log_format is SourceFormat.json:
        table, unread = _table_of(found.objects)
    else:
        table = pa.concat_tables(found.tables, promote_options="permissive").unify_dictionaries()
    bad = (found.num_bad, found.fault)
    return Sample([], log_format, separator, table, num_rows, *bad, unread=unread)


def _read(
    blocks: Iterable[text.Lines],
    file: Path,
    log_format: SourceFormat,
    separator: str,
    found: _Read,
    *,
    is_piece: bool = False,
    is_end: bool = True,
) -> None:
    """Read blocks of a file that follow each other: all, or a piece from somewhere in it."""
    if log_format is SourceFormat.json:
        for lines in blocks:
            objects, bad = _objects(lines)
            found.objects += [{**partition_of(file), **one} for one in objects]
            found.note(bad, file, has_numbers=not is_piece)
        return
    is_delimited = log_format is SourceFormat.delimited
    names = column_names(file, LogFormat(log_format, separator))
    layout = text.Layout(names, separator, is_delimited, (), dict.fromkeys(names, text.TEXT))
    for parsed in text.parse_lines(blocks, layout):
        faults = parsed.bad
        if is_piece and parsed.lines.size:  # it may start and end inside a value
            first, last = parsed.lines[0], parsed.lines[-1]
            faults = tuple(b for b in faults if b.line > first and (is_end or b.line < last))
        found.tables.append(_with_partition(parsed.table, file))
        found.note(faults, file, has_numbers=not is_piece)


def _objects(lines: text.Lines) -> tuple[list[dict[str, Any]], list[text.Bad]]:
    objects, bad = [], []
    for number, line in enumerate(lines.data.split(b"\n")[:-1], lines.first_line):
        try:
            found = json.loads(line.decode("utf-8-sig"))
        except ValueError:
            found = None
        if isinstance(found, dict):
            objects.append(found)
        else:
            bad.append(text.Bad(number, "a JSON object", repr(line[:_SHOWN])))
    return objects, bad


def _table_of(objects: list[dict[str, Any]]) -> tuple[pa.Table, dict[str, str]]:
    """The fields of objects as columns, and reasons for skipped ones."""
    arrays, unread = {}, {}
    for name in dict.fromkeys(name for found in objects for name in found):
        values = [found.get(name) for found in objects]
        array = _array(values)
        if array is None:
            has_objects = any(isinstance(value, dict) for value in values)
            unread[name] = "objects" if has_objects else "values of several kinds"
        arrays[name] = pa.nulls(len(values)) if array is None else array
    return pa.table(arrays), unread


def _array(values: list[Any]) -> pa.Array | None:
    """Values of JSON: numbers as written, so that ids keep their digits."""
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int, float} or kinds in ({str}, {bool}):
        return pa.array([v if v is None else _written(v) for v in values], pa.string())
    if kinds != {list}:
        return None
    items = {type(item) for value in values for item in value or () if item is not None}
    if items <= {int}:  # of any number of digits
        return pa.array([v and [i if i is None else str(i) for i in v] for v in values])
    return pa.array(values) if items <= {int, float} or items == {str} else None


def _written(value: bool | float | str) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _pieces(file: Path, size: int, num_bytes: int) -> Iterator[tuple[text.Lines, bool]]:
    """Complete lines at evenly spread places of a plain file, and whether they are its last."""
    num = max(2, num_bytes // _PIECE_BYTES)
    with file.open("rb") as stream:
        for offset in (index * (size - _PIECE_BYTES) // (num - 1) for index in range(num)):
            stream.seek(offset)
            data = stream.read(_PIECE_BYTES)
            is_last = offset + len(data) == size
            if is_last and not data.endswith(b"\n"):
                data += b"\n"
            # The first line is the header or a part of one, and the last may be cut.
            first, last = data.find(b"\n") + 1, data.rfind(b"\n") + 1
            if 0 < first < last:
                yield text.Lines(data[first:last], 1, data.count(b"\n", first, last)), is_last
