"""Costs corrected by runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hotrec.calibrate.fit import StageTimes, fit_corrections, fit_from_run
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


@pytest.mark.parametrize(
    ("measured", "key"),
    [
        ({"pool": 1.0}, r"expected all of .*, got none for \['route'"),
        ({**PREDICTED, "coffee": 1.0}, r"expected some of .*, got \['coffee'\]"),
        ({**PREDICTED, "pool+dense": 1.0}, "each stage once, got .*'pool'.* twice"),
    ],
)
def test_missing_unknown_and_repeated_stages_are_refused(
    measured: dict[str, float], key: str
) -> None:
    with pytest.raises(CostsError, match=key):
        fit(measured)


def test_a_fit_needs_runs_and_predictions() -> None:
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


def write_run(run_dir: Path, costs: Any = "cpu_1gbit", **summary: Any) -> Path:
    times = dict.fromkeys(STAGES, 0.002)
    document = {
        "predicted_stage_s": dict.fromkeys(STAGES, 0.001),
        "measured_stage_s": times,
        **summary,
    }
    (run_dir / "summary.json").write_text(json.dumps(document))
    (run_dir / "prediction.json").write_text(json.dumps({"costs": {"name": costs}}))
    return run_dir


def test_costs_are_fitted_from_a_run(tmp_path: Path) -> None:
    fitted = fit_from_run(write_run(tmp_path), "cpu_1gbit")
    assert fitted.origin == "fitted"
    assert fitted.correction("pool") == pytest.approx(2.0)
    assert fitted.facts["fitted_from"] == str(tmp_path)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"costs": "elsewhere"}, "planned with the costs 'cpu_1gbit' .* with 'elsewhere'"),
        ({"pipeline": "look_ahead"}, "pipeline: expected sparse_dist or base, .* got look_ahead"),
        *(
            ({"measured_stage_s": none}, "measured_stage_s: expected seconds by stage, got")
            for none in (None, {}, 3)
        ),
    ],
)
def test_runs_that_cannot_be_fitted_are_refused(
    tmp_path: Path, change: dict[str, Any], key: str
) -> None:
    with pytest.raises(CostsError, match=key):
        fit_from_run(write_run(tmp_path, **change), "cpu_1gbit")


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CostsError, match="expected a JSON file written by"):
        fit_from_run(tmp_path, "cpu_1gbit")
    (tmp_path / "summary.json").write_text("[]")
    with pytest.raises(CostsError, match="expected a JSON object, got list"):
        fit_from_run(tmp_path, "cpu_1gbit")
