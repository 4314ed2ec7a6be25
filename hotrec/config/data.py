"""Specifications of datasets, as plain dataclasses.

Hydra uses them as structured configurations, so they are not ``frozen``, have no ``Literal``, and
check nothing on construction: call ``hotrec.config.check_data.check_data_spec`` on the finished
object. Enum members are lower case, because YAML shows their names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum


class SourceFormat(Enum):
    """How the log is stored."""

    criteo = "criteo"  # tab separated, no header: label, 13 integers, 26 hexadecimal strings
    delimited = "delimited"  # text with a header line
    parquet = "parquet"
    arrow = "arrow"  # Arrow IPC, file or stream format


class ColumnKind(Enum):
    """The role of a column in a sample."""

    label = "label"
    dense = "dense"
    categorical = "categorical"
    categorical_list = "categorical_list"


class Derive(Enum):
    """How a column's value is computed from its source."""

    none = "none"
    hour_of_day = "hour_of_day"  # source: Unix time in milliseconds
    day_of_week = "day_of_week"  # source: Unix time in milliseconds; 0 is Monday
    log_bucket = "log_bucket"  # source: a number; floor(4 * log2(1 + |x|)), with the sign of x


class DenseTransform(Enum):
    """Applied to a dense value after its missing values are filled."""

    none = "none"
    log1p = "log1p"  # sign(x) * log(1 + |x|), so that the negative counts of Criteo have a value


class Encoding(Enum):
    """How raw ids become rows."""

    vocabulary = "vocabulary"  # a row per value seen min_count times in training; the rest row 0
    hashing = "hashing"  # 1 + hash(value) mod (num_rows - 1); missing values are row 0


class SplitKind(Enum):
    """How samples are divided into train, valid and test."""

    fraction = "fraction"  # by a hash of the sample's position: at random, always the same
    last = "last"  # the last samples in file order, for logs in order of time without a time column
    time = "time"  # by the bounds of a numeric column


class OnBadLine(Enum):
    """What to do with a sample that cannot be read."""

    error = "error"
    skip = "skip"


@dataclass
class ColumnSpec:
    """A column of the prepared samples.

    Args:
        kind: The role of the column in a sample.
        source: The column of the log or of a joined table; empty means this entry's own name.
        table: For categorical kinds the table it reads; empty means a table of this entry's name.
        derive: How to compute the value from the source.
        utc_offset_h: For ``hour_of_day`` and ``day_of_week``, hours to add to UTC.
        separator: For ``categorical_list`` in text files, the character between two ids.
        max_length: For ``categorical_list``, the number of ids to keep, the last ones; 0 for all.
        fill: For dense, the value that replaces a missing one.
        transform: For dense, applied after filling.
        standardize: For dense, whether to subtract the mean and divide by the standard deviation
            of the transformed column in the training split.
    """

    kind: ColumnKind
    source: str = ""
    table: str = ""
    derive: Derive = Derive.none
    utc_offset_h: float = 0.0
    separator: str = " "
    max_length: int = 0
    fill: float = 0.0
    transform: DenseTransform = DenseTransform.none
    standardize: bool = False


@dataclass
class TableSpec:
    """How the raw ids of one table become rows.

    Args:
        encoding: How raw ids become rows: vocabulary or hashing.
        min_count: Vocabulary: the smallest number of occurrences in the training split of a value
            with a row of its own.
        num_rows: Hashing: the number of rows, including row 0 for missing values.
    """

    encoding: Encoding = Encoding.vocabulary
    min_count: int = 1
    num_rows: int = 0


@dataclass
class JoinSpec:
    """A side table, joined to the log on a key. It is held in memory.

    Args:
        files: Paths or glob patterns.
        on: The key column of the log, or of a side table joined before this one.
        key: The key column of the side table; empty means the same name as ``on``. A key that
            occurs twice is an error; a log entry without a match gets missing values.
        format: delimited, parquet or arrow.
        separator: The separator of delimited files.
    """

    files: list[str]
    on: str
    key: str = ""
    format: SourceFormat = SourceFormat.delimited
    separator: str = "\t"


@dataclass
class SplitSpec:
    """How samples are divided.

    Args:
        kind: How to split: fraction (at random), last (the end of the log) or time (by a column).
        valid_frac: ``fraction`` and ``last``: the fraction of the samples for validation.
        test_frac: ``fraction`` and ``last``: the fraction of the samples for the test.
        seed: ``fraction``: the seed of the random split.
        column: ``time``: a numeric column of the log.
        valid_from: ``time``: the first value of the validation split.
        test_from: ``time``: the first value of the test split; infinity for none.
    """

    kind: SplitKind = SplitKind.fraction
    valid_frac: float = 0.1
    test_frac: float = 0.1
    seed: int = 0
    column: str = ""
    valid_from: float = math.inf
    test_from: float = math.inf


