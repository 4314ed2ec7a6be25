"""The report of runs or of a sweep: ``report.html``, ``report.json`` and ``sweep.csv``.

Every figure is a row of one table with a column for each run; pictures show what numbers do not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hotrec.artifact import check_made_from, read_artifact
from hotrec.report.compared import Comparison, differences, is_as_large, unlike_sentences
from hotrec.report.pictures import (
    PART_LABELS,
    draw_coverage,
    draw_learning,
    draw_steps,
    draw_traffic,
    run_color,
    to_svg,
)
from hotrec.report.read import TEXTS, Run, read_runs, varied_overrides
from hotrec.report.render import Cell, Column, Table, Tile, record_table, render, write_files
from hotrec.report.sweep import best_tiles, sweep_notes, sweep_records, sweep_table, to_csv
from hotrec.report.units import (
    NOT_RECORDED,
    SHOW,
    show_bytes,
    show_count,
    show_difference,
    show_frac,
    show_ratio,
)
from hotrec.report.verdict import choose_baseline, verdicts
from hotrec.runtime.figures import ELSEWHERE, FIGURES, GROUPS, RUN, Figure, Unit
from hotrec.runtime.run_dir import METRICS, SUMMARY

HTML_NAME, JSON_NAME, CSV_NAME = "report.html", "report.json", "sweep.csv"

HOT_COLUMNS: tuple[Column, ...] = (
    ("Table", "name", str),
    ("Rows", "num_rows", show_count),
    ("Hot rows", "hot_rows", show_count),
    ("Hot share", "hot_rows_frac", show_frac),
    ("Hot bytes", "hot_bytes", show_bytes),
    ("Lookups hot, train", "coverage_train", show_frac),
    ("Lookups hot, held out", "coverage_heldout", show_frac),
    ("Row and its state", "row_bytes", show_bytes),
)
# The headline figures of a run. The first stands for the median step where plans were interleaved.
STEP = "interleaved_step_s"
TILES = {
    STEP: "per step, interleaved",
    "auc": "AUC on {split}",
    "step_p50_s": "median step",
    "sent_bytes_total": "sent per step and rank",
    "hot_lookup_frac": "of lookups hit a hot row",
}

Content = Mapping[str, Any]


@dataclass(frozen=True)
class Report:
    """What the templates of a report show, and the JSON document of its numbers."""

    values: Mapping[str, Any]
    document: dict[str, Any]

    def write(self, output: Path) -> None:
        """Write all files into a directory, made if it does not exist."""
        text = json.dumps(self.document, indent=2, allow_nan=False) + "\n"
        files = {JSON_NAME: text, HTML_NAME: render("report.html.j2", **self.values)}
        if self.document["sweep"]:
            files[CSV_NAME] = to_csv(self.document["sweep"])
        write_files(output, files)

    def text(self, *, is_whole: bool = True) -> str:
        """The tables for a terminal, or that of the sweep's jobs alone."""
        return render("report.md.j2", **self.values, is_whole=is_whole)


@dataclass(frozen=True)
class _Against:
    """What the figures of a run are compared with."""

    baseline: Run | None
    comparison: Comparison | None

    def of(self, run: Run) -> Run | None:
        """The run that another one is compared with, if any."""
        return None if run is self.baseline else self.baseline

    def show(self, figure: Figure, run: Run, other: Run | None) -> str:
        """The ratio of bytes or interleaved steps, or the difference of quality; else empty."""
        if other is None or not figure.better:
            return ""
        value, reference = run.number(figure.key), other.number(figure.key)
        if value is None or reference is None:
            return ""
        if figure.key == STEP and self.comparison is not None:
            is_clear = self.comparison.why_not(run, other) is None
            return self.comparison.ratio(run, other).text if is_clear else "inconclusive"
        if figure.unit is Unit.bytes and is_as_large(run, other):
            return show_ratio(value, reference)
        if figure.unit is Unit.quality and not differences(run, other):
            return show_difference(value - reference)
        return ""


