"""Names the rank that died, hangs or failed, and ends the others: ``with Watchdog(ranks): ...``."""

from hotrec.runtime.watchdog.progress import (
    ADAPTATION,
    CHECK_UP,
    CHECKPOINT,
    COMMUNICATION,
    EVALUATION,
    FIRST_STEP,
    MAIN,
    METRICS,
    START,
    STEP,
    TRIAL,
    enter,
    leave,
    passed,
)
from hotrec.runtime.watchdog.watchdog import EXIT_CODE, LostRank, Watchdog

__all__ = ["EXIT_CODE", "LostRank", "Watchdog", "enter", "leave", "passed"]
__all__ += ["COMMUNICATION", "MAIN"]
__all__ += [
    "ADAPTATION",
    "CHECKPOINT",
    "CHECK_UP",
    "EVALUATION",
    "FIRST_STEP",
    "METRICS",
    "START",
    "STEP",
    "TRIAL",
]
