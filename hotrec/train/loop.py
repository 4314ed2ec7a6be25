"""The training loop: pipeline steps with logging, evaluation and checkpoints.

A run evaluates and saves only between segments of steps, where the pipeline is drained, so that
weights, loader position and step agree. After an exception no rank starts another collective.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchrec.optim.keyed import KeyedOptimizer

from hotrec.data.batch import Batch
from hotrec.embedding.adapt import AdaptiveHotSet
from hotrec.runtime import watchdog
from hotrec.runtime.progress import Progress
from hotrec.runtime.ranks import Ranks, same_verdict
from hotrec.runtime.traffic import BatchFacts
from hotrec.train.ahead import NEXT_DAY, DaysAhead
from hotrec.train.alternate import Alternation
from hotrec.train.best import BestQuality
from hotrec.train.callbacks import Callbacks
from hotrec.train.checkpoint import (
    Checkpoints,
    Position,
    Saving,
    StatefulLoader,
    keep_best,
    load_checkpoint,
    read_facts,
    restore_random_state,
)
from hotrec.train.dense_sync import count_dense_values
from hotrec.train.evaluate import evaluate
from hotrec.train.meters import Tables
from hotrec.train.metrics import Counts, Metrics
from hotrec.train.pipelines import LookAhead, Pipeline, make_pipeline
from hotrec.train.run_log import Listener, RunLog
from hotrec.train.schedule import Cadence, segments, set_learning_rates
from hotrec.train.segment import SegmentBatches
from hotrec.train.signals import STOPPED_EXIT_CODE, signals_held_back, stop_on_signals
from hotrec.train.trace import Tracer, TraceWindow
from hotrec.train.watch import Watch

FIRST_COMPARED_STEP = 50

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainResult:
    """How a run ended.

    Args:
        step: The number of updates, those before a resume included.
        is_finished: Whether all steps were made; else a signal ended the run after a checkpoint,
            and the program should exit with ``exit_code``.
        summary: The content of summary.json; the same on every rank but for times.
        stopped_by: The signal that this rank got, if any.
    """

    step: int
    is_finished: bool
    summary: Mapping[str, Any]
    stopped_by: int | None = None

    @property
    def exit_code(self) -> int:
        """0, or 128 + n after signal n; SIGTERM where only another rank got one."""
        if self.is_finished:
            return 0
        return STOPPED_EXIT_CODE if self.stopped_by is None else 128 + self.stopped_by


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
    ahead: DaysAhead | None = None,
    best: BestQuality | None = None,
    callbacks: Sequence[str] = (),
    trace: TraceWindow | None = None,
    on_accepted: Callable[[], None] | None = None,
    hot_set: AdaptiveHotSet | None = None,
    listeners: Sequence[Listener] = (),
    save_in_background: bool = False,
) -> TrainResult:
    """Train a sharded model until ``num_steps`` updates are made, those before a resume included.

    Call this on every rank with the same arguments, except for the loaders, which return the rank's
    own samples. The same seed, data and arguments give the same losses, resumed or not.

    Args:
        model: The sharded model; ``model(batch)`` returns ``(loss, (loss, logits (B,), labels
            (B,)))``.
        optimizer: The optimizer of all parameters, whose learning rates ``lr_factor`` scales.
        train_loader: Returns the batches of all ``num_steps`` updates.
        ranks: The process group.
        num_steps: The number of updates of the whole run.
        cadence: How often to evaluate, save, log and check.
        lr_factor: Maps an update number, from 1, to a factor; for example a ``Schedule``.
        pipeline_kind, look_ahead, grad_clip_norm: See ``make_pipeline``.
        eval_batches: Loaders by split, started anew for each evaluation. The first split is
            evaluated at the cadence, all at the end; the summary reports the last split.
        checkpoints: Where to save and what to resume from; None for neither.
        check_replicas: Raises on every rank if replicated rows differ between ranks.
        count_tables: Measures the memory of this rank's tables for the summary.
        count_caches: Returns the counters of this rank's device caches since its last call, with
            the same names on every rank and zeros without a cache; None if no rank has a cache.
        run_dir: Where rank 0 writes its records; None writes nothing.
        inspect_batch: Counts a batch's rows for the traffic bound and the hot-lookup fraction.
        description: Entries to add to summary.json (name, placement, model, batch_size, ...).
        prediction: Figures to compare with the measurements, see ``metrics.compare``.
        first_compared_step: The first step of that comparison, counted from this start.
        alternation: Receives the evaluations at the cadence; saved with the loader.
        ahead: What to evaluate at the end of each day, see ``DaysAhead``.
        best: Receives them too, and may end the run; saved with the checkpoint.
        callbacks: Import paths of callbacks, see ``hotrec.train.callbacks``.
        trace: The steps to record with torch.profiler; None records nothing.
        on_accepted: Called on every rank after the checkpoint to resume from has been loaded, and
            before anything is written.
        hot_set: Hot rows that follow the data, by a decision at the cadence; saved and resumed.
        listeners: On rank 0, take the lines that it writes into ``run_dir``.
        save_in_background: Whether training goes on while a checkpoint is written; on CPU.

    Raises:
        ValueError: if nothing is left to train; ArtifactError if the checkpoint does not fit.
        RuntimeError: if a loss is not finite, the data ends early, or a module is not pipelined.
    """
    if save_in_background and ranks.device.type != "cpu":
        raise ValueError(
            "trainer.save_in_background: expected false on a GPU, whose kernels update rows that "
            "are yet to be written, got true. Set it to false, or train on CPU."
        )
    with stop_on_signals() as stop_request:
        splits = eval_batches or {}
        _start_workers(splits, ahead)
        start, train_batches = _start(
            model, optimizer, train_loader, num_steps, checkpoints, best, hot_set
        )
        if on_accepted is not None:
            same_verdict(on_accepted)
        pipeline = make_pipeline(
            pipeline_kind, model, optimizer, ranks.device, look_ahead, grad_clip_norm
        )
        with pipeline, ExitStack() as stack:
            stack.callback(gc.unfreeze)
            of_rank = run_dir if ranks.is_first else None
            run_log = same_verdict(
                lambda: RunLog(of_rank, start_step=start.step, listeners=listeners)
            )
            bar = Progress(
                "train", num_steps, unit="steps", initial=start.step, is_shown=ranks.is_first
            )
            tracer = Tracer(trace, ranks, start_step=start.step, num_steps=num_steps)
            for part in (run_log, bar, tracer):
                stack.enter_context(part)
            run_callbacks = Callbacks(callbacks, run_dir, description)
            stack.callback(run_callbacks.close)
            metrics = Metrics(
                ranks,
                Counts(count_dense_values(model), inspect_batch, count_tables, count_caches),
                log_every_steps=cadence.log_every,
                warmup_steps=cadence.warmup_steps,
                first_compared_step=first_compared_step,
            )
            metrics.start(
                start,
                log=run_log,
                callbacks=run_callbacks,
                bar=bar,
                tracer=tracer,
                pipeline=pipeline,
            )
            watch = Watch(
                ranks,
                stop_request,
                every_steps=cadence.check_every,
                save_every_s=cadence.save_every_s,
            )
            saver = _Saver(run_callbacks, save_in_background)
            stack.callback(saver.abandon)
            judges = [one for one in (alternation, best) if one is not None]
            if _owes_evaluation(start, num_steps, cadence, judges):
                _evaluate_due(pipeline, splits, metrics, judges, best)
                if best is not None and checkpoints is not None and best.is_kept_at(start.step):
                    same_verdict(lambda: keep_best(checkpoints, start.step))
            if ahead is not None:
                _evaluate_ahead(pipeline, ahead, metrics)
            days = ahead.days if ahead else ()
            while metrics.position.step < num_steps:
                if best is not None and best.must_stop:
                    break
                # The first of those that are left: the one before may have ended early, to save.
                segment = next(segments(metrics.position.step, num_steps, cadence, days))
                batches = SegmentBatches(train_batches, segment)
                pipeline.start()
                metrics.restart_clock()
                for step in batches.steps():
                    # The first step compiles and allocates, which may take long on one rank.
                    is_first = step == start.step + 1
                    stage = watchdog.FIRST_STEP if is_first else watchdog.STEP
                    watchdog.enter(watchdog.MAIN, stage, step)
                    lr = set_learning_rates(optimizer, lr_factor, step)
                    with metrics.step(step, batches):
                        loss, _, _ = pipeline.progress(batches)  # forward, backward, update
                    metrics.add(step, loss, lr)
                    if is_first:
                        # These are the model, the optimizer and the libraries: half a million
                        # objects that a collection would visit on one rank while others wait.
                        gc.collect()
                        gc.freeze()
                    if check_replicas is not None and cadence.is_replica_check(step, num_steps):
                        check_replicas()
                    if watch.is_due(step, batches, metrics):
                        watchdog.enter(watchdog.MAIN, watchdog.CHECK_UP, step)
                        watch.check(step, metrics, is_saving=saver.is_busy)
                        if not watch.is_saving:
                            saver.finish()
                        if watch.must_stop or (watch.must_save and checkpoints is not None):
                            batches.cut()  # the pipeline still computes the batches it holds
                pipeline.drain()
                position = metrics.position
                is_whole = position.step == segment.last_step
                if hot_set is not None and segment.adapt and is_whole:
                    watchdog.enter(watchdog.MAIN, watchdog.ADAPTATION, position.step)
                    metrics.add_decision(hot_set.adapt())
                if segment.evaluate and is_whole and not watch.must_stop:
                    _evaluate_due(pipeline, splits, metrics, judges, best)
                if ahead is not None and not watch.must_stop:
                    _evaluate_ahead(pipeline, ahead, metrics)
                is_due = (segment.save and is_whole) or _wants_checkpoint(best, position)
                if checkpoints is not None and (is_due or watch.must_stop or watch.must_save):
                    if watch.must_stop:
                        logger.info("stopping after step %d, to be saved", position.step)
                    saver.start(
                        checkpoints, position, model, optimizer, train_loader, hot_set, best
                    )
                    watch.restart_save_clock()
                if watch.must_stop:
                    break
            saver.finish()
            if not watch.must_stop:
                step = metrics.position.step
                for index, (split, split_batches) in enumerate(splits.items()):
                    quality = evaluate(pipeline, split_batches, step=step)
                    metrics.add_quality(split, quality)
                    if best is None:
                        continue
                    if index == 0 and not best.knows(step):
                        best.add_quality(step, quality)
                        if checkpoints is not None and best.is_kept_at(step):
                            same_verdict(lambda: keep_best(checkpoints, step))
                    best.add_split(step, split, quality)
            found = {"days": ahead.evaluated} if ahead is not None else {}
            summary = metrics.summary(
                {**(description or {}), **found},
                prediction,
                best=best,
                is_finished=not watch.must_stop,
            )
    step, is_finished = metrics.position.step, not watch.must_stop
    return TrainResult(step, is_finished, summary, stop_request.number)


class _Saver:
    """Saves checkpoints one after the other, each while training goes on or at once."""

    def __init__(self, callbacks: Callbacks, in_background: bool) -> None:
        self._callbacks, self._in_background = callbacks, in_background
        self._saving: Saving | None = None

    @property
    def is_busy(self) -> bool:
        """Whether this rank is still writing."""
        return self._saving is not None and not self._saving.is_written

    def start(self, checkpoints: Checkpoints, position: Position, *given: Any) -> None:
        """Save, after the one before; collective. The arguments are those of ``Saving``."""
        self.finish()
        watchdog.enter(watchdog.MAIN, watchdog.CHECKPOINT, position.step)
        self._saving = Saving(checkpoints, position, *given, in_background=self._in_background)
        if not self._in_background:
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, if any; collective."""
        saving, self._saving = self._saving, None
        if saving is not None:
            watchdog.enter(watchdog.MAIN, watchdog.CHECKPOINT, saving.position.step)
            path = saving.finish()
            logger.info("saved step %d in %s", saving.position.step, path)
            self._callbacks.call("on_checkpoint", saving.position.step, path)

    def abandon(self) -> None:
        """End the writing, since the run ends with an error."""
        if self._saving is not None:
            self._saving.abandon()