@dataclass
class SourceSpec:
    """A log to read and how to prepare its columns.

    Args:
        format: How the files are stored.
        files: Paths, directories or glob patterns, relative to the current directory; read in
            this order, matches of a pattern or directory in order of name. Text may be
            compressed (.gz, .zst, .bz2).
        columns: The prepared columns by name; their order is the order of the model's features.
            With format criteo it may be empty: dense ``I1..I13`` with log1p, features ``C1..C26``.
        tables: Settings of tables by name, where they differ from ``table_defaults``.
        table_defaults: Settings of all other tables.
        joins: Side tables by name.
        split: How samples are divided into train, valid and test.
        separator: Delimited text: the ASCII character between two columns.
        null_values: Texts that mean "missing".
        on_bad_line: Whether to stop at a line that cannot be read, or to leave it out and count it.
        rows_per_chunk: Samples per chunk, the window within which training shuffles rows.
        block_mib: Size of the blocks in which text is read. Blocks that fit in the processor's
            cache are parsed twice as fast as large ones.
    """

    format: SourceFormat
    files: list[str]
    columns: dict[str, ColumnSpec] = field(default_factory=dict)
    tables: dict[str, TableSpec] = field(default_factory=dict)
    table_defaults: TableSpec = field(default_factory=TableSpec)
    joins: dict[str, JoinSpec] = field(default_factory=dict)
    split: SplitSpec = field(default_factory=SplitSpec)
    separator: str = "\t"
    null_values: list[str] = field(default_factory=lambda: [""])
    on_bad_line: OnBadLine = OnBadLine.error
    rows_per_chunk: int = 262_144
    block_mib: int = 8


@dataclass
class SyntheticSpec:
    """A log drawn from known distributions.

    Args:
        num_rows: Number of rows of each table ``t0, t1, ...``; feature ``c0, c1, ...`` reads it.
        mean_lengths: Mean number of ids per sample of each feature; one value serves all,
            and empty means one-hot. Exactly 1.0 is one-hot, another mean is multi-hot with Poisson
            lengths (0 included).
        zipf_exponent: The row of popularity rank k is drawn with probability ~ k ** -exponent.
        num_periods: The number of equal periods ("days") of constant popularity.
        drift_frac: The fraction of the popularity ranks that get another row when a period ends.
        rows_by_popularity: Whether to number the rows by falling popularity instead of at random,
            which makes row-wise shards unbalanced.
        num_dense: Number of dense columns, which are standard normal.
        num_train: Number of samples of the training split, followed by ``valid`` and ``test``.
        num_valid: Number of samples of the validation split.
        num_test: Number of samples of the test split.
        click_rate: Approximate mean of the labels.
        signal: Standard deviation of the logit; 0 makes labels that cannot be learned.
        seed: Seed of all random numbers.
        rows_per_chunk: Number of samples per chunk.
        num_hot_recorded: Number of most popular rows per table and period that the dataset records.
    """

    num_rows: list[int]
    mean_lengths: list[float] = field(default_factory=list)
    zipf_exponent: float = 1.05
    num_periods: int = 1
    drift_frac: float = 0.0
    rows_by_popularity: bool = False
    num_dense: int = 13
    num_train: int = 1_000_000
    num_valid: int = 0
    num_test: int = 0
    click_rate: float = 0.25
    signal: float = 1.5
    seed: int = 0
    rows_per_chunk: int = 262_144
    num_hot_recorded: int = 10_000


@dataclass
class DataSpec:
    """A dataset: exactly one of a log to read and a synthetic log."""

    source: SourceSpec | None = None
    synthetic: SyntheticSpec | None = None


CRITEO_DENSE = tuple(f"I{number}" for number in range(1, 14))
CRITEO_FEATURES = tuple(f"C{number}" for number in range(1, 27))
CRITEO_COLUMNS = ("label", *CRITEO_DENSE, *CRITEO_FEATURES)


def criteo_columns() -> dict[str, ColumnSpec]:
    """The default columns of a Criteo log."""
    columns = {"label": ColumnSpec(ColumnKind.label)}
    for name in CRITEO_DENSE:
        columns[name] = ColumnSpec(ColumnKind.dense, transform=DenseTransform.log1p)
    for name in CRITEO_FEATURES:
        columns[name] = ColumnSpec(ColumnKind.categorical)
    return columns


def columns_of(spec: SourceSpec) -> dict[str, ColumnSpec]:
    """The columns to prepare: those given, or Criteo's own."""
    if spec.format is SourceFormat.criteo and not spec.columns:
        return criteo_columns()
    return spec.columns


def table_of(name: str, column: ColumnSpec) -> str:
    """The table that the categorical column ``name`` reads."""
    return column.table or name


def tables_of(spec: SourceSpec) -> dict[str, TableSpec]:
    """The tables that the categorical columns read, in order of first use."""
    tables = {}
    for name, column in columns_of(spec).items():
        if column.kind in (ColumnKind.categorical, ColumnKind.categorical_list):
            table = table_of(name, column)
            tables[table] = spec.tables.get(table, spec.table_defaults)
    return tables
