"""Run directories: the names of what they hold, and how to find one again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIG_FILE, SUMMARY = "config.yaml", "summary.json"
PLAN_JSON, PLAN_TEXT, ENVIRONMENT = "plan.json", "plan.txt", "environment.json"
CHECKPOINTS, PARTITION, PREDICTION = "checkpoints", "partition", "prediction.json"
TRACES = "traces"
# In the directory of each job of a sweep: {"overrides": {key: value}}, with what plan adds.
POINT = "point.json"
# Where a run writes its record until its configuration and checkpoint have been accepted.
STAGED = ".staged"
LOCK_FILE = ".lock"
RUNS = Path("runs")


def read_finished(run_dir: Path, config_text: str | None = None) -> dict[str, Any] | None:
    """The summary of a run that has made all its steps; None for any other.

    Args:
        run_dir: Directory of the run.
        config_text: If given, the configuration that the run must have recorded.
    """
    try:
        summary = json.loads((run_dir / SUMMARY).read_text())
        is_same = config_text is None or (run_dir / CONFIG_FILE).read_text() == config_text
        return dict(summary) if summary["finished"] is True and is_same else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def find_run(path: str, *, holding: str, key: str) -> Path:
    """A run directory as configured, or the newest under ``runs/`` for "latest".

    Args:
        holding: File that a run of the expected kind contains.
        key: Configuration key for messages.

    Raises:
        ValueError: If there is no such run.
    """
    if path != "latest":
        run_dir = Path(path)
        if not (run_dir / holding).exists():
            raise ValueError(
                f"{key}: expected a run directory with {holding}, got {path}, which has none. "
                "Pass a directory that `hotrec train` wrote."
            )
        return run_dir
    found = sorted(RUNS.rglob(holding), key=lambda file: file.stat().st_mtime)
    if not found:
        raise ValueError(
            f"{key}: expected a run with {holding} under {RUNS}/ for latest, got none. "
            "Run `hotrec train` first, or name a run."
        )
    return found[-1].parents[len(Path(holding).parts) - 1]
