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
from hotrec.report.plan import PREDICTION_JSON, TIERS, RecordedPrediction, describe_world
from hotrec.report.read import find_jobs, parse_object
from hotrec.report.render import Block, Page, record_table, render_text, write_files
from hotrec.report.units import (
    show_bytes,
    show_count,
    show_interval,
    show_rate,
    show_ratio,
    show_seconds,
)
from hotrec.runtime.run_dir import POINT

WHAT_IF_JSON = "what_if.json"
ENDED_WITH_ERROR = "the job ended with an error"
# These have columns of their own.
OF_THE_WORLD = ("plan.world_size", "plan.ranks_per_host", "trainer.batch_size")
# Fields that a job without a prediction lacks.
PREDICTED = (
    *("chosen", "step_s", "interval_s", "planner_step_s", "costs", "samples_per_s"),
    *("sent_bytes", *TIERS),
)
# The costs of a built-in set.
BUILT_IN = "built-in"

# A job in the form of what_if.json, None for unknown values; ``problem`` is why there is no
# prediction. ``device_bytes`` and ``host_bytes`` are those of the tables on the fullest rank.
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
    world = {key: facts.get(key) for key in ("num_ranks", "ranks_per_host")}
    point: dict[str, Any] = {
        "name": name,
        "overrides": {key: str(value) for key, value in (facts.get("overrides") or {}).items()},
        "batch_size": facts.get("batch_size"),
        **dict.fromkeys(PREDICTED),
        "problem": document.get("infeasible", "") if document else ENDED_WITH_ERROR,
    }
    if not point["problem"]:
        prediction = RecordedPrediction(document, where=str(folder / PREDICTION_JSON))
        plan, world = prediction.plans[prediction.chosen], document["world"]
        planner = prediction.planner
        point |= {
            **{key: plan.get(key) for key in ("step_s", "interval_s", "samples_per_s")},
            "batch_size": document["batch_size"],
            "chosen": prediction.name(prediction.chosen),
            "planner_step_s": None if planner is None else prediction.plans[planner]["step_s"],
            "costs": document.get("costs"),
            "sent_bytes": plan["total_sent_bytes"],
            **prediction.max_memory(prediction.chosen),
        }
    ranks = world["num_ranks"]
    per_host = world["ranks_per_host"] or ranks  # without a number all are on one host
    return {
        **point,
        "num_ranks": ranks,
        "ranks_per_host": per_host,
        "num_hosts": ranks // per_host if ranks else None,
        "fits": not point["problem"],
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
    varied = [
        key
        for key in settings
        if key not in OF_THE_WORLD and len({p["overrides"].get(key) for p in points}) > 1
    ]
    records = [
        {
            **point["overrides"],
            **point,
            "fits": "cheapest" if point is cheapest else "yes" if point["fits"] else "no",
            "ratio": show_ratio(point["step_s"] or 0.0, point["planner_step_s"] or 0.0) or None,
        }
        for point in points
    ]
    table = record_table(
        records,
        [
            ("job", "name", str),
            ("ranks", "num_ranks", show_count),
            ("hosts", "num_hosts", show_count),
            ("batch", "batch_size", show_count),
            *((key, key, str) for key in varied),
            ("fits", "fits", str),
            ("chosen", "chosen", str),
            ("step", "step_s", show_seconds),
            ("90% interval", "interval_s", show_interval),
            ("TorchRec's planner", "planner_step_s", show_seconds),
            ("of its step", "ratio", str),
            ("samples", "samples_per_s", _show_about),
            ("sent", "sent_bytes", show_bytes),
            ("device memory", "device_bytes", show_bytes),
            ("host memory", "host_bytes", show_bytes),
        ],
    )
    answer = _answer(points, cheapest, varied, min_samples_per_s)
    problems = [f"Job {p['name']}: {p['problem']}" for p in points if p["problem"]]
    sections: dict[str, list[Block]] = {
        "The cheapest machine": [answer, *_origins(points)],
        "Every point": [table],
        "What does not fit": [*problems],
    }
    return render_text(Page("hotrec plan, what if", sections, data_file=WHAT_IF_JSON))


def _answer(
    points: Sequence[Point],
    cheapest: Point | None,
    varied: Sequence[str],
    min_samples_per_s: float | None,
) -> str:
    wanted = "that fits"
    if min_samples_per_s is not None:
        wanted += f" and reaches {show_rate(min_samples_per_s)}"
    if cheapest is None:
        fastest = max((p["samples_per_s"] for p in points if p["fits"]), default=0)
        return f"No machine {wanted}: the fastest of {len(points)} reaches {_show_about(fastest)}."
    parts = [describe_world(cheapest), f"batch {show_count(cheapest['batch_size'])} per rank"]
    own = cheapest["overrides"]
    parts += [f"{key}={own[key]}" for key in varied if key in own]
    return (
        f"The cheapest machine {wanted}: {', '.join(parts)}: {cheapest['chosen']}, "
        f"{_show_about(cheapest['samples_per_s'])} (job {cheapest['name']})."
    )


def _origins(points: Sequence[Point]) -> list[str]:
    """A sentence for each set of costs that steps were predicted with."""
    found = {(c["name"], c["origin"]): None for p in points if (c := p["costs"]) is not None}
    return [
        f"Predicted with the built-in costs {name}, never run on such a machine: they rank plans, "
        "but are not accurate step times."
        if origin == BUILT_IN
        else f"Predicted with the costs {name}, {origin}."
        for name, origin in found
    ]


def _show_about(per_s: float) -> str:
    """A predicted rate, rounded because its third digit is uncertain."""
    return show_rate(float(f"{per_s:.3g}"))
