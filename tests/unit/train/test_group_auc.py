"""GAUC against its definition, group by group, and through evaluations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotrec.data.groups import NO_GROUP
from hotrec.train.evaluate import measure_all
from hotrec.train.group_auc import GroupAuc, measure_group_auc


def by_groups(
    scores: np.ndarray,
    is_click: np.ndarray,
    groups: np.ndarray,
    weights: np.ndarray | None = None,
) -> GroupAuc:
    """The definition: a loop over groups and all pairs of each."""
    weights = np.ones(len(scores)) if weights is None else weights
    aucs, sizes = [], []
    for group in np.unique(groups[groups != NO_GROUP]):
        clicks, others = ((groups == group) & (is_click == value) for value in (True, False))
        above = scores[clicks][:, None] - scores[others][None, :]
        pairs = weights[clicks][:, None] * weights[others][None, :]
        if pairs.size:
            won = (pairs * ((above > 0) + 0.5 * (above == 0))).sum()
            aucs.append(won / pairs.sum())
            sizes.append(weights[groups == group].sum())
    if not sizes:
        return GroupAuc(None, 0.0)
    return GroupAuc(float(np.average(aucs, weights=sizes)), sum(sizes) / weights.sum())


def check_close(found: GroupAuc, expected: GroupAuc) -> None:
    assert (found.gauc is None) == (expected.gauc is None)
    assert found.gauc is None or found.gauc == pytest.approx(expected.gauc, rel=1e-12)
    assert found.samples_frac == pytest.approx(expected.samples_frac, rel=1e-12)


@given(
    st.lists(
        st.tuples(st.integers(-2, 2), st.booleans(), st.integers(-1, 4), st.integers(1, 3)),
        min_size=1,
        max_size=60,
    )
)
def test_it_is_the_definition_with_ties_one_class_and_ungrouped(
    samples: list[tuple[int, bool, int, int]],
) -> None:
    scores, clicks, groups, weights = map(np.array, zip(*samples, strict=True))
    scores, is_click = scores.astype(np.float32), clicks.astype(bool)
    expected = by_groups(scores, is_click, groups)
    found = measure_group_auc(scores, is_click, groups)
    check_close(found, expected)
    expected = by_groups(scores, is_click, groups, weights)
    found = measure_group_auc(scores, is_click, groups, weights.astype(np.float32))
    check_close(found, expected)


def random_samples(num_samples: int = 3000) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    groups = (num_samples * rng.random(num_samples) ** 4 / 20).astype(np.int64)  # a few large ones
    scores = rng.normal(size=num_samples).astype(np.float32).round(1)
    is_click = rng.random(num_samples) < 1 / (1 + np.exp(-scores))
    return scores, is_click, groups, rng.random(num_samples).astype(np.float32) + 0.1


def test_the_order_of_the_samples_changes_no_bit() -> None:
    scores, is_click, groups, weights = random_samples()
    order = np.random.default_rng(1).permutation(len(scores))
    for of in (None, weights):
        moved = measure_group_auc(
            scores[order], is_click[order], groups[order], None if of is None else of[order]
        )
        assert moved == measure_group_auc(scores, is_click, groups, of)


def test_small_weights_beside_large_ones_keep_their_digits() -> None:
    scores, is_click, _, _ = random_samples(200)
    groups, weights = np.repeat([0, 1], 100), np.repeat(np.float32([1e12, 1e-6]), 100)
    labels = is_click.astype(np.float32)
    light = measure_group_auc(scores[100:], is_click[100:], groups[100:])
    # The heavy group has one class, so only the other counts.
    labels[:100] = 1
    found = measure_group_auc(scores, labels == 1, groups, weights)
    assert found.gauc == pytest.approx(light.gauc, rel=1e-12)


def test_samples_without_weight_are_left_out_and_labels_are_averaged() -> None:
    scores, is_click, groups, _ = random_samples(600)
    logits = np.stack([scores, -scores], axis=1)
    labels = np.stack([is_click, is_click], axis=1).astype(np.float32)
    weights = (np.arange(600) % 3 > 0).astype(np.float32)
    found = measure_all(logits, labels, weights, {"like": 1.0, "buy": 3.0}, groups)
    used = weights > 0
    like = measure_group_auc(scores[used], is_click[used], groups[used])
    buy = measure_group_auc(-scores[used], is_click[used], groups[used])
    assert like.gauc is not None
    assert buy.gauc is not None
    assert found.by_label["like"].further["gauc"] == like.gauc
    assert found.further["gauc"] == pytest.approx((like.gauc + 3 * buy.gauc) / 4)
