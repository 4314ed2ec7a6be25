"""JSON Lines: one object per line, as blocks of whole lines, parsed into columns.

pyarrow parses a block as a whole, with the types of earlier values. Its lines are examined one by
one only if that fails, to name the line and the reason, and to read values of other types: integers
of more than 64 bits, or the first value of a field.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pajson

from hotrec.data.text import Bad, Lines, Parsed, read_lines

_PEEK_BYTES = 1 << 20
_MARK = b"\xef\xbb\xbf"
_SHOWN = 80
_WHOLE_BELOW = 2**53  # a larger float stands for several integers
_TYPES = {"text": pa.string(), "boolean": pa.bool_(), "number": pa.float64()}


def read_names(path: Path) -> tuple[str, ...]:
    """The fields of the objects at the beginning of a file, in order.

    Raises:
        ValueError: if there is no object.
    """
    names: dict[str, None] = {}
    first = next(read_lines(path, _PEEK_BYTES, has_header=False))
    bad = ""
    for line in _unmarked(first).data.splitlines():
        try:
            names.update(dict.fromkeys(_object(line, ())))
        except _OddError as error:
            bad = bad or f"{error.args[1]}"
    if not names:
        raise ValueError(
            f'{path} line 1: expected one JSON object per line, such as {{"clicked": 1}}, got '
            f"{bad or 'empty ones'}. Put each object on its own line."
        )
    return tuple(names)


def parse_lines(
    path: Path,
    blocks: Iterable[Lines],
    ids: tuple[str, ...],
    numbers: tuple[str, ...],
    null_values: tuple[str, ...] = (),
) -> Iterator[Parsed]:
    """Parse the blocks of a file.

    Args:
        path: The file, for messages.
        blocks: Its lines.
        ids: The fields whose numbers are ids, read exactly with any number of digits.
        numbers: The other wanted fields.
        null_values: Texts that mean "missing".

    Raises:
        ValueError: if no object has one of the fields.
    """
    reader = _Reader(ids, numbers, null_values)
    for block in blocks:
        yield reader.parse(_unmarked(block))
    missing = [name for name in reader.names if name not in reader.seen]
    if missing:
        raise ValueError(
            f"{path}: expected objects with the fields {missing}, got none. Correct the columns of "
            "the specification."
        )


def _unmarked(lines: Lines) -> Lines:
    is_marked = lines.first_line == 1 and lines.data.startswith(_MARK)
    return Lines(lines.data[len(_MARK) :], 1, lines.num_lines) if is_marked else lines


class _OddError(Exception):
    """An unreadable part of a line: the expected content and the actual one."""


class _Reader:
    """Parses the blocks of one file; a field has values of one kind in all of them."""

    def __init__(
        self, ids: tuple[str, ...], numbers: tuple[str, ...], null_values: tuple[str, ...]
    ) -> None:
        self.names = tuple(dict.fromkeys((*ids, *numbers)))
        self.seen: set[str] = set()
        self._ids = frozenset(ids)
        self._nulls = pa.array(null_values, pa.string())
        self._kinds: dict[str, str] = {}  # "text", "number", "boolean", or "list of ..." these
        self._types: dict[str, pa.DataType] = {}

    def parse(self, lines: Lines) -> Parsed:
        table = self._parse_fast(lines) if self._kinds else None
        if table is not None:
            self.seen.update(n for n in self.names if n not in self.seen and self._has(lines, n))
            numbers = np.arange(lines.first_line, lines.first_line + lines.num_lines)
            return Parsed(self._with_nulls(table), numbers)
        return self._parse_slowly(lines)

    def _has(self, lines: Lines, name: str) -> bool:
        keys = {json.dumps(name).encode(), json.dumps(name, ensure_ascii=False).encode()}
        return any(key in lines.data for key in keys)

    def _with_nulls(self, table: pa.Table) -> pa.Table:
        for index, name in enumerate(table.column_names):
            column = table.column(index)
            if pa.types.is_string(column.type) and len(self._nulls):
                is_null = pc.is_in(column, self._nulls)
                column = pc.if_else(is_null, pa.scalar(None, pa.string()), column)
                table = table.set_column(index, name, column)
        return table

    def _parse_fast(self, lines: Lines) -> pa.Table | None:
        data = lines.data
        num_bounds = data.count(b"}\n{") + data.count(b"}\r\n{")
        if num_bounds != lines.num_lines - 1 or not data.startswith(b"{"):
            return None
        schema = pa.schema([(name, self._types.get(name, pa.null())) for name in self.names])
        try:
            table = pajson.read_json(
                pa.BufferReader(data),
                # In one piece, because the kinds of fields apply to the whole file.
                read_options=pajson.ReadOptions(block_size=len(data) + 1, use_threads=False),
                parse_options=pajson.ParseOptions(
                    explicit_schema=schema, unexpected_field_behavior="ignore"
                ),
            )
            is_exact = all(_is_exact(table.column(name)) for name in self._ids)
        except (pa.ArrowException, UnicodeDecodeError):
            return None
        return table.select(self.names) if table.num_rows == lines.num_lines and is_exact else None

    def _parse_slowly(self, lines: Lines) -> Parsed:
        """About 200,000 lines/s."""
        columns: dict[str, list[Any]] = {name: [] for name in self.names}
        bad, numbers = [], []
        for number, line in enumerate(lines.data.split(b"\n")[:-1], lines.first_line):
            try:
                found = _object(line, self.names)
                values = [self._value(name, found.get(name)) for name in self.names]
            except _OddError as error:
                bad.append(Bad(number, *error.args))
                continue
            self.seen.update(found.keys() & columns.keys())
            for column, value in zip(columns.values(), values, strict=True):
                column.append(value)
            numbers.append(number)
        arrays = {name: self._array(name, values) for name, values in columns.items()}
        table = self._with_nulls(pa.table(arrays))
        return Parsed(table, np.array(numbers, np.int64), tuple(bad))

    def _value(self, name: str, value: Any) -> Any:
        """A value in the form of its column; the first value of a field determines its kind."""
        if value is None:
            return None
        kind, known = _kind(value), self._kinds.get(name)
        if kind is None or (known not in (None, kind) and not _is_kind_of_list(kind, known)):
            expected = f"{_said(known)}, as before," if known else "texts, numbers or lists of one"
            raise _OddError(f"{expected} in field {name}", repr(value)[:_SHOWN])
        if known is None or (known == "list" and kind != "list"):
            self._kinds[name] = kind
        as_number = _id if name in self._ids else _float
        as_id = as_number if kind.endswith("number") else _same
        try:
            if isinstance(value, list):
                return [None if item is None else as_id(item) for item in value]
            return as_id(value)
        except ValueError:
            expected = f"an id that is an integer or a text in field {name}"
            raise _OddError(expected, repr(value)[:_SHOWN]) from None

    def _array(self, name: str, values: list[Any]) -> pa.Array:
        kind = self._kinds.get(name)
        if kind is None:
            return pa.nulls(len(values))
        is_list, kind = kind.startswith("list"), kind.removeprefix("list").removeprefix(" of ")
        items = [i for v in values if v is not None for i in (v if is_list else [v])]
        item_type = _TYPES.get(kind, pa.null())
        if kind == "number" and name in self._ids:
            present = [item for item in items if item is not None]
            low, high = min(present, default=0), max(present, default=0)
            item_type = pa.int64() if low >= -(2**63) and high < 2**63 else pa.uint64()
            if low < 0 and item_type == pa.uint64() or high >= 2**64:
                as_text: Callable[[Any], Any] = lambda i: None if i is None else str(i)  # noqa: E731
                values = [
                    [as_text(i) for i in v] if isinstance(v, list) else as_text(v) for v in values
                ]
                item_type = pa.string()
        kind_of_all = pa.list_(item_type) if is_list else item_type
        # If ids became texts here, the numbers of the next block do not fit, and it is read slowly.
        self._types[name] = kind_of_all
        return pa.array(values, kind_of_all)


def _is_exact(column: pa.ChunkedArray) -> bool:
    """Whether no id was read as a float."""
    kind = column.type
    return not pa.types.is_floating(kind.value_type if pa.types.is_list(kind) else kind)


def _object(line: bytes, names: tuple[str, ...]) -> dict[str, Any]:
    """The object of a line, whose names must be unique."""

    def made(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = [name for name in names if keys.count(name) > 1]
            if twice:
                raise _OddError(f"field {twice[0]} once", "it twice")
        return found

    try:
        text = line.decode()
        found = json.loads(text, object_pairs_hook=made)
        if "\\u" in text:
            json.dumps(found, ensure_ascii=False).encode()  # rejects unpaired surrogates
    except UnicodeDecodeError as error:
        raise _OddError("UTF-8 text", f"byte {line[error.start]:#04x} at {error.start}") from None
    except UnicodeEncodeError:
        raise _OddError("whole characters", "half of one") from None
    except (ValueError, RecursionError):
        shown = repr(text[:_SHOWN]) if text.strip() else "an empty line"
        raise _OddError("a JSON object", shown) from None
    if not isinstance(found, dict):
        raise _OddError("a JSON object", repr(text[:_SHOWN]))
    return found


def _kind(value: Any) -> str | None:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "text"
    if not isinstance(value, list):
        return None
    kinds = {_kind(item) for item in value if item is not None}
    if not kinds:
        return "list"
    (kind, *others) = kinds
    return None if others or kind is None or kind.startswith("list") else f"list of {kind}"


def _is_kind_of_list(kind: str, known: str | None) -> bool:
    """Whether two kinds are lists, one of them without items."""
    kinds = {kind, known}
    return "list" in kinds and all(one is not None and one.startswith("list") for one in kinds)


def _said(kind: str) -> str:
    return {"boolean": "true or false", "list": "a list"}.get(kind, f"a {kind}")


def _same(value: Any) -> Any:
    return value


def _float(value: float) -> float:
    """A number as Arrow reads it: integers beyond 2**53 lose digits, and too large ones are inf."""
    try:
        return float(value)
    except OverflowError:
        return math.copysign(math.inf, value)


def _id(value: Any) -> int:
    """A number as an id: 1234.0 is 1234, as in a column of integers.

    Raises:
        ValueError: if it is not an integer, or too large to be exact as a float.
    """
    if isinstance(value, float) and not (abs(value) < _WHOLE_BELOW and value.is_integer()):
        raise ValueError(value)
    return int(value)
