"""Counts the bytes saved by choosing which rank computes which sample of a global batch.

    python benchmarks/locality.py [--dataset PATH ...] [--page benchmarks/results/locality.md
        [--prepared-by ARGUMENTS ...]] [--num-batches 3] [--hot-rows 0 8000 20000] [--hosts]

The global batch, and so the update, is unchanged; samples only change ranks. Counted for samples of
the tables of `hotrec bench` (Zipf 1.05) and for the training samples of prepared datasets. With
--hosts it counts what crosses the network between hosts of several ranks instead, by hotrec's own
assignment, and writes only that part of the page. The last line on stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks import locality_page
from benchmarks.locality_samples import Source, dataset_source, zipf_source
from hotrec.data import locality
from hotrec.types import Schema

DIM = 64
VALUE_BYTES = 4
CASES = ((2, 2048), (4, 2048), (8, 2048), (2, 8192), (4, 8192), (8, 8192))
# For a sample too small for 8 ranks of 2048.
SMALL_CASE = (8, 1024)
# Hosts, and ranks of each.
HOST_CASES = ((2, 2), (2, 4), (8, 8))
# What a sample that changes ranks takes along, if ranks do not read each other's share of the log.
DENSE_AND_LABEL_BYTES = (13 + 1) * 4
ID_BYTES = 4

Owners = np.ndarray  # int64 (U,), the rank that holds each distinct row
Assignment = np.ndarray  # int64 (S,), the rank of each sample


@dataclass(frozen=True)
class GlobalBatch:
    """The distinct rows that each sample of a global batch reads.

    Args:
        reads_SU: 1 where a sample reads a row, CSR (S, U).
        owner_U: int64 (U,), the rank that holds a row.
        is_hot_U: bool (U,), whether every rank has a replica of it.
        num_ids: ids of all samples, repeated ones included.
        num_ranks: W; rank r's samples are [r * S / W, (r + 1) * S / W) today.
    """

    reads_SU: sparse.csr_matrix
    owner_U: Owners
    is_hot_U: np.ndarray
    num_ids: int
    num_ranks: int

    @property
    def num_samples(self) -> int:
        return int(self.reads_SU.shape[0])

    def today(self) -> Assignment:
        return np.repeat(np.arange(self.num_ranks), self.num_samples // self.num_ranks)

    def cold(self) -> tuple[sparse.csr_matrix, Owners]:
        """The cold part of ``reads_SU``, and the owners of its rows."""
        is_cold = ~self.is_hot_U
        return self.reads_SU[:, is_cold], self.owner_U[is_cold]


def make_batch(
    ranks: Sequence[KeyedJaggedTensor], schema: Schema, hot: Mapping[str, np.ndarray]
) -> GlobalBatch:
    """Join the batches of all ranks.

    Args:
        ranks: the ids of each rank, jagged (F, B).
        schema: tables, for how many rows there are and what each feature reads.
        hot: bool (N,) by table.
    """
    begins = dict(
        zip(
            (table.name for table in schema.tables),
            np.cumsum([0] + [table.num_rows for table in schema.tables[:-1]]),
            strict=True,
        )
    )
    samples, rows = [], []
    for rank, ids in enumerate(ranks):
        jagged = ids.to_dict()
        for feature in schema.features:
            lengths = jagged[feature.name].lengths().numpy()
            samples.append(np.repeat(np.arange(lengths.size) + rank * lengths.size, lengths))
            rows.append(jagged[feature.name].values().numpy() + begins[feature.table])
    sample_K, row_K = np.concatenate(samples), np.concatenate(rows)
    row_U, place_K = np.unique(row_K, return_inverse=True)
    shape = (sum(ids.stride() for ids in ranks), row_U.size)
    reads = sparse.csr_matrix((np.ones(sample_K.size, np.int32), (sample_K, place_K)), shape)
    reads.data[:] = 1
    num_ranks = len(ranks)
    # Row-wise shards are contiguous.
    owner = np.concatenate(
        [np.arange(t.num_rows) // -(-t.num_rows // num_ranks) for t in schema.tables]
    )
    is_hot = np.concatenate([hot[table.name] for table in schema.tables])
    return GlobalBatch(reads, owner[row_U], is_hot[row_U], sample_K.size, num_ranks)


def count_reads(reads_SU: sparse.csr_matrix, assignment: Assignment, num_ranks: int) -> np.ndarray:
    """Samples of each rank that read each row, int (U, W)."""
    samples = np.arange(assignment.size)
    ones = np.ones(assignment.size, np.int32)
    by_rank_WS = sparse.csr_matrix((ones, (assignment, samples)), (num_ranks, assignment.size))
    return np.ascontiguousarray((by_rank_WS @ reads_SU).toarray().T)


def sent_bytes(batch: GlobalBatch, assignment: Assignment) -> dict[str, float]:
    """Bytes of embedding rows and gradients that a rank sends in a step.

    ``cold`` and ``hot`` are means over the ranks, ``largest_cold`` is of the rank that sends most.
    Cold: each row from its owner to every other rank that reads it, and its gradient back. Hot:
    gradients with their slots, by the cheaper of all-gathering what each rank touched (padded to
    the largest) and of adding up at an owner, then all-gathering the union.
    """
    num_ranks = batch.num_ranks
    is_read_UW = count_reads(batch.reads_SU, assignment, num_ranks) > 0
    is_own_UW = batch.owner_U[:, None] == np.arange(num_ranks)
    asked_UW = (is_read_UW & ~is_own_UW)[~batch.is_hot_U]
    rows_sent_W = np.bincount(
        batch.owner_U[~batch.is_hot_U], weights=asked_UW.sum(1), minlength=num_ranks
    )
    gradients_sent_W = asked_UW.sum(0)
    row_bytes = DIM * VALUE_BYTES
    hot_UW = is_read_UW[batch.is_hot_U]
    gathered = num_ranks * (num_ranks - 1) * hot_UW.sum(0).max(initial=0)
    to_owner = np.count_nonzero(hot_UW & ~is_own_UW[batch.is_hot_U])
    reduced = to_owner + (num_ranks - 1) * np.count_nonzero(hot_UW.any(1))
    hot_bytes = min(gathered, reduced) * (DIM + 1) * VALUE_BYTES / num_ranks
    return {
        "cold": 2 * float(gradients_sent_W.mean()) * row_bytes,
        "hot": float(hot_bytes),
        "largest_cold": float((rows_sent_W + gradients_sent_W).max()) * row_bytes,
    }


def total_bytes(batch: GlobalBatch, assignment: Assignment) -> float:
    """Mean over the ranks, hot and cold."""
    sent = sent_bytes(batch, assignment)
    return sent["cold"] + sent["hot"]


def moved_bytes(batch: GlobalBatch, assignment: Assignment) -> float:
    """Bytes of the samples that a rank sends to others, mean over the ranks."""
    frac = np.count_nonzero(assignment != batch.today()) / batch.num_samples
    of_samples = batch.num_ids * ID_BYTES + batch.num_samples * DENSE_AND_LABEL_BYTES
    return float(frac * of_samples / batch.num_ranks)


def assign_evenly(score_SW: np.ndarray) -> Assignment:
    """Give every sample a rank where its score is high, and every rank as many samples.

    Samples choose in order of how much they lose by their second choice; those whose first choice
    is full choose again among the rest.
    """
    num_samples, num_ranks = score_SW.shape
    room = np.full(num_ranks, num_samples // num_ranks)
    score_SW = score_SW.astype(np.float64, copy=True)
    assignment = np.full(num_samples, -1)
    left = np.arange(num_samples)
    while left.size:
        score_SW[:, room == 0] = -np.inf
        open_ranks = np.flatnonzero(room)
        score = score_SW[left][:, open_ranks]
        choice = open_ranks[score.argmax(1)]
        if open_ranks.size > 1:
            best = np.partition(score, -2, axis=1)
            keen = best[:, -2] - best[:, -1]
        else:
            keen = np.zeros(left.size)
        order = np.argsort(keen, kind="stable")
        taken = np.zeros(left.size, bool)
        for rank in open_ranks:
            first = order[choice[order] == rank][: room[rank]]
            assignment[left[first]] = rank
            room[rank] -= first.size
            taken[first] = True
        left = left[~taken]
    return assignment


def assign_by_owner(batch: GlobalBatch) -> Assignment:
    """Assign to the rank that owns most of a sample's cold rows; rows read by many count less."""
    cold_SU, owner_U = batch.cold()
    num_readers_U = np.maximum(np.asarray(cold_SU.sum(0)).ravel(), 1)
    return assign_evenly(_score_owners(cold_SU, owner_U, 1.0 / num_readers_U, batch.num_ranks))


