"""Bad input: one clear message, exit code 1, nothing made; ``tests/faults`` has far more."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.e2e.conftest import SMOKE, Workspace, hotrec, refusal

OTHER = "paths.dataset=data/other"
# What a command says that it expected or got, and its words.
REFUSED = {
    "expected a partition made from the dataset": f"train placement=saved {OTHER}",
    "expected at least 20000 samples.*got 16384": "train trainer.batch_size=20000",
    "trainer.resume: expected latest, none or a checkpoint": "train trainer.resume=absent",
    "budget_bytes: expected .*2097152000": (
        "plan placement=budget placement.hot_budget_mib=2000 planner.host_gib=1"
    ),
    "overrides: expected .*t9": "plan +placement.overrides.t9=hot",
    "optimizer.kind: expected .*adam": "plan optimizer=adam placement=torchrec",
    "placement.tier: expected .*fused_uvm": "plan placement=torchrec placement.tier=fused_uvm",
}


@pytest.fixture(scope="module")
def folder(workspace: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The workspace's data, and another dataset."""
    folder = tmp_path_factory.mktemp("bad")
    shutil.copytree(workspace.folder / "data", folder / "data")
    hotrec("prepare", SMOKE, "data.synthetic.seed=5", OTHER, cwd=folder)
    return folder


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if "runs" not in path.parts)


@pytest.mark.parametrize("said", REFUSED)
def test_a_command_refuses(said: str, folder: Path) -> None:
    command, *words = REFUSED[said].split()
    before = files_of(folder)
    assert re.search(said, refusal(command, SMOKE, *words, cwd=folder))
    assert files_of(folder) == before


def test_hot_rows_larger_than_memory(folder: Path) -> None:
    said = refusal("plan", SMOKE, "placement=all_hot", "planner.host_gib=0.0001", cwd=folder)
    assert "expected hot rows, with optimizer state, of at most" in said


def test_nothing_is_left_or_taken(tmp_path: Path) -> None:
    """Of the directories that a refused command made, and those that were there."""
    said = refusal("evaluate", cwd=tmp_path)
    assert "run_dir: expected a run with checkpoints/latest" in said
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "runs").mkdir()
    refusal("evaluate", cwd=tmp_path)
    assert list(tmp_path.rglob("*")) == [tmp_path / "runs"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("placement=saved paths.partition=absent", "absent/manifest.json: expected"),
        ("trainer.batch_size=9000", "expected at least 18000 samples"),
    ],
)
def test_one_rank_says_it(folder: Path, tmp_path: Path, words: str, said: str) -> None:
    given = ("train", SMOKE, "launch.num_ranks=2", *words.split())
    line = refusal(*given, cwd=folder, HOTREC_RUN_DIR=str(tmp_path))
    assert line.startswith("[rank ")
    assert said in line
    assert not (tmp_path / "checkpoints").exists()
