"""Stage 6: two and three ranks on the one GPU train what one unsplit model trains.

NCCL refuses two ranks on a device, so the tests bring a process group that stages tensors through
pinned memory. On CPU their twin runs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu_day.kernels import STAGED, run_tests, tests_table, tests_verdict
from benchmarks.gpu_day.record import Parts, Summary
from benchmarks.gpu_day.stage import Day, main

REPOSITORY = Path(__file__).resolve().parents[2]
ON_GPU, ON_CPU = STAGED, "tests/distributed/test_staged.py"


def run_staged(test: str, *words: str) -> dict[str, Any]:
    """Run the tests of the staged process group.

    Raises:
        RuntimeError: if they are not there.
    """
    if not (REPOSITORY / test).exists():
        raise RuntimeError(f"missing: {test}")
    return run_tests(test, *words, limit_s=500)


def summarize(parts: Parts) -> Summary:
    done = {name: part for name, part in parts.items() if "tests" in part}
    said = "; ".join(f"{name}: {tests_verdict(part)}" for name, part in done.items())
    return Summary(
        f"{said or 'No test has run'}.",
        [tests_table(part) for part in done.values()],
        all(part["is_ok"] for part in done.values()),
    )


def run(day: Day) -> None:
    test = day.pick(ON_GPU, ON_CPU)
    # The suite runs all of the twin; here one rank shows that the stage works.
    words = day.pick((), ("-k", "reference and 1"))
    day.record.part(test, lambda: run_staged(test, *words))


if __name__ == "__main__":
    sys.exit(main(run, summarize))
