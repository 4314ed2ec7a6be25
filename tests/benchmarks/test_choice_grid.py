"""The grid of choices: which cells there are, and what the page makes of results made by hand."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.choice_grid import (
    CANDIDATES,
    NO_TRIAL,
    Grid,
    all_cells,
    choose_cells,
    data_overrides,
    is_settled,
    main,
    parse,
    read_cell,
    read_run,
    sample_cells,
    slow,
    turn,
)
from benchmarks.choice_page import DEFAULT, alike, judge, summarize, verdict, write_page
from hotrec.cli.store import build_config, compose_config

NAMES = ("hot_cold-look_ahead", "planner-sparse_dist", "planner-base", "hand_tuned-sparse_dist")


def run(candidate: str, repeat: int, step_ms: float, **more: Any) -> dict[str, Any]:
    return {
        "candidate": candidate,
        "repeat": repeat,
        "step_p50_s": step_ms / 1e3,
        "pipeline": "sparse_dist",
        "load_average": 1.0,
        "plan": candidate,
        **more,
    }


def runs(default: list[float], **candidates: list[float]) -> list[dict[str, Any]]:
    """Steps in ms by repeat; a candidate's pipeline follows two underscores."""
    steps = {DEFAULT: default, **{n.replace("__", "-"): found for n, found in candidates.items()}}
    return [run(n, repeat, ms) for n, found in steps.items() for repeat, ms in enumerate(found)]


def document(found: list[dict[str, Any]], **settings: Any) -> dict[str, Any]:
    cell = {"data": "kuairand", "batch_size": 512, "network": "loopback", "num_ranks": 2}
    options = {"warmup_steps": 5, "busy": False, "trial_s": 5.0}
    options["candidates"] = sorted({run["candidate"] for run in found} - {DEFAULT})
    machine: dict[str, Any] = dict.fromkeys(("processor", "kernel", "python", "code"), "some")
    machine |= {"num_cores": 2, "packages": {"torch": "2"}}
    return {"settings": {**cell, **options, **settings}, "machine": machine, "runs": found}


def test_a_quarter_of_the_cells_has_four_ranks() -> None:
    cells = all_cells()
    assert len({cell.name for cell in cells}) == len(cells) == 13 * 3 * 3
    assert sum(cell.num_ranks == 4 for cell in cells) == len(cells) // 4


def test_a_sample_is_balanced_and_follows_its_seed() -> None:
    cells = all_cells()
    chosen = sample_cells(cells, 39, seed=1)
    assert chosen == sample_cells(cells, 39, seed=1) != sample_cells(cells, 39, seed=2)
    for factor in ("data", "batch_size", "network"):
        counts = Counter(getattr(cell, factor) for cell in chosen).values()
        assert max(counts) - min(counts) <= 2, factor


def test_cells_are_chosen_by_pattern() -> None:
    chosen = choose_cells(parse(["--cells", "kuairand_*_loopback_*", "zipf0.8-*_b512_1gbit_w4"]))
    assert {cell.network for cell in chosen} == {"loopback", "1gbit"}
    with pytest.raises(SystemExit, match="--cells"):
        choose_cells(parse(["--cells", "nothing"]))


@pytest.mark.parametrize("words", CANDIDATES.values(), ids=CANDIDATES)
def test_candidates_are_configurations(words: tuple[str, ...]) -> None:
    build_config(compose_config("config", list(words)))


@pytest.mark.parametrize("name", ["kuairand", "zipf0.8-bags20-nodense"])
def test_datasets_are_configurations(name: str) -> None:
    build_config(compose_config("config", list(data_overrides()[name])))


def test_every_repeat_runs_all_and_the_defaults_begin() -> None:
    orders = [turn(repeat) for repeat in range(3)]
    assert orders[0][0] == DEFAULT
    assert all(set(order) == {DEFAULT, *CANDIDATES} for order in orders)
    assert len({order[0] for order in orders}) == 3


def test_noisy_ratios_are_not_settled() -> None:
    quiet = runs([10, 20, 10], hot_cold__base=[10, 20.2, 10], planner__base=[30])
    assert is_settled(quiet)  # the machine was slow in one repeat, but for both alike
    assert not is_settled([*quiet[:3], *runs([], hot_cold__base=[10, 18, 11])])
    # Slower than the best by 5%, TorchRec's planner is still a rival.
    assert not is_settled([*quiet[:6], *runs([], planner__base=[10.5, 20, 11.5])])
    assert not is_settled(runs([10], hot_cold__base=[10]))
    # Three repeats may agree by chance that the defaults lose.
    assert is_settled(runs([10.2, 10.2, 10.2], hot_cold__base=[10, 10, 10]))
    assert not is_settled(runs([10.4, 10.4, 10.4], hot_cold__base=[10, 10, 10]))


