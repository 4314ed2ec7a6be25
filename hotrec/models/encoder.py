"""Encodes raw records as inputs of an exported model, as ``hotrec prepare`` encodes a log.

Only needs numpy, and no other module of hotrec, and is copied into every export; tensors, the
inputs of ``hotrec.models.plain``, also need torch.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

DESCRIPTION = "model.json"
# Version 1 had no null values, and no names of means.
FORMAT_VERSION = 2
# A record of the log: values by the names of its columns.
Record = Mapping[str, Any]
Rows = npt.NDArray[np.int64]
# The rows of a feature: one for each record, or all of them and where each record's begin and end.
Ids = Rows | tuple[Rows, Rows]
Hashes = npt.NDArray[np.uint64]

_WHOLE = re.compile(r"(-?[0-9]+)\.0*")
_WHOLE_BELOW = 2.0**53  # a larger float represents several integers
_BRACKETS = re.compile(r"[ \t\r\n]*\[(.*)\][ \t\r\n]*", re.DOTALL)
_OF_UTC = re.compile(r"[ ]?(?:UTC|GMT|[zZ])$")
_OFFSET = re.compile(r"(:.*?)[ ]([+-][0-9]{2}(?::?[0-9]{2})?)$")
_CLOCK, _ZONE = re.compile("[Tt ][0-9]"), re.compile(":.*(?:Z|z|UTC|GMT|[+-][0-9:]+)$")
_ROW_NUMBER = re.compile("[0-9]{1,13}")
_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
_LARGEST = float(np.finfo(np.float32).max)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_EPOCH_WEEKDAY = 3  # 1970-01-01 was a Thursday; weeks begin on Monday
_MS_PER_HOUR = 3_600_000
_MS_PER_UNIT = {"s": 1e3, "ms": 1.0, "us": 1e-3, "ns": 1e-6}
# Of the hash that hotrec.data.hashing documents.
_START, _FACTORS, _MASK = 0x9E3779B97F4A7C15, (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53), 2**64 - 1


def load_encoder(directory: str | Path) -> Encoder:
    """Load the encoder of raw records for a model that ``hotrec export`` wrote.

    Args:
        directory: The exported directory.

    Raises:
        ValueError: If the directory has no model, or one that was not trained on a log.
    """
    directory = Path(directory)
    path = directory / DESCRIPTION
    expected = f"{path}: expected the description of an exported model"
    try:
        document = json.loads(_inside(directory, DESCRIPTION).read_text())
        version, encoding = document["format_version"], document["encoding"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{expected}, got {reason}. Run `hotrec export`.") from error
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{path}: expected format version {FORMAT_VERSION} of the encoding of raw "
            f"values, got {version!r}. Export the model again."
        )
    if encoding is None:
        raise ValueError(
            f"{path}: expected a model that was trained on a log, got one of a synthetic dataset "
            "or of an earlier version's. Give the model rows and dense columns themselves."
        )
    try:
        lookups = {
            table["name"]: _make_lookup(directory, table, encoding["tables"][table["name"]])
            for table in document["tables"]
        }
        return Encoder(encoding, document["architecture"]["dense"], lookups)
    except (OSError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{expected} with the encoding of each column, got {type(error).__name__}: "
            f"{error}. Export the model again."
        ) from error


class Encoder:
    """Turns records into the inputs of a model; made by ``load_encoder``.

    A value may be a text, a number, a bool, a date or time, a list or an array of these, or None.
    It may have the form of the log or the type that it represents: ``7`` and ``"7"`` are one id. A
    column that a record lacks is a missing value.

    Attributes:
        columns: The columns of the log that are read.
        num_ids: Number of ids so far, by prepared column, if its table has a vocabulary.
        num_unknown: Number of them that are not in the vocabulary, so that the model reads row 0.
    """

    def __init__(
        self, encoding: Mapping[str, Any], dense: Sequence[str], lookups: Mapping[str, Lookup]
    ) -> None:
        self._nulls = frozenset(encoding["null_values"])
        self._times = encoding["times"]
        self._names = frozenset(encoding["names"])
        self._value_types = encoding["value_types"]
        self._means, self._deviations = (
            np.array([encoding[of][name] for name in dense], np.float64)
            for of in ("means", "deviations")
        )
        column_of = {
            place: name
            for name, column in encoding["columns"].items()
            if column["kind"] == "dense"
            for place in [f"{name}[{i}]" for i in range(column["width"])] or [name]
        }
        in_order = dict.fromkeys(column_of[place] for place in dense)
        self._dense = [(name, encoding["columns"][name]) for name in in_order]
        self._features = [
            (name, column, lookups[column["table"]])
            for name, column in encoding["columns"].items()
            if column["kind"] in ("categorical", "categorical_list", "sequence")
        ]
        self._exprs, self._are_texts = encoding["expr"], encoding["are_texts"]
        read = [column["source"] for _, column, *_ in (*self._dense, *self._features)]
        of = {
            name: self._exprs[name]["columns"] if name in self._exprs else [name] for name in read
        }
        self.columns = list(dict.fromkeys(column for columns in of.values() for column in columns))
        self.num_ids: Counter[str] = Counter()
        self.num_unknown: Counter[str] = Counter()

    def __call__(self, records: Iterable[Record]) -> tuple[torch.Tensor, dict[str, Any]]:
        """The inputs of ``PlainModel.forward``, as tensors.

        Raises:
            ValueError: If a value is invalid for its column; the message has record and column.
        """
        import torch

        def tensor(values: npt.NDArray[Any]) -> torch.Tensor:
            return torch.from_numpy(values)

        dense, ids = self.arrays(records)
        tensors = {
            name: tuple(map(tensor, rows)) if isinstance(rows, tuple) else tensor(rows)
            for name, rows in ids.items()
        }
        return tensor(dense), tensors

    def arrays(self, records: Iterable[Record]) -> tuple[npt.NDArray[np.float32], dict[str, Ids]]:
        """Dense columns, float32 (B, N), and the rows of each feature, without torch.

        Rows are int64 (B,), or for lists and places of sequences the pair of all rows (K,) and
        offsets (B + 1,); see ``padded``.

        Raises:
            ValueError: If a value is invalid for its column; the message has record and column.
        """
        records = list(records)
        for number, record in enumerate(records):
            if not isinstance(record, Mapping) or record.keys().isdisjoint(self.columns):
                raise ValueError(
                    f"record {number}: expected a dict with columns among {self.columns}, got "
                    f"{record!r:.80}. Give a list of records, by the names of the log's columns."
                )
            if not record.keys() <= self._names:
                raise ValueError(
                    f"record {number}: expected columns of the log, of which {self.columns} are "
                    f"read, got {sorted(map(str, record.keys() - self._names))}. Correct the name, "
                    "or remove it."
                )
        if self._exprs:
            records = self._computed(records)
        parts = [np.empty((len(records), 0))]
        for _, column in self._dense:
            is_vector = column["width"] > 0
            numbers = (self._vectors if is_vector else self._derived)(column, records)
            numbers = numbers.reshape(len(records), -1)
            filled = np.where(np.isnan(numbers), column["fill"], numbers)
            if column["transform"] == "log1p":
                filled = np.copysign(np.log1p(np.abs(filled)), filled)
            parts.append(filled)
        scaled = (np.concatenate(parts, axis=1) - self._means) / self._deviations
        dense = scaled.astype(np.float32)
        ids: dict[str, Ids] = {}
        for name, column, lookup in self._features:
            if column["kind"] == "categorical":
                ids[name] = self._rows(name, column, lookup, self._ids(column, records))
                continue
            bags = list(self._bags(column, records))
            items = [(record, item) for record, bag in enumerate(bags) for item in bag]
            rows = self._rows(name, column, lookup, items)
            offsets = _offsets([len(bag) for bag in bags])
            if column["kind"] == "categorical_list":
                ids[name] = rows, offsets
                continue
            for place in range(1, column["max_length"] + 1):
                has_id = np.diff(offsets) >= place
                ids[f"{name}_{place}"] = rows[offsets[1:][has_id] - place], _offsets(has_id)
        return dense, ids

    def _computed(self, records: Sequence[Record]) -> list[dict[str, Any]]:
        """The records with their computed columns, which polars evaluates as in ``prepare``."""
        import polars as pl

        def read(value: Any) -> Any:
            value = _scalar(value)
            if not self._are_texts or value is None:
                return value
            is_number = isinstance(value, float | Decimal)
            text = str(value).removesuffix(".0") if is_number else _text(value)
            return None if text in self._nulls else text

        def compute(row: Mapping[str, list[Any]], expr: Any) -> Any:
            """The value of a row; a missing value has whatever type the expression takes."""
            kinds = [pl.String] if self._are_texts else [pl.String, pl.Float64, pl.Datetime("us")]
            missing = [name for name, of in row.items() if self._are_texts or of == [None]]
            for types in itertools.product(kinds, repeat=len(missing)):
                schema = dict(zip(missing, types, strict=True))
                try:
                    return pl.DataFrame(row, schema_overrides=schema).select(expr).item()
                except pl.exceptions.PolarsError as error:
                    last = error
            raise last

        found = [dict(record) for record in records]
        for name, of in self._exprs.items():
            expr = pl.sql_expr(of["sql"])
            for number, record in enumerate(found):
                row = {column: [read(record.get(column))] for column in of["columns"]}
                try:
                    record[name] = compute(row, expr)
                except pl.exceptions.PolarsError as error:
                    raise ValueError(
                        f"record {number}: expected values that {of['sql']} can read, got {row}. "
                        "Correct them."
                    ) from error
        return found

    def _vectors(self, column: Mapping[str, Any], records: Sequence[Record]) -> _Floats:
        """The vectors of a column, float64 (B, width), NaN if one, or a part of it, is missing."""
        source, width = column["source"], column["width"]

        def numbers_of(value: Any) -> list[float]:
            items = self._items(value, column)
            if items is None:
                return [np.nan] * width
            if len(items) != width:
                raise ValueError(f"{width} finite numbers or nothing")
            return [self._number(_scalar(item), None, column) for item in items]

        vectors = [
            _parsed(numbers_of, record.get(source), number, source)
            for number, record in enumerate(records)
        ]
        return np.array(vectors, np.float64).reshape(len(records), width)

    def _derived(self, column: Mapping[str, Any], records: Sequence[Record]) -> _Floats:
        """The numbers of a column, float64 (B,), NaN where one is missing."""
        source, derive = column["source"], column["derive"]
        unit = self._times.get(source)
        values = [
            _parsed(
                lambda value: self._number(value, unit, column), record.get(source), number, source
            )
            for number, record in enumerate(records)
        ]
        numbers = np.array(values, np.float64)
        if derive == "hour_of_day":
            return np.floor(numbers / _MS_PER_HOUR + column["utc_offset_h"]) % 24
        if derive == "day_of_week":
            days = np.floor((numbers / _MS_PER_HOUR + column["utc_offset_h"]) / 24)
            return (days + _EPOCH_WEEKDAY) % 7
        return _log_bucket(numbers) if derive == "log_bucket" else numbers

    def _number(self, value: Any, unit: str | None, column: Mapping[str, Any]) -> float:
        """A value as a number, a time as milliseconds since 1970; NaN for a missing one."""
        if value is None or (isinstance(value, str) and value in self._nulls):
            return np.nan
        number = _LARGEST * 2
        if unit is not None and isinstance(value, date):
            number = _time_ms(value)
        elif unit == "iso":
            number = _ms_of(value) if isinstance(value, str) else number
        elif isinstance(value, str):
            number = _float_of(value) * _MS_PER_UNIT[unit or "ms"]
        elif isinstance(value, int | float | Decimal):
            number = float(value) * _MS_PER_UNIT[unit or "ms"]
        if not abs(number) <= _LARGEST:
            what = "a finite number"
            if unit == "iso":
                what = "a time such as 2024-05-01T12:30:00"
            raise ValueError(f"{what} or nothing")
        if unit is not None:
            self._check(_type_of_time(value, number, unit), column)
        return number

    def _check(self, found: str | None, column: Mapping[str, Any]) -> None:
        """Check that a value has the type of its column's in the log."""
        known = self._value_types.get(column["source"], "")
        if found is not None and not (known.startswith(found) or found.startswith(known)):
            raise ValueError(f"{known}, as in training")

    def _ids(
        self, column: Mapping[str, Any], records: Sequence[Record]
    ) -> Iterator[tuple[int, str | None]]:
        """The number of each record, and the text of its id, None for a missing one."""
        source = column["source"]
        if column["derive"] != "none":
            for number, value in enumerate(self._derived(column, records)):
                yield number, _text_of(value)
            return
        for number, record in enumerate(records):
            of = record.get(source)
            yield (
                number,
                _parsed(lambda value: self._id(value, column, self._nulls), of, number, source),
            )

    def _id(
        self, value: Any, column: Mapping[str, Any], nulls: frozenset[str] = frozenset()
    ) -> str | None:
        """The text of a value of a column of ids."""
        text = _text(value)
        self._check(_type_of_id(value), column)
        return None if text is None or text in nulls else _whole(text)

    def _bags(
        self, column: Mapping[str, Any], records: Sequence[Record]
    ) -> Iterator[list[str | None]]:
        """The texts of each record's list, cut to its last ones."""
        source, most = column["source"], column["max_length"]

        def split(value: Any) -> list[str | None]:
            if column["derive"] == "log_bucket":
                items = self._items(value, column) or ()
                numbers = [self._number(_scalar(item), None, column) for item in items]
                return [_text_of(bucket) for bucket in _log_bucket(np.array(numbers, np.float64))]
            return [self._id(_scalar(item), column) for item in self._items(value, column) or ()]

        for number, record in enumerate(records):
            bag = _parsed(split, record.get(source), number, source)
            yield bag[-most:] if most else bag

    def _items(
        self, value: Any, column: Mapping[str, Any]
    ) -> Sequence[Any] | npt.NDArray[Any] | None:
        """What a list holds, or a text as ``prepare`` splits it; None for a missing one."""
        if isinstance(value, list | tuple | np.ndarray):
            return list(value)
        text, separator = _text(value), column["separator"]
        if text is None or text in self._nulls:
            return None
        inside = _BRACKETS.fullmatch(text)
        if inside is None:
            return [item for item in text.split(separator) if item]
        text = re.sub(r"[\t\n\v\f\r]", " ", inside[1])
        separator = "," if separator == " " and "," in text else separator
        items = (item.strip(" '\"") for item in text.split(separator))
        return [item for item in items if item]

    def _rows(
        self,
        name: str,
        column: Mapping[str, Any],
        lookup: Lookup,
        items: Iterable[tuple[int, str | None]],
    ) -> Rows:
        """The rows of texts, each with the number of its record."""
        items = list(items)
        try:
            rows = lookup.rows([text for _, text in items])
        except _NoRow as error:
            number, text = items[error.index]
            raise ValueError(
                f"record {number} column {column['source']}: expected {error.expected}, got "
                f"{'nothing' if text is None else repr(text)}. Correct the value."
            ) from error
        if lookup.has_unknown:
            self.num_ids[name] += sum(text is not None for _, text in items)
            texts_of_0 = (items[at][1] for at in np.flatnonzero(rows == 0))
            self.num_unknown[name] += sum(text is not None for text in texts_of_0)
        return rows


