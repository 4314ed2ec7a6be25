"""Counts what sequences exchange on 8 to 64 ranks: a generated log like Yambda, and KuaiRand.

    PYTHONPATH=. python benchmarks/sequence_counts.py [--kuairand data/kuairand/dataset]
        [--page benchmarks/results/sequence_counts.md]

The batches of DLRMv4 are made from the log (``yambda_like.py``) in two orders: by user inside a
day, as the reference reads them, and shuffled. They pass the code that routes sequences, finds the
owners of rows, drops a host's duplicates and classifies rows under look-ahead in training. No rank
is started, no row is read. The last line on stdout is one JSON object, which is also written next
to the page, with a picture.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torchrec
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks import sequence_counts_page
from benchmarks.host_scale import make_owners
from benchmarks.yambda_like import (
    DAY_S,
    MAX_EVENTS,
    NUM_USERS,
    Catalogue,
    Events,
    Log,
    Share,
    listens_of,
    read,
)
from hotrec.bench.machine import machine_facts
from hotrec.data.chunks import Dataset
from hotrec.data.loader import make_loader
from hotrec.data.yambda import LISTEN, HistoryRule
from hotrec.embedding.hot_reduce import SLOT_BYTES, hot_bytes
from hotrec.embedding.owned_rows import RequestedRows, RowOwners, Shard
from hotrec.embedding.prefetch.exchange import ColdExchange, PrefetchedBatch
from hotrec.embedding.prefetch.row_ahead import MAX_DEPTH
from hotrec.embedding.relay import Relay
from hotrec.planner.policies import choose_fraction
from hotrec.routing.features import Column, hot_name
from hotrec.routing.router import Router
from hotrec.runtime.hosts import Hosts
from hotrec.types import Partition, RowOrder

DIM, VALUE_BYTES, RANKS_PER_HOST = 512, 4, 8
ROW_BYTES = VALUE_BYTES * DIM
ID_BYTES, POSITION_BYTES = 8, 4  # of a request: TorchRec's ids, hotrec's positions
# The day of the batches by user, and where they begin; shuffled ones are from the later days.
DAY, FIRST_USER, FIRST_SHUFFLED_DAY = 250, 600_000, 200
# Ranks and samples of a rank: as in the quickstart, and many.
KUAIRAND_SHAPES = ((2, 256), (8, 1024))
PROFILE_SEED, NUM_PROFILED = 1, 8  # batches of a rank by which hot rows are chosen
BY_USER, SHUFFLED = ORDERS = "user_major", "shuffled"
EVERY_ID, DISTINCT, COLUMN_WISE, HOT_COLD, TWO_LEVELS = (
    *("row_wise", "row_wise_distinct", "column_wise", "hot_cold"),
    "two_levels",
)


# Batches.


class KeptLog(Log):
    """A log that keeps the users it was last asked for."""

    def __init__(self, catalogue: Catalogue, num_users: int = NUM_USERS, seed: int = 0) -> None:
        super().__init__(catalogue, num_users, seed)
        self._kept = lru_cache(maxsize=4096)(super().user)

    def user(self, number: int) -> Events:
        return self._kept(number)


def by_user(log: Log, day: int, first_user: int, num: int) -> np.ndarray:
    """The next ``num`` listens of a day by user, (num, 2); ranks take them in turn."""
    return listens_of(log, day, iter(range(first_user, log.num_users)), num)


def shuffled(log: Log, first_day: int, batch_size: int, seed: int) -> Iterator[np.ndarray]:
    """Batches of listens from ``first_day`` on, uniformly drawn from those of all users.

    A user is drawn in proportion to the number of events, then one of the user's listens.
    """
    rng = np.random.default_rng(seed)
    while True:
        found: list[tuple[int, int]] = []
        while len(found) < batch_size:
            user = int(rng.integers(log.num_users))
            if rng.random() >= log.num_events(user) / MAX_EVENTS:
                continue
            events = log.user(user)
            is_listen = (events.timestamp >= first_day * DAY_S) & (events.event_type == LISTEN)
            is_listen[:1] = False
            at = np.flatnonzero(is_listen)
            if at.size:
                found.append((user, int(rng.choice(at))))
        yield np.array(found)


def table_rows(catalogue: Catalogue) -> dict[str, int]:
    """The rows of each table: row 0 is for items without an album or artist."""
    return {
        "item": catalogue.item_ids.size + 1,
        "album": int(catalogue.album_id_of.max()) + 1,
        "artist": int(catalogue.artist_id_of.max()) + 1,
        "uid": NUM_USERS + 1,
    }


COLUMNS = tuple(
    Column(name, name, table, is_mean=False)
    for table, names in {
        "item": ("history_item", "item"),
        "album": ("history_album", "album"),
        "artist": ("history_artist", "artist"),
        "uid": ("uid",),
    }.items()
    for name in names
)


def features_of(catalogue: Catalogue, share: Share) -> KeyedJaggedTensor:
    """The ids of a rank's samples: histories, the candidate, the user."""
    ends = np.cumsum(share.lengths)
    items = np.delete(share.item_ids, ends - 1), share.item_ids[ends - 1]
    of_items = [
        part
        for of_item in (None, catalogue.album_id_of, catalogue.artist_id_of)
        for part in (items if of_item is None else [of_item[part] for part in items])
    ]
    ones = np.ones_like(share.lengths)
    lengths = [*[share.lengths - 1, ones] * 3, ones]
    return KeyedJaggedTensor(
        keys=[column.feature for column in COLUMNS],
        values=torch.from_numpy(np.concatenate([*of_items, share.uids]).astype(np.int64)),
        lengths=torch.from_numpy(np.concatenate(lengths).astype(np.int32)),
    )


