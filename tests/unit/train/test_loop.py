from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from hotrec.data.batch import Batch
from hotrec.runtime.ranks import Ranks
from hotrec.runtime.traffic import BatchFacts, count_distinct_rows
from hotrec.train.checkpoint import Checkpoints, StatefulLoader, find_latest
from hotrec.train.loop import TrainResult, train
from hotrec.train.schedule import Cadence, Schedule
from hotrec.types import STAGES
from tests.helpers.tiny import (
    DIM,
    NUM_ROWS,
    TinyLoader,
    TinyModel,
    TinySplit,
    build_tiny,
    tiny_batch,
)

EVERY_STEP = Cadence(log_every=1)


def run(
    ranks: Ranks, loader: StatefulLoader, cadence: Cadence = EVERY_STEP, **kwargs: Any
) -> TrainResult:
    model, optimizer = build_tiny()
    arguments = {"lr_factor": Schedule(), "cadence": cadence, **kwargs}
    return train(model, optimizer, loader, ranks, **arguments)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def inspect(batch: Batch) -> BatchFacts:
    tables = {name: (name, DIM) for name in NUM_ROWS}
    return BatchFacts(
        num_distinct=count_distinct_rows(batch.sparse, tables),
        num_lookups=batch.sparse.values().numel(),
        num_hot_lookups=batch.labels.numel(),
    )


def test_records_of_a_run(one_rank: Ranks, tmp_path: Path) -> None:
    result = run(
        one_rank,
        TinyLoader(num_batches=20, batch_size=8),
        Cadence(log_every=5, warmup_steps=3, eval_every=8),
        num_steps=20,
        eval_batches={
            "valid": TinySplit(num_batches=2, seed=1),
            "test": TinySplit(num_batches=3, seed=2),
        },
        run_dir=tmp_path,
        inspect_batch=inspect,
        description={"name": "tiny", "placement": "torchrec", "hot_rows": 3},
    )
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [5, 10, 15, 20]
    assert [line["num_samples"] for line in lines] == [40, 80, 120, 160]
    assert set(lines[0]) == {
        "step",
        "num_samples",
        "loss",
        "lr",
        "samples_per_s",
        "step_p50_s",
        "step_p90_s",
        "stage_s",
        "exposed_communication_s",
        "data_wait_s",
        "sent_bytes",
        "bound_bytes",
        "hot_lookup_frac",
        "peak_allocated_bytes",
        "peak_reserved_bytes",
        "peak_resident_bytes",
        "elapsed_s",
    }
    assert lines[-1]["hot_lookup_frac"] == pytest.approx(1 / 3)
    assert lines[-1]["step_p50_s"] <= lines[-1]["step_p90_s"]
    evals = read_lines(tmp_path / "eval.jsonl")
    assert [(line["step"], line["split"]) for line in evals] == [
        (8, "valid"),
        (16, "valid"),
        (20, "valid"),
        (20, "test"),
    ]
    assert evals[-1]["num_samples"] == 24
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary == result.summary
    assert summary["auc"] == evals[-1]["auc"]
    assert summary["loss"] == lines[-1]["loss"]
    assert summary["finished"] is True
    assert (summary["name"], summary["hot_rows"], summary["world_size"]) == ("tiny", 3, 1)
    assert result.step == 20
    assert result.is_finished


