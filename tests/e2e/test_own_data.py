"""The commands of the documentation, on a log of somebody's own; and the chain a second time."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from benchmarks.own_data import write_log
from tests.e2e.conftest import REPOSITORY, Outcome, hotrec, refusal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
# A stage that measures for a minute takes seconds, and batches suit a small log, as init prints.
MEASURED = ("calibrate.budget_s=1", "calibrate.repeats=3", "calibrate.cap_mib=1")
GIVEN = ("planner.costs=cpu_1gbit",)
BATCH = "trainer.batch_size=64"
STAGES = ["prepare", "plan", "train", "evaluate", "report"]


def commands(page: str) -> list[list[str]]:
    """The words of each command in the blocks of a page that are marked as tested."""
    text = (REPOSITORY / "docs" / page).read_text()
    blocks = re.findall(r"<!-- tested -->\n```console\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    assert all(line.startswith("hotrec ") for line in lines)
    return [shlex.split(line)[1:] for line in lines]


def run_all(page: str, folder: Path, *costs: str) -> list[Outcome]:
    quick = (*costs, BATCH)
    outcomes = [
        hotrec(*words, *(quick if words[0] == "run" else ()), cwd=folder)
        for words in commands(page)
    ]
    assert [(outcome.exit_code, outcome.stderr) for outcome in outcomes if outcome.exit_code] == []
    return outcomes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    write_log(folder / "events.csv", 3000)
    return folder


@pytest.fixture(scope="module")
def made(folder: Path) -> dict[str, Any]:
    """What the commands of the page say at the end."""
    _, trained = run_all("your_own_data.md", folder, *GIVEN)
    assert "next       `hotrec run data=events" in trained.stderr
    return trained.figures


def test_your_own_data_is_made_once_and_again_when_it_grew(
    folder: Path, made: dict[str, Any]
) -> None:
    assert (made["made"], made["current"]) == (STAGES, [])
    assert made["split"] == "test"
    assert 0.5 < made["auc"] < 1
    assert "<svg" in (folder / made["page"]).read_text()
    words = ("data=events", "launch.num_ranks=2", *GIVEN, BATCH)
    again = hotrec("run", *words, cwd=folder).figures
    assert (again["made"], again["current"]) == ([], STAGES)
    for name in ("auc", "page", "run_dir"):
        assert again[name] == made[name]
    write_log(folder / "events.csv", 3100)
    grown = hotrec("run", *words, cwd=folder).figures
    assert grown["made"] == STAGES
    assert grown["run_dir"] != made["run_dir"]


def test_from_zero_to_a_report(tmp_path: Path) -> None:
    *_, trained = run_all("getting_started.md", tmp_path, *MEASURED)
    assert trained.figures["made"] == [STAGES[0], "calibrate", *STAGES[1:]]
    assert (tmp_path / trained.figures["page"]).exists()


def test_a_stage_that_fails_ends_the_chain(tmp_path: Path) -> None:
    words = ("data=synthetic", "data.synthetic.num_rows=[5]", "data.synthetic.mean_lengths=[2,2]")
    refusal("run", *words, cwd=tmp_path)


@pytest.mark.parametrize("words", ["", " launch.num_ranks=2"])
def test_a_missing_input_names_the_command_that_makes_it(tmp_path: Path, words: str) -> None:
    outcome = hotrec(*f"train data=kuairand{words}".split(), cwd=tmp_path)
    assert outcome.exit_code == 1
    (said,) = outcome.stderr.splitlines()  # not once for each rank
    assert "data/kuairand/dataset/manifest.json: expected the manifest of a dataset, got" in said
    assert "`hotrec prepare`" in said
