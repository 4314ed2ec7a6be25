"""What a log probably is: its labels, its times, its split, and the role of each column.

Everything here is a guess from names and values; a comment next to each column gives the reason.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import chain, count
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow.compute as pc

from hotrec.config.data import CRITEO_DENSE, EPOCH, FEATURE_KINDS, SourceFormat, time_ms
from hotrec.config.names import MAX_NAME_BYTES, is_reserved
from hotrec.data.alone import Bools
from hotrec.data.inference.evidence import suspicion_of
from hotrec.data.inference.look import KNOWN_NULLS, Column, look_at
from hotrec.data.inference.meaning import MOST_ROWS, Meaning, meaning_of
from hotrec.data.inference.names import LABEL_NAMES, names_ids, names_ids_of, names_times
from hotrec.data.sample import Sample

_MS_PER_HOUR, _MS_PER_DAY = 3_600_000, 86_400_000
_MANY_VALUES, _LONG_LIST = 2_000_000, 100
_TRAIN_FRAC, _VALID_FRAC = 0.8, 0.1
# A log is ordered if at least this share of its rows is.
_IN_ORDER_FRAC = 0.9
# Fewer distinct values than this are days or months, not times.
_FEW_TIMES = 50
# The share of common values (a few may be lost); the number of them that excludes chance; and, for
# integers, the maximum density in their range, or the minimum share of the other column.
_ALL_SHARE, _FEW_SHARED, _SPARSE_FRAC, _MOST_FRAC = 0.99, 20, 0.5, 0.8
_FEW_SEEN = 4
_WORDS_OF_LABELS = (("false", "true"), ("f", "t"), ("no", "yes"), ("n", "y"))


@dataclass(frozen=True)
class Label:
    """A column that is trained for.

    Args:
        column: The column.
        keys: The keys of its entry, besides its kind.
        is_click: Whether each row is positive, bool (n,).
    """

    column: Column
    keys: Mapping[str, Any]
    is_click: Bools


@dataclass(frozen=True)
class Entry:
    """An entry of ``columns``, or why there is none.

    Args:
        name: Name of the entry.
        spec: Its keys; for a skipped column, those it could have.
        note: The evidence.
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
        labels: The label columns.
        entries: Its columns, in order.
        tables: Settings of tables that are hashed, with notes.
        times: Columns of times that need a form.
        split: Keys of ``split``.
        null_values: Texts that mean "missing".
        remarks: Points to check, one per line.
    """

    labels: list[Label]
    entries: list[Entry]
    tables: dict[str, tuple[dict[str, Any], str]]
    times: dict[str, str]
    split: dict[str, Any]
    null_values: list[str]
    remarks: list[str]


def infer(
    sample: Sample,
    labels: list[str] | None = None,
    time: str | None = None,
    given: Mapping[str, Mapping[str, Any] | None] = MappingProxyType({}),
) -> Inferred:
    """Guess what the columns of a log are.

    Args:
        sample: Rows of the log.
        labels: The label columns; None to find one.
        time: The column to split by; None to find one.
        given: Keys of known entries, by name; None to skip one.

    Raises:
        ValueError: If there is no label, no header, or nothing to learn from, or an entry to skip
            does not exist.
    """
    columns, nulls = look_at(sample)
    _check_header(sample, columns)
    targets = find_labels(columns, labels, first_line=_first_line(sample))
    clock = find_time(columns, time)
    split: dict[str, Any] = {"kind": "fraction", "valid_frac": _VALID_FRAC}
    split["test_frac"] = _VALID_FRAC
    if clock is not None and (bounds := _bounds(clock)) is not None:
        split = {"kind": "time", "column": clock.name, **bounds}
    taken = {"label", "dense"}
    entries = [_corrected(_entry_of(label, targets, taken), given) for label in targets]
    of_labels = [label.column for label in targets]
    columns = [column for column in columns if not any(column is other for other in of_labels)]
    remarks = _remarks_of_times(columns, clock, split, is_asked=time is not None)
    if words := sorted(set(nulls) - {*KNOWN_NULLS}):
        remarks.append(f"{', '.join(map(repr, words))}: among numbers, so taken as missing")
    tables: dict[str, tuple[dict[str, Any], str]] = {}
    rows = _some_rows(sample.table.num_rows)
    clicks = [label.is_click[rows] for label in targets]
    some = {column.name: column.at(rows) for column in columns}
    meanings = {column.name: meaning_of(some[column.name], clicks) for column in columns}
    if sample.format is SourceFormat.criteo:
        meanings |= {
            c.name: Meaning(False) for c in columns if c.name in CRITEO_DENSE and c.is_numeric
        }
    table_of = _shared_tables(
        columns, [c for c in columns if meanings[c.name].are_ids and is_category(c)]
    )
    for column in columns:
        # A column that shares the table of ids holds ids itself.
        meaning = Meaning(True) if column.name in table_of else meanings[column.name]
        suspicion = suspicion_of(some[column.name], meaning.are_ids, clicks)
        if column.guess:
            remarks.append(f"{column.name}: {column.guess}")
        if column.is_unread:
            remarks.append(f"{column.name}: skipped: {column.kind}")
        for name, keys, note, is_used in _roles(column, meaning, clock, split, table_of):
            entry = _unique_name(name, taken)
            spec = {**keys, **_source(entry, column.name)}
            if suspicion:
                note = f"{note}; {suspicion}: is it known before the click?"
            found = _corrected(Entry(entry, spec, note, is_used), given)
            entries.append(found)
            kind = found.spec["kind"] if found.is_used else ""
            is_own = kind.startswith("categorical") and "table" not in found.spec
            if is_own and column.num_total > _MANY_VALUES:
                size = {"encoding": "hashing", "num_rows": _round_up(column.num_total)}
                tables[entry] = size, f"about {column.num_total:,} values"
        if suspicion and any(e.is_used and _source_of(e) == column.name for e in entries):
            remarks.append(f"{column.name}: {suspicion}. Is it known before the click? If not, "
                               "remove it")  # fmt: skip
    entries += _further({entry.name for entry in entries}, given)
    names = {_source_of(entry): entry.name for entry in entries if entry.is_used}
    entries = [_with_table_name(entry, names) for entry in entries]
    if not any(e.is_used and e.spec.get("kind") in FEATURE_KINDS for e in entries):
        raise ValueError(
            f"path: expected a column of ids, got {[column.name for column in columns]}. "
            "Describe the log by hand, see docs/your_own_data.md."
        )
    used = {*names, *([split["column"]] if "column" in split else ())}
    times = {c.name: c.form for c in columns if c.form and c.name in used}
    return Inferred(targets, entries, tables, times, split, nulls, remarks)


def _some_rows(num_rows: int) -> Any:
    """Random rows, enough for the AUC of a column."""
    if num_rows <= MOST_ROWS:
        return np.arange(num_rows)
    return np.sort(np.random.default_rng(0).choice(num_rows, MOST_ROWS, replace=False))


def _check_header(sample: Sample, columns: list[Column]) -> None:
    """Refuse a first line of values: a header has a non-numeric name above a column of numbers.

    Columns may be named by their positions, from 0 or 1, as some programs do.
    """
    names = [column.name for column in columns if column.is_numeric]
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


# Labels.


def _first_line(sample: Sample) -> int:
    """The line of the first row; 0 if lines are unknown, since the rows are not all of a file."""
    is_known = sample.is_whole and not sample.num_bad and len(sample.files) == 1
    return is_known and (2 if sample.format is SourceFormat.delimited else 1)


def _seen(column: Column, first_line: int) -> str:
    """The values of a column that is no label: the most frequent ones, and the missing ones."""
    if column.is_unread or column.offsets is not None:
        return f"{column.name}: {column.kind}"
    frequent = np.argsort(-column.counts, kind="stable")[:_FEW_SEEN].tolist()
    parts = [f"{column.values[i].as_py()!r:.40} in {column.counts[i]:,} rows" for i in frequent]
    if column.num_values > _FEW_SEEN:
        parts.append(f"{column.num_values - _FEW_SEEN:,} other values")
    if column.num_missing:
        first = int(np.argmax(column.codes < 0))
        at = f"line {first_line + first}" if first_line else f"row {first + 1} of the sample"
        parts.append(f"no value in {column.num_missing:,} rows, first at {at}")
    return f"{column.name}: {', '.join(parts)}"


def find_labels(
    columns: list[Column], asked: list[str] | None, *, first_line: int = 0
) -> list[Label]:
    """The label columns: the requested ones, else the only candidate.

    Raises:
        ValueError: If there is no candidate or several.
    """
    found = {column.name: label for column in columns if (label := _as_label(column)) is not None}
    if asked is not None:
        missing = [name for name in asked if name not in found]
        seen = [_seen(column, first_line) for column in columns if column.name in missing]
        if missing or not asked:
            raise ValueError(
                f"label: expected columns of 0 and 1 (the log has {sorted(found) or 'none'}), got "
                f"{', '.join(map(repr, missing)) or 'none'}{_listed(seen)}. Use some of these, or "
                "write the labels as 0 and 1 in every row."
            )
        return [found[name] for name in dict.fromkeys(asked)]
    for name in LABEL_NAMES:
        for column_name, label in found.items():
            if column_name.lower() == name:
                return [label]
    # Without a matching name a column is a label only if its values are unambiguous.
    found = {name: label for name, label in found.items() if not label.column.num_missing}
    if len(found) != 1:
        seen = [_seen(c, first_line) for c in columns if c.name.lower() in LABEL_NAMES]
        names = sorted(found) or f"none among {[c.name for c in columns]}{_listed(seen)}"
        advice = "Add label=<name of the column>" if found else "Write the labels as 0 and 1"
        raise ValueError(f"label: expected one column of 0 and 1, got {names}. {advice}.")
    return list(found.values())


def _listed(seen: list[str]) -> str:
    return f" ({'; '.join(seen)})" if seen else ""


def _as_label(column: Column) -> Label | None:
    """The column as a label, if it has two values, one of them positive."""
    if column.offsets is not None or not 1 <= column.num_values <= 2:
        return None
    texts = column.values.to_pylist()
    keys: dict[str, Any] = {}
    if column.is_numeric:
        order = np.argsort(column.numbers)
        pair = [texts[place] for place in order]
        if column.numbers[order].tolist() == [-1.0, 1.0]:
            keys = {"values": pair}
        elif column.numbers[order].tolist() not in ([0.0, 1.0], [1.0]):
            return None
    else:
        pair = sorted(texts, key=str.lower)
        words = tuple(text.lower() for text in pair)
        if words not in _WORDS_OF_LABELS and words not in [both[1:] for both in _WORDS_OF_LABELS]:
            return None
    # If every value is positive, the rows without a value are the negatives.
    if (len(pair) == 1) != bool(column.num_missing):
        return None
    if len(pair) == 1:
        keys = {"values": ["", *pair]}
    positive = texts.index(pair[-1])
    return Label(column, keys, column.codes == positive)


def _entry_of(label: Label, labels: list[Label], taken: set[str]) -> Entry:
    name, share = label.column.name, label.is_click.mean()
    entry = "label" if len(labels) == 1 else _unique_name(name, taken)
    spec = {"kind": "label", **label.keys, **_source(entry, name)}
    return Entry(entry, spec, f"1 in {share:.1%} of the rows")


# Times.


def find_time(columns: list[Column], asked: str | None) -> Column | None:
    """The column of times to split by, without missing values.

    It is the requested one, else the first one by which the log is ordered, else the first of all.
    A user's birthday, for example, is not ordered.

    Raises:
        ValueError: If the requested one does not hold times, or lacks some.
    """
    times = {c.name: c for c in columns if c.kind == "time" and not c.num_missing}
    if asked is not None and asked not in times:
        raise ValueError(
            f"time: expected a column of times without missing values (the log has "
            f"{sorted(times) or 'none'}), got {asked!r}. Use one of these."
        )
    if asked is not None:
        return times[asked]
    return next(filter(_is_in_order, times.values()), next(iter(times.values()), None))


def _is_in_order(clock: Column) -> bool:
    """Whether most rows are not earlier than the row before."""
    steps = np.diff(clock.numbers[clock.codes])
    return steps.size > 0 and float((steps >= 0).mean()) > _IN_ORDER_FRAC


def _remarks_of_times(
    columns: list[Column], clock: Column | None, split: Mapping[str, Any], *, is_asked: bool
) -> list[str]:
    """Remarks about columns of times that the split does not use."""
    is_random = split["kind"] != "time"
    found = []
    for column in columns:
        if column is clock:
            why = "too few distinct times to split by" if is_random else ""
        elif column.kind == "time" and column.num_missing:
            why = f"times, but missing in {column.num_missing:,} rows" if is_random else ""
        elif column.kind == "time":
            why = "" if is_asked else f"also times: use time={column.name} to split by them"
        elif is_unknown_time(column):
            example = column.values[0].as_py()
            why = f"skipped: name suggests times, but of an unknown format, such as {example!r}"
        else:
            continue
        if why:
            found.append(
                f"{column.name}: {why}" + ("; the split is at random" if is_random else "")
            )
    return found


def is_unknown_time(column: Column) -> bool:
    """Whether a column's name suggests times and its values may be some, of an unknown format."""
    if column.num_values <= _FEW_TIMES or not names_times(column.name):
        return False
    if column.kind == "text":
        return bool(pc.all(pc.match_substring_regex(column.values, "[0-9]")).as_py())
    if not column.is_numeric or column.num_missing:
        return False
    # Durations have such names too, but do not increase along the log.
    is_rising = bool((np.diff(column.numbers[column.codes]) >= 0).all())
    return is_rising or (column.kind == "integer" and names_ids(column.name) is None)


