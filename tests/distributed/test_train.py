"""Two real ranks: resume, one rank failing alone, and counted bytes."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hotrec.artifact import ArtifactError
from hotrec.config.groups import Decay
from hotrec.data.batch import Batch
from hotrec.runtime.hosts import RANKS_PER_HOST
from hotrec.runtime.ranks import RankError, all_gather_object
from hotrec.runtime.traffic import BatchFacts, find_distinct_rows
from hotrec.train.callbacks import Callback
from hotrec.train.checkpoint import Checkpoints, find_latest
from hotrec.train.loop import TrainResult
from hotrec.train.schedule import Schedule
from tests.distributed.setups import this_rank
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import DIM, NUM_ROWS, TinyLoader, TinySplit, build_tiny
from tests.helpers.training import Cadence, train_model

EVERY_STEP = Cadence(log_every=1, eval_every=5)
CALLBACK = f"{__name__}.FailingCallback"


def run(loader: TinyLoader, cadence: Cadence = EVERY_STEP, **kwargs: Any) -> TrainResult:
    model, optimizer = build_tiny(dropout=0.2)
    torch.manual_seed(17 + dist.get_rank())
    schedule = Schedule(Decay.cosine, warmup_steps=3, decay_start_step=3, num_decay_steps=13)
    arguments = {"num_steps": 16, "lr_factor": schedule, "cadence": cadence, **kwargs}
    return train_model(model, optimizer, loader, this_rank(), **arguments)


def values_of(path: Path, value: str) -> dict[int, float]:
    lines = map(json.loads, path.read_text().splitlines())
    return {line["step"]: line[value] for line in lines}


def inspect(batch: Batch) -> BatchFacts:
    tables = {name: (name, DIM) for name in NUM_ROWS}
    num_lookups = batch.sparse.values().numel()
    return BatchFacts(find_distinct_rows(batch.sparse, tables), num_lookups, num_lookups // 4)


class OnSecondRank(TinyLoader):
    """Rank 1 alone is told to stop, has a loss that is not finite, or cannot save."""

    what = ""

    def batch(self, index: int) -> Batch:
        batch = super().batch(index)
        if index == 6 and dist.get_rank() == 1:
            if self.what == "stop":
                os.kill(os.getpid(), signal.SIGTERM)
            if self.what == "nan":
                batch.dense[0] = float("nan")
        return batch

    def state_dict(self) -> dict[str, Any]:
        if self.what == "full" and dist.get_rank() == 1:
            raise OSError(28, "No space left on device")
        return super().state_dict()


def loader(what: str = "") -> TinyLoader:
    made = OnSecondRank(num_batches=16)
    made.what = what
    return made


class FailingCallback(Callback):
    """Exists on rank 0 alone."""

    def on_log(self, line: Any) -> None:
        raise OSError("no answer")


def check_training(folder: Path) -> None:
    """All cases of training on one pair of ranks; ``folder`` is shared."""
    evals = {"valid": TinySplit(num_batches=2, seed=4)}
    whole = run(loader(), run_dir=folder / "whole", eval_batches=evals, inspect_batch=inspect)
    checkpoint = check_resume(folder, evals, whole)
    check_saving_by_time(folder, evals, whole)
    check_traffic(whole)
    check_failures_reach_all_ranks(folder, checkpoint)


def check_resume(folder: Path, evals: dict[str, Any], whole: TrainResult) -> Path:
    checkpoints = Checkpoints(folder / "checkpoints", facts={"dataset": "d1"})
    common: dict[str, Any] = {"run_dir": folder / "cut", "eval_batches": evals}
    stopped = run(loader("stop"), checkpoints=checkpoints, **common)
    assert not stopped.is_finished
    assert len(set(all_gather_object(stopped.step))) == 1
    assert 6 <= stopped.step <= 9
    dist.barrier()
    path = find_latest(checkpoints.directory)
    assert path is not None
    assert path.name == f"step-{stopped.step:08d}"
    resumed = run(loader(), checkpoints=replace(checkpoints, resume_from=path), **common)
    assert resumed.is_finished
    for name in ("loss", "auc", "log_loss", "normalized_entropy", "num_samples"):
        assert resumed.summary[name] == whole.summary[name], name
    dist.barrier()
    for file, value in (("metrics.jsonl", "loss"), ("eval.jsonl", "auc")):
        expected, found = (values_of(folder / of / file, value) for of in ("whole", "cut"))
        assert found == expected
        assert len(found) > 3
    return path


def check_saving_by_time(folder: Path, evals: dict[str, Any], whole: TrainResult) -> None:
    """Rank 0's clock decides for all ranks, and results stay those of a run that never saves."""
    for late in (0, 1):  # the rank whose clock says that a checkpoint is due
        checkpoints = Checkpoints(folder / f"by_time_{late}", facts={}, keep_last=100)
        every_s = 1e-6 if dist.get_rank() == late else 1e6
        cadence = replace(EVERY_STEP, check_every=3, save_every_s=every_s)
        found = run(loader(), cadence, eval_batches=evals, checkpoints=checkpoints)
        for name in ("loss", "auc"):
            assert found.summary[name] == whole.summary[name], name
        dist.barrier()
        num_saved = len(list(checkpoints.directory.glob("step-*")))
        assert num_saved == 1 if late else num_saved > 4


