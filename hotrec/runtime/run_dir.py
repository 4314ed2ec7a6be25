"""Run directories: the names of what they hold, and how to find one again."""

from __future__ import annotations

from pathlib import Path

CONFIG_FILE, SUMMARY = "config.yaml", "summary.json"
PLAN_JSON, PLAN_TEXT, ENVIRONMENT = "plan.json", "plan.txt", "environment.json"
CHECKPOINTS, PARTITION, PREDICTION = "checkpoints", "partition", "prediction.json"
TRACES = "traces"
RUNS = Path("runs")


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
