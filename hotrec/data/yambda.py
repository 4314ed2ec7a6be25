"""Yambda, a log of music listening: its published files -> samples with histories as of DLRMv4.

The files are sorted by user and time, flat (an event per row) or sequential (a user per row, with
lists). A sample is a listen; its history are the last events before it of three pools: listens of
at least half a track, likes, and shorter listens (skips). Memory is bounded by one batch of the
file, the events of one user, and the mappings of items to albums and artists.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hotrec.data.chunks import Integers
from hotrec.data.columns import is_list, offsets_of
from hotrec.types import Rows

EVENT_TYPES = ("listen", "like", "dislike", "unlike", "undislike")
LISTEN, LIKE = 0, 1
LISTENED_PCT = 50  # a shorter listen is a skip
# Bits of the pools, as in the reference.
LISTENED_BIT, LIKED_BIT, SKIPPED_BIT = POOL_BITS = 1, 2, 4
# The columns of multi_event.parquet. In sequential/ all but uid are lists.
FLAT_SCHEMA = pa.schema(
    [
        pa.field("uid", pa.uint32()),
        pa.field("timestamp", pa.uint32()),
        pa.field("item_id", pa.uint32()),
        pa.field("is_organic", pa.uint8()),
        pa.field("played_ratio_pct", pa.uint16()),
        pa.field("track_length_seconds", pa.uint32()),
        pa.field("event_type", pa.dictionary(pa.uint32(), pa.string())),
    ]
)
SEQUENTIAL_SCHEMA = pa.schema(
    [
        FLAT_SCHEMA.field("uid"),
        *(pa.field(column.name, pa.list_(column.type)) for column in list(FLAT_SCHEMA)[1:]),
    ]
)


@dataclass(frozen=True)
class HistoryRule:
    """Which events are the history of a sample.

    Args:
        per_pool: The number of last events of each pool.
        max_events: How many events to look back.
        every: Samples are the first of every so many listens of a user.
    """

    per_pool: int = 1362
    max_events: int = 20_000
    every: int = 1


def pool_bits(event_types: Integers, played_pct: Integers) -> Rows:
    """The pool of each event as a bit, 0 for events of none; int64 (n,).

    Args:
        event_types: Index into ``EVENT_TYPES``, (n,).
        played_pct: The percentage played, (n,); any value where the event is no listen.
    """
    is_listen, is_listened = event_types == LISTEN, played_pct >= LISTENED_PCT
    cases = [is_listen & is_listened, event_types == LIKE, is_listen & ~is_listened]
    return np.select(cases, POOL_BITS, 0).astype(np.int64)


def find_histories(pools_N: Rows, samples_B: Rows, rule: HistoryRule) -> tuple[Rows, Rows]:
    """The histories of some events of one user.

    Args:
        pools_N: The pool of each event of the user, see ``pool_bits``.
        samples_B: The positions of the samples among these events, increasing.
        rule: Which events are a history.

    Returns:
        The positions of the histories' events, int64 (K,), increasing in each history; and where
        each history begins, int64 (B + 1,).
    """
    positions, owners = [], []
    for pool in POOL_BITS:
        of_pool = np.flatnonzero(pools_N == pool)
        ends = np.searchsorted(of_pool, samples_B)
        oldest = np.searchsorted(of_pool, samples_B - rule.max_events)
        lengths = ends - np.maximum(ends - rule.per_pool, oldest)
        before = offsets_of(lengths)
        owners.append(np.repeat(np.arange(samples_B.size), lengths))
        positions.append(of_pool[np.arange(before[-1]) + np.repeat(ends - before[1:], lengths)])
    # One sort merges the pools of all samples: the sample is the upper digit.
    stride = pools_N.size + 1
    keys = np.sort(np.concatenate(owners) * stride + np.concatenate(positions))
    begins = np.searchsorted(keys, np.arange(samples_B.size + 1) * stride)
    return keys % stride, begins


# Samples.

SAMPLE_COLUMNS = (
    *("uid", "timestamp", "item_id", "album_id", "artist_id"),
    *("is_organic", "played_ratio_pct", "track_length_seconds", "listen_plus"),
    *("history_item_id", "history_album_id", "history_artist_id"),
    *("history_timestamp", "history_action", "history_played_ratio_pct"),
)
_ROWS_PER_BATCH, _USERS_PER_BATCH = 131_072, 64
_IDS_PER_BLOCK, _SAMPLES_PER_PART = 1 << 20, 256


@dataclass(frozen=True)
class _Events:
    """Consecutive events of a file.

    Args:
        columns: int64 (n,) by name; 0 for a missing value.
        rows: Their numbers, from 1.
    """

    columns: Mapping[str, Rows]
    rows: Rows

    def __getitem__(self, part: slice) -> _Events:
        return _Events({n: values[part] for n, values in self.columns.items()}, self.rows[part])

    def __add__(self, other: _Events) -> _Events:
        columns = {n: np.concatenate([v, other.columns[n]]) for n, v in self.columns.items()}
        return _Events(columns, np.concatenate([self.rows, other.rows]))

    @property
    def user_begins(self) -> Rows:
        """Where the events of each user begin, with the end."""
        uid = self.columns["uid"]
        changes = np.flatnonzero(uid[1:] != uid[:-1]) + 1
        return np.concatenate([[0], changes, [uid.size]])


def count_events(path: Path, file: pq.ParquetFile) -> int:
    """Events of a file, which are at least its samples.

    Raises:
        ValueError: If the file has not the published schema.
    """
    if not _is_sequential(path, file.schema_arrow):
        return int(file.metadata.num_rows)
    batches = file.iter_batches(_USERS_PER_BATCH, columns=["item_id"])
    return sum(int(pc.sum(pc.list_value_length(batch.column(0))).as_py()) for batch in batches)


def read_samples(
    path: Path, file: pq.ParquetFile, names: list[str], rule: HistoryRule
) -> Iterator[tuple[pa.Table, Rows]]:
    """The samples of a file, user by user.

    Args:
        path: The file; the mappings are two directories above, as published.
        file: The opened file.
        names: Of ``SAMPLE_COLUMNS``. ``listen_plus`` is whether at least half of the track was
            played, ``history_action`` the pool of each event as a bit.
        rule: Which events are samples and their histories.

    Yields:
        Samples in columns, and the event that each one is, from 1.

    Raises:
        ValueError: If the file has not the published schema, its events are not sorted by user and
            time, lists of a user have different lengths, or a mapping is missing.
    """
    maker = _Maker(names, rule, {name: _read_mapping(path, name) for name in _mapped(names)})
    rest: _Events | None = None
    for events in _read_events(path, file):
        joined = events if rest is None else rest + events
        _check_order(path, joined)
        begins = joined.user_begins
        for begin, end in zip(begins[:-2], begins[1:-1], strict=True):
            yield from maker.add(joined[begin:end])
        rest = joined[begins[-2] :]
    if rest is not None:
        yield from maker.add(rest)
    yield from maker.flush()


@dataclass
class _Maker:
    """Makes blocks of samples of the events of one user after the other."""

    names: list[str]
    rule: HistoryRule
    mappings: Mapping[str, Rows]  # by the name of an id: that of each item
    parts: list[tuple[pa.Table, Rows]] = field(default_factory=list)
    num_ids: int = 0

    def add(self, events: _Events) -> Iterator[tuple[pa.Table, Rows]]:
        columns = dict(events.columns)
        for name, of_item in self.mappings.items():
            items = columns["item_id"]
            columns[name] = np.where(
                items < of_item.size, of_item[items.clip(max=of_item.size - 1)], 0
            )
        pools = pool_bits(columns["event_type"], columns["played_ratio_pct"])
        columns["action"] = pools
        columns["listen_plus"] = (pools == LISTENED_BIT).astype(np.int64)
        listens = np.flatnonzero(columns["event_type"] == LISTEN)
        # Nothing to learn from without a history.
        samples = listens[listens > 0][:: self.rule.every]
        for begin in range(0, samples.size, _SAMPLES_PER_PART):
            of_part = samples[begin : begin + _SAMPLES_PER_PART]
            positions, begins = find_histories(pools, of_part, self.rule)
            offsets = pa.array(begins.astype(np.int32))
            arrays = [
                pa.ListArray.from_arrays(
                    offsets, pa.array(columns[name.removeprefix("history_")][positions])
                )
                if name.startswith("history_")
                else pa.array(columns[name][of_part])
                for name in self.names
            ]
            self.parts.append((pa.table(arrays, names=self.names), events.rows[of_part]))
            self.num_ids += positions.size
            if self.num_ids >= _IDS_PER_BLOCK:
                yield from self.flush()

    def flush(self) -> Iterator[tuple[pa.Table, Rows]]:
        if self.parts:
            tables, rows = zip(*self.parts, strict=True)
            self.parts, self.num_ids = [], 0
            yield pa.concat_tables(tables).combine_chunks(), np.concatenate(rows)


def _mapped(names: list[str]) -> list[str]:
    of_items = dict.fromkeys(name.removeprefix("history_") for name in names)
    return [name for name in of_items if name in ("album_id", "artist_id")]


def _read_mapping(path: Path, name: str) -> Rows:
    """The id of the album or artist of each item, int64, 0 for none; the last one of several."""
    file = path.parent.parent.parent / f"{name.removesuffix('_id')}_item_mapping.parquet"
    if not file.exists():
        raise ValueError(
            f"{path} column {name}: expected the mapping of items at {file}, got no such file. "
            "Download it, or omit the column."
        )
    table = pq.read_table(file)
    if not {name, "item_id"} <= set(table.column_names):
        raise ValueError(
            f"{file}: expected the columns {[name, 'item_id']}, got {table.column_names}. "
            "Download it again."
        )
    items = table["item_id"].to_numpy()
    of_item = np.zeros(int(items.max(initial=0)) + 1, np.int64)
    of_item[items] = table[name].to_numpy()
    return of_item


def _is_sequential(path: Path, schema: pa.Schema) -> bool:
    """Whether a file has lists; checks its columns.

    Raises:
        ValueError: If it is neither form.
    """
    missing = [name for name in FLAT_SCHEMA.names if name not in schema.names]
    if missing:
        raise ValueError(
            f"{path}: expected the columns {FLAT_SCHEMA.names} of Yambda's multi_event.parquet, "
            f"got {schema.names}. Set data.source.files to this file, or format to parquet."
        )
    found = {name: schema.field(name).type for name in FLAT_SCHEMA.names}
    is_sequential = is_list(found["item_id"])
    for name, kind in found.items():
        has_lists = is_sequential and name != "uid"
        item = kind.value_type if is_list(kind) else kind
        is_text = pa.types.is_dictionary(item) or pa.types.is_large_string(item)
        is_text |= pa.types.is_string(item)
        is_right = is_text if name == "event_type" else pa.types.is_integer(item)
        if is_list(kind) != has_lists or not is_right:
            what = "texts" if name == "event_type" else "integers"
            raise ValueError(
                f"{path} column {name}: expected {'lists of ' if has_lists else ''}{what}, got "
                f"type {kind}. Download it again."
            )
    return is_sequential


def _read_events(path: Path, file: pq.ParquetFile) -> Iterator[_Events]:
    is_sequential = _is_sequential(path, file.schema_arrow)
    size, first = _USERS_PER_BATCH if is_sequential else _ROWS_PER_BATCH, 1
    for batch in file.iter_batches(size, columns=FLAT_SCHEMA.names):
        flat = _flattened(path, batch) if is_sequential else batch
        columns = {
            name: _codes(path, flat.column(name))
            if name == "event_type"
            else _whole(flat.column(name))
            for name in FLAT_SCHEMA.names
        }
        yield _Events(columns, np.arange(first, first + flat.num_rows))
        first += flat.num_rows


def _flattened(path: Path, batch: pa.RecordBatch) -> pa.RecordBatch:
    """The events of some users' lists."""
    uids = batch.column("uid")
    lengths = pc.list_value_length(batch.column("item_id")).fill_null(0)
    for name in FLAT_SCHEMA.names[1:]:
        others = pc.list_value_length(batch.column(name)).fill_null(0)
        is_other = pc.not_equal(lengths, others).to_numpy(zero_copy_only=False)
        if is_other.any():
            at = int(np.argmax(is_other))
            raise ValueError(
                f"{path} uid {uids[at]}: expected {lengths[at]} values in column {name}, as in "
                f"item_id, got {others[at]}. Download it again."
            )
    users = np.repeat(np.arange(len(uids)), lengths.to_numpy(zero_copy_only=False))
    arrays = [batch.column(name).flatten() for name in FLAT_SCHEMA.names[1:]]
    return pa.RecordBatch.from_arrays([uids.take(pa.array(users)), *arrays], FLAT_SCHEMA.names)


