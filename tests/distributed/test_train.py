"""Two real ranks: resume, evaluation over ranks, one rank failing alone, and counted bytes."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hotrec.artifact import ArtifactError
from hotrec.config.groups import Decay
from hotrec.data.batch import Batch
from hotrec.embedding.table_memory import CacheCounters, CacheFigures, fused_modules
from hotrec.runtime.hosts import RANKS_PER_HOST
from hotrec.runtime.ranks import RankError, all_gather_object
from hotrec.runtime.traffic import BatchFacts, count_sent_bytes, find_distinct_rows
from hotrec.train.callbacks import Callback
from hotrec.train.checkpoint import Checkpoints, find_latest
from hotrec.train.evaluate import evaluate, measure_quality
from hotrec.train.loop import TrainResult
from hotrec.train.pipelines import make_pipeline
from hotrec.train.schedule import Schedule
from hotrec.types import PipelineKind, PipelineSpec
from tests.distributed.setups import this_rank
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import DIM, NUM_ROWS, TinyLoader, TinySplit, build_tiny, tiny_batch
from tests.helpers.training import Cadence, train_model

CPU = torch.device("cpu")
EVERY_STEP = Cadence(log_every=1, eval_every=5)


def run(loader: TinyLoader, cadence: Cadence = EVERY_STEP, **kwargs: Any) -> TrainResult:
    model, optimizer = build_tiny(dropout=0.2)
    torch.manual_seed(17 + dist.get_rank())
    schedule = Schedule(Decay.cosine, warmup_steps=3, decay_start_step=3, num_decay_steps=13)
    arguments = {"num_steps": 16, "lr_factor": schedule, "cadence": cadence, **kwargs}
    return train_model(model, optimizer, loader, this_rank(), **arguments)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def inspect(batch: Batch) -> BatchFacts:
    tables = {name: (name, DIM) for name in NUM_ROWS}
    num_lookups = batch.sparse.values().numel()
    return BatchFacts(find_distinct_rows(batch.sparse, tables), num_lookups, num_lookups // 4)


class SigtermOnOneRank(TinyLoader):
    """Only rank 1 is told to stop, when its batch number 6 is fetched."""

    def batch(self, index: int) -> Batch:
        if index == 6 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().batch(index)


class SavingFails(TinyLoader):
    def state_dict(self) -> dict[str, Any]:
        if dist.get_rank() == 1:
            raise OSError(28, "No space left on device")
        return super().state_dict()


class InfiniteOnOneRank(TinyLoader):
    def batch(self, index: int) -> Batch:
        batch = super().batch(index)
        if index == 4 and dist.get_rank() == 1:
            batch.dense[0] = float("nan")
        return batch


def check_training(folder: Path) -> None:
    """All cases of training on one pair of ranks; ``folder`` is shared."""
    evals = {"valid": TinySplit(num_batches=2, seed=4)}
    whole = run(
        TinyLoader(num_batches=16),
        run_dir=folder / "whole",
        eval_batches=evals,
        inspect_batch=inspect,
    )
    check_resume(folder, evals, whole)
    check_saving_by_time(folder, whole)
    check_traffic_of_training(whole)
    check_device_caches_add_up(folder)
    check_failures_reach_all_ranks(folder)
    check_evaluation()
    check_ddp_is_counted()


class FailingCallback(Callback):
    """Exists on rank 0 alone."""

    def on_log(self, line: Any) -> None:
        raise OSError("no answer")


def check_resume(folder: Path, evals: dict[str, Any], whole: TrainResult) -> None:
    checkpoints = Checkpoints(folder / "checkpoints", facts={"dataset": "d1"})
    common: dict[str, Any] = {"run_dir": folder / "cut", "eval_batches": evals}
    stopped = run(SigtermOnOneRank(num_batches=16), checkpoints=checkpoints, **common)
    assert not stopped.is_finished
    assert len(set(all_gather_object(stopped.step))) == 1
    assert 6 <= stopped.step <= 9
    dist.barrier()
    path = find_latest(checkpoints.directory)
    assert path is not None
    assert path.name == f"step-{stopped.step:08d}"
    resumed = run(
        TinyLoader(num_batches=16), checkpoints=replace(checkpoints, resume_from=path), **common
    )
    assert resumed.is_finished
    for name in ("loss", "auc", "log_loss", "normalized_entropy", "num_samples"):
        assert resumed.summary[name] == whole.summary[name], name
    dist.barrier()
    for file, value in (("metrics.jsonl", "loss"), ("eval.jsonl", "auc")):
        expected = {line["step"]: line[value] for line in read_lines(folder / "whole" / file)}
        found = {line["step"]: line[value] for line in read_lines(folder / "cut" / file)}
        assert found == expected
        assert len(found) > 3


def check_saving_by_time(folder: Path, whole: TrainResult) -> None:
    """Rank 0's clock decides for all ranks, and results stay those of a run that never saves."""
    for late in (0, 1):  # the rank whose clock says that a checkpoint is due
        checkpoints = Checkpoints(folder / f"by_time_{late}", facts={}, keep_last=100)
        every_s = 1e-6 if dist.get_rank() == late else 1e6
        found = run(
            TinyLoader(num_batches=16),
            Cadence(log_every=1, eval_every=5, check_every=3, save_every_s=every_s),
            eval_batches={"valid": TinySplit(num_batches=2, seed=4)},
            checkpoints=checkpoints,
        )
        for name in ("loss", "auc"):
            assert found.summary[name] == whole.summary[name], name
        dist.barrier()
        num_saved = len(list(checkpoints.directory.glob("step-*")))
        assert num_saved == 1 if late else num_saved > 4


