"""The training loop: segments -> batches -> one TorchRec step each -> records, evaluation, saving.

Evaluation and checkpoints happen only between segments, where the pipeline is drained: weights,
loader position and step then agree exactly. After an exception no rank starts another collective.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from torch import nn
from torchrec.optim.keyed import KeyedOptimizer
from tqdm import tqdm

from hotrec.batch import Batch
from hotrec.distributed import Ranks, same_verdict
from hotrec.traffic import BatchFacts, count_dense_values
from hotrec.train.checkpoint import (
    Checkpoints,
    Position,
    StatefulLoader,
    load_checkpoint,
    restore_random_state,
    save_checkpoint,
)
from hotrec.train.evaluate import evaluate
from hotrec.train.meter import SegmentBatches
from hotrec.train.pipeline import Pipeline, make_pipeline
from hotrec.train.records import Records
from hotrec.train.run_log import RunLog
from hotrec.train.schedule import Cadence, segments, set_learning_rates
from hotrec.train.stage_times import FIRST_COMPARED_STEP
from hotrec.train.watch import TrafficMeter, sigterm_held_back, stop_on_sigterm

EvalLoader = Callable[[], Iterable[Batch]]

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
    eval_batches: Mapping[str, EvalLoader] | None = None,
    checkpoints: Checkpoints | None = None,
    check_replicas: Callable[[], None] | None = None,
    run_dir: Path | None = None,
    inspect_batch: Callable[[Batch], BatchFacts] | None = None,
    description: Mapping[str, Any] | None = None,
    prediction: Mapping[str, Any] | None = None,
    first_compared_step: int = FIRST_COMPARED_STEP,
) -> TrainResult:
    """Train a sharded model until ``num_steps`` updates are made, those before a resume included.

    To be called on every rank with the same arguments, except the loaders, which hold the rank's
    own samples. The same seed, data and arguments give the same losses, resumed or not.

    Args:
        model: sharded; ``model(batch)`` returns ``(loss, (loss, logits (B,), labels (B,)))``.
        optimizer: of all parts; its groups' rates are those that ``lr_factor`` scales.
        train_loader: holds the batches of all ``num_steps`` updates.
        lr_factor: update number, from 1 -> factor, e.g. a ``Schedule``.
        eval_batches: makes a fresh loader, by name of the split. Only the first split is evaluated
            on the way, all of them after the last step; the last one gives the summary.
        checkpoints: where to save and what to resume from; None for neither.
        check_replicas: raises on every rank if replicated rows differ between ranks.
        run_dir: where rank 0 writes its records; None for none.
        inspect_batch: what a batch reads, for the traffic bound and the hot-lookup fraction.
        description: added to summary.json as it is (name, placement, model, batch_size, ...).
        prediction: "step_s", "stage_s" by stage, "total_sent_bytes"; the summary is set against it.
        first_compared_step: from which on, counted from this start; those before warm up.

    Raises:
        ValueError: if nothing is left to train; ArtifactError if the checkpoint does not fit.
        RuntimeError: if a loss is not finite, the data ends early, or a module is not pipelined.
    """
    splits = dict(eval_batches or {})
    with _logged_with_rank(ranks), stop_on_sigterm() as stop_request:
        start, train_batches = _start(model, optimizer, train_loader, num_steps, checkpoints)
        pipeline = make_pipeline(pipeline_kind, model, optimizer, ranks.device)
        with (
            RunLog(run_dir if ranks.is_first else None, start_step=start.step) as run_log,
            _progress_bar(ranks, start.step, num_steps) as bar,
            _frozen_garbage() as freeze_garbage,
        ):
            traffic = TrafficMeter(ranks.world_size, count_dense_values(model), inspect_batch)
            records = Records(run_log, bar, traffic, ranks, cadence, start, first_compared_step)
            for segment in segments(start.step, num_steps, cadence):
                batches = SegmentBatches(train_batches, segment)
                pipeline.start()
                records.meter.restart_clock()
                for step in batches.steps():
                    lr = set_learning_rates(optimizer, lr_factor, step)
                    with records.step(step, batches):
                        loss, _, _ = pipeline.progress(batches)  # forward, backward, update
                    records.add_loss(step, loss)
                    freeze_garbage()
                    if check_replicas is not None and cadence.is_replica_check(step, num_steps):
                        check_replicas()
                    if records.must_check(step, batches):
                        records.check_up(step, lr=lr, must_stop=stop_request.is_set)
                        if records.must_stop:
                            batches.cut()  # what the pipeline holds is still computed
                if segment.evaluate and not records.must_stop:
                    _evaluate(pipeline, dict(islice(splits.items(), 1)), records)
                if checkpoints is not None and (segment.save or records.must_stop):
                    save_checkpoint(checkpoints, records.position, model, optimizer, train_loader)
                if records.must_stop:
                    break
            if not records.must_stop:
                _evaluate(pipeline, splits, records)
            summary = records.write_summary(description or {}, prediction)
    return TrainResult(records.position.step, not records.must_stop, summary)


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


def _evaluate(pipeline: Pipeline, splits: Mapping[str, EvalLoader], records: Records) -> None:
    for split, make_batches in splits.items():
        records.add_quality(split, evaluate(pipeline, make_batches()))


@contextmanager
def _logged_with_rank(ranks: Ranks) -> Iterator[None]:
    try:
        yield
    except Exception:
        logger.exception("[rank %d] training failed", ranks.rank)
        raise


@contextmanager
def _frozen_garbage() -> Iterator[Callable[[], None]]:
    """Gives a function that spares what is alive from garbage collection until the block ends.

    Only the first call does something. After the first step that is the model, the optimizer and
    the libraries, half a million objects that every full collection would visit, on each rank at
    another time, while the others wait.
    """
    is_frozen = False

    def freeze() -> None:
        nonlocal is_frozen
        if not is_frozen:
            gc.collect()
            gc.freeze()
            is_frozen = True

    try:
        yield freeze
    finally:
        gc.unfreeze()


def _progress_bar(ranks: Ranks, start_step: int, num_steps: int) -> tqdm:
    """On standard error of rank 0, if that is a terminal."""
    disable = None if ranks.is_first else True
    return tqdm(total=num_steps, initial=start_step, desc="train", unit="step", disable=disable)