def _start_workers(splits: Mapping[str, Iterable[Batch]], ahead: DaysAhead | None) -> None:
    """Start the persistent workers of the evaluation's loaders.

    After the first step, threads of the process group run Python code for gradient hooks, and a
    process forked meanwhile can hang (CPython before 3.11.10, gh-112275).
    """
    # Starting a loader draws a random number, which must not affect training.
    with torch.random.fork_rng(devices=[]), signals_held_back():
        same_verdict(lambda: [iter(batches) for batches in splits.values()])
        if ahead is not None:
            same_verdict(ahead.start)


def _start(
    model: nn.Module,
    optimizer: KeyedOptimizer,
    train_loader: StatefulLoader,
    num_steps: int,
    checkpoints: Checkpoints | None,
    best: BestQuality | None,
    hot_set: AdaptiveHotSet | None,
) -> tuple[Position, Iterator[Batch]]:
    """Load the checkpoint to resume from, if any, and start the loader at its position."""
    position, resume_from = Position(step=0, num_samples=0), None
    if checkpoints is not None and checkpoints.resume_from is not None:
        resume_from = checkpoints.resume_from
        position = load_checkpoint(
            resume_from,
            model=model,
            optimizer=optimizer,
            loader=train_loader,
            facts=checkpoints.facts,
            hot_set=hot_set,
        )
        logger.info("resuming from step %d, %s", position.step, resume_from)
        path = resume_from
        state = same_verdict(lambda: read_facts(path, None).get("best"))
        if best is not None and state is not None:
            best.load_state_dict(state)
    if num_steps < max(position.step, 1):
        raise ValueError(
            f"trainer: expected num_steps of at least {max(position.step, 1)}, got {num_steps}. "
            "Train for more steps or more epochs."
        )
    with signals_held_back():
        train_batches = same_verdict(lambda: iter(train_loader))
    if resume_from is not None:
        restore_random_state(resume_from)
    return position, train_batches


