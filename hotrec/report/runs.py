"""The report of runs or of a sweep: ``report.html``, ``report.json`` and ``sweep.csv``."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure as Drawing

from hotrec.artifact import check_made_from, read_artifact
from hotrec.report.alike import differences, is_as_large, unlike_sentences
from hotrec.report.compared import Comparison
from hotrec.report.pictures import draw_coverage, draw_learning, draw_steps, draw_traffic
from hotrec.report.read import TEXTS, Run, read_runs, varied_overrides
from hotrec.report.render import (
    Block,
    Cell,
    Column,
    Heading,
    Listing,
    Page,
    Picture,
    Table,
    Tile,
    record_table,
    render_html,
    render_text,
    write_files,
)
from hotrec.report.style import PART_LABELS, run_color, to_svg
from hotrec.report.sweep import best_tiles, sweep_notes, sweep_records, sweep_table, to_csv
from hotrec.report.units import (
    NOT_RECORDED,
    SHOW,
    show_bytes,
    show_count,
    show_difference,
    show_error,
    show_frac,
    show_known,
    show_quality,
    show_ratio,
    show_seconds,
    show_setting,
)
from hotrec.report.verdict import choose_baseline, verdicts
from hotrec.runtime.figures import ELSEWHERE, FIGURES, GROUPS, RUN, Figure, Unit
from hotrec.runtime.run_dir import METRICS, SUMMARY

HTML_NAME, JSON_NAME, CSV_NAME = "report.html", "report.json", "sweep.csv"

SWEEP_SECTION = "Jobs of the sweep"
# Stages, as the columns of a table.
COMPARED = ("predicted_stage_s", "measured_stage_s", "slowest_rank_stage_s")
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
# The headline figures of a run.
TILES = {
    "auc": "AUC on {split}",
    "step_p50_s": "median step",
    "sent_bytes_total": "sent per step and rank",
    "hot_lookup_frac": "of lookups hit a hot row",
}

Content = Mapping[str, Any]


@dataclass(frozen=True)
class Report:
    """A page, and the JSON document of its numbers."""

    page: Page
    document: dict[str, Any]

    def write(self, output: Path) -> None:
        """Write all files into a directory, made if it does not exist."""
        text = json.dumps(self.document, indent=2, allow_nan=False) + "\n"
        files = {JSON_NAME: text, HTML_NAME: render_html(self.page)}
        if self.document["sweep"]:
            files[CSV_NAME] = to_csv(self.document["sweep"])
        write_files(output, files)

    def text(self, *sections: str) -> str:
        """The named sections, by default all, for a terminal: no pictures and no files."""
        kept = {
            title: [block for block in blocks if not isinstance(block, Picture | Listing)]
            for title, blocks in self.page.sections.items()
            if not sections or title in sections
        }
        return render_text(replace(self.page, sections=kept))


def make_report(
    runs: Sequence[Path],
    *,
    profile: Path | None = None,
    partition: Path | None = None,
    baseline: str | None = None,
    compared: Path | None = None,
    title: str = "hotrec report",
    made_at: datetime | None = None,
) -> Report:
    """Read runs, or the jobs of a sweep, and compare them.

    Args:
        runs: The run directories, in the order of columns and colors.
        profile: A profile directory, for the coverage curves.
        partition: A partition directory, to mark on the curves; needs its profile.
        baseline: The name of the run with which the others are compared; by default the first
            whose placement starts with "torchrec".
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
    jobs = read_runs(runs)
    read = [run for run in jobs if not run.is_empty]
    if not read:
        raise ValueError(
            f"report: expected a job with {SUMMARY} or {METRICS}, got {len(jobs)} that ended "
            "earlier. Fix the errors in their messages, and restart the sweep."
        )
    against = choose_baseline(read, baseline)
    comparison = None if compared is None else Comparison.read(compared)
    unlike = unlike_sentences(read, against)
    said = [*verdicts(read, against, comparison), *unlike]
    counted = None if profile is None else read_artifact(profile, kind="profile")
    split = None if partition is None else read_artifact(partition, kind="partition")
    if counted is not None and split is not None:
        check_made_from(split, counted)
    contents = [None if artifact is None else artifact.content for artifact in (counted, split)]
    made_at, is_sweep = made_at or datetime.now(UTC), bool(varied_overrides(jobs))
    models = {str(run.summary["model"]): None for run in read if run.summary.get("model")}
    about = [f"{len(read)} run{'s' * (len(read) > 1)}", *models]
    page = Page(
        title,
        _sections(jobs, against, contents[0], contents[1], comparison),
        "  |  ".join([*about, made_at.strftime("%Y-%m-%d %H:%M %Z")]),
        best_tiles(read) if is_sweep else _tiles(read, against, comparison),
        JSON_NAME,
        unlike if is_sweep else said,
    )
    document: dict[str, Any] = _without_nan(
        {
            "title": title,
            "made_at": made_at.isoformat(),
            "baseline": None if against is None else against.name,
            "verdict": said,
            "sweep": sweep_records(jobs),
            "runs": [_run_document(run, against) for run in read],
            "profile": contents[0],
            "partition": contents[1],
        }
    )
    return Report(page, document)


