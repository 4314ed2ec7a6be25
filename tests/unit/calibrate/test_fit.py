"""Costs corrected by runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hotrec.calibrate.fit import StageTimes, fit_corrections
from hotrec.cost_model.builtin import BUILTIN
from hotrec.cost_model.costs import Costs, CostsError, World
from hotrec.cost_model.forms import Workload
from hotrec.cost_model.step import make_step_model
from hotrec.types import STAGES

COSTS = replace(BUILTIN["cpu_1gbit"], overlap=0.0)
PREDICTED = {stage: 0.001 * (number + 1) for number, stage in enumerate(STAGES)}
WORKLOAD = Workload(batch_size=512, dense_flops=1e6, bottom_frac=0.2, num_dense_values=10_000)
QUANTITIES = {
    "lookups": 10_000, "lookup_bytes": 2.56e6, "rows_device": 3000, "bytes_device": 768_000,
    "cold_groups": 1, "hot_rows": 1000, "hot_bytes": 256_000, "union_rows": 1500,
    "union_bytes": 384_000, "hot_groups": 1,
}  # fmt: skip


def fit(*measured: dict[str, float], predicted: dict[str, float] = PREDICTED) -> Costs:
    runs = [StageTimes(predicted, times) for times in measured]
    return fit_corrections(COSTS, runs, {"fitted_from": "runs/a"})


def times(**factors: float) -> dict[str, float]:
    return {stage: seconds * factors.get(stage, 1.0) for stage, seconds in PREDICTED.items()}


def test_a_stage_is_corrected_by_measured_over_predicted() -> None:
    fitted = fit(times(route=2.0, dense=0.5))
    assert fitted.correction("route") == pytest.approx(2.0)
    assert fitted.correction("dense") == pytest.approx(0.5)
    assert fitted.correction("pool") == pytest.approx(1.0)
    assert fitted.overhead_s == pytest.approx(PREDICTED["other"])
    assert fitted.correction("other") == 0.0  # its time is the overhead
    assert fitted.origin == "fitted"
    assert fitted.facts["fitted_from"] == "runs/a"
    assert fitted.kernels == COSTS.kernels


def test_the_median_of_runs_counts() -> None:
    assert fit(times(route=1.1), times(route=1.2), times(route=50.0)).correction(
        "route"
    ) == pytest.approx(1.2)


def test_stages_measured_together_share_a_factor() -> None:
    joint = times()
    both = joint.pop("row_update") + joint.pop("hot_exchange")
    fitted = fit({**joint, "row_update+hot_exchange": 3 * both})
    assert fitted.correction("row_update") == pytest.approx(3.0)
    assert fitted.correction("hot_exchange") == pytest.approx(3.0)


def test_time_for_which_nothing_is_predicted_becomes_overhead() -> None:
    predicted = {**PREDICTED, "route": 0.0}
    fitted = fit(times(route=1.0), predicted=predicted)
    assert fitted.overhead_s == pytest.approx(PREDICTED["other"] + PREDICTED["route"])
    assert "route" not in fitted.corrections


def test_fitted_costs_predict_the_run_they_were_fitted_to() -> None:
    world = World(2, 2)
    before = make_step_model(COSTS, world, WORKLOAD).predict(QUANTITIES)
    factors = {stage: 0.5 + 0.2 * number for number, stage in enumerate(STAGES)}
    measured = {stage: before.stage_s[stage] * factors[stage] for stage in STAGES}
    fitted = fit_corrections(COSTS, [StageTimes(before.stage_s, measured)], {})
    after = make_step_model(fitted, world, WORKLOAD).predict(QUANTITIES)
    assert dict(after.stage_s) == pytest.approx(measured)
    # Fitted again, to another run of the fitted costs: factors add up, names do not repeat.
    again = {stage: 1.1 * seconds for stage, seconds in measured.items()}
    twice = fit_corrections(fitted, [StageTimes(after.stage_s, again)], {})
    last = make_step_model(twice, world, WORKLOAD).predict(QUANTITIES)
    assert dict(last.stage_s) == pytest.approx(again)
    assert [fitted.name, twice.name] == ["cpu_1gbit-fitted-1", "cpu_1gbit-fitted-2"]


def test_a_missing_stage_is_refused() -> None:
    measured = times()
    del measured["pool"]
    with pytest.raises(CostsError, match=r"expected all of .*, got none for \['pool'\]"):
        fit(measured)
    with pytest.raises(CostsError, match="expected a predicted time for each stage, got none"):
        fit(times(), predicted={})
    with pytest.raises(CostsError, match="at least one run"):
        fit()


@pytest.mark.parametrize("bad", [-1e-3, float("nan"), float("inf"), "fast", True, None])
def test_impossible_times_are_refused(bad: Any) -> None:
    with pytest.raises(CostsError, match="measured_stage_s pool: expected seconds of at least 0"):
        fit({**times(), "pool": bad})
    with pytest.raises(CostsError, match="predicted_stage_s pool: expected seconds"):
        fit(times(), predicted={**PREDICTED, "pool": bad})


def test_strange_and_repeated_stages_are_refused() -> None:
    with pytest.raises(CostsError, match=r"expected some of .*, got \['coffee'\]"):
        fit({**times(), "coffee": 1.0})
    with pytest.raises(CostsError, match=r"each stage once, got .*'pool'.* twice"):
        fit({**times(), "pool+dense": 1.0, "dense": 1.0})
