"""Saves the checkpoints of a run when they are due, and resumes from one."""

from __future__ import annotations

import logging
import time

from torch import nn
from torchrec.optim.keyed import KeyedOptimizer

from hotrec.runtime import watchdog
from hotrec.runtime.ranks import Ranks, same_verdict
from hotrec.train.checkpoint import (
    Checkpoints,
    Position,
    StatefulLoader,
    load_checkpoint,
    read_facts,
    restore_random_state,
    save_checkpoint,
)
from hotrec.train.evaluation import Evaluation
from hotrec.train.hot_set import HotSet
from hotrec.train.metrics import Metrics
from hotrec.train.schedule import Segment

logger = logging.getLogger(__name__)


class Saver:
    """Saves checkpoints when they are due.

    Args:
        metrics: The position of the run, and its callbacks.
        evaluation: The best evaluation, which is saved and may request a checkpoint.
        hot_set: Hot rows that follow the data, which are saved.
        checkpoints: Where to save and what to resume from; None for neither.
        every_steps: Steps between checkpoints; 0 for none before the end. The last step always
            saves.
        every_s: Seconds since the last checkpoint, by rank 0's clock, after which the next check-up
            requests one; 0 for never.
    """

    def __init__(
        self,
        metrics: Metrics,
        evaluation: Evaluation,
        hot_set: HotSet,
        checkpoints: Checkpoints | None = None,
        *,
        every_steps: int = 0,
        every_s: float = 0.0,
    ) -> None:
        self.every_steps = every_steps
        self._metrics, self._evaluation, self._hot_set = metrics, evaluation, hot_set
        self._checkpoints, self._every_s = checkpoints, every_s
        self._saved_s = time.perf_counter()

    @property
    def is_late(self) -> bool:
        """Whether the last checkpoint is old."""
        return 0 < self._every_s <= time.perf_counter() - self._saved_s

    @property
    def saves(self) -> bool:
        """Whether there are checkpoints at all."""
        return self._checkpoints is not None

    def resume(
        self,
        model: nn.Module,
        optimizer: KeyedOptimizer,
        loader: StatefulLoader,
        ranks: Ranks,
    ) -> Position:
        """Load the checkpoint to resume from, if any; collective."""
        path = None if self._checkpoints is None else self._checkpoints.resume_from
        if self._checkpoints is None or path is None:
            return Position(step=0, num_samples=0)
        position = load_checkpoint(
            path,
            model=model,
            optimizer=optimizer,
            loader=loader,
            facts=self._checkpoints.facts,
            hot_set=self._hot_set.of_model,
        )
        logger.info("resuming from step %d, %s", position.step, path)
        state = same_verdict(lambda: read_facts(path, None).get("best"))
        best = self._evaluation.best
        if best is not None and state is not None:
            best.load_state_dict(state)
        return position

    def restore_random_state(self) -> None:
        """Restore the random generators from the checkpoint, once the loader has started."""
        if self._checkpoints is not None and self._checkpoints.resume_from is not None:
            restore_random_state(self._checkpoints.resume_from)

    def restart_clock(self) -> None:
        """Count the seconds until a checkpoint is late from now."""
        self._saved_s = time.perf_counter()

    def save(
        self,
        segment: Segment,
        model: nn.Module,
        optimizer: KeyedOptimizer,
        loader: StatefulLoader,
        *,
        must_stop: bool,
        must_save: bool,
    ) -> None:
        """Save after a segment if due; collective.

        The pipeline must be drained, so that weights, loader position and step agree.
        """
        position = self._metrics.position
        is_due = self._metrics.is_due(segment, self.every_steps)
        is_due |= segment.is_last and self._metrics.is_whole(segment)
        is_due |= self._evaluation.wants_checkpoint(position.step)
        if self._checkpoints is None or not (is_due or must_stop or must_save):
            return
        if must_stop:
            logger.info("stopping after step %d and saving a checkpoint", position.step)
        watchdog.enter(watchdog.MAIN, watchdog.CHECKPOINT, position.step)
        path = save_checkpoint(
            self._checkpoints,
            position,
            model,
            optimizer,
            loader,
            self._hot_set.of_model,
            self._evaluation.best,
        )
        logger.info("saved step %d in %s", position.step, path)
        self._metrics.callbacks.call("on_checkpoint", position.step, path)
        self.restart_clock()