def _bounds(clock: Column) -> dict[str, str] | None:
    """The starts of validation and test, rounded to days or hours if the log is long enough."""
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


def _trains_for_weeks(column: Column, split: Mapping[str, Any]) -> bool:
    """Whether training has each weekday twice; else a weekday is indistinguishable from its day."""
    end = time_ms(split["valid_from"]) if split["kind"] == "time" else math.inf
    days = np.unique(np.floor(column.numbers / _MS_PER_DAY)).astype(np.int64)
    num_trained = np.bincount(days[days * _MS_PER_DAY < end] % 7, minlength=7)
    return bool(num_trained[np.unique(days % 7)].min() >= 2)


# Features.


def _roles(
    column: Column,
    meaning: Meaning,
    clock: Column | None,
    split: Mapping[str, Any],
    table_of: Mapping[str, str],
) -> Iterator[tuple[str, dict[str, Any], str, bool]]:
    """Name, keys, note and use of each entry that a column becomes."""
    name = column.name
    category: dict[str, Any] = {"kind": "categorical"}
    shared = {"table": table_of[name]} if name in table_of else {}
    if column.kind == "time":
        yield from _roles_of_time(column, column is clock, split)
    elif column.kind == "vector":
        between = {"separator": column.separator} if column.separator else {}
        keys = {**between, "width": column.width, "standardize": True}
        yield name, {"kind": "dense", **keys}, f"vectors of {column.width}", True
    elif column.is_unread:
        yield name, category, f"skipped: {column.kind}", False
    elif is_unknown_time(column):
        yield name, category, "skipped: name suggests times, but of an unknown format", False
    elif column.num_values < 2:
        yield name, category, f"skipped: {column.num_values or 'no'} value", False
    elif column.kind == "list":
        cut = {"max_length": _LONG_LIST} if column.longest > _LONG_LIST else {}
        between = {"separator": column.separator} if column.separator else {}
        keys = {"kind": "categorical_list", **between, **cut, **shared}
        yield name, keys, _note(column, meaning), True
    elif not meaning.are_ids:
        keys = {"kind": "dense", **column.number_form, **_scaling(column)}
        yield name, keys, _note(column, meaning), True
    elif not is_category(column):
        yield name, category, "skipped: nearly all values are distinct", False
    else:
        yield name, {**category, **shared}, _note(column, meaning), True