_Floats = npt.NDArray[np.float64]


def _log_bucket(numbers: _Floats) -> _Floats:
    buckets: _Floats = np.sign(numbers) * np.floor(4 * np.log2(1 + np.abs(numbers)))
    return buckets


def _text_of(number: float) -> str | None:
    """A derived number as an id; None for a missing one."""
    return None if np.isnan(number) else str(int(number))


def _parsed(parse: Callable[[Any], Any], value: Any, number: int, source: str) -> Any:
    """The encoded value of a column in the record of this number."""
    try:
        return parse(_scalar(value))
    except (ValueError, ArithmeticError) as error:
        expected = "a finite number" if isinstance(error, ArithmeticError) else error
        raise ValueError(
            f"record {number} column {source}: expected {expected}, got {value!r:.80}. Correct the "
            "value, or give None where it is missing."
        ) from error


def _scalar(value: Any) -> Any:
    """A value of numpy's types as one of Python's, and text in bytes as text."""
    if isinstance(value, bytes):
        return value.decode(errors="surrogateescape")  # is refused where it is hashed
    if not isinstance(value, np.generic):
        return None if isinstance(value, datetime) and value != value else value  # pandas' NaT
    if isinstance(value, np.datetime64):
        return (value if np.datetime_data(value)[0] == "D" else value.astype("M8[us]")).item()
    return value.item()