def _score_owners(
    cold_SU: sparse.csr_matrix, owner_U: Owners, weight_U: np.ndarray, num_ranks: int
) -> np.ndarray:
    own_UW = sparse.csr_matrix(
        (weight_U, (np.arange(owner_U.size), owner_U)), (owner_U.size, num_ranks)
    )
    score: np.ndarray = (cold_SU @ own_UW).toarray()
    return score


def assign_by_labels(batch: GlobalBatch, rounds: int = 8) -> Assignment:
    """Label propagation: samples follow the owners of their rows and those who share them."""
    cold_SU, owner_U = batch.cold()
    num_readers_U = np.maximum(np.asarray(cold_SU.sum(0)).ravel(), 1)
    best = assignment = assign_by_owner(batch)
    least = total_bytes(batch, best)
    own_UW = owner_U[:, None] == np.arange(batch.num_ranks)
    for _ in range(rounds):
        shares_UW = count_reads(cold_SU, assignment, batch.num_ranks) + 1.0 * own_UW
        # Rows that all ranks read anyway pull nobody.
        pull_UW = shares_UW / num_readers_U[:, None] ** 1.5
        assignment = assign_evenly(cold_SU @ pull_UW)
        num_bytes = total_bytes(batch, assignment)
        if num_bytes < least:
            best, least = assignment, num_bytes
    return best


