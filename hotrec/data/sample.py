"""A sample of a log that nothing is known of yet: its format, its columns, some of its rows."""

from __future__ import annotations

import csv
import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pyarrow as pa

from hotrec.config.data import SourceFormat
from hotrec.data import text
from hotrec.data.files import locate
from hotrec.data.readers import (
    LogFormat,
    column_names,
    count_samples,
    find_files,
    open_arrow,
    open_parquet,
)

# A log of at most this size is read whole; of a larger one this number of evenly spread pieces.
MAX_TEXT_BYTES, MAX_ROWS = 32 << 20, 500_000
NUM_PIECES = 32
_SEPARATORS = ",\t;|"
_SUFFIXES = {
    SourceFormat.parquet: (".parquet", ".pq"),
    SourceFormat.arrow: (".arrow", ".feather", ".ipc"),
    SourceFormat.delimited: (".csv", ".tsv", ".txt", ".tab"),
}
_COMPRESSIONS = (".gz", ".zst", ".bz2")
_COMPRESSION = 4  # how much smaller text may be, to guess the length of what is not read
_BLOCK_BYTES, _PIECE_BYTES = 4 << 20, 1 << 20
T = TypeVar("T")


@dataclass(frozen=True)
class Sample:
    """Rows of a log.

    Args:
        files: What ``data.source.files`` should say.
        format: How the log is stored.
        separator: The character between two columns of text; otherwise a comma.
        table: Rows, in the order of the log. Columns of text logs are texts without missing values.
        num_rows: Rows of the whole log, estimated for text of which not all was read.
        num_bad: Lines of the sample that do not fit the header.
    """

    files: list[str]
    format: SourceFormat
    separator: str
    table: pa.Table
    num_rows: int
    num_bad: int

    @property
    def is_whole(self) -> bool:
        return self.num_rows == self.table.num_rows + self.num_bad


def read_sample(path: str) -> Sample:
    """Read a sample of a file, of the files in a directory and below it, or of those of a pattern.

    Raises:
        ValueError: If there is no file, files are of several formats, or one cannot be read.
    """
    pattern, log_format = _pattern_and_format(path)
    files = find_files([pattern], log_format, key="path")
    if log_format is not SourceFormat.delimited:
        table, num_rows = _sample_tables(files, log_format)
        return Sample([pattern], log_format, ",", table, num_rows, 0)
    separator = _find_separator(files[0])
    table, num_bad, num_rows = _sample_text(files, separator)
    return Sample([pattern], log_format, separator, table, num_rows, num_bad)


def _suffix_of(path: Path) -> str:
    """The end of the name: ".csv", or ".csv.gz"."""
    if path.suffix in _COMPRESSIONS:
        return path.with_suffix("").suffix + path.suffix
    return path.suffix


def _format_of(path: Path) -> SourceFormat | None:
    suffix = _suffix_of(path).removesuffix(path.suffix if path.suffix in _COMPRESSIONS else "")
    return next((kind for kind, suffixes in _SUFFIXES.items() if suffix in suffixes), None)


