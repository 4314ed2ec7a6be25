"""Device caches on the page: rates and figures per step, for runs that have them and no others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hotrec.report.cache import build_caches
from hotrec.report.read import read_runs
from hotrec.report.write import write_report
from tests.unit.report.runs import SUMMARY, metrics_line, write_run, write_whole_run

CACHE: dict[str, int] = {
    "num_steps": 200,
    "num_lookups": 4_000_000,
    "num_rows": 1_000_000,
    "num_hits": 875_000,
    "num_misses": 125_000,
    "num_conflict_misses": 4_000,
    "num_evictions": 110_000,
    "read_bytes": 64_000_000,
    "written_bytes": 57_000_000,
}
SHOWN = {
    "Hit rate, of distinct rows": "87.5%",
    "Conflict misses, of distinct rows": "0.4%",
    "Lookups per step": "20,000",
    "Distinct rows per step": "5,000",
    "Misses per step, with conflicts": "625",
    "Evictions per step": "550",
    "Read over the bus per step": "320 kB",
    "Written over the bus per step": "285 kB",
}


def row(label: str, *texts: str) -> str:
    return f"<tr><td>{label}</td>{''.join(f'<td>{text}</td>' for text in texts)}</tr>"


def test_page_and_json_hold_the_run_that_has_caches(tmp_path: Path) -> None:
    runs = [
        write_whole_run(tmp_path / "cached", {**SUMMARY, "name": "<cached>", "cache": CACHE}),
        write_whole_run(tmp_path / "other", {**SUMMARY, "name": "other"}),
    ]
    write_report(runs, tmp_path / "out")
    page = (tmp_path / "out/report.html").read_text()
    section = page.split('<section id="cache">')[1].split("</section>")[0]
    assert "<h2>Device cache</h2>" in section
    assert '<th></th><th class="name">&lt;cached&gt;</th></tr>' in section
    for label, text in SHOWN.items():
        assert row(label, text) in section
    cached, other = json.loads((tmp_path / "out/report.json").read_text())["runs"]
    assert cached["cache"] == CACHE
    assert "cache" not in other


def test_a_page_of_runs_without_caches_has_no_section(tmp_path: Path) -> None:
    write_report([write_whole_run(tmp_path / "run")], tmp_path / "out")
    assert "Device cache" not in (tmp_path / "out/report.html").read_text()
    assert build_caches(read_runs([tmp_path / "run"])) == ""


def test_a_run_without_a_summary_has_what_its_lines_add_up_to(tmp_path: Path) -> None:
    half = {name: value // 2 for name, value in CACHE.items()}
    lines = [metrics_line(100, cache=half), metrics_line(200, cache=half)]
    run = write_run(tmp_path / "killed", metrics=lines)
    assert read_runs([run])[0].cache == CACHE


def test_caches_that_nobody_asked(tmp_path: Path) -> None:
    idle = {**dict.fromkeys(CACHE, 0), "num_steps": 10}
    run = write_whole_run(tmp_path / "run", {**SUMMARY, "cache": idle})
    body = build_caches(read_runs([run]))
    assert row("Hit rate, of distinct rows", "no lookups") in body
    assert row("Evictions per step", "0") in body


@pytest.mark.parametrize(
    "cache", [{"num_hits": 3}, {**CACHE, "num_steps": 0}, {**CACHE, "num_rows": "many"}]
)
def test_broken_figures_are_refused(cache: dict[str, Any], tmp_path: Path) -> None:
    run = write_whole_run(tmp_path / "run", {**SUMMARY, "cache": cache})
    with pytest.raises(ValueError, match=r"summary.json cache: expected .*, got"):
        read_runs([run])
