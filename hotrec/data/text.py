"""Text logs: files, plain or compressed, as blocks of whole lines, parsed into columns.

pyarrow parses a block as a whole. Its lines are examined one by one only if that fails, to name the
file, the line and the reason, so exact messages cost nothing on good data.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from hotrec.data.files import beginning_of, open_stream
from hotrec.types import Rows

_LONE_RETURN = re.compile(r"\r(?!\n)")
_READ_BYTES = 8 << 20
MAX_LINE_BYTES = 64 << 20
MAX_HEADER_BYTES = 1 << 20
# Limits the search for the end of a stray open quote.
MAX_LINES_OF_VALUE = 10_000
# The fast parser has no limit for a value, so the examination of single lines must have none
# either.
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


@contextmanager
def open_text(path: Path) -> Iterator[pa.NativeFile]:
    """Open a file; .gz, .zst and .bz2 are decompressed.

    Raises:
        ValueError: if it, or later a part of it, cannot be read.
    """
    try:
        with open_stream(path, _READ_BYTES) as stream:
            yield stream
    except OSError as error:
        raise ValueError(
            f"{path}: expected a readable file, compressed as its name says, got {error}, and "
            f"{beginning_of(path)}. Correct its name or permissions, or download it again."
        ) from error


def _check_length(path: Path, number: int, num_bytes: int) -> None:
    """Refuse a line that has no end after this many bytes, before it fills the memory."""
    if num_bytes > MAX_LINE_BYTES:
        raise ValueError(
            f"{path} line {number}: expected a line of at most {MAX_LINE_BYTES} bytes, got more. "
            "Check the format, or split the line."
        )


def read_lines(path: Path, block_bytes: int, *, has_header: bool) -> Iterator[Lines]:
    """The lines after the header, in blocks of about ``block_bytes``.

    Raises:
        ValueError: if the file has no lines, cannot be decompressed, or has a line longer than
            ``MAX_LINE_BYTES``.
    """
    number = 1
    rest: list[bytes] = []  # the line whose end has not been read yet
    is_first = has_header
    with open_text(path) as stream:
        while data := stream.read(block_bytes):
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
        ValueError: if there is none, it is not a header, or a name occurs twice.
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
            "longer one. Check that it is a text file with a header."
        )
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} line 1: expected UTF-8 text, got {error}, and {beginning_of(path)}. "
            "Convert the file to UTF-8, or correct its name."
        ) from error
    if "\r" in text:
        raise ValueError(
            f"{path} line 1: expected a newline at the end of the line, got a carriage return at "
            f"position {text.index(chr(13))}. Convert the line ends of the file."
        )
    if _has_open_quote(text, separator):
        raise ValueError(
            f"{path} line 1: expected the names of the columns in one line, got an open quote. "
            "Remove the line end from the name."
        )
    names = tuple(next(csv.reader([text], delimiter=separator)))
    check_names(names, f"{path} line 1")
    return names


def check_names(names: Sequence[str], where: Path | str) -> None:
    """Check that column names are unique.

    Raises:
        ValueError: if they are not.
    """
    repeated = sorted(name for name, count in Counter(names).items() if count > 1)
    if repeated:
        raise ValueError(
            f"{where}: expected unique column names, got {repeated} twice. Rename one of them."
        )


def _first_line(path: Path) -> bytes:
    """The first line without its end; only the beginning if it is too long for a header."""
    data = b""
    with open_text(path) as stream:
        while (
            b"\n" not in data and len(data) <= MAX_HEADER_BYTES and (more := stream.read(1 << 16))
        ):
            data += more
    return data.partition(b"\n")[0].rstrip(b"\r")


def count_lines(path: Path) -> int:
    """Number of lines, an unfinished last one included."""
    count = unfinished_bytes = 0
    with open_text(path) as stream:
        while data := stream.read(_READ_BYTES):
            count += data.count(b"\n")
            end = data.rfind(b"\n") + 1
            unfinished_bytes = len(data) - end if end else unfinished_bytes + len(data)
            _check_length(path, count + 1, unfinished_bytes)
    return count + int(unfinished_bytes > 0)


@dataclass(frozen=True)
class Bad:
    """A line that cannot be read.

    Args:
        line: Its number; the first one for values over several lines.
        expected: What should be there.
        got: What is there.
    """

    line: int
    expected: str
    got: str


@dataclass(frozen=True)
class Parsed:
    """A parsed block of lines.

    Args:
        table: The wanted columns.
        lines: int64 (n,), the line at which each of its rows starts.
        bad: Unreadable lines.
    """

    table: pa.Table
    lines: Rows
    bad: tuple[Bad, ...] = ()


def parse_lines(blocks: Iterable[Lines], layout: Layout) -> Iterator[Parsed]:
    """Parse the blocks of a file; a quoted value may span several lines, and blocks.

    Lines that the fast parser refuses are examined one by one; the valid ones among them are read
    as TEXT, numbers too.
    """
    rest = Lines(b"", 0, 0)
    for block in blocks:
        if rest.num_lines:
            num_lines = rest.num_lines + block.num_lines
            block = Lines(rest.data + block.data, rest.first_line, num_lines)
        parsed, rest = _parse(block, layout, is_last=False)
        yield parsed
    if rest.num_lines:
        yield _parse(rest, layout, is_last=True)[0]


def _parse(lines: Lines, layout: Layout, *, is_last: bool) -> tuple[Parsed, Lines]:
    """The records that end in a block, and the lines of the last one if it does not."""
    table = parse(lines, layout)
    if table is not None:
        numbers = np.arange(lines.first_line, lines.first_line + lines.num_lines)
        return Parsed(table, numbers), Lines(b"", 0, 0)
    if layout.is_quoted and b'"' in lines.data:
        found = _parse_records(lines, layout)
        if found is not None and not (is_last and found[1].num_lines):
            return found
    bad, kept, starts, rest = _examine(lines, layout, is_last=is_last)
    as_text = replace(layout, wanted=dict.fromkeys(layout.wanted, TEXT))
    table = _parse_any(kept.data, as_text) if starts else _no_rows(layout)
    if table is None or table.num_rows != len(starts):
        # The two parsers differ, so the bad line is unknown.
        first, last = lines.first_line, lines.first_line + lines.num_lines - 1
        bad = [Bad(first, f"lines of {len(layout.names)} columns up to line {last}", "others")]
        return Parsed(_no_rows(layout), np.empty(0, np.int64), tuple(bad)), rest
    return Parsed(table, np.array(starts, np.int64), tuple(bad)), rest


def _no_rows(layout: Layout) -> pa.Table:
    return pa.table({name: pa.array([], kind) for name, kind in layout.wanted.items()})


def parse(lines: Lines, layout: Layout) -> pa.Table | None:
    """The wanted columns; None if any line does not fit the layout by itself.

    "nan" is not accepted as a number, unless it is a null value.
    """
    table = _parse_fast(lines.data, layout)
    if table is None or table.num_rows != lines.num_lines:
        return None
    is_open = layout.is_quoted and _is_open_at_end(lines.data, layout.separator)
    return None if is_open else table


def _is_open_at_end(data: bytes, separator: str) -> bool:
    """Whether the last line has an open quote, which pyarrow closes."""
    last = data[data.rfind(b"\n", 0, -1) + 1 : -1]
    return b'"' in last and _has_open_quote(last.decode(errors="replace"), separator)


def _parse_fast(data: bytes, layout: Layout) -> pa.Table | None:
    # pyarrow also ends lines at a lone carriage return, and reads an empty line as missing values.
    has_lone_return = data.count(b"\r") != data.count(b"\r\n")
    has_empty_line = data.startswith((b"\n", b"\r\n")) or b"\n\n" in data or b"\n\r\n" in data
    if has_lone_return or (has_empty_line and len(layout.names) > 1):
        return None
    return _parse_any(data, layout)


def _parse_any(data: bytes, layout: Layout) -> pa.Table | None:
    quote = '"' if layout.is_quoted else False
    try:
        table = pacsv.read_csv(
            pa.BufferReader(data),
            read_options=pacsv.ReadOptions(
                # In one piece: several would each have their own dictionaries.
                column_names=list(layout.names),
                block_size=len(data) + 1,
            ),
            parse_options=pacsv.ParseOptions(
                delimiter=layout.separator,
                quote_char=quote,
                newlines_in_values=layout.is_quoted,
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
    numbers = (table.column(name) for name, kind in layout.wanted.items() if kind == NUMBER)
    return None if any(pc.any(pc.is_nan(column)).as_py() for column in numbers) else table


def _parse_records(lines: Lines, layout: Layout) -> tuple[Parsed, Lines] | None:
    """Parse lines of which several make a record, by the number of quotes before each line end.

    Returns:
        None if pyarrow finds another number of records: a quote inside a value does not open one.
    """
    data = np.frombuffer(lines.data, np.uint8)
    ends = np.flatnonzero(data == ord("\n"))
    quotes = np.flatnonzero(data == ord('"'))
    is_end = np.searchsorted(quotes, ends) % 2 == 0
    if not is_end.any():
        return None
    cut = int(ends[is_end][-1]) + 1
    table = _parse_fast(lines.data[:cut], layout)
    starts = np.flatnonzero(np.append(True, is_end))  # of the records, among the lines
    starts, after = starts[:-1], int(starts[-1])
    if table is None or table.num_rows != starts.size:
        return None
    rest = Lines(lines.data[cut:], lines.first_line + after, lines.num_lines - after)
    # Text after a closing quote, which pyarrow accepts, makes it a stray quote if records span
    # lines.
    begins = np.append(0, ends[is_end] + 1)
    is_long = np.diff(np.append(starts, after)) > 1
    records = zip(begins[:-1][is_long], begins[1:][is_long], strict=True)
    texts = (lines.data[begin : end - 1].decode(errors="replace") for begin, end in records)
    if not all(_is_strict(text, layout.separator) for text in texts):
        return None
    ends_with_one = not is_long[-1]
    if ends_with_one and _is_open_at_end(lines.data[:cut], layout.separator):
        return None
    if rest.num_lines > MAX_LINES_OF_VALUE:
        return None
    return Parsed(table, lines.first_line + starts), rest


def _examine(
    lines: Lines, layout: Layout, *, is_last: bool
) -> tuple[list[Bad], Lines, list[int], Lines]:
    """The bad lines, the others, where their records begin, and an unfinished record at the end."""
    split = lines.data.split(b"\n")[:-1]
    bad: list[Bad] = []
    kept: list[bytes] = []
    starts: list[int] = []
    at, until = 0, len(split)
    while at < len(split):
        end = at + 1
        if layout.is_quoted and b'"' in split[at]:
            end = _end_of_record(split, at, layout.separator)
            if end > len(split):  # it continues in the next block, if there is one
                if not is_last and len(split) - at <= MAX_LINES_OF_VALUE:
                    until = at
                    break
                end = at + 1
        record = b"\n".join(split[at:end])
        fault = _fault(record, layout)
        if fault is None:
            kept.append(record + b"\n")
            starts.append(lines.first_line + at)
        else:
            bad.append(Bad(lines.first_line + at, *fault))
        at = end
    rest = b"".join(line + b"\n" for line in split[until:])
    return (
        bad,
        Lines(b"".join(kept), lines.first_line, b"".join(kept).count(b"\n")),
        starts,
        Lines(rest, lines.first_line + until, len(split) - until),
    )


def _end_of_record(split: list[bytes], at: int, separator: str) -> int:
    """The line after the record that starts at a line; after all lines if it has no end there.

    A quote that is not closed at the end of a value did not open one: the line is a record itself.
    """
    text = split[at].decode(errors="replace")
    end = at + 1
    while _has_open_quote(text, separator):
        if end - at > MAX_LINES_OF_VALUE:
            return at + 1
        more = []
        while end < len(split) and b'"' not in split[end]:
            more.append(split[end])
            end += 1
        if end == len(split):
            return end + 1
        text = b"\n".join((text.encode(), *more, split[end])).decode(errors="replace")
        end += 1
    return end if end == at + 1 or _is_strict(text, separator) else at + 1


def _fault(line: bytes, layout: Layout) -> tuple[str, str] | None:
    try:
        text = line.decode().removesuffix("\r")
    except UnicodeDecodeError as error:
        return "UTF-8 text", f"byte {line[error.start]:#04x} at position {error.start}"
    lone = _LONE_RETURN.search(text)
    if lone:
        return "no carriage return inside a line", f"one at position {lone.start()}"
    if not text and len(layout.names) > 1:
        return f"{len(layout.names)} columns", "an empty line"
    if layout.is_quoted:
        if _has_open_quote(text, layout.separator):
            return "a closing quote in the line", "none"
        values = next(csv.reader([text], delimiter=layout.separator), [""])
    else:
        values = text.split(layout.separator)
    if len(values) != len(layout.names):
        return f"{len(layout.names)} columns", str(len(values))
    return None


def _has_open_quote(text: str, separator: str) -> bool:
    # Text after a closing quote is an error to csv as well, but not to pyarrow.
    return "end of data" in _csv_error(text, separator)


def _is_strict(text: str, separator: str) -> bool:
    return not _csv_error(text, separator)


def _csv_error(text: str, separator: str) -> str:
    try:
        for _ in csv.reader([text], delimiter=separator, strict=True):
            pass
    except csv.Error as error:
        return str(error)
    return ""
