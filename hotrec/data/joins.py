"""Side tables: columns that a log gains by a key, e.g. user and video features.

A side table is held in memory whole, so it must be small beside the log; the log still streams.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from hotrec.data.columns import Codes, Lists, Numbers, RawBlock, RawColumn, Texts
from hotrec.data.hashing import HashIndex, hash_text
from hotrec.data.readers import LogFormat, Wanted, read_blocks
from hotrec.types import Rows


@dataclass(frozen=True)
class SideTable:
    """A side table in memory.

    Args:
        name: its name in the specification.
        on: the column of the log (or of a side table joined before) that holds the key.
        index: finds a key's entry in ``order``.
        order: int64, the row of each key of the index.
        columns: by name, each with all rows of the table.
    """

    name: str
    on: str
    index: HashIndex
    order: Rows
    columns: Mapping[str, RawColumn]


def read_side_table(
    name: str, files: list[Path], log_format: LogFormat, key: str, on: str, wanted: Wanted
) -> SideTable:
    """Read a side table.

    Args:
        name: its name in the specification.
        files: its files.
        log_format: how they are stored.
        key: the column that holds the key.
        on: the column of the log that it is matched with.
        wanted: the columns to read, without the key.

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
    return SideTable(name, on, HashIndex(hashes), present[order], columns)


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
    """The block with the side table's columns; missing values where a key has no entry.

    A name that the block has already keeps the block's column.
    """
    key = block.columns[table.on]
    assert isinstance(key, Texts), f"join on {table.on}: keys were asked for as text"
    found = table.index.positions(hash_text(key.values))
    # A null among the values hashes to something: it must not match.
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
