"""Early stopping and the checkpoint that is kept, with evaluations that are given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hotrec.runtime.ranks import Ranks
from hotrec.train import evaluation
from hotrec.train.best import BestQuality
from hotrec.train.checkpoint import BEST, Checkpoints, find_latest
from hotrec.train.evaluate import Quality
from hotrec.train.loop import TrainResult
from hotrec.train.schedule import Schedule
from tests.helpers.tiny import TinyLoader, TinySplit, build_tiny
from tests.helpers.training import Cadence, train_model

# By step, every second one.
LOSSES = {2: 0.7, 4: 0.5, 6: 0.6, 8: 0.55, 10: 0.52, 12: 0.4}


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps at which the run was evaluated; the losses are those above."""
    steps: list[int] = []

    def evaluate(pipeline: Any, batches: Any, *, step: int, ranking: None) -> Quality:
        steps.append(step)
        return Quality(auc=0.5, log_loss=LOSSES[step], normalized_entropy=None, num_samples=1)

    monkeypatch.setattr(evaluation, "evaluate", evaluate)
    return steps


def run(
    ranks: Ranks,
    folder: Path,
    best: BestQuality,
    *,
    resume: str = "",
    splits: Sequence[str] = ("valid",),
    **kwargs: Any,
) -> TrainResult:
    directory = folder / "checkpoints"
    # As if of one run, which resumes its newest checkpoint.
    checkpoints = Checkpoints(directory, facts={}, keep_last=1, lineage="one")
    if resume:
        checkpoints = replace(checkpoints, resume_from=directory / resume)
    model, optimizer = build_tiny()
    arguments = {"num_steps": 12, "cadence": Cadence(log_every=1, check_every=1, eval_every=2)}
    return train_model(
        model,
        optimizer,
        kwargs.pop("loader", TinyLoader(num_batches=12)),
        ranks,
        **{**arguments, **kwargs},
        lr_factor=Schedule(),
        pipeline_kind="base",
        eval_batches={split: TinySplit(1, seed=1) for split in splits},
        checkpoints=checkpoints,
        best=best,
        run_dir=folder,
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("step-*"))


@pytest.mark.slow
def test_the_run_ends_when_the_loss_gets_no_lower(
    one_rank: Ranks, tmp_path: Path, evaluated: list[int]
) -> None:
    result = run(one_rank, tmp_path, BestQuality(3, is_kept=True))
    assert (result.step, result.is_finished) == (10, True)
    assert evaluated == [2, 4, 6, 8, 10, 10]  # and at the end
    found = {name: result.summary[name] for name in ("best_step", "best_log_loss", "finished")}
    assert found == {"best_step": 4, "best_log_loss": 0.5, "finished": True}
    assert names(tmp_path) == ["step-00000004", "step-00000010"]
    assert find_latest(tmp_path / "checkpoints", BEST).name == "step-00000004"
    # Resumed it is over still, and with more patience goes on.
    again = run(one_rank, tmp_path, BestQuality(3, is_kept=True), resume="step-00000010")
    assert (again.step, again.is_finished) == (10, True)
    more = run(one_rank, tmp_path, BestQuality(4, is_kept=True), resume="step-00000010")
    assert more.step == more.summary["best_step"] == 12  # evaluated at the end alone
    assert find_latest(tmp_path / "checkpoints", BEST).name == "step-00000012"
    assert names(tmp_path) == ["step-00000012"]


def quality(auc: float | None) -> Quality:
    return Quality(auc=auc, log_loss=0.5, normalized_entropy=None, num_samples=1)


def test_the_highest_auc_may_be_the_best() -> None:
    best = BestQuality(2, is_kept=True, by="auc")
    for step, auc in enumerate([None, 0.7, 0.6, 0.8, None, 0.8]):
        assert not best.must_stop
        best.add_quality(step, quality(auc))
    assert (best.step, best.value, best.must_stop) == (3, 0.8, True)
    again = BestQuality(3, by="auc")
    again.load_state_dict(best.state_dict())
    assert (again.step, again.value, again.must_stop, again.knows(5)) == (3, 0.8, False, True)
    assert "by" not in BestQuality().state_dict()


def test_another_split_begins_anew() -> None:
    saved = BestQuality(1, is_kept=True, split="day 1")
    for step, auc in ((2, 0.5), (4, 0.5)):
        saved.add_quality(step, quality(auc))
    assert saved.must_stop
    for split, is_same in (("day 1", True), ("day 2", False)):
        best = BestQuality(1, is_kept=True, split=split)
        best.load_state_dict(saved.state_dict())
        assert (best.must_stop, best.knows(4), best.value == 0.5) == (is_same,) * 3


@pytest.mark.slow
def test_the_best_checkpoint_is_saved_between_others(
    one_rank: Ranks, tmp_path: Path, evaluated: Sequence[int]
) -> None:
    cadence = Cadence(eval_every=2, save_every=5)
    run(one_rank, tmp_path, BestQuality(is_kept=True), cadence=cadence, num_steps=10)
    assert names(tmp_path) == ["step-00000004", "step-00000010"]


@pytest.mark.slow
def test_the_checkpoint_that_is_kept_is_the_one_reported(
    one_rank: Ranks, tmp_path: Path, evaluated: list[int]
) -> None:
    splits = ("valid", "test")
    summary = run(one_rank, tmp_path, BestQuality(3, is_kept=True), splits=splits).summary
    # The test split is evaluated where the validation split is best, and at the end.
    assert evaluated == [2, 2, 4, 4, 6, 8, 10, 10, 10]
    assert (summary["eval_split"], summary["eval_step"], summary["log_loss"]) == ("test", 4, 0.5)
    assert {split: of["log_loss"] for split, of in summary["quality"].items()} == {
        "valid": 0.5,
        "test": 0.5,
    }
    last = summary["last_quality"]
    assert (last["step"], last["valid"]["log_loss"], last["test"]["log_loss"]) == (10, 0.52, 0.52)
