"""Correct costs by the measured step of a training run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hotrec.artifact import read_record
from hotrec.cost_model.costs import AHEAD, IN_LINE, TORCHREC, Costs, CostsError
from hotrec.cost_model.store import find_costs
from hotrec.runtime.run_dir import PREDICTION, SUMMARY, run_at
from hotrec.types import PipelineKind


def fit_factor(
    costs: Costs, family: str, predicted_s: Any, measured_s: Any, facts: Mapping[str, Any]
) -> Costs:
    """Scale the predictions of a family of steps to match the step of a run.

    Args:
        costs: Costs that the run was planned with.
        family: One of FAMILIES.
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
    factors = dict(costs.factors)
    factors[family] = factors.get(family, 1.0) * measured_s / predicted_s
    return _renamed(replace(costs, factors=factors), facts)


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


def fit_from_run(run_dir: Path, where: str) -> Costs:
    """Correct the costs that a run was planned with, a directory or a built-in set, by its step.

    Raises:
        CostsError: If the run has no predicted step, or was planned with other costs.
    """
    run_dir = run_at(run_dir, SUMMARY) or run_dir
    summary = _read_document(run_dir / SUMMARY)
    costs = find_costs(where)
    document = _read_document(run_dir / PREDICTION)
    planned = document.get("costs", {}).get("name")
    if planned != costs.name:
        raise CostsError(
            f"{run_dir / PREDICTION}: expected a run planned with the costs {costs.name!r} of "
            f"{where}, got one planned with {planned!r}. Set paths.costs to those."
        )
    plan = document.get("plans", {}).get(document.get("chosen"), {})
    steps = [summary.get(f"{of}_step_s") for of in ("predicted", "measured")]
    # The loader's part of a step has costs of its own, which no factor scales.
    predicted_s, measured_s = (
        step_s - plan.get("loader_s", 0.0) if isinstance(step_s, float) else step_s
        for step_s in steps
    )
    is_ahead = summary.get("pipeline") == PipelineKind.look_ahead.name
    is_split = document.get("plan", {}).get("is_hotrec", True)
    family = AHEAD if is_ahead else IN_LINE if is_split else TORCHREC
    return fit_factor(costs, family, predicted_s, measured_s, {"fitted_from": str(run_dir)})


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
