"""A run on a dataset that has grown, started from a run on the generation before."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from hotrec.artifact import ArtifactError, LockedError
from hotrec.cli.store import build_config, compose_config
from hotrec.config.data import TableSpec
from hotrec.config.roots import Config, EvaluateConfig
from hotrec.data.kept import prune_generations
from hotrec.data.prepare import prepare
from hotrec.data.vocabulary import read_vocabulary
from hotrec.runs.evaluate import evaluate_run
from hotrec.runs.export import open_trained
from hotrec.runs.train import run_training
from hotrec.runtime.ranks import Ranks
from hotrec.train.checkpoint import open_tensors
from hotrec.train.evaluate import Quality
from hotrec.train.loop import TrainResult
from tests.unit.data.logs import spec_by_day, write_day

DAYS = [["a", "b", "b", "c", "c", "d", "d"], ["x", "b", "x", "y"]]


def config_of(folder: Path, *words: str) -> Config:
    words = (
        *("data=kuairand", f"paths.dataset={folder}/dataset", "model.embedding_dim=4"),
        "model.dense_layer_sizes=[4]",
        *("model.over_layer_sizes=[4,1]", "placement=torchrec", "trainer.num_workers=0"),
        *("trainer.batch_size=2", "trainer.eval_splits=[]", "order=time", *words),
    )
    return build_config(compose_config("config", list(words)))


def run(folder: Path, name: str, ranks: Ranks, *words: str) -> TrainResult:
    """Train on ``folder/dataset``, or on what the words name."""
    (folder / name).mkdir(exist_ok=True)
    return run_training(config_of(folder, *words), folder / name, ranks)


def rows_of(folder: Path, name: str, values: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Weights and optimizer state of the users by raw id, from a run's last checkpoint."""
    with open_tensors((folder / name / "checkpoints").glob("step-*").__next__()) as files:
        found = [files.whole(tensor) for tensor in sorted(files.shapes) if ".user." in tensor]
    return {
        user: torch.cat([tensor[row].reshape(-1) for tensor in found])
        for user, row in values.items()
    }


def users_of(dataset: Path) -> dict[str, int]:
    """The row of each user."""
    values = read_vocabulary(dataset, "user")["value"].to_pylist()
    return {user: row for row, user in enumerate(values, start=1)}


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [0, 6], ids=["grown", "evicted"])
def test_new_days_go_on_from_the_generation_before(
    tmp_path: Path, one_rank: Ranks, num_rows: int
) -> None:
    first, second = (write_day(tmp_path, day, users) for day, users in enumerate(DAYS))
    spec = spec_by_day(first, user=TableSpec(num_rows=num_rows))
    prepare(spec, tmp_path / "dataset")
    # Of its own, because this process may still have the dataset of its run open.
    grown = Path(shutil.copytree(tmp_path / "dataset", tmp_path / "grown"))
    run(tmp_path, "before", one_rank)
    before = users_of(tmp_path / "dataset")
    old = rows_of(tmp_path, "before", before)
    prepare(spec, grown, append=[second])
    after = users_of(grown)
    assert after.keys() == {*"bcdxy"} | ({"a"} if num_rows == 0 else set())
    # So that rows keep what they start from.
    still = ("optimizer.learning_rate=1e-30", f"paths.dataset={grown}")
    fresh = run(tmp_path, "fresh", one_rank, *still)
    warm_words = [f"trainer.warm_start={tmp_path}/before", "order.new_only=true", *still]
    warm = run(tmp_path, "warm", one_rank, *warm_words)
    assert (fresh.summary["num_samples"], warm.summary["num_samples"]) == (11, 4)
    new, initial = (rows_of(tmp_path, name, after) for name in ("warm", "fresh"))
    for user in after:
        assert before.get(user, after[user]) == after[user]
        weights = old[user][:4] if user in before else initial[user][:4]
        torch.testing.assert_close(new[user][:4], weights, rtol=0, atol=0)
        if user in before and user not in DAYS[1]:
            torch.testing.assert_close(new[user], old[user], rtol=0, atol=0)
    # Its run is resumed where it stands, which is not where it was started.
    again = run(tmp_path, "warm", one_rank, *warm_words)
    assert again.step == warm.step == 2


@pytest.mark.slow
def test_a_run_stays_of_use_after_its_dataset_has_grown(tmp_path: Path, one_rank: Ranks) -> None:
    """It is evaluated, exported and resumed on its own generation, until that is pruned."""
    first, second = (write_day(tmp_path, day, users) for day, users in enumerate(DAYS))
    spec = spec_by_day(first)
    prepare(spec, tmp_path / "dataset")
    run(tmp_path, "before", one_rank)
    run_dir, config = tmp_path / "before", config_of(tmp_path)
    evaluated = EvaluateConfig(run_dir=str(run_dir), split="train")

    def evaluate() -> Quality:
        return evaluate_run(evaluated, config, run_dir, one_rank).quality

    quality = evaluate()
    prepare(spec, tmp_path / "dataset", append=[second])
    assert evaluate() == quality
    trained = open_trained(config, run_dir, "latest")  # of export and predict
    assert users_of(trained.dataset.artifact.path).keys() == {*"abcd"}
    assert run(tmp_path, "before", one_rank, "trainer.num_epochs=2").step == 8
    with pytest.raises(LockedError, match="reading it"):
        prune_generations(tmp_path / "dataset", 0)
    assert evaluate().num_samples == 7
    del trained
    prune_generations(tmp_path / "dataset", 0)
    calls: list[Callable[[], object]] = [
        evaluate,
        lambda: open_trained(config, run_dir, "latest"),
        lambda: run(tmp_path, "before", one_rank),
    ]
    for call in calls:
        with pytest.raises(ArtifactError, match=r"expected generation 0 \(.* \(pruned"):
            call()
