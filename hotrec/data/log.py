"""A log as ``prepare`` sees it: files, joined side tables, where columns come from, and splits.

All names are resolved before a sample is read, so that a misspelt column is an error in the first
second and not after the first hour. A side table is held in memory as a whole, so it must be small
beside the log, which streams.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hotrec.config.data import (
    ColumnKind,
    ColumnSpec,
    JoinSpec,
    SourceFormat,
    SourceSpec,
    SplitKind,
    SplitSpec,
    columns_of,
)
from hotrec.data.columns import Codes, Lists, Numbers, RawBlock, RawColumn, Texts
from hotrec.data.encode import label_source, needs_numbers
from hotrec.data.hashing import HashIndex, hash_numbers, hash_text
from hotrec.data.readers import (
    LogFormat,
    Wanted,
    column_names,
    count_samples,
    find_files,
    numbers_of,
    read_blocks,
)
from hotrec.types import Rows

_LOG = ""  # the log itself, among the names of side tables
TRAIN, VALID, TEST = range(3)  # positions in hotrec.data.chunks.SPLITS


@dataclass(frozen=True)
class Log:
    """What ``prepare`` reads.

    Args:
        files: The files of the log, in order.
        log_format: How the files are stored.
        wanted: The columns of the log that are needed.
        side_tables: The side tables, in the order of joining.
        columns: The specified columns to prepare.
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


def open_log(spec: SourceSpec) -> Log:
    """Find the files, resolve the columns, read the side tables.

    Raises:
        ValueError: if a file or a column is not there.
    """
    is_criteo = spec.format is SourceFormat.criteo
    log_format = LogFormat(
        spec.format,
        "\t" if is_criteo else spec.separator,
        ("",) if is_criteo else tuple(spec.null_values),
        spec.on_bad_line,
        spec.block_mib << 20,
    )
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
    # A side table is small and curated, so its bad lines are always errors.
    return LogFormat(
        side.format, side.separator, tuple(spec.null_values), block_bytes=spec.block_mib << 20
    )


def _wanted(spec: SourceSpec, known: dict[str, tuple[str, ...]]) -> dict[str, Wanted]:
    """What to read of the log and of each side table."""
    columns = columns_of(spec)
    texts: dict[str, list[str]] = {place: [] for place in known}
    numbers: dict[str, list[str]] = {place: [] for place in known}
    # The key of a side table repeats the column that it is matched with.
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
            texts=tuple(dict.fromkeys(texts[place])),
            numbers=tuple(dict.fromkeys(numbers[place])),
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


# Side tables.


@dataclass(frozen=True)
class SideTable:
    """A side table in memory.

    Args:
        on: The column of the log, or of a side table joined before, that holds the key.
        index: Finds the position of a key in ``order``.
        order: int64, the row of each key of the index.
        columns: All rows of each column, by name.
    """

    on: str
    index: HashIndex
    order: Rows
    columns: Mapping[str, RawColumn]


def read_side_table(
    name: str, files: list[Path], log_format: LogFormat, key: str, on: str, wanted: Wanted
) -> SideTable:
    """Read a side table.

    Args:
        name: The table's name in the specification, for messages.
        files: The files of the table.
        log_format: How the files are stored.
        key: The column of the table that holds the key.
        on: The column of the log that the key is matched with.
        wanted: The columns to read, without the key.

    Raises:
        ValueError: if a key occurs twice, or as ``read_blocks``.
    """
    texts = tuple(dict.fromkeys((key, *wanted.texts)))
    wanted = Wanted(texts=texts, numbers=wanted.numbers)
    blocks = [block for file in files for block in read_blocks(file, log_format, wanted)]
    columns = {
        column: _concatenated([block.columns[column] for block in blocks])
        for column in blocks[0].columns
    }
    keys = columns[key]
    if not isinstance(keys, Texts):
        raise ValueError(f"joins.{name} column {key}: expected a key, got a column of lists.")
    present = np.nonzero(keys.codes >= 0)[0]
    hashes = hash_text(keys.values)[keys.codes[present]]
    order = np.argsort(hashes, kind="stable")
    hashes = hashes[order]
    if (hashes[1:] == hashes[:-1]).any():
        twice = order[int(np.argmax(hashes[1:] == hashes[:-1]))]
        value = keys.values[int(keys.codes[present[twice]])].as_py()
        raise ValueError(
            f"joins.{name} ({files[0]}): expected each {key} once, got {value!r} more than once. "
            "Remove the repeated rows."
        )
    return SideTable(on, HashIndex(hashes), present[order], columns)


