"""The parts of a run around its steps, each with its own schedule and state."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn
from torchrec.optim.keyed import KeyedOptimizer

from hotrec.runtime.ranks import Ranks, same_verdict
from hotrec.train.checkpoint import StatefulLoader
from hotrec.train.evaluation import Evaluation
from hotrec.train.metrics import Metrics
from hotrec.train.pipelines import Pipeline
from hotrec.train.saver import Saver
from hotrec.train.schedule import Segment
from hotrec.train.signals import signals_held_back
from hotrec.train.watch import Watch


class PeriodicPart(Protocol):
    """An activity at an interval of steps, while no batch is in flight."""

    every_steps: int
    """A segment ends with each multiple of this number of steps; 0 for never."""

    def run(self, segment: Segment) -> None:
        """Run if due after a segment, which may have been cut short; called on every rank."""


@dataclass(frozen=True)
class Parts:
    """The activities around the steps; after each segment ``between``, then evaluate, then save.

    Args:
        ranks: The process group.
        metrics: Measurements and records, with the trace and the callbacks.
        watch: Check-ups with the other ranks, signals, replicas.
        evaluation: Evaluations, early stopping, days ahead.
        checkpoints: Checkpoints, and the one to resume from.
        between: Any others, in this order; a checkpoint after the same segment includes their
            effects.
    """

    ranks: Ranks
    metrics: Metrics
    watch: Watch
    evaluation: Evaluation
    checkpoints: Saver
    between: Sequence[PeriodicPart] = ()

    @property
    def every(self) -> list[int]:
        """Intervals of steps of the parts; a segment ends at each multiple of one."""
        parts: Sequence[PeriodicPart | Evaluation | Saver] = (
            *self.between,
            self.evaluation,
            self.checkpoints,
        )
        return [part.every_steps for part in parts if part.every_steps]

    @property
    def ends(self) -> Collection[int]:
        """Further steps after which a segment ends."""
        return self.evaluation.ends

    @property
    def must_stop(self) -> bool:
        """Whether the run ends before its last step."""
        return self.watch.must_stop or self.evaluation.must_stop

    @contextmanager
    def running(
        self, trainable: Any, loader: StatefulLoader, num_steps: int
    ) -> Iterator[tuple[Pipeline, Iterator[Any]]]:
        """Start or resume a run; returns its pipeline and the remaining batches.

        Raises:
            ValueError: If no steps remain.
            ArtifactError: If the checkpoint does not match.
        """
        model: nn.Module = trainable.model
        optimizer: KeyedOptimizer = trainable.optimizer
        with self.watch.running(), ExitStack() as stack:
            self.evaluation.start_workers()
            position = self.checkpoints.resume(model, optimizer, loader, self.ranks)
            if num_steps < max(position.step, 1):
                raise ValueError(
                    f"trainer: expected num_steps of at least {max(position.step, 1)}, got "
                    f"{num_steps}. Train for more steps or more epochs."
                )
            with signals_held_back():
                batches = same_verdict(lambda: iter(loader))
            self.checkpoints.restore_random_state()
            self.metrics.accept()
            pipeline = stack.enter_context(trainable.pipeline())
            stack.enter_context(self.metrics.running(position, num_steps, pipeline))
            self.checkpoints.restart_clock()  # loading a checkpoint makes none late
            self.evaluation.make_up(pipeline, num_steps)
            yield pipeline, batches

    def finish(self, pipeline: Pipeline) -> dict[str, Any]:
        """Evaluate unless the run stopped, and write the summary."""
        if not self.watch.must_stop:
            self.evaluation.finish(pipeline)
        return self.metrics.summary(
            self.evaluation.days,
            best=self.evaluation.best,
            is_finished=not self.watch.must_stop,
        )
