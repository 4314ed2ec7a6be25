"""What the measured runs say, in plain words."""

from __future__ import annotations

from collections.abc import Sequence

from hotrec.planning.trial import ratio_interval
from hotrec.report.read import Run
from hotrec.report.units import show_error, show_seconds

# First lines of a run have the steps that compile, allocate and start workers.
NUM_SKIPPED_LINES = 1
MIN_LINES = 3


def verdicts(runs: Sequence[Run], baseline: Run | None) -> list[str]:
    """A sentence for each run that measured its steps: its step, the prediction, the baseline."""
    return [
        _verdict(run, None if run is baseline else baseline)
        for run in runs
        if run.number("step_p50_s") is not None
    ]


def _verdict(run: Run, baseline: Run | None) -> str:
    step_s, predicted_s = run.number("step_p50_s"), run.number("predicted_step_s")
    assert step_s is not None
    pipeline = run.summary.get("pipeline")
    text = f"{run.name}{f' ({pipeline})' if pipeline else ''}: {show_seconds(step_s)} a step"
    if predicted_s is not None and (error := run.number("step_error_frac")) is not None:
        text += f", predicted {show_seconds(predicted_s)} ({show_error(error)})"
    if baseline is None or baseline.number("step_p50_s") is None:
        return f"{text}."
    pairs = _pairs(run, baseline)
    if len(pairs) < MIN_LINES:
        return f"{text}; too few lines of metrics to compare it with {baseline.name}."
    ours, theirs = zip(*pairs, strict=True)
    low, high = ratio_interval(theirs, ours)
    if low <= 1 <= high:
        return f"{text}, no difference from {baseline.name} within the noise."
    if high < 1:
        return f"{text}, {1 - high:.0%} to {1 - low:.0%} faster than {baseline.name}."
    advice = "A longer trial (plan.trial_s) or costs of a quiet machine may choose better."
    return f"{text}, {low - 1:.0%} to {high - 1:.0%} slower than {baseline.name}. {advice}"


def _pairs(run: Run, other: Run) -> list[tuple[float, float]]:
    """Median steps of both runs' lines that end with the same step, and so saw as many samples."""
    ours, theirs = (dict(zip(*of.series("step_p50_s"), strict=True)) for of in (run, other))
    steps = sorted(ours.keys() & theirs.keys())[NUM_SKIPPED_LINES:]
    return [(ours[step], theirs[step]) for step in steps]