def _text(value: Any) -> str | None:
    """The text of an id, as Arrow writes it; None for a missing one."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return format(value, "d")
    is_number = isinstance(value, float) and abs(value) < _WHOLE_BELOW
    is_number = is_number or (isinstance(value, Decimal) and value.is_finite())
    if is_number and value == int(value):
        return format(int(value), "d")
    if isinstance(value, datetime):
        zone = "Z" if value.utcoffset() == timedelta(0) else value.strftime("%z")
        return value.replace(tzinfo=None).isoformat(" ", "microseconds") + zone
    if isinstance(value, date):
        return value.isoformat()
    raise ValueError(f"an id that is an integer or a text, and no {type(value).__name__}")


def _type_of_id(value: Any) -> str | None:
    """The type of an id, as in ``hotrec.data.value_types``; None for a text."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, date):  # of which texts have microseconds
        return "timestamp[us" if isinstance(value, datetime) else "date"
    return "integer" if isinstance(value, int | float | Decimal) else None


def _type_of_time(value: Any, time_ms: float, unit: str) -> str | None:
    """The type of a time, as in ``hotrec.data.value_types``; None for any."""
    if isinstance(value, bool):
        return "boolean"
    if unit in _MS_PER_UNIT and not isinstance(value, date):
        if 6.3e11 < time_ms < 4.1e12:  # in 1990 to 2100
            return "time"
        is_older = 3.15e10 < abs(time_ms) < 6.3e11 and not 1.99e11 < time_ms < 2.1e11
        return "number" if abs(time_ms) > 1 and not is_older else None
    if isinstance(value, datetime):
        has_clock, has_zone = True, value.tzinfo is not None
    elif isinstance(value, str) and unit == "iso":
        has_clock, has_zone = bool(_CLOCK.search(value)), bool(_ZONE.search(value))
    elif isinstance(value, date):
        has_clock = has_zone = False
    else:
        return None
    return f"time {'with' if has_zone else 'without'} zone" if has_clock else "date"


