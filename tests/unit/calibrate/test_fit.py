"""Costs corrected by runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hotrec.calibrate.fit import fit_from_run
from hotrec.cost_model.builtin import BUILTIN
from hotrec.cost_model.costs import FAMILIES, CostsError, World
from hotrec.cost_model.step import Workload, predict_step
from hotrec.cost_model.store import write_costs
from tests.unit.cost_model.samples import LOOK_AHEAD, SPARSE_DIST, work_of

WORKLOAD = Workload(batch_size=512, dense_flops=1e6, bottom_frac=0.2, num_dense_values=10_000)
# A step of each of FAMILIES.
SPLIT = work_of(
    lookups=10_000, cold_rows=3000, cold_groups=1, hot_rows=1000, union_rows=1500, hot_groups=1
)
POOLED = work_of(pooled_ids_device=10_000, pooled_groups=1, pooled_sent_ids=5000)
STEPS = ((SPARSE_DIST, POOLED), (SPARSE_DIST, SPLIT), (LOOK_AHEAD, SPLIT))


def write_run(
    run_dir: Path, costs: str, family: str, loader_s: float = 0.0, **summary: Any
) -> Path:
    pipeline = "look_ahead" if family == "look_ahead" else "sparse_dist"
    steps = {"predicted_step_s": 0.01, "measured_step_s": 0.013}
    run_dir.mkdir()
    (run_dir / "summary.json").write_text(json.dumps({"pipeline": pipeline, **steps, **summary}))
    planned = {
        "costs": {"name": costs},
        "plan": {"is_hotrec": family != "torchrec"},
        "chosen": "one",
        "plans": {"one": {"loader_s": loader_s}},
    }
    (run_dir / "prediction.json").write_text(json.dumps(planned))
    return run_dir


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_scales_the_steps_of_its_kind(tmp_path: Path, family: str) -> None:
    before = BUILTIN["cpu_1gbit"]
    fitted = fit_from_run(write_run(tmp_path / "a", before.name, family), before.name)
    write_costs(fitted, tmp_path / "costs")
    run = write_run(tmp_path / "b", fitted.name, family)
    twice = fit_from_run(run, str(tmp_path / "costs"))
    assert [fitted.name, twice.name] == ["cpu_1gbit-fitted-1", "cpu_1gbit-fitted-2"]
    assert {fitted.origin, twice.origin} == {"fitted"}
    for other, (pipeline, quantities) in zip(FAMILIES, STEPS, strict=True):
        steps = [
            predict_step(costs, World(2, 1), WORKLOAD, pipeline, quantities)
            for costs in (before, fitted, twice)
        ]
        factor = 1.3 if other == family else 1.0
        assert steps[1].step_s == pytest.approx(factor * steps[0].step_s)
        assert steps[2].step_s == pytest.approx(factor**2 * steps[0].step_s)
        assert sum(steps[1].stage_s.values()) == pytest.approx(steps[1].step_s)


def test_the_loader_is_not_scaled(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "cpu_1gbit", FAMILIES[0], loader_s=0.004)
    fitted = fit_from_run(run, "cpu_1gbit")
    assert fitted.factors[FAMILIES[0]] == pytest.approx(0.009 / 0.006)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"costs": "elsewhere"}, "'elsewhere'"),
        *(({"predicted_step_s": bad}, "predicted_step_s") for bad in (0, -1.0, "fast", True)),
        ({"measured_step_s": None}, "measured_step_s"),
        (None, "summary.json"),
    ],
)
def test_runs_that_cannot_be_fitted_are_refused(
    tmp_path: Path, change: dict[str, Any] | None, message: str
) -> None:
    run = write_run(tmp_path / "a", **{"costs": "cpu_1gbit", "family": "in_line", **(change or {})})
    if change is None:
        (run / "summary.json").write_text("{")
    with pytest.raises(CostsError, match=message):
        fit_from_run(run, "cpu_1gbit")
