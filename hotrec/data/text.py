"""Text logs: files, plain or compressed, as blocks of whole lines, parsed into columns.

pyarrow parses a block as a whole. Only if that fails are its lines examined one by one, to name the
file, the line and the reason, so exact messages cost nothing on good data.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pacsv

_NUMBER = re.compile(r"[ \t]*[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?[ \t]*")
_READ_BYTES = 8 << 20

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
        return pa.input_stream(str(path), compression="detect", buffer_size=_READ_BYTES)
    except OSError as error:
        raise ValueError(f"{path}: expected a file to read, got {error}.") from error


def _read(stream: pa.NativeFile, path: Path, num_bytes: int) -> bytes:
    try:
        data: bytes = stream.read(num_bytes)
    except OSError as error:
        raise ValueError(
            f"{path}: expected a whole file of this compression, got {error}. Fetch it again."
        ) from error
    return data


def read_lines(path: Path, block_bytes: int, *, has_header: bool) -> Iterator[Lines]:
    """The lines after the header, in blocks of about ``block_bytes``.

    Raises:
        ValueError: if the file has no lines, cannot be decompressed, or has a line longer than a
            block.
    """
    number = 1
    rest = b""
    is_first = has_header
    with open_text(path) as stream:
        while data := _read(stream, path, block_bytes):
            cut = data.rfind(b"\n") + 1
            if cut == 0:
                rest += data
                if len(rest) > 2 * block_bytes:
                    raise ValueError(
                        f"{path} line {number}: expected a line of at most {block_bytes} bytes, "
                        f"got more than {len(rest)}. Is it a text file? Else raise block_mib."
                    )
                continue
            block = rest + data[:cut] if rest else data[:cut]
            rest = data[cut:]
            if is_first:
                block = block[block.index(b"\n") + 1 :]
                number, is_first = 2, False
            if block:
                num_lines = block.count(b"\n")
                yield Lines(block, number, num_lines)
                number += num_lines
    if rest and not is_first:
        yield Lines(rest + b"\n", number, 1)
        number += 1
    if number == (2 if has_header else 1) or is_first:
        raise ValueError(
            f"{path}: expected lines{' after the header' if has_header else ''}, got none. "
            "Remove the empty file from the list."
        )


def read_header(path: Path, separator: str) -> tuple[str, ...]:
    """The column names in the first line.

    Raises:
        ValueError: if there is none, it is not UTF-8, or a name occurs twice.
    """
    with open_text(path) as stream:
        data = b""
        while b"\n" not in data and (more := _read(stream, path, 1 << 16)):
            data += more
    line = data.partition(b"\n")[0].rstrip(b"\r")
    if not line:
        raise ValueError(f"{path}: expected a header line, got an empty file or line.")
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} line 1: expected UTF-8 text, got {error}.") from error
    names = tuple(next(csv.reader([text], delimiter=separator)))
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"{path} line 1: expected different column names, got {repeated} twice.")
    return names


def count_lines(path: Path) -> int:
    """Number of lines, an unfinished last one included."""
    count = 0
    last = b"\n"
    with open_text(path) as stream:
        while data := _read(stream, path, _READ_BYTES):
            count += data.count(b"\n")
            last = data
    return count + (0 if last.endswith(b"\n") else 1)


def parse(lines: Lines, layout: Layout) -> pa.Table | None:
    """The wanted columns; None if any line does not fit the layout."""
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
    return table if table.num_rows == lines.num_lines else None


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
