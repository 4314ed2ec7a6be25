"""Specifications of datasets: a log to read, or a synthetic one."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from hotrec.config.fields import Rules, key, section
from hotrec.config.histories import UserHistorySpec, fill_number
from hotrec.config.names import MAX_NAME_BYTES, name_rules

SourceFormat = StrEnum("SourceFormat", "criteo delimited json parquet arrow")
# Of these formats a file is text, in which some values mean "missing".
TEXT_FORMATS = (SourceFormat.criteo, SourceFormat.delimited, SourceFormat.json)
ColumnKind = StrEnum("ColumnKind", "label weight dense categorical categorical_list sequence")
# Of these kinds are the columns that read a table.
FEATURE_KINDS = (ColumnKind.categorical, ColumnKind.categorical_list, ColumnKind.sequence)
Derive = StrEnum("Derive", "none hour_of_day day_of_week log_bucket")
DERIVED_FROM_TIMES = (Derive.hour_of_day, Derive.day_of_week)
DenseTransform = StrEnum("DenseTransform", "none log1p")
Encoding = StrEnum("Encoding", "vocabulary hashing rows")
TimeUnit = StrEnum("TimeUnit", "iso s ms us ns")
SplitKind = StrEnum("SplitKind", "fraction last time")
OnBadLine = StrEnum("OnBadLine", "error skip")

# More rows than any table that fits; sums and products of row numbers stay below 2**63.
MAX_ROWS = 2**40
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# UTC is written as Z, UTC or GMT, with or without a blank before it, which an offset may have too.
_OF_UTC = re.compile(r"[ ]?(?:UTC|GMT|[zZ])$")
_OFFSET = re.compile(r"(:.*?)[ ]([+-][0-9]{2}(?::?[0-9]{2})?)$")


def time_ms(text: str) -> float:
    """A date or time in ISO 8601 as milliseconds since 1970; UTC where it has no offset.

    UTC and GMT are other names of Z.

    Raises:
        ValueError: If it is no date or time.
    """
    moment = datetime.fromisoformat(_OFFSET.sub(r"\1\2", _OF_UTC.sub("+00:00", text.strip())))
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return (moment - EPOCH) / timedelta(milliseconds=1)


@dataclass
class ColumnSpec:
    """A column of the prepared samples."""

    kind: ColumnKind = key("the role of the column in a sample")
    source: str = key("column of the log or of a joined table; empty: this entry's own name", "")
    table: str = key("for categorical kinds, the table it reads; empty: this entry's name", "")
    derive: Derive = key(
        "how to compute the value from the source: hour_of_day and day_of_week (0 is Monday) from "
        "a time, see data.source.times; log_bucket: floor(4 * log2(1 + abs(x))) with the sign of "
        "x, for lists and sequences of each number",
        Derive.none,
    )
    utc_offset_h: float = key("for hour_of_day and day_of_week, hours to add to UTC", 0.0)
    separator: str = key(
        "for lists, sequences and vectors in text files, the character between ids or numbers; "
        "brackets around them, and blanks and quotes around each inside brackets, are ignored",
        " ",
    )
    max_length: int = key(
        "for lists and sequences, how many of the last ids to keep; 0: all, for lists only", 0, ge=0
    )
    fill: float = key("for dense, the value that replaces a missing one", 0.0)
    transform: DenseTransform = key(
        "for dense, applied after filling; log1p: sign(x) * log(1 + abs(x))", DenseTransform.none
    )
    standardize: bool = key(
        "for dense, scale by mean and standard deviation of the training split", False
    )
    width: int = key(
        "for dense, the length of a vector, whose numbers are the dense features NAME[0], "
        "NAME[1], ...; 0: one number",
        0,
        ge=0,
        le=65_536,
    )

    @property
    def is_list(self) -> bool:
        """Whether a sample has a list of ids."""
        return self.kind in (ColumnKind.categorical_list, ColumnKind.sequence)

    def rules(self) -> Rules:
        is_one = self.kind is ColumnKind.dense and self.derive is Derive.none
        yield (
            is_one or not self.width,
            f"width: expected 0 except for dense columns, got {self.width}.",
        )
        kind, derive, table, separator = self.kind, self.derive, self.table, self.separator
        is_categorical = kind in FEATURE_KINDS
        yield is_categorical or not table, f"table: expected none for this kind, got {table!r}."
        yield len(separator) == 1, f"separator: expected one character, got {separator!r}."
        of_time = derive in DERIVED_FROM_TIMES
        is_derived = kind is ColumnKind.categorical or (kind is ColumnKind.dense and of_time)
        is_possible = derive is Derive.none or is_derived or (self.is_list and not of_time)
        expected = "none or log_bucket" if self.is_list else "none"
        yield is_possible, f"derive: expected {expected} for kind {kind.name}, got {derive.name!r}."
        yield (
            kind is not ColumnKind.sequence or self.max_length > 0,
            f"max_length: expected at least 1 for kind sequence, got {self.max_length}. "
            "Set how many of the last ids to keep.",
        )


@dataclass
class TableSpec:
    """How the raw ids of one table become rows."""

    encoding: Encoding = key(
        "how raw ids become rows: vocabulary (a row per value seen min_count times in training, "
        "else row 0), hashing (1 + hash mod (num_rows - 1); missing values are row 0) or rows (the "
        "ids are row numbers, counted from 0, and none is missing)",
        Encoding.vocabulary,
    )
    min_count: int = key(
        "for vocabulary, minimum occurrences of a value in the training split to get its own row",
        1,
        ge=1,
    )
    num_rows: int = key(
        "number of rows: for hashing, with row 0 for missing values; for rows, 0 means the "
        "largest id of the log + 1; for vocabulary, the maximum, or 0 for no limit",
        0,
        le=MAX_ROWS,
    )

    def rules(self) -> Rules:
        is_sized = self.encoding is not Encoding.hashing or self.num_rows >= 2
        yield (
            is_sized,
            f"num_rows: expected >= 2 with hashing, got {self.num_rows}. "
            "Set about as many rows as there are values.",
        )
        is_count = self.encoding is Encoding.hashing or self.num_rows >= 0
        yield is_count, f"num_rows: expected >= 0 with {self.encoding}, got {self.num_rows}."


@dataclass
class JoinSpec:
    """A side table, joined to the log on a key. It is held in memory.

    A key that occurs twice is an error; a log entry without a match gets missing values.
    """

    files: list[str] = key("paths or glob patterns", size=1)
    on: str = key("key column of the log, or of a side table joined before this one")
    format: SourceFormat = key("delimited, json, parquet or arrow", SourceFormat.delimited)
    separator: str = key("separator of delimited files", "\t")
    key: str = key("key column of the side table; empty: the same name as on", "")

    def rules(self) -> Rules:
        is_table = self.format is not SourceFormat.criteo
        expected = "delimited, json, parquet or arrow"
        yield is_table, f"format: expected {expected}, got {self.format.name!r}."


@dataclass
class SplitSpec:
    """How samples are divided."""

    kind: SplitKind = key(
        "how to split: fraction (by a hash of the position: random but reproducible), last (the "
        "end of the log) or time (by the bounds of a column)",
        SplitKind.fraction,
    )
    valid_frac: float = key(
        "for fraction and last, the share of validation samples", 0.1, ge=0, lt=1
    )
    test_frac: float = key("for fraction and last, the share of test samples", 0.1, ge=0, lt=1)
    seed: int = key("for fraction, the seed of the random split", 0)
    column: str = key("for time, a column of the log with times or other numbers", "")
    utc_offset_h: float = key("for time, hours to add to UTC for the days", 0.0)
    valid_from: int | float | str = key(
        "for time, first value of the validation split: a date or time in ISO 8601, such as "
        "2024-05-01, or a number, which for times is of milliseconds since 1970",
        math.inf,
        le=math.inf,
    )
    test_from: int | float | str = key(
        "for time, first value of the test split, as valid_from", math.inf, le=math.inf
    )

    def rules(self) -> Rules:
        if self.kind is SplitKind.time:
            yield from self._bound_rules()
        else:
            total = self.valid_frac + self.test_frac
            yield (
                total < 1,
                f"valid_frac + test_frac: expected less than 1, got {total}. "
                "Leave a share for training.",
            )

    def _bound_rules(self) -> Rules:
        for name in ("valid_from", "test_from"):
            bound = getattr(self, name)
            yield (
                _is_bound(bound),
                f"{name}: expected a number or a time such as 2024-05-01T12:30:00, got {bound!r}.",
            )
        valid_from, test_from = self.bounds
        yield (
            valid_from <= test_from,
            f"test_from: expected >= valid_from, which is {self.valid_from}, got "
            f"{self.test_from}. Test samples come last.",
        )

    @property
    def time_column(self) -> str | None:
        """The log's column of times, if the split has one."""
        return self.column if self.kind is SplitKind.time else None

    @property
    def bounds(self) -> tuple[float, float]:
        """valid_from and test_from as numbers, times in milliseconds since 1970."""
        valid_from, test_from = (
            time_ms(bound) if isinstance(bound, str) else float(bound)
            for bound in (self.valid_from, self.test_from)
        )
        return valid_from, test_from


