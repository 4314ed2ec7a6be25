"""``hotrec report``: one page and one JSON document from run directories or a sweep."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from hotrec.artifact import MANIFEST, read_artifact
from hotrec.assemble.counted import profile_path
from hotrec.config.roots import ReportConfig
from hotrec.config.text import read_yaml
from hotrec.report.read import find_jobs
from hotrec.report.runs import Report, make_report
from hotrec.runtime.run_dir import CONFIG_FILE, PARTITION, POINT, SUMMARY, find_run

PARTITION_KIND = "partition"
logger = logging.getLogger(__name__)


def run(config: ReportConfig, run_dir: Path) -> dict[str, Any]:
    """Write report.html and report.json, by default into this command's own run directory."""
    output = Path(config.output) if config.output else run_dir
    if (output / "report.html").exists() and not (output / "report.json").exists():
        raise ValueError(
            f"output: expected an empty directory or that of a report, got {output} with a "
            "report.html of another program. Choose another directory."
        )
    report = make_report_of(config)
    report.write(output)
    page = output / "report.html"
    if config.text:
        print(report.text(), file=sys.stderr)
    return {"command": "report", "page": page, **report.document}


def make_report_of(config: ReportConfig, title: str = "hotrec report") -> Report:
    """The report as configured, with the counts and the partition of the first run."""
    runs = [run for path in config.runs for run in _find_runs(path)]
    if not runs:
        raise ValueError("runs: expected at least one run directory, got none.")
    partition, profile = _recorded_partition(runs), _recorded_profile(runs[0])
    if profile is not None and partition.exists():
        counted = read_artifact(profile, kind="profile").content_hash
        if read_artifact(partition, kind=PARTITION_KIND).made_from["profile"] != counted:
            profile = None  # the dataset has changed since
    return make_report(
        runs,
        profile=profile,
        partition=partition if partition.exists() and profile is not None else None,
        compared=Path(config.compared) if config.compared else None,
        title=title,
    )


def _recorded_partition(runs: Sequence[Path]) -> Path:
    """The partition of the first run that has hot rows, else of the first."""
    found = [run / PARTITION for run in runs if (run / PARTITION / MANIFEST).exists()]

    def has_hot_rows(partition: Path) -> bool:
        content = read_artifact(partition, kind=PARTITION_KIND).content
        return bool(content["total"]["hot_rows"])

    return next(filter(has_hot_rows, found), runs[0] / PARTITION)


def _find_runs(path: str) -> list[Path]:
    """The run, or the jobs of the sweep, at a path."""
    is_run = path == "latest" or (Path(path) / SUMMARY).exists()
    jobs = [] if is_run else find_jobs(Path(path), SUMMARY, POINT)
    return jobs or [find_run(path, holding=SUMMARY, key="runs")]


def _recorded_profile(run_dir: Path) -> Path | None:
    """The profile of the dataset in a run's configuration, if it still exists."""
    recorded = run_dir / CONFIG_FILE
    if not recorded.exists():
        return None
    dataset = OmegaConf.select(OmegaConf.create(read_yaml(recorded)), "paths.dataset")
    profile = profile_path(dataset) if dataset else None
    return profile if profile is not None and profile.exists() else None