def _sections(
    jobs: Sequence[Run],
    baseline: Run | None,
    profile: Content | None,
    partition: Content | None,
    comparison: Comparison | None,
) -> dict[str, list[Block]]:
    """Jobs that recorded nothing are in the sweep's table alone."""
    runs = [run for run in jobs if not run.is_empty]
    return {
        SWEEP_SECTION: [*sweep_notes(runs), sweep_table(jobs)] if varied_overrides(jobs) else [],
        "Plans": _plans(runs, baseline, comparison),
        "Learning": _picture(
            draw_learning(runs),
            "Training loss and AUC over steps",
            "Placements that train exactly draw the same line: runs with one seed and one order of "
            "samples differ only by rounding.",
        ),
        "Next days": _next_days(runs),
        "Where a step's time goes": _picture(
            draw_steps(runs),
            "Time per step by stage",
            "Of complete runs, which were not interleaved: compare stages, not totals. Medians "
            "over the measured steps, or means over the logged lines of an unfinished run. In "
            "hatched stages the main thread waits for other ranks. Grey is the rest of the "
            "median step.",
        ),
        "What a step sends": _picture(
            draw_traffic(runs),
            "Bytes sent per step and rank by collective",
            "The black line is the lower bound for plans that exchange rows: each distinct row "
            "of a rank's batch is fetched once and its gradient is returned once. A plan that "
            "exchanges pooled bags can send less, because it sends one vector per bag.",
        ),
        "What is hot": _coverage(profile, partition),
        "Side by side": _comparison(runs, baseline),
        "Predicted and measured": _predicted(runs),
        "Runs": _details(runs),
    }


def _picture(figure: Drawing | None, label: str, caption: str) -> list[Block]:
    return [] if figure is None else [Picture(to_svg(figure, label), caption)]


def _heads(runs: Sequence[Run], baseline: Run | None = None) -> list[Cell]:
    """The headings of columns, one for each run in its color."""
    return [
        Cell(run.name, "baseline" if run is baseline else "", run_color(position))
        for position, run in enumerate(runs)
    ]


def _plans(runs: Sequence[Run], baseline: Run | None, comparison: Comparison | None) -> list[Block]:
    """The interleaved plans side by side, and the destinations of their lookups."""
    took_part = [] if comparison is None else list(filter(comparison.has, runs))
    if comparison is None or not took_part:
        return []
    against = baseline if baseline in took_part else None
    rows: list[Sequence[str | Cell]] = []
    for head, run in zip(_heads(runs), runs, strict=True):
        if run in took_part:
            plan, ratio = comparison.plan(run), ""
            if against is not None and run is not against:
                ratio = comparison.ratio(run, against).text
            numbers = [
                show_known(SHOW[FIGURES[key].unit], run.number(key))
                for key in ("auc", "sent_bytes_total", "hot_rows")
            ]
            busiest = show_known("{:.2f}x".format, plan.max_over_mean)
            step = show_seconds(plan.step_s)
            rows.append([head, step, ratio, *numbers, show_frac(plan.at_home_frac), busiest])
    header = ["Plan", "Step, interleaved", f"Against {against.name}" if against else "Against"]
    header += ["AUC", "Sent, per step and rank", "Hot rows"]
    header += ["Lookups on the sample's rank", "Busiest owner over the mean"]
    note = (
        f"The plans were trained for {show_seconds(comparison.seconds)} in interleaved blocks of a "
        "few steps, from the same weights on the same batches. Intervals are of 90%: they contain "
        "nine of ten repeated comparisons. Hot rows have a copy on every rank; the owner is the "
        "only rank that stores a row. Less is better, except for AUC and lookups that need no "
        "network."
    )
    return [Table(header, rows), note]


def _next_days(runs: Sequence[Run]) -> list[Block]:
    """The AUC of each day before it was trained on; empty if no run evaluated days ahead."""
    aucs = [{line["day"]: line["auc"] for line in run.evals if "day" in line} for run in runs]
    days = dict.fromkeys(day for of_run in aucs for day in of_run)
    rows = []
    for day in days:
        found = [of_run.get(day) for of_run in aucs]
        cells = (NOT_RECORDED if auc is None else show_quality(auc) for auc in found)
        rows.append((day, *cells))
    text = "AUC of each day, with the model trained until the previous day."
    return [text, Table(("Day", *_heads(runs)), rows)] if rows else []