@dataclass(frozen=True)
class RankRows:
    """What a rank reads in a step.

    Args:
        distinct: The distinct rows (U,) of each table, ascending.
        num_ids_U: How many of its ids read each of them, int64 (U,).
    """

    distinct: KeyedJaggedTensor
    num_ids_U: torch.Tensor

    @property
    def num_ids(self) -> int:
        return int(self.num_ids_U.sum())


def rows_of(router: Router, features: KeyedJaggedTensor) -> RankRows:
    """Route the sequences of a rank; the router has no hot rows."""
    [group] = router(features).groups
    num_ids_U = group.row_offsets_U.diff(append=torch.tensor([group.positions_K.numel()]))
    return RankRows(group.rows, num_ids_U)


# The exchange.


@dataclass(frozen=True)
class Counts:
    """What a placement exchanges in a step; bytes are sent, per rank.

    The mean rank receives what it sends.

    Args:
        request_bytes: Ids or positions, mean over the ranks.
        rows_bytes: Rows in forward, and as much of gradients in backward, mean.
        hot_bytes: Gradients of hot rows, mean.
        sent_bytes: All of them, mean.
        most_sent_bytes: The same of the rank that sends most.
        between_hosts_bytes: The mean's part to ranks of other hosts.
        busiest: Rows that the busiest owner serves over the mean, of tables in the order of their
            ids; None for columns.
        busiest_spread: The same of spread rows.
        num_ids: Ids of a rank, and so expanded rows and their gradients, mean.
        num_distinct: Distinct rows of a rank, mean; 0 where every id is sent.
        num_served: Rows that the busiest owner serves at once.
        num_relayed: Rows of the busiest relay; 0 in one level.
        num_replicas: Hot rows.
        peak_bytes: See ``peak_bytes``.
    """

    num_ranks: int
    batch_size: int
    placement: str
    request_bytes: float
    rows_bytes: float
    hot_bytes: float
    sent_bytes: float
    most_sent_bytes: float
    between_hosts_bytes: float
    busiest: float | None
    busiest_spread: float | None
    num_ids: float
    num_distinct: float
    num_served: float
    num_relayed: float = 0.0
    num_replicas: float = 0.0

    @property
    def peak_bytes(self) -> float:
        """Distinct and expanded rows with their gradients, what is served or relayed, and replicas.

        A lower bound: exchanges make copies, and optimizers have state.
        """
        in_batch = 2 * (self.num_ids + self.num_distinct)
        at_once = self.num_served + self.num_relayed + self.num_replicas
        return ROW_BYTES * (in_batch + at_once)