def test_noisy_cells_are_repeated_again() -> None:
    grid = Grid(parse(["--repeats", "2", "--most-repeats", "4"]))
    steps: dict[str, list[float]] = {name.replace("-", "__"): [20] for name in CANDIDATES}
    quiet = runs([10, 10], **{**steps, "hot_cold__base": [10, 10]})
    assert grid._next(quiet) is None
    noisy = runs([10, 12], **{**steps, "hot_cold__base": [10, 10]})
    assert grid._next(noisy) == (2, [DEFAULT, "hot_cold-base"])
    # A repeat that was begun is finished, however quiet it makes the ratios.
    assert grid._next([*noisy, run(DEFAULT, 2, 10)]) == (2, ["hot_cold-base"])
    noisy += [run(name, n, 10) for n in (2, 3) for name in (DEFAULT, "hot_cold-base")]
    assert grid._next(noisy) is None
    more = Grid(parse(["--repeats", "5", "--most-repeats", "4"]))
    assert more._next(noisy) == (4, [DEFAULT, "hot_cold-base"])


def test_ratios_are_paired_within_repeats() -> None:
    # The machine became twice as slow after the first repeat; the defaults are always 10% slower.
    cell = judge(
        document(runs([11, 22, 22], hot_cold__base=[10, 20, 20], planner__base=[30, 60, 60]))
    )
    assert cell is not None
    assert (cell.best, cell.ratio) == ("hot_cold-base", pytest.approx(1.1))
    assert cell.torchrec_ratio == pytest.approx(3.0)
    assert cell.noise_frac is None


def test_each_of_torchrecs_plans_counts_with_its_faster_pipeline() -> None:
    cell = judge(
        document(runs([12], planner__base=[10], planner__sparse_dist=[20], hand_tuned__base=[15]))
    )
    assert cell is not None
    assert cell.baseline_ratios == {"planner": pytest.approx(1.2), "hand_tuned": pytest.approx(0.8)}


def test_the_same_plan_twice_is_noise() -> None:
    found = runs([10], hot_cold__base=[9], planner__base=[12])
    found[0]["plan"] = found[1]["plan"]
    found[2]["plan"] = "another"
    cell = judge(document(found))
    assert cell is not None
    assert cell.noise_frac == pytest.approx(1 / 9)
    # The defaults chose the best plan, whatever their own run took.
    assert (cell.ratio, cell.plan_ratio) == (pytest.approx(10 / 9), 1.0)


@pytest.mark.parametrize("found", [[], runs([]), runs([10]), runs([], planner__base=[10])], ids=str)
def test_a_cell_without_both_is_not_judged(found: list[dict[str, Any]]) -> None:
    assert judge(document(found)) is None


def test_a_cell_with_a_candidate_still_to_run_is_not_judged() -> None:
    cell = document(runs([10], planner__base=[10]))
    assert judge(cell) is not None
    cell["settings"]["candidates"].append("hand_tuned-base")
    assert judge(cell) is None


def test_plans_that_are_another_s_are_not_waited_for() -> None:
    """The defaults predict plans that are alike once."""
    found = runs([10], hot_cold__base=[9], planner__base=[12])
    cell = document(found)
    cell["settings"]["candidates"] += ["table_wise-sparse_dist", "table_wise-base"]
    found[0]["predicted"] = ["hot_cold base", "torchrec planner base", "torchrec table_wise base"]
    assert alike(found) == {"table_wise-sparse_dist"}
    assert judge(cell) is None
    found[0]["predicted"].pop()
    assert judge(cell) is not None


def test_figures_of_the_verdict() -> None:
    good = runs([10.2], hot_cold__base=[10], planner__base=[20], hand_tuned__base=[10.1])
    bad = runs([12], hot_cold__base=[10], planner__base=[11.9])
    # Predicted of candidates: 10 and 16 ms for 10 and 20 ms; the first interval holds the step.
    good[1] |= {"predicted_step_s": 0.010, "step_low_s": 0.009, "step_high_s": 0.011}
    good[2] |= {"predicted_step_s": 0.016, "step_low_s": 0.015, "step_high_s": 0.017}
    good[0]["predicted_step_s"] = 1.0  # after a trial: not a prediction alone
    failed = {"candidate": "planner-base", "repeat": 0, "error": "out", "load_average": 1.0}
    figures = summarize({"good": document(good), "bad": document(bad), "open": document([failed])})
    assert figures["num_cells"] == 2
    assert figures["num_unfinished"] == figures["num_failed_runs"] == 1
    assert figures["within_share"] == figures["predicted_share"] == figures["held_share"] == 0.5
    assert (figures["worst_cell"], figures["worst_ratio"]) == ("bad", pytest.approx(1.2))
    assert figures["worst_over_planner"] == pytest.approx(12 / 11.9)
    assert figures["worst_over_hand_tuned"] == pytest.approx(10.2 / 10.1)
    assert figures["num_predictions"] == 2
    text = verdict(figures, is_busy=False)
    assert "`bad`" in text
    # The share, the worst, and the predictions and their intervals.
    assert text.count("missed") == 4


