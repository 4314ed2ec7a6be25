"""Sentences on measured steps: against the prediction, and against TorchRec's plan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hotrec.planning.trial import ratio_interval
from hotrec.report.read import Run
from hotrec.report.units import show_bytes, show_error, show_seconds
from hotrec.runtime.run_dir import PLAN_JSON

BASELINE_PLACEMENT = "torchrec"
# First lines of a run have the steps that compile, allocate and start workers.
NUM_SKIPPED_LINES = 1
MIN_LINES = 3
# Sent whole in less than half a second at 1 Gbit/s, so that splitting rows has little to save.
SMALL_TABLES_BYTES = 50e6
PLACES = ("device", "host")


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
    name, text = (
        f"{run.name}{f' ({pipeline})' if pipeline else ''}",
        f"{show_seconds(step_s)} a step",
    )
    if predicted_s is not None and (error := run.number("step_error_frac")) is not None:
        text += f", predicted {show_seconds(predicted_s)} ({show_error(error)})"
    if baseline is None or (their_s := baseline.number("step_p50_s")) is None:
        return f"{name}: {text}."
    other = baseline.name
    if str(baseline.summary.get("placement")).startswith(BASELINE_PLACEMENT):
        other += " (TorchRec's plan)"
    interval = step_over(run, baseline)
    if interval is None:
        why = f"too few lines of metrics with equal batches to compare it with {other}"
        return f"{name}: {text}; {why}."
    text = f"{text}; {baseline.name} takes {show_seconds(their_s)}."
    if have_same_plan(run, baseline):
        return f"{name} trained the same plan as {other}; what differs is the machine: {text}"
    speed = show_speed(*interval)
    tables_bytes = sum(baseline.number(f"measured_{place}_bytes") or 0.0 for place in PLACES)
    if 0 < tables_bytes < SMALL_TABLES_BYTES and interval[1] >= 1:
        text += f" The tables are small ({show_bytes(tables_bytes)} on the fullest rank)."
    if interval[0] > 1:
        text += " A longer trial (plan.trial_s) or costs of a quiet machine may choose better."
    how = f"is {speed} than {other}" if speed else f"is as fast as {other}, within the noise"
    return f"{name} {how}: {text}"


def have_same_plan(run: Run, other: Run) -> bool:
    """Whether two runs recorded the same shards, hot rows and pipeline."""
    if any(run.summary.get(key) != other.summary.get(key) for key in ("pipeline", "hot_rows")):
        return False
    files = [of.path / PLAN_JSON for of in (run, other)]
    return all(map(Path.is_file, files)) and files[0].read_bytes() == files[1].read_bytes()


def show_speed(low: float, high: float) -> str:
    """An interval of the ratio of two step times in words; empty where it has 1 in it."""
    if high < 1:
        return f"{1 - high:.0%} to {1 - low:.0%} faster"
    return f"{low - 1:.0%} to {high - 1:.0%} slower" if low > 1 else ""


def step_over(run: Run, other: Run) -> tuple[float, float] | None:
    """The interval of the run's step over the other's; None with few lines or another batch."""
    if any(run.number(name) != other.number(name) for name in ("world_size", "batch_size")):
        return None
    pairs = _pairs(run, other)
    if len(pairs) < MIN_LINES:
        return None
    ours, theirs = zip(*pairs, strict=True)
    return ratio_interval(theirs, ours)


def _pairs(run: Run, other: Run) -> list[tuple[float, float]]:
    """Median steps of both runs' lines that end with the same step, and so saw as many samples."""
    ours, theirs = (dict(zip(*of.series("step_p50_s"), strict=True)) for of in (run, other))
    steps = sorted(ours.keys() & theirs.keys())[NUM_SKIPPED_LINES:]
    return [(ours[step], theirs[step]) for step in steps]
