"""What is read of a run directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from hotrec.report.read import read_runs
from tests.unit.report.runs import CACHE, eval_line, metrics_line, write_run


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
    assert run.by_name("sent_bytes") == pytest.approx(
        {"cold_all_to_all": 2.6e6, "hot_gradients": 1.9e6}
    )
    assert run.by_name("cache") == CACHE
    assert run.eval_series("auc", "valid") == ([100, 200], [0.7, 0.71])
    assert run.splits == ["valid", "test"]
    assert {note.split(":")[0] for note in run.notes} >= {"summary.json", "metrics.jsonl"}


def test_the_other_stage_is_without_the_waiting_that_is_a_part_of_it(tmp_path: Path) -> None:
    metrics = [metrics_line(1, stage_s={"a": 0.01 * n}) for n in (1, 3)]
    (run, measured) = read_runs(
        [
            write_run(tmp_path / "a", {}, metrics),
            write_run(tmp_path / "b", {"measured_stage_s": {"other": 0.005}}, [metrics_line(1)]),
        ]
    )
    assert run.by_name("stage_s") == pytest.approx({"data_wait": 0.002, "a": 0.02})
    assert measured.by_name("stage_s") == pytest.approx({"data_wait": 0.002, "other": 0.003})
