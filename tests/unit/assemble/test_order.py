"""What order=all_hot refuses and says before a run, and the order of samples."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from hotrec.artifact import Artifact, ArtifactError
from hotrec.assemble.job import order_of
from hotrec.assemble.order import (
    TrainingOrder,
    count_epoch_steps,
    find_all_hot,
    make_alternation,
    make_train_loader,
)
from hotrec.data.chunks import Dataset
from hotrec.planner.partition import write_partition
from hotrec.runtime.ranks import Ranks
from hotrec.types import Partition, Placement
from tests.unit.assemble.configs import config_of
from tests.unit.data.logs import samples_of, write_dataset

NUM_ROWS = {"t_a": 10, "t_b": 1000}


def order(*words: str) -> TrainingOrder:
    return order_of(config_of("trainer.batch_size=4", *words))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    path = tmp_path_factory.mktemp("order") / "d"
    write_dataset(path, {"train": 90})
    return Dataset.open(path)


def planned(dataset: Dataset, folder: Path, num_hot: tuple[int, int]) -> tuple[Partition, Artifact]:
    hot = {t: np.arange(n, dtype=np.int64) for t, n in zip(NUM_ROWS, num_hot, strict=True)}
    partition = Partition(NUM_ROWS, hot, policy="by hand")
    artifact = write_partition(
        Placement.alike(partition),
        folder / "partition",
        parameters={},
        summary={"tables": {}, "total": {}},
        dataset_hash=dataset.artifact.content_hash,
        profile_hash="none",
    )
    return partition, artifact


@pytest.mark.parametrize(("kind", "is_in_order"), [("shuffled", False), ("time", True)])
def test_samples_come_as_the_order_says(dataset: Dataset, kind: str, is_in_order: bool) -> None:
    words = (f"order={kind}", f"paths.dataset={dataset.artifact.path}", "trainer.num_workers=0")
    ranks = Ranks(0, 1, 0, 1, torch.device("cpu"))
    loader = make_train_loader(order(*words), ranks, None, None, None, None)
    samples = [sample for batch in loader for sample in samples_of(batch)]
    assert sorted(samples) == [*range(90)]
    assert (samples == [*range(90)]) == is_in_order


def test_the_ordinary_order_needs_no_kinds(dataset: Dataset, tmp_path: Path) -> None:
    asked = order()
    found = find_all_hot(asked, dataset, (None, None), tmp_path, tmp_path, is_resumed=False)
    assert found is None
    assert make_alternation(asked, found, 2) is None
    assert count_epoch_steps(asked, dataset, found, 2) == 12
    assert list(tmp_path.iterdir()) == []


def test_placements_without_hot_rows_are_refused(dataset: Dataset, tmp_path: Path) -> None:
    asked = order("order=all_hot")
    cold = planned(dataset, tmp_path, (0, 0))
    for given, found in (((None, None), "TorchRec's own plan"), (cold, "by hand: 0 hot rows")):
        with pytest.raises(ValueError, match=f"with hot rows for order=all_hot, got {found}"):
            find_all_hot(asked, dataset, given, tmp_path, tmp_path, is_resumed=False)


def test_a_resumed_run_refuses_stale_samples_and_a_new_one_replaces_them(
    dataset: Dataset, tmp_path: Path
) -> None:
    asked = order("order=all_hot")
    before = planned(dataset, tmp_path, (8, 900))
    first = find_all_hot(asked, dataset, before, tmp_path, tmp_path, is_resumed=False)
    other = planned(dataset, tmp_path, (9, 900))
    with pytest.raises(ArtifactError, match="all-hot samples of the partition"):
        find_all_hot(asked, dataset, other, tmp_path, tmp_path, is_resumed=True)
    second = find_all_hot(asked, dataset, other, tmp_path, tmp_path, is_resumed=False)
    again = find_all_hot(asked, dataset, other, tmp_path, tmp_path, is_resumed=True)
    assert first is not None
    assert second is not None
    assert again is not None
    assert first.artifact.content_hash != second.artifact.content_hash
    assert again.artifact.content_hash == second.artifact.content_hash


@pytest.mark.parametrize(
    ("num_hot", "words", "said"),
    [
        ((10, 1000), ["trainer.eval_every_steps=5"], "90 of 90 (100.0%) are all-hot"),
        ((8, 900), ["trainer.eval_every_steps=5"], "in blocks of initially 0.5 of each kind"),
        ((8, 900), [], "; the length is fixed, without evaluations"),
        ((0, 1), [], "0 of 90 (0.0%) are all-hot"),
    ],
)
def test_the_order_is_logged_once(
    dataset: Dataset,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    num_hot: tuple[int, int],
    words: list[str],
    said: str,
) -> None:
    asked = order("order=all_hot", *words)
    given = planned(dataset, tmp_path, num_hot)
    samples = find_all_hot(asked, dataset, given, tmp_path, tmp_path, is_resumed=False)
    with caplog.at_level(logging.INFO, logger="hotrec"):
        alternation = make_alternation(asked, samples, 2)
    assert alternation is not None
    assert samples is not None
    lines = [record.getMessage() for record in caplog.records]
    [line] = [line for line in lines if "training samples are reordered" in line]
    assert said in line
    assert ("no sample is all-hot" in lines[-1]) == (num_hot == (0, 1))
    steps = count_epoch_steps(asked, dataset, samples, 2)
    kinds = []
    for _ in range(steps):
        kinds.append(alternation.next_is_all_hot())
        alternation.advance()
    assert sum(kinds) == -(-sum(samples.num_all_hot) // 8)
    assert steps - sum(kinds) == -(-(90 - sum(samples.num_all_hot)) // 8)
