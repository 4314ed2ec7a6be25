from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchmetrics.classification import BinaryAUROC
from torchrec.metrics.ne import compute_cross_entropy, compute_ne

from hotrec.train.evaluate import measure_auc, measure_log_loss, measure_quality


def auc_by_pairs(scores: np.ndarray, is_click: np.ndarray) -> float:
    """The definition, over all pairs."""
    above = scores[is_click][:, None] - scores[~is_click][None, :]
    return float(((above > 0).sum() + 0.5 * (above == 0).sum()) / above.size)


@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=2, max_size=60))
def test_auc_is_the_definition_with_many_ties(samples: list[tuple[int, bool]]) -> None:
    scores = np.array([score for score, _ in samples], np.float32)
    is_click = np.array([click for _, click in samples])
    if is_click.all() or not is_click.any():
        return
    assert measure_auc(scores, is_click) == auc_by_pairs(scores, is_click)


def test_auc_of_a_large_sample_agrees_with_torchmetrics() -> None:
    rng = np.random.default_rng(0)
    scores = rng.normal(size=50_000).astype(np.float32).round(2)  # ties
    is_click = rng.random(50_000) < 1 / (1 + np.exp(-scores))
    theirs = BinaryAUROC(thresholds=None)(
        torch.from_numpy(scores).double().sigmoid(), torch.from_numpy(is_click).long()
    )
    assert measure_auc(scores, is_click) == pytest.approx(float(theirs), abs=1e-6)


def test_auc_extremes() -> None:
    is_click = np.array([False, False, True, True])
    assert measure_auc(np.array([0.0, 1.0, 2.0, 3.0]), is_click) == 1.0
    assert measure_auc(np.array([3.0, 2.0, 1.0, 0.0]), is_click) == 0.0
    assert measure_auc(np.zeros(4), is_click) == 0.5


def test_log_loss_and_entropy_agree_with_torch_and_torchrec() -> None:
    rng = np.random.default_rng(1)
    logits = rng.normal(size=1000).astype(np.float32)
    labels = (rng.random(1000) < 0.3).astype(np.float32)
    quality = measure_quality(logits, labels)
    z, y = torch.from_numpy(logits).double(), torch.from_numpy(labels).double()
    expected = torch.nn.functional.binary_cross_entropy_with_logits(z, y)
    assert quality.log_loss == pytest.approx(float(expected), rel=1e-12)
    ones = torch.ones_like(y)
    theirs = compute_ne(
        compute_cross_entropy(y, z.sigmoid(), ones, 1e-12).sum(),
        ones.sum(),
        y.sum(),
        (1 - y).sum(),
        1e-12,
    )
    assert quality.normalized_entropy == pytest.approx(float(theirs), rel=1e-6)
    assert quality.num_samples == 1000


def test_predicting_the_click_rate_has_normalised_entropy_one() -> None:
    labels = np.array([1.0, 0.0, 0.0, 0.0] * 10)
    logits = np.full(40, np.log(0.25 / 0.75))
    assert measure_quality(logits, labels).normalized_entropy == pytest.approx(1.0, abs=1e-12)


def test_log_loss_of_extreme_logits_does_not_overflow() -> None:
    assert measure_log_loss(np.array([1e4, -1e4]), np.array([1.0, 0.0])) == 0.0
    assert measure_log_loss(np.array([1e4]), np.array([0.0])) == 1e4


def test_one_class_has_no_auc() -> None:
    quality = measure_quality(np.zeros(3), np.ones(3))
    assert quality.auc is None
    assert quality.normalized_entropy is None
    assert quality.log_loss == pytest.approx(np.log(2))


@pytest.mark.parametrize(
    ("logits", "labels", "message"),
    [
        (np.empty(0), np.empty(0), r"at least one, got shapes \(0,\)"),
        (np.zeros(2), np.zeros(3), r"got shapes \(2,\) and \(3,\)"),
        (np.array([0.0, np.nan]), np.zeros(2), "got 1 of 2 not finite"),
        (np.zeros(2), np.array([0.0, 0.5]), "labels 0 or 1, got 0.5"),
    ],
)
def test_bad_predictions_are_refused(logits: np.ndarray, labels: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure_quality(logits, labels)
