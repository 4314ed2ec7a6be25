"""Text logs: files, plain or compressed, as blocks of whole lines, parsed into columns.

pyarrow parses a block as a whole. Only if that fails are its lines examined one by one, to name the
file, the line and the reason, so exact messages cost nothing on good data.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from hotrec.data.files import open_stream

_NUMBER = re.compile(r"[ \t]*[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?[ \t]*")
_READ_BYTES = 8 << 20
MAX_LINE_BYTES = 64 << 20
MAX_HEADER_BYTES = 1 << 20
# The fast parser has no limit for a value; the examination of single lines must not have another.
csv.field_size_limit(MAX_LINE_BYTES)

TEXT = pa.dictionary(pa.int32(), pa.string())
NUMBER = pa.float64()


@dataclass(frozen=True)
class Lines:
    """Whole lines of a file, each with its line end; ``first_line`` is counted from 1."""

    data: bytes
    first_line: int
    num_lines: int


@dataclass(frozen=True)
class Layout:
    """How the lines of a file divide into columns."""

    names: tuple[str, ...]
    separator: str
    is_quoted: bool  # whether double quotes may enclose a value
    null_values: tuple[str, ...]
    wanted: dict[str, pa.DataType]  # the columns to read, each as TEXT or NUMBER


def open_text(path: Path) -> pa.NativeFile:
    """Open a file; .gz, .zst and .bz2 are decompressed."""
    try:
        return open_stream(path, _READ_BYTES)
    except OSError as error:
        raise ValueError(
            f"{path}: expected a file to read, got {error}. Correct the path or its permissions."
        ) from error


def _read(stream: pa.NativeFile, path: Path, num_bytes: int) -> bytes:
    try:
        data: bytes = stream.read(num_bytes)
    except OSError as error:
        raise ValueError(
            f"{path}: expected a whole file of this compression, got {error}. Fetch it again."
        ) from error
    return data


def _check_length(path: Path, number: int, num_bytes: int) -> None:
    """Refuse a line that has no end after this many bytes, before it fills the memory."""
    if num_bytes > MAX_LINE_BYTES:
        raise ValueError(
            f"{path} line {number}: expected a line of at most {MAX_LINE_BYTES} bytes, got more. "
            "Is it a text file? Give its format, or break the line."
        )


def read_lines(path: Path, block_bytes: int, *, has_header: bool) -> Iterator[Lines]:
    """The lines after the header, in blocks of about ``block_bytes``.

    Raises:
        ValueError: if the file has no lines, cannot be decompressed, or has a line longer than
            ``MAX_LINE_BYTES``.
    """
    number = 1
    rest: list[bytes] = []  # the line whose end is not read yet
    is_first = has_header
    with open_text(path) as stream:
        while data := _read(stream, path, block_bytes):
            cut = data.rfind(b"\n") + 1
            if cut == 0:
                rest.append(data)
                _check_length(path, number, sum(map(len, rest)))
                continue
            block = b"".join((*rest, data[:cut]))
            rest = [data[cut:]] if cut < len(data) else []
            if is_first:
                block = block[block.index(b"\n") + 1 :]
                number, is_first = 2, False
            if block:
                num_lines = block.count(b"\n")
                yield Lines(block, number, num_lines)
                number += num_lines
    if rest and not is_first:
        yield Lines(b"".join((*rest, b"\n")), number, 1)
        number += 1
    if number == (2 if has_header else 1) or is_first:
        raise ValueError(
            f"{path}: expected lines{' after the header' if has_header else ''}, got none. "
            "Remove the empty file from the list."
        )


def read_header(path: Path, separator: str) -> tuple[str, ...]:
    """The column names in the first line.

    Raises:
        ValueError: if there is none, it is no header, or a name occurs twice.
    """
    line = _first_line(path)
    if not line:
        raise ValueError(
            f"{path}: expected a header line, got an empty file or line. "
            "Put the names of the columns into the first line."
        )
    if len(line) > MAX_HEADER_BYTES:
        raise ValueError(
            f"{path} line 1: expected a header line of at most {MAX_HEADER_BYTES} bytes, got a "
            "longer one. Is it a text file with a header?"
        )
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} line 1: expected UTF-8 text, got {error}. Convert the file to UTF-8."
        ) from error
    if "\r" in text:
        raise ValueError(
            f"{path} line 1: expected a newline at the end of the line, got a carriage return at "
            f"position {text.index(chr(13))}. Convert the line ends of the file."
        )
    names = tuple(next(csv.reader([text], delimiter=separator)))
    repeated = sorted(name for name, count in Counter(names).items() if count > 1)
    if repeated:
        raise ValueError(
            f"{path} line 1: expected different column names, got {repeated} twice. "
            "Rename one of them."
        )
    return names


def _first_line(path: Path) -> bytes:
    """The first line without its end; of one that is too long for a header, the beginning."""
    data = b""
    with open_text(path) as stream:
        while (
            b"\n" not in data
            and len(data) <= MAX_HEADER_BYTES
            and (more := _read(stream, path, 1 << 16))
        ):
            data += more
    return data.partition(b"\n")[0].rstrip(b"\r")


def count_lines(path: Path) -> int:
    """Number of lines, an unfinished last one included."""
    count = unfinished_bytes = 0
    with open_text(path) as stream:
        while data := _read(stream, path, _READ_BYTES):
            count += data.count(b"\n")
            end = data.rfind(b"\n") + 1
            unfinished_bytes = len(data) - end if end else unfinished_bytes + len(data)
            _check_length(path, count + 1, unfinished_bytes)
    return count + int(unfinished_bytes > 0)


def parse(lines: Lines, layout: Layout) -> pa.Table | None:
    """The wanted columns; None if any line does not fit the layout.

    A number that is not a number is no number, so "nan" does not fit unless it is a null value.
    """
    quote = '"' if layout.is_quoted else False
    try:
        table = pacsv.read_csv(
            pa.BufferReader(lines.data),
            read_options=pacsv.ReadOptions(
                # In one piece: several would each bring dictionaries of their own.
                column_names=list(layout.names),
                block_size=len(lines.data) + 1,
            ),
            parse_options=pacsv.ParseOptions(
                delimiter=layout.separator,
                quote_char=quote,
                newlines_in_values=False,
                ignore_empty_lines=False,
            ),
            convert_options=pacsv.ConvertOptions(
                column_types=layout.wanted,
                include_columns=list(layout.wanted),
                null_values=list(layout.null_values),
                strings_can_be_null=True,
                quoted_strings_can_be_null=True,
            ),
        )
    except (pa.ArrowInvalid, pa.ArrowKeyError):
        return None
    # pyarrow also ends lines at a lone carriage return; then its count is not ours.
    if table.num_rows != lines.num_lines:
        return None
    numbers = (table.column(name) for name, kind in layout.wanted.items() if kind == NUMBER)
    return None if any(pc.any(pc.is_nan(column)).as_py() for column in numbers) else table


def find_bad_lines(
    lines: Lines, layout: Layout
) -> tuple[list[tuple[int, str, str]], Lines, list[int]]:
    """Examine the lines one by one; about 200,000 lines/s.

    Returns:
        Number, expected content and content of each line that cannot be read; the others, and
        their numbers.
    """
    numeric = [i for i, name in enumerate(layout.names) if layout.wanted.get(name) == NUMBER]
    bad, kept, numbers = [], [], []
    for number, line in enumerate(lines.data.split(b"\n")[:-1], lines.first_line):
        fault = _fault(line, layout, numeric)
        if fault is not None:
            bad.append((number, *fault))
        else:
            kept.append(line + b"\n")
            numbers.append(number)
    return bad, Lines(b"".join(kept), lines.first_line, len(kept)), numbers


def _fault(line: bytes, layout: Layout, numeric: Sequence[int]) -> tuple[str, str] | None:
    try:
        text = line.decode().removesuffix("\r")
    except UnicodeDecodeError as error:
        return "UTF-8 text", f"byte {line[error.start]:#04x} at position {error.start}"
    if "\r" in text:
        return "no carriage return inside a line", f"one at position {text.index(chr(13))}"
    if layout.is_quoted:
        if _has_open_quote(text, layout.separator):
            return "a closing quote in the line", "none"
        values = next(csv.reader([text], delimiter=layout.separator), [""])
    else:
        values = text.split(layout.separator)
    if len(values) != len(layout.names):
        return f"{len(layout.names)} columns", str(len(values))
    for index in numeric:
        value = values[index]
        if value not in layout.null_values and not _NUMBER.fullmatch(value):
            return f"a number in column {layout.names[index]}", repr(value[:80])
    return None


def _has_open_quote(text: str, separator: str) -> bool:
    try:
        next(csv.reader([text], delimiter=separator, strict=True), [])
    except csv.Error as error:
        # Text after a closing quote is an error to csv as well, but not to pyarrow.
        return "end of data" in str(error)
    return False