def _owes_evaluation(
    start: Position,
    num_steps: int,
    cadence: Cadence,
    judges: Sequence[Alternation | BestQuality],
) -> bool:
    """Whether the resumed run ended at a step that was due for an evaluation it did not make.

    An uninterrupted run would have used this loss to choose the next block, or to end.
    """
    is_due = cadence.eval_every > 0 and start.step % cadence.eval_every == 0
    is_unknown = any(not judge.knows(start.step) for judge in judges)
    return is_due and 0 < start.step < num_steps and is_unknown


def _wants_checkpoint(best: BestQuality | None, position: Position) -> bool:
    """Whether the run ends here, or this is the checkpoint to keep."""
    return best is not None and (best.must_stop or best.is_kept_at(position.step))


def _evaluate_ahead(pipeline: Pipeline, ahead: DaysAhead, metrics: Metrics) -> None:
    """Evaluate the day that is due after the last step, if one is."""
    step = metrics.position.step
    if step in ahead.days:
        quality = evaluate(pipeline, ahead.take(step), step=step)
        metrics.add_quality(NEXT_DAY, quality, day=ahead.days[step].name)
        ahead.add_quality(step, quality)


def _evaluate_due(
    pipeline: Pipeline,
    splits: Mapping[str, Iterable[Batch]],
    metrics: Metrics,
    judges: Sequence[Alternation | BestQuality],
    best: BestQuality | None,
) -> None:
    """Evaluate the first split, if there is one; all others, too, if this is the best to keep.

    The model that is kept is reported on them, and the run goes on from it.
    """
    step = metrics.position.step
    for index, (split, batches) in enumerate(splits.items()):
        if index > 0 and (best is None or not best.is_kept_at(step)):
            break
        quality = evaluate(pipeline, batches, step=step)
        metrics.add_quality(split, quality)
        for judge in judges if index == 0 else ():
            if not judge.knows(step):
                judge.add_quality(step, quality)
        if best is not None:
            best.add_split(step, split, quality)