def _roles_of_time(
    column: Column, is_clock: bool, split: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, Any], str, bool]]:
    beside = "" if is_clock else f"{column.name}_"
    hours = np.unique(np.floor(column.numbers / _MS_PER_HOUR) % 24)
    days = np.unique(np.floor(column.numbers / _MS_PER_DAY))
    category = {"kind": "categorical"}
    if hours.size > 1:
        keys = {**category, "derive": "hour_of_day"}
        yield f"{beside}hour", keys, "0 to 23, UTC", is_clock
    if days.size > 1:
        keys, is_known = {**category, "derive": "day_of_week"}, _trains_for_weeks(column, split)
        note = "0 is Monday, UTC" if is_known else "skipped: training covers less than two weeks"
        yield f"{beside}weekday", keys, note, is_clock and is_known


def _note(column: Column, meaning: Meaning) -> str:
    if not meaning.are_ids:
        seen = f"{column.numbers.min():g} to {column.numbers.max():g}"
    else:
        seen = f"about {column.num_total:,} values"
        if column.kind == "list" and column.num_present:
            seen += f", {column.codes.size / column.num_present:.1f} in a row"
    if column.num_missing:
        seen += f", {column.num_missing / column.num_rows:.1%} missing"
    return f"{seen}; {meaning.why}" if meaning.why else seen


