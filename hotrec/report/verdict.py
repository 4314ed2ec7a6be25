"""Sentences on measured steps: against the prediction, and beside TorchRec's plan.

Nothing here says that a run is faster than another: runs one after the other see another machine
each, and differ by up to twice without a reason of their own. What compares two plans takes turns:
the trial of a run, and ``hotrec bench``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hotrec.report.names import TORCHREC, plan_name
from hotrec.report.read import Run
from hotrec.report.units import show_error, show_seconds
from hotrec.runtime.run_dir import PLAN_JSON

NO_CLAIM = "They did not take turns: no claim of speed; `hotrec bench` compares plans in turns."


def verdicts(runs: Sequence[Run], baseline: Run | None) -> list[str]:
    """A sentence for each run that measured its steps: its step, the prediction, the baseline.

    Before them, what is suspicious about a run's quality.
    """
    suspicions = [f"{run.name}: {text}" for run in runs for text in suspicion(run.summary)]
    return [
        *suspicions,
        *(
            _verdict(run, None if run is baseline else baseline)
            for run in runs
            if run.number("step_p50_s") is not None
        ),
    ]


def _verdict(run: Run, baseline: Run | None) -> str:
    step_s, predicted_s = run.number("step_p50_s"), run.number("predicted_step_s")
    assert step_s is not None
    text = f"{_described(run)}: {show_seconds(step_s)} a step"
    if predicted_s is not None:
        # Of the numbers that stand here.
        text += f", predicted {show_seconds(predicted_s)} ({show_error(predicted_s / step_s - 1)})"
    if baseline is None or (their_s := baseline.number("step_p50_s")) is None:
        return f"{text}."
    text += f"; {_described(baseline)} took {show_seconds(their_s)}."
    if have_same_plan(run, baseline):
        return f"{text} Both trained the same plan, so what differs is the machine."
    if is_torchrec(run) and is_torchrec(baseline):
        text += " Both are TorchRec's own plans."
    return f"{text} {NO_CLAIM}"


def suspicion(summary: Mapping[str, Any]) -> list[str]:
    """A sentence for each label that is predicted too well, with the columns to look at.

    Args:
        summary: Figures with the entry of ``hotrec.runs.suspicious``, or without.
    """
    sentences = []
    for label, found in (summary.get("suspicious") or {}).items():
        columns = ", ".join(f"{name} {auc:.4f}" for name, auc in found["alone"].items())
        sentences.append(
            f"an AUC of {found['auc']:.4f} for {label} is too good to be true. Is a column known "
            f"only after it? The AUC of columns alone, in training: {columns}. Leave such a column "
            "out of data.source.columns."
        )
    return sentences


def is_torchrec(run: Run) -> bool:
    """Whether a run trained a plan of TorchRec's own, as it was configured or as hotrec chose."""
    return str(run.summary.get("placement")).startswith(TORCHREC)


def _described(run: Run) -> str:
    """The name of a run, and what it trained, as far as that was recorded."""
    plan, pipeline = run.summary.get("placement"), run.summary.get("pipeline")
    name = None if plan is None else plan_name(str(plan), run.number("hot_rows"))
    told = ", ".join(filter(None, (name, pipeline)))
    return f"{run.name} ({told})" if told else run.name


def have_same_plan(run: Run, other: Run) -> bool:
    """Whether two runs recorded the same shards, hot rows and pipeline."""
    if any(run.summary.get(key) != other.summary.get(key) for key in ("pipeline", "hot_rows")):
        return False
    files = [of.path / PLAN_JSON for of in (run, other)]
    return all(map(Path.is_file, files)) and files[0].read_bytes() == files[1].read_bytes()