def refine(batch: GlobalBatch, assignment: Assignment, rounds: int = 30) -> Assignment:
    """Swap samples between ranks as long as rows sent become fewer; counts cold rows exactly."""
    cold_SU, owner_U = batch.cold()
    num_ranks = batch.num_ranks
    sample_K = np.repeat(np.arange(batch.num_samples), np.diff(cold_SU.indptr))
    is_own_UW = owner_U[:, None] == np.arange(num_ranks)
    best, least = assignment, np.inf
    rng = np.random.default_rng(0)
    for _ in range(rounds):
        num_UW = count_reads(cold_SU, assignment, num_ranks)
        num_sent = np.count_nonzero((num_UW > 0) & ~is_own_UW)
        if num_sent < least:
            best, least = assignment, num_sent
        # Rows that each sample makes a rank ask for: those that nobody else there reads.
        others_KW = num_UW[cold_SU.indices]
        others_KW[np.arange(sample_K.size), assignment[sample_K]] -= 1
        asks_KW = (others_KW == 0) & ~is_own_UW[cold_SU.indices]
        ones_SK = sparse.csr_matrix(
            (np.ones(sample_K.size, np.int32), np.arange(sample_K.size), cold_SU.indptr)
        )
        cost_SW = ones_SK @ asks_KW.astype(np.int32)
        gain_SW = cost_SW[np.arange(batch.num_samples), assignment][:, None] - cost_SW
        assignment = _swap(assignment, gain_SW, rng)
    return best


def _swap(assignment: Assignment, gain_SW: np.ndarray, rng: np.random.Generator) -> Assignment:
    """Swap pairs of samples that gain by it, each sample once, half of those that could."""
    num_ranks = gain_SW.shape[1]
    assignment = assignment.copy()
    is_free = rng.random(assignment.size) < 0.5  # neighbours that both move spoil each other's gain
    pairs = [(a, b) for a in range(num_ranks) for b in range(a)]
    for pair in rng.permutation(len(pairs)):
        a, b = pairs[pair]
        from_a = np.flatnonzero((assignment == a) & is_free)
        from_b = np.flatnonzero((assignment == b) & is_free)
        from_a = from_a[np.argsort(-gain_SW[from_a, b], kind="stable")]
        from_b = from_b[np.argsort(-gain_SW[from_b, a], kind="stable")]
        most = min(from_a.size, from_b.size)
        gain = gain_SW[from_a[:most], b] + gain_SW[from_b[:most], a]
        num = int(np.count_nonzero(np.cumprod(gain > 0)))
        assignment[from_a[:num]], assignment[from_b[:num]] = b, a
        is_free[from_a[:num]] = is_free[from_b[:num]] = False
    return assignment


Assign = Callable[[GlobalBatch], Assignment]
ASSIGNMENTS: Mapping[str, Assign] = {
    "as read": GlobalBatch.today,
    "by owner": assign_by_owner,
    "by labels": assign_by_labels,
    "by labels, then swaps": lambda batch: refine(batch, assign_by_labels(batch)),
}


def measure(source: Source, num_hot: int, num_ranks: int, size: int, number: int) -> dict[str, Any]:
    """Means over global batches, by assignment."""
    hot = source.hot(num_hot)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ASSIGNMENTS}
    for ranks in source.read(num_ranks, size, number):
        batch = make_batch(ranks, source.schema, hot)
        for name, assign in ASSIGNMENTS.items():
            begin = time.perf_counter()
            assignment = assign(batch)
            seconds = time.perf_counter() - begin
            assert np.array_equal(
                np.bincount(assignment, minlength=num_ranks), np.full(num_ranks, size)
            ), name
            figures = sent_bytes(batch, assignment)
            figures |= {"moved": moved_bytes(batch, assignment), "seconds": seconds}
            found[name].append(figures)
    return {
        "source": source.name,
        "num_hot": num_hot,
        "num_ranks": num_ranks,
        "batch_size": size,
        "num_batches": len(found["as read"]),
        "assignments": {
            name: {key: float(np.mean([f[key] for f in each])) for key in each[0]}
            for name, each in found.items()
        },
    }


