"""The training loop: segments -> batches -> one TorchRec step each -> records, evaluation, saving.

Evaluation and checkpoints happen only between segments, where the pipeline is drained: weights,
loader position and step then agree exactly. After an exception no rank starts another collective.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchrec.optim.keyed import KeyedOptimizer
from tqdm import tqdm

from hotrec.data.batch import Batch
from hotrec.runtime import watchdog
from hotrec.runtime.ranks import Ranks, same_verdict
from hotrec.runtime.traffic import BatchFacts, count_dense_values
from hotrec.train.alternate import Alternation
from hotrec.train.checkpoint import (
    Checkpoints,
    Position,
    StatefulLoader,
    load_checkpoint,
    restore_random_state,
    save_checkpoint,
)
from hotrec.train.evaluate import evaluate
from hotrec.train.peak_memory import Tables
from hotrec.train.pipelines import LookAhead, Pipeline, make_pipeline
from hotrec.train.run_log import RunLog, SegmentBatches
from hotrec.train.schedule import Cadence, segments, set_learning_rates
from hotrec.train.stage_times import FIRST_COMPARED_STEP
from hotrec.train.step_log import Records
from hotrec.train.trace import Tracer, TraceWindow
from hotrec.train.watch import StopRequest, TrafficMeter, sigterm_held_back, stop_on_sigterm

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainResult:
    """How a run ended.

    Args:
        step: updates made, counted from the very first one.
        is_finished: all steps were made; else SIGTERM ended the run after a checkpoint, and the
            program should exit with ``hotrec.train.watch.STOPPED_EXIT_CODE``.
        summary: what summary.json holds. Times are those of this rank; the rest is the same on
            every rank.
    """

    step: int
    is_finished: bool
    summary: Mapping[str, Any]


def train(
    model: nn.Module,
    optimizer: KeyedOptimizer,
    train_loader: StatefulLoader,
    ranks: Ranks,
    *,
    num_steps: int,
    cadence: Cadence,
    lr_factor: Callable[[int], float],
    pipeline_kind: str = "sparse_dist",
    look_ahead: LookAhead | None = None,
    grad_clip_norm: float | None = None,
    eval_batches: Mapping[str, Iterable[Batch]] | None = None,
    checkpoints: Checkpoints | None = None,
    check_replicas: Callable[[], None] | None = None,
    count_tables: Callable[[], Tables] | None = None,
    count_caches: Callable[[], Mapping[str, float]] | None = None,
    run_dir: Path | None = None,
    inspect_batch: Callable[[Batch], BatchFacts] | None = None,
    description: Mapping[str, Any] | None = None,
    prediction: Mapping[str, Any] | None = None,
    first_compared_step: int = FIRST_COMPARED_STEP,
    alternation: Alternation | None = None,
    trace: TraceWindow | None = None,
) -> TrainResult:
    """Train a sharded model until ``num_steps`` updates are made, those before a resume included.

    To be called on every rank with the same arguments, but for the loaders, which hold its own
    samples. The same seed, data and arguments give the same losses, resumed or not.

    Args:
        model: sharded; ``model(batch)`` returns ``(loss, (loss, logits (B,), labels (B,)))``.
        optimizer: of all parts; its groups' rates are those that ``lr_factor`` scales.
        train_loader: holds the batches of all ``num_steps`` updates.
        lr_factor: update number, from 1 -> factor, e.g. a ``Schedule``.
        pipeline_kind: see ``make_pipeline``.
        look_ahead: what the pipeline look_ahead needs; None for others.
        grad_clip_norm: see ``make_pipeline``.
        eval_batches: by name of the split; begun once before the first step, and anew for each
            evaluation. The first is evaluated on the way, all at the end; the last one's is told.
        checkpoints: where to save and what to resume from; None for neither.
        check_replicas: raises on every rank if replicated rows differ between ranks.
        count_tables: the memory of this rank's tables, for the summary.
        count_caches: what this rank's device caches did since it was called last, to be added up
            over ranks: the same names on each, zeros where it has no cache. None if no rank has.
        run_dir: where rank 0 writes its records; None for none.
        inspect_batch: what a batch reads, for the traffic bound and the hot-lookup fraction.
        description: added to summary.json as it is (name, placement, model, batch_size, ...).
        prediction: "step_s", "stage_s" by stage, "total_sent_bytes", "memory" by rank; the summary
            is set against it.
        first_compared_step: from which on, counted from this start; those before warm up.
        alternation: told of every evaluation on the way; its state is the loader's.
        trace: The steps to record with torch.profiler; None records nothing.

    Raises:
        ValueError: if nothing is left to train; ArtifactError if the checkpoint does not fit.
        RuntimeError: if a loss is not finite, the data ends early, or a module is not pipelined.
    """
    with _logged_with_rank(ranks), stop_on_sigterm() as stop_request:
        splits = _start_workers(eval_batches or {})
        start, train_batches = _start(model, optimizer, train_loader, num_steps, checkpoints)
        pipeline = make_pipeline(
            pipeline_kind, model, optimizer, ranks.device, look_ahead, grad_clip_norm
        )
        traffic = TrafficMeter(ranks.world_size, count_dense_values(model), inspect_batch)
        with (
            closing(pipeline),
            _unfrozen_at_end(),
            _bar_and_log(run_dir, ranks, start, num_steps) as (bar, run_log),
            Tracer(trace, ranks, start_step=start.step, num_steps=num_steps) as tracer,
        ):
            measured = (first_compared_step, tracer, pipeline.drain)
            counts = (count_tables, count_caches)
            records = Records(run_log, bar, traffic, ranks, cadence, start, *measured, *counts)
            span = (start.step, num_steps)
            steps = _Steps(pipeline, optimizer, records, cadence, lr_factor, *span, check_replicas)
            if alternation is not None and _owes_evaluation(start, num_steps, cadence, alternation):
                _evaluate_first(pipeline, splits, records, alternation)
            for segment in segments(start.step, num_steps, cadence):
                steps.make(SegmentBatches(train_batches, segment), stop_request)
                if segment.evaluate and not records.must_stop:
                    _evaluate_first(pipeline, splits, records, alternation)
                if checkpoints is not None and (segment.save or records.must_stop):
                    watchdog.enter(watchdog.MAIN, watchdog.CHECKPOINT, records.position.step)
                    save_checkpoint(checkpoints, records.position, model, optimizer, train_loader)
                if records.must_stop:
                    break
            if not records.must_stop:
                _evaluate(pipeline, splits, records)
            summary = records.write_summary(description or {}, prediction)
    return TrainResult(records.position.step, not records.must_stop, summary)


def _start_workers(splits: Mapping[str, Iterable[Batch]]) -> Mapping[str, Iterable[Batch]]:
    """Let evaluation's loaders start the worker processes that they keep; the same loaders.

    Later would be while threads of the process group run Python code, for gradients' hooks: a
    process that is forked just then can hang in it (CPython before 3.11.10, gh-112275).
    """
    # Starting a loader draws a random number; training goes on as if it had not.
    with torch.random.fork_rng(devices=[]), sigterm_held_back():
        same_verdict(lambda: [iter(batches) for batches in splits.values()])
    return splits


def _start(
    model: nn.Module,
    optimizer: KeyedOptimizer,
    train_loader: StatefulLoader,
    num_steps: int,
    checkpoints: Checkpoints | None,
) -> tuple[Position, Iterator[Batch]]:
    """Load the checkpoint to resume from, if any, and start the loader where it stands."""
    resume_from = checkpoints.resume_from if checkpoints else None
    position = Position(step=0, num_samples=0)
    if checkpoints is not None and resume_from is not None:
        position = load_checkpoint(
            resume_from,
            model=model,
            optimizer=optimizer,
            loader=train_loader,
            facts=checkpoints.facts,
        )
    if num_steps < max(position.step, 1):
        raise ValueError(
            f"trainer: expected num_steps of at least {max(position.step, 1)}, got {num_steps}. "
            "Ask for more steps or more epochs."
        )
    with sigterm_held_back():
        train_batches = same_verdict(lambda: iter(train_loader))
    if resume_from is not None:
        restore_random_state(resume_from)
    return position, train_batches


def _owes_evaluation(
    start: Position, num_steps: int, cadence: Cadence, alternation: Alternation
) -> bool:
    """Whether the run that is resumed ended where it should have evaluated on the way.

    It was told to stop just there, or that step was to be its last. Had it gone on, the loss there
    would have counted in the order of what follows.
    """
    is_due = cadence.eval_every > 0 and start.step % cadence.eval_every == 0
    return is_due and 0 < start.step < num_steps and not alternation.knows(start.step)


def _evaluate_first(
    pipeline: Pipeline,
    splits: Mapping[str, Iterable[Batch]],
    records: Records,
    alternation: Alternation | None,
) -> None:
    """Evaluate the first split, if there is one."""
    for split, batches in islice(splits.items(), 1):
        quality = evaluate(pipeline, batches, step=records.position.step)
        records.add_quality(split, quality)
        if alternation is not None:
            alternation.add_quality(records.position.step, quality)


def _evaluate(pipeline: Pipeline, splits: Mapping[str, Iterable[Batch]], records: Records) -> None:
    step = records.position.step
    for split, batches in splits.items():
        records.add_quality(split, evaluate(pipeline, batches, step=step))


@dataclass(frozen=True)
class _Steps:
    """The steps of a run; fields are as in ``train``."""

    pipeline: Pipeline
    optimizer: KeyedOptimizer
    records: Records
    cadence: Cadence
    lr_factor: Callable[[int], float]
    start_step: int
    num_steps: int
    check_replicas: Callable[[], None] | None

    def make(self, batches: SegmentBatches, stop_request: StopRequest) -> None:
        """Make those of one segment; the pipeline is drained, and weights can be read, at its end.

        Fewer, if the ranks agree to stop.
        """
        records, cadence = self.records, self.cadence
        self.pipeline.start()
        records.meter.restart_clock()
        for step in batches.steps():
            self._enter(step)
            lr = set_learning_rates(self.optimizer, self.lr_factor, step)
            with records.step(step, batches):
                loss, _, _ = self.pipeline.progress(batches)  # forward, backward, update
            records.add_loss(step, loss)
            if step == self.start_step + 1:
                _freeze_garbage()
            if self.check_replicas and cadence.is_replica_check(step, self.num_steps):
                self.check_replicas()
            if records.must_check(step, batches):
                watchdog.enter(watchdog.MAIN, watchdog.CHECK_UP, step)
                records.check_up(step, lr=lr, must_stop=stop_request.is_set)
                if records.must_stop:
                    batches.cut()  # what the pipeline holds is still computed
        self.pipeline.drain()

    def _enter(self, step: int) -> None:
        """The first step compiles and allocates, and may take long on one rank."""
        is_first = step == self.start_step + 1
        watchdog.enter(watchdog.MAIN, watchdog.FIRST_STEP if is_first else watchdog.STEP, step)


@contextmanager
def _bar_and_log(
    run_dir: Path | None, ranks: Ranks, start: Position, num_steps: int
) -> Iterator[tuple[tqdm, RunLog]]:
    with (
        RunLog(run_dir if ranks.is_first else None, start_step=start.step) as run_log,
        _progress_bar(ranks, start.step, num_steps) as bar,
    ):
        yield bar, run_log


@contextmanager
def _logged_with_rank(ranks: Ranks) -> Iterator[None]:
    try:
        yield
    except Exception:
        logger.exception("[rank %d] training failed", ranks.rank)
        raise


@contextmanager
def _unfrozen_at_end() -> Iterator[None]:
    try:
        yield
    finally:
        gc.unfreeze()


def _freeze_garbage() -> None:
    """Spare what is alive from garbage collection, until ``_unfrozen_at_end``.

    After the first step that is the model, the optimizer and the libraries, half a million objects
    that every full collection would visit, on each rank at another time, while the others wait.
    """
    gc.collect()
    gc.freeze()


def _progress_bar(ranks: Ranks, start_step: int, num_steps: int) -> tqdm:
    """On standard error of rank 0, if that is a terminal."""
    disable = None if ranks.is_first else True
    return tqdm(total=num_steps, initial=start_step, desc="train", unit="step", disable=disable)
