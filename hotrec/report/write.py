"""From run directories to ``report.html`` and ``report.json``."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from hotrec.report.cache import build_caches
from hotrec.report.compare import choose_baseline, choose_focus
from hotrec.report.coverage import draw_coverage, read_coverage
from hotrec.report.figures import draw_learning, draw_steps, draw_traffic
from hotrec.report.memory import build_memory
from hotrec.report.page import (
    Section,
    build_comparison,
    build_figure,
    build_hot_table,
    build_missing,
    build_page,
    build_run_details,
    build_tiles,
)
from hotrec.report.predicted import build_predicted
from hotrec.report.read import BY_KIND, COMPARED, NUMERIC, Run, read_runs
from hotrec.report.style import to_svg
from hotrec.report.units import show_count, show_frac

HTML_NAME, JSON_NAME = "report.html", "report.json"


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
        runs: run directories, in the order of columns and colours.
        profile: a profile directory, for the coverage curves.
        partition: a partition directory, to mark on them; needs its profile.
        baseline: name of the run that the others are set against; by default the first whose
            placement starts with "torchrec".
        made_at: the time to print; by default now.

    Returns:
        What ``report.json`` holds.

    Raises:
        ValueError: if a directory is missing or a file in it is broken (``ArtifactError`` for a
            profile or partition); then nothing is written.
    """
    if partition is not None and profile is None:
        raise ValueError(
            f"report partition {partition}: expected its profile as well, got none. Pass profile."
        )
    read = read_runs(runs)
    against = choose_baseline(read, baseline)
    coverage = _read_contents(profile, partition)
    made_at = made_at or datetime.now(UTC)
    page = build_page(
        title,
        _subtitle(read, made_at),
        build_tiles(choose_focus(read, against), against),
        _sections(read, against, coverage),
    )
    document = _document(read, against, coverage, title=title, made_at=made_at)
    text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    output.mkdir(parents=True, exist_ok=True)
    _replace_file(output / JSON_NAME, text)
    _replace_file(output / HTML_NAME, page)
    return document


def _replace_file(path: Path, text: str) -> None:
    scratch = path.with_name(f".{path.name}.tmp")
    scratch.write_text(text, encoding="utf-8")
    os.replace(scratch, path)


def _read_contents(
    profile: Path | None, partition: Path | None
) -> tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]:
    if profile is None:
        return None, None
    profile_artifact, partition_artifact = read_coverage(profile, partition)
    return (
        profile_artifact.content,
        None if partition_artifact is None else partition_artifact.content,
    )


def _subtitle(runs: Sequence[Run], made_at: datetime) -> str:
    names = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    models = list(dict.fromkeys(str(r.summary["model"]) for r in runs if r.summary.get("model")))
    return "  |  ".join([names, *models, made_at.strftime("%Y-%m-%d %H:%M %Z")])


def _svg(figure: Figure | None, label: str) -> str | None:
    return None if figure is None else to_svg(figure, label)


def _sections(
    runs: Sequence[Run],
    baseline: Run | None,
    coverage: tuple[Mapping[str, Any] | None, Mapping[str, Any] | None],
) -> list[Section]:
    caches = build_caches(runs)
    return [
        Section("compare", "Side by side", build_comparison(runs, baseline)),
        Section("hot", "What is hot", _hot_section(*coverage)),
        Section(
            "learning",
            "Learning",
            build_figure(
                _svg(draw_learning(runs), "Training loss and AUC over steps"),
                "Exact placements draw one line: hot and cold rows follow the same update rule, "
                "so runs of one seed and one order of samples differ by rounding only.",
                "Loss and AUC: not recorded.",
            ),
        ),
        Section(
            "steps",
            "Where a step's time goes",
            build_figure(
                _svg(draw_steps(runs), "Time per step by stage"),
                "Seconds of each stage: the median of the measured steps where the run sums it up, "
                "else the mean over the logged lines. Grey is what has no stage of its own, with "
                "what the stages leave of the median step.",
                "Step breakdown: not recorded.",
            ),
        ),
        Section("predicted", "Predicted and measured", build_predicted(runs)),
        Section("memory", "Memory", build_memory(runs)),
        *([Section("cache", "Device cache", caches)] if caches else []),
        Section(
            "traffic",
            "What a step sends",
            build_figure(
                _svg(draw_traffic(runs), "Bytes sent per step and rank by collective"),
                "The black line is the lower bound of exact synchronous training that exchanges "
                "rows: each distinct row of the rank's batch fetched once and its gradient "
                "returned once. A plan that exchanges pooled bags can stay under it where bags "
                "are long, since it sends one vector for a whole bag.",
                "Bytes by collective: none were sent."
                if any(run.sent_bytes for run in runs)
                else "Bytes by collective: not recorded.",
            ),
        ),
        Section("runs", "Runs", build_run_details(runs)),
    ]


def _hot_section(profile: Mapping[str, Any] | None, partition: Mapping[str, Any] | None) -> str:
    if profile is None:
        return build_missing("Access profile: not recorded. Pass a profile to draw its coverage.")
    how = _describe_profile(profile)
    svg = to_svg(draw_coverage(profile, partition), "Share of lookups by most accessed rows")
    caption = f"{how} Rows are ranked by their train counts; where the held-out curve "
    caption += "falls below, popularity has moved on."
    body = build_figure(svg, caption, "")
    if partition is None:
        return body + build_missing("Partition: not recorded.")
    return body + f"<h3>Partition: {escape(partition['policy'])}</h3>" + build_hot_table(partition)


def _describe_profile(profile: Mapping[str, Any]) -> str:
    sampling = profile["sampling"]
    counted = f"{show_count(profile['num_samples'])} samples"
    if profile["num_heldout_samples"]:
        counted += f" and {show_count(profile['num_heldout_samples'])} held out"
    if sampling["frac"] == 1.0:
        return f"Counted exactly over {counted}."
    return f"Counted on a {show_frac(sampling['frac'])} sample: {counted}."


def _document(
    runs: Sequence[Run],
    baseline: Run | None,
    coverage: tuple[Mapping[str, Any] | None, Mapping[str, Any] | None],
    *,
    title: str,
    made_at: datetime,
) -> dict[str, Any]:
    profile, partition = coverage
    document = {
        "title": title,
        "made_at": made_at.isoformat(),
        "baseline": None if baseline is None else baseline.name,
        "runs": [_run_document(run, baseline) for run in runs],
        "profile": profile,
        "partition": partition,
    }
    cleaned: dict[str, Any] = _without_nan(document)
    return cleaned


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
        "placement": run.summary.get("placement"),
        "model": run.summary.get("model"),
        **{name: run.summary.get(name) for name in ("precision", "compile")},
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
