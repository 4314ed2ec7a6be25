"""What a log probably is: its labels, its times, its split, and the role of each column.

Everything here is a guess from names and values; a comment next to each column gives the reason. A
column that is not understood is left out or read as ids, and said so, with an ``expr`` to start
from where its values look like numbers or dates.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import chain, count
from types import MappingProxyType
from typing import Any

import numpy as np
import polars as pl

from hotrec.config.data import CRITEO_DENSE, EPOCH, FEATURE_KINDS, SourceFormat, TimeUnit, time_ms
from hotrec.config.names import MAX_NAME_BYTES, is_reserved
from hotrec.data.alone import Bools, alone_auc, codes_of_numbers
from hotrec.data.columns import (
    MS_PER_UNIT,
    Ids,
    ids_from_arrow,
    labels_from_texts,
    lists_from_texts,
    numbers_from_texts,
    times_from_arrow,
    times_from_texts,
    whole_ids,
)
from hotrec.data.names import LABEL_NAMES, names_ids, names_ids_of, names_times, names_vectors
from hotrec.data.sample import Sample
from hotrec.data.value_types import are_epochs
from hotrec.types import Float64s

_MS_PER_HOUR, _MS_PER_DAY = 3_600_000, 86_400_000
_LONG_LIST, _FEW_VALUES = 100, 50
_TRAIN_FRAC, _VALID_FRAC, _IN_ORDER = 0.8, 0.1, 0.9
_NULLS = ("NULL", "null", "\\N", "N/A", "NaN", "nan", "None")
_NULLS_AMONG_NUMBERS = (*_NULLS, "NA", "na", "none", "-", "?")
_ITEM, _BRACKETS, _HASH_WITH_E = r"^[\w:.\-]{1,40}$", r"^\s*\[.*\]\s*$", r"^[0-9]+[eE][0-9]+$"
_DATE = r"[0-9]{1,4}[./-][0-9]{1,2}[./-][0-9]{1,4}|[0-9]:[0-9]{2}"
_INTEGER, _ZERO, _MOST_EXACT = r"^[+-]?[0-9]+$", r"^[+-]?0[0-9]", 2.0**53
# Signs beside and inside of numbers, as an expression could remove them.
_BESIDE = "[$\u20ac\u00a3\u00a5\u20b9%]"
_SIGNS = "$\u20ac\u00a3\u00a5\u20b9%', \u00a0\u202f"
# AUC by which ids must be better than numbers, besides three standard errors; and that of a column
# alone above which it may be known only after the click.
_MORE_AS_IDS, _NUM_ERRORS, _SUSPICIOUS_AUC, _MOST_ROWS = 0.02, 3.0, 0.85, 50_000
# A group of rows of one class (199 of 200), too many for chance.
_PURE_ROWS, _PURE_SHARE, _PURE_FRAC = 50, 0.995, 0.01


@dataclass(frozen=True)
class Column:
    """A column of the sample.

    Args:
        name: Its name in the log.
        kind: "integer", "number", "time", "text", "list", "vector", or why it is not read.
        ids: The value of each row as text, or its list of texts.
        numbers: The values as numbers, times in milliseconds since 1970.
        form: The form of times that are not of one of Arrow's types, see ``SourceSpec.times``.
        separator: The separator of the items of a list or vector in text.
        width: Length of a vector.
        remark: What may be wrong.
        expr: An expression that may read it.
    """

    name: str
    kind: str
    ids: pl.Series
    numbers: pl.Series = field(default_factory=lambda: pl.Series([], dtype=pl.Float64))
    form: str = ""
    separator: str = ""
    width: int = 0
    remark: str = ""
    expr: str = ""

    def at(self, rows: Any) -> Column:
        """Some of its rows, int64 (m,)."""
        numbers = self.numbers[rows] if len(self.numbers) else self.numbers
        return replace(self, ids=self.ids[rows], numbers=numbers)

    @property
    def items(self) -> pl.Series:
        """All its values that are there."""
        return (self.ids.explode() if self.kind == "list" else self.ids).drop_nulls()

    @property
    def num_values(self) -> int:
        return self.items.n_unique()

    @property
    def num_missing(self) -> int:
        return self.ids.null_count()

    @property
    def is_unread(self) -> bool:
        return self.kind not in ("integer", "number", "time", "text", "list", "vector")


def look_at(sample: Sample) -> tuple[list[Column], list[str]]:
    """The columns of a sample, and the texts in it that mean "missing"."""
    nulls = {""} if sample.is_text else set()
    columns = []
    for values in sample.table.get_columns():
        if sample.is_text:
            found, values = _nulls_of(values)
            nulls |= found
        columns.append(_look(values))
    return columns, sorted(nulls)


def _nulls_of(texts: pl.Series) -> tuple[set[str], pl.Series]:
    """The texts that mean "missing", and the values without them; some do only among numbers."""
    words = set(texts.filter(texts.is_in(_NULLS_AMONG_NUMBERS)).unique())
    if words:
        others = _without(texts, {"", *words}).drop_nulls()
        are_measured = are_all(numbers_of, others) or are_all(times_of, others)
        words = words if len(others) and are_measured else words & {*_NULLS}
    return words, _without(texts, {"", *words})


def _without(texts: pl.Series, nulls: set[str]) -> pl.Series:
    return texts.set(texts.is_in(sorted(nulls)), None)


# Values as ``prepare`` reads them. Of numbers NaN is one that is none, and null a missing one.


def _or_nan(numbers: Float64s) -> pl.Series:
    found = pl.Series(numbers, nan_to_null=True)
    return found.set(found.is_infinite(), math.nan)


def _texts(values: pl.Series) -> Ids:
    return ids_from_arrow(values.to_arrow())[0]


def numbers_of(values: pl.Series) -> pl.Series:
    """Numbers, or texts of them."""
    if values.dtype == pl.String:
        return _or_nan(numbers_from_texts(_texts(values)))
    numbers = values.cast(pl.Float64)
    return numbers.set(numbers.is_infinite(), math.nan)


def labels_of(texts: pl.Series) -> pl.Series:
    """Texts as labels 0 and 1."""
    return _or_nan(labels_from_texts(_texts(texts)))


def times_of(values: pl.Series) -> pl.Series:
    """Typed times, or texts in ISO 8601, as milliseconds since 1970."""
    if values.dtype != pl.String:
        return pl.Series(times_from_arrow(values.to_arrow()), nan_to_null=True)
    return _or_nan(times_from_texts(_texts(values)))


def are_all(read: Callable[[pl.Series], pl.Series], values: pl.Series) -> bool:
    """Whether all values can be read so; most columns are told by a few of them."""
    return not read(values.head(200)).is_nan().any() and not read(values).is_nan().any()


def ids_of(values: pl.Series) -> pl.Series | None:
    """Values as ids; None if some are numbers but not integers."""
    ids, is_odd = ids_from_arrow(values.to_arrow())
    return None if is_odd.any() else whole_ids(ids).values().alias(values.name)


def lists_of(texts: pl.Series, separator: str) -> pl.Series:
    """Texts as lists of ids."""
    return whole_ids(lists_from_texts(_texts(texts), separator)).values().alias(texts.name)


def _look(values: pl.Series) -> Column:
    """What a column holds, by its type, or by its texts."""
    name, kind = values.name, values.dtype
    if isinstance(kind, pl.List | pl.Array):
        return _look_at_lists(values.cast(pl.List(kind.inner)))
    if kind in (pl.Date, pl.Datetime):
        return Column(name, "time", values.cast(pl.String), times_of(values))
    if kind.is_numeric():
        return _look_at_numbers(values)
    if kind not in (pl.String, pl.Boolean, pl.Time, pl.Null, pl.Categorical, pl.Enum):
        return Column(name, f"not supported: type {kind}", values.is_null().cast(pl.String))
    return _look_at_texts(values.cast(pl.String))


def _look_at_numbers(values: pl.Series) -> Column:
    name, numbers = values.name, numbers_of(values)
    if numbers.is_nan().any():
        why = "not supported: numbers with NaN or infinity (write null)"
        return Column(name, why, values.cast(pl.String))
    ids = ids_of(values)
    if ids is None:
        return Column(name, "number", values.cast(pl.String), numbers)
    if (numbers.abs() >= _MOST_EXACT).any():  # as numbers, some of them would be equal
        return Column(name, "text", ids)
    return _times_in_numbers(Column(name, "integer", ids, numbers))


def _times_in_numbers(column: Column) -> Column:
    """The same column, or as times if its name and all its values are of these days."""
    for unit, ms in MS_PER_UNIT.items() if names_times(column.name) else ():
        times = column.numbers * ms
        if len(column.items) and are_epochs(times.drop_nulls().to_numpy()).all():
            return replace(column, kind="time", numbers=times, form=unit)
    return column


def _look_at_lists(values: pl.Series) -> Column:
    name, items = values.name, values.explode()
    lengths = values.list.len().drop_nulls().unique()
    odd = items.dtype.is_numeric() and ids_of(items) is None
    if len(lengths) == 1 and items.dtype.is_numeric() and (odd or names_vectors(name)):
        return Column(name, "vector", values.cast(pl.List(pl.String)), width=int(lengths[0]))
    if odd or items.dtype.is_nested() or items.dtype == pl.Binary:
        what = "numbers of different lengths" if odd else f"type {items.dtype}"
        return Column(name, f"not supported: lists of {what}", values.is_null().cast(pl.String))
    if items.dtype.is_float() or items.dtype.is_decimal():
        values = values.cast(pl.List(pl.Int64))
    return Column(name, "list", values.cast(pl.List(pl.String)))


def _look_at_texts(texts: pl.Series) -> Column:
    name, there = texts.name, texts.drop_nulls()
    if not len(there):
        return Column(name, "text", texts)
    # Digits alone are times only by their name.
    if are_all(times_of, there) and (names_times(name) or not are_all(numbers_of, there)):
        return Column(name, "time", texts, times_of(texts), TimeUnit.iso)
    if are_all(numbers_of, there):
        ids, lengths, numbers = ids_of(texts), there.str.len_bytes(), numbers_of(texts)
        assert ids is not None, "texts are ids"
        if lengths.min() == lengths.max() > 5 and there.str.contains(_HASH_WITH_E).any():
            return Column(name, "text", texts)  # hexadecimal
        if not ids.drop_nulls().str.contains(_INTEGER).all():
            return Column(name, "number", texts, numbers)
        # As numbers, some of them would be equal.
        is_exact = numbers.abs().max() < _MOST_EXACT and not there.str.contains(_ZERO).any()
        if not is_exact:
            return Column(name, "text", ids)
        return _with_date(_times_in_numbers(Column(name, "integer", ids, numbers)))
    if there.str.contains(r"^\s*\{").all():
        return Column(name, "not supported: objects (convert them to columns)", texts)
    if (found := _as_amounts(texts)) is not None:
        return found
    for separator in "|;, ":
        if (found := _as_lists(texts, separator)) is not None:
            return found
    return _with_date(Column(name, "text", texts))


def _as_lists(texts: pl.Series, separator: str) -> Column | None:
    """The column as lists in text, if the items are shorter than the lists and repeat in them."""
    there = texts.drop_nulls().unique(maintain_order=True)
    is_sure = bool(there.str.contains(_BRACKETS).all())
    is_sure &= there.str.contains(separator, literal=True).any()
    if not is_sure and there.str.contains(separator, literal=True).mean() < 0.2:
        return None
    lists = lists_of(there, separator)
    items, lengths = lists.explode().drop_nulls(), lists.list.len()
    if not len(items) or (not is_sure and (lengths > 1).mean() < 0.2):
        return None
    name, are_integers = texts.name, items.str.contains(_INTEGER).all()
    if not are_integers and are_all(numbers_of, items):
        if lengths.n_unique() > 1:
            return Column(name, "not supported: lists of numbers of different lengths", texts)
        if lengths[0] > 1:
            return Column(name, "vector", texts, separator=separator, width=int(lengths[0]))
    repeat = items.n_unique() < 0.8 * len(there) and items.str.contains(_ITEM).all()
    if not is_sure and not repeat:
        return None
    remark = "" if is_sure else (
        f"read as lists of ids, separated by {separator!r}, such as "
        f"{there.filter(lengths > 1)[0]!r:.80}; if these are single ids, set its kind to "
        "categorical"
    )  # fmt: skip
    lists = lists_of(texts, separator)
    return Column(name, "list", lists, separator=separator, remark=remark)


def _as_amounts(texts: pl.Series) -> Column | None:
    """Numbers with signs or separators: left out, with an expression to start from."""
    name, there = texts.name, texts.drop_nulls()
    is_likely = names_ids(name) is False or there.str.contains(_BESIDE).all()
    is_likely |= there.str.contains(",0|,.*[.]|[.].*,").any()  # a list of ids has none of these
    if not is_likely or not there.str.contains("[0-9]").all():
        return None
    bare = there.str.replace_all(f"[{re.escape(_SIGNS)}]", "").str.replace_all(",", ".")
    if not are_all(numbers_of, bare):
        return None
    is_decimal = not there.str.contains(r"\.|,[0-9]{3}($|\D)").any()
    signs = [sign for sign in _SIGNS if there.str.contains(sign, literal=True).any()]
    expr = _quoted(name)
    for sign in signs:
        by = "." if sign == "," and is_decimal else ""
        expr = f"REPLACE({expr}, {_literal(sign)}, {_literal(by)})"
    why = f"numbers of another form, such as {there[0]!r:.40}"
    return Column(name, why, texts, expr=f"CAST({expr} AS DOUBLE)")


def _with_date(column: Column) -> Column:
    """The same, or not read if it may be times, with an expression to start from.

    Durations have such names too, but do not increase along the log.
    """
    name, there = column.name, column.ids.drop_nulls()
    is_named = names_times(name) and there.str.contains("[0-9]").all()
    if column.kind == "integer":
        is_named &= names_ids(name) is None or column.numbers.is_sorted()
    is_named &= there.n_unique() > _FEW_VALUES
    if column.kind == "time" or not (is_named or there.str.contains(_DATE).all()):
        return column
    kind = f"perhaps times, of a form to be set in its expr, such as {there[0]!r:.40}"
    return replace(column, kind=kind, expr=f"STRPTIME({_quoted(name)}, '%d.%m.%Y %H:%M')")


def _quoted(name: str) -> str:
    """A column in SQL, which may be named like a function."""
    return '"' + name.replace('"', '""') + '"'


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


# What a log is.


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

    @property
    def source(self) -> str:
        found: str = self.spec.get("source", self.name)
        return found


@dataclass(frozen=True)
class Inferred:
    """What a log probably is, ready to be written.

    Args:
        labels: The columns that are labels.
        entries: Its columns, in order.
        times: Columns of times that need a form.
        split: Keys of ``split``.
        exprs: Columns computed from others, and whether they are used.
        null_values: Texts that mean "missing".
        remarks: Points to check, one per line.
    """

    labels: list[str]
    entries: list[Entry]
    times: dict[str, str]
    split: dict[str, Any]
    exprs: dict[str, tuple[str, bool]]
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
    targets = find_labels(columns, labels, is_text=sample.is_text)
    clock = find_time(columns, time)
    split: dict[str, Any] = {"kind": "fraction", "valid_frac": _VALID_FRAC}
    split["test_frac"] = _VALID_FRAC
    if clock is not None and (bounds := _bounds(clock)) is not None:
        split = {"kind": "time", "column": clock.name, **bounds}
    taken, exprs = {"label", "dense"}, {}
    entries = []
    for target in targets:
        entry = "label" if len(targets) == 1 else _unique_name(target.name, taken)
        source = target.name
        if target.expr:
            source = _unique_name(f"{target.name}_01", taken)
            exprs[source] = target.expr, True
        note = f"1 in {target.is_click.mean():.1%} of the rows"
        spec = {"kind": "label", **({} if source == entry else {"source": source})}
        entries.append(_corrected(Entry(entry, spec, note), given))
    columns = [column for column in columns if column.name not in {of.name for of in targets}]
    remarks = _remarks_of_times(columns, clock, split, is_asked=time is not None)
    rows = _some_rows(len(sample.table))
    clicks = [target.is_click[rows] for target in targets]
    some = {column.name: column.at(rows) for column in columns}
    meanings = {name: meaning_of(column, clicks) for name, column in some.items()}
    if sample.format is SourceFormat.criteo:
        meanings |= {c.name: (False, "") for c in columns if c.name in CRITEO_DENSE}
    table_of = _shared_tables(
        columns, [c for c in columns if meanings[c.name][0] and is_category(c)]
    )
    for column in columns:
        # A column that shares the table of ids holds ids itself.
        are_ids, why = (True, "") if column.name in table_of else meanings[column.name]
        suspicion = suspicion_of(some[column.name], are_ids, clicks)
        remarks += [f"{column.name}: {column.remark}"] if column.remark else []
        for name, keys, note, is_used in _roles(column, are_ids, why, clock, split, table_of):
            entry = _unique_name(name, taken)
            spec = {**keys, **({} if entry == column.name else {"source": column.name})}
            note = f"{note}; {suspicion}: is it known before the click?" if suspicion else note
            entries.append(_corrected(Entry(entry, spec, note, is_used), given))
        is_used = any(e.is_used and e.source == column.name for e in entries)
        if column.expr:
            exprs[_unique_name(f"{column.name}_read", taken)] = column.expr, False
        if suspicion and is_used:
            ask = "Is it known before the click? If not, remove it"
            remarks.append(f"{column.name}: {suspicion}. {ask}")
        elif column.is_unread:
            remarks.append(f"{column.name}: skipped: {column.kind}")
    entries += _further({entry.name for entry in entries}, given)
    names = {entry.source: entry.name for entry in entries if entry.is_used}
    entries = [
        replace(e, spec={**e.spec, "table": names.get(e.spec["table"], e.spec["table"])})
        if "table" in e.spec
        else e
        for e in entries
    ]
    if not any(e.is_used and e.spec.get("kind") in FEATURE_KINDS for e in entries):
        raise ValueError(
            f"path: expected a column of ids, got {[column.name for column in columns]}. "
            "Describe the log by hand, see docs/your_own_data.md."
        )
    used = {*names, *([split["column"]] if "column" in split else ())}
    times = {c.name: c.form for c in columns if c.form and c.name in used}
    labels = [target.name for target in targets]
    return Inferred(labels, entries, times, split, exprs, nulls, remarks)


def _check_header(sample: Sample, columns: list[Column]) -> None:
    """Refuse a first line of values: a header has a non-numeric name above a column of numbers.

    Columns may be named by their positions, from 0 or 1, as some programs do.
    """
    names = [column.name for column in columns if column.kind in ("integer", "number")]
    places = [[str(place + first) for place in range(len(columns))] for first in (0, 1)]
    if (
        sample.format is SourceFormat.delimited
        and names
        and not numbers_of(pl.Series(names)).is_nan().any()
        and [column.name for column in columns] not in places
    ):
        raise ValueError(
            f"path: expected the names of the columns in line 1 of {sample.files[0]}, got values: "
            f"{[column.name for column in columns]}. Put a line with names before it."
        )


def _some_rows(num_rows: int) -> Any:
    """Random rows, enough for the AUC of a column."""
    if num_rows <= _MOST_ROWS:
        return np.arange(num_rows)
    return np.sort(np.random.default_rng(0).choice(num_rows, _MOST_ROWS, replace=False))


@dataclass(frozen=True)
class Label:
    """A column that is trained for: whether each row is positive, and how it is read as 0 and 1."""

    name: str
    is_click: Bools
    expr: str = ""


def find_labels(
    columns: list[Column], asked: list[str] | None, *, is_text: bool = True
) -> list[Label]:
    """The label columns: the requested ones, else the only candidate.

    Raises:
        ValueError: If there is no candidate or several.
    """
    found = {c.name: label for c in columns if (label := _as_label(c, is_text)) is not None}
    if asked is not None:
        missing = [name for name in asked if name not in found]
        if missing or not asked:
            raise ValueError(
                f"label: expected columns of 0 and 1 (the log has {sorted(found) or 'none'}), got "
                f"{', '.join(map(repr, missing)) or 'none'}{_seen(columns, missing)}. Use some of "
                "these, or write the labels as 0 and 1 in every row."
            )
        return [found[name] for name in dict.fromkeys(asked)]
    for name in LABEL_NAMES:
        for column, label in found.items():
            if column.lower() == name:
                return [label]
    # Without a matching name a column is a label only if its values are unambiguous.
    whole = {name: label for name, label in found.items() if "IS NULL" not in label.expr}
    if len(whole) != 1:
        seen = _seen(columns, [c.name for c in columns if c.name.lower() in LABEL_NAMES])
        names = sorted(whole) or f"none among {[column.name for column in columns]}{seen}"
        advice = "Add label=<name of the column>" if whole else "Write the labels as 0 and 1"
        raise ValueError(f"label: expected one column of 0 and 1, got {names}. {advice}.")
    return list(whole.values())


def _seen(columns: list[Column], names: list[str]) -> str:
    """The most frequent values of columns that are no labels."""
    parts = []
    for column in columns:
        if column.name in names and column.kind != "list":
            counts = column.ids.value_counts(sort=True, name="n").head(4).rows()
            shown = [("no value" if of is None else repr(of), num) for of, num in counts]
            values = ", ".join(f"{of:.40} in {num:,} rows" for of, num in shown)
            parts.append(f"{column.name}: {values}")
    return f" ({'; '.join(parts)})" if parts else ""


def _as_label(column: Column, is_text: bool) -> Label | None:
    """The column as a label, if it has two values, one of them positive.

    If every value is positive, the rows without a value are the negatives.
    """
    if column.is_unread or column.kind in ("list", "vector", "time"):
        return None
    values, ids = sorted(column.items.unique()), column.ids
    name, has_missing = _quoted(column.name), column.num_missing > 0
    if not 1 <= len(values) <= 2 or (len(values) == 1) != has_missing:
        return None
    numbers = sorted(labels_of(column.items.unique()).to_list())
    if numbers == [0.0, 1.0]:
        return Label(column.name, (labels_of(ids) == 1).to_numpy())
    if sorted(numbers_of(column.items.unique())) == [-1.0, 1.0]:
        is_click = numbers_of(ids) == 1
        return Label(column.name, is_click.to_numpy(), f"(CAST({name} AS DOUBLE) + 1) / 2")
    if numbers == [1.0]:
        one = _literal(values[0]) if is_text or column.kind == "text" else values[0]
        expr = f"CASE WHEN {name} IS NULL THEN 0 WHEN {name} = {one} THEN 1 END"
        return Label(column.name, ids.is_not_null().to_numpy(), expr)
    return None


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
    steps = {name: column.numbers.diff().drop_nulls() for name, column in times.items()}
    in_order = (name for name, of in steps.items() if len(of) and (of >= 0).mean() > _IN_ORDER)
    return times.get(asked or next(in_order, next(iter(times), "")))


def _remarks_of_times(
    columns: list[Column], clock: Column | None, split: Mapping[str, Any], *, is_asked: bool
) -> list[str]:
    """Remarks about columns of times that the split does not use."""
    is_random, found = split["kind"] != "time", []
    for column in columns:
        name, num_missing, why = column.name, column.num_missing, ""
        if column is clock:
            why = "too few distinct times to split by" if is_random else ""
        elif column.kind == "time" and num_missing:
            why = f"times, but missing in {num_missing:,} rows" if is_random else ""
        elif column.kind == "time" and not is_asked:
            why = f"also times: use time={name} to split by them"
        if why:
            at_random = "; the split is at random" if is_random else ""
            found.append(f"{name}: {why}{at_random}")
    return found


def _bounds(clock: Column) -> dict[str, str] | None:
    """The starts of validation and test, rounded to days or hours if the log is long enough."""
    times = clock.numbers.sort()
    at = [
        float(times[math.ceil(f * len(times)) - 1])
        for f in (_TRAIN_FRAC, _TRAIN_FRAC + _VALID_FRAC)
    ]
    for step_ms in (_MS_PER_DAY, _MS_PER_HOUR, 1000):
        found = [math.floor(time / step_ms) * step_ms for time in at]
        is_near = at[0] - found[0] < 0.1 * (times[-1] - times[0])
        if times[0] < found[0] < found[1] <= times[-1] and is_near:
            return {"valid_from": _iso_text(found[0]), "test_from": _iso_text(found[1])}
    return None


def _iso_text(time: float) -> str:
    moment = EPOCH + timedelta(milliseconds=time)
    return moment.strftime("%Y-%m-%d" if time % _MS_PER_DAY == 0 else "%Y-%m-%dT%H:%M:%S")


# What the label says.


def _codes(column: Column, are_ids: bool) -> tuple[Any, Any]:
    """The values of the rows as numbers from 0, one for missing values; and offsets of lists."""
    if column.kind == "time":
        return column.ids.is_not_null().to_numpy().astype(np.int64), None
    if not are_ids and column.kind in ("integer", "number"):
        return codes_of_numbers(column.numbers.fill_null(math.nan).to_numpy()), None
    values = column.items.unique()
    of = dict(zip(values, range(1, len(values) + 1), strict=True))
    if column.kind != "list":
        return column.ids.replace_strict(of, default=0, return_dtype=pl.Int64).to_numpy(), None
    lists = column.ids.fill_null(pl.Series([[]], dtype=column.ids.dtype))
    lengths = lists.list.len().to_numpy()
    items = lists.filter(lists.list.len() > 0).explode()
    codes = items.replace_strict(of, default=0, return_dtype=pl.Int64).to_numpy()
    return codes, np.append(0, np.cumsum(lengths, dtype=np.int64))


def meaning_of(column: Column, clicks: list[Bools]) -> tuple[bool, str]:
    """Whether the values of a column of numbers are ids, and the evidence if it is not obvious.

    The name decides if it suggests either. Columns with few distinct values are ids. Otherwise the
    labels decide: if the values themselves predict them better than their ranges, they are ids,
    else a quantity. Without evidence they are ids, unless most of them are small and a few large.
    """
    by_name = names_ids(column.name)
    if column.kind != "integer" or column.num_values <= 2:
        return column.kind != "number", ""
    if by_name is not None:
        return by_name, "" if by_name else "by its name"
    if column.num_values <= _FEW_VALUES:
        return True, ""
    for is_click in clicks:
        as_ids, as_numbers = (
            alone_auc(*_codes(column, are)[:1], is_click) for are in (True, False)
        )
        if as_ids is None or as_numbers is None:
            continue
        num = int(is_click.sum())
        error = math.sqrt((1 / num + 1 / (is_click.size - num)) / 12)
        seen = f"alone: AUC {as_ids:.2f} as ids, {as_numbers:.2f} in order"
        if as_ids - as_numbers > max(_MORE_AS_IDS, _NUM_ERRORS * error):
            return True, seen
        if as_numbers - 0.5 > _NUM_ERRORS * error and as_ids - as_numbers < error:
            return False, seen
    values = column.numbers.drop_nulls().unique().sort()
    span, (half, most) = (
        values[-1] - values[0],
        (values.quantile(q) - values[0] for q in (0.5, 0.75)),
    )
    is_long_tailed = abs(values[0]) <= 3 and half < 0.2 * span and most < 0.5 * span
    if is_long_tailed or (values[0] < -1 and values.abs().max() < 1e6):
        return False, "by its values"
    return True, "kind: dense if they are amounts"


def suspicion_of(column: Column, are_ids: bool, clicks: list[Bools]) -> str:
    """Why a column may leak a label; empty if it does not."""
    if column.is_unread or column.kind == "vector":
        return ""
    for is_click in clicks:
        auc = alone_auc(*_codes(column, are_ids)[:1], is_click, _codes(column, are_ids)[1])
        if auc is not None and auc >= _SUSPICIOUS_AUC:
            return f"alone: AUC {auc:.2f}"
        if column.kind != "list" and (found := _pure_rows(column, is_click)):
            return f"alone: all of {found} are {int(is_click.mean() <= 0.5)}"
    return ""


def _pure_rows(column: Column, is_click: Bools) -> str:
    """Rows that are certainly of the rarer class: of a value, without one, or above the least."""
    is_rare = pl.Series("rare", is_click if is_click.mean() <= 0.5 else ~is_click)
    groups = [column.ids.is_null().replace_strict({True: "without a value", False: "with a value"})]
    if column.num_values <= _FEW_VALUES:
        groups.append("with " + column.ids.map_elements(repr, return_dtype=pl.String))
    elif column.kind in ("integer", "number"):
        least = column.numbers.min()
        of = {True: f"above {least:g}", False: f"at {least:g}"}
        groups.append((column.numbers > least).replace_strict(of))
    least_rows = max(_PURE_ROWS, _PURE_FRAC * is_rare.sum())
    for group in groups:
        found = pl.DataFrame([group.alias("where"), is_rare]).drop_nulls().group_by("where")
        for where, num, share in found.agg(pl.len(), pl.col("rare").mean()).sort("where").rows():
            if least_rows <= num < len(is_rare) and share >= _PURE_SHARE:
                return f"{num:,} rows {where}"
    return ""


# Features.


def _roles(
    column: Column,
    are_ids: bool,
    why: str,
    clock: Column | None,
    split: Mapping[str, Any],
    table_of: Mapping[str, str],
) -> Iterator[tuple[str, dict[str, Any], str, bool]]:
    """Name, keys, note and use of each entry that a column becomes."""
    name = column.name
    category: dict[str, Any] = {"kind": "categorical"}
    shared = {"table": table_of[name]} if name in table_of else {}
    between = {"separator": column.separator} if column.separator else {}
    if column.kind == "time":
        yield from _roles_of_time(column, column is clock, split)
    elif column.kind == "vector":
        keys = {**between, "width": column.width, "standardize": True}
        yield name, {"kind": "dense", **keys}, f"vectors of {column.width}", True
    elif column.is_unread:
        yield name, category, f"skipped: {column.kind}", False
    elif column.num_values < 2:
        yield name, category, f"skipped: {column.num_values or 'no'} value", False
    elif column.kind == "list":
        cut = {"max_length": _LONG_LIST} if column.ids.list.len().max() > _LONG_LIST else {}
        keys = {"kind": "categorical_list", **between, **cut, **shared}
        yield name, keys, _note(column, True, why), True
    elif not are_ids:
        yield name, {"kind": "dense", **_scaling(column)}, _note(column, False, why), True
    elif not is_category(column):
        yield name, category, "skipped: nearly all values are distinct", False
    else:
        yield name, {**category, **shared}, _note(column, True, why), True


def _roles_of_time(
    column: Column, is_clock: bool, split: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, Any], str, bool]]:
    beside, times = "" if is_clock else f"{column.name}_", column.numbers.drop_nulls()
    days = (times / _MS_PER_DAY).floor().unique().cast(pl.Int64)
    category = {"kind": "categorical"}
    if ((times / _MS_PER_HOUR).floor() % 24).n_unique() > 1:
        yield f"{beside}hour", {**category, "derive": "hour_of_day"}, "0 to 23, UTC", is_clock
    if len(days) > 1:
        # In less than two weeks a weekday is indistinguishable from its day.
        end = time_ms(split["valid_from"]) if split["kind"] == "time" else math.inf
        is_known = len(days.filter(days * _MS_PER_DAY < end)) >= 14
        note = "0 is Monday, UTC" if is_known else "skipped: training covers less than two weeks"
        keys = {**category, "derive": "day_of_week"}
        yield f"{beside}weekday", keys, note, is_clock and is_known


def _note(column: Column, are_ids: bool, why: str) -> str:
    if are_ids:
        seen = f"{column.num_values:,} values"
        if column.kind == "list":
            seen += f", {column.ids.list.len().mean():.1f} in a row"
    else:
        seen = f"{column.numbers.min():g} to {column.numbers.max():g}"
    if column.num_missing:
        seen += f", {column.num_missing / len(column.ids):.1%} missing"
    return f"{seen}; {why}" if why else seen


def _scaling(column: Column) -> dict[str, Any]:
    """Long tails are shortened; a missing number becomes the median."""
    median = float(column.numbers.quantile(0.5, "lower") or 0)
    is_long = column.numbers.min() >= 0 and column.numbers.max() > max(20.0, 10 * median)
    scaling: dict[str, Any] = {"transform": "log1p"} if is_long else {}
    if column.num_missing:
        scaling["fill"] = float(f"{median:.4g}")
    return {**scaling, "standardize": True}


def is_category(column: Column) -> bool:
    """Whether a column of ids has values that occur often enough to be learned."""
    is_ids = column.kind in ("integer", "text")
    return is_ids and 2 <= column.num_values <= 0.98 * len(column.items)


def _shared_tables(columns: list[Column], categories: list[Column]) -> dict[str, str]:
    """The column of ids whose table another one shares: by its name, or as it has all its values.

    For single integers chance is not excluded, so these need a name.
    """
    shared: dict[str, str] = {}
    values = {column.name: column.items.unique() for column in categories}
    for reader in columns:
        is_list = reader.kind == "list"
        if reader.kind not in ("list", "text", "integer") or names_ids(reader.name) is False:
            continue
        own, found = reader.items.unique(), {}
        for column in categories:
            of = values[column.name]
            if column is reader or column.name in shared or not (is_list or len(of) > len(own) > 1):
                continue
            share = reader.items.is_in(of.implode()).mean() or 0.0
            is_named = names_ids_of(reader.name, column.name, is_list=is_list)
            is_all = share >= 0.99 and len(own) >= 20
            is_all &= column.kind == "text" or (is_list and len(own) > 0.8 * len(of))
            if (is_named and share > (0.5 if is_list else 0.9)) or is_all:
                found[column.name] = own.is_in(of.implode()).sum() / len(of)
        if found:
            shared[reader.name] = max(found, key=lambda name: found[name])
    for name in shared:  # the table of a column that shares another's
        while shared[name] in shared:
            shared[name] = shared[shared[name]]
    return shared


def _corrected(entry: Entry, given: Mapping[str, Mapping[str, Any] | None]) -> Entry:
    """The entry with the keys of ``given``; with another kind it keeps none of its own."""
    keys = given.get(entry.name, {})
    if keys is None:
        return replace(entry, note="skipped: as requested", is_used=False)
    if not keys:
        return entry
    is_same = keys.get("kind", entry.spec["kind"]) == entry.spec["kind"]
    source = {} if entry.source == entry.name else {"source": entry.source}
    return Entry(entry.name, {**(entry.spec if is_same else source), **keys}, "as given")


def _further(found: set[str], given: Mapping[str, Mapping[str, Any] | None]) -> Iterator[Entry]:
    """The entries of ``given`` that were not found, which may read any column."""
    for name, keys in given.items():
        if name not in found and keys is None:
            raise ValueError(
                f"columns.{name}: expected one of {', '.join(sorted(found))} to skip, got "
                f"{name!r}. Correct the name."
            )
        if name not in found and keys is not None:
            yield Entry(name, keys, "as given")


def _unique_name(column: str, taken: set[str]) -> str:
    """A name that tables, files and modules can have."""
    first = re.sub(r"[^\w-]", "_", column)[: MAX_NAME_BYTES // 4] or "column"
    # More underscores at the end of one that begins with two would leave it reserved.
    numbered = (f"{first}_{number}" for number in count(2))
    name = next(n for n in chain([first], numbered) if n not in taken and not is_reserved(n))
    taken |= {name, f"{name}_hot"}
    return name


# The specification as YAML.

# Texts that YAML reads as another type.
_PLAIN = re.compile(r"[A-Za-z_][\w-]*", re.ASCII)
_NOT_TEXT = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}


def to_yaml(sample: Sample, found: Inferred, heading: list[str]) -> str:
    """The specification as a file of the group ``data``, with the evidence as comments."""
    lines = [f"# {line}" for line in heading]
    whole = "all" if sample.is_whole else f"about {sample.num_rows:,}, evenly spread"
    seen = f"{len(sample.table):,} rows ({whole})"
    lines += [f"# Guessed from {seen}; docs/configuration.md has every key.", "source:"]
    lines += [f"  format: {sample.format.name}", f"  files: {_flow(sample.files)}"]
    if sample.format is SourceFormat.delimited:
        lines.append(f"  separator: {json.dumps(sample.separator)}")
    if found.null_values:
        lines.append(f"  null_values: {_flow(found.null_values)}")
    if sample.num_bad:
        lines.append(f"  # on_bad_line: skip  # ignores lines such as {sample.fault}")
    if found.times:
        lines.append(f"  times: {_flow(found.times)}")
    if found.exprs:
        lines.append("  # Columns that are computed; a source, a time or a split can name them.")
        is_used = any(used for _, used in found.exprs.values())
        lines.append(f"  {'' if is_used else '# '}expr:")
        for name, (expr, used) in found.exprs.items():
            lines.append(f"    {'' if used else '# '}{_key(name)}: {_text(expr)}")
    if found.split["kind"] == "time":
        lines.append("  # About 80% of the rows train, the next 10% validate, the last 10% test.")
    lines += [f"  split: {_flow(found.split)}"]
    lines += ["  table_defaults: {min_count: 2}  # a value seen once in training shares row 0"]
    lines.append("  # Remove columns that are known only after the click.")
    lines.append("  columns:")
    for entry in found.entries:
        mark, note = "" if entry.is_used else "# ", " ".join(entry.note.split())
        lines.append(f"    {mark}{_key(entry.name)}: {_flow(entry.spec)}  # {note}")
    return "\n".join(lines) + "\n"


def _key(text: str) -> str:
    return text if _PLAIN.fullmatch(text) and text.lower() not in _NOT_TEXT else _text(text)


def _text(text: str) -> str:
    """As in JSON, but YAML knows no surrogates."""
    letters = (json.dumps(c)[1:-1] if ord(c) < 0x10000 else f"\\U{ord(c):08x}" for c in text)
    return f'"{"".join(letters)}"'


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)}: {_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_flow, value)) + "]"
    # An ISO time is text to Hydra; OmegaConf would interpolate ${.
    return _key(value).replace("${", "\\\\${") if isinstance(value, str) else json.dumps(value)