def _tiles(runs: Sequence[Run], baseline: Run | None, comparison: Comparison | None) -> list[Tile]:
    """The headline: the first run, or without a comparison the first with hot and cold rows."""
    others = [run for run in runs if run is not baseline] or list(runs)
    split = (run for run in others if 0.0 < (run.number("hot_rows_frac") or 0.0) < 1.0)
    run, keys = next(split, others[0]), dict(TILES)
    tiles: list[Tile] = []
    if comparison is not None and comparison.has(others[0]):
        run, note = others[0], ""
        if baseline is not None and baseline is not run and comparison.has(baseline):
            is_clear = comparison.why_not(run, baseline) is None
            note = comparison.ratio(run, baseline).text if is_clear else "inconclusive"
            note += f" vs. {baseline.name}"
        step = show_seconds(comparison.plan(run).step_s)
        tiles.append(Tile(step, "per step, interleaved", note))
        del keys["step_p50_s"]
    where = run.summary.get("eval_split") or "held-out samples"
    if (num_labels := len(run.by_name("auc_by_label"))) > 1:
        where += f", mean of {num_labels} labels"
    for key, text in keys.items():
        value = run.number(key)
        if value is not None:
            relation = _show_against(FIGURES[key], run, baseline)
            if relation and baseline is not None:
                relation += f" vs. {baseline.name}; {FIGURES[key].better} is better"
            shown = SHOW[FIGURES[key].unit](value)
            tiles.append(Tile(shown, text.format(split=where), relation))
    return tiles


def _show_against(figure: Figure, run: Run, baseline: Run | None) -> str:
    """The run's bytes over the baseline's, or its quality minus the baseline's; else empty."""
    if baseline is None or run is baseline or not figure.better:
        return ""
    value, reference = run.number(figure.key), baseline.number(figure.key)
    if value is None or reference is None:
        return ""
    if figure.unit is Unit.bytes and is_as_large(run, baseline):
        return show_ratio(value, reference)
    if figure.unit is Unit.quality and not differences(run, baseline):
        return show_difference(value - reference)
    return ""


def _comparison(runs: Sequence[Run], baseline: Run | None) -> list[Block]:
    """Every figure that a run recorded, a column for each run."""

    def cell(figure: Figure, run: Run) -> Cell:
        value = run.number(figure.key)
        if value is None:
            return Cell(NOT_RECORDED)
        return Cell(SHOW[figure.unit](value), _show_against(figure, run, baseline))

    rows: list[Sequence[str | Cell]] = [
        (setting.label, *(show_setting(run.summary.get(setting.key)) for run in runs))
        for setting in GROUPS[RUN]
    ]
    for group, figures in GROUPS.items():
        if group not in (RUN, ELSEWHERE):
            shown = [one for figure in figures for one in _recorded(figure, runs)]
            rows += [(group,)] if shown else []
            rows += [(one.label, *(cell(one, run) for run in runs)) for one in shown]
    note = (
        "No run uses one of TorchRec's own plans, so there is no baseline to compare with."
        if baseline is None
        else f"Small print is relative to {baseline.name}: a ratio for bytes, if data, ranks and "
        "batch are the same, and a difference for quality, if the same samples were evaluated. "
        "Times are not compared, because the runs were not interleaved."
    )
    note += (
        " An error is predicted minus measured, in percent of the measured. Figures that no run "
        "recorded are omitted. Peaks include dense layers, activations, messages and libraries."
    )
    return [note, Table(("", *_heads(runs, baseline)), rows)]


def _recorded(figure: Figure, runs: Sequence[Run]) -> list[Figure]:
    """A figure that a run recorded, one for each part if it has parts; empty for another one."""
    if not figure.parts:
        return [figure] if any(run.number(figure.key) is not None for run in runs) else []
    # Kinds of tables without bytes in any run are omitted.
    is_kind = figure.parts == "kind"
    found = [run.by_name(figure.key).items() for run in runs]
    parts = dict.fromkeys(part for of in found for part, value in of if value or not is_kind)
    label = figure.label.format
    return [
        replace(
            figure,
            key=f"{figure.key}.{part}",
            label=label(part.replace("_", " ") if is_kind else part),
            parts="",
        )
        for part in parts
    ]


