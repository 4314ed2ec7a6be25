"""What order=all_hot refuses and says before a run, and the order of samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hotrec.artifact import Artifact, ArtifactError
from hotrec.assemble.job import order_of
from hotrec.assemble.order import TrainingOrder, find_all_hot
from hotrec.data.chunks import Dataset
from hotrec.planner.partition import write_partition
from hotrec.types import Partition, Placement
from tests.unit.assemble.configs import config_of
from tests.unit.data.logs import write_dataset

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


def test_a_resumed_run_refuses_stale_samples_and_a_new_one_replaces_them(
    dataset: Dataset, tmp_path: Path
) -> None:
    asked = order("order=all_hot")
    before = planned(dataset, tmp_path, (8, 900))
    first = find_all_hot(asked, dataset, before, tmp_path, tmp_path, is_resumed=False)
    other = planned(dataset, tmp_path, (9, 900))
    with pytest.raises(ArtifactError, match="all-hot samples"):
        find_all_hot(asked, dataset, other, tmp_path, tmp_path, is_resumed=True)
    second = find_all_hot(asked, dataset, other, tmp_path, tmp_path, is_resumed=False)
    again = find_all_hot(asked, dataset, other, tmp_path, tmp_path, is_resumed=True)
    assert first is not None
    assert second is not None
    assert again is not None
    assert first.artifact.content_hash != second.artifact.content_hash
    assert again.artifact.content_hash == second.artifact.content_hash
