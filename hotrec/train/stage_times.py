"""Where a run's steps spent their time, by stage, and how far that is from the prediction.

A clock runs in every step that is like the others: not in those whose traffic is counted (slowed
down), nor in the first and the last of a segment, where the pipeline fills and drains. What a step
takes outside the pipeline counts as "other", so the stages of a step add up to its time.

Exposed communication is what the main thread waits for other ranks: summed up in each step, since
the sum of medians is not the median of the sums.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from hotrec.runtime.ranks import all_gather_object
from hotrec.runtime.stages import StageClock, exposed_s
from hotrec.types import STAGES

FIRST_COMPARED_STEP = 50
MOST_KEPT_STEPS = 4096
# How many steps the clock may hold before they are added up.
MOST_PENDING_STEPS = 256
_OTHER = STAGES.index("other")
# What is kept of a step, in seconds: its stages, the exposed communication, and the whole step.
EXPOSED, STEP = len(STAGES), len(STAGES) + 1
NUM_COLUMNS = len(STAGES) + 2
# Fields of summary.json: medians over the compared steps, the mean over the ranks if not the
# slowest rank's. The last is exposed communication as a fraction of the measured step.
MEASURED = (
    "measured_step_s",
    "measured_stage_s",
    "slowest_rank_stage_s",
    "exposed_communication_s",
    "slowest_rank_exposed_communication_s",
    "exposed_communication_frac",
)

logger = logging.getLogger(__name__)


class KeptSteps:
    """Seconds of steps, (steps, NUM_COLUMNS); an even choice if many.

    Args:
        most_kept: even number; when so many are kept, every other one is dropped, and from then on
            half as many are taken.
    """

    def __init__(self, most_kept: int = MOST_KEPT_STEPS) -> None:
        self._rows = np.empty((most_kept, NUM_COLUMNS))
        self._num_kept = 0
        self._num_seen = 0
        self._stride = 1

    def add(self, rows: np.ndarray) -> None:
        """Take float64 (steps, NUM_COLUMNS) in order of time."""
        for row in rows:
            if self._num_seen % self._stride == 0:
                if self._num_kept == len(self._rows):
                    self._num_kept //= 2
                    self._rows[: self._num_kept] = self._rows[::2]
                    self._stride *= 2
                self._rows[self._num_kept] = row
                self._num_kept += 1
            self._num_seen += 1

    def clear(self) -> None:
        self._num_kept, self._num_seen, self._stride = 0, 0, 1

    @property
    def num_kept(self) -> int:
        return self._num_kept

    def medians(self) -> np.ndarray:
        """Float64 (NUM_COLUMNS,); NaN without steps."""
        if self._num_kept == 0:
            return np.full(NUM_COLUMNS, np.nan)
        return np.median(self._rows[: self._num_kept], axis=0)


class StageTimes:
    """The stages of this rank's steps, and over the run what the prediction is held against.

    Args:
        device: whose time is measured.
        compared_from_step: the first step that counts for the run; those before warm up.
    """

    def __init__(self, device: torch.device, compared_from_step: int) -> None:
        self.compared_from_step = compared_from_step
        self._clock = StageClock(device)
        self._pending: list[tuple[int, float]] = []  # step, its seconds
        self._line, self._run = KeptSteps(), KeptSteps()

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure the step made inside the block; ``end_step`` must follow."""
        with self._clock.step():
            yield

    def end_step(self, step: int, step_s: float) -> None:
        """Say how long the step took that was measured last.

        Args:
            step_s: from the end of the step before to the end of this one.
        """
        self._pending.append((step, step_s))
        if len(self._pending) >= MOST_PENDING_STEPS:
            self._add_up()

    def _add_up(self) -> None:
        if not self._pending:
            return
        seconds = self._clock.seconds()
        self._clock.clear()
        steps, step_s = zip(*self._pending, strict=True)
        self._pending = []
        stages = [seconds[stage] for stage in STAGES]
        rows = np.stack([*stages, exposed_s(seconds), np.asarray(step_s)], axis=1)
        rows[:, _OTHER] += rows[:, STEP] - rows[:, :EXPOSED].sum(axis=1)
        self._line.add(rows)
        self._run.add(rows[np.asarray(steps) >= self.compared_from_step])

    def end_line(self) -> list[float]:
        """This rank's medians since the last call; NaN without steps.

        Returns:
            Seconds by stage, as in STAGES, then the exposed communication.
        """
        self._add_up()
        medians: list[float] = self._line.medians()[:STEP].tolist()
        self._line.clear()
        return medians

    def summary(self) -> dict[str, Any]:
        """What summary.json says of all ranks; a collective. What was not measured is None."""
        self._add_up()
        medians_WS = np.asarray(all_gather_object(self._run.medians()))
        if not np.isfinite(medians_WS).all():
            logger.info(
                "the stages of the steps are not summed up: none was measured from step %d on",
                self.compared_from_step,
            )
            return _measured(self.compared_from_step, None, None)
        return _measured(
            self.compared_from_step,
            medians_WS.mean(axis=0).tolist(),
            medians_WS.max(axis=0).tolist(),
        )


def _measured(
    from_step: int, mean: Sequence[float] | None, most: Sequence[float] | None
) -> dict[str, Any]:
    if mean is None or most is None:
        return {**dict.fromkeys(MEASURED), "compared_from_step": from_step}
    figures = (
        mean[STEP],
        dict(zip(STAGES, mean[:EXPOSED], strict=True)),
        dict(zip(STAGES, most[:EXPOSED], strict=True)),
        mean[EXPOSED],
        most[EXPOSED],
        mean[EXPOSED] / mean[STEP] if mean[STEP] else None,
    )
    return {**dict(zip(MEASURED, figures, strict=True)), "compared_from_step": from_step}


def compare(prediction: Mapping[str, Any] | None, summary: Mapping[str, Any]) -> dict[str, Any]:
    """What summary.json says of a prediction; errors are (predicted - measured) / measured.

    Args:
        prediction: "step_s", "stage_s" by stage, "total_sent_bytes" per step and rank; None for
            none.
        summary: the measured figures.
    """
    if prediction is None:
        return {}
    step_s, sent_bytes = float(prediction["step_s"]), float(prediction["total_sent_bytes"])
    return {
        "predicted_step_s": step_s,
        "predicted_stage_s": dict(prediction["stage_s"]),
        "predicted_sent_bytes": sent_bytes,
        "step_error_frac": _error_frac(step_s, summary["measured_step_s"]),
        "sent_bytes_error_frac": _error_frac(sent_bytes, summary["sent_bytes_total"]),
    }


def _error_frac(predicted: float, measured: float | None) -> float | None:
    return (predicted - measured) / measured if measured else None
