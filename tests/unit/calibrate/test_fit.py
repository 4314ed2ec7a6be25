"""Costs corrected by runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hotrec.calibrate.fit import fit_corrections, fit_from_run, fit_look_ahead_factor
from hotrec.cost_model.builtin import BUILTIN
from hotrec.cost_model.costs import Costs, CostsError, World
from hotrec.cost_model.forms import LOOK_AHEAD, SPARSE_DIST, PipelineSpec, Workload
from hotrec.cost_model.step import make_model, make_step_model
from hotrec.types import STAGES, PipelineKind
from tests.unit.cost_model.samples import work_of

COSTS = replace(BUILTIN["cpu_1gbit"], overlap=0.0)
PREDICTED = {stage: 0.001 * (number + 1) for number, stage in enumerate(STAGES)}
WORKLOAD = Workload(batch_size=512, dense_flops=1e6, bottom_frac=0.2, num_dense_values=10_000)
QUANTITIES = work_of(
    lookups=10_000, rows_device=3000, cold_groups=1, hot_rows=1000, union_rows=1500, hot_groups=1
)


def fit(measured: dict[str, Any], predicted: dict[str, Any] = PREDICTED) -> Costs:
    return fit_corrections(COSTS, predicted, measured, {"fitted_from": "runs/a"})


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


def test_a_correction_of_torchrecs_messages_is_scaled_with_their_stage() -> None:
    before = replace(COSTS, corrections={"rows_exchange": 0.5, "torchrec_rows_exchange": 2.0})
    fitted = fit_corrections(before, PREDICTED, times(rows_exchange=3.0), {})
    assert fitted.correction("rows_exchange") == pytest.approx(1.5)
    assert fitted.correction("rows_exchange", of_torchrec=True) == pytest.approx(6.0)
    assert "torchrec_dense" not in fitted.corrections


def test_stages_measured_together_share_a_factor() -> None:
    joint = times()
    both = joint.pop("row_update") + joint.pop("hot_exchange")
    fitted = fit({**joint, "row_update+hot_exchange": 3 * both})
    assert fitted.correction("row_update") == pytest.approx(3.0)
    assert fitted.correction("hot_exchange") == pytest.approx(3.0)


def test_time_for_which_nothing_is_predicted_becomes_overhead() -> None:
    predicted = {**PREDICTED, "route": 0.0}
    fitted = fit(times(), predicted)
    assert fitted.overhead_s == pytest.approx(PREDICTED["other"] + PREDICTED["route"])
    assert "route" not in fitted.corrections


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
    ("measured", "predicted", "key"),
    [
        ({"pool": 1.0}, PREDICTED, r"expected each stage .* once, got \['pool'\]"),
        ({**PREDICTED, "coffee": 1.0}, PREDICTED, "expected each stage .*'coffee'"),
        ({**PREDICTED, "pool+dense": 1.0}, PREDICTED, "expected each stage .* once"),
        (PREDICTED, {"coffee": 1.0}, r"with predictions of \['coffee'\]"),
        *(
            case
            for bad in (-1e-3, float("nan"), float("inf"), "fast", True, None)
            for case in (
                ({**PREDICTED, "pool": bad}, PREDICTED, "measured_stage_s pool: expected seconds"),
                (PREDICTED, {**PREDICTED, "pool": bad}, "predicted_stage_s pool: expected seconds"),
            )
        ),
    ],
)
def test_impossible_stages_are_refused(
    measured: dict[str, Any], predicted: dict[str, Any], key: str
) -> None:
    with pytest.raises(CostsError, match=key):
        fit(measured, predicted)


def write_run(run_dir: Path, costs: Any = "cpu_1gbit", **summary: Any) -> Path:
    predicted, measured = (dict.fromkeys(STAGES, seconds) for seconds in (0.001, 0.002))
    document = {"predicted_stage_s": predicted, "measured_stage_s": measured, **summary}
    (run_dir / "summary.json").write_text(json.dumps(document))
    (run_dir / "prediction.json").write_text(json.dumps({"costs": {"name": costs}}))
    return run_dir


def test_costs_are_fitted_from_a_run(tmp_path: Path) -> None:
    fitted = fit_from_run(write_run(tmp_path), "cpu_1gbit")
    assert fitted.origin == "fitted"
    assert fitted.correction("pool") == pytest.approx(2.0)
    assert fitted.facts["fitted_from"] == str(tmp_path)


def test_a_run_with_look_ahead_scales_its_step(tmp_path: Path) -> None:
    run = write_run(tmp_path, pipeline="look_ahead", predicted_step_s=0.01, measured_step_s=0.013)
    fitted = fit_from_run(run, "cpu_1gbit")
    assert fitted.corrections == BUILTIN["cpu_1gbit"].corrections
    ahead, plain = (
        [
            make_model(costs, World(2, 1), WORKLOAD, pipeline=pipeline).predict(QUANTITIES)
            for costs in (BUILTIN["cpu_1gbit"], fitted)
        ]
        for pipeline in (LOOK_AHEAD, SPARSE_DIST)
    )
    assert ahead[1].step_s == pytest.approx(1.3 * ahead[0].step_s)
    assert sum(ahead[1].stage_s.values()) == pytest.approx(ahead[1].step_s)
    assert plain[1] == plain[0]
    again = fit_look_ahead_factor(fitted, 0.013, 0.026, {})
    assert again.look_ahead_factor == pytest.approx(2.6)
    assert [fitted.name, again.name] == ["cpu_1gbit-fitted-1", "cpu_1gbit-fitted-2"]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"costs": "elsewhere"}, "planned with the costs 'cpu_1gbit' .* with 'elsewhere'"),
        *(
            (
                {"pipeline": "look_ahead", "predicted_step_s": 0.1, **step},
                f"{key}: expected seconds",
            )
            for step, key in (
                ({"measured_step_s": None}, "measured_step_s"),
                ({"measured_step_s": 0.1, "predicted_step_s": 0}, "predicted_step_s"),
            )
        ),
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
    for text in (None, "[]", "{"):
        if text is not None:
            (tmp_path / "summary.json").write_text(text)
        with pytest.raises(CostsError, match="expected a JSON object written by"):
            fit_from_run(tmp_path, "cpu_1gbit")