def _is_bound(bound: float | str) -> bool:
    try:
        return isinstance(bound, int | float) or time_ms(bound) is not None
    except ValueError:
        return False


@dataclass
class SourceSpec:
    """A log to read and how to prepare its columns."""

    format: SourceFormat = key(
        "how the files are stored: criteo (tab separated without a header: label, 13 integers, "
        "26 hexadecimal texts), delimited (text with a header line), json (JSON Lines: text with "
        "one object per line), parquet or arrow (IPC file or stream)"
    )
    files: list[str] = key(
        "paths, directories or glob patterns, relative to the current directory; read in this "
        "order, matches of a pattern or directory by name. Text can be compressed (.gz, .zst, "
        ".bz2). Directories named key=value are columns of the files in them",
        size=1,
    )
    columns: dict[str, ColumnSpec] = key(
        "prepared columns by name, in the order of the model's features. With format criteo empty "
        "means dense I1..I13 with log1p and features C1..C26",
        {},
    )
    tables: dict[str, TableSpec] = key("settings of tables that differ from table_defaults", {})
    table_defaults: TableSpec = section("settings of all other tables", TableSpec)
    joins: dict[str, JoinSpec] = key("side tables by name", {})
    times: dict[str, str] = key(
        "columns of times, with their format: iso (text such as 2024-05-01T12:30:00+02:00 or "
        "2024-05-01 12:30:00 UTC, UTC if it has no offset), the unit of numbers since 1970: s, "
        "ms, us or ns. Without an entry numbers are ms; typed times in Parquet and Arrow files, "
        "and those of an expr, need none",
        {},
    )
    expr: dict[str, str] = key(
        "columns computed from others of the log's files, by name: expressions of Polars SQL, such "
        "as CAST(REPLACE(price, ',', '.') AS DOUBLE) or STRPTIME(day, '%Y%m%d'). Columns of text "
        "files are texts. A source, a time, a history or the split can name them",
        {},
    )
    histories: dict[str, UserHistorySpec] = key(
        "by name, the earlier rows of the same user as lists, which columns of kind "
        "categorical_list or sequence read",
        {},
    )
    split: SplitSpec = section("how samples are divided into train, valid and test", SplitSpec)
    separator: str = key("for delimited text, the ASCII character between two columns", "\t")
    null_values: list[str] = key('strings that mean "missing", for delimited and json', [""])
    on_bad_line: OnBadLine = key(
        "what to do with a bad line or row: error (stop) or skip (and count it). It has another "
        "number of columns than the header, an open quote or a lone carriage return, invalid "
        "UTF-8, or an invalid label, number, time, vector or id",
        OnBadLine.error,
    )
    rows_per_chunk: int = key("samples per chunk, the window of the shuffle", 262_144, ge=1)
    block_mib: int = key(
        "size of the blocks in which text is read. Blocks that fit in the processor's cache are "
        "parsed twice as fast as large ones",
        8,
        ge=1,
        le=1024,
    )

    def rules(self) -> Rules:
        character, columns, tables = self.separator, columns_of(self), tables_of(self)
        is_separator = len(character) == 1 and character.isascii() and character not in '\n\r"'
        expected = "one ASCII character that is no quote and no line end"
        yield (
            is_separator,
            f"separator: expected {expected}, got {character!r}. "
            "Set the character between two columns of the files.",
        )
        labels = [name for name, column in columns.items() if column.kind is ColumnKind.label]
        yield (
            bool(labels),
            f"columns: expected at least one column of kind label, got {labels}. "
            "Give the column with the clicks kind label.",
        )
        weights = [name for name, column in columns.items() if column.kind is ColumnKind.weight]
        yield len(weights) <= 1, f"columns: expected one column of kind weight, got {weights}."
        reserved = {"label": ColumnKind.label, "dense": ColumnKind.label}
        if weights:
            reserved["weight"] = ColumnKind.weight
        expected = "at least one categorical column"
        yield (
            bool(tables),
            f"columns: expected {expected}, got {sorted(columns)}. Give an id kind categorical.",
        )
        yield from _time_rules(self.times)
        yield from _source_rules(columns, self.histories)
        yield from _history_rules(columns, self.histories)
        for name in self.tables:
            expected = f"one of the tables {sorted(tables)}"
            yield (
                name in tables,
                f"tables.{name}: expected {expected}, got {name!r}. "
                "A table is named by the columns that read it.",
            )
        for name, column in columns.items():
            yield from _column_name_rules(name, column)
            yield (
                reserved.get(name, column.kind) is column.kind,
                f"columns.{name}: expected another name: {', '.join(map(repr, reserved))} are "
                f"columns of every chunk, got {name!r}. Rename the entry and give the log's name "
                "as its source.",
            )
        for name, column in columns.items():
            parts = {*features_of(name, column), *dense_of(name, column)}
            taken = sorted(columns.keys() & parts - {name})
            yield (
                not taken,
                f"columns.{name}: expected no columns named as its positions, got {taken}. Rename "
                "the entry and give the log's name as its source.",
            )
        for name in tables:
            hot = f"{name}_hot"
            yield (
                hot not in tables,
                f"columns: expected no table {hot!r} beside table {name!r}, whose hot rows have "
                "this name, got both. Choose another name for one of them.",
            )