def make_report(
    runs: Sequence[Path],
    *,
    profile: Path | None = None,
    partition: Path | None = None,
    compared: Path | None = None,
    title: str = "hotrec report",
    made_at: datetime | None = None,
) -> Report:
    """Read runs, or the jobs of a sweep, and compare them.

    Args:
        runs: The run directories, in the order of columns and colors.
        profile: A profile directory, for the coverage curves.
        partition: A partition directory, to mark on the curves; needs its profile.
        compared: The output of ``hotrec compare`` for these runs.
        title: The title of the page.
        made_at: The time to print; now by default.

    Raises:
        ValueError: If a directory is missing, a file in it is broken (``ArtifactError`` for a
            profile or partition), or no run has recorded anything.
    """
    if partition is not None and profile is None:
        raise ValueError(
            f"report partition {partition}: expected its profile as well, got none. Pass profile."
        )
    comparison = None if compared is None else Comparison.read(compared)
    jobs = [run if comparison is None else comparison.complete(run) for run in read_runs(runs)]
    read = [run for run in jobs if not run.is_empty]
    if not read:
        raise ValueError(
            f"report: expected a job with {SUMMARY} or {METRICS}, got {len(jobs)} that ended "
            "earlier. Fix the errors in their messages, and restart the sweep."
        )
    counted = None if profile is None else read_artifact(profile, kind="profile")
    split = None if partition is None else read_artifact(partition, kind="partition")
    if counted is not None and split is not None:
        check_made_from(split, counted)
    contents = [None if artifact is None else artifact.content for artifact in (counted, split)]
    against = _Against(choose_baseline(read), comparison)
    unlike = unlike_sentences(read, against.baseline)
    said = [*verdicts(read, against.baseline, comparison), *unlike]
    made_at, is_sweep = made_at or datetime.now(UTC), bool(varied_overrides(jobs))
    models = {str(run.summary["model"]): None for run in read if run.summary.get("model")}
    about = [f"{len(read)} run{'s' * (len(read) > 1)}", *models]
    seconds = None if comparison is None else comparison.seconds
    name = None if against.baseline is None else against.baseline.name
    values = {
        "title": title,
        "subtitle": "  |  ".join([*about, made_at.strftime("%Y-%m-%d %H:%M %Z")]),
        "lead": unlike if is_sweep else said,
        "tiles": best_tiles(read) if is_sweep else _tiles(read, against),
        "sweep": sweep_table(jobs) if is_sweep else None,
        "sweep_notes": sweep_notes(read),
        "learning": to_svg(draw_learning(read), "Training loss and AUC over steps"),
        "stages": to_svg(draw_steps(read), "Time per step by stage"),
        "traffic": to_svg(draw_traffic(read), "Bytes sent per step and rank by collective"),
        **_coverage(*contents),
        "reading": " ".join(render("reading.md.j2", baseline=name, seconds=seconds).split()),
        "side_by_side": _side_by_side(read, against),
        "runs": [{**vars(run), "color": run_color(position)} for position, run in enumerate(read)],
        "text_titles": TEXTS,
    }
    document: dict[str, Any] = {
        "title": title,
        "made_at": made_at.isoformat(),
        "baseline": name,
        "verdict": said,
        "sweep": sweep_records(jobs),
        "runs": [_run_document(run, against.of(run)) for run in read],
        "profile": contents[0],
        "partition": contents[1],
    }
    # NaN and infinity are not JSON; they become null.
    text = json.dumps(document, default=str)
    return Report(values, json.loads(text, parse_constant=lambda _: None))


def _tiles(runs: Sequence[Run], against: _Against) -> list[Tile]:
    """The headline: the first run, which is the chosen plan where plans were compared."""
    run = runs[0]
    other = next(iter(runs[1:]), None) if run is against.baseline else against.baseline
    where = run.summary.get("eval_split") or "held-out samples"
    if (num_labels := len(run.by_name("auc_by_label"))) > 1:
        where += f", mean of {num_labels} labels"
    skipped = STEP if run.number(STEP) is None else "step_p50_s"
    tiles: list[Tile] = []
    for key, text in TILES.items():
        value, figure = run.number(key), FIGURES[key]
        if value is not None and key != skipped:
            relation = against.show(figure, run, other)
            if relation and other is not None:
                relation += f" vs. {other.name}; {figure.better} is better"
            text = text.format(split=where) if tiles else f"{text.format(split=where)}: {run.name}"
            tiles.append(Tile(SHOW[figure.unit](value), text, relation))
    return tiles


