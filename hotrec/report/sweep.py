"""The overrides of a sweep's jobs and their results, a row for each.

Jobs are chosen on the validation split. Its AUC is biased by the choice, so the reported figures
are those of the last evaluated split, by default the test split.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from math import isnan
from typing import Any

from hotrec.report.compared import differences, is_as_large
from hotrec.report.pictures import run_color
from hotrec.report.read import Run, varied_overrides
from hotrec.report.render import Cell, Column, Table, Tile, record_table
from hotrec.report.units import SHOW, show_bytes, show_known, show_quality, show_setting
from hotrec.runtime.figures import FIGURES, Unit

VALID = "valid"
# The figures of a sweep's table, and those by which a job is chosen.
SWEPT = [figure for figure in FIGURES.values() if figure.in_sweep]
CHOICES = [figure for figure in SWEPT if figure.unit is Unit.quality]
NO_TURNS = (
    "Jobs are not interleaved, so their step times are not comparable; `hotrec compare` compares "
    "plans."
)


def choosing_quality(summary: Mapping[str, Any]) -> tuple[str | None, Mapping[str, Any]]:
    """The split by which a job is chosen, and its quality there: the validation split if it can be.

    Args:
        summary: The content of summary.json.
    """
    of_splits, reported = summary.get("quality"), summary.get("eval_split")
    if isinstance(of_splits, Mapping) and isinstance(of_splits.get(VALID), Mapping):
        return VALID, of_splits[VALID]
    return reported, {figure.key: summary.get(figure.key) for figure in CHOICES}


def sweep_notes(runs: Sequence[Run]) -> list[str]:
    """How to interpret the table's figures."""
    splits = {choosing_quality(run.summary)[0] for run in runs}
    reported = {run.summary.get("eval_split") for run in runs} - {None}
    shown = " and ".join(sorted(map(str, reported)))
    if not shown:
        return [NO_TURNS]
    text = f"Chosen on the validation split; AUC and log loss are those of the {shown} split."
    if splits != {VALID} or reported == {VALID}:
        text = (
            f"The choice of a job by the {shown} split biases the AUC on it upward. Set "
            "'trainer.eval_splits=[valid,test]', on data with both splits."
        )
    return [text, NO_TURNS]


def sweep_records(jobs: Sequence[Run]) -> list[dict[str, Any]]:
    """For each job its varied overrides and its figures; empty unless jobs of a sweep differ."""
    varied = varied_overrides(jobs)
    return [
        {
            "job": job.job,
            **{key: job.overrides.get(key) for key in varied},
            "chosen_by": choosing_quality(job.summary)[0],
            **{f"chosen_by_{f.key}": choosing_quality(job.summary)[1].get(f.key) for f in CHOICES},
            "eval_split": job.summary.get("eval_split"),
            **{figure.key: job.number(figure.key) for figure in SWEPT},
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


def sweep_table(jobs: Sequence[Run]) -> Table:
    """The records as a table, with the color of each run."""
    ran = [job for job in jobs if not job.is_empty]
    records = sweep_records(jobs)
    for job, record in zip(jobs, records, strict=True):
        record["job"] = Cell(job.job, color="" if job.is_empty else run_color(ran.index(job)))
        if record["chosen_by"] != VALID:
            record["chosen_by_auc"] = None
    columns: list[Column] = [
        ("Job", "job", lambda cell: cell),
        *((key, key, str) for key in varied_overrides(jobs)),
        (f"AUC on {VALID}", "chosen_by_auc", show_quality),
        ("Evaluated on", "eval_split", str),
        *((figure.label, figure.key, SHOW[figure.unit]) for figure in SWEPT),
        ("Finished", "finished", show_setting),
    ]
    return record_table(records, columns)


def best_tiles(runs: Sequence[Run]) -> list[Tile]:
    """The headline of a sweep: its best jobs by the validation split, as far as jobs compare."""
    tiles = []
    is_alike = not any(differences(run, runs[0]) for run in runs[1:])
    for figure in CHOICES:
        found = [(*choosing_quality(run.summary), run) for run in runs]
        known = [
            (of[figure.key], run)
            for split, of, run in found
            if split == VALID and of.get(figure.key) is not None and not isnan(of[figure.key])
        ]
        if is_alike and len({value for value, _ in known}) > 1:
            best = max if figure.better == "more" else min
            value, run = best(known, key=lambda pair: pair[0])
            shown = show_known(show_quality, run.number(figure.key))
            note = f"with {run.name}: {shown} on {run.summary.get('eval_split')}"
            tiles.append(Tile(show_quality(value), f"best {figure.label} on {VALID}", note))
    sent = [(value, run) for run in runs if (value := run.number("sent_bytes_total")) is not None]
    if len({value for value, _ in sent}) > 1 and all(is_as_large(run, runs[0]) for run in runs):
        value, run = min(sent, key=lambda pair: pair[0])
        text = "fewest bytes sent per step and rank"
        tiles.append(Tile(show_bytes(value), text, f"with {run.name}"))
    return tiles
