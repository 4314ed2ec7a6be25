"""What is read of a run directory; the golden pages show a whole run and a bare one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hotrec.report.read import read_runs
from tests.unit.report.runs import (
    CACHE,
    SUMMARY,
    eval_line,
    metrics_line,
    write_run,
    write_whole_run,
)


@pytest.mark.parametrize(
    ("placement", "name"),
    [("torchrec", "TorchRec's planner"), ("hugectr", "HugeCTR's hybrid, 4 hot rows")],
)
def test_a_run_without_a_name_has_that_of_its_plan(
    tmp_path: Path, placement: str, name: str
) -> None:
    given = {**SUMMARY, "placement": placement, "hot_rows": 4}
    for recorded, shown in ((placement, name), ("mine", "mine")):
        (run,) = read_runs([write_run(tmp_path / recorded, {**given, "name": recorded})])
        assert run.name == shown


def test_unfinished_run_takes_its_figures_from_the_last_lines(tmp_path: Path) -> None:
    half = {name: value // 2 for name, value in CACHE.items()}
    lines = [metrics_line(step, step_p50_s=20 / step, cache=half) for step in (100, 200)]
    evals = [eval_line(100, 0.7), eval_line(200, 0.71), eval_line(200, 0.71, "test")]
    path = write_run(tmp_path / "a", None, lines, evals)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 400, "lo')
    (run,) = read_runs([path])
    assert run.name == "a"
    found = {"auc": 0.71, "step_p50_s": 0.1, "num_steps": 200, "sent_bytes_total": 4.5e6}
    found |= {"cache_hit_frac": 0.875, "cache.num_misses": 625}
    assert {name: run.number(name) for name in found} == pytest.approx(found)
    assert run.sent_bytes == pytest.approx({"cold_all_to_all": 2.6e6, "hot_gradients": 1.9e6})
    assert run.by_name("cache") == CACHE
    assert run.eval_series("auc", "valid") == ([100, 200], [0.7, 0.71])
    assert run.splits == ["valid", "test"]
    for note in (
        "summary.json: not recorded.",
        "metrics.jsonl: skipped the incomplete last line.",
        "the run has not finished; its figures are those up to its last line.",
    ):
        assert note in run.notes
    assert any(note.startswith("from the last logged line") and "auc" in note for note in run.notes)


@pytest.mark.parametrize(
    ("summary", "lines", "expected"),
    [
        ({}, [{}], {"data_wait": 0.002, "forward": 0.03, "backward": 0.05}),
        ({}, [{"stage_s": {"a": 0.01 * s}} for s in (1, 3)], {"data_wait": 0.002, "a": 0.02}),
        ({}, [{"stage_s": None}], {}),
        ({}, [{"data_wait_s": None}], {"forward": 0.03, "backward": 0.05}),
        # "other" without the waiting, which is a part of it.
        ({"measured_stage_s": {"other": 0.005}}, [{}], {"data_wait": 0.002, "other": 0.003}),
    ],
)
def test_stages(tmp_path: Path, summary: Any, lines: Any, expected: dict[str, float]) -> None:
    metrics = [metrics_line(1, **changes) for changes in lines]
    (run,) = read_runs([write_run(tmp_path / "a", summary, metrics)])
    assert run.stage_s == pytest.approx(expected)
    assert list(run.stage_s) == list(expected)


def test_runs_of_one_name_are_numbered(tmp_path: Path) -> None:
    names = {"a": "hot_cold", "b": "hot_cold", "c": "other"}
    paths = [write_run(tmp_path / path, {**SUMMARY, "name": name}) for path, name in names.items()]
    assert [run.name for run in read_runs(paths)] == ["hot_cold (1)", "hot_cold (2)", "other"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("summary.json", '{"auc": ', "expected JSON, got "),
        ("summary.json", "", "expected JSON, got "),
        ("environment.json", "[]", "expected a JSON object, got list"),
        ("summary.json", "[1]", "expected a JSON object, got list"),
        ("summary.json", '{"auc": "high"}', "auc: expected a number, got 'high'"),
        ("summary.json", '{"sent_bytes": 5}', "sent_bytes: expected numbers by name, got 5"),
        ("summary.json", '{"measured_stage_s": {"a": "b"}}', "measured_stage_s: expected numbers"),
        ("summary.json", '{"cache": {"num_hits": 3}}', "cache: expected num_steps"),
        ("summary.json", json.dumps({"cache": {**CACHE, "num_steps": 0}}), "cache: expected num"),
        ("metrics.jsonl", '{"step": 1}\n{"step"\n', "line 2: expected JSON"),
        ("metrics.jsonl", '{"loss": 1}\n', "line 1: expected a numeric 'step', got None"),
        ("metrics.jsonl", '{"step": 1, "loss": "x"}\n', "line 1 loss: expected a number, got 'x'"),
        ("metrics.jsonl", b"\xff\xfe\x00", "expected UTF-8 text"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, text: str | bytes, message: str) -> None:
    path = write_whole_run(tmp_path / "a")
    (path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=f"{name}.* {message}"):
        read_runs([path])


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for name, message in (
        ("gone", "gone: expected a run directory, got no such directory"),
        ("file", "file: expected a run directory, got a file"),
        ("empty", r"empty: expected summary\.json or metrics\.jsonl, got"),
    ):
        with pytest.raises(ValueError, match=message):
            read_runs([tmp_path / name])
    with pytest.raises(ValueError, match="at least one run directory, got none"):
        read_runs([])
