"""Where this rank stands: for each line of work the step, the stage, and since when.

``enter`` and ``passed`` cost less than a microsecond, and next to nothing where no watchdog runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident

MAIN = "main"
COMMUNICATION = "communication"

# Stages of the main lane that may take long on one rank while the others wait, such as writing a
# checkpoint. In them only the collectives' own limit holds.
START = "start"
FIRST_STEP = "first step"
METRICS = "metrics"
CHECKPOINT = "checkpoint"
UNLIMITED = frozenset({START, FIRST_STEP, METRICS, CHECKPOINT})
STEP = "step"
EVALUATION = "evaluation"
CHECK_UP = "check-up"


@dataclass(frozen=True, slots=True)
class Lane:
    """One line of work at one moment.

    Args:
        stage: what it does, since ``age_s`` seconds.
        step: for which step; None outside steps.
        count: stages entered so far. Ranks enter the same ones, so the smallest count is behind.
    """

    stage: str
    step: int | None
    age_s: float
    count: int

    def __str__(self) -> str:
        if self.step is None:
            return self.stage
        if self.stage in (STEP, FIRST_STEP):
            return f"step {self.step}"
        return f"{self.stage} of step {self.step}"


class Position:
    """Where this rank stands; written by the threads that work, read by the watchdog's."""

    def __init__(self) -> None:
        self.main_thread = get_ident()
        # Entries are replaced as a whole, so a reader sees no half of one.
        self._lanes: dict[str, tuple[str, int | None, float, int]] = {}
        self._passed: tuple[str, float] | None = None

    def enter(self, lane: str, stage: str, step: int | None = None) -> None:
        """From now on ``lane`` is in ``stage`` of ``step``."""
        last = self._lanes.get(lane)
        self._lanes[lane] = (stage, step, time.monotonic(), last[3] + 1 if last else 1)
        if lane == MAIN:
            self._passed = None

    def passed(self, stage: str) -> None:
        """The main lane has left a stage that ``hotrec.runtime.stages.mark`` names."""
        self._passed = (stage, time.monotonic())

    def lanes(self) -> dict[str, Lane]:
        """All lanes as they are now."""
        now_s = time.monotonic()
        return {
            name: Lane(stage, step, now_s - since_s, count)
            for name, (stage, step, since_s, count) in list(self._lanes.items())
        }

    @property
    def last_passed(self) -> str | None:
        """The stage that the main lane left last, since it entered where it is; None: none."""
        passed = self._passed
        return passed[0] if passed else None

    @property
    def age_s(self) -> float:
        """Seconds since anything changed; 0 before the first stage."""
        times = [since_s for _, _, since_s, _ in list(self._lanes.values())]
        if self._passed is not None:
            times.append(self._passed[1])
        return time.monotonic() - max(times) if times else 0.0


_position: Position | None = None


def enter(lane: str, stage: str, step: int | None = None) -> None:
    """From now on this rank's ``lane`` is in ``stage`` of ``step``; nothing without a watchdog.

    Every rank has to enter the same stages in the same order, but for those of a lane that only
    some ranks have.

    Args:
        lane: MAIN, COMMUNICATION, or another line of work that has a thread of its own.
        stage: one of ``hotrec.types.STAGES``, or any short words.
    """
    if _position is not None:
        _position.enter(lane, stage, step)


def passed(stage: str) -> None:
    """The main lane has left ``stage``; nothing without a watchdog."""
    if _position is not None:
        _position.passed(stage)


@contextmanager
def positioned() -> Iterator[Position]:
    """Keep the position of this process inside the block; the caller's thread is the main one."""
    global _position
    outer, _position = _position, Position()
    try:
        yield _position
    finally:
        _position = outer