def check_traffic(whole: TrainResult) -> None:
    """Also what DDP sends from C++, in the middle of backward."""
    sent = whole.summary["sent_bytes"]
    dense = 3 * 8 + 8 + 8 * 4 + 4 + 7 * 8 + 8 + 8 + 1
    # The dense layers and the data-parallel table; W = 2: 2 (W-1)/W = 1.
    assert sent["all_reduce"] == (dense + NUM_ROWS["data_parallel"] * DIM) * 4
    assert sent["all_to_all"] > 0
    total = whole.summary["sent_bytes_total"]
    assert total == sum(sent.values())
    assert dense * 4 < whole.summary["bound_bytes"] < total
    assert whole.summary["hot_lookup_frac"] == 0.25
    assert whole.summary["between_hosts_bytes"] == 0
    with mock.patch.dict("os.environ", {RANKS_PER_HOST: "1"}):
        on_hosts = run(loader(), inspect_batch=inspect).summary
    assert on_hosts["between_hosts_bytes"] == on_hosts["sent_bytes_total"] == total
    bounds = [on_hosts[f"{which}bound_bytes"] for which in ("", "between_hosts_")]
    assert bounds == pytest.approx([whole.summary["bound_bytes"]] * 2, abs=1)


def check_failures_reach_all_ranks(folder: Path, checkpoint: Path) -> None:
    is_first, target = dist.get_rank() == 0, folder / "full"
    with pytest.raises(RankError if is_first else OSError, match="No space left on device"):
        run(loader("full"), checkpoints=Checkpoints(target, facts={}), num_steps=2)
    dist.barrier()
    assert not target.exists()
    with pytest.raises(RuntimeError, match="step 7: expected a finite loss"):
        run(loader("nan"), Cadence(log_every=3))
    with pytest.raises(RuntimeError, match=f"{CALLBACK}.on_log: expected .* got OSError"):
        run(loader(), callbacks=[CALLBACK])
    damaged = folder / "damaged"
    if is_first:
        shutil.copytree(checkpoint, damaged)
        (damaged / "random-00001.pt").write_bytes(b"")
    dist.barrier()
    for path, dataset, text in (
        (damaged, "d1", "random-00001.pt: expected"),  # a file of one rank
        (checkpoint, "d2", "expected dataset 'd2' .* got 'd1'"),
    ):
        checkpoints = Checkpoints(target, {"dataset": dataset}, resume_from=path)
        with pytest.raises(ArtifactError, match=text):
            run(loader(), checkpoints=checkpoints)


def test_training_on_two_ranks(tmp_path: Path) -> None:
    run_ranks(check_training, folder=tmp_path, timeout_s=120)
