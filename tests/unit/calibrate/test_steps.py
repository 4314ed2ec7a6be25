"""Whole steps correct the parts: known overheads and factors are found again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

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
    typical_stages,
)
from hotrec.cost_model.builtin import BUILTIN
from hotrec.cost_model.costs import NARROWEST_INTERVAL, Costs
from hotrec.cost_model.forms import StepPrediction
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


def test_steps_as_predicted_change_nothing_but_the_overhead() -> None:
    fitted = fit_steps(COSTS, all_anchors())
    for name, line in COSTS.kernels.items():
        assert fitted.kernels[name].per_item_s == pytest.approx(line.per_item_s)
        assert fitted.kernels[name].per_byte_s == pytest.approx(line.per_byte_s)
    assert fitted.overhead_s == pytest.approx(2e-3)
    assert fitted.correction("dense") == pytest.approx(1.0)
    assert max(fitted.stage_overhead_s.values()) == pytest.approx(0.0, abs=1e-9)


def test_each_family_has_its_factor() -> None:
    def slower(family: str, predicted_s: float, size: float) -> float:
        return 5e-4 + predicted_s * (3.0 if family == TORCHREC else 2.0)

    fitted = fit_steps(COSTS, all_anchors(row_update=slower))
    assert fitted.stage_overhead_s["row_update"] == pytest.approx(5e-4)
    for name, factor in (("update_device", 2.0), ("pooled_update_device", 3.0), ("pool", 1.0)):
        wanted = factor * COSTS.kernels[name].per_item_s
        assert fitted.kernels[name].per_item_s == pytest.approx(wanted)


def test_exchanges_have_waiting_and_a_factor() -> None:
    def waiting(family: str, predicted_s: float, size: float) -> float:
        factor = 3.0 if family == TORCHREC else 1.5
        return 1e-4 + 0.1 * size * PREDICTED["dense"] + factor * predicted_s

    def predicted_twice(found: Anchor) -> Anchor:
        if found.family != TORCHREC:
            return found
        twice = 2 * found.predicted_s["rows_exchange"]
        return replace(found, predicted_s={**found.predicted_s, "rows_exchange": twice})

    fitted = fit_steps(COSTS, [predicted_twice(a) for a in all_anchors(rows_exchange=waiting)])
    assert fitted.correction("rows_exchange") == pytest.approx(1.5, rel=1e-6)
    assert fitted.waiting_frac["rows_exchange"] == pytest.approx(0.1, rel=1e-6)
    assert fitted.stage_overhead_s["rows_exchange"] == pytest.approx(1e-4, rel=1e-4)


def test_messages_that_no_line_holds_for_are_as_in_the_larger_batch() -> None:
    """A link lets small messages through at once and sends large ones both ways in turn."""

    def convex(family: str, predicted_s: float, size: float) -> float:
        return predicted_s * (0.7 if size == 1.0 else 1.5)

    anchors = all_anchors(rows_exchange=convex, grads_exchange=convex)
    fitted = fit_steps(COSTS, anchors)
    for stage in ("rows_exchange", "grads_exchange"):
        found = fitted.correction(stage, of_torchrec=True) * 4 * PREDICTED[stage]
        found += fitted.stage_overhead_s[stage]
        found += fitted.waiting_frac[stage] * 4 * PREDICTED["dense"]
        assert found == pytest.approx(6 * PREDICTED[stage], rel=0.05)


@pytest.mark.parametrize("dense_s", [4e-3, 1e-5])
def test_waiting_is_in_doubt_only_where_the_dense_layers_matter(dense_s: float) -> None:
    def jitter(family: str, predicted_s: float, size: float) -> float:
        return predicted_s + 3 * size * dense_s

    def dense(family: str, predicted_s: float, size: float) -> float:
        return size * dense_s

    fitted = fit_steps(COSTS, all_anchors(dense=dense, rows_exchange=jitter))
    assert fitted.waiting_frac["rows_exchange"] == 1.0
    is_in_doubt = any("waiting in rows_exchange 1" in doubt for doubt in fitted.doubts)
    assert is_in_doubt == (dense_s > 1e-3)


def test_a_plan_that_sends_more_tells_waiting_from_what_bytes_take() -> None:
    """Both grow with the batch, so steps of one plan fit the one as well as the other."""

    def waiting(family: str, predicted_s: float, size: float) -> float:
        return 1e-4 + 0.1 * size * PREDICTED["dense"] + 1.5 * predicted_s

    anchors = all_anchors(rows_exchange=waiting)
    for one in [a for a in anchors if a.family == TORCHREC]:
        more_s = one.predicted_s["rows_exchange"]
        stages = ((one.predicted_s, 1.0), (one.measured_s, 1.5))
        predicted_s, measured_s = (
            {**of, "rows_exchange": of["rows_exchange"] + factor * more_s} for of, factor in stages
        )
        anchors.append(replace(one, predicted_s=predicted_s, measured_s=measured_s))
    fitted = fit_steps(COSTS, anchors)
    assert fitted.correction("rows_exchange", of_torchrec=True) == pytest.approx(1.5, rel=1e-4)
    assert fitted.waiting_frac["rows_exchange"] == pytest.approx(0.1, rel=1e-4)
    assert fitted.stage_overhead_s["rows_exchange"] == pytest.approx(1e-4, rel=1e-2)


def test_torchrecs_messages_have_a_factor_of_their_own() -> None:
    """It is as far from that of rows as steps say, less what a difference counts."""

    def copied(family: str, predicted_s: float, size: float) -> float:
        return predicted_s * (3.0 if family == TORCHREC else 1.5)

    fitted = fit_steps(COSTS, all_anchors(rows_exchange=copied))
    rows, pooled = (fitted.correction("rows_exchange", of_torchrec=of) for of in (False, True))
    assert 1.25 * rows < pooled <= 3.0
    assert fitted.correction("ids_exchange", of_torchrec=True) == fitted.correction("ids_exchange")


def test_ranks_that_pooled_vectors_delay_are_waited_for_in_the_all_reduce() -> None:
    """So that time belongs to the exchanges of vectors, not to that of hot rows."""

    def delayed(family: str, predicted_s: float, size: float) -> float:
        of_vectors = size * (PREDICTED["rows_exchange"] + PREDICTED["grads_exchange"])
        return predicted_s + (of_vectors if family == TORCHREC else 0.0)

    anchors = all_anchors(hot_exchange=delayed)
    fitted = fit_steps(COSTS, anchors)
    stages = ("rows_exchange", "grads_exchange", "hot_exchange", "other")
    for one in anchors:
        expected_s = 0.0
        for stage in stages:
            factor = fitted.correction(stage, of_torchrec=one.family == TORCHREC)
            waiting = fitted.waiting_frac.get(stage, 0.0) * one.measured_s["dense"]
            expected_s += factor * one.predicted_s[stage] + waiting
            expected_s += fitted.stage_overhead_s.get(stage, 0.0)
        measured_s = sum(one.measured_s[stage] for stage in stages)
        assert expected_s == pytest.approx(measured_s, rel=0.15)
    for stage in stages[:2]:
        pooled = fitted.correction(stage, of_torchrec=True)
        assert pooled > 1.1 * fitted.correction(stage)


def test_all_reduces_of_replicas_are_no_delay_of_vectors() -> None:
    """Where hardly any vectors travel, they cannot hold ranks up for long."""

    def reduced(family: str, predicted_s: float, size: float) -> float:
        return predicted_s * (3.0 if family == TORCHREC else 1.5)

    few = dict.fromkeys(("rows_exchange", "grads_exchange"), 1e-5)
    anchors = [
        replace(a, predicted_s={**a.predicted_s, **few}, measured_s={**a.measured_s, **few})
        if a.family == TORCHREC
        else a
        for a in all_anchors(hot_exchange=reduced)
    ]
    fitted = fit_steps(COSTS, anchors)
    own, theirs = (fitted.correction("hot_exchange", of_torchrec=of) for of in (False, True))
    assert 1.25 * own < theirs <= 3.0
    assert fitted.waiting_frac["rows_exchange"] < 0.01


def test_what_hot_rows_seem_to_take_whatever_their_number_is_not_charged_to_others() -> None:
    """Where a link lets bursts through, their messages do not grow with their bytes."""

    def dear(family: str, predicted_s: float, size: float) -> float:
        return PREDICTED["other"] + (0.0 if family == TORCHREC else 3 * PREDICTED["hot_exchange"])

    anchors = [
        replace(a, predicted_s={**a.predicted_s, "hot_exchange": 0.0})
        if a.family == TORCHREC
        else a
        for a in all_anchors(hot_exchange=dear)
    ]

    def theirs_s(costs: Costs) -> list[float]:
        waiting = costs.waiting_frac["hot_exchange"]
        exposed_s = costs.correction("other") * PREDICTED["other"]
        exposed_s += costs.stage_overhead_s["hot_exchange"]
        dense = [a.measured_s["dense"] for a in anchors if a.family == TORCHREC]
        return [exposed_s + waiting * seconds for seconds in dense]

    of_rows = fit_steps(COSTS, [a for a in anchors if a.family != TORCHREC])
    assert min(theirs_s(of_rows)) > 2.5 * PREDICTED["other"]
    fitted = fit_steps(COSTS, anchors)
    assert max(theirs_s(fitted)) < 1.5 * PREDICTED["other"]


def test_messages_take_at_least_half_of_what_they_took_alone() -> None:
    fitted = fit_steps(COSTS, all_anchors(grads_exchange=lambda family, seconds, size: seconds / 4))
    assert fitted.correction("grads_exchange") == 0.5


def test_an_overhead_is_no_more_than_the_least_that_was_measured() -> None:
    """Else a line through large replicas would charge every small one for its slope."""

    def curved(family: str, seconds: float, size: float) -> float:
        return seconds / 5 if size < 1 else seconds

    anchors = all_anchors(dense=curved, hot_exchange=curved)
    fitted = fit_steps(COSTS, anchors)
    for stage in ("dense", "hot_exchange"):
        least_s = min(a.measured_s[stage] for a in anchors if a.predicted_s[stage] > 0)
        assert fitted.stage_overhead_s[stage] <= least_s


def test_a_stage_that_no_step_has_is_no_reason_to_fail() -> None:
    """With Adam on CPU all rows are hot, and the clock still passes between two marks."""
    anchors = [a for a in all_anchors() if a.coverage == 1.0]
    anchors = [
        replace(
            a,
            predicted_s={**a.predicted_s, "row_update": 0.0},
            measured_s={**a.measured_s, "row_update": 1e-6},
        )
        for a in anchors
    ]
    assert fit_steps(COSTS, anchors).stage_overhead_s["row_update"] == pytest.approx(1e-6)


def test_large_replicas_set_the_price_of_hot_rows() -> None:
    anchors = all_anchors()
    dear = [
        replace(a, measured_s={**a.measured_s, "optimizer": 3 * a.predicted_s["optimizer"]})
        if a.coverage == 1.0
        else a
        for a in anchors
    ]
    fitted = fit_steps(COSTS, dear)
    wanted = 3 * COSTS.kernels["hot_update"].per_item_s
    assert fitted.kernels["hot_update"].per_item_s == pytest.approx(wanted)


def test_the_dense_exchange_counts_as_far_as_it_is_waited_for() -> None:
    for exposed in (0.0, 0.5, 1.0):
        anchors = []
        for found in all_anchors():
            # Other placements have more hot rows, or hide more, at the same batch size.
            factor = {0.8: 1.0, 1.0: 3.0, None: 0.5}[found.coverage]
            predicted = {**found.predicted_s, "other": PREDICTED["other"] / factor}
            predicted["hot_exchange"] *= factor
            waited = predicted["hot_exchange"] + exposed * predicted["other"]
            measured = {**found.measured_s, "hot_exchange": waited}
            anchors.append(replace(found, predicted_s=predicted, measured_s=measured))
        fitted = fit_steps(COSTS, anchors)
        assert fitted.correction("other") == pytest.approx(exposed, abs=1e-6)
        assert fitted.correction("hot_exchange") == pytest.approx(1.0)
        assert fitted.stage_overhead_s["hot_exchange"] == pytest.approx(0.0, abs=1e-6)


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


def test_steps_of_nearly_as_many_bytes_say_nothing_of_a_byte_s_price() -> None:
    line = fit_look_ahead([ahead(1300.0, 2e-3), ahead(1400.0, 4e-3)])
    assert line.per_byte_s == 0
    assert 2e-3 < line.seconds(num_bytes=1e6) < 4e-3


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


def test_a_strange_factor_of_a_stage_that_hardly_counts_is_not_doubted() -> None:
    anchors = [replace(a, step_s=1e3) for a in all_anchors(rows_exchange=noisy)]
    assert fit_steps(COSTS, anchors).is_trusted


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


def test_a_message_alone_tells_the_overlap_that_steps_do_not() -> None:
    cases = [ahead_case(0.4, computing_s=0.01, sending_s=1e-9)]
    found = correct_look_ahead(replace(COSTS, overlap=0.7), cases)
    assert found.look_ahead_overlap == 0.7
    assert correct_look_ahead(COSTS, []).look_ahead_overlap is None


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


def test_stages_are_those_of_steps_of_usual_length() -> None:
    """Now one message is slow and now the other, as on a shaped link; one step is an outlier."""
    fast, slow = 1e-3, 9e-3
    rows = np.array([fast, slow, fast, slow, fast, slow, fast, slow, 1.0])
    grads = fast + slow - np.minimum(rows, slow)
    of_rank = {**dict.fromkeys(STAGES, np.zeros(9)), "rows_exchange": rows, "grads_exchange": grads}
    found = typical_stages([of_rank, of_rank])
    assert sum(found.values()) == pytest.approx(fast + slow)
    assert found["rows_exchange"] > 2e-3
    assert found["grads_exchange"] > 2e-3