def _time_ms(moment: date) -> float:
    """A date or time as milliseconds since 1970; UTC if it has no offset."""
    if not isinstance(moment, datetime):
        moment = datetime(moment.year, moment.month, moment.day, tzinfo=UTC)
    elif moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return (moment - _EPOCH) / timedelta(milliseconds=1)


def _ms_of(text: str) -> float:
    """A date or time in ISO 8601 as milliseconds since 1970; infinite if it is none."""
    try:
        zoned = _OFFSET.sub(r"\1\2", _OF_UTC.sub("+00:00", text.strip()))
        return _time_ms(datetime.fromisoformat(zoned))
    except (ValueError, OverflowError):
        return np.inf


def _float_of(text: str) -> float:
    """A number in text; infinite if it is not a number."""
    text = text.strip(" \t")
    return float(text) if _NUMBER.fullmatch(text) else np.inf


def _whole(text: str) -> str:
    """An id, with 1234.0 shortened to 1234."""
    whole = _WHOLE.fullmatch(text)
    return whole[1] if whole else text


def _offsets(lengths: Any) -> Rows:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


# From texts to rows.


class _NoRow(Exception):  # noqa: N818 (caught where the record is known)
    """A text has no row: its position, and what is expected."""

    def __init__(self, index: int, expected: str) -> None:
        super().__init__(index, expected)
        self.index, self.expected = index, expected