def test_a_prediction_counts_once_however_often_its_candidate_ran() -> None:
    found = runs([10, 10, 10], hot_cold__base=[10, 16, 11], planner__base=[20])
    for one in found:
        one["predicted_step_s"] = 0.020 if one["candidate"] == "planner-base" else 0.010
    figures = summarize({"cell": document(found)})
    assert (figures["num_predictions"], figures["predicted_share"]) == (2, 1.0)
    assert figures["run_predicted_share"] == 0.75


def test_what_was_reached_is_not_called_missed() -> None:
    found = runs([10.2], hot_cold__base=[10], planner__base=[10.1])
    assert "missed" not in verdict(summarize({"one": document(found)}), is_busy=False)


def test_verdict_of_costs_measured_beside_other_work() -> None:
    found = runs([10.4], hot_cold__base=[10])
    text = verdict(summarize({"one": document(found)}), is_busy=True)
    assert "In 0.0% of the cells the plan says that its costs are not to be trusted." in text
    for run in found:
        run["predicted_step_s"] = 1.0
    of_two = {"one": document(found), "two": document([{**r, "cost_note": "busy"} for r in found])}
    text = verdict(summarize(of_two), is_busy=True)
    assert "within 5% of the best candidate in 100.0%" in text
    assert "In 50.0% of the cells the plan says that its costs are not to be trusted; 0.0%" in text
    assert "missed" not in text


def test_page(tmp_path: Path) -> None:
    found = runs([10.2], hot_cold__base=[10], planner__base=[20])
    found[0] |= {"chosen": "hot_cold", "trial_s": 5.0}
    found.append({"candidate": "planner-base", "repeat": 1, "error": "gone", "load_average": 1.0})
    (tmp_path / "kuairand_b512_loopback_w2.json").write_text(json.dumps(document(found)))
    figures = write_page(tmp_path)
    page = (tmp_path / "choice.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith("| kuairand"))
    for shown in ("10.2", "10.0", "20.0", "hot_cold, sparse_dist", "1.020", "5.0"):
        assert shown in row
    assert "planner-base: gone" in page
    assert (tmp_path / "choice.png").stat().st_size > 1000
    assert figures["num_cells"] == 1


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


def test_what_is_kept_of_a_run(run_dir: Path) -> None:
    found = read_run(run_dir)
    assert found["trial_s"] == 2.0
    assert (found["chosen"], found["step_low_s"], found["step_high_s"]) == ("a", 0.009, 0.012)
    assert "name" not in found
    plan = found["plan"]
    (run_dir / "plan.json").write_text("[]")
    assert read_run(run_dir)["plan"] != plan


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
    assert [command for command, _ in grid.commands[:3]] == ["prepare", "profile", "calibrate"]
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


def test_what_is_clearly_slower_is_not_repeated() -> None:
    found = runs([30.0], hot_cold__base=[10], planner__base=[11.9], hand_tuned__base=[12.1])
    assert slow(found) == {"hand_tuned-base"}
    found[-1]["repeat"] = 1  # another repeat says nothing about this
    assert slow(found) == set()


def test_what_is_slower_in_two_repeats_is_not_repeated() -> None:
    found = runs([30, 30], hot_cold__base=[10, 20], planner__base=[11, 22], hand_tuned__base=[10.5])
    assert slow(found) == {"planner-base"}
    # The second time it took less than the fastest: in the median it is within 8%.
    found = runs([30, 30], hot_cold__base=[10, 20], planner__base=[11.9, 19])
    assert slow(found) == set()


def test_other_settings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "cell.json"
    path.write_text(json.dumps(document([], steps=60)))
    with pytest.raises(SystemExit, match="steps 60"):
        read_cell(path, {"steps": 30})


def test_nothing_begins_after_the_limit(tmp_path: Path) -> None:
    output, work = tmp_path / "out", tmp_path / "work"
    with pytest.raises(SystemExit, match="got none"):
        main(["--limit-s", "0", "--output", str(output), "--work", str(work)])
    assert not work.exists()