def _scaling(column: Column) -> dict[str, Any]:
    """Long tails are shortened; a missing number becomes the median."""
    order, counts = np.argsort(column.numbers), column.counts
    half = np.searchsorted(np.cumsum(counts[order]), counts.sum() / 2)
    median = float(column.numbers[order][min(half, order.size - 1)])
    is_long = column.numbers.min() >= 0 and column.numbers.max() > max(20.0, 10 * median)
    scaling: dict[str, Any] = {"transform": "log1p"} if is_long else {}
    if column.num_missing:
        scaling["fill"] = float(f"{median:.4g}")
    return {**scaling, "standardize": True}


def is_category(column: Column) -> bool:
    """Whether a column of ids has values that occur often enough to be learned."""
    return (
        column.kind in ("integer", "text")
        and 2 <= column.num_values <= 0.98 * column.num_present
        and not is_unknown_time(column)
    )


def _shared_tables(columns: list[Column], categories: list[Column]) -> dict[str, str]:
    """The column of ids whose table another one shares, since it has the same vocabulary."""
    shared: dict[str, str] = {}
    for reader in columns:
        if reader.kind not in ("list", "text", "integer") or reader.num_values < 2:
            continue
        if names_ids(reader.name) is False:
            continue
        found = {}
        for column in categories:
            is_larger = reader.kind == "list" or column.num_values > reader.num_values
            if column is reader or column.name in shared or not is_larger:
                continue
            is_in = pc.is_in(reader.values, column.values).to_numpy(zero_copy_only=False)
            share = float(reader.counts[is_in].sum() / reader.counts.sum())
            if _is_of_table(reader, column, share):
                found[column.name] = is_in.sum() / column.num_values
        if found:
            shared[reader.name] = max(found, key=lambda name: found[name])
    for name in shared:  # the table of a column that shares another's
        while shared[name] in shared:
            shared[name] = shared[shared[name]]
    return shared


