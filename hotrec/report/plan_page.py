"""A plan for people: text for the terminal, a picture, and one self-contained HTML page."""

from __future__ import annotations

import os
from pathlib import Path

from hotrec.report.page import Section, build_figure, build_page
from hotrec.report.passages import passage_html, passages_text, tiles_html
from hotrec.report.plan_figures import build_plan_figure, draw_plan
from hotrec.report.plan_text import Document, baseline_name, describe_world, plan_passages
from hotrec.report.style import to_svg
from hotrec.report.units import show_bytes, show_frac, show_rate, show_ratio, show_seconds

PLAN_HTML, PREDICTION_JSON = "plan.html", "prediction.json"

__all__ = ["draw_plan", "plan_report_text", "write_plan_page"]


def plan_report_text(document: Document) -> str:
    """What was chosen and why, in words and tables.

    Args:
        document: the prediction, as ``prediction.json`` holds it.

    Raises:
        ValueError: if a part that every page needs is missing.
    """
    passages = plan_passages(document)
    return passages_text(f"hotrec plan: {describe_world(document)}", passages)


def write_plan_page(document: Document, directory: Path) -> Path:
    """Write ``plan.html`` into a directory.

    Args:
        document: the prediction, as ``prediction.json`` holds it.

    Returns:
        The page.

    Raises:
        ValueError: if a part that every page needs is missing; then nothing is written.
    """
    passages = plan_passages(document)
    svg = to_svg(build_plan_figure(document), "Predicted time, memory, rows and sensitivity")
    caption = (
        "Hatched parts are communication that nothing hides. Marks stand where a table has rows "
        "of a kind; a kind without rows has none."
    )
    picture = Section("picture", "In one picture", build_figure(svg, caption, ""))
    sections = [Section(p.anchor, p.title, passage_html(p)) for p in passages]
    page = build_page(
        f"hotrec plan: {document['chosen']}",
        describe_world(document),
        tiles_html(_tiles(document)),
        [sections[0], picture, *sections[1:]],
        data_file=PREDICTION_JSON,
    )
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / PLAN_HTML
    scratch = path.with_name(f".{path.name}.tmp")
    scratch.write_text(page, encoding="utf-8")
    os.replace(scratch, path)
    return path


def _tiles(document: Document) -> list[tuple[str, str]]:
    plans, before = document["plans"], baseline_name(document)
    chosen = plans[document["chosen"]]

    def against(name: str) -> str:
        if before is None or before == document["chosen"]:
            return ""
        return f", {show_ratio(chosen[name], plans[before][name])} of {before}"

    tiles = [
        (show_seconds(chosen["step_s"]), f"predicted step{against('step_s')}"),
        (show_rate(chosen["samples_per_s"]), "samples, all ranks"),
        (
            show_bytes(chosen["total_sent_bytes"]),
            f"sent per step and rank{against('total_sent_bytes')}",
        ),
    ]
    coverage = (document.get("expected") or {}).get("coverage_frac")
    tables = document.get("tables") or ()
    if coverage is not None and tables:
        num_hot = sum(table["hot_rows"] for table in tables)
        frac = num_hot / sum(table["num_rows"] for table in tables)
        tiles.append((show_frac(coverage), f"of lookups hit the {show_frac(frac)} hot rows"))
    return tiles