def _time_rules(times: dict[str, str]) -> Rules:
    for name, form in times.items():
        yield (
            form in list(TimeUnit),
            f"times.{name}: expected {', '.join(TimeUnit)}, got {form!r}. Read other forms with "
            "data.source.expr.",
        )


def _source_rules(columns: dict[str, ColumnSpec], histories: dict[str, UserHistorySpec]) -> Rules:
    """Columns that are made of one column of the log read it in one way."""
    listed = {name: of for history in histories.values() for name, of in history.columns.items()}
    readings: dict[str, tuple[str, int]] = {}
    for name, column in columns.items():
        if column.kind in FEATURE_KINDS and column.derive is Derive.none:
            continue
        source = column.source or name
        source = listed.get(source, source)
        first, width = readings.setdefault(source, (name, column.width))
        yield (
            width == column.width,
            f"columns.{name}: expected {source!r} to be read as columns.{first} reads it, got "
            "another width. Give both the same.",
        )


def _history_rules(columns: dict[str, ColumnSpec], histories: dict[str, UserHistorySpec]) -> Rules:
    """Every list of a history is read, and by all its columns as ids or by all as numbers."""
    owners: dict[str, str] = {}
    for owner, history in histories.items():
        for name in history.lists:
            yield (
                owners.setdefault(name, owner) == owner,
                f"histories.{owner}: expected other lists than in histories.{owners[name]}, got "
                f"{name!r} in both. Rename one.",
            )
            readers = {n: column for n, column in columns.items() if (column.source or n) == name}
            others = [n for n, column in readers.items() if not column.is_list]
            yield (
                bool(readers) and not others,
                f"histories.{owner}: expected columns of kind categorical_list or sequence for "
                f"list {name!r}, got {others or 'none'}. Add one, or correct the kind.",
            )
            derived = {column.derive is not Derive.none for column in readers.values()}
            expected = "log_bucket" if name == history.age else "none"
            is_free = name in history.columns and name not in history.before
            yield (
                derived == {name == history.age} or (is_free and len(derived) == 1),
                f"histories.{owner}: expected derive {expected} of {list(readers)}, which read "
                f"list {name!r}, got {[str(column.derive) for column in readers.values()]}. "
                "Correct derive.",
            )
            fill = history.fill.get(name, "0")
            yield (
                derived == {False} or math.isfinite(fill_number(fill)),
                f"histories.{owner}.fill.{name}: expected a finite number, got {fill!r}.",
            )


