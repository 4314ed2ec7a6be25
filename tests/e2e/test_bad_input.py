"""Bad input: one clear message, exit code 1, nothing half-written.

In this process, so that torch is imported once; the cases that need ranks are at the end.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hotrec.cli.app import run_command
from tests.e2e.conftest import SMOKE, Workspace, hotrec

LINE = "\t".join(["1", *["3"] * 13, *["68fd1e64"] * 26])
Refuse = Callable[..., str]


@pytest.fixture
def refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Refuse:
    """Runs a command that must fail with one message; gives the message."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOTREC_RUN_DIR", raising=False)

    def run(*words: str) -> str:
        capfd.readouterr()
        assert run_command(words[0], words[1:]) == 1
        out, err = capfd.readouterr()
        assert out == ""
        assert "Traceback" not in err
        errors = [line for line in err.splitlines() if "error: " in line]
        assert len(errors) == 1, err
        return errors[0]

    return run


@pytest.fixture
def copied(workspace: Workspace, tmp_path: Path) -> Path:
    """The workspace's dataset, profile and partition, to be damaged."""
    shutil.copytree(workspace.folder / "data", tmp_path / "data")
    return tmp_path / "data" / "synthetic_smoke"


@pytest.mark.parametrize(
    "text", [f"{LINE}\n{LINE[:20]}\n", "nan" + LINE[1:] + "\n", ""], ids=["cut", "nan", "empty"]
)
def test_prepare_refuses(text: str, refuse: Refuse, tmp_path: Path) -> None:
    (tmp_path / "log.tsv").write_text(text)
    said = refuse("prepare", "data=criteo_kaggle", "data.source.files=[log.tsv]")
    assert re.search(r"log\.tsv.*expected .*got ", said)
    assert not (tmp_path / "data").exists() or list((tmp_path / "data").rglob("*.*")) == []


def test_prepare_without_the_log(refuse: Refuse, tmp_path: Path) -> None:
    said = refuse("prepare", "data=criteo_kaggle")
    assert "data/criteo_kaggle/train.txt" in said
    assert not (tmp_path / "data").exists()


def test_bad_lines_are_skipped_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log.tsv").write_text(f"{LINE}\n" * 40 + f"{LINE[:20]}\n")
    words = ["data=criteo_kaggle", "data.source.files=[log.tsv]"]
    assert run_command("prepare", [*words, "data.source.on_bad_line=skip"]) == 0
    figures = json.loads(capfd.readouterr().out)
    assert figures["num_skipped"] == 1
    assert sum(figures["num_samples"].values()) == 40


def test_plan_without_a_profile(refuse: Refuse, copied: Path) -> None:
    shutil.rmtree(copied / "profile")
    shutil.rmtree(copied / "partition")
    assert "profile/manifest.json: expected the manifest of a profile" in refuse("plan", SMOKE)
    assert not (copied / "partition").exists()


def test_what_was_made_from_another_dataset(refuse: Refuse, copied: Path) -> None:
    assert run_command("prepare", [SMOKE, "data.synthetic.seed=5"]) == 0
    for words, kind in ((["plan"], "profile"), (["train", "placement=saved"], "partition")):
        said = refuse(words[0], SMOKE, *words[1:])
        assert f"expected a {kind} made from the dataset" in said


def test_hot_rows_larger_than_memory(refuse: Refuse, copied: Path) -> None:
    words = [SMOKE, "placement=all_hot", "planner.host_gib=0.0001"]
    assert "expected hot rows, with optimizer state and gradients, of at most" in refuse(
        "plan", *words
    )


@pytest.mark.parametrize(
    ("words", "key", "got"),
    [
        (["placement=budget", "placement.hot_budget_mib=2000", "planner.host_gib=1"],
         "budget_bytes", "2097152000"),
        (["+placement.overrides.t9=hot"], "overrides", "t9"),
        (["optimizer=adam"], "optimizer.kind", "adam"),
        (["placement=torchrec", "placement.tier=fused_uvm"], "placement.tier", "fused_uvm"),
    ],
    ids=["budget", "table", "optimizer", "tier"],
)  # fmt: skip
def test_plan_refuses(words: list[str], key: str, got: str, refuse: Refuse, copied: Path) -> None:
    said = refuse("plan", SMOKE, *words)
    assert re.search(rf"{key}: expected .*{got}", said), said


