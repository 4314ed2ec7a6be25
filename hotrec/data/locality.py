"""Assigns the samples of a global batch to the ranks that own most of their cold rows.

A cold row and its gradient are exchanged only if a rank reads the row without owning it. With hosts
of several ranks a sample first goes to the host whose ranks own most of them, which alone decides
what crosses the network, then to a rank of that host. Moving
samples of a global batch between ranks changes neither the batch nor the update. Every rank reads
the ids of the whole global batch and computes the same assignment, so nothing is sent for it. The
figures behind the rule are in benchmarks/results/locality.md.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from hotrec.types import Rows, RowShares, Schema

NOBODY = -1

# (values int64 (K,), lengths int32 (F * S,), both feature-major, samples per rank int64 (W,)) ->
# the rank of each sample of the global batch, int64 (S,). The same on every rank.
Assign = Callable[[Rows, npt.NDArray[np.int32], Rows], Rows]


def assign_by_owner(
    owner_K: Rows, row_K: Rows, sample_K: Rows, shares_W: Rows, host_W: Rows | None = None
) -> Rows:
    """Assign each sample to the rank that owns most of its cold rows, within each rank's share.

    The score of sample s on rank r is the sum over the ids of s whose row r owns of 1 / (ids of the
    global batch with this row): a row that many samples read is sent to most ranks anyway and
    hardly counts. Samples choose the rank with their best score (the lowest one if several are
    equal), those that would lose most by their second choice first, then in the order of the batch;
    those whose choice is full choose again among the ranks with room, at most W times.

    With several hosts, of which one has several ranks, samples choose a host likewise, by its score
    and its share, the sums of those of its ranks; then a rank of this host.

    Args:
        owner_K: int64 (K,), the rank that owns each id's row, ``NOBODY`` for hot rows and others
            that every rank reads at the same cost.
        row_K: int64 (K,), the row, numbered over all tables.
        sample_K: int64 (K,), in 0..S-1.
        shares_W: int64 (W,), samples of each rank; their sum is S.
        host_W: int64 (W,), the host of each rank, in 0..H-1; None for one host.

    Returns:
        The rank of each sample, int64 (S,). Sums are in the order of the ids, so that ranks on
        different processors get the same result.
    """
    num_samples, num_ranks = int(shares_W.sum()), shares_W.size
    is_owned = owner_K != NOBODY
    owner_K, row_K, sample_K = owner_K[is_owned], row_K[is_owned], sample_K[is_owned]
    _, place_K, num_U = np.unique(row_K, return_inverse=True, return_counts=True)
    weight_K = (1.0 / num_U)[place_K]

    def score(place_K: Rows, num_places: int) -> npt.NDArray[np.float64]:
        cell_K = sample_K * num_places + place_K
        sums = np.bincount(cell_K, weight_K, minlength=num_samples * num_places)
        return sums.reshape(num_samples, num_places).astype(np.float64, copy=False)

    score_SW = score(owner_K, num_ranks)
    num_hosts = 1 if host_W is None else int(host_W.max()) + 1
    if host_W is None or num_hosts in (1, num_ranks):
        return _fill(score_SW, shares_W)
    shares_H = np.bincount(host_W, shares_W, minlength=num_hosts).astype(np.int64)
    host_S = _fill(score(host_W[owner_K], num_hosts), shares_H)
    rank_S = np.empty(num_samples, np.int64)
    for host in range(num_hosts):
        here, ranks = np.flatnonzero(host_S == host), np.flatnonzero(host_W == host)
        rank_S[here] = ranks[_fill(score_SW[np.ix_(here, ranks)], shares_W[ranks])]
    return rank_S


def _fill(score_SW: npt.NDArray[np.float64], shares_W: Rows) -> Rows:
    """Assign each sample to a rank with a high score, within each rank's share."""
    room_W = shares_W.copy()
    rank_S = np.full(score_SW.shape[0], NOBODY, np.int64)
    left = np.arange(rank_S.size)
    while left.size:  # each round places all remaining samples or fills a rank
        open_ranks = np.flatnonzero(room_W)
        score = score_SW[np.ix_(left, open_ranks)]
        choice = open_ranks[score.argmax(axis=1)]
        keenness = np.zeros(left.size)
        if open_ranks.size > 1:
            best = np.partition(score, -2, axis=1)
            keenness = best[:, -1] - best[:, -2]
        order = np.argsort(-keenness, kind="stable")
        ordered_choice = choice[order]
        for rank in open_ranks.tolist():
            placed = left[order[ordered_choice == rank][: room_W[rank]]]
            rank_S[placed] = rank
            room_W[rank] -= placed.size
        left = left[rank_S[left] == NOBODY]
    return rank_S