def is_list_of_numbers(columns: dict[str, ColumnSpec], name: str) -> bool:
    """Whether the list of a history holds numbers, because columns derive their values from it."""
    return any(
        column.derive is not Derive.none
        for entry, column in columns.items()
        if (column.source or entry) == name
    )


def _column_name_rules(name: str, column: ColumnSpec) -> Rules:
    is_feature = column.kind in FEATURE_KINDS
    # A name that is not fit for print is shown once, by its repr.
    key = f"columns.{name}" if name.isprintable() and len(name) <= MAX_NAME_BYTES else "columns"
    yield from name_rules(key, name, is_of_module=is_feature)
    if column.table:
        yield from name_rules(f"columns.{name}.table", column.table, is_of_module=True)


@dataclass
class SyntheticSpec:
    """A log drawn from known distributions."""

    num_rows: list[int] = key(
        "rows of each table t0, t1, ..., read by feature c0, c1, ...", ge=2, le=2**31, size=1
    )
    mean_lengths: list[float] = key(
        "mean number of ids per sample of each feature; one value serves all, and empty means "
        "one-hot. Exactly 1.0 is one-hot, another mean is multi-hot with Poisson lengths (0 "
        "included)",
        [],
        gt=0,
        lt=10_000,
    )
    zipf_exponent: float = key(
        "row of rank k is drawn with probability ~ k ** -exponent", 1.05, gt=0, lt=10
    )
    num_periods: int = key('number of equal periods ("days") of constant popularity', 1, ge=1)
    drift_frac: float = key(
        "fraction of the rows that swap their popularity after each period", 0.0, ge=0, le=1
    )
    rows_by_popularity: bool = key(
        "number rows by decreasing popularity, which makes row-wise shards unbalanced", False
    )
    num_dense: int = key("number of dense columns, which are standard normal", 13, ge=0)
    num_train: int = key(
        "number of samples of the training split, which come first", 1_000_000, ge=1
    )
    num_valid: int = key("number of samples of the validation split", 0, ge=0)
    num_test: int = key("number of samples of the test split", 0, ge=0)
    signal: float = key("standard deviation of the logit; 0: labels are random", 1.5, ge=0)
    seed: int = key("seed of all random numbers", 0, ge=0)
    rows_per_chunk: int = key("number of samples per chunk", 262_144, ge=1)

    def rules(self) -> Rules:
        num_lengths, num_tables = len(self.mean_lengths), len(self.num_rows)
        expected = f"none, one or {num_tables} values"
        is_fit = num_lengths in (0, 1, num_tables)
        yield (
            is_fit,
            f"mean_lengths: expected {expected}, got {num_lengths}. Give one value a table.",
        )


