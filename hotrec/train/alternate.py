"""Alternating blocks of all-hot and mixed batches, whose length depends on the evaluated loss.

After FAE's Shuffle Scheduler (Adnan et al., PVLDB 15(1), 2022): with long blocks the model drifts
towards one kind of sample, so they are halved if the loss gets worse. FAE measures at every switch;
here each evaluation at the configured interval counts, and the next block has the new length.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

from hotrec.data.batch import Batch
from hotrec.train.checkpoint import StatefulLoader
from hotrec.train.evaluate import Quality

logger = logging.getLogger(__name__)

KINDS = {True: "all_hot", False: "mixed"}


class Alternation:
    """The kind of the next batch: a function of evaluated losses, the same on every rank.

    Every epoch starts with a mixed block. When one kind is used up, the other runs to its end.

    Args:
        num_all_hot_steps: all-hot batches of an epoch.
        num_mixed_steps: mixed batches of an epoch.
        start_rate: initial share of an epoch's batches of a kind in a block, in (0, 1].
        least_rate: the minimum share, in (0, start_rate]; a block has at least one batch.
        patience: number of consecutive improvements of the loss before blocks double.

    Raises:
        ValueError: if ``least_rate`` exceeds ``start_rate``.
    """

    def __init__(
        self,
        num_all_hot_steps: int,
        num_mixed_steps: int,
        *,
        start_rate: float = 0.5,
        least_rate: float = 0.01,
        patience: int = 4,
    ) -> None:
        if least_rate > start_rate:
            raise ValueError(
                "alternation: expected least_rate <= start_rate, got "
                f"least_rate {least_rate} and start_rate {start_rate}."
            )
        self._num_steps = {True: num_all_hot_steps, False: num_mixed_steps}
        self._settings = {
            "num_all_hot_steps": num_all_hot_steps,
            "num_mixed_steps": num_mixed_steps,
            "start_rate": start_rate,
            "least_rate": least_rate,
            "patience": patience,
        }
        self._least_rate, self._patience = least_rate, patience
        self.rate = start_rate
        self._num_falls = 0  # of the loss, in a row
        self._last_loss: float | None = None
        self._last_step = -1  # after which it was measured
        self._left = {True: 0, False: 0}  # in this epoch
        self._is_all_hot = True
        self._left_in_block = 0

    def next_is_all_hot(self) -> bool:
        """The kind of the next batch; the same until ``advance``."""
        if not any(self._left.values()):
            self._left = dict(self._num_steps)
            self._is_all_hot, self._left_in_block = True, 0
        if self._left_in_block == 0:
            if self._left[not self._is_all_hot]:
                self._is_all_hot = not self._is_all_hot
            # 0.07 * 100 is a little more than 7, but 7 is meant.
            length = math.ceil(self.rate * self._num_steps[self._is_all_hot] - 1e-9)
            self._left_in_block = min(max(length, 1), self._left[self._is_all_hot])
        return self._is_all_hot

    def advance(self) -> None:
        """Advance to the next batch."""
        is_all_hot = self.next_is_all_hot()
        self._left[is_all_hot] -= 1
        self._left_in_block -= 1

    def knows(self, step: int) -> bool:
        """Whether the loss after ``step`` was added."""
        return self._last_step == step

    def add_quality(self, step: int, quality: Quality) -> None:
        """Add the quality after ``step``, the same on every rank; later blocks may change."""
        loss, before = quality.log_loss, self._last_loss
        self._last_loss, self._last_step = loss, step
        if before is None:
            return
        self._num_falls = self._num_falls + 1 if loss < before else 0
        rate = self.rate
        if loss > before:
            self.rate = max(rate / 2, self._least_rate)
        elif self._num_falls == self._patience:
            self.rate = min(rate * 2, 1.0)
            self._num_falls = 0
        if self.rate != rate:
            text = "step %d: log loss %.5f, before %.5f: blocks of %.3g of an epoch, before %.3g"
            logger.info(text, step, loss, before, self.rate, rate)

    def state_dict(self) -> dict[str, Any]:
        return {
            "settings": dict(self._settings),
            "rate": self.rate,
            "num_falls": self._num_falls,
            "last_loss": self._last_loss,
            "last_step": self._last_step,
            "left": {KINDS[kind]: left for kind, left in self._left.items()},
            "is_all_hot": self._is_all_hot,
            "left_in_block": self._left_in_block,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a saved run.

        Raises:
            ValueError: if it had other numbers of batches or other settings.
        """
        for name, value in self._settings.items():
            if state["settings"].get(name) != value:
                raise ValueError(
                    f"alternation {name}: expected {value}, got {state['settings'].get(name)} (of "
                    "the checkpoint). Resume with the settings of the run that saved it."
                )
        self.rate = float(state["rate"])
        self._num_falls = int(state["num_falls"])
        self._last_loss = state["last_loss"]
        self._last_step = int(state["last_step"])
        self._left = {kind: int(state["left"][name]) for kind, name in KINDS.items()}
        self._is_all_hot = bool(state["is_all_hot"])
        self._left_in_block = int(state["left_in_block"])


class AlternatingLoader:
    """A loader that alternates between a loader of all-hot and one of mixed batches.

    Each keeps its own workers, so a switch does not wait, and no prefetched batch is lost when the
    loss changes the order. None if an epoch has no batches of a kind.
    """

    def __init__(
        self,
        all_hot: StatefulLoader | None,
        mixed: StatefulLoader | None,
        alternation: Alternation,
    ) -> None:
        given = {True: all_hot, False: mixed}
        self._loaders = {kind: loader for kind, loader in given.items() if loader is not None}
        self._alternation = alternation

    def __iter__(self) -> Iterator[Batch]:
        # Not in a generator: workers start here.
        return self._take({kind: iter(loader) for kind, loader in self._loaders.items()})

    def _take(self, iterators: Mapping[bool, Iterator[Batch]]) -> Iterator[Batch]:
        while True:
            batch = next(iterators[self._alternation.next_is_all_hot()], None)
            if batch is None:
                return
            # Only now: the end of the data, or an error, does not count as a step.
            self._alternation.advance()
            yield batch

    def state_dict(self) -> dict[str, Any]:
        state = {KINDS[kind]: loader.state_dict() for kind, loader in self._loaders.items()}
        return {"alternation": self._alternation.state_dict(), **state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of a saved run.

        Raises:
            ValueError: if its loaders were of other kinds or had other settings.
        """
        expected = {"alternation", *(KINDS[kind] for kind in self._loaders)}
        if set(state_dict) != expected:
            raise ValueError(
                f"loader state: expected the parts {sorted(expected)}, got {sorted(state_dict)}. "
                "Resume with the order=, dataset and partition of the run that saved it."
            )
        self._alternation.load_state_dict(state_dict["alternation"])
        for kind, loader in self._loaders.items():
            loader.load_state_dict(state_dict[KINDS[kind]])
