"""The quality of predictions against its definitions, and evaluation through a pipeline."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec.metrics.ne import compute_cross_entropy, compute_ne

from hotrec.runtime.ranks import Ranks
from hotrec.train.evaluate import (
    Quality,
    evaluate,
    measure_all,
    measure_auc,
    measure_log_loss,
    measure_quality,
)
from hotrec.train.pipelines import Pipeline, make_pipeline
from hotrec.types import PipelineKind, PipelineSpec
from tests.helpers.tiny import build_tiny, tiny_batch


def start(kind: str, **kwargs: float) -> Pipeline:
    model, optimizer = build_tiny(**kwargs)
    return make_pipeline(PipelineSpec(PipelineKind[kind]), model, optimizer, torch.device("cpu"))


@pytest.mark.parametrize("kind", ["base", "sparse_dist"])
def test_quality_is_that_of_all_samples_but_padding(kind: str, one_rank: Ranks) -> None:
    batches = [tiny_batch(seed, 6, num_padding=seed % 3) for seed in range(5)]
    model, _ = build_tiny()
    with torch.no_grad():
        outputs = [model.eval()(batch)[1] for batch in batches]
    keep = np.concatenate([batch.weights.numpy() > 0 for batch in batches])
    logits = np.concatenate([output[1].numpy() for output in outputs])[keep]
    labels = np.concatenate([output[2].numpy() for output in outputs])[keep]
    assert keep.sum() == 26
    quality = evaluate(start(kind), batches)
    assert quality == measure_quality(logits, labels)
    assert quality.num_samples == 26


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


def test_log_loss_of_extreme_logits_does_not_overflow() -> None:
    assert measure_log_loss(np.array([1e4, -1e4]), np.array([1.0, 0.0])) == 0.0
    assert measure_log_loss(np.array([1e4]), np.array([0.0])) == 1e4


def test_entropy_of_the_click_rate_is_one_and_one_class_has_no_auc() -> None:
    labels = np.array([1.0, 0.0, 0.0, 0.0] * 10)
    logits = np.full(40, np.log(0.25 / 0.75))
    assert measure_quality(logits, labels).normalized_entropy == pytest.approx(1.0, abs=1e-12)
    expected = Quality(None, pytest.approx(np.log(2)), None, 3)  # type: ignore[arg-type]
    assert measure_quality(np.zeros(3), np.ones(3)) == expected


@pytest.mark.parametrize(
    ("logits", "labels"),
    [([], []), ([0.0] * 2, [0.0] * 3), ([0.0, float("nan")], [0.0] * 2), ([0.0] * 2, [0.0, 0.5])],
)
def test_bad_predictions_are_refused(logits: list[float], labels: list[float]) -> None:
    with pytest.raises(ValueError, match="expected"):
        measure_quality(np.array(logits), np.array(labels))


def test_a_weight_counts_as_so_many_samples() -> None:
    rng = np.random.default_rng(2)
    logits = rng.integers(-3, 4, 200).astype(np.float32)  # with ties
    labels = (rng.random(200) < 0.3).astype(np.float32)
    weights = rng.integers(0, 4, 200)
    found = measure_all(logits, labels, weights.astype(np.float32))
    repeated = measure_quality(np.repeat(logits, weights), np.repeat(labels, weights))
    assert found.num_samples == np.count_nonzero(weights)
    for name in ("auc", "log_loss", "normalized_entropy"):
        assert getattr(found, name) == pytest.approx(getattr(repeated, name), rel=1e-12)
    assert measure_all(logits, labels, np.ones(200)) == measure_quality(logits, labels)
    weights = rng.random(200) + 0.1
    order = rng.permutation(200)
    whole, shuffled = (
        measure_all(logits[at], labels[at], weights[at]) for at in (np.arange(200), order)
    )
    assert whole.auc == shuffled.auc


def test_several_labels_are_summed_by_weight() -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(100, 2)).astype(np.float32)
    labels = (rng.random((100, 2)) < 0.4).astype(np.float32)
    found = measure_all(logits, labels, np.ones(100), {"like": 1.0, "buy": 3.0})
    like, buy = (measure_quality(logits[:, label], labels[:, label]) for label in range(2))
    assert found.by_label == {"like": like, "buy": buy}
    assert found.log_loss == pytest.approx(like.log_loss + 3 * buy.log_loss)
    assert found.auc == pytest.approx((like.auc + 3 * buy.auc) / 4)
    # Of a label that is always 0 there is no AUC, and so none of all.
    labels[:, 1] = 0
    none = measure_all(logits, labels, None, {"like": 1.0, "buy": 3.0})
    assert (none.auc, none.normalized_entropy) == (None, None)
    assert none.by_label["like"] == like