class FakeCaches:
    """What device caches would tell; ``factor`` is asked for before each step."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_calls = 0

    def factor(self, step: int) -> float:
        self.num_steps += 1
        return 1.0

    def evaluation(self) -> list[Batch]:
        self.num_steps += 1000
        return [tiny_batch(1, 8)]

    def count(self) -> dict[str, float]:
        figures = {"num_rows": 10.0 * self.num_steps, "read_bytes": 3.0 * self.num_steps}
        self.num_steps = 0
        self.num_calls += 1
        return figures


class CachedSplit:
    """A split that is read through the caches."""

    def __init__(self, caches: FakeCaches) -> None:
        self.caches = caches
        self.num_begun = 0

    def __iter__(self) -> Iterator[Batch]:
        self.num_begun += 1
        # Begun once before the first step, without being read.
        return iter(self.caches.evaluation() if self.num_begun > 1 else [])


def test_device_caches_are_counted_by_line_and_in_all(one_rank: Ranks, tmp_path: Path) -> None:
    caches = FakeCaches()
    result = run(
        one_rank,
        TinyLoader(num_batches=14),
        Cadence(log_every=6, check_every=4, eval_every=8),
        num_steps=14,
        lr_factor=caches.factor,
        eval_batches={"valid": CachedSplit(caches)},
        count_caches=caches.count,
        run_dir=tmp_path,
    )

    def of_steps(num_steps: int) -> dict[str, int]:
        return {
            "num_steps": num_steps,
            "num_rows": 10 * num_steps,
            "read_bytes": 3 * num_steps,
        }

    lines = read_lines(tmp_path / "metrics.jsonl")
    # Without what the evaluations after steps 8 and 14 read; steps 13 and 14 have no line.
    assert [(line["step"], line["cache"]) for line in lines] == [
        (6, of_steps(6)),
        (12, of_steps(6)),
    ]
    assert result.summary["cache"] == of_steps(14)
    assert json.loads((tmp_path / "summary.json").read_text()) == result.summary
    # After steps 4, 6, 8, 12, 14 and two evaluations: each call waits for the device.
    assert caches.num_calls == 7


def test_without_device_caches_there_is_no_key(one_rank: Ranks, tmp_path: Path) -> None:
    result = run(one_rank, TinyLoader(num_batches=6), num_steps=6, run_dir=tmp_path)
    assert "cache" not in result.summary
    assert not any("cache" in line for line in read_lines(tmp_path / "metrics.jsonl"))


PREDICTION = {"step_s": 1e6, "stage_s": {"dense": 1e6, "other": 0.0}, "total_sent_bytes": 0.0}


def test_stages_are_measured_and_set_against_the_prediction(
    one_rank: Ranks, tmp_path: Path
) -> None:
    result = run(
        one_rank,
        TinyLoader(num_batches=20),
        Cadence(log_every=5, eval_every=10),
        num_steps=20,
        run_dir=tmp_path,
        prediction=PREDICTION,
        first_compared_step=12,
    )
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary == result.summary
    assert list(summary["measured_stage_s"]) == list(STAGES)
    assert summary["slowest_rank_stage_s"] == summary["measured_stage_s"]  # one rank
    assert summary["compared_from_step"] == 12
    assert summary["predicted_stage_s"] == PREDICTION["stage_s"]
    measured_s = summary["measured_step_s"]
    assert 0 < summary["measured_stage_s"]["optimizer"] < measured_s
    assert summary["step_error_frac"] == pytest.approx((1e6 - measured_s) / measured_s)
    assert summary["predicted_sent_bytes"] == 0.0
    for line in read_lines(tmp_path / "metrics.jsonl"):
        assert list(line["stage_s"]) == list(STAGES)
        assert sum(line["stage_s"].values()) > 0


def test_a_short_run_says_that_it_was_not_compared(one_rank: Ranks, tmp_path: Path) -> None:
    loader = TinyLoader(num_batches=6)
    result = run(one_rank, loader, num_steps=6, run_dir=tmp_path, prediction=PREDICTION)
    summary = result.summary
    assert summary["compared_from_step"] == 50
    assert summary["predicted_step_s"] == 1e6
    for name in ("measured_stage_s", "slowest_rank_stage_s", "measured_step_s", "step_error_frac"):
        assert summary[name] is None
    # The first step fills the pipeline, the third is counted, the last drains it.
    stages = {line["step"]: line["stage_s"] for line in read_lines(tmp_path / "metrics.jsonl")}
    assert [step for step, stage_s in stages.items() if stage_s is None] == [1, 3, 6]


def test_without_a_prediction_the_stages_are_still_there(one_rank: Ranks) -> None:
    result = run(one_rank, TinyLoader(num_batches=6), num_steps=6, first_compared_step=1)
    assert result.summary["measured_step_s"] > 0
    assert not any(name.startswith("predicted") for name in result.summary)


def test_logged_loss_is_that_of_the_step(one_rank: Ranks, tmp_path: Path) -> None:
    for name, log_every in (("all", 1), ("some", 7)):
        run(
            one_rank,
            TinyLoader(num_batches=15),
            Cadence(log_every=log_every),
            num_steps=15,
            run_dir=tmp_path / name,
        )
    every = {line["step"]: line["loss"] for line in read_lines(tmp_path / "all/metrics.jsonl")}
    some = {line["step"]: line["loss"] for line in read_lines(tmp_path / "some/metrics.jsonl")}
    assert some == {step: every[step] for step in (7, 14)}


class LinearModel(TinyModel):
    """Every weight read has the same gradient in every step, so an SGD update shows its rate."""

    def forward(
        self, batch: Batch
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        pooled = self.dlrm.sparse_arch.embedding_bag_collection(batch.sparse).values()
        rows = self.rows(batch.sparse)["row_wise"].values()
        dense = self.dlrm.dense_arch.model._mlp[0]._linear(batch.dense)
        logits = pooled.sum(1) + rows.sum(1) + dense.sum(1)
        return logits.sum(), (logits.sum().detach(), logits.detach(), batch.labels)


@pytest.mark.parametrize("kind", ["base", "sparse_dist"])
def test_every_part_takes_update_t_with_the_rate_of_t(
    kind: str, one_rank: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TinyModel, "forward", LinearModel.forward)
    # Doubles from update to update, so a rate that comes a step late is off by a factor of 2.
    lr_factor = {step: 2.0 ** (step - 6) for step in range(1, 7)}.__getitem__
    batch = TinyLoader(num_batches=1).batch(0)
    loader = TinyLoader(num_batches=6)
    loader.batch = lambda index: batch  # type: ignore[method-assign]
    model, optimizer = build_tiny(optimizer=torch.optim.SGD, lr=0.5)
    weights = {
        "fused table-wise": table(model, "table_wise"),
        "fused row-wise": table(model, "row_wise"),
        "data-parallel": table(model, "data_parallel"),
        "dense": model.module.dlrm.dense_arch.model._mlp[0]._linear.bias,
    }
    seen = {name: [weight.detach().clone()] for name, weight in weights.items()}

    def factor(step: int) -> float:
        if step > 1:
            for name, weight in weights.items():
                seen[name].append(weight.detach().clone())
        return lr_factor(step)

    train(
        model,
        optimizer,
        loader,
        one_rank,
        num_steps=6,
        cadence=Cadence(),
        lr_factor=factor,
        pipeline_kind=kind,
    )
    for name, weight in weights.items():
        seen[name].append(weight.detach().clone())
        updates = [
            before - after for before, after in zip(seen[name], seen[name][1:], strict=False)
        ]
        gradient = updates[0] / (0.5 * lr_factor(1))
        assert gradient.abs().max() > 0.5, name
        for step, update in enumerate(updates, start=1):
            torch.testing.assert_close(
                update, 0.5 * lr_factor(step) * gradient, rtol=1e-3, atol=1e-6, msg=name
            )


def table(model: torch.nn.Module, name: str) -> torch.Tensor:
    (found,) = (value for key, value in model.named_parameters() if key.endswith(f"{name}.weight"))
    return found


def test_loss_that_is_not_finite_names_its_step(one_rank: Ranks) -> None:
    loader = TinyLoader(num_batches=20)
    make_batch = loader.batch

    def batch(index: int) -> Batch:
        made = make_batch(index)
        made.dense[0, 0] = float("inf") if index == 12 else 0.5
        return made

    loader.batch = batch  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="step 13: expected a finite loss, got"):
        run(one_rank, loader, Cadence(log_every=20, check_every=5), num_steps=20)


def test_data_that_ends_early_is_an_error(one_rank: Ranks) -> None:
    with pytest.raises(RuntimeError, match="got the end of the data"):
        run(one_rank, TinyLoader(num_batches=5), num_steps=6)


def test_nothing_to_train_is_refused(one_rank: Ranks) -> None:
    with pytest.raises(ValueError, match="num_steps of at least 1, got 0"):
        run(one_rank, TinyLoader(num_batches=5), num_steps=0)


class LoaderWithSigterm(TinyLoader):
    """Sends SIGTERM to this process when it hands out its batch number ``at``."""

    at = 7

    def __iter__(self) -> Iterator[Batch]:
        for batch in super().__iter__():
            if self.position == self.at:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch


@pytest.mark.parametrize("kind", ["base", "sparse_dist"])
def test_sigterm_saves_where_weights_and_loader_agree_and_resume_is_bitwise(
    kind: str, one_rank: Ranks, tmp_path: Path
) -> None:
    run(one_rank, TinyLoader(num_batches=30), num_steps=30, run_dir=tmp_path / "whole")
    whole = {line["step"]: line["loss"] for line in read_lines(tmp_path / "whole/metrics.jsonl")}
    before = signal.getsignal(signal.SIGTERM)
    loader = LoaderWithSigterm(num_batches=30)
    checkpoints = Checkpoints(tmp_path / "checkpoints", facts={})
    stopped = run(
        one_rank,
        loader,
        Cadence(log_every=4, check_every=4),  # so that the stop comes late
        num_steps=30,
        pipeline_kind=kind,
        checkpoints=checkpoints,
        run_dir=tmp_path / "cut",
    )
    assert signal.getsignal(signal.SIGTERM) is before
    assert not stopped.is_finished
    assert stopped.summary["finished"] is False
    assert 7 <= stopped.step <= 7 + 4 + 2
    # Exactly behind the last update: no batch was taken that was not computed.
    assert loader.position == stopped.step
    latest = find_latest(tmp_path / "checkpoints")
    assert latest is not None
    assert latest.name == f"step-{stopped.step:08d}"
    resumed = run(
        one_rank,
        TinyLoader(num_batches=30),
        num_steps=30,
        pipeline_kind=kind,
        checkpoints=replace(checkpoints, resume_from=latest),
        run_dir=tmp_path / "cut",
    )
    assert resumed.is_finished
    assert resumed.summary["num_samples"] == 30 * 8
    again = {line["step"]: line["loss"] for line in read_lines(tmp_path / "cut/metrics.jsonl")}
    assert set(range(stopped.step + 1, 31)) <= set(again)
    assert again == {step: whole[step] for step in again}


class TinyStream(IterableDataset[Batch]):
    def __iter__(self) -> Iterator[Batch]:
        for seed in range(40):
            yield tiny_batch(seed, 8, num_global_samples=8)


def test_loader_workers_outlive_the_sigterm_of_their_process_group(
    one_rank: Ranks, tmp_path: Path
) -> None:
    """torchrun signals the whole group; the rank still needs its workers to get to a safe step."""
    loader = StatefulDataLoader(TinyStream(), batch_size=None, num_workers=1)

    def factor(step: int) -> float:
        if step == 3:
            workers = multiprocessing.active_children()
            assert len(workers) == 1
            for process_id in (workers[0].pid, os.getpid()):
                os.kill(process_id, signal.SIGTERM)
        return 1.0

    stopped = run(
        one_rank,
        loader,
        Cadence(check_every=20),
        num_steps=40,
        lr_factor=factor,
        checkpoints=Checkpoints(tmp_path, facts={}),
    )
    assert not stopped.is_finished
    assert 20 <= stopped.step <= 23


def test_run_that_is_already_finished_is_evaluated_again(one_rank: Ranks, tmp_path: Path) -> None:
    evals = {"valid": TinySplit(num_batches=2, seed=1)}
    checkpoints = Checkpoints(tmp_path, facts={})
    first = run(
        one_rank,
        TinyLoader(num_batches=4),
        num_steps=4,
        checkpoints=checkpoints,
        eval_batches=evals,
    )
    resuming = replace(checkpoints, resume_from=tmp_path / "step-00000004")
    again = run(
        one_rank, TinyLoader(num_batches=4), num_steps=4, checkpoints=resuming, eval_batches=evals
    )
    assert again.summary["auc"] == first.summary["auc"]
    assert again.step == 4
    with pytest.raises(ValueError, match="num_steps of at least 4, got 3"):
        run(one_rank, TinyLoader(num_batches=4), num_steps=3, checkpoints=resuming)


def test_garbage_is_collected_as_before_afterwards(one_rank: Ranks) -> None:
    frozen = []

    def factor(step: int) -> float:
        frozen.append(gc.get_freeze_count())
        return 1.0

    run(one_rank, TinyLoader(num_batches=3), num_steps=3, lr_factor=factor)
    assert frozen[0] == 0
    assert frozen[1] > 100_000
    assert gc.get_freeze_count() == 0


class OneBatch(IterableDataset[Batch]):
    """What a worker process reads of a split."""

    def __iter__(self) -> Iterator[Batch]:
        return iter([tiny_batch(0, 8)])


def end_on_sigterm(_: int) -> None:
    """It is held back where loaders start, and a worker that is left at exit gets it."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def test_no_process_is_forked_between_steps(
    one_rank: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads of the process group may run Python code then, in which a child would hang."""
    events: list[str] = []
    fork = os.fork

    def noted_fork() -> int:
        events.append("fork")
        return fork()

    def factor(_: int) -> float:
        events.append("step")
        return 1.0

    monkeypatch.setattr(os, "fork", noted_fork)
    split = StatefulDataLoader(
        OneBatch(),
        batch_size=None,
        num_workers=1,
        persistent_workers=True,
        worker_init_fn=end_on_sigterm,
    )
    run(
        one_rank,
        TinyLoader(num_batches=6),
        Cadence(log_every=1, eval_every=2),
        num_steps=6,
        lr_factor=factor,
        eval_batches={"valid": split},
        run_dir=tmp_path,
    )
    assert len(read_lines(tmp_path / "eval.jsonl")) == 3
    assert events[0] == "fork"
    assert set(events[1:]) == {"step"}
