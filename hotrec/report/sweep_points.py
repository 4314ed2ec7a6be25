"""The points of a what-if sweep: one prediction for each job, read from its directory.

Read are ``prediction.json``, a prediction document or ``{"infeasible": why}``, and ``point.json``
(optional for a document): ``overrides`` {key: value} of the job, ``num_ranks``, ``ranks_per_host``,
``batch_size``. A directory with a point and no prediction is a job that ended with an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotrec.report.plan_text import check_prediction

PREDICTION_JSON, POINT_JSON = "prediction.json", "point.json"
ENDED_WITH_ERROR = "the job ended with an error"
# Told by columns of their own.
OF_THE_WORLD = ("plan.world_size", "plan.ranks_per_host", "trainer.batch_size")


@dataclass(frozen=True)
class Point:
    """One job of a sweep.

    Args:
        name: of its directory.
        overrides: that the job was started with.
        num_ranks: None where it is not known, as are all the following.
        ranks_per_host: on each host.
        batch_size: per rank.
        chosen: the plan that is predicted to be fastest.
        step_s: of it.
        samples_per_s: of all ranks.
        sent_bytes: of a rank and step.
        device_bytes: of tables on the fullest rank.
        host_bytes: likewise.
        problem: why there is no prediction; empty where there is one.
    """

    name: str
    overrides: Mapping[str, str] = field(default_factory=dict)
    num_ranks: int | None = None
    ranks_per_host: int | None = None
    batch_size: int | None = None
    chosen: str | None = None
    step_s: float | None = None
    samples_per_s: float | None = None
    sent_bytes: float | None = None
    device_bytes: float | None = None
    host_bytes: float | None = None
    problem: str = ""

    @property
    def num_hosts(self) -> int | None:
        if self.num_ranks is None or not self.ranks_per_host:
            return None
        return self.num_ranks // self.ranks_per_host

    @property
    def fits(self) -> bool:
        return not self.problem


def read_predictions(sweep_dir: Path) -> list[Point]:
    """The jobs of a sweep, in the order of their directories' names, numbers by value.

    Raises:
        ValueError: if there is none, or a file is not what it claims to be.
    """
    names = (PREDICTION_JSON, POINT_JSON)
    folders = {path.parent for name in names for path in sweep_dir.rglob(name)}
    if not folders:
        raise ValueError(
            f"what-if {sweep_dir}: expected directories with {PREDICTION_JSON}, got none. "
            "Pass the directory of a `hotrec plan --multirun`."
        )
    order = sorted(
        folders, key=lambda path: (not path.name.isdigit(), path.name.zfill(9), str(path))
    )
    return [_read_point(folder, str(folder.relative_to(sweep_dir))) for folder in order]


def _read_point(folder: Path, name: str) -> Point:
    facts = _read_json(folder / POINT_JSON)
    document = _read_json(folder / PREDICTION_JSON)
    known: dict[str, Any] = {
        "name": name,
        "overrides": {key: str(value) for key, value in (facts.get("overrides") or {}).items()},
        **{key: facts.get(key) for key in ("num_ranks", "ranks_per_host", "batch_size")},
    }
    if known["ranks_per_host"] is None:
        known["ranks_per_host"] = known["num_ranks"]  # all on one host
    if not document:
        return Point(**known, problem=ENDED_WITH_ERROR)
    if "infeasible" in document:
        return Point(**known, problem=str(document["infeasible"]))
    check_prediction(document, where=str(folder / PREDICTION_JSON))
    plan = document["plans"][document["chosen"]]
    memory = plan.get("memory") or []
    fullest = {
        tier: max((float(rank[tier]) for rank in memory), default=None)
        for tier in ("device_bytes", "host_bytes")
    }
    known |= document["world"] | {"batch_size": document["batch_size"]}
    return Point(
        **known,
        chosen=document["chosen"],
        step_s=plan["step_s"],
        samples_per_s=plan["samples_per_s"],
        sent_bytes=plan["total_sent_bytes"],
        device_bytes=fullest["device_bytes"],
        host_bytes=fullest["host_bytes"],
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON, got {error}. Run the sweep again.") from error
    if not isinstance(document, dict):
        raise ValueError(
            f"{path}: expected a JSON object, got {type(document).__name__}. Run the sweep again."
        )
    return document


def varied_keys(points: Sequence[Point]) -> list[str]:
    """Overrides in which the jobs differ, apart from ranks, hosts and batch."""
    keys = dict.fromkeys(key for point in points for key in point.overrides)
    return [
        key
        for key in keys
        if key not in OF_THE_WORLD and len({point.overrides.get(key) for point in points}) > 1
    ]


def find_cheapest(points: Sequence[Point], min_samples_per_s: float | None) -> Point | None:
    """The fewest ranks, then hosts, on which it fits and is fast enough; of equals the fastest.

    Args:
        min_samples_per_s: of all ranks; None: whatever fits.
    """
    enough = [
        point
        for point in points
        if point.fits
        and point.samples_per_s is not None
        and point.samples_per_s >= (min_samples_per_s or 0.0)
    ]
    return min(
        enough,
        key=lambda p: (p.num_ranks or 0, p.num_hosts or 0, -(p.samples_per_s or 0.0)),
        default=None,
    )
