"""Places and the metrics of ranking against their definitions and torchmetrics."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchmetrics.retrieval import RetrievalNormalizedDCG, RetrievalRecall

from hotrec.train import ranking
from hotrec.train.evaluate import Ranked, measure_all, measure_quality
from hotrec.train.ranking import find_places, measure_ranking


def by_sorting(
    users: np.ndarray, targets: np.ndarray, items: np.ndarray, ids: np.ndarray
) -> np.ndarray:
    """The definition: sort all items by score, then by id."""
    scores = users.astype(np.float64) @ items.astype(np.float64).T
    places = np.zeros(len(users), np.int64)
    for user, target in enumerate(targets):
        order = ids[np.lexsort((ids, -scores[user]))]
        if target in order:
            places[user] = np.flatnonzero(order == target)[0] + 1
    return places


def places_of(*arrays: np.ndarray) -> np.ndarray:
    return find_places(*map(torch.from_numpy, arrays)).numpy()


@given(st.integers(0, 2**32), st.integers(1, 9), st.integers(0, 12), st.integers(1, 3))
def test_places_are_those_of_the_sorted_list_with_ties(
    seed: int, num_users: int, num_items: int, dim: int
) -> None:
    rng = np.random.default_rng(seed)
    users = rng.integers(-1, 2, (num_users, dim)).astype(np.float32)
    items = rng.integers(-1, 2, (num_items, dim)).astype(np.float32)
    ids = np.sort(rng.choice(30, num_items, replace=False)).astype(np.int64)
    targets = rng.integers(0, 30, num_users)
    np.testing.assert_array_equal(
        places_of(users, targets, items, ids), by_sorting(users, targets, items, ids)
    )


@given(st.integers(0, 2**32), st.integers(1, 9), st.integers(1, 12), st.integers(0, 9))
def test_seen_items_are_left_out_but_not_the_own_one(
    seed: int, num_users: int, num_items: int, num_seen: int
) -> None:
    """As if the catalogue of each user did not have them; some occur twice, or are no items."""
    rng = np.random.default_rng(seed)
    users = rng.integers(-1, 2, (num_users, 2)).astype(np.float32)
    items = rng.integers(-1, 2, (num_items, 2)).astype(np.float32)
    ids = np.sort(rng.choice(15, num_items, replace=False)).astype(np.int64)
    targets, seen = rng.integers(0, 15, num_users), rng.integers(-1, 15, (num_users, num_seen))
    expected = []
    for user, target, left_out in zip(users, targets, seen, strict=True):
        is_left = ~np.isin(ids, left_out) | (ids == target)
        expected += by_sorting(user[None], target[None], items[is_left], ids[is_left]).tolist()
    found = places_of(users, targets, items, ids, seen)
    assert found.tolist() == expected


def random_vectors(dim: int = 48) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    users = rng.normal(size=(300, dim)).astype(np.float32)
    # A wide range of lengths, and each item twice.
    items = rng.normal(size=(500, dim)) * np.exp(rng.normal(size=(500, 1)))
    items = np.repeat(items.astype(np.float32), 2, axis=0)
    return users, rng.integers(0, 1000, 300), items, np.arange(1000)


def test_neither_blocks_nor_the_order_of_sums_change_a_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    users, targets, items, ids = random_vectors()
    expected = places_of(users, targets, items, ids)
    # Of two equal items the one with the lower id comes first, in spite of rounding.
    pairs = [places_of(users, targets // 2 * 2 + twin, items, ids) for twin in (0, 1)]
    np.testing.assert_array_equal(pairs[0] + 1, pairs[1])
    seen = np.random.default_rng(2).integers(-1, 1000, (300, 40))
    without = places_of(users, targets, items, ids, seen)
    assert (without < expected).sum() > 200
    monkeypatch.setattr(ranking, "_USERS_AT_ONCE", 7)
    monkeypatch.setattr(ranking, "_ITEMS_AT_ONCE", 13)
    np.testing.assert_array_equal(places_of(users, targets, items, ids), expected)
    np.testing.assert_array_equal(places_of(users, targets, items, ids, seen), without)
    order = np.random.default_rng(1).permutation(users.shape[1])
    shuffled = np.ascontiguousarray(users[:, order]), np.ascontiguousarray(items[:, order])
    found = places_of(shuffled[0], targets, shuffled[1], ids)
    np.testing.assert_array_equal(found, expected)
    # Rounding moved hardly any.
    exact = by_sorting(users, targets, items, ids)
    assert np.abs(expected - exact).max() <= 2
    assert (expected == exact).mean() > 0.97


def random_lists() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores of 40 items in 60 queries without ties, and which of 1 to 5 are relevant."""
    rng = np.random.default_rng(3)
    scores = rng.random((60, 40)).astype(np.float32)
    relevant = np.zeros((60, 40), np.bool_)
    for query in range(60):
        relevant[query, rng.choice(40, rng.integers(1, 6), replace=False)] = True
    return scores, relevant, rng.random(60) + 0.5


