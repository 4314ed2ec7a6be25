"""All-hot samples and the alternation of batches on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hotrec.artifact import ArtifactError, read_artifact
from hotrec.data.all_hot import KIND, AllHotSamples, count_steps_of_kinds, write_all_hot
from hotrec.data.chunks import Dataset
from hotrec.data.loader import make_loader
from hotrec.runtime.ranks import RankError, all_gather_object
from hotrec.train.alternate import AlternatingLoader, Alternation
from hotrec.train.checkpoint import Checkpoints, find_latest
from hotrec.train.loop import TrainResult
from hotrec.train.schedule import Schedule
from hotrec.types import Partition
from tests.distributed.setups import this_rank
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import TinyLoader, TinySplit, build_tiny
from tests.helpers.training import Cadence, train_model
from tests.unit.data.logs import recommit, write_dataset

PARTITION = Partition(
    {"t_a": 10, "t_b": 1000},
    {"t_a": np.arange(1, 9), "t_b": np.random.default_rng(3).permutation(1000)[:900]},
)
NUM_SAMPLES = 90
NUM_STEPS = 24


def find(folder: Path, dataset: str, output: str) -> AllHotSamples:
    source = Dataset.open(folder / dataset)
    return write_all_hot(source, "train", PARTITION, partition_hash="p", output=folder / output)


def check_samples(folder: Path) -> None:
    """Shares of ranks make the same whole as one process; both kinds reach every rank alike."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    samples = find(folder, "d", f"w{world_size}")
    alone = read_artifact(folder / "alone", kind=KIND).content_hash
    assert all_gather_object(samples.artifact.content_hash) == [alone] * world_size
    assert 0 < sum(samples.num_all_hot) < NUM_SAMPLES
    steps = count_steps_of_kinds(samples, batch_size=4, world_size=world_size)
    loaders = [
        make_loader(
            folder / "d", "train", batch_size=4, rank=rank, world_size=world_size, seed=1, epochs=2,
            subset=samples.subset(is_all_hot=kind),
        )
        for kind in (True, False)
    ]  # fmt: skip
    batches = list(AlternatingLoader(loaders[0], loaders[1], Alternation(*steps)))
    kinds = all_gather_object([(batch.is_all_hot, batch.num_global_samples) for batch in batches])
    assert kinds == [kinds[0]] * world_size
    assert sum(is_all_hot for is_all_hot, _ in kinds[0]) == 2 * steps[0]
    for epoch in (0, 1):
        of_epoch = batches[epoch * sum(steps) :][: sum(steps)]
        mine = [int(n) for b in of_epoch for n in b.dense[b.weights > 0, 0]]
        assert sorted(sum(all_gather_object(mine), [])) == list(range(NUM_SAMPLES))


def check_fault_reaches_all_ranks(folder: Path) -> None:
    """Only rank 1 reads the chunk that is damaged."""
    kind = ArtifactError if dist.get_rank() == 1 else RankError
    with pytest.raises(kind, match=r"train-00001\.arrow: expected an Arrow file"):
        find(folder, "bad", "never")
    assert not (folder / "never").exists()


def train_tiny(
    folder: Path, *, num_steps: int = NUM_STEPS, **kwargs: Any
) -> tuple[TrainResult, list[float]]:
    """A run of all-hot and mixed batches, and the rates of its blocks after each evaluation."""
    model, optimizer = build_tiny(lr=0.6)  # so high that the loss goes up and down
    torch.manual_seed(5 + dist.get_rank())
    alternation = Alternation(6, 6, patience=1)
    loader = AlternatingLoader(
        TinyLoader(num_batches=12, seed=1), TinyLoader(num_batches=12, seed=2), alternation
    )
    rates = []

    def add_quality(*args: Any) -> None:
        Alternation.add_quality(alternation, *args)
        rates.append(alternation.rate)

    alternation.add_quality = add_quality  # type: ignore[method-assign]
    result = train_model(
        model, optimizer, loader, this_rank(), num_steps=num_steps,
        cadence=Cadence(log_every=1, eval_every=2), lr_factor=Schedule(),
        eval_batches={"valid": TinySplit(num_batches=2, seed=4)},
        alternation=alternation, run_dir=folder, **kwargs,
    )  # fmt: skip
    return result, rates


def check_training(folder: Path) -> None:
    """Every rank decides alike; a run that stops, wherever, goes on as if it had not."""
    whole, rates = train_tiny(folder / "whole")
    assert all_gather_object(rates) == [rates] * dist.get_world_size()
    assert len(set(rates)) > 2, rates
    for stop in (7, 8):  # between evaluations, and where one is due
        to = Checkpoints(folder / f"checkpoints-{stop}", facts={})
        _, first = train_tiny(folder / f"cut-{stop}", num_steps=stop, checkpoints=to)
        dist.barrier()
        to = replace(to, resume_from=find_latest(to.directory))
        resumed, rest = train_tiny(folder / f"cut-{stop}", checkpoints=to)
        assert first + rest == rates
        for name in ("loss", "auc", "log_loss", "num_samples"):
            assert resumed.summary[name] == whole.summary[name], (stop, name)


CHECKS: dict[int, list[Callable[[Path], None]]] = {
    2: [check_samples, check_fault_reaches_all_ranks, check_training],
    3: [check_samples],
}


def run_checks(folder: Path) -> None:
    for check in CHECKS[dist.get_world_size()]:
        check(folder)
        dist.barrier()


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_all_hot_samples_on_ranks(tmp_path: Path) -> None:
    for name in ("d", "bad"):
        write_dataset(tmp_path / name, {"train": NUM_SAMPLES})
    (tmp_path / "bad" / "chunks" / "train-00001.arrow").write_bytes(b"nothing of Arrow")
    recommit(tmp_path / "bad")
    find(tmp_path, "d", "alone")
    for world_size in CHECKS:
        run_ranks(run_checks, world_size, timeout_s=150, folder=tmp_path)
