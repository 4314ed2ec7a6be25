"""What jobs of a sweep were started with and what came of them, a row for each."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from math import isnan
from typing import Any

from hotrec.report.read import MEASURES, Run, varied_overrides
from hotrec.report.render import Cell, Row, Table, Tile
from hotrec.report.style import run_color
from hotrec.report.units import DASH, show_known
from hotrec.report.verdict import show_speed, step_over

# The figures of a sweep's table, and the headlines of the jobs that are best in them.
SWEPT = {
    "auc": (max, "highest AUC on held-out samples"),
    "log_loss": (min, "least log loss on held-out samples"),
    "step_p50_s": (min, "shortest median step"),
    "sent_bytes_total": (min, "least sent per step and rank"),
}


def sweep_records(jobs: Sequence[Run]) -> list[dict[str, Any]]:
    """For each job its varied overrides and its figures; empty unless jobs of a sweep differ."""
    varied = varied_overrides(jobs)
    return [
        {
            "job": job.job,
            **{key: job.overrides.get(key) for key in varied},
            **{name: job.number(name) for name in SWEPT},
            "finished": job.summary["finished"],
        }
        for job in jobs
        if varied
    ]


def to_csv(records: Sequence[Mapping[str, Any]]) -> str:
    """Times in seconds, bytes per step and rank; unknown values are empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def sweep_table(jobs: Sequence[Run], baseline: Run | None) -> Table:
    """A row for each job, with what it was started with and what came of it."""
    varied, runs = varied_overrides(jobs), [job for job in jobs if not job.is_empty]
    measures = [MEASURES[name] for name in SWEPT]

    def row(job: Run) -> Row:
        color = "" if job.is_empty else run_color(runs.index(job))
        settings = [job.overrides.get(key, DASH) for key in varied]
        figures = [show_known(measure.show, job.number(measure.name)) for measure in measures]
        end = "yes" if job.summary["finished"] else "failed" if job.is_empty else "no"
        cells: list[str | Cell] = [Cell(job.job, color=color), *settings, *figures, end]
        return cells if baseline is None else [*cells, against(job, baseline)]

    def against(job: Run, other: Run) -> str:
        interval = step_over(job, other)
        if job is other or interval is None:
            return "baseline" if job is other else DASH
        return show_speed(*interval) or "no difference"

    header = ["Job", *varied, *(measure.label for measure in measures), "Finished"]
    if baseline is not None:
        header.append(f"Step against job {baseline.job}")
    return Table(header, [row(job) for job in jobs])


def best_tiles(runs: Sequence[Run]) -> list[Tile]:
    """The headline of a sweep: the best of its jobs by each figure of its table."""
    tiles = []
    for name, (best, text) in SWEPT.items():
        figures = [(run.number(name), run) for run in runs]
        known = [(value, run) for value, run in figures if value is not None and not isnan(value)]
        if len({value for value, _ in known}) > 1:
            value, run = best(known, key=lambda pair: pair[0])
            tiles.append(Tile(MEASURES[name].show(value), text, f"with {run.name}"))
    return tiles
