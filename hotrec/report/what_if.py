"""What-if: the predictions of a sweep side by side, and the cheapest machine among them.

Each job's directory holds ``prediction.json``, a prediction document or ``{"infeasible": why}``,
and ``point.json``: ``overrides`` {key: value} of the job, ``num_ranks``, ``ranks_per_host``,
``batch_size``. A directory with a point and no prediction is a job that ended with an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hotrec.artifact import read_record
from hotrec.report.plan import PLAN_COLUMNS, PREDICTION_JSON, RecordedPrediction
from hotrec.report.read import find_jobs, parse_object
from hotrec.report.render import Column, record_table, render, write_files
from hotrec.report.units import show_count, show_seconds
from hotrec.runtime.run_dir import POINT

WHAT_IF_JSON = "what_if.json"
ENDED_WITH_ERROR = "the job ended with an error"
COLUMNS: tuple[Column, ...] = (
    ("job", "name", str),
    ("ranks", "num_ranks", show_count),
    ("hosts", "num_hosts", show_count),
    ("batch", "batch_size", show_count),
    ("fits", "fits", str),
    ("chosen", "chosen", str),
    ("TorchRec's planner", "planner_step_s", show_seconds),
    *(("of its step" if key == "ratio" else head, key, show) for head, key, show in PLAN_COLUMNS),
)

# A job in the form of what_if.json, None for unknown values; ``problem`` is why there is no
# prediction.
Point = Mapping[str, Any]


def read_predictions(sweep_dir: Path) -> list[Point]:
    """The jobs of a sweep, ordered by the names of their directories, numbers by value.

    Raises:
        ValueError: If there is none, or a file of one is broken.
    """
    folders = find_jobs(sweep_dir, PREDICTION_JSON, POINT)
    if not folders:
        raise ValueError(
            f"what-if {sweep_dir}: expected directories with {PREDICTION_JSON}, got none. "
            "Pass the directory of a `hotrec plan --multirun`."
        )
    return [_read_point(folder, str(folder.relative_to(sweep_dir))) for folder in folders]


def _read_point(folder: Path, name: str) -> Point:
    facts, document = _read_json(folder / POINT), _read_json(folder / PREDICTION_JSON)
    problem = document.get("infeasible", "") if document else ENDED_WITH_ERROR
    world: Mapping[str, Any] = facts
    found: dict[str, Any] = {key: None for _, key, _ in COLUMNS}
    if not problem:
        prediction = RecordedPrediction.read(folder / PREDICTION_JSON)
        world, planner = document["world"], prediction.planner
        found |= {
            **prediction.figures(prediction.chosen, planner),
            "chosen": prediction.name(prediction.chosen),
            "planner_step_s": None if planner is None else prediction.plans[planner]["step_s"],
        }
    ranks = world.get("num_ranks")
    per_host = world.get("ranks_per_host") or ranks  # without a number all are on one host
    return {
        **found,
        "name": name,
        "overrides": {key: str(value) for key, value in (facts.get("overrides") or {}).items()},
        "batch_size": document.get("batch_size", facts.get("batch_size")),
        "costs": document.get("costs"),
        "num_ranks": ranks,
        "ranks_per_host": per_host,
        "num_hosts": ranks // per_host if ranks else None,
        "fits": not problem,
        "problem": problem,
    }


def _read_json(path: Path) -> dict[str, Any]:
    return parse_object(read_record(path), str(path)) if path.exists() else {}


def find_cheapest(points: Sequence[Point], min_samples_per_s: float | None) -> Point | None:
    """The point with the fewest ranks, then hosts, then the highest rate, that fits.

    It must reach the required rate of all ranks; None accepts any.
    """
    enough = [p for p in points if p["fits"] and p["samples_per_s"] >= (min_samples_per_s or 0.0)]
    return min(
        enough, key=lambda p: (p["num_ranks"], p["num_hosts"], -p["samples_per_s"]), default=None
    )


def write_what_if(points: Sequence[Point], directory: Path, min_samples_per_s: float | None) -> str:
    """Write what_if.json into a directory; return the answer and the table, for a terminal."""
    cheapest = find_cheapest(points, min_samples_per_s)
    document = {
        "min_samples_per_s": min_samples_per_s,
        "cheapest": None if cheapest is None else cheapest["name"],
        "points": points,
    }
    write_files(directory, {WHAT_IF_JSON: json.dumps(document, indent=2) + "\n"})
    settings = dict.fromkeys(key for point in points for key in point["overrides"])
    varied = [key for key in settings if len({p["overrides"].get(key) for p in points}) > 1]
    records = [
        {
            **point["overrides"],
            **point,
            "fits": "cheapest" if point is cheapest else "yes" if point["fits"] else "no",
        }
        for point in points
    ]
    given: list[Column] = [(key, key, str) for key in varied]
    found = [costs for point in points if (costs := point["costs"])]
    return render(
        "what_if.md.j2",
        document=document,
        cheapest=cheapest,
        fastest=max((point["samples_per_s"] for point in points if point["fits"]), default=0),
        origins=dict.fromkeys((costs["name"], costs["origin"]) for costs in found),
        table=record_table(records, [*COLUMNS[:4], *given, *COLUMNS[4:]]),
    )
