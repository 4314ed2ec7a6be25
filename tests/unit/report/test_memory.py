"""Memory on the page: predicted and measured with the error, by what it holds, and the peaks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hotrec.report.memory import build_memory, build_table
from hotrec.report.read import Run, read_runs
from hotrec.report.write import write_report
from tests.unit.report.runs import SUMMARY, write_whole_run

MEMORY: dict[str, Any] = {
    "predicted_device_bytes": 4.4e9,
    "measured_device_bytes": 4.0e9,
    "device_bytes_error_frac": 0.1,
    "predicted_host_bytes": 9.0e9,
    "measured_host_bytes": 10.0e9,
    "host_bytes_error_frac": -0.1,
    "device_bytes_by_kind": {"hot_rows": 3.0e9, "cache": 1.0e9, "router": 0},
    "host_bytes_by_kind": {"cold_rows": 9.8e9, "router": 2.0e8},
    "peak_allocated_bytes": 6.0e9,
    "peak_reserved_bytes": 7.0e9,
    "peak_resident_bytes": 1.2e10,
}


def read(path: Path, **changes: Any) -> Run:
    write_whole_run(path, {**SUMMARY, "name": path.name, **changes})
    return read_runs([path])[0]


def test_table(tmp_path: Path) -> None:
    table = build_table(read(tmp_path / "run", **MEMORY))
    for cells in (
        ["Tables on the device", "4.40 GB", "4.00 GB", "+10.0%"],
        ["hot rows on the device", "", "3.00 GB", ""],
        ["Tables on the host", "9.00 GB", "10.0 GB", "-10.0%"],
        ["cold rows on the host", "", "9.80 GB", ""],
        ["Peak on the device, reserved", "", "7.00 GB", ""],
        ["Peak on the host, resident", "", "12.0 GB", ""],
    ):
        assert f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>" in table
    assert "router on the device" not in table


def test_on_cpu_only_the_host_is_shown(tmp_path: Path) -> None:
    names = ("predicted_host_bytes", "measured_host_bytes", "peak_resident_bytes")
    table = build_table(read(tmp_path / "run", **{name: MEMORY[name] for name in names}))
    assert "on the device" not in table
    assert "9.00 GB" in table


def test_runs_without_are_named(tmp_path: Path) -> None:
    body = build_memory([read(tmp_path / "new", **MEMORY), read(tmp_path / "old")])
    assert body.count("<table>") == 1
    assert "old, memory: not recorded." in body


def test_page_comparison_and_json_hold_it(tmp_path: Path) -> None:
    run = write_whole_run(tmp_path / "run", {**SUMMARY, **MEMORY})
    write_report([run], tmp_path / "out")
    page = (tmp_path / "out/report.html").read_text()
    assert 'id="memory"' in page
    assert "<tr><td>Error of the tables&#x27; device memory</td><td>+10.0%</td>" in page
    kept = json.loads((tmp_path / "out/report.json").read_text())["runs"][0]
    assert {name: kept[name] for name in MEMORY} == MEMORY


def test_page_and_json_say_how_the_dense_layers_computed(tmp_path: Path) -> None:
    how = {"precision": "bf16", "compile": True, "grad_clip_norm": 0.5}
    runs = [
        write_whole_run(tmp_path / "new", {**SUMMARY, **how}),
        write_whole_run(tmp_path / "old", {**SUMMARY, "name": "old"}),
    ]
    write_report(runs, tmp_path / "out")
    page = (tmp_path / "out/report.html").read_text()
    assert (
        "<tr><td>Dense layers</td><td>bf16, compiled, gradients clipped to 0.5</td>"
        '<td class="none">not recorded</td></tr>' in page
    )
    new, old = json.loads((tmp_path / "out/report.json").read_text())["runs"]
    assert {name: new[name] for name in how} == how
    assert {old[name] for name in how} == {None}


def test_broken_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="host_bytes_by_kind: expected numbers by name"):
        read(tmp_path / "run", host_bytes_by_kind={"hot_rows": "many"})