def check_traffic_of_training(whole: TrainResult) -> None:
    sent = whole.summary["sent_bytes"]
    dense = 3 * 8 + 8 + 8 * 4 + 4 + 7 * 8 + 8 + 8 + 1
    # The dense layers and the data-parallel table, both by DDP from C++; W = 2: 2 (W-1)/W = 1.
    assert sent["all_reduce"] == (dense + NUM_ROWS["data_parallel"] * DIM) * 4
    assert sent["all_to_all"] > 0
    assert whole.summary["sent_bytes_total"] == sum(sent.values())
    assert dense * 4 < whole.summary["bound_bytes"] < whole.summary["sent_bytes_total"]
    assert whole.summary["hot_lookup_frac"] == 0.25
    assert whole.summary["between_hosts_bytes"] == 0
    assert whole.summary["between_hosts_bound_bytes"] == 0
    with mock.patch.dict("os.environ", {RANKS_PER_HOST: "1"}):
        on_hosts = run(TinyLoader(num_batches=16), inspect_batch=inspect).summary
    assert on_hosts["sent_bytes"] == sent
    assert on_hosts["between_hosts_bytes"] == on_hosts["sent_bytes_total"]
    bounds = [on_hosts[f"{which}bound_bytes"] for which in ("", "between_hosts_")]
    assert bounds[1] == pytest.approx(bounds[0], abs=1)
    assert bounds[0] == whole.summary["bound_bytes"]


def check_device_caches_add_up(folder: Path) -> None:
    """They are told with the rest: by a rank without a cache, and by both without a collective."""
    own = CacheFigures() if dist.get_rank() == 0 else CacheFigures(9, 7, 4, 3, 1, 2, 400, 80)
    # Sharded for CPU, where FBGEMM makes no cache.
    assert CacheCounters(fused_modules(build_tiny()[0])).end_line() == CacheFigures()
    num_reduced = []
    for name, caches in (("cached", lambda: asdict(own)), ("uncached", None)):
        with counted_all_reduces() as calls:
            result = run(
                TinyLoader(num_batches=16),
                Cadence(log_every=3),
                num_steps=4,
                count_caches=caches,
                run_dir=folder / name,
            )
        num_reduced.append(len(calls))
        # A check-up after step 3, which writes a line, and one after the last.
        both = {"num_steps": 4, **asdict(own + own)}
        totals = all_gather_object(result.summary.get("cache"))
        assert totals[0] == totals[1]
        if dist.get_rank() == 1:
            assert totals[0] == (both if caches else None)
    assert num_reduced[0] == num_reduced[1] == 2
    (line,) = read_lines(folder / "cached/metrics.jsonl") if dist.get_rank() == 0 else ({},)
    if line:
        assert line["cache"]["num_hits"] == 4
        assert line["cache"]["num_steps"] == 3
        assert line["sent_bytes"]["all_reduce"] > 0  # the figures behind them are in their place


