"""A generator of logs like Yambda: its published schema and marginals, of any number of users.

    python benchmarks/yambda_like.py shares
    python benchmarks/yambda_like.py write DIRECTORY --users 10000

``shares`` counts the distinct items, albums and artists that a rank of DLRMv4 reads in a step of
the full-size log, in the reference's order and shuffled; the latter from below, as it draws from
some of the users. ``write`` writes ``flat/SIZE/`` and ``sequential/SIZE/`` with
``multi_event.parquet``, and the mappings of items to albums and artists.

Every user is a pure function of (seed, number), so that a step needs only the users that it reads,
and memory is the catalogue (200 MB) and one group of users. As in the published subsets, fewer
users have the same catalogue and the same range of user ids, whose step is then larger.

How a user listens, fitted to the shares that DLRMv4 reports (item 2.4%, album 1.5%, artist 0.6%):
most events repeat an earlier event of the same user, uniformly chosen. Of the others, half continue
an album, a quarter begin another album of the same artist, and the rest begin with an artist drawn
by a Zipf law. More popular artists have more albums.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hotrec.data.columns import offsets_of
from hotrec.data.yambda import (
    EVENT_TYPES,
    FLAT_SCHEMA,
    LISTEN,
    SEQUENTIAL_SCHEMA,
    HistoryRule,
    find_histories,
    pool_bits,
)

NUM_USERS, NUM_ITEMS, NUM_ALBUMS, NUM_ARTISTS = 1_000_000, 9_390_623, 3_367_691, 1_293_394
# Items that the published mappings leave out.
NO_ALBUM_FRAC, NO_ARTIST_FRAC = 0.0785, 0.0128
STEP_S, DAY_S, SPAN_S = 5, 86_400, 26_000_000
# Of the truncated log-normal with median 2,695 and mean 4,763.
LOG_EVENTS, LOG_EVENTS_DEVIATION, MAX_EVENTS = 7.980, 1.350, 27_738
# Listens of at least half a track, skips, then the other types in order: in percent of the events,
# and the share of them that no recommendation caused.
KIND_PCT = np.array([61.3, 35.9, 1.9, 0.24, 0.70, 0.05])
ORGANIC_FRAC = np.array([0.480, 0.580, 0.570, 0.519, 0.947, 0.890])
ALL_PLAYED_FRAC, NONE_PLAYED_FRAC = 0.8, 0.2  # of listens and of skips
EVENTS_PER_SESSION, MEAN_GAP_S = 30, 60.0
# The fit: see the shares that the test and the command count.
ZIPF_EXPONENT, REPEAT_FRAC, SAME_ALBUM_FRAC, SAME_ARTIST_FRAC = 0.95, 0.86, 0.53, 0.26
EVENTS_PER_ROW_GROUP = 1 << 20
# Streams of random numbers that must not repeat each other.
_CATALOGUE, _USER, _ORDER = range(3)


class Catalogue:
    """Artists, their albums and the tracks on them.

    Artists are numbered by falling popularity; albums of an artist, and items of an album, are
    neighbours. The ids of the log are permutations of these numbers, from 1.

    Args:
        seed: Of all random numbers.
        frac: Size, as a part of the published one.
    """

    def __init__(self, seed: int = 0, frac: float = 1.0) -> None:
        rng = np.random.default_rng([seed, _CATALOGUE])
        sizes = (NUM_ARTISTS, NUM_ALBUMS, NUM_ITEMS)
        num_artists, num_albums, num_items = (max(1, round(frac * size)) for size in sizes)
        weights = np.arange(1, num_artists + 1) ** -ZIPF_EXPONENT
        self._cumulative = _cumulative(weights)
        self._album_offsets = _offsets(rng, np.sqrt(weights), num_albums)
        self._item_offsets = _offsets(rng, rng.exponential(size=num_albums), num_items)
        albums = np.arange(num_albums, dtype=np.int32)
        album_of = np.repeat(albums, np.diff(self._item_offsets))
        artist_of = np.searchsorted(self._album_offsets, album_of, side="right") - 1
        self.item_ids = rng.permutation(np.arange(1, num_items + 1, dtype=np.int32))
        album_ids = rng.permutation(np.arange(1, num_albums + 1, dtype=np.int32))
        artist_ids = rng.permutation(np.arange(1, num_artists + 1, dtype=np.int32))
        # By item id; 0: none.
        self.album_id_of = np.zeros(num_items + 1, np.int32)
        self.album_id_of[self.item_ids] = album_ids[album_of]
        self.artist_id_of = np.zeros(num_items + 1, np.int32)
        self.artist_id_of[self.item_ids] = artist_ids[artist_of]
        self.album_id_of[rng.random(num_items + 1) < NO_ALBUM_FRAC] = 0
        self.artist_id_of[rng.random(num_items + 1) < NO_ARTIST_FRAC] = 0
        steps = 40 * np.exp(0.25 * rng.standard_normal(num_items + 1, np.float32))
        self.length_s_of = (STEP_S * steps.round().clip(1, 499)).astype(np.uint16)

    def draw(self, rng: np.random.Generator, num: int) -> np.ndarray:
        """The ids of ``num`` items that a user finds one after the other."""
        kind = rng.random(num)
        is_artist, is_album = kind >= SAME_ALBUM_FRAC + SAME_ARTIST_FRAC, kind >= SAME_ALBUM_FRAC
        is_artist[:1] = is_album[:1] = True
        artists = np.searchsorted(self._cumulative, rng.random(is_artist.sum()), side="right")
        artists = artists[np.cumsum(is_artist)[is_album] - 1]
        albums, _ = _draw_within(rng, self._album_offsets, artists)
        first, num_tracks = _draw_within(rng, self._item_offsets, albums)
        visit = np.cumsum(is_album) - 1
        since = np.arange(num) - np.flatnonzero(is_album)[visit]
        begin = self._item_offsets[albums]
        tracks = (first - begin)[visit] + since
        return self.item_ids[begin[visit] + tracks % num_tracks[visit]]


def _cumulative(weights: np.ndarray) -> np.ndarray:
    cumulative = np.cumsum(weights / weights.sum())
    cumulative[-1] = 1.0  # rounding must not leave a gap
    return cumulative


def _offsets(rng: np.random.Generator, weights: np.ndarray, total: int) -> np.ndarray:
    """Offsets of groups of at least one, whose sizes add up to ``total``."""
    drawn = np.sort(rng.random(max(0, total - weights.size)))
    extra = np.bincount(np.searchsorted(_cumulative(weights), drawn), minlength=weights.size)
    return offsets_of(1 + extra)


def _draw_within(
    rng: np.random.Generator, offsets: np.ndarray, groups: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """One uniform member of each group, and the sizes of the groups."""
    sizes = offsets[groups + 1] - offsets[groups]
    return offsets[groups] + (rng.random(groups.size) * sizes).astype(np.int64), sizes


@dataclass(frozen=True)
class Events:
    """The events of one user by time; arrays (n,)."""

    uid: int
    timestamp: np.ndarray
    item_id: np.ndarray
    event_type: np.ndarray  # index into EVENT_TYPES
    played_pct: np.ndarray  # of listens
    is_organic: np.ndarray

    def listens(self, day: int) -> np.ndarray:
        """Positions of the listens of a day that have a history."""
        is_of_day = (self.timestamp // DAY_S == day) & (self.event_type == LISTEN)
        is_of_day[:1] = False
        return np.flatnonzero(is_of_day)


class Log:
    """The events of ``num_users`` users, numbered from 0."""

    def __init__(self, catalogue: Catalogue, num_users: int = NUM_USERS, seed: int = 0) -> None:
        if not 1 <= num_users <= NUM_USERS:
            raise ValueError(f"users: expected 1 to {NUM_USERS}, got {num_users}.")
        self.catalogue, self.num_users, self._seed = catalogue, num_users, seed
        self._uid_step = NUM_USERS // num_users

    def num_events(self, number: int) -> int:
        """The number of events of a user, in a fiftieth of the time."""
        return self._begin(number)[1]

    def _begin(self, number: int) -> tuple[np.random.Generator, int]:
        rng = np.random.default_rng([self._seed, _USER, number])
        num = 0
        while not 1 <= num <= MAX_EVENTS:
            num = int(np.exp(LOG_EVENTS + LOG_EVENTS_DEVIATION * rng.standard_normal()))
        return rng, num

    def user(self, number: int) -> Events:
        rng, num = self._begin(number)
        kinds = np.searchsorted(_cumulative(KIND_PCT), rng.random(num), side="right")
        if kinds[0] > 1:  # nothing to like yet
            kinds[0] = 0
        is_listen = kinds < 2
        all_played, none_played = (
            rng.random(num) < ALL_PLAYED_FRAC,
            rng.random(num) < NONE_PLAYED_FRAC,
        )
        listened = np.where(all_played, 100, rng.integers(50, 100, num))
        skipped = np.where(none_played, 0, rng.integers(1, 50, num))
        return Events(
            uid=self._uid_step * (number + 1),
            timestamp=_times(rng, num),
            item_id=self._items(rng, is_listen),
            event_type=np.maximum(kinds - 1, 0).astype(np.uint8),
            played_pct=np.where(kinds == 0, listened, skipped).astype(np.uint16),
            is_organic=(rng.random(num) < ORGANIC_FRAC[kinds]).astype(np.uint8),
        )

    def _items(self, rng: np.random.Generator, is_listen: np.ndarray) -> np.ndarray:
        num = is_listen.size
        positions = np.arange(num)
        is_new = is_listen & (rng.random(num) >= REPEAT_FRAC)
        is_new[0] = True
        earlier = (rng.random(num) * positions).astype(np.int64)
        # A like is for the track of the event before it.
        source = np.where(is_new, positions, np.where(is_listen, earlier, positions - 1))
        while not is_new[source].all():
            source = source[source]
        return self.catalogue.draw(rng, int(is_new.sum()))[(np.cumsum(is_new) - 1)[source]]


def _times(rng: np.random.Generator, num: int) -> np.ndarray:
    """Times of events in sessions, in steps of five seconds."""
    num_sessions = max(1, round(num / EVENTS_PER_SESSION))
    begin_s = rng.random(num_sessions) * (SPAN_S - DAY_S / 24)
    session = np.sort(rng.integers(0, num_sessions, num))
    since_s = np.cumsum(rng.exponential(MEAN_GAP_S, num))
    first = np.searchsorted(session, np.arange(num_sessions)).clip(max=num - 1)
    times_s = begin_s[session] + since_s - since_s[first][session]
    return np.sort(np.minimum(times_s, SPAN_S).astype(np.int64) // STEP_S * STEP_S)


# Steps.


@dataclass(frozen=True)
class Share:
    """What one rank reads in a step: ids of the history, with the listen itself last.

    Args:
        uids: The user of each sample, (B,).
        item_ids: int32 (K,).
        lengths: (B,).
    """

    uids: np.ndarray
    item_ids: np.ndarray
    lengths: np.ndarray


def listens_of(log: Log, day: int, users: Iterator[int], num: int) -> np.ndarray:
    """The first ``num`` listens of a day of these users: user and position, (num, 2)."""
    found, total = [], 0
    for user in users:
        at = log.user(user).listens(day)[: num - total]
        found.append(np.stack([np.full(at.size, user), at], axis=1))
        total += at.size
        if total == num:
            return np.concatenate(found)
    raise ValueError(f"users: expected {num} listens on day {day}, got {total}. Set more users.")


def read(log: Log, listens: np.ndarray, rule: HistoryRule) -> Share:
    """Some listens, of ``listens_of``, with their histories."""
    order = np.lexsort((listens[:, 1], listens[:, 0]))
    users, begins = np.unique(listens[order, 0], return_index=True)
    uids, items, lengths = [], [], []
    for user, at in zip(users, np.split(listens[order, 1], begins[1:]), strict=True):
        events = log.user(int(user))
        pools = pool_bits(events.event_type, events.played_pct)
        positions, offsets = find_histories(pools, at, rule)
        items.append(events.item_id[np.insert(positions, offsets[1:], at)])
        lengths.append(np.diff(offsets) + 1)
        uids.append(np.full(at.size, events.uid))
    return Share(np.concatenate(uids), np.concatenate(items), np.concatenate(lengths))


def user_major_step(
    log: Log, *, day: int, first_user: int, batch_size: int, num_ranks: int
) -> Iterator[np.ndarray]:
    """The listens of each rank in a step in the reference's order.

    That is the order of users in a day; ranks take its listens in turn.
    """
    users = iter(range(first_user, log.num_users))
    listens = listens_of(log, day, users, batch_size * num_ranks)
    yield from (listens[rank::num_ranks] for rank in range(num_ranks))


def shuffled_share(log: Log, *, day: int, batch_size: int, num_users: int, seed: int) -> np.ndarray:
    """The listens of a rank in a step of a shuffled day, of ``num_users`` random users."""
    rng = np.random.default_rng([seed, _ORDER])
    users = np.sort(rng.choice(log.num_users, min(num_users, log.num_users), replace=False))
    found = []
    for user in users.tolist():
        at = log.user(user).listens(day)
        found.append(np.stack([np.full(at.size, user), at], axis=1))
    return rng.choice(np.concatenate(found), batch_size, replace=False)


def count_distinct(catalogue: Catalogue, share: Share) -> dict[str, float]:
    """Ids, and the parts of them that are distinct."""
    items = np.unique(share.item_ids)
    distinct = {
        "item": items.size,
        "album": np.unique(catalogue.album_id_of[items]).size,
        "artist": np.unique(catalogue.artist_id_of[items]).size,
    }
    num_ids = share.item_ids.size
    return {"num_ids": num_ids, **{name: num / num_ids for name, num in distinct.items()}}


# Files.


def write(log: Log, directory: Path, size: str) -> None:
    """Write the log and the mappings in the published layout."""
    directory.mkdir(parents=True, exist_ok=True)
    catalogue = log.catalogue
    for name, of_item in (("album", catalogue.album_id_of), ("artist", catalogue.artist_id_of)):
        items = np.flatnonzero(of_item)
        ids = {f"{name}_id": of_item[items], "item_id": items}
        table = pa.table({n: pa.array(values.astype(np.uint32)) for n, values in ids.items()})
        pq.write_table(table, directory / f"{name}_item_mapping.parquet")
    paths = [directory / form / size / "multi_event.parquet" for form in ("flat", "sequential")]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
    with (
        pq.ParquetWriter(paths[0], FLAT_SCHEMA) as flat,
        pq.ParquetWriter(paths[1], SEQUENTIAL_SCHEMA) as sequential,
    ):
        for group in _groups(log):
            table, offsets = _table(catalogue, group)
            flat.write_table(table)
            lists = [
                pa.ListArray.from_arrays(
                    pa.array(offsets.astype(np.int32)), column.combine_chunks()
                )
                for column in table.columns[1:]
            ]
            uids = pa.array([events.uid for events in group], pa.uint32())
            sequential.write_table(pa.table([uids, *lists], schema=SEQUENTIAL_SCHEMA))


def _groups(log: Log) -> Iterator[list[Events]]:
    group: list[Events] = []
    total = 0
    for number in range(log.num_users):
        group.append(log.user(number))
        total += group[-1].timestamp.size
        if total >= EVENTS_PER_ROW_GROUP or number + 1 == log.num_users:
            yield group
            group, total = [], 0


def _table(catalogue: Catalogue, group: list[Events]) -> tuple[pa.Table, np.ndarray]:
    """The events of some users, and where each user begins."""
    offsets = offsets_of(np.array([events.timestamp.size for events in group]))

    def joined(name: str) -> np.ndarray:
        return np.concatenate([getattr(events, name) for events in group])

    items, types = joined("item_id"), joined("event_type")
    no_listen = types != LISTEN
    columns = [
        pa.array(np.repeat([events.uid for events in group], np.diff(offsets)), pa.uint32()),
        pa.array(joined("timestamp"), pa.uint32()),
        pa.array(items, pa.uint32()),
        pa.array(joined("is_organic")),
        pa.array(joined("played_pct"), pa.uint16(), mask=no_listen),
        pa.array(catalogue.length_s_of[items], pa.uint32(), mask=no_listen),
        pa.DictionaryArray.from_arrays(types.astype(np.uint32), pa.array(EVENT_TYPES)),
    ]
    return pa.table(columns, schema=FLAT_SCHEMA), offsets


# The command.


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write", help="write a log")
    writing.add_argument("directory", type=Path)
    writing.add_argument("--users", type=int, default=10_000)
    writing.add_argument("--size", default="50m", help="name of the directory in flat/")
    counting = commands.add_parser("shares", help="count distinct rows of a step")
    counting.add_argument("--users", type=int, default=NUM_USERS)
    counting.add_argument("--ranks", type=int, default=8)
    counting.add_argument("--batch-size", type=int, default=1024)
    counting.add_argument("--days", type=int, nargs="+", default=[200, 225, 250, 275, 299])
    counting.add_argument("--shuffled-users", type=int, default=5_000)
    for command in (writing, counting):
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--catalogue-frac", type=float, default=1.0)
    options = parser.parse_args(arguments)
    log = Log(Catalogue(options.seed, options.catalogue_frac), options.users, options.seed)
    if options.command == "write":
        write(log, options.directory, options.size)
    else:
        print(json.dumps(count_shares(log, options)))


def count_shares(log: Log, options: argparse.Namespace) -> dict[str, Any]:
    """The shares of rank 0 in a step of each day, in both orders."""
    rows = []
    for number, day in enumerate(options.days):
        first_user = number * log.num_users // len(options.days)
        settings = {"day": day, "batch_size": options.batch_size}
        step = user_major_step(log, first_user=first_user, num_ranks=options.ranks, **settings)
        shuffled = shuffled_share(
            log, num_users=options.shuffled_users, seed=options.seed + number, **settings
        )
        for order, listens in (("user_major", next(step)), ("shuffled", shuffled)):
            share = read(log, listens, HistoryRule())
            counted = count_distinct(log.catalogue, share)
            users = np.unique(share.uids).size
            rows.append({"day": day, "order": order, "num_users": users, **counted})
            print(_row(rows[-1]), file=sys.stderr)
    means = {
        order: {
            name: float(np.mean([row[name] for row in rows if row["order"] == order]))
            for name in ("num_users", "num_ids", "item", "album", "artist")
        }
        for order in ("user_major", "shuffled")
    }
    for order, mean in means.items():
        print(_row({"day": "mean", "order": order, **mean}), file=sys.stderr)
    return {"ranks": options.ranks, "batch_size": options.batch_size, "rows": rows, "means": means}


def _row(row: dict[str, Any]) -> str:
    shares = "  ".join(f"{name} {row[name]:6.2%}" for name in ("item", "album", "artist"))
    place = f"day {row['day']!s:4}  {row['order']:10}  {row['num_users']:5,.0f} users"
    return f"{place}  {row['num_ids']:10,.0f} ids  {shares}"


if __name__ == "__main__":
    main()