def _is_of_table(reader: Column, column: Column, share: float) -> bool:
    """Whether a column shares the table of another that has this share of its values.

    Either its name suggests it, or it has all its values there and chance is excluded: texts,
    sparse numbers, or lists with nearly all numbers of the other column.
    """
    is_list = reader.kind == "list"
    if names_ids_of(reader.name, column.name, is_list=is_list) and share > (
        0.5 if is_list else 0.9
    ):
        return True
    if share < _ALL_SHARE or reader.num_values < _FEW_SHARED:
        return False
    if column.kind == "text":
        return True
    is_read = pc.is_in(column.values, reader.values).to_numpy(zero_copy_only=False)
    low, high = column.numbers[is_read].min(), column.numbers[is_read].max()
    num_near = np.count_nonzero((low <= column.numbers) & (column.numbers <= high))
    is_sparse = num_near < _SPARSE_FRAC * (high - low + 1)
    return bool(is_sparse or (is_list and reader.num_values > _MOST_FRAC * column.num_values))


def _with_table_name(entry: Entry, names: Mapping[str, str]) -> Entry:
    """The entry with its table by the name of the entry that shares it, not of the log's column."""
    if "table" not in entry.spec:
        return entry
    table = names.get(entry.spec["table"], entry.spec["table"])
    return Entry(entry.name, {**entry.spec, "table": table}, entry.note, entry.is_used)


def _corrected(entry: Entry, given: Mapping[str, Mapping[str, Any] | None]) -> Entry:
    """The entry with the keys of ``given``; with another kind it keeps none of its own."""
    keys = given.get(entry.name, {})
    if keys is None:
        return replace(entry, note="skipped: as requested", is_used=False)
    if not keys:
        return entry
    is_same = keys.get("kind", entry.spec["kind"]) == entry.spec["kind"]
    kept = entry.spec if is_same else _source(entry.name, _source_of(entry))
    return Entry(entry.name, {**kept, **keys}, "as given")


def _further(found: set[str], given: Mapping[str, Mapping[str, Any] | None]) -> Iterator[Entry]:
    """The entries of ``given`` that were not found, which may read any column."""
    for name, keys in given.items():
        if name in found:
            continue
        if keys is None:
            raise ValueError(
                f"columns.{name}: expected one of {', '.join(sorted(found))} to skip, got "
                f"{name!r}. Correct the name."
            )
        yield Entry(name, keys, "as given")


def _source(entry: str, column: str) -> dict[str, str]:
    return {} if entry == column else {"source": column}


def _source_of(entry: Entry) -> str:
    found: str = entry.spec.get("source", entry.name)
    return found


def _unique_name(column: str, taken: set[str]) -> str:
    """A name that tables, files and modules can have."""
    first = re.sub(r"[^\w-]", "_", column)[: MAX_NAME_BYTES // 4] or "column"
    # More underscores at the end of one that begins with two would leave it reserved.
    numbered = (f"{first}_{number}" for number in count(2))
    is_free = lambda name: name not in taken and not is_reserved(name)  # noqa: E731
    name = next(filter(is_free, chain([first], numbered)))
    taken |= {name, f"{name}_hot"}
    return name


def _round_up(number: int) -> int:
    digits = 10 ** (len(str(number)) - 2)
    return -(-number // digits) * digits