@dataclass
class OutlineTableSpec:
    """What is known of a table: its size and its skew."""

    num_rows: int = key("number of rows", ge=1, le=2**31)
    zipf_exponent: float = key(
        "row of rank k is read with probability ~ k ** -exponent", ge=0, lt=10
    )


@dataclass
class OutlineSpec:
    """What is known of a log before it is there: enough to plan. One id per sample and table."""

    origin: str = key("source of the figures")
    num_train: int = key("number of samples of the training split", ge=1)
    num_dense: int = key("number of dense columns", ge=0)
    tables: dict[str, OutlineTableSpec] = key("tables by name, each read by one feature", {})

    def rules(self) -> Rules:
        yield bool(self.tables), "tables: expected at least one table, got none."
        for name in self.tables:
            yield from name_rules(f"tables.{name}", name, is_of_module=True)


@dataclass
class DataSpec:
    """A dataset: a log to read or a synthetic log; neither if it was prepared elsewhere."""

    source: SourceSpec | None = key("the log to read", None)
    synthetic: SyntheticSpec | None = key("the log to generate", None)
    outline: OutlineSpec | None = key(
        "description of the data for `hotrec plan` if paths.dataset does not exist; null: none",
        None,
    )

    @property
    def is_chosen(self) -> bool:
        """Whether there is a log to prepare."""
        return self.source is not None or self.synthetic is not None

    def rules(self) -> Rules:
        given = [name for name in ("source", "synthetic") if getattr(self, name) is not None]
        yield (
            len(given) < 2,
            f": expected exactly one of source and synthetic, got {given}. "
            "Choose a dataset, e.g. data=kuairand.",
        )


CRITEO_DENSE = tuple(f"I{number}" for number in range(1, 14))
CRITEO_FEATURES = tuple(f"C{number}" for number in range(1, 27))
CRITEO_COLUMNS = ("label", *CRITEO_DENSE, *CRITEO_FEATURES)


def columns_of(spec: SourceSpec) -> dict[str, ColumnSpec]:
    """The columns to prepare: the configured ones, or Criteo's."""
    if spec.columns or spec.format is not SourceFormat.criteo:
        return spec.columns
    dense = ColumnSpec(ColumnKind.dense, transform=DenseTransform.log1p)
    return {
        "label": ColumnSpec(ColumnKind.label),
        **dict.fromkeys(CRITEO_DENSE, dense),
        **dict.fromkeys(CRITEO_FEATURES, ColumnSpec(ColumnKind.categorical)),
    }


def tables_of(spec: SourceSpec) -> dict[str, TableSpec]:
    """The tables that the categorical columns read, in order of first use."""
    columns = columns_of(spec).items()
    names = [c.table or name for name, c in columns if c.kind in FEATURE_KINDS]
    return {name: spec.tables.get(name, spec.table_defaults) for name in names}


def features_of(name: str, column: ColumnSpec) -> list[str]:
    """The features of a column that reads a table: itself, or one for each place of a sequence."""
    if column.kind is not ColumnKind.sequence:
        return [name]
    return [f"{name}_{place}" for place in range(1, column.max_length + 1)]


def dense_of(name: str, column: ColumnSpec) -> list[str]:
    """The dense features of a column of numbers: itself, or one for each number of a vector."""
    return [f"{name}[{place}]" for place in range(column.width)] or [name]
