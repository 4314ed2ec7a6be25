"""The training loop: pipeline steps in segments, and the parts between them.

A run evaluates and saves only between segments of steps, where the pipeline is drained, so that
weights, loader position and step agree. After an exception no rank starts another collective.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn
from torchrec.optim.keyed import KeyedOptimizer

from hotrec.train.checkpoint import StatefulLoader
from hotrec.train.parts import Parts
from hotrec.train.pipelines import Pipeline
from hotrec.train.schedule import next_segment, set_learning_rates
from hotrec.train.segment import SegmentBatches
from hotrec.train.signals import STOPPED_EXIT_CODE


class TrainedModel(Protocol):
    """A sharded model with its optimizer and pipeline."""

    @property
    def model(self) -> nn.Module:
        """``model(batch)`` returns ``(loss, (loss, logits (B,), labels (B,)))``."""

    @property
    def optimizer(self) -> KeyedOptimizer:
        """The optimizer of all parameters."""

    def pipeline(self) -> Pipeline:
        """The pipeline; a collective."""


@dataclass(frozen=True)
class TrainResult:
    """How a run ended.

    Args:
        step: The number of updates, those before a resume included.
        is_finished: Whether all steps were completed; otherwise a signal stopped the run after a
            checkpoint, and the program should exit with ``exit_code``.
        summary: The content of summary.json; the same on every rank except for times.
        stopped_by: The signal that this rank received, if any.
    """

    step: int
    is_finished: bool
    summary: Mapping[str, Any]
    stopped_by: int | None = None

    @property
    def exit_code(self) -> int:
        """0, or 128 + n after signal n; SIGTERM if only another rank received one."""
        if self.is_finished:
            return 0
        return STOPPED_EXIT_CODE if self.stopped_by is None else 128 + self.stopped_by


def train(
    trained: TrainedModel,
    loader: StatefulLoader,
    parts: Parts,
    *,
    num_steps: int,
    lr_factor: Callable[[int], float],
) -> TrainResult:
    """Train a sharded model until ``num_steps`` updates are made, including those before a resume.

    Call this on every rank with the same arguments, except for the loaders, which return the rank's
    own samples. The same seed, data and arguments give the same losses, resumed or not.

    Args:
        trained: The sharded model.
        loader: Returns the batches of all ``num_steps`` updates.
        parts: The activities around the steps.
        num_steps: The number of updates of the whole run.
        lr_factor: Maps an update number, from 1, to a factor; for example a ``Schedule``.

    Raises:
        ValueError: If no steps remain; ArtifactError if the checkpoint does not match.
        RuntimeError: If a loss is not finite, the data ends early, or a module is not pipelined.
    """
    metrics, watch = parts.metrics, parts.watch
    with parts.running(trained, loader, num_steps) as (pipeline, batches):
        while metrics.position.step < num_steps and not parts.must_stop:
            # The first of the remaining ones: the one before may have ended early, to save.
            segment = next_segment(metrics.position.step, num_steps, parts.every, parts.ends)
            feed = SegmentBatches(batches, segment)
            pipeline.start()
            metrics.restart_clock()
            for step in feed.steps():
                watch.enter(step)
                lr = set_learning_rates(trained.optimizer, lr_factor, step)
                with metrics.step(step, feed):
                    loss, _, _ = pipeline.progress(feed)  # forward, backward, update
                metrics.add(step, loss, lr)
                watch.look(step, feed, num_steps)
            pipeline.flush()
            for part in parts.between:
                part.run(segment)
            parts.evaluation.run(segment, pipeline, must_stop=watch.must_stop)
            parts.checkpoints.save(
                segment,
                trained.model,
                trained.optimizer,
                loader,
                must_stop=watch.must_stop,
                must_save=watch.must_save,
            )
        summary = parts.finish(pipeline)
    is_finished = not watch.must_stop
    return TrainResult(metrics.position.step, is_finished, summary, watch.stop_request.number)