def measure_hosts(
    source: Source, num_hot: int, hosts: tuple[int, int], number: int
) -> dict[str, Any]:
    """Bytes of cold rows that a host sends in a step, means over hosts and global batches.

    With 2,048 samples a rank, or the largest power of two that the source has samples for.
    """
    num_hosts, ranks_per_host = hosts
    num_ranks = num_hosts * ranks_per_host
    size = 2048
    while num_ranks * size > (source.num_samples or np.inf):
        size //= 2
    host_W = np.repeat(np.arange(num_hosts), ranks_per_host)
    hot, shares = source.hot(num_hot), np.full(num_ranks, size)
    found: dict[str, list[dict[str, float]]] = {}
    for ranks in source.read(num_ranks, size, number):
        batch = make_batch(ranks, source.schema, hot)
        cold_SU, owner_U = batch.cold()
        sample_K = np.repeat(np.arange(batch.num_samples), np.diff(cold_SU.indptr))
        row_K = cold_SU.indices.astype(np.int64)
        reads = owner_U[row_K], row_K, sample_K, shares
        for name, rank_S in {
            "as read": batch.today(),
            "to ranks": locality.assign_by_owner(*reads),
            "to hosts": locality.assign_by_owner(*reads, host_W),
        }.items():
            crossing = _crossing_rows(rank_S[sample_K], row_K, owner_U, ranks_per_host)
            num_bytes = {k: 2 * num * DIM * VALUE_BYTES / num_hosts for k, num in crossing.items()}
            found.setdefault(name, []).append(num_bytes)
    return {
        "source": source.name,
        "num_hot": num_hot,
        "num_hosts": num_hosts,
        "ranks_per_host": ranks_per_host,
        "batch_size": size,
        "num_batches": len(found["as read"]),
        "assignments": {
            name: {key: float(np.mean([f[key] for f in each])) for key in each[0]}
            for name, each in found.items()
        },
    }


def _crossing_rows(
    rank_K: np.ndarray, row_K: np.ndarray, owner_U: Owners, ranks_per_host: int
) -> dict[str, int]:
    """Rows that all hosts get from others in one level and in two, and those that ranks get inside.

    Inside: from other ranks of the host, in one level.
    """

    def distinct(reader_K: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The reader and the owner of each row that a reader reads."""
        reader, row = np.divmod(np.unique(reader_K * owner_U.size + row_K), owner_U.size)
        return reader, owner_U[row]

    (rank, owner), (host, owner_of_host) = distinct(rank_K), distinct(rank_K // ranks_per_host)
    is_inside = owner // ranks_per_host == rank // ranks_per_host
    return {
        "one_level": int(np.count_nonzero(~is_inside)),
        "two_levels": int(np.count_nonzero(owner_of_host // ranks_per_host != host)),
        "inside": int(np.count_nonzero(is_inside & (owner != rank))),
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", type=Path, action="append", default=[], help="prepared")
    parser.add_argument("--num-batches", type=int, default=3)
    parser.add_argument("--hot-rows", type=int, nargs="+", default=(0, 8_000, 20_000))
    parser.add_argument("--page", type=Path, help="file for the tables")
    parser.add_argument("--hosts", action="store_true", help="hosts of several ranks")
    parser.add_argument("--prepared-by", nargs="+", default=(), metavar="ARGUMENTS")
    return parser.parse_args(arguments)


def count_hosts(parsed: argparse.Namespace) -> None:
    """The part about hosts."""
    results = []
    for source in (zipf_source(), *map(dataset_source, parsed.dataset)):
        for hosts in HOST_CASES:
            for num_hot in parsed.hot_rows:
                found = measure_hosts(source, num_hot, hosts, parsed.num_batches)
                results.append(found)
                print(*locality_page.as_host_row(found), file=sys.stderr, flush=True)
    if parsed.page:
        locality_page.write_hosts(parsed.page, results)
    print(json.dumps(results))


def main(arguments: Sequence[str] | None = None) -> None:
    parsed = parse(arguments)
    if parsed.hosts:
        count_hosts(parsed)
        return
    results = []
    for source in (zipf_source(), *map(dataset_source, parsed.dataset)):
        fitting = [c for c in CASES if c[0] * c[1] <= (source.num_samples or np.inf)]
        is_small = len(fitting) < len(CASES) and (8, 2048) not in fitting
        for num_ranks, size in (*fitting, *([SMALL_CASE] if is_small else [])):
            for num_hot in parsed.hot_rows:
                found = measure(source, num_hot, num_ranks, size, parsed.num_batches)
                results.append(found)
                print(locality_page.as_line(found), file=sys.stderr, flush=True)
    if parsed.page:
        locality_page.write(parsed.page, results, parsed.prepared_by)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
