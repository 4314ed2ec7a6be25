"""The grid of choices: which cells there are, and what the page makes of results made by hand."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.choice_grid import (
    CANDIDATES,
    NO_TRIAL,
    Grid,
    all_cells,
    is_settled,
    parse,
)
from benchmarks.choice_page import DEFAULT, judge


def run(candidate: str, repeat: int, step_ms: float) -> dict[str, Any]:
    facts = {"candidate": candidate, "repeat": repeat, "step_p50_s": step_ms / 1e3}
    return {**facts, "pipeline": "sparse_dist", "load_average": 1.0, "plan": candidate}


def runs(default: list[float], **candidates: list[float]) -> list[dict[str, Any]]:
    """Steps in ms by repeat; a candidate's pipeline follows two underscores."""
    steps = {DEFAULT: default, **{n.replace("__", "-"): found for n, found in candidates.items()}}
    return [run(n, repeat, ms) for n, found in steps.items() for repeat, ms in enumerate(found)]


def document(found: list[dict[str, Any]]) -> dict[str, Any]:
    settings = {"data": "kuairand", "batch_size": 512, "network": "loopback", "num_ranks": 2}
    settings |= {"warmup_steps": 5, "busy": False, "trial_s": 5.0}
    settings["candidates"] = sorted({run["candidate"] for run in found} - {DEFAULT})
    return {"settings": settings, "machine": {}, "runs": found}


def test_noisy_ratios_are_not_settled() -> None:
    quiet = runs([10, 20, 10], hot_cold__base=[10, 20.2, 10], planner__base=[30])
    assert is_settled(quiet)  # the machine was slow in one repeat, but for both alike
    assert not is_settled([*quiet[:3], *runs([], hot_cold__base=[10, 18, 11])])
    # Three repeats may agree by chance that the defaults lose.
    assert not is_settled(runs([10.4, 10.4, 10.4], hot_cold__base=[10, 10, 10]))


def test_ratios_are_paired_within_repeats() -> None:
    # The machine became twice as slow after the first repeat; the defaults are always 10% slower.
    found = runs([11, 22, 22], hot_cold__base=[10, 20, 20], planner__base=[30, 60, 60])
    cell = judge(document(found))
    assert cell is not None
    assert (cell.best, cell.ratio) == ("hot_cold-base", pytest.approx(1.1))
    assert cell.torchrec_ratio == pytest.approx(3.0)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    summary = {"step_p50_s": 0.01, "pipeline": "base", "hot_rows": 3, "name": "x"}
    plans = {name: {"interval_s": [0.009, 0.012]} for name in ("a", "torchrec table_wise")}
    prediction = {"chosen": "a", "why": "w", "plans": plans, "costs": {"note": ""}}
    prediction["trial"] = {"seconds": 2.0}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "prediction.json").write_text(json.dumps(prediction))
    (tmp_path / "plan.json").write_text("{}")
    return tmp_path


class FakeGrid(Grid):
    """Runs nothing: every command writes what a run would leave."""

    def __init__(self, options: argparse.Namespace, run_dir: Path) -> None:
        super().__init__(options)
        self.commands: list[tuple[str, list[str]]] = []
        self._files = {p.name: p.read_bytes() for p in run_dir.iterdir() if p.is_file()}

    def _run(self, command: str, line: Any, run_dir: Path, timeout_s: float) -> str:
        run_dir.mkdir(parents=True, exist_ok=True)
        runs = [[str(run_dir), line]]
        if command == "train":
            runs = json.loads(Path(line[-1]).read_text())
        for place, words in runs:
            self.commands.append((command, words))
            if "placement.plan=planner" in words:
                (Path(place) / "error.txt").write_text("no")
                continue
            for name, content in self._files.items():
                (Path(place) / name).write_bytes(content)
        if command == "calibrate":
            (run_dir.parent / "costs").mkdir()
        return json.dumps({"command": command})


def test_a_cell_goes_on_where_it_stopped(tmp_path: Path, run_dir: Path) -> None:
    output, work = tmp_path / "out", tmp_path / "work"
    words = ["--repeats", "2", "--output", str(output), "--work", str(work)]
    cell = all_cells()[0]
    grid = FakeGrid(parse(words), run_dir)
    grid.run(cell)
    assert [command for command, _ in grid.commands[:2]] == ["prepare", "calibrate"]
    trained = [words for command, words in grid.commands if command == "train"]
    num_candidates = len(CANDIDATES) - 1  # table_wise-base was not predicted
    assert len(trained) == 2 * (1 + num_candidates)
    assert sum(NO_TRIAL in words for words in trained) == 2 * num_candidates
    path = output / f"{cell.name}.json"
    found = json.loads(path.read_text())
    errors = {r["candidate"] for r in found["runs"] if "error" in r}
    assert errors == {"planner-sparse_dist", "planner-base"}
    del found["runs"][-3:]
    path.write_text(json.dumps(found))
    again = FakeGrid(parse(words), run_dir)
    again.run(cell)
    assert [command for command, _ in again.commands] == ["train"] * 3