@contextmanager
def counted_all_reduces() -> Iterator[list[torch.Tensor]]:
    """What this process reduces from Python; DDP's reducer is not among it."""
    calls: list[torch.Tensor] = []
    reduce = dist.all_reduce

    def noted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(tensor)
        return reduce(tensor, *args, **kwargs)

    dist.all_reduce = noted
    try:
        yield calls
    finally:
        dist.all_reduce = reduce


def error_of(action: Callable[[], object]) -> BaseException:
    try:
        action()
    except Exception as error:
        return error
    raise AssertionError("expected an error, got none")


def check_failures_reach_all_ranks(folder: Path) -> None:
    is_first = dist.get_rank() == 0
    # One rank cannot write: no checkpoint, and both ranks say why.
    target = folder / "full"
    error = error_of(
        lambda: run(
            SavingFails(num_batches=16), checkpoints=Checkpoints(target, facts={}), num_steps=2
        )
    )
    assert isinstance(error, RankError if is_first else OSError), error
    assert "No space left on device" in str(error)
    dist.barrier()
    assert not target.exists()
    # One rank's loss is not finite.
    error = error_of(lambda: run(InfiniteOnOneRank(num_batches=16), Cadence(log_every=3)))
    assert "step 5: expected a finite loss" in str(error)
    # The callback of rank 0 fails.
    path = f"{__name__}.FailingCallback"
    error = error_of(lambda: run(TinyLoader(num_batches=16), callbacks=[path]))
    assert isinstance(error, RuntimeError)
    assert f"trainer.callbacks {path}.on_log: expected it to return, got OSError" in str(error)
    # One rank does not find its file.
    path = find_latest(folder / "checkpoints")
    assert path is not None
    damaged = folder / "damaged"
    if is_first:
        shutil.copytree(path, damaged)
        (damaged / "random-00001.pt").write_bytes(b"")
    dist.barrier()
    for resume_from, dataset, text in (
        (damaged, "d1", "random-00001.pt: expected"),
        (path, "d2", "expected dataset 'd2' (of this run), got 'd1'"),
    ):
        checkpoints = Checkpoints(target, {"dataset": dataset}, resume_from=resume_from)
        error = error_of(partial(run, TinyLoader(num_batches=16), checkpoints=checkpoints))
        assert isinstance(error, ArtifactError)
        assert text in str(error)


def check_evaluation() -> None:
    rank = dist.get_rank()
    model, optimizer = build_tiny()
    # Uneven: rank 1 has fewer real samples, and in its last batch none at all.
    sizes = [(7, 0), (7, 0), (7, 2)] if rank == 0 else [(7, 3), (5, 0), (1, 1)]
    batches = [
        tiny_batch(10 * rank + seed, size, num_padding=padding)
        for seed, (size, padding) in enumerate(sizes)
    ]
    model.eval()
    with torch.no_grad():
        outputs = [model(batch)[1] for batch in batches]
    kept = [
        torch.stack([logits, labels], 1)[batch.weights > 0]
        for (_, logits, labels), batch in zip(outputs, batches, strict=True)
    ]
    everything = torch.cat([part for parts in all_gather_object(kept) for part in parts]).numpy()
    model.train()
    for kind in ("base", "sparse_dist"):
        pipeline = make_pipeline(PipelineSpec(PipelineKind[kind]), model, optimizer, CPU)
        quality = evaluate(pipeline, batches)
        assert quality.num_samples == 28
        assert quality == measure_quality(everything[:, 0], everything[:, 1])
    error = error_of(lambda: evaluate(pipeline, batches[: 3 - rank]))
    assert isinstance(error, ValueError)
    assert "got [3, 2]" in str(error)


def check_ddp_is_counted() -> None:
    """DDP's reducer starts its all-reduce from C++, in the middle of backward."""
    model = DistributedDataParallel(nn.Linear(100, 50, bias=False))
    for _ in range(2):
        loss = model(torch.rand(4, 100)).sum()
        with count_sent_bytes() as traffic:
            loss.backward()
        assert traffic.sent_bytes["all_reduce"] == 100 * 50 * 4
        assert traffic.total_bytes == 100 * 50 * 4


def test_training_on_two_ranks(tmp_path: Path) -> None:
    run_ranks(check_training, folder=tmp_path, timeout_s=120)
