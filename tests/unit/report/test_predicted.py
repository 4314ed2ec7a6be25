"""Predicted against measured: what the table, the picture, the comparison and the JSON say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hotrec.report.compare import GROUPS
from hotrec.report.page import build_comparison
from hotrec.report.predicted import build_predicted, build_table, draw_predicted
from hotrec.report.read import Run, read_runs
from hotrec.report.units import show_error
from hotrec.report.write import write_report
from tests.unit.report.runs import SUMMARY, TORCHREC, metrics_line, write_run, write_whole_run

COMPARED: dict[str, Any] = {
    "compared_from_step": 50,
    "predicted_step_s": 0.100,
    "measured_step_s": 0.125,
    "step_error_frac": -0.2,
    "predicted_sent_bytes": 4.59e6,
    "sent_bytes_error_frac": 0.02,
    "predicted_stage_s": {"route": 0.010, "dense": 0.080, "hot_exchange": 0.010, "other": 0.0},
    "measured_stage_s": {"route": 0.005, "dense": 0.095, "hot_exchange": 0.020, "other": 0.005},
    "slowest_rank_stage_s": {"route": 0.006, "dense": 0.097, "hot_exchange": 0.030, "other": 0.01},
}
PREDICTED = {name: value for name, value in COMPARED.items() if name.startswith("predicted")}
TOO_SHORT = {**PREDICTED, "compared_from_step": 50, "measured_stage_s": None}


def read(path: Path, **changes: Any) -> Run:
    write_whole_run(path, {**SUMMARY, "name": path.name, **changes})
    return read_runs([path])[0]


def test_table(tmp_path: Path) -> None:
    table = build_table(read(tmp_path / "<run>", **COMPARED))
    assert "Measured from step 50" in table
    for cells in (
        ["route", "10.0 ms", "5.00 ms", "6.00 ms", "+5.00 ms", "+4.0%"],
        ["hot exchange", "10.0 ms", "20.0 ms", "30.0 ms", "-10.0 ms", "-8.0%"],
        ["Step", "100 ms", "125 ms", "", "-25.0 ms", "-20.0%"],
        [
            "Bytes sent, per step and rank",
            "4.59 MB",
            "4.50 MB",
            "",
            "+90.0 kB",
            "+2.0% of the bytes",
        ],
    ):
        assert f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>" in table
    assert table.index(">route<") < table.index(">dense<") < table.index(">hot exchange<")


def test_stages_that_only_one_side_has_show_no_error(tmp_path: Path) -> None:
    changes = {**COMPARED, "predicted_stage_s": {"dense": 0.08}}
    table = build_table(read(tmp_path / "run", **changes))
    row = ["route", "", "5.00 ms", "6.00 ms", "", ""]
    assert f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" in table


def test_picture_has_the_values_of_each_run(tmp_path: Path) -> None:
    slower = {**COMPARED, "predicted_stage_s": {"route": 0.4, "dense": 0.08}}
    runs = [read(tmp_path / "one", **COMPARED), read(tmp_path / "two", **slower)]
    first, second = draw_predicted(runs).axes
    predicted, measured = first.containers
    assert [bar.get_height() for bar in predicted] == [0.010, 0.080, 0.010, 0.0]  # type: ignore[attr-defined]
    assert [bar.get_height() for bar in measured] == [0.005, 0.095, 0.020, 0.005]  # type: ignore[attr-defined]
    assert list(first.lines[0].get_ydata()) == [0.006, 0.097, 0.030, 0.01]
    assert "step predicted 100 ms, measured 125 ms, error -20.0%" in first.get_title("left")
    # One scale, on which all that is drawn fits.
    assert first.get_ylim() == second.get_ylim()
    assert first.get_ylim()[1] > 0.4


def test_section_says_why_a_run_is_missing(tmp_path: Path) -> None:
    runs = [
        read(tmp_path / "whole", **COMPARED),
        read(tmp_path / "short", **TOO_SHORT),
        read(tmp_path / "plain"),
        read(tmp_path / "old", **PREDICTED),
    ]
    body = build_predicted(runs)
    assert body.count("<table>") == 1
    assert body.count("<svg") == 1
    assert "short: no step was measured from step 50 on" in body
    assert "plain, prediction: not recorded." in body
    assert "old, measured stages: not recorded." in body
    assert "<svg" not in build_predicted(runs[1:])


def test_comparison_and_json_hold_the_errors(tmp_path: Path) -> None:
    hot = write_whole_run(tmp_path / "hot", {**SUMMARY, **COMPARED})
    planner = write_whole_run(tmp_path / "planner", TORCHREC)
    table = build_comparison(read_runs([hot, planner]), None)
    assert "<tr><td>Error of the step, of the measured</td><td>-20.0%</td>" in table
    assert "<td>+2.0%</td>" in table
    assert "Prediction" in [group for group, _ in GROUPS]
    write_report([hot, planner], tmp_path / "out")
    first, second = json.loads((tmp_path / "out/report.json").read_text())["runs"]
    for name, value in COMPARED.items():
        assert first[name] == value
        assert second[name] is None
    assert 'id="predicted"' in (tmp_path / "out/report.html").read_text()


def test_the_breakdown_is_of_the_measured_stages_with_waiting_taken_from_other(
    tmp_path: Path,
) -> None:
    run = read(tmp_path / "run", **COMPARED)
    assert run.stage_s["data_wait"] == pytest.approx(0.002)
    assert run.stage_s["other"] == pytest.approx(0.003)
    assert run.stage_s["dense"] == 0.095
    lines = [metrics_line(step, stage_s={"dense": 0.1, "other": 0.001}) for step in (1, 2)]
    write_run(tmp_path / "lines", summary=SUMMARY, metrics=lines)
    assert read_runs([tmp_path / "lines"])[0].stage_s["other"] == 0.0


@pytest.mark.parametrize("name", ["predicted_stage_s", "measured_stage_s", "slowest_rank_stage_s"])
def test_broken_stages_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected numbers by name"):
        read(tmp_path / "run", **{**COMPARED, name: {"dense": "fast"}})


def test_errors_always_have_a_sign() -> None:
    assert [show_error(frac) for frac in (0.05, -0.05, 0.0)] == ["+5.0%", "-5.0%", "+0.0%"]
