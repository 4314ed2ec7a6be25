from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from hotrec.data.batch import Batch
from hotrec.runtime.ranks import Ranks
from hotrec.runtime.traffic import BatchFacts, find_distinct_rows
from hotrec.train.checkpoint import Checkpoints, StatefulLoader, find_latest
from hotrec.train.loop import TrainResult
from hotrec.train.schedule import Schedule
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
from tests.helpers.training import Cadence, train_model

EVERY_STEP = Cadence(log_every=1)


def run(
    ranks: Ranks, loader: StatefulLoader, cadence: Cadence = EVERY_STEP, **kwargs: Any
) -> TrainResult:
    model, optimizer = build_tiny()
    arguments = {"lr_factor": Schedule(), "cadence": cadence, **kwargs}
    return train_model(model, optimizer, loader, ranks, **arguments)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def inspect(batch: Batch) -> BatchFacts:
    tables = {name: (name, DIM) for name in NUM_ROWS}
    return BatchFacts(
        rows=find_distinct_rows(batch.sparse, tables),
        num_lookups=batch.sparse.values().numel(),
        num_hot_lookups=batch.labels.numel(),
    )


KEYS_OF_A_LINE = (
    "step num_samples loss lr samples_per_s step_p50_s step_p90_s stage_s exposed_communication_s "
    "data_wait_s sent_bytes between_hosts_bytes bound_bytes between_hosts_bound_bytes "
    "hot_lookup_frac peak_allocated_bytes peak_reserved_bytes "
    "peak_resident_bytes elapsed_s"
)


def test_records_of_a_run(one_rank: Ranks, tmp_path: Path) -> None:
    splits = {split: TinySplit(num, seed=num) for num, split in ((2, "valid"), (3, "test"))}
    result = run(
        one_rank,
        TinyLoader(num_batches=20, batch_size=8),
        Cadence(log_every=5, warmup_steps=3, eval_every=8),
        num_steps=20,
        eval_batches=splits,
        run_dir=tmp_path,
        inspect_batch=inspect,
        description={"name": "tiny", "hot_rows": 3},
    )
    lines = read_lines(tmp_path / "metrics.jsonl")
    found = [(line["step"], line["num_samples"]) for line in lines]
    assert found == [(5, 40), (10, 80), (15, 120), (20, 160)]
    # New figures may stand between them.
    assert " ".join(key for key in lines[0] if key in KEYS_OF_A_LINE.split()) == KEYS_OF_A_LINE
    assert lines[-1]["hot_lookup_frac"] == pytest.approx(1 / 3)
    assert lines[-1]["step_p50_s"] <= lines[-1]["step_p90_s"]
    evals = read_lines(tmp_path / "eval.jsonl")
    found = [(line["step"], line["split"]) for line in evals]
    assert found == [(8, "valid"), (16, "valid"), (20, "valid"), (20, "test")]
    assert evals[-1]["num_samples"] == 24
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary == result.summary
    expected = {
        "auc": evals[-1]["auc"],
        "loss": lines[-1]["loss"],
        "finished": True,
        "name": "tiny",
        "hot_rows": 3,
        "world_size": 1,
        "num_steps": 20,
    }
    assert expected.items() <= summary.items()
    assert not any(name.startswith("predicted") for name in summary)
    assert (result.step, result.is_finished) == (20, True)


class FakeCaches:
    """Counters of device caches that count steps, and a split that is read through the caches."""

    def __init__(self) -> None:
        self.num_steps = self.num_calls = self.num_begun = 0

    def factor(self, step: int) -> float:
        self.num_steps += 1  # asked for before each step
        return 1.0

    def __iter__(self) -> Iterator[Batch]:
        self.num_begun += 1
        if self.num_begun == 1:
            return iter([])  # begun once before the first step, without being read
        self.num_steps += 1000
        return iter([tiny_batch(1, 8)])

    def count(self) -> dict[str, float]:
        figures = {"num_rows": 10.0 * self.num_steps, "read_bytes": 3.0 * self.num_steps}
        self.num_steps = 0
        self.num_calls += 1
        return figures