class ByOwner:
    """``assign_by_owner`` for the batches of a loader; picklable for its workers.

    Needs one bit per row of the tables with hot rows.

    Args:
        schema: The tables and the features that read them.
        hot_rows: int64 (H,) by table whose other rows are exchanged (``RowShares``); the rows of a
            missing table have no owners.
        world_size: Number of ranks W.
        host_of_rank: The host of every rank; empty for one host.
    """

    def __init__(
        self,
        schema: Schema,
        hot_rows: Mapping[str, Rows],
        world_size: int,
        host_of_rank: Sequence[Hashable] = (),
    ) -> None:
        index = {table.name: position for position, table in enumerate(schema.tables)}
        num_rows_T = np.array([table.num_rows for table in schema.tables], np.int64)
        self._begin_T = begin_T = np.cumsum(num_rows_T) - num_rows_T
        self._num_features, self._world_size = len(schema.features), world_size
        self._begin_F = begin_T[[index[feature.table] for feature in schema.features]]
        shifts = [RowShares(table.name, world_size).shift for table in schema.tables]
        self._shift_T = np.array(shifts, np.int64) - begin_T
        self._is_owned_T = np.array([table.name in hot_rows for table in schema.tables])
        number_of = {host: number for number, host in enumerate(dict.fromkeys(host_of_rank))}
        hosts = [number_of[host] for host in host_of_rank]
        self._host_W = np.array(hosts, np.int64) if hosts else None
        self._is_hot_bits = np.zeros(-(-int(num_rows_T.sum()) // 8), np.uint8)
        for name, rows in hot_rows.items():
            key_H = rows + begin_T[index[name]]
            np.bitwise_or.at(self._is_hot_bits, key_H >> 3, _bit(key_H))

    def owners(self, key_K: Rows) -> Rows:
        """The rank that owns each row, ``NOBODY`` for hot ones; rows numbered over all tables."""
        table_K = np.searchsorted(self._begin_T, key_K, side="right") - 1
        owner_K = (key_K + self._shift_T[table_K]) % self._world_size
        is_hot_K = (self._is_hot_bits[key_K >> 3] & _bit(key_K)) != 0
        owner_K[is_hot_K | ~self._is_owned_T[table_K]] = NOBODY
        return owner_K

    def __call__(self, values_K: Rows, lengths_FS: npt.NDArray[np.int32], shares_W: Rows) -> Rows:
        """The rank of each sample, int64 (S,); see ``Assign``."""
        lengths = lengths_FS.reshape(self._num_features, -1)
        key_K = values_K + np.repeat(self._begin_F, lengths.sum(axis=1))
        samples = np.arange(lengths.shape[1])
        sample_K = np.repeat(np.tile(samples, self._num_features), lengths_FS)
        return assign_by_owner(self.owners(key_K), key_K, sample_K, shares_W, self._host_W)


def _bit(key_K: Rows) -> npt.NDArray[np.uint8]:
    """The bit of each row in its byte."""
    return np.left_shift(np.uint8(1), (key_K & 7).astype(np.uint8))
