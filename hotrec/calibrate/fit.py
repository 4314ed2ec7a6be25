"""Correct costs by the measured stages of a training run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hotrec.artifact import read_record
from hotrec.cost_model.costs import TORCHREC_STAGE, Costs, CostsError
from hotrec.cost_model.store import find_costs
from hotrec.runtime.run_dir import PREDICTION, SUMMARY, run_at
from hotrec.types import STAGES, PipelineKind

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
        for name in (stage, TORCHREC_STAGE.format(stage)):
            if name == stage or name in corrections:
                corrections[name] = corrections.get(name, 1.0) * factor
        overhead[stage] = overhead.get(stage, 0.0) * factor
        # Waiting is a share of the dense layers' time, whose own factor applies already.
        waiting[stage] = waiting.get(stage, 0.0) * factor / factors.get("dense", 1.0)
    # The overhead already includes the exposed part of the dense layers' all-reduce.
    corrections["other"] = 0.0
    fitted = replace(
        costs,
        overhead_s=overhead_s,
        stage_overhead_s=overhead,
        waiting_frac=waiting,
        corrections=corrections,
        loader={},  # the stages of a run include it
    )
    return _renamed(fitted, facts)


def fit_look_ahead_factor(
    costs: Costs, predicted_s: Any, measured_s: Any, facts: Mapping[str, Any]
) -> Costs:
    """Scale predictions of look-ahead to match the step of a run with it.

    Its stages overlap those of other steps, so they are not corrected one by one.

    Args:
        costs: Costs that the run was planned with.
        predicted_s: Predicted step.
        measured_s: Measured step.
        facts: More facts for the reader.

    Raises:
        CostsError: If a time is not a finite number above 0.
    """
    for what, seconds in (("predicted", predicted_s), ("measured", measured_s)):
        is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if not is_number or not math.isfinite(seconds) or seconds <= 0:
            raise CostsError(
                f"run {what}_step_s: expected seconds above 0, got {seconds!r}. Use a run that "
                "was planned with costs (placement=cost) and made more than 50 steps."
            )
    factor = costs.look_ahead_factor * measured_s / predicted_s
    return _renamed(replace(costs, look_ahead_factor=factor), facts)


def _renamed(costs: Costs, facts: Mapping[str, Any]) -> Costs:
    """Fitted costs have a new name, so that no run is compared with costs that it did not use."""
    num_fits = int(costs.facts.get("num_fits", 0)) + 1
    base = str(costs.facts.get("fitted_name", costs.name))
    return replace(
        costs,
        name=f"{base}-fitted-{num_fits}",
        origin="fitted",
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

    A run with look-ahead corrects them by its whole step.

    Raises:
        CostsError: If the run has no stage times, or was planned with other costs.
    """
    run_dir = run_at(run_dir, SUMMARY) or run_dir
    summary = _read_document(run_dir / SUMMARY)
    predicted, measured = summary.get("predicted_stage_s"), summary.get("measured_stage_s")
    if not (isinstance(predicted, dict) and isinstance(measured, dict) and predicted and measured):
        raise CostsError(
            f"{run_dir / SUMMARY} predicted_stage_s and measured_stage_s: expected seconds by "
            f"stage, got {predicted!r} and {measured!r}. Use a run that was planned with costs "
            "(placement=cost) and made more than 50 steps."
        )
    costs = find_costs(where)
    planned = _read_document(run_dir / PREDICTION).get("costs", {}).get("name")
    if planned != costs.name:
        raise CostsError(
            f"{run_dir / PREDICTION}: expected a run planned with the costs {costs.name!r} of "
            f"{where}, got one planned with {planned!r}. Set paths.costs to those."
        )
    facts = {"fitted_from": str(run_dir)}
    if summary.get("pipeline") == PipelineKind.look_ahead.name:
        predicted_s, measured_s = (summary.get(f"{w}_step_s") for w in ("predicted", "measured"))
        return fit_look_ahead_factor(costs, predicted_s, measured_s, facts)
    return fit_corrections(costs, predicted, measured, facts)


def _read_document(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(read_record(path))
    except (OSError, ValueError) as error:
        document = error
    if not isinstance(document, dict):
        raise CostsError(
            f"{path}: expected a JSON object written by `hotrec train`, got {document!r}. Set "
            "calibrate.from_run to its run directory."
        )
    return document
