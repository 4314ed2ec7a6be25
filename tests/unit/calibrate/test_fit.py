"""Costs corrected by runs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hotrec.calibrate.fit import fit_corrections, fit_from_run, fit_look_ahead_factor
from hotrec.cost_model.builtin import BUILTIN
from hotrec.cost_model.costs import Costs, CostsError, World
from hotrec.cost_model.forms import SPARSE_DIST, PipelineSpec, Workload
from hotrec.cost_model.step import make_model, make_step_model
from hotrec.types import STAGES, PipelineKind
from tests.unit.cost_model.samples import work_of

COSTS = replace(BUILTIN["cpu_1gbit"], overlap=0.0)
PREDICTED = {stage: 0.001 * (number + 1) for number, stage in enumerate(STAGES)}
WORKLOAD = Workload(batch_size=512, dense_flops=1e6, bottom_frac=0.2, num_dense_values=10_000)
QUANTITIES = work_of(
    lookups=10_000, cold_rows=3000, cold_groups=1, hot_rows=1000, union_rows=1500, hot_groups=1
)


def fit(measured: dict[str, Any], predicted: dict[str, Any] = PREDICTED) -> Costs:
    return fit_corrections(COSTS, predicted, measured, {"fitted_from": "runs/a"})


@pytest.mark.parametrize("overlap", [0.0, 0.9])
@pytest.mark.parametrize("dense_flops", [1e4, 1e6])
@pytest.mark.parametrize("pipeline", [SPARSE_DIST, PipelineSpec(PipelineKind.prefetch)])
def test_fitted_costs_predict_the_run_they_were_fitted_to(
    overlap: float, dense_flops: float, pipeline: PipelineSpec
) -> None:
    """Also where the layers hide a part of an exchange, and take longer than predicted."""

    def predict(costs: Costs) -> Mapping[str, float]:
        return (
            make_step_model(costs, World(2, 2), workload, pipeline=pipeline)
            .predict(QUANTITIES)
            .stage_s
        )

    workload = replace(WORKLOAD, dense_flops=dense_flops)
    costs = replace(COSTS, overlap=overlap)
    before = predict(costs)
    factors = {stage: 0.5 + 0.2 * number for number, stage in enumerate(STAGES)}
    measured = {stage: before[stage] * factors[stage] for stage in STAGES}
    fitted = fit_corrections(costs, before, measured, {})
    after = predict(fitted)
    assert dict(after) == pytest.approx(measured)
    # Fitted again, to another run of the fitted costs: factors add up, names do not repeat.
    again = {stage: 1.1 * seconds for stage, seconds in measured.items()}
    twice = fit_corrections(fitted, after, again, {})
    assert dict(predict(twice)) == pytest.approx(again)
    assert [fitted.name, twice.name] == ["cpu_1gbit-fitted-1", "cpu_1gbit-fitted-2"]


@pytest.mark.parametrize(
    ("measured", "predicted", "said"),
    [
        ({"pool": 1.0}, PREDICTED, "'pool'"),
        (PREDICTED, {"coffee": 1.0}, "'coffee'"),
        *(({**PREDICTED, "pool": bad}, PREDICTED, "^.*pool:") for bad in (-1e-3, math.nan, True)),
        (PREDICTED, {**PREDICTED, "pool": "fast"}, "pool:"),
    ],
)
def test_impossible_stages_are_refused(
    measured: dict[str, Any], predicted: dict[str, Any], said: str
) -> None:
    with pytest.raises(CostsError, match=said):
        fit_corrections(COSTS, predicted, measured, {"fitted_from": "runs/a"})


AHEAD: dict[str, Any] = {
    "pipeline": "look_ahead",
    "predicted_step_s": 0.01,
    "measured_step_s": 0.013,
}


def write_run(run_dir: Path, costs: str = "cpu_1gbit", **summary: Any) -> Path:
    predicted, measured = (dict.fromkeys(STAGES, seconds) for seconds in (0.001, 0.002))
    document = {"predicted_stage_s": predicted, "measured_stage_s": measured, **summary}
    (run_dir / "summary.json").write_text(json.dumps(document))
    (run_dir / "prediction.json").write_text(json.dumps({"costs": {"name": costs}}))
    return run_dir


def test_costs_are_fitted_from_a_run(tmp_path: Path) -> None:
    fitted = fit_from_run(write_run(tmp_path), "cpu_1gbit")
    assert fitted.origin == "fitted"
    assert fitted.correction("pool") == pytest.approx(2.0)
    # With look-ahead the whole step is scaled, in that pipeline alone.
    fitted = fit_from_run(write_run(tmp_path, **AHEAD), "cpu_1gbit")
    assert fitted.corrections == BUILTIN["cpu_1gbit"].corrections
    ahead, plain = (
        [
            make_model(costs, World(2, 1), WORKLOAD, pipeline=pipeline).predict(QUANTITIES)
            for costs in (BUILTIN["cpu_1gbit"], fitted)
        ]
        for pipeline in (PipelineSpec(PipelineKind.look_ahead), SPARSE_DIST)
    )
    assert ahead[1].step_s == pytest.approx(1.3 * ahead[0].step_s)
    assert sum(ahead[1].stage_s.values()) == pytest.approx(ahead[1].step_s)
    assert plain[1] == plain[0]
    assert fit_look_ahead_factor(fitted, 0.013, 0.026, {}).look_ahead_factor == pytest.approx(2.6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"costs": "elsewhere"}, "'elsewhere'"),
        ({**AHEAD, "predicted_step_s": 0}, "predicted_step_s"),
        ({"measured_stage_s": {}}, "measured_stage_s"),
        (None, "summary.json"),
    ],
)
def test_runs_that_cannot_be_fitted_are_refused(
    tmp_path: Path, change: dict[str, Any] | None, message: str
) -> None:
    run = write_run(tmp_path, **(change or {}))
    if change is None:
        (run / "summary.json").write_text("{")
    with pytest.raises(CostsError, match=message):
        fit_from_run(run, "cpu_1gbit")
