"""From texts to rows: counts merged over blocks and ranks, vocabularies, hashing, row numbers.

Counts are arrays (24 bytes and the text per distinct value), not Python objects. Rows are numbered
by the hash of the value, not by frequency: a row-wise shard is a range of rows, and with popular
values first one rank would serve nearly all lookups. The same order makes the vocabulary its index.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hotrec.data.chunks import one_array, write_arrow
from hotrec.data.hashing import Hashes, find_sorted, hash_text
from hotrec.types import Rows

# Merging only pays if enough values are pending.
_MIN_PENDING = 2_000_000

# Digits enough for hotrec.config.data.MAX_ROWS.
_ROW_NUMBER = "^[0-9]{1,13}$"
_COUNTS_SCHEMA = pa.schema([("value", pa.large_string()), ("count", pa.int64())])


@dataclass(frozen=True)
class Counted:
    """Values with their counts."""

    hashes: Hashes  # uint64 (n,)
    values: pa.Array  # large_string
    counts: Rows  # int64 (n,)

    @staticmethod
    def of(values: pa.Array, counts: Rows) -> Counted:
        """Values with their counts; values may repeat, but may not be null."""
        return Counted(hash_text(values), values.cast(pa.large_string()), counts)

    @staticmethod
    def from_table(table: pa.Table) -> Counted:
        return Counted.of(one_array(table["value"]), table["count"].to_numpy())

    def select(self, is_kept: npt.NDArray[np.bool_]) -> Counted:
        """Some of the values."""
        kept = self.values.filter(pa.array(is_kept))
        return Counted(self.hashes[is_kept], kept, self.counts[is_kept])

    def to_table(self) -> pa.Table:
        return pa.table([self.values, pa.array(self.counts)], _COUNTS_SCHEMA)


def _merged(parts: list[Counted]) -> Counted:
    """Every hash once, increasing, with the sum of its counts and one of its values."""
    hashes = np.concatenate([part.hashes for part in parts])
    order = np.argsort(hashes, kind="stable")
    hashes = hashes[order]
    starts = np.nonzero(np.concatenate([[True], hashes[1:] != hashes[:-1]])[: hashes.size])[0]
    counts = np.concatenate([part.counts for part in parts])[order]
    values = pa.concat_arrays([part.values for part in parts]).take(pa.array(order[starts]))
    totals = np.add.reduceat(counts, starts) if starts.size else counts
    return Counted(hashes[starts], values, totals)


class ValueCounter:
    """Counts the values of one table; amortised O(log) per value added, memory O(values).

    Values are distinguished by their hash, as in a vocabulary.
    """

    def __init__(self) -> None:
        self._merged = Counted.of(pa.array([], pa.large_string()), np.empty(0, np.int64))
        self._pending: list[Counted] = []
        self._num_pending = 0

    def add(self, part: Counted) -> None:
        """Add counts."""
        self._pending.append(part)
        self._num_pending += part.counts.size
        # Geometric: each value takes part in O(log) merges.
        if self._num_pending > max(_MIN_PENDING, self._merged.counts.size):
            self._merge()

    def counts(self) -> Counted:
        """Each value once, by increasing hash."""
        self._merge()
        return self._merged

    def _merge(self) -> None:
        if self._pending:
            self._merged = _merged([self._merged, *self._pending])
        self._pending = []
        self._num_pending = 0


@dataclass(frozen=True)
class Vocabulary:
    """The values with their own row: ``table`` row r has the value of embedding row r + 1.

    Args:
        table: Columns value and count. In a dataset that has grown also ``since`` and
            ``last_seen``, int32: the generations in which the value got its row, and in which it
            last occurred in the training split.
        rare: Values that have no row yet, with their counts.
    """

    table: pa.Table
    rare: pa.Table

    @property
    def num_rows(self) -> int:
        """Rows of the embedding table, row 0 included."""
        return int(self.table.num_rows) + 1

    def generations(self, column: str) -> npt.NDArray[np.int32]:
        """``since`` or ``last_seen`` of each value, int32."""
        if column not in self.table.column_names:  # before its first extension
            return np.zeros(self.table.num_rows, np.int32)
        return np.asarray(self.table[column].to_numpy(), np.int32)


EMPTY = Vocabulary(_COUNTS_SCHEMA.empty_table(), _COUNTS_SCHEMA.empty_table())


def build_vocabulary(
    counted: Counted,
    min_count: int,
    max_rows: int = 0,
    *,
    earlier: Vocabulary = EMPTY,
    generation: int = 0,
) -> Vocabulary:
    """Assign rows to the values that occur ``min_count`` times, by increasing hash, from row 1.

    Two values with the same hash share a row. If a vocabulary grows, its values keep their rows,
    followed by new ones: values that occur in this generation, ``min_count`` times in all. If that
    exceeds ``max_rows``, the most frequent of these over all generations take the rows of the
    values that have been absent for the most generations (the least frequent first). Values without
    a row, or that lost it, are kept as rare with their count; they only get a row when they occur
    again, since a row that no sample reads is not trained.

    Args:
        counted: Counts of new training samples.
        min_count: Least occurrences, over all generations.
        max_rows: Largest number of rows of the embedding table; 0 for no limit.
        earlier: The vocabulary to extend.
        generation: The number of the generation that it becomes.
    """
    old = Counted.from_table(earlier.table)
    counts, values = old.counts.copy(), old.values
    since, last_seen = (earlier.generations(name).copy() for name in ("since", "last_seen"))
    rows = _find(old.hashes, counted.hashes)
    is_old = rows >= 0
    counts[rows[is_old]] += counted.counts[is_old]
    last_seen[rows[is_old]] = generation
    present = counted.select(~is_old)
    new = _merged([present, Counted.from_table(earlier.rare)])
    ranked = np.argsort(-new.counts, kind="stable")
    is_due = (new.counts >= min_count) & (find_sorted(present.hashes, new.hashes) >= 0)
    ranked = ranked[is_due[ranked]]
    room = max_rows - 1 - counts.size if max_rows else ranked.size
    idle = np.flatnonzero(last_seen < generation)
    idle = idle[np.lexsort((counts[idle], last_seen[idle]))]
    # In order of hash again, since rows must not follow popularity.
    chosen = np.sort(ranked[: max(room, 0) + idle.size])
    evicted = np.sort(idle[: max(chosen.size - max(room, 0), 0)])
    added = np.arange(counts.size, counts.size + chosen.size - evicted.size)
    order = np.arange(counts.size + added.size)
    order[np.concatenate([evicted, added])] = counts.size + np.arange(chosen.size)
    lost = Counted(old.hashes[evicted], values.take(pa.array(evicted)), counts[evicted])
    columns = {
        "value": pa.concat_arrays([values, new.values.take(pa.array(chosen))]).take(order),
        "count": np.concatenate([counts, new.counts[chosen]])[order],
    }
    if generation:
        fresh = np.full(chosen.size, generation, np.int32)
        columns["since"] = np.concatenate([since, fresh])[order]
        columns["last_seen"] = np.concatenate([last_seen, fresh])[order]
    is_rare = np.ones(new.counts.size, bool)
    is_rare[chosen] = False
    return Vocabulary(pa.table(columns), _merged([new.select(is_rare), lost]).to_table())


def _find(keys: Hashes, hashes: Hashes) -> Rows:
    """Position of each hash among keys in any order, int64 (n,); -1 where it is not."""
    order = np.argsort(keys, kind="stable")
    positions = find_sorted(keys[order], hashes)
    return np.append(order, -1)[positions]


def write_vocabulary(directory: Path, table: str, vocabulary: Vocabulary) -> None:
    """Write ``vocab/<table>.arrow``, and ``vocab/<table>.rare.arrow`` with values without a row."""
    (directory / "vocab").mkdir(exist_ok=True)
    write_arrow(directory / f"vocab/{table}.arrow", vocabulary.table)
    if vocabulary.rare.num_rows:
        write_arrow(directory / f"vocab/{table}.rare.arrow", vocabulary.rare)


def read_vocabulary(directory: Path, table: str) -> pa.Table:
    """The values with a row and their counts, written by ``write_vocabulary``, memory-mapped."""
    return pa.ipc.open_file(pa.memory_map(str(directory / f"vocab/{table}.arrow"))).read_all()


def read_whole_vocabulary(directory: Path, table: str) -> Vocabulary:
    """The vocabulary written by ``write_vocabulary``, memory-mapped."""
    has_rare = (directory / f"vocab/{table}.rare.arrow").exists()
    rare = read_vocabulary(directory, f"{table}.rare") if has_rare else EMPTY.rare
    return Vocabulary(read_vocabulary(directory, table), rare)


class RowEncoder:
    """Turns texts into rows of one table: by vocabulary, or by hashing.

    Row 0 is for missing values and those that are not in the vocabulary. Hashing gives row 1 + hash
    mod (num_rows - 1), so values may collide.

    Args:
        num_rows: The number of rows for hashing.
        vocabulary: The table of a ``Vocabulary``, instead of hashing.
    """

    def __init__(self, num_rows: int = 0, vocabulary: pa.Table | None = None) -> None:
        self.num_rows = num_rows if vocabulary is None else vocabulary.num_rows + 1
        self._keys = None if vocabulary is None else hash_text(one_array(vocabulary["value"]))
        # Rows are ordered by hash only until a vocabulary grows.
        self._order: Rows | None = None
        if self._keys is not None and (self._keys[1:] < self._keys[:-1]).any():
            self._order = np.argsort(self._keys)
            self._keys = self._keys[self._order]

    @property
    def has_unknown(self) -> bool:
        """Whether unknown values are possible, which read row 0."""
        return self._keys is not None

    def rows(self, values: pa.Array) -> Rows:
        """int64 (n,): the row of each value, 0 for nulls."""
        hashes = hash_text(values)
        if self._keys is None:
            rows: Rows = (hashes % np.uint64(self.num_rows - 1)).astype(np.int64) + 1
        else:
            rows = find_sorted(self._keys, hashes)
            if self._order is not None:
                rows = np.append(self._order, -1)[rows]
            rows = rows + 1
        if values.null_count:
            rows[values.is_null().to_numpy(zero_copy_only=False)] = 0
        return rows


class RowNumbers(RowEncoder):
    """Encodes texts that are row numbers already, which is checked before."""

    def rows(self, values: pa.Array) -> Rows:
        """int64 (n,): the values as numbers, -1 if not a row number."""
        is_number = pc.match_substring_regex(values, _ROW_NUMBER).fill_null(False)
        rows: Rows = pc.if_else(is_number, values, "-1").cast(pa.int64()).to_numpy()
        return rows