def test_device_caches_are_counted_by_line_and_in_all(one_rank: Ranks, tmp_path: Path) -> None:
    caches = FakeCaches()
    result = run(
        one_rank,
        TinyLoader(num_batches=14),
        Cadence(log_every=6, check_every=4, eval_every=8),
        num_steps=14,
        lr_factor=caches.factor,
        eval_batches={"valid": caches},
        count_caches=caches.count,
        run_dir=tmp_path,
    )
    # Without what the evaluations after steps 8 and 14 read; steps 13 and 14 have no line.
    of_6 = {"num_steps": 6, "num_rows": 60, "read_bytes": 18}
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [(line["step"], line["cache"]) for line in lines] == [(6, of_6), (12, of_6)]
    assert result.summary["cache"] == {"num_steps": 14, "num_rows": 140, "read_bytes": 42}
    # After steps 4, 6, 8, 12, 14 and two evaluations: each call waits for the device.
    assert caches.num_calls == 7


PREDICTION = {"step_s": 1e6, "stage_s": {"dense": 1e6, "other": 0.0}, "total_sent_bytes": 0.0}


def test_stages_are_measured_and_set_against_the_prediction(
    one_rank: Ranks, tmp_path: Path
) -> None:
    summary = run(
        one_rank,
        TinyLoader(num_batches=20),
        Cadence(log_every=5, eval_every=10),
        num_steps=20,
        run_dir=tmp_path,
        prediction=PREDICTION,
        first_compared_step=12,
    ).summary
    assert "cache" not in summary  # no rank has one
    assert list(summary["measured_stage_s"]) == list(STAGES)
    assert summary["slowest_rank_stage_s"] == summary["measured_stage_s"]  # one rank
    assert summary["compared_from_step"] == 12
    measured_s = summary["measured_step_s"]
    assert 0 < summary["measured_stage_s"]["optimizer"] < measured_s
    assert summary["step_error_frac"] == pytest.approx((1e6 - measured_s) / measured_s)
    for line in read_lines(tmp_path / "metrics.jsonl"):
        assert list(line["stage_s"]) == list(STAGES)
        assert sum(line["stage_s"].values()) > 0


def test_a_short_run_says_that_it_was_not_compared(one_rank: Ranks, tmp_path: Path) -> None:
    loader = TinyLoader(num_batches=6)
    summary = run(one_rank, loader, num_steps=6, run_dir=tmp_path, prediction=PREDICTION).summary
    assert (summary["compared_from_step"], summary["predicted_step_s"]) == (50, 1e6)
    for name in ("measured_stage_s", "slowest_rank_stage_s", "measured_step_s", "step_error_frac"):
        assert summary[name] is None
    # The first step fills the pipeline, the third is counted, the last drains it.
    stages = {line["step"]: line["stage_s"] for line in read_lines(tmp_path / "metrics.jsonl")}
    assert [step for step, stage_s in stages.items() if stage_s is None] == [1, 3, 6]


def losses_by_step(path: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in read_lines(path / "metrics.jsonl")}


@pytest.mark.slow
def test_logged_loss_is_that_of_the_step(one_rank: Ranks, tmp_path: Path) -> None:
    for log_every in (1, 7):
        loader, cadence = TinyLoader(num_batches=15), Cadence(log_every=log_every)
        run(one_rank, loader, cadence, num_steps=15, run_dir=tmp_path / str(log_every))
    every = losses_by_step(tmp_path / "1")
    assert losses_by_step(tmp_path / "7") == {step: every[step] for step in (7, 14)}


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
    weights = {name: table(model, name) for name in ("table_wise", "row_wise", "data_parallel")}
    weights["dense"] = model.module.dlrm.dense_arch.model._mlp[0]._linear.bias
    seen: list[dict[str, torch.Tensor]] = []

    def factor(step: int) -> float:
        seen.append({name: weight.detach().clone() for name, weight in weights.items()})
        return lr_factor(step)

    arguments = {"num_steps": 6, "cadence": Cadence(), "lr_factor": factor}
    train_model(model, optimizer, loader, one_rank, pipeline_kind=kind, **arguments)
    factor(6)
    for name in weights:
        updates = [before[name] - after[name] for before, after in pairwise(seen)]
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


