"""All-hot samples are found by all ranks together, as by one process, or by none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from hotrec.artifact import ArtifactError, read_artifact
from hotrec.data.all_hot import KIND, write_all_hot
from hotrec.data.chunks import Dataset
from hotrec.runtime.ranks import RankError, all_gather_object
from hotrec.types import Partition
from tests.helpers.ranks import run_ranks
from tests.unit.data.logs import recommit, write_dataset

PARTITION = Partition(
    {"t_a": 10, "t_b": 1000},
    {"t_a": np.arange(1, 9), "t_b": np.random.default_rng(3).permutation(1000)[:900]},
)


def find(folder: Path, dataset: str, output: str) -> str:
    source, output_path = Dataset.open(folder / dataset), folder / output
    return write_all_hot(
        source, "train", PARTITION, partition_hash="p", output=output_path
    ).artifact.content_hash


def find_on_ranks(folder: Path) -> None:
    found = find(folder, "d", f"w{dist.get_world_size()}")
    alone = read_artifact(folder / "alone", kind=KIND).content_hash
    assert all_gather_object(found) == [alone] * dist.get_world_size()
    # Only rank 1 reads the chunk that is damaged.
    kind = ArtifactError if dist.get_rank() == 1 else RankError
    with pytest.raises(kind, match=r"train-00001\.arrow: expected an Arrow file"):
        find(folder, "bad", "never")
    assert not (folder / "never").exists()


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_find_what_one_process_finds(tmp_path: Path, world_size: int) -> None:
    for name in ("d", "bad"):
        write_dataset(tmp_path / name, {"train": 90})
    (tmp_path / "bad" / "chunks" / "train-00001.arrow").write_bytes(b"nothing of Arrow")
    recommit(tmp_path / "bad")
    find(tmp_path, "d", "alone")
    run_ranks(find_on_ranks, world_size, folder=tmp_path)
