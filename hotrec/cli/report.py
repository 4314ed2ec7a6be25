"""``hotrec report``: one page and one JSON document from run directories."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from hotrec.config.roots import ReportConfig
from hotrec.report import write_report
from hotrec.runtime.run_dir import CONFIG_FILE, PARTITION, find_run

logger = logging.getLogger(__name__)


def run(config: ReportConfig, run_dir: Path) -> dict[str, Any]:
    """Write report.html and report.json, by default into this command's own run directory."""
    runs = [find_run(path, holding="summary.json", key="runs") for path in config.runs]
    if not runs:
        raise ValueError("runs: expected at least one run directory, got none.")
    output = Path(config.output) if config.output else run_dir
    if (output / "report.html").exists() and not (output / "report.json").exists():
        raise ValueError(
            f"output: expected an empty directory or that of a report, got {output} with a "
            "report.html of another program. Choose another directory."
        )
    partition = Path(config.partition) if config.partition else runs[0] / PARTITION
    profile = Path(config.profile) if config.profile else _recorded_profile(runs[0])
    is_recorded = partition.exists() and profile is not None
    document = write_report(
        runs,
        output,
        profile=profile,
        partition=partition if config.partition or is_recorded else None,
        baseline=config.baseline,
        title=config.title,
    )
    page = output / "report.html"
    logger.info("report: %s", page)
    return {"command": "report", "page": page, "runs": runs, **document}


def _recorded_profile(run_dir: Path) -> Path | None:
    """The profile in a run's configuration, if it still exists."""
    recorded = run_dir / CONFIG_FILE
    if not recorded.exists():
        return None
    profile = OmegaConf.select(OmegaConf.load(recorded), "paths.profile")
    return Path(profile) if profile and Path(profile).exists() else None
