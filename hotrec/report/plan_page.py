"""A human-readable plan: ``plan.html``, with its figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from hotrec.report.pictures import bar_figure, draw_bars
from hotrec.report.plan import PREDICTION_JSON, Document, RecordedPrediction, plan_sections
from hotrec.report.render import Page, Picture, render_html, write_files
from hotrec.report.style import to_svg
from hotrec.report.units import show_bytes, show_ratio, show_seconds

PLAN_HTML = "plan.html"
MAX_PLANS_DRAWN = 6


def write_plan_page(document: Document, directory: Path) -> Path:
    """Write ``plan.html`` into a directory, made if it does not exist; return its path.

    Raises:
        ValueError: If a part that every page needs is missing; then nothing is written.
    """
    prediction = RecordedPrediction(document)
    sections = plan_sections(prediction)
    names = prediction.order[:MAX_PLANS_DRAWN]
    figure = bar_figure(len(names), lambda axes: draw_stages(axes, prediction, names))
    picture = Picture(
        to_svg(figure, "Predicted time of a step"),
        "Predicted time of a step. Hatched parts are exposed communication.",
    )
    sections["Where a step's time and bytes go"].insert(0, picture)
    title, subtitle = f"hotrec plan: {prediction.name(prediction.chosen)}", prediction.describe()
    page = Page(title, sections, subtitle, data_file=PREDICTION_JSON)
    write_files(directory, {PLAN_HTML: render_html(page)})
    return directory / PLAN_HTML


def draw_stages(axes: Axes, prediction: RecordedPrediction, names: Sequence[str]) -> None:
    """Draw a stacked bar of stages for each of the named plans, with its step and bytes."""
    plans, baseline = prediction.plans, prediction.baseline
    # Without hot rows two plans may be equal.
    names = list({prediction.name(name): name for name in names}.values())
    texts = []
    for name in names:
        plan = plans[name]
        text = f"{show_seconds(plan['step_s'])}, {show_bytes(plan['total_sent_bytes'])} sent"
        if baseline is not None and name != baseline:
            text += f", {show_ratio(plan['step_s'], plans[baseline]['step_s'])} of the time"
        texts.append(text)
    parts = {prediction.label(name): plans[name]["stage_s"] for name in names}
    draw_bars(axes, parts, texts, show_seconds)