def test_too_little_data_or_nothing_to_train_is_refused(one_rank: Ranks) -> None:
    with pytest.raises(RuntimeError, match="got the end of the data"):
        run(one_rank, TinyLoader(num_batches=5), num_steps=6)
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["base", "sparse_dist"])
def test_sigterm_saves_where_weights_and_loader_agree_and_resume_is_bitwise(
    kind: str, one_rank: Ranks, tmp_path: Path
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run(one_rank, TinyLoader(num_batches=30), num_steps=30, run_dir=whole)
    before = signal.getsignal(signal.SIGTERM)
    loader = LoaderWithSigterm(num_batches=30)
    checkpoints = Checkpoints(tmp_path / "checkpoints", facts={})
    arguments = {"num_steps": 30, "pipeline_kind": kind, "run_dir": cut}
    late_stop = Cadence(log_every=4, check_every=4)
    stopped = run(one_rank, loader, late_stop, checkpoints=checkpoints, **arguments)
    assert signal.getsignal(signal.SIGTERM) is before
    assert (stopped.is_finished, stopped.summary["finished"]) == (False, False)
    assert 7 <= stopped.step <= 7 + 4 + 2
    # Exactly behind the last update: no batch was taken that was not computed.
    assert loader.position == stopped.step
    latest = find_latest(tmp_path / "checkpoints")
    assert latest is not None
    assert latest.name == f"step-{stopped.step:08d}"
    checkpoints = replace(checkpoints, resume_from=latest)
    resumed = run(one_rank, TinyLoader(num_batches=30), checkpoints=checkpoints, **arguments)
    assert resumed.is_finished
    assert resumed.summary["num_samples"] == 30 * 8
    expected, again = losses_by_step(whole), losses_by_step(cut)
    assert set(range(stopped.step + 1, 31)) <= set(again)
    assert again == {step: expected[step] for step in again}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["base", "sparse_dist"])
def test_saving_by_time_changes_no_loss_and_skips_no_evaluation(
    kind: str, one_rank: Ranks, tmp_path: Path
) -> None:
    evals = {"valid": TinySplit(num_batches=2, seed=4)}
    arguments = {"num_steps": 30, "pipeline_kind": kind, "eval_batches": evals}
    cadence = Cadence(log_every=1, check_every=3, eval_every=5)
    run(one_rank, TinyLoader(num_batches=30), cadence, run_dir=tmp_path / "whole", **arguments)
    checkpoints = Checkpoints(tmp_path / "checkpoints", facts={}, keep_last=100)
    often = replace(cadence, save_every_s=1e-6)
    arguments |= {"run_dir": tmp_path / "often", "checkpoints": checkpoints}
    assert run(one_rank, TinyLoader(num_batches=30), often, **arguments).is_finished
    for name, value in (("metrics.jsonl", "loss"), ("eval.jsonl", "auc")):
        lines, expected = (read_lines(tmp_path / run / name) for run in ("often", "whole"))
        keys = ("step", value)
        assert [[line[k] for k in keys] for line in lines] == [
            [line[k] for k in keys] for line in expected
        ]
    saved = sorted(int(path.name[5:]) for path in checkpoints.directory.glob("step-*"))
    assert len(saved) > 9, "every check-up ends with a checkpoint"
    # Any of them goes on as if nothing had happened.
    middle = checkpoints.directory / f"step-{saved[4]:08d}"
    arguments |= {"checkpoints": replace(checkpoints, resume_from=middle)}
    arguments |= {"run_dir": tmp_path / "again"}
    assert run(one_rank, TinyLoader(num_batches=30), cadence, **arguments).is_finished
    again = losses_by_step(tmp_path / "again")
    assert min(again) == saved[4] + 1
    assert again == {step: losses_by_step(tmp_path / "whole")[step] for step in again}


