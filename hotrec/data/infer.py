"""What the columns of a log probably are: a specification of it, with the reasons as comments.

Everything here is a guess from names and values, and the file says so beside each column.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hotrec.config.data import EPOCH, SourceFormat, TimeUnit
from hotrec.config.names import MAX_NAME_BYTES, is_reserved
from hotrec.data.chunks import one_array
from hotrec.data.columns import (
    MS_PER_UNIT,
    Float64s,
    Texts,
    numbers_from_arrow,
    times_from_arrow,
    times_from_texts,
)
from hotrec.data.sample import Sample

LABEL_NAMES = (
    *("label", "clicked", "click", "is_click", "is_clicked", "target", "y", "converted"),
    *("conversion", "is_conversion", "purchased", "purchase", "liked", "like"),
)
_TIME_NAME = re.compile(r"time|date|stamp|(^|_)(ts|at|day|when)(_|$)", re.IGNORECASE)
_ID_NAME = re.compile(
    r"(^|_)(id|ids|uid|key|code|hash|zip|sku|uuid)(_|\d|$)|Id$|ID$", re.IGNORECASE
)
_NULL_TEXTS = ("NULL", "null", "\\N", "N/A", "NaN", "nan", "None")
_NULLS_AMONG_NUMBERS = (*_NULL_TEXTS, "NA", "na", "none", "-", "?")
_NUMBER = r"^[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?$"
_INTEGER, _DATE = r"^[+-]?[0-9]{1,18}$", r"^[0-9]{4}-[0-9]{2}-[0-9]{2}"
_ITEM = r"^[\w:.\-]{1,40}$"
_LIST_SEPARATORS = ("|", ";", ",", " ")
# Milliseconds since 1970 of plausible times: 1990 to 2100.
_TIMES_MS = (6.3e11, 4.1e12)
_MS_PER_HOUR, _MS_PER_DAY = 3_600_000, 86_400_000
_FEW_VALUES, _MANY_VALUES, _LONG_LIST, _LONG_TEXT = 50, 2_000_000, 100, 60
_TRAIN_FRAC, _VALID_FRAC = 0.8, 0.1
# What YAML reads as something else than text.
_PLAIN = re.compile(r"[A-Za-z_][\w-]*")
_NOT_TEXT = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}


@dataclass(frozen=True)
class Column:
    """A column of the sample.

    Args:
        name: Its name in the log.
        kind: "integer", "number", "time", "text", "list", or what it is instead.
        num_rows: Rows of the sample.
        counts: How often each distinct value occurs, int64 (V,); lists count their items.
        numbers: The distinct values as numbers, times in milliseconds since 1970, float64 (V,).
        texts: The distinct values, or items, as texts.
        num_missing: Rows without a value.
        num_total: Estimated number of distinct values in the whole log.
        unit: Of times that are not of one of Arrow's types.
        separator: Between the items of a list in text.
        longest: Items of the longest list.
    """

    name: str
    kind: str
    num_rows: int
    counts: Any = field(default_factory=lambda: np.empty(0, np.int64))
    numbers: Float64s = field(default_factory=lambda: np.empty(0))
    texts: pa.Array = None
    num_missing: int = 0
    num_total: int = 0
    unit: TimeUnit | None = None
    separator: str = ""
    longest: int = 0

    @property
    def num_values(self) -> int:
        return int(self.counts.size)

    @property
    def num_present(self) -> int:
        return self.num_rows - self.num_missing

    @property
    def is_binary(self) -> bool:
        """Whether its values are 0 and 1, and none is missing."""
        is_number = self.kind in ("integer", "number")
        return is_number and not self.num_missing and set(self.numbers.tolist()) == {0.0, 1.0}

    @property
    def is_all_different(self) -> bool:
        return self.kind in ("integer", "text") and self.num_values > 0.98 * self.num_present


# Columns.


def look_at(sample: Sample) -> tuple[list[Column], list[str]]:
    """The columns of a sample, and the texts in it that mean "missing"."""
    found: list[Column] = []
    nulls = {""} if sample.format is SourceFormat.delimited else set()
    growth = sample.num_rows / max(1, sample.table.num_rows)
    for name in sample.table.column_names:
        array = one_array(sample.table.column(name))
        if sample.format is SourceFormat.delimited:
            column, used = _of_text_file(name, array, growth)
            nulls |= used
        else:
            column = _of_table(name, array, growth)
        found.append(column)
    return found, sorted(nulls)


def _of_text_file(name: str, array: pa.Array, growth: float) -> tuple[Column, set[str]]:
    values = array.dictionary.take(pc.unique(array.indices))
    candidates = {*_NULLS_AMONG_NUMBERS} & {*values.to_pylist()}
    is_null = pc.is_in(values, pa.array(["", *candidates]))
    others = values.filter(pc.invert(is_null))
    is_numeric = len(others) > 0 and pc.all(pc.match_substring_regex(others, _NUMBER)).as_py()
    used = candidates if is_numeric or _are_dates(others) else candidates & {*_NULL_TEXTS}
    texts = array.cast(pa.string())
    texts = pc.if_else(pc.is_in(texts, pa.array(["", *used])), pa.scalar(None, pa.string()), texts)
    if is_numeric:
        is_integer = pc.all(pc.match_substring_regex(others, _INTEGER)).as_py()
        numbers = texts.cast(pa.int64() if is_integer else pa.float64())
        return _of_numbers(name, numbers, growth), used
    return _of_texts(name, texts, growth), used


def _of_table(name: str, array: pa.Array, growth: float) -> Column:
    kind = array.type
    if pa.types.is_dictionary(kind):
        return _of_table(name, array.cast(kind.value_type), growth)
    if pa.types.is_boolean(kind):
        return _of_numbers(name, array.cast(pa.int8()), growth)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return _of_numbers(name, array, growth)
    if pa.types.is_decimal(kind):
        return _of_numbers(name, array.cast(pa.float64()), growth)
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        values, counts, num_missing = _counted(array)
        times = times_from_arrow(values)
        return Column(name, "time", len(array), counts, times, num_missing=num_missing)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return _of_texts(name, array.cast(pa.string()), growth)
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if is_list or pa.types.is_fixed_size_list(kind):
        item = kind.value_type
        if pa.types.is_integer(item) or pa.types.is_string(item) or pa.types.is_large_string(item):
            lengths = pc.max(pc.list_value_length(array)).as_py() or 0
            return _of_lists(name, array, array.flatten().cast(pa.string()), growth, "", lengths)
    return Column(name, f"of type {kind}, which is not read", len(array))


def _counted(array: pa.Array) -> tuple[pa.Array, Any, int]:
    """Distinct values, how often each occurs, and the number of missing ones."""
    counted = array.drop_null().value_counts()
    counts = counted.field("counts").to_numpy(zero_copy_only=False)
    return counted.field("values"), counts, array.null_count


def _num_total(array: pa.Array, growth: float) -> int:
    """Distinct values of ``growth`` times as many rows, by the power law of its two halves."""
    array = array.drop_null()
    num_values = len(array.unique())
    num_half = max(1, len(array[: len(array) // 2].unique()))
    exponent = min(1.0, max(0.0, math.log2(max(1, num_values) / num_half)))
    return round(num_values * growth**exponent)


def _of_numbers(name: str, array: pa.Array, growth: float) -> Column:
    values, counts, num_missing = _counted(array)
    numbers = numbers_from_arrow(values)
    kind = "integer" if pa.types.is_integer(array.type) else "number"
    total = _num_total(array, growth)
    texts = values.cast(pa.string())
    unit = _unit_of(name, numbers)
    if unit is not None:
        kind, numbers = "time", numbers * MS_PER_UNIT[unit]
    return Column(name, kind, len(array), counts, numbers, texts, num_missing, total, unit)


def _unit_of(name: str, numbers: Float64s) -> TimeUnit | None:
    """The unit in which all numbers are plausible times, if the name is of times."""
    if not _TIME_NAME.search(name) or not numbers.size:
        return None
    low, high = _TIMES_MS
    for unit, ms in MS_PER_UNIT.items():
        if low < numbers.min() * ms and numbers.max() * ms < high:
            return unit
    return None


def _are_dates(values: pa.Array) -> bool:
    if not len(values) or not pc.all(pc.match_substring_regex(values, _DATE)).as_py():
        return False
    return bool(np.isfinite(times_from_texts(Texts(values, np.arange(len(values))))).all())


def _of_texts(name: str, array: pa.Array, growth: float) -> Column:
    values, counts, num_missing = _counted(array)
    if _are_dates(values):
        times = times_from_texts(Texts(values, np.arange(len(values))))
        iso = TimeUnit.iso
        return Column(name, "time", len(array), counts, times, values, num_missing, unit=iso)
    if len(values) and pc.all(pc.match_substring_regex(values, r"^\s*[\[{]")).as_py():
        return Column(
            name, "lists in brackets, which are not read: join them with blanks", len(array)
        )
    for separator in _LIST_SEPARATORS:
        if (found := _as_list(name, array, values, separator, growth)) is not None:
            return found
    length = pc.mean(pc.utf8_length(values)).as_py() or 0
    if length > _LONG_TEXT:
        return Column(name, f"free text of {length:.0f} characters", len(array))
    total = _num_total(array, growth)
    numbers = np.empty(0)
    return Column(name, "text", len(array), counts, numbers, values, num_missing, total)


def _as_list(
    name: str, array: pa.Array, values: pa.Array, separator: str, growth: float
) -> Column | None:
    """The column as lists in text, if the items are shorter than the lists and repeat in them."""
    has_several = pc.match_substring(values, separator)
    if not len(values) or pc.sum(has_several).as_py() < 0.2 * len(values):
        return None
    pieces = pc.split_pattern(values, separator)
    items = pieces.flatten()
    items = items.filter(pc.not_equal(items, ""))
    are_items = len(items) > 0 and pc.all(pc.match_substring_regex(items, _ITEM)).as_py()
    if not are_items or len(items.unique()) >= 0.8 * len(values):
        return None
    longest = pc.max(pc.list_value_length(pieces)).as_py()
    of_rows = pc.split_pattern(array.drop_null(), separator).flatten()
    of_rows = of_rows.filter(pc.not_equal(of_rows, ""))
    return _of_lists(name, array, of_rows, growth, separator, longest)


def _of_lists(
    name: str, array: pa.Array, items: pa.Array, growth: float, separator: str, longest: int
) -> Column:
    values, counts, _ = _counted(items)
    total = _num_total(items, growth)
    numbers, missing = np.empty(0), array.null_count
    return Column(
        *(name, "list", len(array), counts, numbers, values, missing, total),
        separator=separator,
        longest=longest,
    )


# Roles.


def find_label(columns: list[Column], asked: str | None) -> Column:
    """The column that is trained for.

    Raises:
        ValueError: If none or several could be it.
    """
    binary = {column.name: column for column in columns if column.is_binary}
    if asked is not None:
        if asked not in binary:
            raise ValueError(
                f"label: expected a column of 0 and 1, of which the log has {sorted(binary)}, got "
                f"{asked!r}. Name one of them, or write the labels as 0 and 1."
            )
        return binary[asked]
    for name in LABEL_NAMES:
        for column in binary.values():
            if column.name.lower() == name:
                return column
    if len(binary) != 1:
        names = sorted(binary) or f"none among {[column.name for column in columns]}"
        advice = "Add label=<name of the column>" if binary else "Write the labels as 0 and 1"
        raise ValueError(f"label: expected one column of 0 and 1, got {names}. {advice}.")
    return next(iter(binary.values()))


def _check_header(sample: Sample, columns: list[Column]) -> None:
    """Refuse a first line of values: a header has a name that is no number above numbers.

    Columns may be named by their positions, from 0 or 1, as some programs do.
    """
    names = [column.name for column in columns if column.kind in ("integer", "number")]
    if (
        sample.format is SourceFormat.delimited
        and names
        and all(map(_is_number, names))
        and not any(
            all(column.name == str(place) for place, column in enumerate(columns, start=first))
            for first in (0, 1)
        )
    ):
        raise ValueError(
            f"path: expected the names of the columns in line 1 of {sample.files[0]}, got values: "
            f"{[column.name for column in columns]}. Put a line with names before it."
        )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def find_time(columns: list[Column], asked: str | None) -> Column | None:
    """The column of times to split by: the one asked for, else the first without missing values.

    Raises:
        ValueError: If the one asked for does not hold times, or lacks some.
    """
    times = {c.name: c for c in columns if c.kind == "time" and not c.num_missing}
    if asked is not None and asked not in times:
        raise ValueError(
            f"time: expected a column of times without missing values, of which the log has "
            f"{sorted(times)}, got {asked!r}. Name one of them."
        )
    return times[asked] if asked is not None else next(iter(times.values()), None)


@dataclass(frozen=True)
class Entry:
    """An entry of ``columns``, or why there is none.

    Args:
        name: Name of the entry.
        spec: Its keys; of a column that is left out, those it could have.
        note: What was seen.
        is_used: Whether the column is prepared.
    """

    name: str
    spec: Mapping[str, Any]
    note: str
    is_used: bool = True


@dataclass(frozen=True)
class Inferred:
    """What a log probably is, ready to be written.

    Args:
        label, time: The columns found; None if the log has no times.
        entries: Its columns, in order.
        tables: Settings of tables that are hashed, with notes.
        times: Columns of times that need a unit.
        split: Keys of ``split``.
        null_values: Texts that mean "missing".
    """

    label: Column
    time: Column | None
    entries: list[Entry]
    tables: dict[str, tuple[dict[str, Any], str]]
    times: dict[str, str]
    split: dict[str, Any]
    null_values: list[str]


def infer(sample: Sample, label: str | None = None, time: str | None = None) -> Inferred:
    """Guess what the columns of a log are.

    Args:
        sample: Rows of the log.
        label: The column of 0 and 1 to train for; None to find it.
        time: The column to split by; None to find one.

    Raises:
        ValueError: If there is no label, no header, or nothing to learn from.
    """
    columns, nulls = look_at(sample)
    _check_header(sample, columns)
    target, clock = find_label(columns, label), find_time(columns, time)
    split = {"kind": "fraction", "valid_frac": _VALID_FRAC, "test_frac": _VALID_FRAC}
    if clock is not None and (bounds := _bounds(clock)) is not None:
        split = {"kind": "time", "column": clock.name, **bounds}
    taken = {"label", "dense"}
    entries = [
        Entry("label", {"kind": "label", **_source("label", target.name)}, _share_of(target))
    ]
    tables: dict[str, tuple[dict[str, Any], str]] = {}
    table_of = _shared_tables(columns)
    for column in (column for column in columns if column is not target):
        for name, spec, note, is_used in _roles(column, clock, table_of.get(column.name)):
            entry = _unique_name(name, taken)
            spec = {**spec, **_source(entry, column.name)}
            entries.append(Entry(entry, spec, note, is_used))
            is_own = is_used and spec["kind"].startswith("categorical") and "table" not in spec
            if is_own and column.num_total > _MANY_VALUES:
                size = {"encoding": "hashing", "num_rows": _round_up(column.num_total)}
                tables[entry] = size, f"about {column.num_total:,} values"
    names = {column.name: entry.name for column in columns for entry in entries
             if entry.spec.get("source", entry.name) == column.name and entry.is_used}  # fmt: skip
    entries = [_with_table_name(entry, names) for entry in entries]
    if not any(e.is_used and e.spec["kind"].startswith("categorical") for e in entries):
        raise ValueError(
            f"path: expected a column of ids, got {[column.name for column in columns]}. "
            "Describe the log by hand, see docs/your_own_data.md."
        )
    used = {entry.spec.get("source", entry.name) for entry in entries if entry.is_used}
    used |= {split["column"]} if "column" in split else set()
    units = {c.name: c.unit.name for c in columns if c.unit is not None and c.name in used}
    return Inferred(target, clock, entries, tables, units, split, nulls)


def _source(entry: str, column: str) -> dict[str, str]:
    return {} if entry == column else {"source": column}


def _share_of(label: Column) -> str:
    share = label.counts[label.numbers == 1].sum() / label.num_rows
    return f"1 in {share:.1%} of the rows"


def _roles(
    column: Column, clock: Column | None, table: str | None
) -> Iterator[tuple[str, dict[str, Any], str, bool]]:
    """Name, keys, note and use of each entry that a column becomes."""
    name, note = column.name, _note(column)
    number = {"kind": "dense", **_scaling(column)}
    category: dict[str, Any] = {"kind": "categorical"}
    if column.kind == "time":
        is_clock = column is clock
        hours = np.unique(np.floor(column.numbers / _MS_PER_HOUR) % 24)
        days = np.unique(np.floor(column.numbers / _MS_PER_DAY))
        beside = "" if is_clock else f"{name}_"
        if hours.size > 1:
            yield f"{beside}hour", {**category, "derive": "hour_of_day"}, "0 to 23, UTC", is_clock
        if days.size > 1:
            keys = {**category, "derive": "day_of_week"}
            yield f"{beside}weekday", keys, "0 is Monday, UTC", is_clock
    elif column.kind not in ("integer", "number", "text", "list"):
        yield name, category, column.kind, False
    elif column.num_values < 2:
        yield name, category, f"left out: {column.num_values or 'no'} value", False
    elif column.is_all_different:
        yield name, category, "left out: nearly every value differs", False
    elif column.kind == "list":
        shared = {"table": table} if table else {}
        cut = {"max_length": _LONG_LIST} if column.longest > _LONG_LIST else {}
        between = {"separator": column.separator} if column.separator else {}
        yield name, {"kind": "categorical_list", **between, **cut, **shared}, note, True
    elif column.kind == "text" or (column.kind == "integer" and _is_id(column)):
        yield name, category, note, True
    else:
        yield name, number, note, True


def _is_id(column: Column) -> bool:
    return bool(_ID_NAME.search(column.name)) or column.num_values <= _FEW_VALUES


def _note(column: Column) -> str:
    if column.kind in ("integer", "number") and not (column.kind == "integer" and _is_id(column)):
        seen = f"{column.numbers.min():g} to {column.numbers.max():g}" if column.num_values else ""
        if column.kind == "integer":
            seen += f", {column.num_values:,} values; kind: categorical if they are ids"
    else:
        seen = f"about {column.num_total:,} values"
        if column.kind == "list" and column.num_present:
            seen += f", {column.counts.sum() / column.num_present:.1f} in a row"
    missing = column.num_missing / column.num_rows
    return f"{seen}, {missing:.1%} missing" if column.num_missing else seen


def _scaling(column: Column) -> dict[str, Any]:
    """Long tails are shortened; a missing number becomes the median."""
    if not column.num_values or column.kind not in ("integer", "number"):
        return {}
    order = np.argsort(column.numbers)
    half = np.searchsorted(np.cumsum(column.counts[order]), column.counts.sum() / 2)
    median = float(column.numbers[order][min(half, order.size - 1)])
    is_long = column.numbers.min() >= 0 and column.numbers.max() > max(20.0, 10 * median)
    scaling: dict[str, Any] = {"transform": "log1p"} if is_long else {}
    if column.num_missing:
        scaling["fill"] = float(f"{median:.4g}")
    return {**scaling, "standardize": True}


def _bounds(clock: Column) -> dict[str, str] | None:
    """Where validation and test begin, at days or hours if the log is long enough for that."""
    order = np.argsort(clock.numbers)
    times, shares = clock.numbers[order], np.cumsum(clock.counts[order]) / clock.counts.sum()
    at = [_TRAIN_FRAC, _TRAIN_FRAC + _VALID_FRAC]
    exact = [float(times[np.searchsorted(shares, share)]) for share in at]
    for step_ms in (_MS_PER_DAY, _MS_PER_HOUR, 1000):
        found = [math.floor(time_ms / step_ms) * step_ms for time_ms in exact]
        is_near = exact[0] - found[0] < 0.1 * (times[-1] - times[0])
        if times[0] < found[0] < found[1] <= times[-1] and is_near:
            return {"valid_from": _iso(found[0]), "test_from": _iso(found[1])}
    return None


def _iso(time_ms: float) -> str:
    moment = EPOCH + timedelta(milliseconds=time_ms)
    return moment.strftime("%Y-%m-%d" if time_ms % _MS_PER_DAY == 0 else "%Y-%m-%dT%H:%M:%S")


def _shared_tables(columns: list[Column]) -> dict[str, str]:
    """The column whose table a list reads, too: of a similar name, with most of the items."""
    shared = {}
    for bag in (column for column in columns if column.kind == "list"):
        for column in (c for c in columns if c.kind in ("integer", "text")):
            stem = re.sub(r"_?ids?$", "", column.name, flags=re.IGNORECASE).lower()
            if len(stem) < 3 or stem not in bag.name.lower() or column.is_all_different:
                continue
            is_in = pc.is_in(bag.texts, column.texts).to_numpy(zero_copy_only=False)
            if bag.counts[is_in].sum() > 0.5 * bag.counts.sum():
                shared[bag.name] = column.name
    return shared


def _with_table_name(entry: Entry, names: Mapping[str, str]) -> Entry:
    """The entry with its table by the name of the entry that shares it, not of the log's column."""
    if "table" not in entry.spec:
        return entry
    table = names[entry.spec["table"]]
    return Entry(entry.name, {**entry.spec, "table": table}, entry.note, entry.is_used)


