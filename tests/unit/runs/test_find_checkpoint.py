"""One function says which checkpoint of a run is meant, for evaluate, export and predict alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from hotrec.cli.store import build_config, compose_config
from hotrec.config.roots import Config, EvaluateConfig, ExportConfig, PredictConfig
from hotrec.runs.evaluate import AUTO, find_checkpoint, is_best

KEEP = ["trainer.keep_best=true", "trainer.eval_every_steps=2"]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run whose best checkpoint is not its newest."""
    for name in ("step-00000004", "step-00000010"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "checkpoints" / "latest").write_text("step-00000010\n")
    (tmp_path / "checkpoints" / "best").write_text("step-00000004\n")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "name", "step"),
    [
        (KEEP, AUTO, 4),
        (KEEP, "latest", 10),
        (KEEP, "best", 4),
        (KEEP, "step-00000010", 10),
        ([], AUTO, 10),
        (["trainer.early_stop_patience=2", "trainer.eval_every_steps=2"], AUTO, 4),
        ([*KEEP, "trainer.keep_best=false", "trainer.early_stop_patience=2"], AUTO, 10),
    ],
)
def test_which_checkpoint_is_meant(run_dir: Path, words: list[str], name: str, step: int) -> None:
    config: Config = build_config(compose_config("config", words))
    found = find_checkpoint(run_dir, name, keeps_best=config.trainer.keeps_best)
    assert found.name == f"step-{step:08d}"
    assert is_best(found) == (step == 4)


def test_every_command_means_the_same() -> None:
    given = EvaluateConfig(), ExportConfig(), PredictConfig()
    assert [config.checkpoint for config in given] == [AUTO] * 3
