"""Correct costs by the measured stages of a training run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hotrec.cost_model.costs import Costs, CostsError
from hotrec.cost_model.store import find_costs
from hotrec.runtime.run_dir import PREDICTION, SUMMARY
from hotrec.types import STAGES

# Joins the names of stages that were measured together, as in "row_update+hot_exchange".
JOINT = "+"


def fit_corrections(
    costs: Costs,
    predicted_s: Mapping[str, float],
    measured_s: Mapping[str, float],
    facts: Mapping[str, Any],
) -> Costs:
    """Correct costs by the stages of a run.

    The factor of a stage is measured / predicted, times its present factor; stages measured
    together, their names joined by ``+``, share one. The time of the stage "other" and of stages
    without a prediction becomes the overhead of a step.

    Raises:
        CostsError: If a predicted stage was not measured, or a time is not a finite number >= 0.
    """
    _check_stages(predicted_s, measured_s)
    factors: dict[str, float] = {}
    overhead_s = 0.0
    for names, seconds in measured_s.items():
        stages = [stage for stage in names.split(JOINT) if stage != "other"]
        predicted = sum(predicted_s.get(stage, 0.0) for stage in stages)
        if predicted > 0:
            factors |= dict.fromkeys(stages, seconds / predicted)
        else:
            overhead_s += seconds
    corrections = dict(costs.corrections)
    overhead, waiting = dict(costs.stage_overhead_s), dict(costs.waiting_frac)
    for stage, factor in factors.items():
        corrections[stage] = costs.correction(stage) * factor
        overhead[stage] = overhead.get(stage, 0.0) * factor
        # Waiting is a share of the dense layers' time, whose own factor applies already.
        waiting[stage] = waiting.get(stage, 0.0) * factor / factors.get("dense", 1.0)
    # The overhead already includes the exposed part of the dense layers' all-reduce.
    corrections["other"] = 0.0
    num_fits = int(costs.facts.get("num_fits", 0)) + 1
    base = str(costs.facts.get("fitted_name", costs.name))
    return replace(
        costs,
        # A new name, so that no run is compared with costs that it was not planned with.
        name=f"{base}-fitted-{num_fits}",
        origin="fitted",
        overhead_s=overhead_s,
        stage_overhead_s=overhead,
        waiting_frac=waiting,
        corrections=corrections,
        facts={**costs.facts, **facts, "fitted_name": base, "num_fits": num_fits},
    )


def _check_stages(predicted_s: Mapping[str, float], measured_s: Mapping[str, float]) -> None:
    measured = [stage for names in measured_s for stage in names.split(JOINT)]
    if sorted(measured) != sorted(STAGES) or not set(predicted_s) <= set(STAGES):
        raise CostsError(
            f"run measured_stage_s: expected each stage of {list(STAGES)} once, got {measured}, "
            f"with predictions of {list(predicted_s)}. Train with this version for more than 50 "
            "steps, then fit from that run."
        )
    for what, times in (("predicted", predicted_s), ("measured", measured_s)):
        for names, seconds in times.items():
            is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
            if not is_number or not math.isfinite(seconds) or seconds < 0:
                raise CostsError(
                    f"run {what}_stage_s {names}: expected seconds of at least 0, got {seconds!r}."
                )


def fit_from_run(run_dir: Path, where: str) -> Costs:
    """Correct the costs that a run was planned with, a directory or a built-in set, by its stages.

    Raises:
        CostsError: If the run has no stage times, used look-ahead, or was planned with other costs.
    """
    summary = _read_document(run_dir / SUMMARY)
    if summary.get("pipeline") == "look_ahead":
        raise CostsError(
            f"{run_dir / SUMMARY} pipeline: expected sparse_dist or base, whose stages are all on "
            "the main thread, got look_ahead. Take a run with pipeline=sparse_dist."
        )
    predicted, measured = summary.get("predicted_stage_s"), summary.get("measured_stage_s")
    if not (isinstance(predicted, dict) and isinstance(measured, dict) and predicted and measured):
        raise CostsError(
            f"{run_dir / SUMMARY} predicted_stage_s and measured_stage_s: expected seconds by "
            f"stage, got {predicted!r} and {measured!r}. Take a run that was planned with costs "
            "(placement=cost) and made more than 50 steps."
        )
    costs = find_costs(where)
    planned = _read_document(run_dir / PREDICTION).get("costs", {}).get("name")
    if planned != costs.name:
        raise CostsError(
            f"{run_dir / PREDICTION}: expected a run planned with the costs {costs.name!r} of "
            f"{where}, got one planned with {planned!r}. Set paths.costs to those."
        )
    return fit_corrections(costs, predicted, measured, {"fitted_from": str(run_dir)})


def _read_document(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        document = error
    if not isinstance(document, dict):
        raise CostsError(
            f"{path}: expected a JSON object written by `hotrec train`, got {document!r}. Set "
            "calibrate.from_run to its run directory."
        )
    return document
