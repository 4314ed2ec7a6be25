"""Assigns the samples of a global batch to ranks so that every rank has the same work.

Samples of different lengths take different times, and all ranks wait for the one with most work.
Moving samples of a global batch between ranks changes neither the batch nor the update: the loss is
the mean over the global batch, however many samples a rank has. Every rank reads the lengths of the
whole global batch and computes the same assignment, so nothing is sent for it. The figures are in
benchmarks/results/token_balance.md.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hotrec.types import Rows


@dataclass(frozen=True)
class SampleWork:
    """The work of a sample, from the lengths L of its bags or sequences, in any unit.

    It is ``per_sample`` plus the sum over the features of ``per_id`` L + ``per_pair`` L^2. All are
    whole numbers, such as floating-point operations, so that ranks on different processors compute
    the same.

    Args:
        per_sample: Work that does not depend on the lengths, 1 or more.
        per_id: Work per id, by feature; a missing feature has none.
        per_pair: Work per pair of ids of a feature that attends to itself.
        max_length: Of how many ids of a sequence there is work; those before are left out.
    """

    per_sample: int = 1
    per_id: Mapping[str, int] = field(default_factory=dict)
    per_pair: Mapping[str, int] = field(default_factory=dict)
    max_length: int = 2**31 - 1

    def __post_init__(self) -> None:
        least = min([0, *self.per_id.values(), *self.per_pair.values()])
        if self.per_sample < 1 or least < 0:
            raise ValueError(
                f"work of a sample: expected per_sample of at least 1 and others of at least 0, "
                f"got {self.per_sample} and {least}. Count its operations."
            )

    def of(self, features: Sequence[str], lengths_FS: npt.NDArray[np.int32]) -> Rows:
        """The work of each sample, int64 (S,).

        Args:
            features: The names of the F features.
            lengths_FS: int32 (F * S,), feature-major.
        """
        lengths = lengths_FS.reshape(len(features), -1)
        work_S = np.full(lengths.shape[1], self.per_sample, np.int64)
        for name, length_S in zip(features, lengths, strict=True):
            per_id, per_pair = self.per_id.get(name, 0), self.per_pair.get(name, 0)
            length_S = np.minimum(length_S.astype(np.int64), self.max_length)
            work_S += (per_id + per_pair * length_S) * length_S
        return work_S


def assign_by_work(work_S: Rows, num_ranks: int) -> Rows:
    """Assign each sample to a rank, the one with most work first, to the rank with least so far.

    Equal samples are taken in the order of the batch, and of equal ranks the lowest. The busiest
    rank has at most 4/3 - 1/(3 W) times the work that it has in the best assignment (Graham 1969,
    "Bounds on multiprocessing timing anomalies", longest processing time). If there are at least
    as many samples as ranks, each rank gets one.

    Args:
        work_S: int64 (S,), each 1 or more.
        num_ranks: W.

    Returns:
        The rank of each sample, int64 (S,).
    """
    rank_S = np.empty(work_S.size, np.int64)
    loads = [(0, rank) for rank in range(num_ranks)]
    order = np.argsort(-work_S, kind="stable")
    for sample, work in zip(order.tolist(), work_S[order].tolist(), strict=True):
        load, rank = loads[0]
        rank_S[sample] = rank
        heapq.heapreplace(loads, (load + work, rank))
    return rank_S


@dataclass(frozen=True)
class ByTokens:
    """``assign_by_work`` for the batches of a loader; picklable for its workers.

    Args:
        features: The names of the features of a batch.
        work: The work of a sample.
    """

    features: tuple[str, ...]
    work: SampleWork

    def __call__(self, lengths_FS: npt.NDArray[np.int32], num_ranks: int) -> Rows:
        """The rank of each sample of a global batch, int64 (S,), from int32 (F * S,)."""
        return assign_by_work(self.work.of(self.features, lengths_FS), num_ranks)
