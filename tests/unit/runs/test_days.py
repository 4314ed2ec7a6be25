"""Days in turn: each is evaluated before it is trained on, resumed or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hotrec.cli.store import build_config, compose_config
from hotrec.config.data import SyntheticSpec
from hotrec.config.roots import Config
from hotrec.data.synthetic import write_synthetic
from hotrec.runs.train import run_training
from hotrec.runtime.ranks import Ranks
from hotrec.train.loop import TrainResult

PERIODS = [f"period {number}" for number in (1, 2, 3)]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four periods of 150 samples, in chunks that do not end with them."""
    path = tmp_path_factory.mktemp("days") / "dataset"
    spec = SyntheticSpec([60, 20], num_dense=2, num_train=600, num_periods=4, rows_per_chunk=110)
    write_synthetic(spec, path)
    return path


def config_of(dataset: Path, *words: str) -> Config:
    return build_config(
        compose_config(
            "config",
            [
                f"paths.dataset={dataset}",
                *("model.embedding_dim=4", "model.dense_layer_sizes=[4]"),
                *("model.over_layer_sizes=[4,1]", "placement=torchrec", "trainer.num_workers=0"),
                *("trainer.batch_size=32", "trainer.log_every_steps=1", "trainer.eval_splits=[]"),
                *("order=time", "order.evaluate_ahead=true", *words),
            ],
        )
    )


def run(dataset: Path, run_dir: Path, ranks: Ranks, *words: str) -> TrainResult:
    config = config_of(dataset, *words)
    run_dir.mkdir(exist_ok=True)
    return run_training(config, run_dir, ranks)


def read_lines(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        {k: v for k, v in line.items() if k in ("step", "day", "auc", "loss")} for line in lines
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("stop", "is_killed"), [(3, False), (10, False), (10, True)])
def test_a_resumed_run_evaluates_the_same_days(
    dataset: Path, tmp_path: Path, one_rank: Ranks, stop: int, is_killed: bool
) -> None:
    """Within the first day, and at the end of the second, with and without its evaluation."""
    whole = run(dataset, tmp_path / "whole", one_rank)
    assert [(day["day"], day["step"], day["num_samples"]) for day in whole.summary["days"]] == [
        (day, step, 150) for day, step in zip(PERIODS, (5, 10, 15), strict=True)
    ]
    run(dataset, tmp_path / "cut", one_rank, f"trainer.max_steps={stop}")
    if is_killed:  # between the training of a day and its evaluation
        evals = (tmp_path / "cut" / "eval.jsonl").read_text().splitlines(keepends=True)
        (tmp_path / "cut" / "eval.jsonl").write_text("".join(evals[:-1]))
    cut = run(dataset, tmp_path / "cut", one_rank)
    assert cut.summary["days"] == whole.summary["days"]
    assert whole.step == cut.step == 20
    for name in ("metrics.jsonl", "eval.jsonl"):
        assert read_lines(tmp_path / "cut" / name) == read_lines(tmp_path / "whole" / name)