def test_a_damaged_dataset(refuse: Refuse, copied: Path) -> None:
    chunk = sorted((copied / "dataset" / "chunks").glob("train*"))[0]
    chunk.write_bytes(chunk.read_bytes()[:-100])
    said = refuse("train", SMOKE)
    assert chunk.name in said
    assert "bytes, got" in said
    chunk.unlink()
    assert chunk.name in refuse("train", SMOKE)
    manifest = copied / "dataset" / "manifest.json"
    document = json.loads(manifest.read_text())
    document["content"]["schema"]["tables"][0]["num_rows"] = 5
    manifest.write_text(json.dumps(document))
    assert "it was edited" in refuse("train", SMOKE)


def test_batch_larger_than_the_data(refuse: Refuse, copied: Path) -> None:
    said = refuse("train", SMOKE, "trainer.batch_size=20000")
    assert re.search("expected at least 20000 samples.*got 16384", said)


def test_resume_from_nothing(refuse: Refuse, copied: Path) -> None:
    said = refuse("train", SMOKE, "trainer.resume=absent")
    assert "trainer.resume: expected latest, none or a checkpoint" in said


def test_runs_that_are_not_there(refuse: Refuse) -> None:
    assert "run_dir: expected a run with checkpoints/latest" in refuse("evaluate")
    assert "runs: expected a run directory with summary.json" in refuse("report", "runs=[absent]")


def test_nothing_is_left_or_taken(refuse: Refuse, tmp_path: Path) -> None:
    """Of the directories that a refused command made, and those that were there."""
    refuse("evaluate")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "runs").mkdir()
    refuse("evaluate")
    assert list(tmp_path.rglob("*")) == [tmp_path / "runs"]


@pytest.mark.slow
class TestCheckpoint:
    """One run of one rank; its checkpoint is damaged."""

    @pytest.fixture
    def run_dir(self, copied: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HOTREC_RUN_DIR", "runs/one")
        assert run_command("train", [SMOKE, "placement=coverage", "trainer.max_steps=4"]) == 0
        monkeypatch.delenv("HOTREC_RUN_DIR")
        return tmp_path / "runs" / "one"

    def test_cut_short(self, run_dir: Path, refuse: Refuse) -> None:
        (tensors,) = (run_dir / "checkpoints" / "step-00000004").rglob("*.safetensors")
        tensors.write_bytes(tensors.read_bytes()[: tensors.stat().st_size // 2])
        said = refuse("evaluate", "run_dir=runs/one")
        assert tensors.name in said
        assert "bytes, got" in said

    def test_of_other_settings(
        self, run_dir: Path, refuse: Refuse, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOTREC_RUN_DIR", "runs/two")
        checkpoint = f"trainer.resume={run_dir}/checkpoints/step-00000004"
        for word, fact in (
            ("optimizer=sgd", "optimizer"),
            ("model.over_layer_sizes=[16,1]", "model"),
            ("order=all_hot", "order"),
        ):
            words = ["placement=coverage", checkpoint, word]
            assert f"expected {fact} " in refuse("train", SMOKE, *words)

    def test_names(self, run_dir: Path, refuse: Refuse) -> None:
        for key, name in (("checkpoint", "step-9"), ("split", "dev")):
            said = refuse("evaluate", "run_dir=runs/one", f"{key}={name}")
            assert re.search(rf"{key}: expected .*'{name}'", said), said


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_rank_says_it(workspace: Workspace, tmp_path: Path) -> None:
    cases: list[tuple[list[str], str]] = [
        (["placement=saved", "paths.partition=absent"], "absent/manifest.json: expected"),
        (["trainer.batch_size=9000"], "expected at least 18000 samples"),
    ]
    for words, message in cases:
        run_dir = tmp_path / words[0]
        outcome = hotrec(
            "train",
            SMOKE,
            "launch.num_ranks=2",
            *words,
            cwd=workspace.folder,
            HOTREC_RUN_DIR=str(run_dir),
        )
        assert outcome.exit_code == 1, outcome.stderr
        assert outcome.stdout == ""
        assert "Traceback" not in outcome.stderr
        [said] = [line for line in outcome.stderr.splitlines() if "error: " in line]
        assert said.startswith("[rank "), outcome.stderr
        assert message in said
        assert not (run_dir / "checkpoints").exists()
