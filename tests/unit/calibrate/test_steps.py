"""Whole steps correct the parts: known overheads and factors are found again."""

from __future__ import annotations

from dataclasses import replace

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
    correct_look_ahead,
    fit_look_ahead,
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
    factors = {"update_device": ours, "pooled_update_device": theirs}
    for name in ("update_device", "pooled_update_device", "pool", "route", "dense"):
        wanted = factors.get(name, 1.0) * COSTS.kernels[name].per_item_s
        assert fitted.kernels[name].per_item_s == pytest.approx(wanted, rel=1e-6)
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


def ahead(row_bytes: float, left_s: float) -> Anchor:
    """A step with look-ahead that took so much more than was predicted."""
    return Anchor(AHEAD, 0.0, PREDICTED, PREDICTED, sum(PREDICTED.values()) + left_s, row_bytes)


def test_what_look_ahead_takes_beside_its_stages_is_found() -> None:
    line = fit_look_ahead([ahead(1e6, 3e-3), ahead(4e6, 9e-3)])
    assert line.fixed_s == pytest.approx(1e-3)
    assert line.per_byte_s == pytest.approx(2e-9)
    assert fit_look_ahead([ahead(1e6, -1e-3), ahead(4e6, 9e-3)]).seconds(num_bytes=4e6) == (
        pytest.approx(9e-3)
    )
    assert fit_look_ahead([ahead(1e6, -1e-3), ahead(4e6, -2e-3)]).seconds(num_bytes=4e6) == 0
    assert fit_look_ahead([]).source == "not measured"


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


def ahead_case(overlap: float, *, computing_s: float, sending_s: float) -> MeasuredCase:
    """Steps that hide ``overlap`` of what is sent, predicted by whatever overlap the costs have."""

    def seconds(overlap: float) -> float:
        return computing_s + (1 - overlap) * sending_s

    def predict(costs: Costs) -> Prediction:
        found = costs.overlap if costs.look_ahead_overlap is None else costs.look_ahead_overlap
        stage_s = {**dict.fromkeys(STAGES, 0.0), "dense": seconds(found)}
        stage_s["rows_exchange"] = costs.look_ahead.seconds()
        return Prediction(StepPrediction(sum(stage_s.values()), stage_s, {}, {}), [])

    case = MeasuredCase(AHEAD, 0.0, predict)
    case.stage_s.append(dict.fromkeys(STAGES, 0.0))
    case.repeats.rounds.append([[seconds(overlap)] * 4])
    return case


@pytest.mark.parametrize("overlap", [0.0, 0.4, 1.0])
def test_whole_steps_tell_the_overlap_of_look_ahead(overlap: float) -> None:
    cases = [
        ahead_case(overlap, computing_s=computing_s, sending_s=sending_s)
        for computing_s, sending_s in ((0.01, 0.004), (0.01, 0.02), (0.04, 0.01), (0.04, 0.07))
    ]
    for measured_alone in (0.0, 0.5, 1.0):
        found = correct_look_ahead(replace(COSTS, overlap=measured_alone), cases)
        assert found.look_ahead_overlap == pytest.approx(overlap)
        assert found.overlap == measured_alone
        for case in cases:
            assert case.predict(found).step_s == pytest.approx(case.step_s, rel=0.05)


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
