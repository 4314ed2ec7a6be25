"""What-if: the predictions of a sweep side by side, and the cheapest machine among them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from hotrec.report.page import Section, build_figure, build_page
from hotrec.report.passages import NOTHING, Grid, Passage, passage_html, passages_text, tiles_html
from hotrec.report.plan_figures import write_png
from hotrec.report.style import to_svg
from hotrec.report.sweep_points import (
    ENDED_WITH_ERROR,
    Point,
    find_cheapest,
    read_predictions,
    varied_keys,
)
from hotrec.report.units import show_bytes, show_count, show_rate, show_seconds
from hotrec.report.what_if_figures import build_what_if_figure

WHAT_IF_HTML, WHAT_IF_JSON, WHAT_IF_PNG = "what_if.html", "what_if.json", "what_if.png"

__all__ = ["Point", "find_cheapest", "read_predictions", "what_if_text", "write_what_if"]


def what_if_text(points: Sequence[Point], min_samples_per_s: float | None = None) -> str:
    """The answer and the table, for a terminal."""
    return passages_text("hotrec plan, what if", _passages(points, min_samples_per_s))


def write_what_if(
    points: Sequence[Point], directory: Path, min_samples_per_s: float | None = None
) -> Path:
    """Write what_if.html, what_if.json and what_if.png into a directory.

    Args:
        points: of a sweep, at least one.
        min_samples_per_s: that the cheapest machine must reach; None: whatever fits.

    Returns:
        The page.
    """
    cheapest = find_cheapest(points, min_samples_per_s)
    figure = build_what_if_figure(points, cheapest, min_samples_per_s)
    passages = _passages(points, min_samples_per_s)
    caption = "A cross stands for a point that does not fit. The ring is the cheapest machine."
    picture = build_figure(to_svg(figure, "Samples per second by ranks"), caption, "")
    page = build_page(
        "hotrec plan, what if",
        f"{len(points)} points",
        tiles_html(_tiles(cheapest)) if cheapest else "",
        [
            Section(passages[0].anchor, passages[0].title, passage_html(passages[0])),
            Section("picture", "Samples per second", picture),
            *(Section(p.anchor, p.title, passage_html(p)) for p in passages[1:]),
        ],
        data_file=WHAT_IF_JSON,
    )
    document = {
        "min_samples_per_s": min_samples_per_s,
        "cheapest": None if cheapest is None else cheapest.name,
        "points": [
            {**asdict(point), "num_hosts": point.num_hosts, "fits": point.fits} for point in points
        ],
    }
    directory.mkdir(parents=True, exist_ok=True)
    _replace_file(directory / WHAT_IF_JSON, json.dumps(document, indent=2) + "\n")
    write_png(figure, directory / WHAT_IF_PNG)
    _replace_file(directory / WHAT_IF_HTML, page)
    return directory / WHAT_IF_HTML


def _replace_file(path: Path, text: str) -> None:
    scratch = path.with_name(f".{path.name}.tmp")
    scratch.write_text(text, encoding="utf-8")
    os.replace(scratch, path)


def _tiles(cheapest: Point) -> list[tuple[str, str]]:
    return [
        (_show_machine(cheapest), "the cheapest machine"),
        (_or_nothing(show_rate, cheapest.samples_per_s), "samples, all ranks"),
        (_or_nothing(show_seconds, cheapest.step_s), f"predicted step, {cheapest.chosen}"),
        (_or_nothing(show_bytes, cheapest.sent_bytes), "sent per step and rank"),
    ]


def _or_nothing(show: Callable[[float], str], value: float | None) -> str:
    return NOTHING if value is None else show(value)


def _show_machine(point: Point) -> str:
    ranks = (
        "1 rank" if point.num_ranks == 1 else f"{_or_nothing(show_count, point.num_ranks)} ranks"
    )
    hosts = (
        "1 host" if point.num_hosts == 1 else f"{_or_nothing(show_count, point.num_hosts)} hosts"
    )
    return f"{ranks} on {hosts}"


def _passages(points: Sequence[Point], min_samples_per_s: float | None) -> list[Passage]:
    cheapest = find_cheapest(points, min_samples_per_s)
    wanted = "on which it fits"
    if min_samples_per_s is not None:
        wanted += f" and runs at {show_rate(min_samples_per_s)} or more"
    if cheapest is None:
        fastest = max((p.samples_per_s or 0.0 for p in points if p.fits), default=None)
        answer = f"None of the {len(points)} points is a machine {wanted}. " + (
            "None fits at all." if fastest is None else f"The fastest runs at {show_rate(fastest)}."
        )
    else:
        batch = _or_nothing(show_count, cheapest.batch_size)
        settings = _settings(cheapest, varied_keys(points))
        answer = (
            f"The cheapest machine {wanted}: {_show_machine(cheapest)}, batch {batch} per rank"
            f"{settings and ', ' + settings}: {cheapest.chosen}, "
            f"{_or_nothing(show_rate, cheapest.samples_per_s)} (job {cheapest.name})."
        )
    problems = tuple(f"Job {p.name}: {p.problem}" for p in points if not p.fits)
    passages = [
        Passage("cheapest", "The cheapest machine", (answer,)),
        Passage("points", "Every point", (), _grid(points, cheapest)),
    ]
    if problems:
        passages.append(Passage("problems", "What does not fit", problems))
    return passages


def _settings(point: Point, keys: Sequence[str]) -> str:
    return ", ".join(f"{key}={point.overrides[key]}" for key in keys if key in point.overrides)


def _grid(points: Sequence[Point], cheapest: Point | None) -> Grid:
    keys = varied_keys(points)
    heads = ["job", "ranks", "hosts", "batch", *keys, "chosen", "step", "samples"]
    heads += ["sent", "device memory", "host memory", "fits"]
    rows = []
    for point in points:
        numbers = (point.num_ranks, point.num_hosts, point.batch_size)
        sizes = (point.sent_bytes, point.device_bytes, point.host_bytes)
        fits = "cheapest" if point is cheapest else "yes"
        rows.append(
            (
                point.name,
                *(_or_nothing(show_count, number) for number in numbers),
                *(point.overrides.get(key, NOTHING) for key in keys),
                point.chosen or NOTHING,
                _or_nothing(show_seconds, point.step_s),
                _or_nothing(show_rate, point.samples_per_s),
                *(_or_nothing(show_bytes, size) for size in sizes),
                fits if point.fits else "error" if point.problem == ENDED_WITH_ERROR else "no",
            )
        )
    return Grid(tuple(heads), tuple(rows))
