"""The choice between predictions, what it can claim, and which of them a trial should measure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hotrec.cost_model.costs import Costs
from hotrec.planning.predict import ALL_COLD, Predicted, is_own
from hotrec.types import PipelineKind

# Of more candidates each would get too few steps of a trial.
MOST_TRIED = 6


@dataclass(frozen=True)
class Decision:
    """The choice between predictions, which are by name."""

    chosen: str  # ``own_name``, or "torchrec <plan>"
    why: str  # for the user
    predicted: Mapping[str, Predicted]


def fastest_of(predicted: Mapping[str, Predicted]) -> str:
    """The name of the fastest prediction."""
    return min(predicted, key=lambda name: predicted[name].step.step_s)


def in_doubt(decision: Decision, costs: Costs, *, may_decline: bool = True) -> list[str]:
    """The candidates that may be fastest, as far as predictions can tell, the likeliest first.

    Their intervals reach below the upper end of the chosen one's. Without ``may_decline``
    TorchRec's own plans are not among them.
    """
    predicted = decision.predicted
    _, most_s = costs.interval_s(predicted[decision.chosen].step.step_s)
    names = [
        name
        for name, plan in predicted.items()
        if name != ALL_COLD
        and (may_decline or is_own(name))
        and costs.interval_s(plan.step.step_s)[0] < most_s
    ]

    def order(name: str) -> tuple[bool, float]:
        # base is predicted as sparse_dist is, but for what that overlaps.
        is_base = predicted[name].pipeline.kind is PipelineKind.base
        return is_base, predicted[name].step.step_s

    return sorted(names, key=order)[:MOST_TRIED]


def explain(chosen: str, predicted: Mapping[str, Predicted], costs: Costs) -> str:
    """Says what was chosen against the best of the other kind; claims no gain within the noise."""
    others = {n: p for n, p in predicted.items() if is_own(n) is not is_own(chosen)}
    others.pop(ALL_COLD, None)
    step_s = predicted[chosen].step.step_s
    ours = f"{chosen} is predicted to take {show_interval(step_s, costs)} a step"
    if not others:
        return f"{ours}."
    other = fastest_of(others)
    other_s = others[other].step.step_s
    theirs = f"{other}, {show_interval(other_s, costs)}"
    if costs.interval_s(step_s)[1] < costs.interval_s(other_s)[0]:
        return f"{ours}, {1 - step_s / other_s:.0%} less than {theirs}."
    if step_s > other_s:
        return f"{ours}, more than {theirs}; placement.may_decline=false keeps hot and cold rows."
    reason = "" if is_own(chosen) else " Splitting rows is not predicted to pay here."
    return f"{ours}, within the uncertainty of {theirs}.{reason}"


def show_interval(step_s: float, costs: Costs) -> str:
    """Such as ``12.9 ms (12.1 to 14.0)``."""
    low_s, high_s = costs.interval_s(step_s)
    return f"{1e3 * step_s:.3g} ms ({1e3 * low_s:.3g} to {1e3 * high_s:.3g})"