def _whole(column: pa.Array) -> Rows:
    values: Rows = column.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
    return values


def _codes(path: Path, column: pa.Array) -> Rows:
    """Events as indices into ``EVENT_TYPES``."""
    encoded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    names = encoded.dictionary.to_pylist()
    unknown = [name for name in names if name not in EVENT_TYPES]
    if unknown or encoded.null_count:
        raise ValueError(
            f"{path} column event_type: expected one of {list(EVENT_TYPES)}, got "
            f"{unknown[0] if unknown else None!r}. Download it again."
        )
    code_of = np.array([EVENT_TYPES.index(name) for name in names], np.int64)
    codes: Rows = code_of[encoded.indices.to_numpy(zero_copy_only=False)]
    return codes


def _check_order(path: Path, events: _Events) -> None:
    uid, time = events.columns["uid"], events.columns["timestamp"]
    is_back = (uid[1:] < uid[:-1]) | ((uid[1:] == uid[:-1]) & (time[1:] < time[:-1]))
    if is_back.any():
        at = int(np.argmax(is_back))
        raise ValueError(
            f"{path} event {events.rows[at + 1]}: expected events sorted by uid and timestamp, got "
            f"uid {uid[at + 1]} at {time[at + 1]} after uid {uid[at]} at {time[at]}. Sort the file."
        )
