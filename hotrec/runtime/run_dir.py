"""Run directories: the names of their files, and how to find one."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from hotrec.artifact import read_record

logger = logging.getLogger(__name__)

CONFIG_FILE, SUMMARY = "config.yaml", "summary.json"
# A line per logged step, per evaluation, and per decision on hot rows.
METRICS, EVAL, HOT_SET = "metrics.jsonl", "eval.jsonl", "hot_set.jsonl"
PLAN_JSON, PLAN_TEXT, ENVIRONMENT = "plan.json", "plan.txt", "environment.json"
CHECKPOINTS, PARTITION, PREDICTION = "checkpoints", "partition", "prediction.json"
TRACES = "traces"
# In the directory of each job of a sweep: {"overrides": {key: value}}, with what plan adds.
POINT = "point.json"
# Where a run writes its record until its configuration and checkpoint have been accepted.
STAGED = ".staged"
LOCK_FILE = ".lock"
# In a directory of `hotrec run`, and next to artifacts: their inputs. Such a directory has the run
# in TRAINED, and for comparison one with TorchRec's own plan in COMPARISON, and one with hot rows
# in COUNTERPART, or without if the run has some.
RECORD = "made.json"
TRAINED, COMPARISON, COUNTERPART = "train", "torchrec", "counterpart"
RUNS = Path("runs")


def read_finished(run_dir: Path, config_text: str | None = None) -> dict[str, Any] | None:
    """The summary of a run that has finished all its steps; None for any other.

    Args:
        run_dir: Directory of the run.
        config_text: If given, the configuration that the run must have recorded.
    """
    try:
        summary = json.loads(read_record(run_dir / SUMMARY))
        is_same = config_text is None or read_record(run_dir / CONFIG_FILE) == config_text
        return dict(summary) if summary["finished"] is True and is_same else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def latest_step(run_dir: Path) -> int | None:
    """The step of a run's latest checkpoint, by its name; None if there is none."""
    try:
        return int(read_record(run_dir / CHECKPOINTS / "latest").strip().rpartition("-")[2])
    except (OSError, ValueError):
        return None


def find_run(path: str, *, holding: str, key: str) -> Path:
    """A run directory as configured, or the newest under ``runs/`` for "latest".

    A directory of ``hotrec run`` refers to the run in it. Baselines of a comparison, and runs
    without a recorded configuration, are never the newest.

    Args:
        holding: File that a run of the expected kind contains.
        key: Configuration key for messages.

    Raises:
        ValueError: If there is no such run.
    """
    if path != "latest":
        run_dir = run_at(Path(path), holding)
        if run_dir is not None:
            return run_dir
        raise ValueError(
            f"{key}: expected a run directory with {holding}, got {path} without it. Pass a "
            "directory written by `hotrec train` or `hotrec run`."
        )
    depth = len(Path(holding).parts) - 1
    found = {file.parents[depth]: file.stat().st_mtime_ns for file in RUNS.rglob(holding)}
    usable = [
        run_dir
        for run_dir in found
        if (run_dir / CONFIG_FILE).exists() and not is_comparison(run_dir)
    ]
    if not usable:
        raise ValueError(
            f"{key}: expected a run with {holding} under {RUNS}/ for latest, got none. "
            "Run `hotrec train` first, or name a run."
        )
    newest = max(usable, key=lambda run_dir: found[run_dir])
    logger.info("%s=latest: %s", key, newest)
    return newest


def run_at(path: Path, holding: str) -> Path | None:
    """The run directory with that file: this one, or the run of ``hotrec run`` in it."""
    return next((at for at in (path, path / TRAINED) if (at / holding).exists()), None)


def find_trained(path: str) -> Path:
    """The run directory whose model is evaluated, exported or scored with; see ``find_run``."""
    return find_run(path, holding=f"{CHECKPOINTS}/latest", key="run_dir")


def is_comparison(run_dir: Path) -> bool:
    """Whether this is a baseline of a comparison by ``hotrec run``."""
    return run_dir.name in (COMPARISON, COUNTERPART) and (run_dir.parent / RECORD).exists()
