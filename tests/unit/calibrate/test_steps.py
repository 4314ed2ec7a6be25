"""Whole steps correct the parts: known overheads and factors are found again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotrec.calibrate.steps import (
    AHEAD,
    COMPUTE_FACTORS,
    HOT_COLD,
    MESSAGE_FACTORS,
    TORCHREC,
    Anchor,
    MeasuredCase,
    correct_by_steps,
    fit_steps,
)
from hotrec.cost_model.builtin import BUILTIN
from hotrec.cost_model.costs import NARROWEST_INTERVAL, Costs
from hotrec.cost_model.step import StepPrediction
from hotrec.planner.predict import Prediction
from hotrec.types import STAGES

COSTS = replace(BUILTIN["cpu_1gbit"], overhead_s=0.0)
PREDICTED = {stage: 1e-3 * (number + 1) for number, stage in enumerate(STAGES)}
ROUTED = ("route", "pool")


def anchor(family: str, coverage: float | None, size: float, **measured: float) -> Anchor:
    predicted = {stage: size * seconds for stage, seconds in PREDICTED.items()}
    predicted["other"] = PREDICTED["other"]  # parameters of the dense layers, whatever the batch
    if family == TORCHREC:
        predicted |= dict.fromkeys(ROUTED, 0.0)
    found = {**predicted, "other": 0.0, **measured}
    return Anchor(family, coverage, predicted, found, sum(found.values()) + 2e-3)


def all_anchors(**change: object) -> list[Anchor]:
    anchors = []
    for size in (1.0, 4.0):
        for family, coverage in ((HOT_COLD, 0.8), (HOT_COLD, 1.0), (TORCHREC, None)):
            measured = {
                stage: rule(family, size * PREDICTED[stage], size)  # type: ignore[operator]
                for stage, rule in change.items()
            }
            anchors.append(anchor(family, coverage, size, **measured))
    return anchors


FACTOR = st.floats(0.6, 4)


@given(ours=FACTOR, theirs=FACTOR, overhead_s=st.floats(0, 1e-3))
def test_factors_of_a_kernel_are_recovered(ours: float, theirs: float, overhead_s: float) -> None:
    """Each family's, and what a stage takes whatever its work; the rest stays as it was."""

    def measured(family: str, predicted_s: float, size: float) -> float:
        return overhead_s + predicted_s * (theirs if family == TORCHREC else ours)

    fitted = fit_steps(COSTS, all_anchors(row_update=measured))
    assert fitted.kernels == COSTS.kernels
    assert fitted.correction("row_update") == pytest.approx(ours, rel=1e-6)
    assert fitted.correction("row_update", of_torchrec=True) == pytest.approx(theirs, rel=1e-6)
    for stage in ("row_lookup", "pool", "route", "dense"):
        assert fitted.correction(stage) == pytest.approx(1.0, rel=1e-6)
    found = dict(fitted.stage_overhead_s)
    assert found.pop("row_update", 0.0) == pytest.approx(overhead_s, abs=1e-9)
    assert max(found.values()) == pytest.approx(0.0, abs=1e-9)
    assert fitted.overhead_s == pytest.approx(2e-3)


@given(factor=st.floats(0.6, 3), waiting=st.floats(0, 0.5), overhead_s=st.floats(0, 1e-3))
def test_factors_and_waiting_of_messages_are_recovered(
    factor: float, waiting: float, overhead_s: float
) -> None:
    """Where a plan sends more: both grow with the batch, so steps of one plan fit either."""

    def measured(family: str, predicted_s: float, size: float) -> float:
        more_s = factor * predicted_s if family == TORCHREC else 0.0
        return overhead_s + waiting * size * PREDICTED["dense"] + factor * predicted_s + more_s

    anchors = all_anchors(rows_exchange=measured)
    for number, one in enumerate(anchors):
        if one.family == TORCHREC:
            twice = 2 * one.predicted_s["rows_exchange"]
            predicted_s = {**one.predicted_s, "rows_exchange": twice}
            anchors[number] = replace(one, predicted_s=predicted_s)
    fitted = fit_steps(COSTS, anchors)
    assert fitted.correction("rows_exchange") == pytest.approx(factor, rel=1e-4)
    assert fitted.waiting_frac["rows_exchange"] == pytest.approx(waiting, abs=1e-4)
    assert fitted.stage_overhead_s["rows_exchange"] == pytest.approx(overhead_s, abs=1e-7)


def noisy(family: str, predicted_s: float, size: float) -> float:
    return 17.0 * predicted_s


@pytest.mark.parametrize(
    ("stage", "high"), [("rows_exchange", MESSAGE_FACTORS[1]), ("dense", COMPUTE_FACTORS[1])]
)
def test_a_factor_that_no_machine_needs_is_bounded_and_doubted(stage: str, high: float) -> None:
    fitted = fit_steps(COSTS, all_anchors(**{stage: noisy}))
    assert fitted.correction(stage) == pytest.approx(high)
    assert not fitted.is_trusted
    assert f"{stage} {high:g}" in (fitted.caveat or "")


@given(factors=st.lists(st.floats(0.5, 2), min_size=1, max_size=4))
def test_whole_steps_with_look_ahead_have_one_factor(factors: list[float]) -> None:
    """The geometric mean of the cases' own; steps in other pipelines stay as they are."""

    def predict(costs: Costs) -> Prediction:
        step_s = 0.01 * costs.factors.get(AHEAD, 1.0)
        return Prediction(StepPrediction(step_s, {**PREDICTED}, {}, {}), [])

    cases = [MeasuredCase(AHEAD, 0.0, predict) for _ in factors]
    for case, factor in zip(cases, factors, strict=True):
        case.stage_s.append({**PREDICTED})
        case.repeats.rounds.append([[0.01 * factor] * 4])
    others = [measured(0.8, size, 2.0) for size in (1.0, 4.0)]
    costs, _ = correct_by_steps(COSTS, [*others, *cases])
    assert costs.factors == {AHEAD: pytest.approx(np.exp(np.mean(np.log(factors))))}
    assert costs.correction("dense") == pytest.approx(2.0)


def measured(coverage: float, size: float, factor: float) -> MeasuredCase:
    """Steps whose dense layers take ``factor`` times what is predicted."""
    seconds = {s: 0.0 if s == "other" else size * PREDICTED[s] for s in STAGES}

    def predict(costs: Costs) -> Prediction:
        stage_s = {**seconds, "dense": costs.correction("dense") * seconds["dense"]}
        return Prediction(StepPrediction(sum(stage_s.values()), stage_s, {}, {}), [])

    case = MeasuredCase(HOT_COLD, coverage, predict)
    case.stage_s.append({**seconds, "dense": factor * seconds["dense"]})
    case.repeats.rounds.append([[sum(case.stage_s[0].values())] * 4])
    return case


def test_the_interval_is_of_cases_that_were_not_fitted_to() -> None:
    alike = [measured(coverage, size, 2.0) for coverage in (0.8, 1.0) for size in (1.0, 4.0)]
    costs, anchors = correct_by_steps(COSTS, alike)
    assert costs.ratio_interval == NARROWEST_INTERVAL
    assert [a.step_s for a in anchors] == [case.step_s for case in alike]
    odd = [*alike, measured(0.9, 4.0, 3.0)]
    assert correct_by_steps(COSTS, odd)[0].ratio_interval[1] > 1.1
