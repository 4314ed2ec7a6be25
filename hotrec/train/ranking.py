"""Recall@k and NDCG@k: where a sample's item stands among all items, by the user's vector.

The catalogue is all items of the training split, each described by the columns of its last sample
there. Its vectors are computed once per evaluation, by all ranks together; then each rank finds the
places of the items of its own positive samples, and rank 0 measures all places.

A place is 1 plus the number of items with a higher score; among equal scores, a lower row number
comes first. It is exact: each vector is rounded to so many bits of its largest value (23 for 64
values, 21 for 1024; float32 has 24) that every product and sum is an exact float64. So no order of
additions, batch or number of ranks changes a place, and equal vectors have equal scores.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hotrec.data.batch import Batch

Numbers = npt.NDArray[np.number[Any]]
Rows = npt.NDArray[np.int64]

RECALL, NDCG, SAMPLES_FRAC = "recall_at", "ndcg_at", "ranked_samples_frac"
# Digits of float64, of which products and sums may use all.
_EXACT_BITS = 53
# Bounds the memory of the scores that are held at once, 32 MiB.
_USERS_AT_ONCE, _ITEMS_AT_ONCE = 512, 8192


@dataclass(frozen=True)
class Ranking:
    """How evaluations rank items.

    Args:
        ks: Lengths of the lists.
        catalogue: Batches with the items to rank, the same number on every rank; restartable.
    """

    ks: tuple[int, ...]
    catalogue: Iterable[Batch]


def find_places(
    users_SD: torch.Tensor,
    targets_S: torch.Tensor,
    items_MD: torch.Tensor,
    ids_M: torch.Tensor,
    seen_SN: torch.Tensor | None = None,
) -> torch.Tensor:
    """The place of each user's item among all items, int64 (S,), the first is 1.

    O(S M D) time; the memory of the vectors, and of a block of scores.

    Args:
        users_SD: Vectors of the users, finite.
        targets_S: Int64, the item of each user.
        items_MD: Vectors of the items, finite.
        ids_M: Int64, the items, increasing.
        seen_SN: Int64, for each user the items that are left out, in any order and number; its own
            one is not, and numbers that are no item are ignored. None for none.

    Returns:
        Places; 0 for an item that is not among ``ids_M``.

    Raises:
        ValueError: If a vector is not finite.
    """
    for vectors in (users_SD, items_MD):
        if not bool(vectors.isfinite().all()):
            raise ValueError(
                "evaluation: expected finite vectors of users and items, got others. The model has "
                "diverged; lower the learning rate."
            )
    places_S = torch.zeros_like(targets_S)
    if not ids_M.numel():
        return places_S
    at_S = torch.searchsorted(ids_M, targets_S).clamp(max=ids_M.numel() - 1)
    is_known_S = ids_M[at_S] == targets_S
    at_P, users_PD = at_S[is_known_S], _rounded(users_SD[is_known_S])
    scores_P = (users_PD * _rounded(items_MD[at_P])).sum(1)
    places_P = torch.ones_like(at_P)
    for first in range(0, ids_M.numel(), _ITEMS_AT_ONCE):
        items_CD = _rounded(items_MD[first : first + _ITEMS_AT_ONCE])
        numbers_C = torch.arange(first, first + len(items_CD), device=at_P.device)
        for begin in range(0, at_P.numel(), _USERS_AT_ONCE):
            block = slice(begin, begin + _USERS_AT_ONCE)
            scores_UC = users_PD[block] @ items_CD.t()
            is_before_UC = _is_before(scores_UC, numbers_C, scores_P[block], at_P[block])
            places_P[block] += is_before_UC.sum(1)
    if seen_SN is not None:
        seen_PN = seen_SN[is_known_S].sort(1).values
        num_users = max(1, _ITEMS_AT_ONCE // max(1, seen_PN.size(1)))
        for begin in range(0, at_P.numel(), num_users):
            block = slice(begin, begin + num_users)
            seen_UN = seen_PN[block]
            at_UN = torch.searchsorted(ids_M, seen_UN).clamp(max=ids_M.numel() - 1)
            is_item_UN = ids_M[at_UN] == seen_UN
            is_item_UN[:, 1:] &= seen_UN[:, 1:] != seen_UN[:, :-1]  # each once
            seen_UND = _rounded(items_MD[at_UN.flatten()]).unflatten(0, at_UN.shape)
            scores_UN = (users_PD[block].unsqueeze(1) * seen_UND).sum(2)
            is_before_UN = _is_before(scores_UN, at_UN, scores_P[block], at_P[block])
            places_P[block] -= (is_item_UN & is_before_UN).sum(1)
    places_S[is_known_S] = places_P
    return places_S


def _is_before(
    scores_UC: torch.Tensor, numbers: torch.Tensor, own_U: torch.Tensor, at_U: torch.Tensor
) -> torch.Tensor:
    """Whether items come before the users' own ones, bool (U, C); those themselves do not.

    Args:
        scores_UC: Scores of the items.
        numbers: Their numbers, (C,) or (U, C).
        own_U: Scores of the own items.
        at_U: Their numbers.
    """
    own_U1, at_U1 = own_U.unsqueeze(1), at_U.unsqueeze(1)
    return (scores_UC > own_U1) | ((scores_UC == own_U1) & (numbers < at_U1))


def _rounded(vectors_ND: torch.Tensor) -> torch.Tensor:
    """Vectors in float64, each rounded to multiples of a power of two that fits its largest value.

    Dot products of two such vectors are sums of integers below 2^53, times a power of two.
    """
    one = 2.0 ** ((_EXACT_BITS - (vectors_ND.size(1) - 1).bit_length()) // 2)
    exact_ND = vectors_ND.double()
    largest_N1 = exact_ND.abs().amax(1, keepdim=True)
    mantissas_N1, _ = torch.frexp(largest_N1)
    # A power of two above all values; torch.ldexp computes those of integers in float32.
    powers_N1 = torch.where(largest_N1 > 0, largest_N1 / mantissas_N1, 1.0)
    return (exact_ND / powers_N1 * one).round() / one * powers_N1


def measure_ranking(
    places: Rows, ks: Sequence[int], weights: Numbers | None = None, queries: Rows | None = None
) -> dict[str, Any]:
    """Recall@k and NDCG@k, the mean over queries.

    recall@k is the share of a query's relevant items among the first k, and NDCG@k is sum(1 /
    log2(place + 1)) over those, divided by that of an order with all relevant items first. With one
    relevant item per query, that is 1 or 0, and 1 / log2(place + 1) or 0. The order of the items
    changes no bit.

    Args:
        places: (S,), results of ``find_places`` of relevant items, each once in its query; items
            without a place are left out.
        ks: Lengths of the lists.
        weights: (S,), above 0, the same for all items of a query; None for none.
        queries: (S,), the query of each item; None for one query each.

    Returns:
        ``recall_at`` and ``ndcg_at``, by k as text, empty without places; and
        ``ranked_samples_frac``, the share of the items, or of their weights, that have a place.
    """
    weights = np.ones(len(places)) if weights is None else weights.astype(np.float64)
    queries = np.arange(len(places)) if queries is None else queries
    order = np.lexsort((places, queries, weights))
    places, weights, queries = places[order], weights[order], queries[order]
    is_ranked = places > 0
    total = float(weights.sum())
    frac = float(weights[is_ranked].sum()) / total if total else 0.0
    found: dict[str, Any] = {RECALL: {}, NDCG: {}, SAMPLES_FRAC: frac}
    places, weights, queries = places[is_ranked], weights[is_ranked], queries[is_ranked]
    if not places.size:
        return found
    starts = np.flatnonzero(np.r_[True, queries[1:] != queries[:-1]])
    num_relevant = np.diff(np.r_[starts, len(places)])
    # A query's first place, second place, ... if all relevant items came first.
    best = np.arange(len(places)) - np.repeat(starts, num_relevant) + 1
    weights = weights[starts]
    for k in ks:
        hits = np.add.reduceat(places <= k, starts, dtype=np.int64)
        gains = np.add.reduceat(_gains(places, k), starts)
        found[RECALL][str(k)] = _mean(hits / num_relevant, weights)
        found[NDCG][str(k)] = _mean(gains / np.add.reduceat(_gains(best, k), starts), weights)
    return found


def _gains(places: Rows, k: int) -> npt.NDArray[np.float64]:
    return np.where(places <= k, 1 / np.log2(places + 1.0), 0.0)


def _mean(values: Numbers, weights: Numbers) -> float:
    """The weighted mean; the same for any order of the queries."""
    order = np.lexsort((values, weights))
    return float(np.average(values[order], weights=weights[order]))
