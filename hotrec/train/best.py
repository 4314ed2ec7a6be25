"""The best evaluation of a run so far: when to stop early, and which checkpoint to keep."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from hotrec.train.evaluate import Quality

logger = logging.getLogger(__name__)


class BestQuality:
    """The evaluation with the lowest log loss so far: the same on every rank.

    Args:
        patience: Number of consecutive evaluations without a lower loss after which the run ends;
            None: never.
        is_kept: Whether the checkpoint of the best evaluation is kept.
    """

    def __init__(self, patience: int | None = None, *, is_kept: bool = False) -> None:
        self.patience, self.is_kept = patience, is_kept
        self.step = self._last_step = -1
        self.loss: float | None = None
        self.of_splits: dict[str, dict[str, Any]] = {}
        """The quality of the kept checkpoint on each split, as JSON values."""
        self._num_worse = 0

    @property
    def must_stop(self) -> bool:
        """Whether the patience is exhausted."""
        return self.patience is not None and self._num_worse >= self.patience

    def is_kept_at(self, step: int) -> bool:
        """Whether the checkpoint after ``step`` is the one to keep."""
        return self.is_kept and self.step == step

    def knows(self, step: int) -> bool:
        """Whether the loss after ``step`` was added."""
        return self._last_step == step

    def add_quality(self, step: int, quality: Quality) -> None:
        """Add the quality after ``step``."""
        self._last_step = step
        if self.loss is None or quality.log_loss < self.loss:
            self.step, self.loss, self._num_worse = step, quality.log_loss, 0
            self.of_splits = {}
            return
        self._num_worse += 1
        if self.must_stop:
            text = "step %d: log loss %.5f; the best is %.5f after step %d, %d evaluations ago"
            logger.info(text, step, quality.log_loss, self.loss, self.step, self._num_worse)

    def add_split(self, step: int, split: str, quality: Quality) -> None:
        """Add the quality on a split if ``step`` is the one to keep."""
        if self.is_kept_at(step):
            self.of_splits[split] = quality.to_json()

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "loss": self.loss,
            "last_step": self._last_step,
            "num_worse": self._num_worse,
            "of_splits": list(
                self.of_splits.items()
            ),  # as a list, because a JSON mapping may lose the order
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a saved run."""
        self.step, self._last_step = int(state["step"]), int(state["last_step"])
        self.loss = None if state["loss"] is None else float(state["loss"])
        self._num_worse = int(state["num_worse"])
        if self.loss is not None and not math.isfinite(self.loss):
            raise ValueError(f"loss {self.loss}")
        self.of_splits = dict(state.get("of_splits", {}))  # none in earlier versions
