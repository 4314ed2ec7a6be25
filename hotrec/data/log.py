"""A log as ``prepare`` sees it: files, joined side tables, where columns come from, and splits.

All names are resolved before a sample is read, so that a misspelt column is an error in the first
second and not after the first hour. A side table is kept in memory, so it must be small compared
with the log, which is streamed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from hotrec.config.data import (
    DERIVED_FROM_TIMES,
    FEATURE_KINDS,
    ColumnKind,
    ColumnSpec,
    Derive,
    SourceFormat,
    SourceSpec,
    SplitKind,
    SplitSpec,
    TimeUnit,
    columns_of,
    is_list_of_numbers,
)
from hotrec.data.chunks import offsets_of
from hotrec.data.columns import ID, LINE, NUMBER, Ids, RawBlock, whole_ids
from hotrec.data.encoding import sources_of
from hotrec.data.expr import columns_read_by
from hotrec.data.files import find_files
from hotrec.data.hashing import hash_numbers
from hotrec.data.histories import Histories
from hotrec.data.readers import (
    LogFormat,
    Wanted,
    column_names,
    count_samples,
    partition_of,
    read_blocks,
)
from hotrec.data.value_types import ValueType, ValueTypes
from hotrec.runtime.ranks import rank

_LOGGER = logging.getLogger(__name__)
_COLUMN_ADVICE = "Correct the name, or the separator of the file."
_NUM_SHOWN, _SHOWN_LENGTH = 100, 60
_LOG, _KEY = "", "key"  # the log among the names of side tables; keys to join
TRAIN, VALID, TEST = range(3)  # positions in hotrec.data.chunks.SPLITS


@dataclass(frozen=True)
class Log:
    """The input of ``prepare``: files, their requested columns, and side tables to join."""

    files: tuple[Path, ...]
    log_format: LogFormat
    wanted: Wanted
    side_tables: tuple[SideTable, ...]  # in the order of joining
    columns: dict[str, ColumnSpec]  # to prepare
    names: tuple[str, ...]  # of all columns, of side tables too
    histories: Histories | None = None

    def blocks(self, file: int) -> Iterator[RawBlock]:
        """The joined samples of one file with their histories, in blocks.

        Histories are those of the files read before; see ``Histories``.
        """
        joined = self._joined(file)
        if self.histories is None:
            return joined
        return self.histories.blocks(file, self.files[file], joined)

    def write_tails(self, file: int) -> None:
        """Write what a file leaves to the histories of the files after it."""
        assert self.histories is not None
        self.histories.write_tails(file, self.files[file], self._joined(file))

    def _joined(self, file: int) -> Iterator[RawBlock]:
        for block in read_blocks(self.files[file], self.log_format, self.wanted):
            for table in self.side_tables:
                block = join(block, table)
            yield block

    def count_samples(self, file: int) -> int:
        """Samples of a file, bad ones included."""
        return count_samples(self.files[file], self.log_format)


def open_log(
    spec: SourceSpec,
    *,
    needs_label: bool = True,
    files_key: str = "data.source.files",
    keep: tuple[str, ...] = (),
) -> Log:
    """Find the files, resolve the columns, read the side tables.

    Args:
        spec: The log.
        needs_label: Whether it must have the columns of labels and weights; otherwise all labels,
            or the weight, are omitted if the log lacks one of them.
        files_key: The key of the files, for messages.
        keep: Columns of the log's files to carry on as they are.

    Raises:
        ValueError: if a file or a column is missing.
    """
    nulls, block_bytes = tuple(spec.null_values), spec.block_mib << 20
    log_format = LogFormat(spec.format, spec.separator, nulls, spec.on_bad_line, block_bytes)
    if spec.format is SourceFormat.criteo:
        log_format = replace(log_format, separator="\t", null_values=("",))
    files = {_LOG: find_files(spec.files, spec.format, key=files_key)}
    formats = {_LOG: log_format}
    for name, side in spec.joins.items():
        key = f"data.source.joins.{name}.files"
        files[name] = find_files(side.files, side.format, key=key)
        # A side table is small and curated, so its bad lines are always errors.
        formats[name] = LogFormat(side.format, side.separator, nulls, block_bytes=block_bytes)
    names = {place: column_names(files[place][0], formats[place]) for place in files}
    known = {
        place: tuple(dict.fromkeys((*names[place], *partition_of(files[place][0]))))
        for place in files
    }
    exprs = _exprs(spec, known[_LOG], needs_label=needs_label)
    formats[_LOG] = log_format = replace(log_format, exprs=exprs)
    known[_LOG] += tuple(exprs)
    for kind in () if needs_label else (ColumnKind.label, ColumnKind.weight):
        columns = columns_of(spec)
        if not set(sources_of(columns, kind).values()) <= set(known[_LOG]):
            kept = {name: column for name, column in columns.items() if column.kind is not kind}
            spec = replace(spec, columns=kept)
    wanted = _wanted(spec, known)
    for name in keep:
        _require(name, known[_LOG], "keep")
    wanted[_LOG] = replace(wanted[_LOG], kept=keep)
    _say_what_is_not_read(files[_LOG], names[_LOG], wanted[_LOG], files_key)
    side_tables = tuple(
        read_side_table(
            name, files[name], formats[name], side.key or side.on, side.on, wanted[name]
        )
        for name, side in spec.joins.items()
    )
    histories = Histories(spec) if spec.histories else None
    columns = columns_of(spec)
    all_names = tuple(
        dict.fromkeys(chain(*known.values(), *(h.lists for h in spec.histories.values())))
    )
    return Log(
        tuple(files[_LOG]), log_format, wanted[_LOG], side_tables, columns, all_names, histories
    )


def _exprs(spec: SourceSpec, known: tuple[str, ...], *, needs_label: bool) -> dict[str, str]:
    """The computed columns; without labels also without those whose columns the log lacks."""
    found = {}
    for name, sql in spec.expr.items():
        key, columns = f"data.source.expr.{name}", columns_read_by(name, sql)
        if name in known:
            raise ValueError(f"{key}: expected a name that no column has, got {name!r}. Rename it.")
        if not needs_label and not {*columns} <= {*known}:
            continue
        for column in columns:
            _require(column, known, key)
        found[name] = sql
    return found


def _say_what_is_not_read(
    files: list[Path], names: tuple[str, ...], wanted: Wanted, files_key: str
) -> None:
    for name, value in partition_of(files[0]).items():
        if name not in names and name not in wanted.names and rank() == 0:
            _LOGGER.warning(
                "%s: path column %s (%s in the first file) is not used by any column. Set it as "
                "a source to use it.",
                *(files_key, name, value),
            )


def _wanted(spec: SourceSpec, known: dict[str, tuple[str, ...]]) -> dict[str, Wanted]:
    """What to read of the log and of each side table."""
    columns = columns_of(spec)
    listed = _names_of_lists(spec, known)
    ids: dict[str, list[str]] = {place: [] for place in known}
    numbers: dict[str, list[str]] = {place: [] for place in known}
    times: dict[str, dict[str, str]] = {place: {} for place in known}
    single: dict[str, list[str]] = {place: [] for place in known}
    lists: dict[str, list[str]] = {place: [] for place in known}
    readings: dict[str, dict[str, ColumnSpec]] = {place: {} for place in known}
    # The key of a side table duplicates the column that it is matched with.
    keys = {name: side.key or side.on for name, side in spec.joins.items()}
    offered = {
        place: tuple(name for name in names if name != keys.get(place))
        for place, names in known.items()
    }
    for name, side in spec.joins.items():
        place = _place_of(side.on, offered, f"data.source.joins.{name}.on", before=name)
        ids[place].append(side.on)
        single[place].append(side.on)
        _require(keys[name], known[name], f"data.source.joins.{name}.key")
    for name, column in columns.items():
        source, is_plain = column.source or name, column.derive is Derive.none
        if source in listed:
            continue
        place = _place_of(source, offered, f"data.source.columns.{name}.source")
        if column.kind in (ColumnKind.label, ColumnKind.weight) and place != _LOG:
            raise ValueError(
                f"data.source.columns.{name}: expected a {column.kind} in the log itself, got "
                f"column {source!r} of the joined table {place}. Join it into the files of the log."
            )
        if column.kind not in FEATURE_KINDS or not (column.is_list or is_plain):
            numbers[place].append(source)
            readings[place].setdefault(source, column)
        elif not is_plain:
            lists[place].append(source)
            readings[place].setdefault(source, column)
        else:
            ids[place].append(source)
            single[place] += [source] if column.kind is ColumnKind.categorical else []
        if column.derive in DERIVED_FROM_TIMES:
            times[place][source] = spec.times.get(source, TimeUnit.ms)
    labels, weights = (
        tuple(sources_of(columns, kind).values()) for kind in (ColumnKind.label, ColumnKind.weight)
    )
    required: list[str] = []
    for key, source, use in _history_sources(spec):
        if use in ("by", "time"):
            place = _LOG
            _require(source, known[_LOG], key)
        else:
            place = _place_of(source, offered, key)
        (ids if use in ("by", "id", "before") else numbers)[place].append(source)
        single[place] += [] if use == "before" else [source]
        if use == "time":
            times[_LOG][source] = spec.times.get(source, TimeUnit.ms)
            required.append(source)
    for name, column in columns.items():  # the form of numbers that are listed
        for history in spec.histories.values():
            listed_source = history.columns.get(column.source or name)
            for place in readings if listed_source and column.derive is not Derive.none else ():
                readings[place].setdefault(str(listed_source), column)
    if spec.split.kind is SplitKind.time:
        _require(spec.split.column, known[_LOG], "data.source.split.column")
        numbers[_LOG].append(spec.split.column)
        times[_LOG][spec.split.column] = spec.times.get(spec.split.column, TimeUnit.ms)
        required.append(spec.split.column)
    for name in spec.times:
        _require(name, tuple(dict.fromkeys(chain(*known.values()))), f"data.source.times.{name}")
    return {
        place: Wanted(
            tuple(dict.fromkeys(ids[place])),
            tuple(dict.fromkeys(numbers[place])),
            labels=labels if place == _LOG else (),
            weights=weights if place == _LOG else (),
            required=tuple(required) if place == _LOG else (),
            times=times[place],
            columns=readings[place],
            single=tuple(dict.fromkeys(single[place])),
            lists=tuple(dict.fromkeys(lists[place])),
        )
        for place in known
    }


def _names_of_lists(spec: SourceSpec, known: dict[str, tuple[str, ...]]) -> set[str]:
    """The names of the lists of histories, which are made and not read."""
    names: set[str] = set()
    for name, history in spec.histories.items():
        taken = [of for of in history.lists if any(of in columns for columns in known.values())]
        if taken:
            raise ValueError(
                f"data.source.histories.{name}: expected names of lists that are no columns of the "
                f"log or a joined table, got {taken}. Rename them."
            )
        names.update(history.lists)
    return names


def _history_sources(spec: SourceSpec) -> Iterator[tuple[str, str, str]]:
    """The columns that histories are made of: the key, the column, and what it is for."""
    columns = columns_of(spec)
    for name, history in spec.histories.items():
        key = f"data.source.histories.{name}"
        yield f"{key}.by", history.by, "by"
        yield f"{key}.time", history.time, "time"
        for of, source in history.columns.items():
            use = "number" if is_list_of_numbers(columns, of) else "id"
            yield f"{key}.columns.{of}", source, use
        yield from (
            (f"{key}.before.{of}", source, "before") for of, source in history.before.items()
        )


def _shown(names: tuple[str, ...]) -> str:
    """The names of a header for a message; a binary file may have unprintable ones."""
    shown = [name[:_SHOWN_LENGTH] for name in names[:_NUM_SHOWN]]
    num_more = len(names) - len(shown)
    return f"{shown}" + (f" and {num_more} more" if num_more else "")


def _require(column: str, known: tuple[str, ...], key: str) -> None:
    if column not in known:
        raise ValueError(
            f"{key}: expected one of the columns {_shown(known)}, got {column!r}. {_COLUMN_ADVICE}"
        )


def _place_of(
    column: str, known: dict[str, tuple[str, ...]], key: str, *, before: str | None = None
) -> str:
    """The log or the side table that has a column; the log comes first.

    Raises:
        ValueError: if none or several side tables have it.
    """
    until = list(known).index(before) if before else len(known)
    places = [place for place in list(known)[:until] if column in known[place]]
    if places and (places[0] == _LOG or len(places) == 1):
        return places[0]
    if not places:
        have = "; ".join(f"{place or 'log'}: {_shown(names)}" for place, names in known.items())
        raise ValueError(f"{key}: expected a column of {have}, got {column!r}. {_COLUMN_ADVICE}")
    raise ValueError(
        f"{key}: expected a column of one joined table, got {column!r}, which {places} have. "
        "Rename it in one of them."
    )


# Side tables.


@dataclass(frozen=True)
class SideTable:
    """A side table in memory."""

    on: str  # the key column in the log, or in a side table joined before
    key: str
    key_type: ValueType | None
    frame: pl.DataFrame  # its columns as in a block, and its keys
    texts: Mapping[str, pa.Array]
    value_types: ValueTypes

    def check_key(self, own_type: ValueType) -> None:
        """Check that the key has the type of its column in the log.

        Raises:
            ValueError: If it has another.
        """
        if self.key_type is not None:
            ValueTypes({self.key: own_type}).check(ValueTypes({self.key: self.key_type}))


def read_side_table(
    name: str, files: list[Path], log_format: LogFormat, key: str, on: str, wanted: Wanted
) -> SideTable:
    """Read the side table ``name``, whose column ``key`` is matched with ``on``.

    Raises:
        ValueError: if a key occurs twice, or as ``read_blocks``.
    """
    ids_of = tuple(dict.fromkeys((key, *wanted.ids)))
    with_key = replace(wanted, ids=ids_of, single=(*wanted.single, key))
    blocks = [block for file in files for block in read_blocks(file, log_format, with_key)]
    value_types = sum((block.value_types for block in blocks), start=ValueTypes())
    key_type = value_types.pop(key, None)
    frames = [block.frame for block in blocks]
    texts: dict[str, pa.Array] = {}
    for column in ids_of:
        of_blocks = [block.texts[column].cast(pa.large_string()) for block in blocks]
        texts[column] = pa.concat_arrays(of_blocks)
        starts = offsets_of(np.array([len(of) for of in of_blocks]))
        frames = [
            frame.with_columns(pl.col(f"{ID}{column}") + pl.lit(int(start), pl.Int32))
            for frame, start in zip(frames, starts, strict=False)
        ]
    frame = pl.concat(frames).drop(LINE)
    keys = whole_ids(Ids(texts[key], frame[f"{ID}{key}"])).values()
    frame = frame.with_columns(keys.alias(_KEY)).drop_nulls(_KEY)
    twice = frame.filter(frame[_KEY].is_duplicated())
    if len(twice):
        raise ValueError(
            f"joins.{name} ({files[0]}): expected each {key} once, got {twice[_KEY][0]!r} more "
            "than once. Remove the repeated rows."
        )
    key_type = None if key in wanted.numbers else key_type
    frame = frame if key in wanted.ids else frame.drop(f"{ID}{key}")
    return SideTable(on, key, key_type, frame, texts, value_types)


def join(block: RawBlock, table: SideTable) -> RawBlock:
    """Add the side table's columns to a block; keys without an entry get missing values.

    Raises:
        ValueError: if the keys of the two have different types.
    """
    is_number = f"{NUMBER}{table.on}" in block.frame.columns
    own_type = None if is_number else block.value_types.get(table.on)
    if own_type is not None and own_type.name != "text":  # other blocks may have other texts
        table.check_key(own_type)
    keys = whole_ids(block.ids(table.on)).values().alias(_KEY)
    frame = block.frame.with_columns(keys)
    frame = frame.join(table.frame, on=_KEY, how="left", maintain_order="left").drop(_KEY)
    value_types = ValueTypes({**table.value_types, **block.value_types})
    texts = {**table.texts, **block.texts}
    return replace(block, frame=frame, texts=texts, value_types=value_types)


# Splits.


@dataclass(frozen=True)
class Splitter:
    """Divides the samples of a log one by one, in the same way in both passes."""

    spec: SplitSpec
    num_samples: tuple[int, ...] = ()  # of each file, for ``last``
    header_lines: int = 0  # before the first sample of a file

    def split_of(self, block: RawBlock, file: int) -> npt.NDArray[np.int8]:
        """The split of each sample of a block of one file of the log, int8 (n,)."""
        spec = self.spec
        match spec.kind:
            case SplitKind.time:
                values = block.numbers(spec.column)
                valid_from, test_from = spec.bounds
            case SplitKind.fraction:
                hashes = hash_numbers(spec.seed, file, block.lines)
                values = hashes.astype(np.float64) / 2.0**64
                valid_from = 1 - spec.valid_frac - spec.test_frac
                test_from = 1 - spec.test_frac
            case SplitKind.last:
                in_file = block.lines - 1 - self.header_lines
                values = (sum(self.num_samples[:file]) + in_file).astype(np.float64)
                total = sum(self.num_samples)
                test_from = total - round(spec.test_frac * total)
                valid_from = test_from - round(spec.valid_frac * total)
        split = np.full(values.size, TRAIN, np.int8)
        split[values >= valid_from] = VALID
        split[values >= test_from] = TEST
        return split
