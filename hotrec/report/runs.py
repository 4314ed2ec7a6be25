"""The report of runs: ``report.html`` and ``report.json``."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from hotrec.report.figures import (
    draw_coverage,
    draw_learning,
    draw_predicted,
    draw_steps,
    draw_traffic,
    predicted_stages,
)
from hotrec.report.read import (
    BY_KIND,
    COMPARED,
    CONFIG,
    ENVIRONMENT,
    GROUPS,
    MEASURES,
    NUMERIC,
    PEAKS,
    Measure,
    Run,
    read_coverage,
    read_runs,
)
from hotrec.report.render import (
    Block,
    Cell,
    Heading,
    Items,
    Listing,
    Missing,
    Page,
    Passage,
    Picture,
    Table,
    Tile,
    render_html,
    write_file,
)
from hotrec.report.style import run_color, to_svg
from hotrec.report.units import (
    NOT_RECORDED,
    show_bytes,
    show_count,
    show_error,
    show_frac,
    show_ratio,
    show_seconds,
)

HTML_NAME, JSON_NAME = "report.html", "report.json"
BASELINE_PLACEMENT = "torchrec"

Content = Mapping[str, Any]


def write_report(
    runs: Sequence[Path],
    output: Path,
    *,
    profile: Path | None = None,
    partition: Path | None = None,
    baseline: str | None = None,
    title: str = "hotrec report",
    made_at: datetime | None = None,
) -> dict[str, Any]:
    """Write the page and the JSON document into the directory ``output``.

    Args:
        runs: The run directories, in the order of columns and colors.
        output: The directory, made if it does not exist.
        profile: A profile directory, for the coverage curves.
        partition: A partition directory, to mark on the curves; needs its profile.
        baseline: The name of the run with which the others are compared; by default the first
            whose placement starts with "torchrec".
        title: The title of the page.
        made_at: The time to print; now by default.

    Returns:
        What ``report.json`` holds.

    Raises:
        ValueError: If a directory is missing or a file in it is broken (``ArtifactError`` for a
            profile or partition); then nothing is written.
    """
    if partition is not None and profile is None:
        raise ValueError(
            f"report partition {partition}: expected its profile as well, got none. Pass profile."
        )
    read = read_runs(runs)
    against = _choose_baseline(read, baseline)
    artifacts = (None, None) if profile is None else read_coverage(profile, partition)
    coverage = [None if artifact is None else artifact.content for artifact in artifacts]
    made_at = made_at or datetime.now(UTC)
    page = report_page(read, against, *coverage, title=title, made_at=made_at)
    document: dict[str, Any] = _without_nan(
        {
            "title": title,
            "made_at": made_at.isoformat(),
            "baseline": None if against is None else against.name,
            "runs": [_run_document(run, against) for run in read],
            "profile": coverage[0],
            "partition": coverage[1],
        }
    )
    html = render_html(page)
    write_file(output / JSON_NAME, json.dumps(document, indent=2, allow_nan=False) + "\n")
    write_file(output / HTML_NAME, html)
    return document


def _choose_baseline(runs: Sequence[Run], name: str | None) -> Run | None:
    if name is None:
        own = (r for r in runs if str(r.summary.get("placement")).startswith(BASELINE_PLACEMENT))
        return next(own, None)
    for run in runs:
        if run.name == name:
            return run
    raise ValueError(
        f"report baseline: expected one of the runs {[run.name for run in runs]}, got {name!r}."
    )


def report_page(
    runs: Sequence[Run],
    baseline: Run | None,
    profile: Content | None,
    partition: Content | None,
    *,
    title: str,
    made_at: datetime,
) -> Page:
    """All of ``report.html`` as plain data."""
    models = dict.fromkeys(str(run.summary["model"]) for run in runs if run.summary.get("model"))
    num_runs = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    passages = [
        Passage("compare", "Side by side", _comparison(runs, baseline)),
        Passage("hot", "What is hot", _coverage(profile, partition)),
        Passage(
            "learning",
            "Learning",
            _figure(
                draw_learning(runs),
                "Training loss and AUC over steps",
                "Placements that train exactly draw the same line: hot and cold rows follow the "
                "same update rule, so runs with one seed and one order of samples differ only by "
                "rounding.",
                "Loss and AUC: not recorded.",
            ),
        ),
        Passage(
            "steps",
            "Where a step's time goes",
            _figure(
                draw_steps(runs),
                "Time per step by stage",
                "The time of each stage is the median over the measured steps where the run "
                "recorded it, otherwise the mean over the logged lines. In hatched stages the main "
                "thread waits for other ranks. Grey is the rest of the median step, which belongs "
                "to no named stage.",
                "Step breakdown: not recorded.",
            ),
        ),
        Passage("predicted", "Predicted and measured", _predicted(runs)),
        Passage("memory", "Memory", _memory(runs)),
        Passage("cache", "Device cache", _caches([run for run in runs if run.cache])),
        Passage(
            "traffic",
            "What a step sends",
            _figure(
                draw_traffic(runs),
                "Bytes sent per step and rank by collective",
                "The black line is the lower bound of exact synchronous training that exchanges "
                "rows: each distinct row of a rank's batch is fetched once and its gradient is "
                "returned once. A plan that exchanges pooled bags can send less than the bound "
                "when bags are long, because it sends one vector for a whole bag.",
                "Bytes by collective: "
                + ("none were sent." if any(r.sent_bytes for r in runs) else "not recorded."),
            ),
        ),
        Passage("runs", "Runs", _details(runs)),
    ]
    return Page(
        title,
        [passage for passage in passages if passage.blocks],
        "  |  ".join([num_runs, *models, made_at.strftime("%Y-%m-%d %H:%M %Z")]),
        _tiles(_choose_focus(runs, baseline), baseline),
        JSON_NAME,
    )


def _figure(figure: Figure | None, label: str, caption: str, missing: str) -> list[Block]:
    return [Missing(missing) if figure is None else Picture(to_svg(figure, label), caption)]


def _choose_focus(runs: Sequence[Run], baseline: Run | None) -> Run:
    """The run of the headline: the first with both hot and cold rows, else the first other one."""
    others = [run for run in runs if run is not baseline] or list(runs)
    split = (run for run in others if 0.0 < (run.number("hot_rows_frac") or 0.0) < 1.0)
    return next(split, others[0])


def _tiles(focus: Run, baseline: Run | None) -> list[Tile]:
    tiles = []
    for name, text in (
        ("auc", "AUC, held out"),
        ("step_p50_s", "median step"),
        ("sent_bytes_total", "sent per step and rank"),
    ):
        value, relation = focus.number(name), _show_against(MEASURES[name], focus, baseline)
        if value is None:
            continue
        if relation and baseline is not None:
            relation += f" {'against' if name == 'auc' else 'of'} {baseline.name}"
        tiles.append(Tile(MEASURES[name].show(value), text, relation))
    sent, bound = focus.number("sent_bytes_total"), focus.number("bound_bytes")
    if sent is not None and bound:
        tiles.append(
            Tile(f"{sent / bound:.2f}x", "the lower bound of exact training, in bytes sent")
        )
    rows, lookups = focus.number("hot_rows_frac"), focus.number("hot_lookup_frac")
    if rows and lookups is not None:
        tiles.append(Tile(show_frac(lookups), f"of lookups hit the {show_frac(rows)} hot rows"))
    return tiles


def _show_against(measure: Measure, run: Run, baseline: Run | None) -> str:
    """The run's figure compared with the baseline's; empty for the baseline itself."""
    if baseline is None or run is baseline or not measure.against:
        return ""
    value, reference = run.number(measure.name), baseline.number(measure.name)
    if value is None or reference is None:
        return ""
    if measure.against == "ratio":
        return show_ratio(value, reference)
    return f"{value - reference:+.4f}"


def _comparison(runs: Sequence[Run], baseline: Run | None) -> list[Block]:
    def cell(measure: Measure, run: Run) -> Cell:
        value = run.number(measure.name)
        if value is None:
            return Cell(NOT_RECORDED)
        return Cell(measure.show(value), _show_against(measure, run, baseline))

    header = [
        Cell(run.name, "baseline" if run is baseline else "", run_color(i))
        for i, run in enumerate(runs)
    ]
    rows: list[Sequence[str | Cell]] = [
        ("Placement", *(str(run.summary.get("placement") or NOT_RECORDED) for run in runs)),
        ("Model", *(str(run.summary.get("model") or NOT_RECORDED) for run in runs)),
        ("Dense layers", *(_dense_layers(run.summary) for run in runs)),
        ("Finished", *("yes" if run.summary.get("finished") is True else "no" for run in runs)),
    ]
    for group, measures in GROUPS.items():
        rows.append((group,))
        rows += [(m.label, *(cell(m, run) for run in runs)) for m in measures]
    note = (
        "No run uses one of TorchRec's own plans, so there is no baseline to compare with."
        if baseline is None
        else f"Small print compares with {baseline.name}: a ratio for times and bytes, a "
        "difference for quality. An error is predicted minus measured, in percent of the measured."
    )
    return [note, Table(("", *header), rows)]


def _dense_layers(summary: Content) -> str:
    """How they computed, such as "bf16, compiled, gradients clipped to 1"."""
    if summary.get("precision") is None:
        return NOT_RECORDED
    texts = [str(summary["precision"])]
    if summary.get("compile"):
        texts.append("compiled")
    if summary.get("grad_clip_norm") is not None:
        texts.append(f"gradients clipped to {summary['grad_clip_norm']:g}")
    return ", ".join(texts)


def _coverage(profile: Content | None, partition: Content | None) -> list[Block]:
    if profile is None:
        return [Missing("Access profile: not recorded. Pass a profile to draw its coverage.")]
    counted = f"{show_count(profile['num_samples'])} samples"
    if profile["num_heldout_samples"]:
        counted += f" and {show_count(profile['num_heldout_samples'])} held out"
    frac = profile["sampling"]["frac"]
    how = f"exactly over {counted}" if frac == 1 else f"on a {show_frac(frac)} sample: {counted}"
    picture = Picture(
        to_svg(draw_coverage(profile, partition), "Share of lookups by most accessed rows"),
        f"Counted {how}. Rows are ranked by how often the training samples read them. Where the "
        "held-out curve is lower, popularity has shifted since.",
    )
    if partition is None:
        return [picture, Missing("Partition: not recorded.")]
    tables = partition["tables"]
    order = sorted(tables, key=lambda name: (-tables[name]["num_rows"], name))
    header = ("Table", "Rows", "Hot rows", "Hot share", "Hot bytes", "Lookups hot, train")
    table = Table(
        (*header, "Lookups hot, held out", "Row and its state"),
        [(t, *_hot_cells(tables[t]), show_bytes(tables[t]["row_bytes"])) for t in order],
        [("All tables", *_hot_cells(partition["total"]), "")],
    )
    return [picture, Heading(f"Partition: {partition['policy']}"), table]


def _hot_cells(summary: Content) -> list[str]:
    covered = [summary["coverage_train"], summary["coverage_heldout"]]
    return [
        show_count(summary["num_rows"]),
        show_count(summary["hot_rows"]),
        show_frac(summary["hot_rows_frac"]),
        show_bytes(summary["hot_bytes"]),
        *("no lookups" if frac is None else show_frac(frac) for frac in covered),
    ]


def _blank(show: Callable[[float], str], value: float | None) -> str:
    return "" if value is None else show(value)


def _predicted(runs: Sequence[Run]) -> list[Block]:
    """Predicted against measured; of a run that lacks one of them the reason."""
    shown = [
        run for run in runs if run.by_part["predicted_stage_s"] and run.by_part["measured_stage_s"]
    ]
    blocks: list[Block] = []
    if shown:
        caption = (
            "Measured are medians over the compared steps: of each stage the mean over the ranks, "
            "and the slowest rank. An error is predicted minus measured, in percent of the "
            "measured step. Because each stage has its own median, the stages need not add up to "
            "the median step."
        )
        svg = to_svg(draw_predicted(shown), "Predicted and measured seconds by stage")
        blocks.append(Picture(svg, caption))
    for run in shown:
        blocks += [Heading(run.name), _predicted_table(run)]
    return blocks + [Missing(f"{run.name}{_why_not(run)}") for run in runs if run not in shown]


def _why_not(run: Run) -> str:
    if not run.by_part["predicted_stage_s"]:
        return f", prediction: {NOT_RECORDED}."
    first = run.number("compared_from_step")
    if first is None:
        return f", measured stages: {NOT_RECORDED}."
    return (
        f": no step was measured from step {first:.0f} on, where the comparison with the "
        "prediction begins; earlier steps are warm-up."
    )


def _predicted_table(run: Run) -> Table:
    step_s, first = run.number("measured_step_s"), run.number("compared_from_step")

    def row(
        name: str, predicted: float | None, measured: float | None, slowest: float | None = None
    ) -> tuple[str, ...]:
        error_s = None if predicted is None or measured is None else predicted - measured
        share = None if error_s is None or not step_s else error_s / step_s
        times = (_blank(show_seconds, value) for value in (predicted, measured, slowest))
        return (name, *times, _signed(error_s, show_seconds), _blank(show_error, share))

    sent, measured_sent = run.number("predicted_sent_bytes"), run.number("sent_bytes_total")
    error = None if sent is None or measured_sent is None else sent - measured_sent
    frac = None if error is None else run.number("sent_bytes_error_frac")
    traffic = (
        "Bytes sent, per step and rank",
        _blank(show_bytes, sent),
        _blank(show_bytes, measured_sent),
        "",
        _signed(error, show_bytes),
        "" if frac is None else f"{show_error(frac)} of the bytes",
    )
    by_stage = (
        run.by_part["predicted_stage_s"],
        run.by_part["measured_stage_s"],
        run.by_part["slowest_rank_stage_s"],
    )
    measured = "Measured" if first is None else f"Measured from step {first:.0f}"
    return Table(
        ("Stage", "Predicted", measured, "Slowest rank", "Error", "Error, of the step"),
        [
            row(stage.replace("_", " "), *(times.get(stage) for times in by_stage))
            for stage in predicted_stages([run])
        ],
        [row("Step", run.number("predicted_step_s"), step_s), traffic],
    )


def _signed(value: float | None, show: Callable[[float], str]) -> str:
    return "" if value is None else f"{'-' if value < 0 else '+'}{show(abs(value))}"


def _memory(runs: Sequence[Run]) -> list[Block]:
    shown = [run for run in runs if run.number("peak_resident_bytes") is not None]
    blocks: list[Block] = []
    if shown:
        blocks.append(
            "Each figure is for the rank that uses most, so parts need not add up to the whole. A "
            "plan predicts the memory of the tables: rows, their gradients and optimizer state, "
            "caches and the router's maps. Peaks also include dense layers, activations, messages "
            "and libraries. On CPU all memory is host memory."
        )
    for run in shown:
        blocks += [Heading(run.name), _memory_table(run)]
    missing = [run for run in runs if run not in shown]
    return blocks + [Missing(f"{run.name}, memory: {NOT_RECORDED}.") for run in missing]


def _memory_table(run: Run) -> Table:
    """The tables in each place, then what they hold, then the peaks."""
    rows: list[tuple[str, ...]] = []
    for place in ("device", "host"):
        predicted, measured = (
            run.number(f"{what}_{place}_bytes") for what in ("predicted", "measured")
        )
        error = _blank(show_error, run.number(f"{place}_bytes_error_frac"))
        if predicted or measured:
            sizes = (_blank(show_bytes, predicted), _blank(show_bytes, measured))
            rows.append((f"Tables on the {place}", *sizes, error))
        kinds = run.by_part[f"{place}_bytes_by_kind"]
        rows += [
            (f"{kind.replace('_', ' ')} on the {place}", "", show_bytes(num_bytes), "")
            for kind, num_bytes in kinds.items()
            if num_bytes
        ]
    peaks = [(MEASURES[name].label, run.number(name)) for name in PEAKS]
    rows += [(label, "", show_bytes(peak), "") for label, peak in peaks if peak is not None]
    return Table(("Memory", "Predicted", "Measured", "Error"), rows)


def _caches(runs: Sequence[Run]) -> list[Block]:
    """How often the device caches held the row, and what crossed the bus as a result."""
    if not runs:
        return []

    def share(name: str) -> list[str]:
        rows = [(run.cache[name], run.cache["num_rows"]) for run in runs]
        return [show_frac(part / whole) if whole else "no lookups" for part, whole in rows]

    def per_step(name: str, show: Callable[[float], str]) -> list[str]:
        return [show(run.cache[name] / run.cache["num_steps"]) for run in runs]

    table = Table(
        ("", *(run.name for run in runs)),
        [
            ("Hit rate, of distinct rows", *share("num_hits")),
            ("Conflict misses, of distinct rows", *share("num_conflict_misses")),
            ("Lookups per step", *per_step("num_lookups", show_count)),
            ("Distinct rows per step", *per_step("num_rows", show_count)),
            ("Misses per step, with conflicts", *per_step("num_misses", show_count)),
            ("Evictions per step", *per_step("num_evictions", show_count)),
            ("Read over the bus per step", *per_step("read_bytes", show_bytes)),
            ("Written over the bus per step", *per_step("written_bytes", show_bytes)),
        ],
    )
    text = (
        "Sums over all ranks and their caches, training steps only. A step looks up each distinct "
        "row once: a hit is in the device's cache, a miss is fetched from host memory. A conflict "
        "miss is used in host memory, because rows of the same step occupy every slot of its set. "
        "An evicted row is written back. The bus carries rows, and optimizer state that is not "
        "cached."
    )
    return [text, table]


def _details(runs: Sequence[Run]) -> list[Block]:
    """Where each run is stored, what is missing of it, and its files as they are."""
    titles = {CONFIG: "Configuration", ENVIRONMENT: "Environment"}
    blocks: list[Block] = []
    for position, run in enumerate(runs):
        blocks += [Heading(run.name, run_color(position)), Items([str(run.path), *run.notes])]
        blocks += [
            Listing(f"{titles.get(name, 'Plan')} ({name})", text)
            for name, text in run.texts.items()
        ]
    return blocks


def _run_document(run: Run, baseline: Run | None) -> dict[str, Any]:
    relative: dict[str, float] = {}
    for name in ("step_p50_s", "step_p90_s", "samples_per_s", "sent_bytes_total"):
        value, reference = run.number(name), None if baseline is None else baseline.number(name)
        if value is not None and reference:
            relative[name] = value / reference
    sent, bound = run.number("sent_bytes_total"), run.number("bound_bytes")
    return {
        "name": run.name,
        "path": str(run.path),
        **{name: run.summary.get(name) for name in ("placement", "model", "precision", "compile")},
        "finished": run.summary.get("finished") is True,
        **{name: run.summary.get(name) for name in NUMERIC},
        "sent_bytes": dict(run.sent_bytes),
        "stage_s": dict(run.stage_s),
        **{name: run.summary.get(name) for name in (*COMPARED, *BY_KIND)},
        **({"cache": dict(run.cache)} if run.cache else {}),
        "sent_over_bound": sent / bound if sent is not None and bound else None,
        "relative_to_baseline": relative,
        "loss": _pairs(run.series("loss")),
        "auc_by_split": {split: _pairs(run.eval_series("auc", split)) for split in run.splits},
        "notes": list(run.notes),
    }


def _pairs(series: tuple[list[float], list[float]]) -> list[list[float]]:
    return [[step, value] for step, value in zip(*series, strict=True)]


def _without_nan(value: Any) -> Any:
    """NaN and infinity are not JSON; they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _without_nan(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(part) for part in value]
    return value
