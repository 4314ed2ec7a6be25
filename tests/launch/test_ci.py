""".ci/run: the last line is a closing line of pytest, and the exit status that of what failed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.launch.conftest import REPOSITORY

# Prints what pytest would, then adds lines after it, as make does when something fails.
MAKE = """#!/bin/sh
echo "$1" >> "$RECORD"
case "$1" in
    "$REFUSED") exit 1 ;;
    test-oldest) closing="$OLDEST in 2.00s" ;;
    test-all) closing="$ALL in 3.00s (0:00:03)" ;;
esac
case "$closing" in
    *skipped*) echo "SKIPPED [1] tests/test_a.py:1: $REASON" ;;
esac
echo "=== $closing ==="
echo "make: leaving" >&2
case "$closing" in
    *failed*) exit 2 ;;
esac
"""


def run(
    folder: Path, oldest: str, everything: str, refused: str = "", reason: str = ""
) -> tuple[int, str, list[str]]:
    make, record = folder / "make", folder / "record"
    make.write_text(MAKE)
    make.chmod(0o755)
    done = subprocess.run(
        [str(REPOSITORY / ".ci" / "run")],
        env={
            "PATH": f"{folder}:{os.environ['PATH']}",
            "RECORD": str(record),
            "REFUSED": refused,
            "OLDEST": oldest,
            "ALL": everything,
            "REASON": reason,
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    last = done.stdout.splitlines()[-1] if done.stdout else ""
    return done.returncode, last, record.read_text().split()


@pytest.mark.parametrize(
    ("oldest", "everything", "reason", "status", "last"),
    [
        ("20 passed", "90 passed", "", 0, "90 passed in 3.00s (0:00:03)"),
        ("1 failed, 19 passed", "90 passed", "", 2, "1 failed, 19 passed in 2.00s"),
        ("20 passed", "2 failed", "", 2, "2 failed in 3.00s (0:00:03)"),
        ("20 passed", "9 passed, 1 skipped", "needs a CUDA device", 0, ""),
        ("20 passed", "9 passed, 1 skipped", "could not import 'polars'", 1, ""),
    ],
)
def test_the_last_line_is_that_of_what_failed(
    tmp_path: Path, oldest: str, everything: str, reason: str, status: int, last: str
) -> None:
    found, line, made = run(tmp_path, oldest, everything, reason=reason)
    assert (found, made) == (status, ["lint", "docs", "test-oldest", "test-all"])
    assert last in line


def test_what_needs_no_test_run_stops_it(tmp_path: Path) -> None:
    status, _, targets = run(tmp_path, "20 passed", "90 passed", "docs")
    assert (status, targets) == (1, ["lint", "docs"])
