from __future__ import annotations

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
from torch.utils.data import DataLoader, IterableDataset

from hotrec.data.batch import Batch
from hotrec.runtime.ranks import Ranks
from hotrec.runtime.traffic import BatchFacts, find_distinct_rows
from hotrec.train.checkpoint import Checkpoints, StatefulLoader, find_latest
from hotrec.train.loop import TrainResult
from hotrec.train.schedule import Schedule
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
    assert (result.step, result.is_finished) == (20, True)


PREDICTION = {"step_s": 1e6, "stage_s": {"dense": 1e6, "other": 0.0}, "total_sent_bytes": 0.0}


def test_a_short_run_says_that_it_was_not_compared(one_rank: Ranks, tmp_path: Path) -> None:
    loader = TinyLoader(num_batches=6)
    summary = run(one_rank, loader, num_steps=6, run_dir=tmp_path, prediction=PREDICTION).summary
    assert (summary["compared_from_step"], summary["predicted_step_s"]) == (50, 1e6)
    assert summary["measured_step_s"] is summary["step_error_frac"] is None


def losses_by_step(path: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in read_lines(path / "metrics.jsonl")}


def test_loss_that_is_not_finite_names_its_step(one_rank: Ranks) -> None:
    loader = TinyLoader(num_batches=20)
    make_batch = loader.batch

    def batch(index: int) -> Batch:
        made = make_batch(index)
        made.dense[0, 0] = float("inf") if index == 12 else 0.5
        return made

    loader.batch = batch  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="step 13:"):
        run(one_rank, loader, Cadence(log_every=20, check_every=5), num_steps=20)


def test_too_little_data_or_nothing_to_train_is_refused(one_rank: Ranks) -> None:
    with pytest.raises(RuntimeError, match="end of the data"):
        run(one_rank, TinyLoader(num_batches=5), num_steps=6)
    with pytest.raises(ValueError, match="num_steps"):
        run(one_rank, TinyLoader(num_batches=5), num_steps=0)


class LoaderWithSignals(TinyLoader):
    """Sends signals to this process when it hands out its batch number 7."""

    numbers: tuple[signal.Signals, ...] = (signal.SIGTERM,)

    def __iter__(self) -> Iterator[Batch]:
        for batch in super().__iter__():
            if self.position == 7:
                for number in self.numbers:
                    signal.raise_signal(number)
            yield batch


@pytest.mark.slow
def test_sigterm_saves_where_weights_and_loader_agree_and_resume_is_bitwise(
    one_rank: Ranks, tmp_path: Path
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run(one_rank, TinyLoader(num_batches=30), num_steps=30, run_dir=whole)
    before = signal.getsignal(signal.SIGTERM)
    loader = LoaderWithSignals(num_batches=30)
    checkpoints = Checkpoints(tmp_path / "checkpoints", facts={})
    arguments = {"num_steps": 30, "run_dir": cut}
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
def test_sigint_saves_like_sigterm_and_twice_ends_at_once(one_rank: Ranks, tmp_path: Path) -> None:
    term, interrupt = signal.SIGTERM, signal.SIGINT
    before = signal.signal(interrupt, signal.default_int_handler)

    def stop(*numbers: signal.Signals) -> TrainResult:
        loader = LoaderWithSignals(num_batches=14)
        loader.numbers = numbers
        checkpoints = Checkpoints(tmp_path / str(numbers), facts={})
        stopped = run(one_rank, loader, num_steps=14, checkpoints=checkpoints)
        latest = find_latest(checkpoints.directory)
        assert latest is not None
        assert latest.name == f"step-{stopped.step:08d}"
        return stopped

    try:
        for numbers, code in (((interrupt,), 130), ((interrupt, term), 130), ((term, term), 143)):
            stopped = stop(*numbers)
            assert (stopped.is_finished, stopped.exit_code) == (False, code)
            assert signal.getsignal(interrupt) is signal.default_int_handler
        for first in (interrupt, term):
            with pytest.raises(KeyboardInterrupt):
                stop(first, interrupt)
        signal.signal(interrupt, signal.SIG_IGN)  # a job in the background
        assert stop(interrupt).exit_code == 0
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
    with pytest.raises(ValueError, match="num_steps"):
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
    fork = os.fork

    def noted_fork() -> int:
        events.append("fork")
        return fork()

    def factor(_: int) -> float:
        events.append("step")
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
