"""What a plan's page says of the pipeline that was predicted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hotrec.report.passages import NOTHING
from hotrec.report.units import show_frac, show_seconds

LOOK_AHEAD = "look_ahead"
# A step this little above its bound is at it: the solver stops there.
LEAST_GAP_FRAC = 1e-4
EXCHANGES = ("ids_exchange", "rows_exchange", "grads_exchange", "hot_exchange")


def pipeline_of(plan: Mapping[str, Any]) -> str | None:
    """Such as ``look_ahead, fp16``; None for plans that do not say."""
    pipeline = plan.get("pipeline")
    if pipeline is None:
        return None
    wire = plan.get("wire") or "fp32"
    return str(pipeline) if wire == "fp32" else f"{pipeline}, {wire}"


def pipeline_cells(plans: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[str]]:
    """Each plan's cell of a column of pipelines; empty if no plan says its pipeline."""
    named = {name: pipeline_of(plan) for name, plan in plans.items()}
    return {name: (text or NOTHING,) for name, text in named.items()} if any(named.values()) else {}


def break_even_sentences(document: Mapping[str, Any]) -> list[str]:
    """Of which pipeline the rates are from which on a row pays as a replica."""
    if not document.get("break_even") or document.get("pipeline") != LOOK_AHEAD:
        return []
    return ["Rates of break-even are those of sparse_dist: look_ahead hides what cold rows send."]


def proof_sentences(document: Mapping[str, Any]) -> list[str]:
    """How far what was chosen is from the best there is, where that is known."""
    step_s, bound_s = document["plans"][document["chosen"]]["step_s"], document.get("bound_s")
    if not bound_s:
        if any(plan.get("pipeline") == LOOK_AHEAD for plan in document["plans"].values()):
            return [
                "With look_ahead the hot rows are the best of several sets by prediction; none is "
                "proven to be the best (the gap is stated for sparse_dist only)."
            ]
        return []
    over = step_s / bound_s - 1
    return [
        f"No placement with hot rows is faster than {show_seconds(bound_s)} by this model; "
        + (
            f"what was chosen is {show_frac(over)} slower."
            if over > LEAST_GAP_FRAC
            else "what was chosen is as fast."
        )
    ]


def stage_sentences(document: Mapping[str, Any]) -> list[str]:
    """How the table of stages is to be read for plans with look-ahead."""
    sentences = []
    for name, plan in document["plans"].items():
        if plan.get("pipeline") != LOOK_AHEAD:
            continue
        exposed_s = sum(plan["stage_s"].get(stage, 0.0) for stage in EXCHANGES)
        sentences.append(
            f"{name} is predicted with {pipeline_of(plan)}: "
            f"{show_seconds(exposed_s)} of its step, {show_frac(exposed_s / plan['step_s'])}, "
            "are communication that nothing hides. Lookups and updates of rows go on in the "
            "communication thread, where a run's stages do not show them; here they count as "
            "computation, since they share the cores."
        )
        break  # the others are read alike
    return sentences
