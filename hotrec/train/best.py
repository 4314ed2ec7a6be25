"""The best evaluation of a run so far: when to stop early, and which checkpoint to keep."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from hotrec.runtime.figures import FIGURES
from hotrec.train.evaluate import Quality

logger = logging.getLogger(__name__)

LOG_LOSS = "log_loss"


def chosen_by(state: Mapping[str, Any]) -> str:
    """The figure of a saved ``BestQuality``, which earlier versions did not record."""
    return str(state.get("by", LOG_LOSS))


class BestQuality:
    """The best evaluation so far, by one of its figures: the same on every rank.

    Args:
        patience: Number of consecutive evaluations without a better one after which the run ends;
            None: never.
        is_kept: Whether the checkpoint of the best evaluation is kept.
        by: Key of the figure, such as log_loss, auc or gauc; of one with parts, such as recall_at,
            the first counts.
        split: The split that is evaluated; None if there is but one.
    """

    def __init__(
        self,
        patience: int | None = None,
        *,
        is_kept: bool = False,
        by: str = LOG_LOSS,
        split: str | None = None,
    ) -> None:
        self.split = split
        self.patience, self.is_kept, self.by = patience, is_kept, by
        self._sign = -1 if FIGURES[by].better == "more" else 1
        self.step = self._last_step = -1
        self.value: float | None = None
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
        """Whether the quality after ``step`` was added."""
        return self._last_step == step

    def add_quality(self, step: int, quality: Quality) -> None:
        """Add the quality after ``step``; one without the figure is no better than any."""
        self._last_step = step
        value = quality.to_json()[self.by]
        if isinstance(value, Mapping):
            value = next(iter(value.values()), None)
        if value is not None and (
            self.value is None or self._sign * value < self._sign * self.value
        ):
            self.step, self.value, self._num_worse = step, value, 0
            self.of_splits = {}
            return
        self._num_worse += 1
        if self.must_stop:
            text = "step %d: %s %s; the best is %s after step %d, %d evaluations ago"
            found = ("none" if of is None else f"{of:.5f}" for of in (value, self.value))
            logger.info(text, step, self.by.replace("_", " "), *found, self.step, self._num_worse)

    def add_split(self, step: int, split: str, quality: Quality) -> None:
        """Add the quality on a split if ``step`` is the one to keep."""
        if self.is_kept_at(step):
            self.of_splits[split] = quality.to_json()

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "loss": self.value,  # as earlier versions name it
            "last_step": self._last_step,
            "num_worse": self._num_worse,
            "of_splits": list(
                self.of_splits.items()
            ),  # as a list, because a JSON mapping may lose the order
            **({} if self.by == LOG_LOSS else {"by": self.by}),
            **({} if self.split is None else {"split": self.split}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a saved run; one of another split leaves this one as it is.

        Raises:
            ValueError: If it is damaged, or its best evaluation was chosen by another figure.
        """
        if (saved := chosen_by(state)) != self.by:
            raise ValueError(
                f"trainer.best_by: expected {saved}, by which the checkpoint's best evaluation was "
                f"chosen, got {self.by}. Set trainer.best_by={saved}, or start a new run."
            )
        saved_split = state.get("split", self.split)
        if None not in (saved_split, self.split) and saved_split != self.split:
            logger.info("best: expected split %s, got %s; begins anew", saved_split, self.split)
            return
        self.step, self._last_step = int(state["step"]), int(state["last_step"])
        self.value = None if state["loss"] is None else float(state["loss"])
        self._num_worse = int(state["num_worse"])
        if self.value is not None and not math.isfinite(self.value):
            raise ValueError(f"{self.by} {self.value}")
        self.of_splits = dict(state.get("of_splits", {}))  # none in earlier versions