@dataclass
class Messages:
    """What ranks ask each other for.

    Args:
        asked_WW: Rows that rank r asks rank o for.
        request_bytes: Of an id or a position.
        row_bytes: Of a row, and of its gradient.
    """

    asked_WW: np.ndarray
    request_bytes: int
    row_bytes: float

    def sent(self, hosts: Hosts) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Per rank: requests, rows and gradients, and all that goes to other hosts."""
        ranks = np.arange(len(self.asked_WW))
        host_of = ranks // hosts.ranks_per_host
        is_other = host_of[:, None] != host_of
        to_ranks = self.asked_WW * (ranks[:, None] != ranks)
        to_hosts = self.asked_WW * is_other
        requests = self.request_bytes * to_ranks.sum(1)
        rows = self.row_bytes * (to_ranks.sum(0) + to_ranks.sum(1))
        both = (self.request_bytes + self.row_bytes) * to_hosts.sum(1)
        return requests, rows, both + self.row_bytes * to_hosts.sum(0)


class Owned:
    """The owners of the rows of a step's ranks, in the order of ids or spread."""

    def __init__(self, ranks: Sequence[RankRows], owners: RowOwners, hosts: Hosts) -> None:
        self._owners, self._hosts = owners, hosts
        size = len(ranks)
        order = [rank for rail in hosts.rails for rank in rail]
        found = [owners.find(rank.distinct, 0) for rank in ranks]
        # By rank of the reader, rail and host of the owner.
        nums = np.stack([part.num_to_W.numpy() for part in found if part.num_to_W is not None])
        self._nums = nums.reshape(size, hosts.ranks_per_host, hosts.num_hosts)
        self._positions = [part.positions_U for part in found]
        self.distinct_WW = np.zeros((size, size), np.int64)
        self.distinct_WW[:, order] = nums
        self.ids_WW = np.zeros_like(self.distinct_WW)
        for at, (rank, part) in enumerate(zip(ranks, found, strict=True)):
            assert part.order_U is not None
            ends = np.cumsum(nums[at])
            until = np.concatenate([[0], np.cumsum(rank.num_ids_U[part.order_U].numpy())])
            self.ids_WW[at, order] = np.diff(until[ends], prepend=0)

    def relayed(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows that a rank asks its relays for, and those that a relay asks their owners for."""
        inside, rails = np.zeros_like(self.distinct_WW), np.zeros_like(self.distinct_WW)
        for members in self._hosts.members:
            for rail, relay_rank in enumerate(members):
                nums = self._nums[members, rail]
                parts = [
                    self._positions[rank].split(self._nums[rank].sum(1).tolist())[rail]
                    for rank in members
                ]
                relay = Relay(torch.cat(parts).long(), nums.tolist(), self._owners)
                inside[members, relay_rank] = nums.sum(1)
                rails[relay_rank, self._hosts.rails[rail]] = relay.num_to_H.numpy()
        return inside, rails


def busiest_over_mean(asked_WW: np.ndarray) -> float:
    served = asked_WW.sum(0)
    return float(served.max() / served.mean())


def hot_sent_bytes(
    slots: Sequence[torch.Tensor], num_hot: int, hosts: Hosts
) -> tuple[float, float]:
    """Bytes that a rank sends for the gradients of hot rows, and those to other hosts.

    As ``HotReducer``: added up by the owners of slots inside a host, then between hosts in the
    cheapest of its three ways, which on one host is the only level.

    Args:
        slots: The hot slots that each rank touches.
        num_hot: Slots in all.
        hosts: The hosts.
    """
    if hosts.num_hosts == 1:
        union = torch.cat([*slots]).unique().numel()
        counts = [[part.numel()] for part in slots]
        return min(hot_bytes([(num_hot, DIM)], counts, [union], VALUE_BYTES).values()), 0.0
    local = hosts.ranks_per_host
    of_hosts = [torch.cat([slots[rank] for rank in of]).unique() for of in hosts.members]
    on_rails = []
    for rail in range(local):
        of_rail = [touched[touched % local == rail] for touched in of_hosts]
        union = torch.cat(of_rail).unique().numel()
        shape = (len(range(rail, num_hot, local)), DIM)
        counts = [[part.numel()] for part in of_rail]
        on_rails.append(min(hot_bytes([shape], counts, [union], VALUE_BYTES).values()))
    to_owners = [float((part % local != rank % local).sum()) for rank, part in enumerate(slots)]
    gathered = (local - 1) / local * torch.cat(of_hosts).unique().numel()
    inside = (np.mean(to_owners) + gathered) * (ROW_BYTES + SLOT_BYTES)
    return float(inside + np.mean(on_rails)), float(np.mean(on_rails))


def split_hot(
    ranks: Sequence[RankRows], partition: Partition
) -> tuple[list[RankRows], list[torch.Tensor]]:
    """The cold rows of each rank, and its hot slots, counted over all tables."""
    tables = list(partition.num_rows)
    columns = [Column(table, table, table, is_mean=False) for table in tables]
    router = Router({DIM: columns}, partition, need_indices=False)
    firsts = dict(zip(tables, np.cumsum([0, *map(partition.num_hot, tables)]), strict=False))
    cold, slots = [], []
    for rank in ranks:
        [group] = router(rank.distinct).groups
        of_key = group.rows.to_dict()
        slots.append(
            torch.cat(
                [
                    of_key[hot_name(table)].values() + int(firsts[table])
                    for table in tables
                    if hot_name(table) in of_key
                ]
            )
        )
        rows = [of_key[table].values() for table in tables]
        lengths = torch.tensor([part.numel() for part in rows], dtype=torch.int32)
        distinct = KeyedJaggedTensor(
            tables, torch.cat(rows), lengths=lengths, length_per_key=lengths.tolist(), stride=1
        )
        cold.append(RankRows(distinct, torch.ones(distinct.values().numel(), dtype=torch.int64)))
    return cold, slots


def count(
    ranks: Sequence[RankRows], partition: Partition, batch_size: int, ranks_per_host: int
) -> list[Counts]:
    """Count the exchange of a step's ranks for all placements.

    Args:
        ranks: What each rank reads.
        partition: The hot rows of the placement that has some.
        batch_size: Samples of a rank.
        ranks_per_host: Consecutive ranks that are a host.
    """
    size, num_rows = len(ranks), partition.num_rows
    hosts = Hosts(size // ranks_per_host, ranks_per_host)
    orders = {table: RowOrder(num, True, table) for table, num in num_rows.items()}
    owners = [make_owners(num_rows, hosts), make_owners(num_rows, hosts, orders)]
    in_order, spread = (Owned(ranks, of, hosts) for of in owners)
    cold, slots = split_hot(ranks, partition)
    cold_in_order, cold_spread = (Owned(cold, of, hosts) for of in owners)
    num_ids_W = np.array([rank.num_ids for rank in ranks])
    num_distinct = float(np.mean([rank.num_ids_U.numel() for rank in ranks]))

    def make(placement: str, messages: list[Messages], **figures: Any) -> Counts:
        requests, rows, between = (
            np.sum(parts, axis=0) for parts in zip(*(m.sent(hosts) for m in messages), strict=True)
        )
        hot, hot_between = figures.pop("hot", (0.0, 0.0))
        sent = requests + rows + hot
        counted = {"num_served": float(messages[-1].asked_WW.sum(0).max())} | figures
        return Counts(
            *(size, batch_size, placement, float(requests.mean()), float(rows.mean()) / 2, hot),
            *(float(sent.mean()), float(sent.max()), float(between.mean()) + hot_between),
            num_ids=float(num_ids_W.mean()),
            **counted,
        )

    def busiest(in_order_WW: np.ndarray, spread_WW: np.ndarray) -> dict[str, float]:
        return {
            "busiest": busiest_over_mean(in_order_WW),
            "busiest_spread": busiest_over_mean(spread_WW),
        }

    of_columns = np.repeat(num_ids_W[:, None], size, axis=1)
    found = [
        make(
            EVERY_ID,
            [Messages(in_order.ids_WW, ID_BYTES, ROW_BYTES)],
            **busiest(in_order.ids_WW, spread.ids_WW),
            num_distinct=0.0,
        ),
        make(
            DISTINCT,
            [Messages(spread.distinct_WW, POSITION_BYTES, ROW_BYTES)],
            **busiest(in_order.distinct_WW, spread.distinct_WW),
            num_distinct=num_distinct,
        ),
        make(
            COLUMN_WISE,
            [Messages(of_columns, ID_BYTES, ROW_BYTES / size)],
            busiest=None,
            busiest_spread=None,
            num_distinct=0.0,
            num_served=float(num_ids_W.mean()),  # in whole rows
        ),
        make(
            HOT_COLD,
            [Messages(cold_spread.distinct_WW, POSITION_BYTES, ROW_BYTES)],
            **busiest(cold_in_order.distinct_WW, cold_spread.distinct_WW),
            num_distinct=num_distinct,
            num_replicas=float(partition.total_hot),
            hot=hot_sent_bytes(slots, partition.total_hot, hosts),
        ),
    ]
    if hosts.num_hosts > 1:
        inside, rails = spread.relayed()
        _, rails_in_order = in_order.relayed()
        found.append(
            make(
                TWO_LEVELS,
                [Messages(part, POSITION_BYTES, ROW_BYTES) for part in (inside, rails)],
                **busiest(rails_in_order, rails),
                num_distinct=num_distinct,
                num_relayed=float(rails.sum(1).max()),
            )
        )
    return found


# Look-ahead.


class Lags:
    """Classifies the rows of consecutive steps by their lag, as look-ahead does.

    All ranks are in this process, so the exchange is that of one rank, the owner of all rows: its
    requests are those of all ranks.

    Args:
        num_rows: Rows of each table.
        depth: The longest lag that is distinguished.
    """

    def __init__(self, num_rows: Mapping[str, int], depth: int = MAX_DEPTH) -> None:
        self.depth, self._tables, self._num = depth, list(num_rows), 0
        shards, position = [], 0
        for table, num in num_rows.items():
            shards.append(Shard(table, 0, num, position))
            position += num
        owners = RowOwners(self._tables, num_rows, [shards], torch.device("cpu"))
        owned = SimpleNamespace(num_places=position, reserve=lambda positions_R, _: positions_R)

        def find_owners(rows: KeyedJaggedTensor) -> RequestedRows:
            return owners.find(rows, 0)

        group: Any = SimpleNamespace(
            owners=owners, owned=owned, hot=None, dim=DIM, is_cached=False, find_owners=find_owners
        )
        wire: Any = SimpleNamespace(world_size=1)
        self._exchange = ColdExchange([group], [wire], depth, torch.device("cpu"))

    def add(self, ranks: Sequence[KeyedJaggedTensor]) -> np.ndarray:
        """The next step: rows of all ranks by table and lag, int64 (T, depth + 1).

        The last column has the longer lags.
        """
        parts = [rows.values().split(rows.length_per_key()) for rows in ranks]
        of_tables = [torch.cat(of_table) for of_table in zip(*parts, strict=True)]
        lengths = [rows.numel() for rows in of_tables]
        rows = KeyedJaggedTensor(
            self._tables,
            torch.cat(of_tables),
            lengths=torch.tensor(lengths, dtype=torch.int32),
            length_per_key=lengths,
            stride=1,
        )
        group: Any = SimpleNamespace(rows=rows)
        batch = PrefetchedBatch(self._num, [], [], [group], True, False, [0])
        self._num += 1
        self._exchange.send_ids(batch)
        self._exchange.request_rows(batch)
        assert batch.request is not None
        by_lag = batch.request.hops[0].by_lag
        assert by_lag is not None
        [class_R] = by_lag[0].classes
        num_classes = self.depth + 1
        return np.stack(
            [
                torch.bincount(part, minlength=num_classes).numpy()
                for part in class_R.long().split(lengths)
            ]
        )


def urgent_fracs(by_lag_TL: np.ndarray) -> list[float]:
    """The share of rows with a lag of at most 1, 2, ..., of all tables together."""
    by_lag = by_lag_TL.sum(0)
    fracs: list[float] = (np.cumsum(by_lag)[:-1] / by_lag.sum()).tolist()
    return fracs


@dataclass
class Distinct:
    """Means over the ranks and steps of some batches.

    Args:
        num_users: Users of a rank's batch.
        num_ids: Its ids in a table: histories and candidates.
        fracs: Distinct rows over these ids, by table.
    """

    num_ranks: int
    num_steps: int
    batch_size: int
    num_users: float
    num_ids: float
    fracs: dict[str, float]


@dataclass
class Order:
    """The figures of the batches of one order.

    Args:
        distinct: Of the steps classified by lag and the ones before, and of one of other batches.
        counts: Of a step, by number of ranks.
        num_steps: The steps whose rows are classified by lag; those before are not.
        lags: By table and "all", the share of distinct rows with a lag of at most 1, 2, ...
    """

    distinct: list[Distinct]
    counts: list[Counts]
    num_steps: int
    lags: dict[str, list[float]]


def lags_of(tables: Sequence[str], by_lag_TL: np.ndarray) -> dict[str, list[float]]:
    of_tables = {t: urgent_fracs(by_lag_TL[at : at + 1]) for at, t in enumerate(tables)}
    return {**of_tables, "all": urgent_fracs(by_lag_TL)}


class Reader:
    """Reads and routes the batches of one order.

    Args:
        log: The log.
        order: One of ``ORDERS``.
        options: Of the command.
    """

    def __init__(self, log: Log, order: str, options: argparse.Namespace) -> None:
        self._log, self._order, self._options = log, order, options
        self.num_rows = table_rows(log.catalogue)
        self._router = Router({DIM: COLUMNS}, Partition(self.num_rows), need_indices=False)

    def _batches(self, num_ranks: int, num_steps: int, batch_size: int) -> Iterator[np.ndarray]:
        """Of step after step, those of the ranks."""
        options, size = self._options, batch_size * num_ranks
        if self._order == SHUFFLED:
            found = shuffled(self._log, FIRST_SHUFFLED_DAY, batch_size, options.seed)
            yield from islice(found, num_ranks * num_steps)
            return
        listens = by_user(self._log, DAY, options.first_user, size * num_steps)
        for step in np.split(listens, num_steps):
            yield from (step[rank::num_ranks] for rank in range(num_ranks))

    def steps(
        self, num_ranks: int, num_steps: int, batch_size: int
    ) -> Iterator[list[tuple[Share, RankRows]]]:
        ranks = []
        for chosen in self._batches(num_ranks, num_steps, batch_size):
            share = read(self._log, chosen, HistoryRule())
            features = features_of(self._log.catalogue, share)
            ranks.append((share, rows_of(self._router, features)))
            if len(ranks) == num_ranks:
                yield ranks
                ranks = []
                print(f"{self._order}: a step of {num_ranks} x {batch_size}", file=sys.stderr)


def count_distinct(
    steps: Sequence[Sequence[tuple[Share, RankRows]]], tables: Sequence[str]
) -> Distinct:
    of_ranks = [rank for step in steps for rank in step]
    num_ids = sum(share.item_ids.size for share, _ in of_ranks)
    num_distinct = np.sum([rows.distinct.length_per_key() for _, rows in of_ranks], axis=0)
    return Distinct(
        num_ranks=len(steps[0]),
        num_steps=len(steps),
        batch_size=of_ranks[0][0].uids.size,
        num_users=float(np.mean([np.unique(share.uids).size for share, _ in of_ranks])),
        num_ids=num_ids / len(of_ranks),
        fracs=dict(zip(tables, (num_distinct / num_ids).tolist(), strict=True)),
    )


def count_order(log: Log, order: str, options: argparse.Namespace, partition: Partition) -> Order:
    """Count the exchange of one step, and the lags of consecutive steps of the first world size."""
    first, batch_size, local = options.ranks[0], options.batch_size, options.ranks_per_host
    reader = Reader(log, order, options)
    tables = list(reader.num_rows)
    lags, by_lag = Lags(reader.num_rows), np.zeros((len(tables), MAX_DEPTH + 1), np.int64)
    steps = []
    for step in reader.steps(first, options.steps, batch_size):
        found = lags.add([rows.distinct for _, rows in step])
        by_lag += found if len(steps) >= MAX_DEPTH else 0
        steps.append(step)
    distinct = [count_distinct(steps, tables)]
    # Shuffled batches do not depend on the number of ranks.
    ranks = [rank for step in steps[: None if order == SHUFFLED else 1] for rank in step]
    counts = []
    for num_ranks in options.ranks:
        if num_ranks > len(ranks):
            [ranks] = reader.steps(num_ranks, 1, batch_size)
        of_step = [rows for _, rows in ranks[:num_ranks]]
        counts += count(of_step, partition, batch_size, local)
    if options.also_batch_size:
        [step] = reader.steps(first, 1, options.also_batch_size)
        distinct.append(count_distinct([step], tables))
        of_step = [rows for _, rows in step]
        counts += count(of_step, partition, options.also_batch_size, local)
    return Order(distinct, counts, options.steps - MAX_DEPTH, lags_of(tables, by_lag))


def choose_hot(log: Log, options: argparse.Namespace) -> Partition:
    """The rows that shuffled batches of another seed look up most."""
    num_rows = table_rows(log.catalogue)
    counts = {table: np.zeros(num, np.int64) for table, num in num_rows.items()}
    batches = shuffled(log, FIRST_SHUFFLED_DAY, options.batch_size, options.seed + PROFILE_SEED)
    for chosen in islice(batches, NUM_PROFILED):
        share = read(log, chosen, HistoryRule())
        ids = {
            "item": share.item_ids,
            "album": log.catalogue.album_id_of[share.item_ids],
            "artist": log.catalogue.artist_id_of[share.item_ids],
            "uid": share.uids,
        }
        for table, counted in counts.items():
            counted += np.bincount(ids[table], minlength=counted.size)
    return choose_fraction(counts, hot_frac=options.hot_frac)


KUAIRAND_COLUMNS = tuple(
    Column(name, name, "video", is_mean=False) for name in ("watched", "video_id")
)


def count_kuairand(path: Path, num_ranks: int, batch_size: int) -> dict[str, Any]:
    """The lags of the table of videos, by time and shuffled, one epoch each."""
    schema = Dataset.open(path).schema
    num_rows = {t.name: t.num_rows for t in schema.tables if t.name == "video"}
    router = Router({DIM: KUAIRAND_COLUMNS}, Partition(num_rows), need_indices=False)
    found: dict[str, Any] = {"num_ranks": num_ranks, "batch_size": batch_size}
    for name, is_shuffled in (("by_time", False), (SHUFFLED, True)):
        loaders = [
            make_loader(
                path,
                "train",
                batch_size=batch_size,
                rank=rank,
                world_size=num_ranks,
                epochs=1,
                shuffle=is_shuffled,
                drop_last=True,
            )
            for rank in range(num_ranks)
        ]
        lags = Lags(num_rows)
        steps = [
            lags.add([rows_of(router, batch.sparse).distinct for batch in batches])
            for batches in zip(*loaders, strict=True)
        ]
        if len(steps) <= MAX_DEPTH:
            raise SystemExit(
                f"--kuairand {path}: expected more than {MAX_DEPTH} steps of {num_ranks} ranks of "
                f"{batch_size} samples, got {len(steps)}. Prepare more samples."
            )
        by_lag = np.sum(steps[MAX_DEPTH:], axis=0)
        num_steps = len(steps) - MAX_DEPTH
        found[name] = {
            "num_distinct": int(by_lag.sum()) / num_steps / num_ranks,
            "num_steps": num_steps,
            "lags": urgent_fracs(by_lag),
        }
    return found


# The command.


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--ranks-per-host", type=int, default=RANKS_PER_HOST)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--also-batch-size", type=int, default=1024, help="of the fewest ranks")
    parser.add_argument("--steps", type=int, default=MAX_DEPTH + 2)
    parser.add_argument("--hot-frac", type=float, default=0.002)
    parser.add_argument("--kuairand", type=Path, default=None, help="a prepared dataset")
    parser.add_argument("--users", type=int, default=NUM_USERS)
    parser.add_argument("--first-user", type=int, default=FIRST_USER)
    parser.add_argument("--catalogue-frac", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--page", type=Path, default=None)
    options = parser.parse_args(arguments)
    if options.steps <= MAX_DEPTH:
        parser.error(f"--steps: expected more than {MAX_DEPTH}, got {options.steps}.")
    if any(num % options.ranks_per_host for num in options.ranks):
        parser.error(
            f"--ranks: expected multiples of {options.ranks_per_host}, got {options.ranks}."
        )
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    catalogue = Catalogue(options.seed, options.catalogue_frac)
    log = KeptLog(catalogue, options.users, options.seed)
    partition = choose_hot(log, options)
    orders = {order: count_order(log, order, options, partition) for order in ORDERS}
    document: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "ranks_per_host": options.ranks_per_host,
        "dim": DIM,
        "hot_frac": options.hot_frac,
        "num_hot": {table: partition.num_hot(table) for table in partition.num_rows},
        "num_rows": dict(partition.num_rows),
        "num_profiled": NUM_PROFILED,
        "orders": {name: asdict(order) for name, order in orders.items()},
        "kuairand": [
            count_kuairand(options.kuairand, *shape)
            for shape in (KUAIRAND_SHAPES if options.kuairand else ())
        ],
        "processor": machine_facts()["processor"],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchrec": torchrec.__version__,
        "processor_s": round(time.process_time()),
    }
    for name, order in orders.items():
        for of, counts in zip(document["orders"][name]["counts"], order.counts, strict=True):
            of["peak_bytes"] = counts.peak_bytes
    if options.page is not None:
        sequence_counts_page.write(options.page, document)
    print(json.dumps(document))


if __name__ == "__main__":
    main()
