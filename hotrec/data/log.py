"""A log as ``prepare`` sees it: its files, its side tables, and which column comes from where.

All names are resolved before a sample is read, so that a misspelt column is an error in the first
second and not after the first hour.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hotrec.config.data import (
    ColumnKind,
    ColumnSpec,
    JoinSpec,
    SourceFormat,
    SourceSpec,
    SplitKind,
    columns_of,
)
from hotrec.data.columns import RawBlock
from hotrec.data.encode import feature_columns, label_source, needs_numbers
from hotrec.data.joins import SideTable, join, read_side_table
from hotrec.data.readers import (
    LogFormat,
    Wanted,
    column_names,
    count_samples,
    find_files,
    read_blocks,
)
from hotrec.data.splits import Splitter

_LOG = ""  # the log itself, among the names of side tables


@dataclass(frozen=True)
class Log:
    """What ``prepare`` reads.

    Args:
        files: the files of the log, in order.
        log_format: how they are stored.
        wanted: the columns of the log that are needed.
        side_tables: in the order of joining.
        columns: the columns to prepare.
    """

    files: tuple[Path, ...]
    log_format: LogFormat
    wanted: Wanted
    side_tables: tuple[SideTable, ...]
    columns: dict[str, ColumnSpec]

    def blocks(self, file: int) -> Iterator[RawBlock]:
        """The joined samples of one file, in blocks."""
        for block in read_blocks(self.files[file], self.log_format, self.wanted):
            for table in self.side_tables:
                block = join(block, table)
            yield block

    def count_samples(self, file: int) -> int:
        """Samples of a file, bad ones included."""
        return count_samples(self.files[file], self.log_format)


def _unique(names: list[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def open_log(spec: SourceSpec) -> Log:
    """Find the files, resolve the columns, read the side tables.

    Raises:
        ValueError: if a file or a column is not there.
    """
    log_format = LogFormat(
        spec.format, spec.separator, tuple(spec.null_values), spec.on_bad_line, spec.block_mib << 20
    )
    if spec.format is SourceFormat.criteo:
        log_format = LogFormat(spec.format, "\t", ("",), spec.on_bad_line, spec.block_mib << 20)
    files = tuple(find_files(spec.files, spec.format, key="data.source.files"))
    side_files = {
        name: find_files(side.files, side.format, key=f"data.source.joins.{name}.files")
        for name, side in spec.joins.items()
    }
    known = {_LOG: column_names(files[0], log_format)}
    for name, side in spec.joins.items():
        known[name] = column_names(side_files[name][0], _side_format(spec, side))
    wanted = _wanted(spec, known)
    side_tables = tuple(
        read_side_table(
            name,
            side_files[name],
            _side_format(spec, side),
            key=_key(side),
            on=side.on,
            wanted=wanted[name],
        )
        for name, side in spec.joins.items()
    )
    return Log(files, log_format, wanted[_LOG], side_tables, columns_of(spec))


def _key(side: JoinSpec) -> str:
    return side.key or side.on


def _side_format(spec: SourceSpec, side: JoinSpec) -> LogFormat:
    # A side table is small and made with care: its bad lines are always errors.
    return LogFormat(
        side.format, side.separator, tuple(spec.null_values), block_bytes=spec.block_mib << 20
    )


def _wanted(spec: SourceSpec, known: dict[str, tuple[str, ...]]) -> dict[str, Wanted]:
    """What to read of the log and of each side table."""
    columns = columns_of(spec)
    texts: dict[str, list[str]] = {place: [] for place in known}
    numbers: dict[str, list[str]] = {place: [] for place in known}
    # A side table's key says nothing that the column it is matched with does not say.
    offered = {
        place: tuple(name for name in names if place == _LOG or name != _key(spec.joins[place]))
        for place, names in known.items()
    }
    for name, side in spec.joins.items():
        place = _place_of(side.on, offered, f"data.source.joins.{name}.on", before=name)
        texts[place].append(side.on)
        if _key(side) not in known[name]:
            raise ValueError(
                f"data.source.joins.{name}.key: expected one of the columns {list(known[name])}, "
                f"got {_key(side)!r}."
            )
    for name, column in columns.items():
        source = column.source or name
        place = _place_of(source, offered, f"data.source.columns.{name}.source")
        if column.kind is ColumnKind.label and place != _LOG:
            raise ValueError(
                f"data.source.columns.{name}: expected a label in the log itself, got column "
                f"{source!r} of the joined table {place}."
            )
        (numbers if needs_numbers(column) else texts)[place].append(source)
    required: tuple[str, ...] = ()
    if spec.split.kind is SplitKind.time:
        if spec.split.column not in known[_LOG]:
            raise ValueError(
                f"data.source.split.column: expected one of the columns {list(known[_LOG])}, "
                f"got {spec.split.column!r}."
            )
        numbers[_LOG].append(spec.split.column)
        required = (spec.split.column,)
    return {
        place: Wanted(
            texts=_unique(texts[place]),
            numbers=_unique(numbers[place]),
            label=label_source(columns) if place == _LOG else None,
            required=required if place == _LOG else (),
        )
        for place in known
    }


def _place_of(
    column: str, known: dict[str, tuple[str, ...]], key: str, *, before: str | None = None
) -> str:
    """The log or the side table that has a column; the log comes first.

    Raises:
        ValueError: if none has it, or several side tables do.
    """
    places = []
    for place, names in known.items():
        if place == before:
            break
        if column in names:
            places.append(place)
    if places and (places[0] == _LOG or len(places) == 1):
        return places[0]
    have = {place or "log": list(names) for place, names in known.items()}
    if not places:
        raise ValueError(f"{key}: expected a column of {have}, got {column!r}.")
    raise ValueError(
        f"{key}: expected a column of one joined table, got {column!r}, which {places} have. "
        "Rename it in one of them."
    )


def make_splitter(spec: SourceSpec, log: Log, num_samples: list[int]) -> Splitter:
    """How to divide the samples.

    Args:
        spec: the specification.
        log: the opened log.
        num_samples: samples per file; only ``last`` needs them.
    """
    header_lines = 1 if spec.format is SourceFormat.delimited else 0
    first = tuple(sum(num_samples[:file]) for file in range(len(num_samples)))
    return Splitter(spec.split, first, sum(num_samples), header_lines)


def feature_tables(columns: dict[str, ColumnSpec]) -> dict[str, str]:
    """The table that each feature reads, by feature."""
    return {name: column.table or name for name, column in feature_columns(columns).items()}