def _unique_name(column: str, taken: set[str]) -> str:
    """A name that tables, files and modules can have."""
    name = re.sub(r"[^\w-]", "_", column)[: MAX_NAME_BYTES // 4] or "column"
    while name in taken or is_reserved(name):
        name += "_"
    taken |= {name, f"{name}_hot"}
    return name


def _round_up(number: int) -> int:
    digits = 10 ** (len(str(number)) - 2)
    return -(-number // digits) * digits


# YAML.


def to_yaml(sample: Sample, found: Inferred, heading: list[str]) -> str:
    """The specification as a file of the group ``data``, with what was seen as comments."""
    lines = [f"# {line}" for line in heading]
    seen = f"{sample.table.num_rows:,} rows"
    whole = "all" if sample.is_whole else f"about {sample.num_rows:,}, evenly spread"
    lines += [f"# Guessed from {seen} ({whole}); docs/configuration.md has every key.", "source:"]
    lines += [f"  format: {sample.format.name}", f"  files: {_flow(sample.files)}"]
    if sample.format is SourceFormat.delimited:
        lines += [
            f"  separator: {json.dumps(sample.separator)}",
            f"  null_values: {_flow(found.null_values)}",
        ]
        if sample.num_bad:
            lines.append(f"  on_bad_line: skip  # {sample.num_bad} lines do not fit the header")
    if found.times:
        lines.append(f"  times: {_flow(found.times)}")
    if found.split["kind"] == "time":
        lines.append("  # About 80% of the rows train, the next 10% validate, the last 10% test.")
    lines += [f"  split: {_flow(found.split)}"]
    lines += ["  table_defaults: {min_count: 2}  # a value seen once in training shares row 0"]
    if found.tables:
        lines.append("  tables:")
        lines += [f"    {_key(n)}: {_flow(s)}  # {note}" for n, (s, note) in found.tables.items()]
    lines.append("  # What is known only after the click does not belong here.")
    lines.append("  columns:")
    for entry in found.entries:
        mark = "" if entry.is_used else "# "
        lines.append(f"    {mark}{_key(entry.name)}: {_flow(entry.spec)}  # {entry.note}")
    return "\n".join(lines) + "\n"


def _key(text: str) -> str:
    is_plain = _PLAIN.fullmatch(text) and text.lower() not in _NOT_TEXT and text.isascii()
    return text if is_plain else json.dumps(text)


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)}: {_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, str):
        # An ISO time is text to Hydra; OmegaConf would interpolate ${.
        return _key(value).replace("${", "\\\\${")
    return json.dumps(value)
