"""Correct costs by the measured stages of training runs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hotrec.cost_model.costs import Costs, CostsError
from hotrec.cost_model.store import find_costs
from hotrec.runtime.run_dir import PREDICTION, SUMMARY
from hotrec.types import STAGES

# Joins the names of stages that were measured together, as in "row_update+hot_exchange".
JOINT = "+"


@dataclass(frozen=True)
class StageTimes:
    """Stage times of a run.

    Args:
        predicted_s: Seconds by stage, predicted with the costs to correct.
        measured_s: Seconds by stage; the names of stages measured together are joined by ``+``.
    """

    predicted_s: Mapping[str, float]
    measured_s: Mapping[str, float]


def fit_corrections(costs: Costs, runs: Sequence[StageTimes], facts: Mapping[str, Any]) -> Costs:
    """Correct costs by measured stages.

    The factor of a stage is the median over the runs of measured / predicted, times its present
    factor; stages measured together share one. The time of the stage "other" and of stages without
    a prediction becomes the overhead of a step.

    Args:
        costs: Costs that the runs were predicted with.
        runs: Stage times of at least one run.
        facts: Facts about the runs to record in the new costs.

    Raises:
        CostsError: If a predicted stage was not measured, or a time is not a finite number >= 0.
    """
    if not runs:
        raise CostsError("costs fit: expected the stages of at least one run, got none.")
    ratios: dict[str, list[float]] = {}
    overheads = []
    for run in runs:
        _check_stages(run)
        overhead_s = 0.0
        for names, measured_s in run.measured_s.items():
            stages = [stage for stage in names.split(JOINT) if stage != "other"]
            predicted_s = sum(run.predicted_s.get(stage, 0.0) for stage in stages)
            if predicted_s <= 0:
                overhead_s += measured_s
                continue
            for stage in stages:
                ratios.setdefault(stage, []).append(measured_s / predicted_s)
        overheads.append(overhead_s)
    corrections = dict(costs.corrections)
    overhead, waiting = dict(costs.stage_overhead_s), dict(costs.waiting_frac)
    factors = {stage: float(np.median(found)) for stage, found in ratios.items()}
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
        overhead_s=float(np.median(overheads)),
        stage_overhead_s=overhead,
        waiting_frac=waiting,
        corrections=corrections,
        facts={**costs.facts, **facts, "fitted_name": base, "num_fits": num_fits},
    )


def _check_stages(run: StageTimes) -> None:
    measured = [stage for names in run.measured_s for stage in names.split(JOINT)]
    unknown = sorted(set(measured + list(run.predicted_s)) - set(STAGES))
    if unknown:
        raise CostsError(f"run stages: expected some of {list(STAGES)}, got {unknown}.")
    twice = sorted({stage for stage in measured if measured.count(stage) > 1})
    if twice:
        raise CostsError(f"run measured_stage_s: expected each stage once, got {twice} twice.")
    missing = [stage for stage in STAGES if stage not in measured]
    if missing:
        raise CostsError(
            f"run measured_stage_s: expected all of {list(STAGES)}, got none for {missing}. "
            "Train with this version for more than 50 steps, then fit from that run."
        )
    if not run.predicted_s:
        raise CostsError(
            "run predicted_stage_s: expected a predicted time for each stage, got none. "
            "Make a plan with costs (placement=cost) and train with it."
        )
    for what, times in (("predicted", run.predicted_s), ("measured", run.measured_s)):
        for names, seconds in times.items():
            is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
            if not is_number or not math.isfinite(seconds) or seconds < 0:
                raise CostsError(
                    f"run {what}_stage_s {names}: expected seconds of at least 0, got {seconds!r}."
                )


def fit_from_run(run_dir: Path, where: str) -> Costs:
    """Correct the costs that a run was planned with by the times of its stages.

    Args:
        run_dir: Directory of a training run with predicted and measured stages.
        where: Costs of the run's plan: a directory, or the name of a built-in set.

    Raises:
        CostsError: If the run has no stage times, used look-ahead, or was planned with other costs.
    """
    summary = _read_document(run_dir / SUMMARY)
    if summary.get("pipeline") == "look_ahead":
        raise CostsError(
            f"{run_dir / SUMMARY} pipeline: expected sparse_dist or base, whose stages are all on "
            "the main thread, got look_ahead. Take a run with pipeline=sparse_dist."
        )
    times = []
    for key in ("predicted_stage_s", "measured_stage_s"):
        found = summary.get(key)
        if not isinstance(found, Mapping) or not found:
            raise CostsError(
                f"{run_dir / SUMMARY} {key}: expected seconds by stage, got {found!r}. Take a run "
                "that was planned with costs and made more than 50 steps."
            )
        times.append({str(stage): seconds for stage, seconds in found.items()})
    costs = find_costs(where)
    planned = _read_document(run_dir / PREDICTION).get("costs", {}).get("name")
    if planned != costs.name:
        raise CostsError(
            f"{run_dir / PREDICTION}: expected a run planned with the costs {costs.name!r} of "
            f"{where}, got one planned with {planned!r}. Set paths.costs to those."
        )
    return fit_corrections(costs, [StageTimes(*times)], {"fitted_from": str(run_dir)})


def _read_document(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CostsError(
            f"{path}: expected a JSON file written by `hotrec train`, got {error!r}. Set "
            "calibrate.from_run to its run directory."
        ) from error
    if not isinstance(document, dict):
        raise CostsError(f"{path}: expected a JSON object, got {type(document).__name__}.")
    return document