class Lookup:
    """The rows of the texts of one table; row 0 is for missing ones."""

    has_unknown = False

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def rows(self, texts: Sequence[str | None]) -> Rows:
        """int64 (n,), each different text looked up once."""
        number_of: dict[Any, int] = {None: 0}
        numbers = [number_of.setdefault(text, len(number_of)) for text in texts]
        try:
            hashes = [hash_text(text) for text in list(number_of)[1:]]
        except UnicodeEncodeError as error:
            raise _NoRow(texts.index(error.object), "UTF-8 text") from error
        found = self._find(np.array(hashes, np.uint64))
        return np.append(0, found).astype(np.int64)[np.array(numbers, np.int64)]

    def _find(self, hashes: Hashes) -> Rows:
        raise NotImplementedError


class _Hashed(Lookup):
    """1 + hash mod (num_rows - 1)."""

    def _find(self, hashes: Hashes) -> Rows:
        return (hashes % np.uint64(self.num_rows - 1)).astype(np.int64) + 1


class _Vocabulary(Lookup):
    """Texts by their hashes, that of row r + 1 at position r; all others have row 0."""

    has_unknown = True

    def __init__(self, path: Path, num_rows: int) -> None:
        super().__init__(num_rows)
        try:
            hashes = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError, EOFError) as error:
            raise ValueError(
                f"{path}: expected an array of numpy, got {error}. Export the model again."
            ) from error
        if hashes.dtype != np.dtype("<u8") or hashes.shape != (num_rows - 1,):
            raise ValueError(
                f"{path}: expected {num_rows - 1} hashes of type uint64, got {hashes.dtype} of "
                f"shape {hashes.shape}. Export the model again."
            )
        # They are increasing, and stay mapped, until a vocabulary grows.
        is_rising = bool((hashes[1:] > hashes[:-1]).all())
        self._order = None if is_rising else np.argsort(hashes, kind="stable")
        self._hashes = hashes if self._order is None else hashes[self._order]
        if (self._hashes[1:] == self._hashes[:-1]).any():
            raise ValueError(
                f"{path}: expected a different hash for each row, got one twice. Export the model "
                "again."
            )

    def _find(self, hashes: Hashes) -> Rows:
        if not len(self._hashes):
            return np.zeros(len(hashes), np.int64)
        places = np.searchsorted(self._hashes, hashes).clip(max=len(self._hashes) - 1)
        found = places if self._order is None else self._order[places]
        return np.where(self._hashes[places] == hashes, found + 1, 0)