def _side_by_side(runs: Sequence[Run], against: _Against) -> Table:
    """Every figure that a run recorded, a column for each run in its color."""

    def cell(figure: Figure, run: Run) -> Cell:
        value = run.number(figure.key) if figure.unit.is_number else run.summary.get(figure.key)
        if value is None:
            return Cell(NOT_RECORDED)
        return Cell(SHOW[figure.unit](value), against.show(figure, run, against.of(run)))

    rows: list[Sequence[str | Cell]] = []
    for group, figures in GROUPS.items():
        shown = [] if group == ELSEWHERE else [of for f in figures for of in _recorded(f, runs)]
        rows += [(group,)] if shown and group != RUN else []
        rows += [(figure.label, *(cell(figure, run) for run in runs)) for figure in shown]
    heads = [
        Cell(run.name, "baseline" if run is against.baseline else "", run_color(position))
        for position, run in enumerate(runs)
    ]
    return Table(("", *heads), rows)


def _recorded(figure: Figure, runs: Sequence[Run]) -> list[Figure]:
    """A figure that a run recorded, one for each part if it has parts; empty for another one."""
    if not figure.unit.is_number:
        return [figure]
    if not figure.parts:
        return [figure] if any(run.number(figure.key) is not None for run in runs) else []
    # Kinds of tables without bytes in any run are omitted.
    found = [run.by_name(figure.key).items() for run in runs]
    parts = {p: None for of in found for p, value in of if value or figure.parts != "kind"}

    def label(part: str) -> str:
        is_name = figure.parts in ("kind", "stage")
        return PART_LABELS.get(part, part.replace("_", " ")) if is_name else part

    return [
        replace(figure, key=f"{figure.key}.{p}", label=figure.label.format(label(p)), parts="")
        for p in parts
    ]


def _coverage(profile: Content | None, partition: Content | None) -> dict[str, Any]:
    """The picture of the lookups, and the table of the partition; empty if not requested."""
    if profile is None:
        return {"coverage": "", "hot": None}
    counted = f"{show_count(profile['num_samples'])} samples"
    if profile["num_heldout_samples"]:
        counted += f" and {show_count(profile['num_heldout_samples'])} held out"
    hot, policy = None, None
    if partition is not None and partition["total"]["hot_rows"]:
        tables = [{"name": name, **facts} for name, facts in partition["tables"].items()]
        tables.sort(key=lambda table: (-table["num_rows"], table["name"]))
        hot = record_table(tables, HOT_COLUMNS, [{"name": "All tables", **partition["total"]}])
        policy = partition["policy"]
    return {
        "coverage": to_svg(
            draw_coverage(profile, partition), "Share of lookups by most accessed rows"
        ),
        "counted": counted,
        "hot": hot,
        "policy": policy,
    }


def _run_document(run: Run, baseline: Run | None) -> dict[str, Any]:
    """Every figure of the run, and its curves."""
    sent, bound = run.number("sent_bytes_total"), run.number("bound_bytes")
    reference = None if baseline is None else baseline.number("sent_bytes_total")
    is_comparable = baseline is not None and is_as_large(run, baseline)
    relative = sent / reference if is_comparable and sent is not None and reference else None
    return {
        **{key: value for key, value in run.summary.items() if value != {}},
        "name": run.name,
        "path": run.path,
        "overrides": run.overrides,
        "sent_over_bound": sent / bound if sent is not None and bound else None,
        "relative_to_baseline": {} if relative is None else {"sent_bytes_total": relative},
        "differs_from_baseline": [] if baseline is None else differences(run, baseline),
        "loss": [*zip(*run.series("loss"), strict=True)],
        "auc_by_split": {
            split: [*zip(*run.eval_series("auc", split), strict=True)] for split in run.splits
        },
        "notes": run.notes,
    }