def _concatenated(parts: list[RawColumn]) -> RawColumn:
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], Numbers):
        return Numbers(np.concatenate([p.values for p in parts if isinstance(p, Numbers)]))
    if isinstance(parts[0], Texts):
        return _concatenated_texts([part for part in parts if isinstance(part, Texts)])
    lists = [part for part in parts if isinstance(part, Lists)]
    items = _concatenated_texts([part.items for part in lists])
    ends = np.cumsum([0, *(int(part.offsets[-1]) for part in lists)])
    offsets = [part.offsets[:-1] + end for part, end in zip(lists, ends[:-1], strict=True)]
    codes = _shifted([part.codes for part in lists], [part.offsets.size - 1 for part in lists])
    return Lists(items, np.concatenate([*offsets, ends[-1:]]), codes)


def _concatenated_texts(parts: list[Texts]) -> Texts:
    # The values may repeat from part to part; nothing needs them to be different.
    values = pa.concat_arrays([part.values for part in parts])
    return Texts(values, _shifted([part.codes for part in parts], [len(p.values) for p in parts]))


def _shifted(codes: list[Codes], sizes: list[int]) -> Rows:
    starts = np.cumsum([0, *sizes[:-1]])
    return np.concatenate(
        [np.where(part < 0, -1, part + start) for part, start in zip(codes, starts, strict=True)]
    )


def join(block: RawBlock, table: SideTable) -> RawBlock:
    """Add the side table's columns to a block; keys without an entry get missing values.

    Where the block has a column of the same name, it keeps its own.
    """
    key = block.columns[table.on]
    assert isinstance(key, Texts), f"join on {table.on}: expected keys as text"
    found = table.index.positions(hash_text(key.values))
    # A null among the values has a hash too, which must not match.
    found = np.where(key.values.is_null().to_numpy(zero_copy_only=False), -1, found)
    side_rows = np.append(np.where(found < 0, -1, np.append(table.order, -1)[found]), -1)
    rows = side_rows[key.codes]
    columns = dict(block.columns)
    for name, column in table.columns.items():
        if name not in columns:
            columns[name] = _taken(column, rows)
    return RawBlock(block.numbers, columns, block.num_skipped)


def _taken(column: RawColumn, rows: Rows) -> RawColumn:
    if isinstance(column, Numbers):
        return Numbers(np.append(column.values, np.nan)[rows])
    codes = np.append(column.codes, -1)[rows]
    # Only the values this block uses, or each block would look up the whole side table.
    used, codes = np.unique(codes, return_inverse=True)
    if used.size and used[0] < 0:
        used, codes = used[1:], codes - 1
    if isinstance(column, Texts):
        return Texts(column.values.take(pa.array(used)), codes)
    from_offsets, until = column.offsets[used], column.offsets[used + 1]
    lengths = until - from_offsets
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    positions = np.arange(offsets[-1]) + np.repeat(from_offsets - offsets[:-1], lengths)
    return Lists(Texts(column.items.values, column.items.codes[positions]), offsets, codes)


# Splits.


@dataclass(frozen=True)
class Splitter:
    """Divides the samples of a log one by one, in the same way in both passes.

    Args:
        spec: How to divide them.
        num_samples: For ``last``, the number of samples of each file.
        header_lines: The number of lines before the first sample of a file.
    """

    spec: SplitSpec
    num_samples: tuple[int, ...] = ()
    header_lines: int = 0

    def split_of(self, block: RawBlock, file: int) -> npt.NDArray[np.int8]:
        """The split of each sample of a block, int8 (n,).

        Args:
            block: Samples of one file.
            file: The position of that file in the log.
        """
        spec = self.spec
        valid_from, test_from = spec.valid_from, spec.test_from
        match spec.kind:
            case SplitKind.time:
                values = numbers_of(block, spec.column).values
            case SplitKind.fraction:
                hashes = hash_numbers(spec.seed, file, block.numbers)
                values = hashes.astype(np.float64) / 2.0**64
                valid_from = 1 - spec.valid_frac - spec.test_frac
                test_from = 1 - spec.test_frac
            case SplitKind.last:
                in_file = block.numbers - 1 - self.header_lines
                values = (sum(self.num_samples[:file]) + in_file).astype(np.float64)
                total = sum(self.num_samples)
                test_from = total - round(spec.test_frac * total)
                valid_from = test_from - round(spec.valid_frac * total)
        split = np.full(values.size, TRAIN, np.int8)
        split[values >= valid_from] = VALID
        split[values >= test_from] = TEST
        return split
