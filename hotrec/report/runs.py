"""The report of runs or of a sweep: ``report.html``, ``report.json`` and ``sweep.csv``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure as Drawing

from hotrec.artifact import check_made_from, read_artifact
from hotrec.report.alike import differences, is_as_large, unlike_sentences
from hotrec.report.compared import Comparison
from hotrec.report.pictures import (
    draw_coverage,
    draw_learning,
    draw_lookups,
    draw_steps,
    draw_traffic,
)
from hotrec.report.read import TEXTS, Run, read_runs, varied_overrides
from hotrec.report.render import (
    Block,
    Cell,
    Column,
    Heading,
    Items,
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


def write_report(runs: Sequence[Path], output: Path, **settings: Any) -> dict[str, Any]:
    """Write ``make_report(runs, **settings)`` into a directory; return report.json's content."""
    report = make_report(runs, **settings)
    report.write(output)
    return report.document


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
    said = [*verdicts(read, against, comparison), *unlike_sentences(read, against)]
    counted = None if profile is None else read_artifact(profile, kind="profile")
    split = None if partition is None else read_artifact(partition, kind="partition")
    if counted is not None and split is not None:
        check_made_from(split, counted)
    contents = [None if artifact is None else artifact.content for artifact in (counted, split)]
    made_at = made_at or datetime.now(UTC)
    page = report_page(
        jobs, against, *contents, comparison=comparison, title=title, made_at=made_at
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


def report_page(
    jobs: Sequence[Run],
    baseline: Run | None,
    profile: Content | None,
    partition: Content | None,
    *,
    comparison: Comparison | None = None,
    title: str,
    made_at: datetime,
) -> Page:
    """All of ``report.html`` as plain data; jobs that recorded nothing are in the sweep's table."""
    runs = [run for run in jobs if not run.is_empty]
    models = dict.fromkeys(str(run.summary["model"]) for run in runs if run.summary.get("model"))
    num_runs = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    learning, steps, traffic = draw_learning(runs), draw_steps(runs), draw_traffic(runs)
    is_sweep, unlike = bool(varied_overrides(jobs)), unlike_sentences(runs, baseline)
    coverage, tables = _coverage(profile, partition)
    sections: dict[str, list[Block]] = {
        SWEEP_SECTION: [*sweep_notes(runs), sweep_table(jobs)] if is_sweep else [],
        "Plans": _plans(runs, baseline, comparison),
        "Where lookups go": _lookups(runs, comparison),
        "Learning": _picture(
            learning,
            "Training loss and AUC over steps",
            "Placements that train exactly draw the same line: runs with one seed and one order of "
            "samples differ only by rounding.",
        ),
        "Next days": _next_days(runs),
        "Where a step's time goes": _picture(
            steps,
            "Time per step by stage",
            "Of complete runs, which were not interleaved: compare stages, not totals. Medians "
            "over the measured steps, or means over the logged lines of an unfinished run. In "
            "hatched stages the main thread waits for other ranks. Grey is the rest of the "
            "median step.",
        ),
        "What a step sends": _picture(
            traffic,
            "Bytes sent per step and rank by collective",
            "The black line is the lower bound for plans that exchange rows: each distinct row "
            "of a rank's batch is fetched once and its gradient is returned once. A plan that "
            "exchanges pooled bags can send less, because it sends one vector per bag.",
        ),
        "What is hot": coverage,
        "Side by side": _comparison(runs, baseline),
        "Predicted and measured": _predicted(runs),
        "Partition": tables,
        "Runs": _details(runs),
    }
    missing = {
        "Learning": "Loss and AUC over steps: logged fewer than two times.",
        "Where a step's time goes": f"Time per step by stage: {NOT_RECORDED}.",
        "What a step sends": "Bytes sent per step and rank: "
        + ("none were sent." if any(run.sent_bytes for run in runs) else f"{NOT_RECORDED}."),
        "What is hot": "Lookups by most accessed rows: no profile. Pass profile=<its directory>.",
        "Predicted and measured": "Predicted and measured stages: no run has recorded both.",
        "Partition": "Partition: not recorded." if coverage else "",
    }
    left_out = [why for title, why in missing.items() if why and not sections[title]]
    if sections["Learning"] and not any(len(run.aucs()[0]) > 1 for run in runs):
        left_out.append(
            "AUC over steps: one evaluation each. Set trainer.eval_every_steps for a curve."
        )
    sections["Left out"] = _items(left_out)
    subtitle = "  |  ".join([num_runs, *models, made_at.strftime("%Y-%m-%d %H:%M %Z")])
    tiles = best_tiles(runs) if is_sweep else _tiles(runs, baseline, comparison)
    said = unlike if is_sweep else [*verdicts(runs, baseline, comparison), *unlike]
    return Page(title, sections, subtitle, tiles, JSON_NAME, said)


def _plans(runs: Sequence[Run], baseline: Run | None, comparison: Comparison | None) -> list[Block]:
    """The interleaved plans side by side, and the destinations of their lookups."""
    took_part = [] if comparison is None else list(filter(comparison.has, runs))
    if comparison is None or not took_part:
        return []
    position = {run.name: index for index, run in enumerate(runs)}
    header: list[str | Cell] = [
        "Plan",
        "Step, interleaved",
        *([f"Against {baseline.name}"] if baseline and baseline in took_part else []),
        "AUC",
        "Sent, per step and rank",
        "Hot rows",
        "Lookups on the sample's rank",
        "Busiest owner over the mean",
    ]
    rows: list[Sequence[str | Cell]] = []
    for run in took_part:
        plan = comparison.plan(run)
        against = []
        if baseline is not None and baseline in took_part:
            against = ["" if run is baseline else comparison.ratio(run, baseline).text]
        rows.append(
            (
                Cell(run.name, color=run_color(position[run.name])),
                show_seconds(plan.step_s),
                *against,
                *(
                    show_known(SHOW[FIGURES[key].unit], run.number(key))
                    for key in ("auc", "sent_bytes_total", "hot_rows")
                ),
                show_frac(plan.at_home_frac),
                show_known("{:.2f}x".format, plan.max_over_mean),
            )
        )
    note = (
        f"The plans were trained for {show_seconds(comparison.seconds)} in interleaved blocks of a "
        "few steps, from the same weights on the same batches. Intervals are of 90%: they contain "
        "nine of ten repeated comparisons. Hot rows have a copy on every rank; the owner is the "
        "only rank that stores a row. Less is better, except for AUC and lookups that need no "
        "network."
    )
    return [Table(header, rows), note]


def _lookups(runs: Sequence[Run], comparison: Comparison | None) -> list[Block]:
    """The picture of the destinations of the interleaved plans' lookups."""
    if comparison is None:
        return []
    plans = {run.name: comparison.plan(run) for run in runs if comparison.has(run)}
    return _picture(
        draw_lookups(plans) if plans else None,
        "Where lookups go, by rank",
        "The share of all lookups that each rank serves; the bars of a plan add up to 100%. Green "
        "crosses the network. Hot rows are read on the rank of the sample.",
    )


def _picture(figure: Drawing | None, label: str, caption: str) -> list[Block]:
    return [] if figure is None else [Picture(to_svg(figure, label), caption)]


def _next_days(runs: Sequence[Run]) -> list[Block]:
    """The AUC of each day before it was trained on; empty if no run evaluated days ahead."""
    aucs = [{line["day"]: line["auc"] for line in run.evals if "day" in line} for run in runs]
    days = list(dict.fromkeys(day for of_run in aucs for day in of_run))
    if not days:
        return []

    def cell(auc: float | None) -> str:
        return NOT_RECORDED if auc is None else show_quality(auc)

    header = [Cell(run.name, color=run_color(i)) for i, run in enumerate(runs)]
    rows = [(day, *(cell(of_run.get(day)) for of_run in aucs)) for day in days]
    return [
        "AUC of each day, with the model trained until the previous day.",
        Table(("Day", *header), rows),
    ]


def _items(sentences: Sequence[str]) -> list[Block]:
    return [Items(sentences)] if sentences else []


def _tiles(runs: Sequence[Run], baseline: Run | None, comparison: Comparison | None) -> list[Tile]:
    """The headline: the first run, or without a comparison the first with hot and cold rows."""
    others = [run for run in runs if run is not baseline] or list(runs)
    if comparison is not None and comparison.has(others[0]):
        return _tiles_of_turns(others[0], baseline, comparison)
    split = (run for run in others if 0.0 < (run.number("hot_rows_frac") or 0.0) < 1.0)
    focus = next(split, others[0])
    tiles = [
        _tile("auc", _auc_text(focus), focus, baseline),
        _tile("step_p50_s", "median step", focus, baseline),
        _tile("sent_bytes_total", "sent per step and rank", focus, baseline),
        _tile("hot_lookup_frac", "of lookups hit a hot row", focus, baseline),
    ]
    return [tile for tile in tiles if tile is not None]


def _auc_text(run: Run) -> str:
    """The AUC's samples; of several labels, also that it is their mean."""
    text = f"AUC on {run.summary.get('eval_split') or 'held-out samples'}"
    weights = run.by_name("label_weights")
    labels = [name for name in run.by_name("auc_by_label") if weights.get(name, 1.0) > 0]
    if len(labels) < 2:
        return f"{text}, label {labels[0]}" if labels else text
    are_equal = len({weights.get(name, 1.0) for name in labels}) == 1
    return f"{text}, {'mean' if are_equal else 'weighted mean'} of {len(labels)} labels"


def _tile(name: str, text: str, run: Run, baseline: Run | None) -> Tile | None:
    """A figure of a run, compared with the baseline's; None if it was not recorded."""
    figure = FIGURES[name]
    value, relation = run.number(name), _show_against(figure, run, baseline)
    if value is None:
        return None
    if relation == show_difference(0.0) and baseline is not None:
        relation = f"the same as {baseline.name}"
    elif relation and baseline is not None:
        how = "against" if figure.unit is Unit.quality else "of"
        relation += f" {how} {baseline.name}; {figure.better} is better"
    return Tile(SHOW[figure.unit](value), text, relation)


def _tiles_of_turns(run: Run, baseline: Run | None, comparison: Comparison) -> list[Tile]:
    """The chosen plan compared with the baseline, if they were interleaved."""
    plan, step, owner = comparison.plan(run), "", ""
    if baseline is not None and baseline is not run and comparison.has(baseline):
        step = f"inconclusive vs. {baseline.name}"
        if comparison.why_not(run, baseline) is None:
            step = f"{comparison.ratio(run, baseline).text} vs. {baseline.name}; less is better"
        theirs = show_known("{:.2f}x".format, comparison.plan(baseline).max_over_mean)
        owner = f"{theirs} with {baseline.name}; less is better"
    busiest = show_known("{:.2f}x".format, plan.max_over_mean)
    tiles = [
        Tile(show_seconds(plan.step_s), "per step, interleaved", step),
        _tile("sent_bytes_total", "sent per step and rank", run, baseline),
        Tile(busiest, "lookups of the busiest owner, over the mean", owner),
        _tile("auc", _auc_text(run), run, baseline),
    ]
    return [tile for tile in tiles if tile is not None]


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

    header = [
        Cell(run.name, "baseline" if run is baseline else "", run_color(i))
        for i, run in enumerate(runs)
    ]
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
    return [note, Table(("", *header), rows)]


def _recorded(figure: Figure, runs: Sequence[Run]) -> list[Figure]:
    """A figure that a run recorded, one for each part if it has parts; empty for another one."""
    if not figure.parts:
        return [figure] if any(run.number(figure.key) is not None for run in runs) else []
    # Kinds of tables without bytes in any run are omitted.
    parts = dict.fromkeys(
        part
        for run in runs
        for part, value in run.by_name(figure.key).items()
        if value or figure.parts != "kind"
    )
    return [
        replace(
            figure,
            key=f"{figure.key}.{part}",
            label=figure.label.format(_kind_text(part) if figure.parts == "kind" else part),
            parts="",
        )
        for part in parts
    ]


def _kind_text(kind: str) -> str:
    """The names of a table's bytes, in plans with hot rows and without."""
    texts = {"hot_rows": "replicated rows", "cold_rows": "sharded rows"}
    return texts.get(kind, kind.replace("_", " "))


def _coverage(
    profile: Content | None, partition: Content | None
) -> tuple[list[Block], list[Block]]:
    """The picture of the lookups, and the table of the partition; empty if not requested."""
    if profile is None:
        return [], []
    counted = f"{show_count(profile['num_samples'])} samples"
    if profile["num_heldout_samples"]:
        counted += f" and {show_count(profile['num_heldout_samples'])} held out"
    frac = profile["sampling"]["frac"]
    how = f"exactly over {counted}" if frac == 1 else f"on a {show_frac(frac)} sample: {counted}"
    picture = Picture(
        to_svg(draw_coverage(profile, partition), "Share of lookups by most accessed rows"),
        f"Counted {how}. Rows are ranked by their lookups in the training samples. A lower "
        "held-out curve means that popularity has shifted since.",
    )
    if partition is None or not partition["total"]["hot_rows"]:
        return [picture], []
    tables = [{"name": name, **facts} for name, facts in partition["tables"].items()]
    tables.sort(key=lambda table: (-table["num_rows"], table["name"]))
    table = record_table(tables, HOT_COLUMNS, [{"name": "All tables", **partition["total"]}])
    return [picture], [f"Hot rows by the policy {partition['policy']}:", table]


def _predicted(runs: Sequence[Run]) -> list[Block]:
    """A table of predicted and measured stages for each run that has both, else the reason.

    Empty if no run has both.
    """
    if not any(
        run.by_name("predicted_stage_s") and run.by_name("measured_stage_s") for run in runs
    ):
        return []
    blocks: list[Block] = [
        "Medians over the compared steps: the mean over the ranks, and the slowest rank. Because "
        "each stage has its own median, the stages need not add up to the median step. Ids that "
        "the loader routes are measured as a part of the wait for data, which is in other."
    ]
    for run in runs:
        if run.by_name("predicted_stage_s") and run.by_name("measured_stage_s"):
            blocks += [Heading(run.name), _predicted_table(run)]
        elif not run.by_name("predicted_stage_s"):
            blocks.append(f"{run.name}, prediction: {NOT_RECORDED}.")
        else:
            first = run.number("compared_from_step") or 0
            blocks.append(f"{run.name}: no step was measured from step {first:.0f} on.")
    return blocks


def _predicted_table(run: Run) -> Table:
    step_s, first = run.number("measured_step_s") or 0.0, run.number("compared_from_step") or 0
    by_stage = [run.by_name(name) for name in COMPARED]
    stages = dict.fromkeys([*by_stage[0], *by_stage[1]])

    def row(name: str, predicted_s: float, measured_s: float, *slowest_s: float) -> list[str]:
        times = [show_seconds(seconds) for seconds in (predicted_s, measured_s, *slowest_s)]
        error = show_error((predicted_s - measured_s) / step_s) if step_s else ""
        return [name, *times, *([] if slowest_s else [""]), error]

    return Table(
        ("Stage", "Predicted", f"Measured from step {first:.0f}", "Slowest rank", "Error, of step"),
        [
            row(PART_LABELS.get(s, s.replace("_", " ")), *(times.get(s, 0.0) for times in by_stage))
            for s in stages
        ],
        [row("Step", run.number("predicted_step_s") or 0.0, step_s)],
    )


def _details(runs: Sequence[Run]) -> list[Block]:
    """The directory of each run, its missing files, and its files unchanged."""
    blocks: list[Block] = []
    for position, run in enumerate(runs):
        blocks += [Heading(run.name, run_color(position)), Items([str(run.path), *run.notes])]
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