def _coverage(profile: Content | None, partition: Content | None) -> list[Block]:
    """The picture of the lookups, and the table of the partition; empty if not requested."""
    if profile is None:
        return []
    counted = f"{show_count(profile['num_samples'])} samples"
    if profile["num_heldout_samples"]:
        counted += f" and {show_count(profile['num_heldout_samples'])} held out"
    frac = profile["sampling"]["frac"]
    how = f"exactly over {counted}" if frac == 1 else f"on a {show_frac(frac)} sample: {counted}"
    blocks = _picture(
        draw_coverage(profile, partition),
        "Share of lookups by most accessed rows",
        f"Counted {how}. Rows are ranked by their lookups in the training samples. A lower "
        "held-out curve means that popularity has shifted since.",
    )
    if partition is not None and partition["total"]["hot_rows"]:
        tables = [{"name": name, **facts} for name, facts in partition["tables"].items()]
        tables.sort(key=lambda table: (-table["num_rows"], table["name"]))
        table = record_table(tables, HOT_COLUMNS, [{"name": "All tables", **partition["total"]}])
        blocks += [f"Hot rows by the policy {partition['policy']}:", table]
    return blocks


def _predicted(runs: Sequence[Run]) -> list[Block]:
    """A table of predicted and measured stages for each run that has both."""
    blocks: list[Block] = []
    for run in runs:
        if run.by_name("predicted_stage_s") and run.by_name("measured_stage_s"):
            blocks += [Heading(run.name), _predicted_table(run)]
    note = (
        "Medians over the compared steps: the mean over the ranks, and the slowest rank. Because "
        "each stage has its own median, the stages need not add up to the median step. Ids that "
        "the loader routes are measured as a part of the wait for data, which is in other."
    )
    return [note, *blocks] if blocks else []


def _predicted_table(run: Run) -> Table:
    step_s, first = run.number("measured_step_s") or 0.0, run.number("compared_from_step") or 0
    columns: list[Column] = [
        ("Stage", "stage", str),
        ("Predicted", COMPARED[0], show_seconds),
        (f"Measured from step {first:.0f}", COMPARED[1], show_seconds),
        ("Slowest rank", COMPARED[2], show_seconds),
        ("Error, of step", "error", show_error),
    ]

    def record(stage: str, times: Iterable[float]) -> dict[str, Any]:
        found = dict(zip(COMPARED, times, strict=False))
        error = found[COMPARED[0]] - found[COMPARED[1]]
        shown = PART_LABELS.get(stage, stage.replace("_", " "))
        return {"stage": shown, **found, **({"error": error / step_s} if step_s else {})}

    by_stage = [run.by_name(name) for name in COMPARED]
    stages = dict.fromkeys([*by_stage[0], *by_stage[1]])
    records = [record(stage, (times.get(stage, 0.0) for times in by_stage)) for stage in stages]
    total = record("Step", (run.number("predicted_step_s") or 0.0, step_s))
    return record_table(records, columns, [total])


def _details(runs: Sequence[Run]) -> list[Block]:
    """The directory of each run, its missing files, and its files unchanged."""
    blocks: list[Block] = []
    for position, run in enumerate(runs):
        blocks += [Heading(run.name, run_color(position)), str(run.path), *run.notes]
        blocks += [Listing(f"{TEXTS[name]} ({name})", text) for name, text in run.texts.items()]
    return blocks


def _run_document(run: Run, baseline: Run | None) -> dict[str, Any]:
    relative: dict[str, float] = {}
    if baseline is not None and is_as_large(run, baseline):
        value, reference = (of.number("sent_bytes_total") for of in (run, baseline))
        if value is not None and reference:
            relative["sent_bytes_total"] = value / reference
    sent, bound = run.number("sent_bytes_total"), run.number("bound_bytes")
    cache = run.by_name("cache")
    declared = [f for group in GROUPS if group != ELSEWHERE for f in GROUPS[group]]
    shown = [figure.key for figure in declared if not figure.parts and "." not in figure.key]
    by_kind = [figure.key for figure in declared if figure.parts == "kind"]
    of_quality = [figure.key for figure in declared if figure.parts in ("label", "k")]
    return {
        "name": run.name,
        "path": str(run.path),
        **{key: run.summary.get(key) for key in (*shown, "total_rows", "compared_from_step")},
        **{key: run.by_name(key) or None for key in (*COMPARED, *by_kind)},
        **{key: run.by_name(key) for key in of_quality if run.by_name(key)},
        "sent_bytes": run.sent_bytes,
        "stage_s": run.stage_s,
        **({"cache": cache} if cache else {}),
        **({"overrides": run.overrides} if run.overrides else {}),
        "sent_over_bound": sent / bound if sent is not None and bound else None,
        "relative_to_baseline": relative,
        "differs_from_baseline": [] if baseline is None else differences(run, baseline),
        "loss": [*zip(*run.series("loss"), strict=True)],
        "auc_by_split": {
            split: [*zip(*run.eval_series("auc", split), strict=True)] for split in run.splits
        },
        "notes": run.notes,
    }


def _without_nan(value: Any) -> Any:
    """NaN and infinity are not JSON; they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _without_nan(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(part) for part in value]
    return value