class _RowNumbers(Lookup):
    """Texts that are row numbers."""

    def rows(self, texts: Sequence[str | None]) -> Rows:
        """int64 (n,); none may be missing."""
        rows = [
            int(text) if text is not None and _ROW_NUMBER.fullmatch(text) else self.num_rows
            for text in texts
        ]
        for index, row in enumerate(rows):
            if row >= self.num_rows:
                raise _NoRow(index, f"a row number below {self.num_rows}")
        return np.array(rows, np.int64)


def _make_lookup(directory: Path, table: Mapping[str, Any], spec: Mapping[str, Any]) -> Lookup:
    num_rows, encoding = table["num_rows"], spec["encoding"]
    if encoding == "vocabulary":
        return _Vocabulary(_inside(directory, hash_file(table["name"])), num_rows)
    return {"hashing": _Hashed, "rows": _RowNumbers}[encoding](num_rows)


def hash_file(table: str) -> str:
    """Path in the exported directory of the hashes of a table's vocabulary."""
    return f"vocab/{table}.npy"


def _inside(directory: Path, name: str) -> Path:
    """The path of a regular file of the directory, not reached by a link."""
    path = os.path.realpath(directory / name)
    if path != os.path.join(os.path.realpath(directory), *name.split("/")):
        raise ValueError(
            f"{directory / name}: expected a file in the directory, got a link to {path}. Export "
            "the model again."
        )
    if not os.path.isfile(path):
        raise ValueError(f"{directory / name}: expected a file, got none. Export the model again.")
    return Path(path)


def _mix(state: int) -> int:
    state ^= state >> 33
    for factor in _FACTORS:
        state = state * factor & _MASK
        state ^= state >> 33
    return state


def hash_text(text: str) -> int:
    """The 64-bit hash of a text, used to look up its row."""
    data = text.encode()
    state = _mix(len(data) + _START & _MASK)
    for begin in range(0, len(data), 8):
        state = _mix(state ^ int.from_bytes(data[begin : begin + 8], "little"))
    return state