@pytest.mark.parametrize("k", [1, 3, 10, 40])
def test_several_relevant_items_count_as_torchmetrics_has_them(k: int) -> None:
    scores, relevant, weights = random_lists()
    queries, items = np.nonzero(relevant)
    places = 1 + (scores[queries] > scores[queries, items][:, None]).sum(1)
    order = np.random.default_rng(4).permutation(len(places))
    found = measure_ranking(places[order], [k], queries=queries[order])
    numbers = np.repeat(np.arange(60), 40)
    arguments = (
        torch.from_numpy(scores.ravel()),
        torch.from_numpy(relevant.ravel()),
        torch.from_numpy(numbers),
    )
    for metric, figure in ((RetrievalRecall, "recall_at"), (RetrievalNormalizedDCG, "ndcg_at")):
        expected = float(metric(top_k=k)(arguments[0], arguments[1], indexes=arguments[2]))
        assert found[figure][str(k)] == pytest.approx(expected, abs=2e-6), figure
    # A weight is that of a query: two queries with weight 2 and 1 are three.
    whole = measure_ranking(places, [k], weights[queries], queries)
    by_query = [
        measure_ranking(places[queries == q], [k], None, queries[queries == q]) for q in range(60)
    ]
    recalls = [of["recall_at"][str(k)] for of in by_query]
    assert whole["recall_at"][str(k)] == pytest.approx(np.average(recalls, weights=weights))


def test_one_relevant_item_is_the_share_of_places_up_to_k() -> None:
    places = np.array([1, 3, 2, 7, 0])
    found = measure_ranking(places, (1, 3))
    assert found["recall_at"] == {"1": 1 / 4, "3": 3 / 4}
    assert found["ndcg_at"]["3"] == pytest.approx((1 + 1 / 2 + 1 / np.log2(3)) / 4)
    assert found["ranked_samples_frac"] == 4 / 5
    weighted = measure_ranking(places, (3,), np.array([1, 1, 1, 2, 3.0]))
    assert weighted["recall_at"] == {"3": 3 / 5}
    assert weighted["ranked_samples_frac"] == 5 / 8


def test_the_order_of_the_samples_changes_no_bit() -> None:
    rng = np.random.default_rng(0)
    places, weights = rng.integers(0, 50, 1000), rng.random(1000) + 0.1
    order = rng.permutation(1000)
    for of in (None, weights):
        moved = measure_ranking(places[order], (5, 20), None if of is None else of[order])
        assert moved == measure_ranking(places, (5, 20), of)


def test_only_positive_samples_of_positive_weight_are_ranked() -> None:
    labels = np.array([1, 0, 1, 1], np.float32)
    ranked = Ranked(np.array([2, 1, 9, 1]), (5,))
    weights = np.array([1, 1, 2, 0], np.float32)
    quality = measure_all(np.zeros(4, np.float32), labels, weights, ranked=ranked)
    assert quality.further["recall_at"] == {"5": 1 / 3}
    nothing = measure_quality(np.zeros(4, np.float32), 0 * labels, ranked=ranked)
    assert nothing.further == {"recall_at": {}, "ndcg_at": {}, "ranked_samples_frac": 0.0}
