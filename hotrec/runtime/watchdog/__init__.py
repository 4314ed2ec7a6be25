"""Never a hang: when a rank is missing, the others say which one and where, and end.

Around a run, on every rank: ``with watching(ranks, limit_s=120): ...``. Inside, ``enter(lane,
stage, step)`` says where this rank stands.
"""

from hotrec.runtime.watchdog.errors import EXIT_CODE, LostRank
from hotrec.runtime.watchdog.position import (
    CHECK_UP,
    CHECKPOINT,
    COMMUNICATION,
    EVALUATION,
    FIRST_STEP,
    MAIN,
    METRICS,
    START,
    STEP,
    enter,
    passed,
)
from hotrec.runtime.watchdog.watching import watching

__all__ = [
    "CHECKPOINT",
    "CHECK_UP",
    "COMMUNICATION",
    "EVALUATION",
    "EXIT_CODE",
    "FIRST_STEP",
    "MAIN",
    "METRICS",
    "START",
    "STEP",
    "LostRank",
    "enter",
    "passed",
    "watching",
]