@pytest.mark.slow
def test_a_resumed_run_draws_the_numbers_of_an_uninterrupted_one(
    one_rank: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[float] = []
    forward = TinyModel.forward

    def draw(model: TinyModel, batch: Batch) -> Any:  # as dropout does
        drawn.append(torch.rand(()).item())
        return forward(model, batch)

    monkeypatch.setattr(TinyModel, "forward", draw)
    checkpoints = Checkpoints(tmp_path, facts={}, keep_last=9)
    arguments: dict[str, Any] = {"num_steps": 6, "pipeline_kind": "base"}
    arguments["cadence"] = Cadence(save_every=4)
    run(one_rank, TinyLoader(num_batches=6), checkpoints=checkpoints, **arguments)
    expected = drawn[4:]
    drawn.clear()
    torch.manual_seed(99)
    checkpoints = replace(checkpoints, resume_from=tmp_path / "step-00000004")
    run(one_rank, TinyLoader(num_batches=6), checkpoints=checkpoints, **arguments)
    assert len(expected) == 2
    assert drawn == expected


@pytest.mark.slow
def test_no_checkpoint_by_time_where_it_is_off(one_rank: Ranks, tmp_path: Path) -> None:
    for save_every_s in (0.0, 1e6):
        checkpoints = Checkpoints(tmp_path / str(save_every_s), facts={}, keep_last=100)
        cadence = Cadence(log_every=1, check_every=1, save_every_s=save_every_s)
        run(one_rank, TinyLoader(num_batches=9), cadence, num_steps=9, checkpoints=checkpoints)
        assert [path.name for path in checkpoints.directory.glob("step-*")] == ["step-00000009"]


class LoaderWithSignals(TinyLoader):
    """Sends signals to this process when it hands out its batch number 7."""

    numbers: tuple[signal.Signals, ...] = ()

    def __iter__(self) -> Iterator[Batch]:
        for batch in super().__iter__():
            if self.position == 7:
                for number in self.numbers:
                    signal.raise_signal(number)
            yield batch


@pytest.mark.slow
def test_sigint_saves_like_sigterm_and_twice_ends_at_once(one_rank: Ranks, tmp_path: Path) -> None:
    term, interrupt = signal.SIGTERM, signal.SIGINT
    before = signal.signal(interrupt, signal.default_int_handler)
    try:
        for numbers, code in (
            ((interrupt,), 130),
            ((term,), 143),
            ((interrupt, term), 130),
            ((term, term), 143),
        ):
            loader = LoaderWithSignals(num_batches=30)
            loader.numbers = numbers
            checkpoints = Checkpoints(tmp_path / str(numbers), facts={})
            stopped = run(one_rank, loader, num_steps=30, checkpoints=checkpoints)
            assert (stopped.is_finished, stopped.exit_code) == (False, code)
            latest = find_latest(checkpoints.directory)
            assert latest is not None
            assert latest.name == f"step-{stopped.step:08d}"
            assert signal.getsignal(interrupt) is signal.default_int_handler
        for numbers in ((interrupt, interrupt), (term, interrupt)):
            loader = LoaderWithSignals(num_batches=30)
            loader.numbers = numbers
            with pytest.raises(KeyboardInterrupt):
                run(one_rank, loader, num_steps=30)
        # A job in the background.
        signal.signal(interrupt, signal.SIG_IGN)
        loader = LoaderWithSignals(num_batches=30)
        loader.numbers = (interrupt,)
        assert run(one_rank, loader, num_steps=30).exit_code == 0
    finally:
        signal.signal(interrupt, before)


class TinyStream(IterableDataset[Batch]):
    def __init__(self, num_batches: int) -> None:
        super().__init__()
        self.num_batches = num_batches

    def __iter__(self) -> Iterator[Batch]:
        for seed in range(self.num_batches):
            yield tiny_batch(seed, 8, num_global_samples=8)


class StreamLoader(DataLoader[Batch]):
    """With a position, as a checkpoint needs it; nothing resumes from it."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError


@pytest.mark.slow
def test_loader_workers_outlive_the_sigterm_of_their_process_group(
    one_rank: Ranks, tmp_path: Path
) -> None:
    """torchrun signals the whole group; the rank still needs its workers to get to a safe step."""
    loader = StreamLoader(TinyStream(40), batch_size=None, num_workers=1)

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
    checkpoints = Checkpoints(tmp_path, facts={})
    evals = {"eval_batches": {"valid": TinySplit(num_batches=2, seed=1)}}
    first = run(one_rank, TinyLoader(num_batches=4), num_steps=4, checkpoints=checkpoints, **evals)
    resuming = {"checkpoints": replace(checkpoints, resume_from=tmp_path / "step-00000004")}
    again = run(one_rank, TinyLoader(num_batches=4), num_steps=4, **resuming, **evals)
    assert (again.step, again.summary["auc"]) == (4, first.summary["auc"])
    with pytest.raises(ValueError, match="num_steps of at least 4, got 3"):
        run(one_rank, TinyLoader(num_batches=4), num_steps=3, **resuming)


def end_on_sigterm(_: int) -> None:
    """It is held back where loaders start, and a worker that is left at exit gets it."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


@pytest.mark.slow
def test_no_process_is_forked_between_steps(
    one_rank: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads of the process group may run Python code then, in which a child would hang."""
    events: list[str] = []
    frozen: list[int] = []
    fork = os.fork

    def noted_fork() -> int:
        events.append("fork")
        return fork()

    def factor(_: int) -> float:
        events.append("step")
        frozen.append(gc.get_freeze_count())
        return 1.0

    monkeypatch.setattr(os, "fork", noted_fork)
    split = StreamLoader(
        TinyStream(1),
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
    # What lives after the first step is left out of garbage collection, until the end.
    assert frozen[0] == gc.get_freeze_count() == 0
    assert frozen[1] > 100_000
