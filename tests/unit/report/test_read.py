"""What is read of a run directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hotrec.report.read import read_runs
from tests.unit.report.runs import (
    CACHE,
    eval_line,
    metrics_line,
    write_run,
    write_whole_run,
)


def test_unfinished_run_takes_its_figures_from_the_last_lines(tmp_path: Path) -> None:
    half = {name: value // 2 for name, value in CACHE.items()}
    lines = [metrics_line(step, step_p50_s=20 / step, cache=half) for step in (100, 200)]
    evals = [eval_line(100, 0.7), eval_line(200, 0.71), eval_line(200, 0.71, "test")]
    path = write_run(tmp_path / "a", None, lines, evals)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 400, "lo')
    (run,) = read_runs([path])
    found = {"auc": 0.71, "step_p50_s": 0.1, "num_steps": 200, "sent_bytes_total": 4.5e6}
    found |= {"cache_hit_frac": 0.875, "cache.num_misses": 625}
    assert {name: run.number(name) for name in found} == pytest.approx(found)
    assert run.sent_bytes == pytest.approx({"cold_all_to_all": 2.6e6, "hot_gradients": 1.9e6})
    assert run.by_name("cache") == CACHE
    assert run.eval_series("auc", "valid") == ([100, 200], [0.7, 0.71])
    assert run.splits == ["valid", "test"]
    assert {note.split(":")[0] for note in run.notes} >= {"summary.json", "metrics.jsonl"}


@pytest.mark.parametrize(
    ("summary", "lines", "expected"),
    [
        ({}, [{}], {"data_wait": 0.002, "forward": 0.03, "backward": 0.05}),
        ({}, [{"stage_s": {"a": 0.01 * s}} for s in (1, 3)], {"data_wait": 0.002, "a": 0.02}),
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


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("summary.json", b'{"auc": ', "expected JSON, got "),
        ("environment.json", b"[]", "expected .*, got list"),
        ("summary.json", b'{"auc": "high"}', "auc: expected .*, got 'high'"),
        ("summary.json", b'{"sent_bytes": 5}', "sent_bytes: expected .*, got 5"),
        ("summary.json", b'{"cache": {"num_hits": 3}}', "cache: expected num_steps"),
        ("metrics.jsonl", b'{"step": 1}\n{"step"\n', "line 2: expected JSON"),
        ("metrics.jsonl", b'{"loss": 1}\n', "line 1: expected .*, got None"),
        ("metrics.jsonl", b"\xff\xfe\x00", "expected UTF-8 text"),
        ("point.json", b'{"overrides": 1}', "overrides: expected .*, got 1"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, text: bytes, message: str) -> None:
    path = write_whole_run(tmp_path / "a")
    (path / name).write_bytes(text)
    with pytest.raises(ValueError, match=f"{name}.* {message}"):
        read_runs([path])
