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
    Saving,
    StatefulLoader,
    load_checkpoint,
    read_facts,
    restore_random_state,
)
from hotrec.train.evaluation import Evaluation
from hotrec.train.hot_set import HotSet
from hotrec.train.metrics import Metrics
from hotrec.train.schedule import Segment

logger = logging.getLogger(__name__)


class Saver:
    """Saves one checkpoint at a time, in the background or synchronously.

    Args:
        metrics: The position of the run, and its callbacks.
        evaluation: The best evaluation, which is saved and may request a checkpoint.
        hot_set: Hot rows that follow the data, which are saved.
        checkpoints: Where to save and what to resume from; None for neither.
        every_steps: Steps between checkpoints; 0 for none before the end. The last step always
            saves.
        every_s: Seconds since the last checkpoint, by rank 0's clock, after which the next check-up
            requests one; 0 for never.
        in_background: Whether training continues while a checkpoint is written; on CPU.
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
        in_background: bool = False,
    ) -> None:
        self.every_steps = every_steps
        self._metrics, self._evaluation, self._hot_set = metrics, evaluation, hot_set
        self._checkpoints, self._every_s, self._in_background = checkpoints, every_s, in_background
        self._saving: Saving | None = None
        self._saved_s = time.perf_counter()

    @property
    def is_late(self) -> bool:
        """Whether the last checkpoint is old."""
        return 0 < self._every_s <= time.perf_counter() - self._saved_s

    @property
    def is_busy(self) -> bool:
        """Whether this rank is still writing."""
        return self._saving is not None and not self._saving.is_written

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
        if self._in_background and ranks.device.type != "cpu":
            raise ValueError(
                "trainer.save_in_background: expected false on a GPU (its kernels may update rows "
                "before they are written), got true. Set it to false, or train on CPU."
            )
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
        """Save after a segment if due, once the previous checkpoint is written; collective.

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
        self.finish()
        watchdog.enter(watchdog.MAIN, watchdog.CHECKPOINT, position.step)
        self._saving = Saving(
            self._checkpoints,
            position,
            model,
            optimizer,
            loader,
            self._hot_set.of_model,
            self._evaluation.best,
            in_background=self._in_background,
        )
        if not self._in_background:
            self.finish()
        self.restart_clock()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, if any; collective."""
        saving, self._saving = self._saving, None
        if saving is not None:
            watchdog.enter(watchdog.MAIN, watchdog.CHECKPOINT, saving.position.step)
            path = saving.finish()
            logger.info("saved step %d in %s", saving.position.step, path)
            self._metrics.callbacks.call("on_checkpoint", saving.position.step, path)

    def abandon(self) -> None:
        """Abort the save because the run failed."""
        if self._saving is not None:
            self._saving.abandon()