def _pattern_and_format(path: str) -> tuple[str, SourceFormat]:
    directory = locate(path, "path")
    if not directory.is_dir():
        return path, _format_of(directory) or SourceFormat.delimited
    files = [
        file
        for file in sorted(directory.rglob("*"))
        if file.is_file() and not any(part.startswith((".", "_")) for part in file.parts)
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


# Parquet and Arrow.


def _sample_tables(files: list[Path], log_format: SourceFormat) -> tuple[pa.Table, int]:
    num_rows = sum(count_samples(file, LogFormat(log_format)) for file in files)
    if num_rows == 0:
        raise ValueError(f"path: expected rows, got none in {len(files)} files. Name another path.")
    pieces = [(file, piece) for file in files for piece in range(_num_pieces(file, log_format))]
    most = num_rows
    if num_rows > MAX_ROWS:
        pieces = _spread(pieces, NUM_PIECES)
        most = MAX_ROWS // len(pieces)
    tables = [_piece(file, piece, log_format).slice(0, most) for file, piece in pieces]
    return pa.concat_tables(tables, promote_options="permissive"), num_rows


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
    """The character that divides the header, and every line after it, into most columns."""
    with text.open_text(file) as stream:
        lines = stream.read(1 << 16).decode("utf-8-sig", errors="replace").splitlines()[:20]
    lines = lines[:-1] if len(lines) > 2 else lines  # the last one may be cut

    def num_columns(separator: str) -> tuple[bool, int]:
        counts = [len(row) for row in csv.reader(lines, delimiter=separator) if row]
        return len(set(counts)) == 1 and counts[0] > 1, counts[0] if counts else 0

    best = max(_SEPARATORS, key=num_columns)
    if num_columns(best)[1] < 2:
        raise ValueError(
            f"{file} line 1: expected the names of at least two columns, divided by one of "
            f"{list(_SEPARATORS)}, got {lines[:1]}. Put the names into the first line."
        )
    return best


def _sample_text(files: list[Path], separator: str) -> tuple[pa.Table, int, int]:
    names = column_names(files[0], LogFormat(SourceFormat.delimited, separator))
    layout = text.Layout(names, separator, True, (), dict.fromkeys(names, text.TEXT))
    sizes = {file: file.stat().st_size for file in files}
    total_bytes, is_compressed = sum(sizes.values()), files[0].suffix in _COMPRESSIONS
    is_whole = total_bytes <= MAX_TEXT_BYTES
    read = files if is_whole else _spread(files, NUM_PIECES)
    most = MAX_TEXT_BYTES // (1 if is_whole and not is_compressed else len(read))
    tables, num_bad, num_lines, read_bytes = [], 0, 0, 0
    fault = ("", "")
    for file in read:
        is_cut = sizes[file] > most and not is_compressed
        left = most
        for lines in _pieces(file, sizes[file], most) if is_cut else _from_start(file):
            if left <= 0:
                is_whole = False
                break
            table, bad = _parse(lines, layout)
            tables.append(table)
            num_bad += len(bad)
            fault = bad[0] if bad else fault
            num_lines += lines.num_lines
            read_bytes += len(lines.data)
            left -= len(lines.data)
    if num_bad == num_lines:
        raise ValueError(
            f"{files[0]}: expected {fault[0]}, got {fault[1]}; none of {num_lines} lines can be "
            "read. Correct the file: text is UTF-8, and values have no line ends."
        )
    if not is_whole:
        all_bytes = total_bytes * (_COMPRESSION if is_compressed else 1)
        num_lines = max(num_lines + 1, all_bytes * num_lines // read_bytes)
    return pa.concat_tables(tables).unify_dictionaries(), num_bad, num_lines


def _parse(lines: text.Lines, layout: text.Layout) -> tuple[pa.Table, list[tuple[str, str]]]:
    """The lines that fit the layout, and what was expected and found in each of the others."""
    table = text.parse(lines, layout)
    if table is not None:
        return table, []
    bad, kept, _ = text.find_bad_lines(lines, layout)
    table = text.parse(kept, layout) if kept.num_lines else None
    if table is None:
        table = pa.table({name: pa.array([], kind) for name, kind in layout.wanted.items()})
    return table, [(expected, got) for _, expected, got in bad]


def _from_start(file: Path) -> Iterator[text.Lines]:
    return text.read_lines(file, _BLOCK_BYTES, has_header=True)


def _pieces(file: Path, size: int, num_bytes: int) -> Iterator[text.Lines]:
    """Whole lines at evenly spread places of a plain file."""
    num = max(2, num_bytes // _PIECE_BYTES)
    with file.open("rb") as stream:
        for offset in (index * (size - _PIECE_BYTES) // (num - 1) for index in range(num)):
            stream.seek(offset)
            data = stream.read(_PIECE_BYTES)
            # The first line is the header or a part of one, and the last may be cut.
            first, last = data.find(b"\n") + 1, data.rfind(b"\n") + 1
            if 0 < first < last:
                yield text.Lines(data[first:last], 1, data.count(b"\n", first, last))
