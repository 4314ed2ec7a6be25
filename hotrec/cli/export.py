"""``hotrec export``: a run's model in files that need only PyTorch to read."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from hotrec.cli.store import read_config
from hotrec.config.roots import Config, ExportConfig
from hotrec.runs.evaluate import is_best
from hotrec.runs.export import EVALUATED_ON, export_run
from hotrec.runtime.run_dir import CHECKPOINTS, CONFIG_FILE, find_trained


def run(config: ExportConfig, run_dir: Path) -> dict[str, Any]:
    """Export the model that the training run recorded."""
    start_s = time.perf_counter()
    trained_dir = find_trained(config.run_dir)
    trained = read_config(trained_dir / CONFIG_FILE, Config)
    exported = export_run(config, trained, trained_dir)
    return {
        "command": "export",
        "run_dir": trained_dir,
        "output": exported.artifact.path,
        "checkpoint": exported.checkpoint,
        "step": exported.step,
        "is_best": is_best(trained_dir / CHECKPOINTS / exported.checkpoint),
        "rows": config.rows.name,
        "num_rows": exported.num_rows,
        "num_bytes": sum(file["num_bytes"] for file in exported.artifact.files.values()),
        "split": None if exported.quality is None else EVALUATED_ON,
        **({} if exported.quality is None else exported.quality.to_json()),
        "elapsed_s": time.perf_counter() - start_s,
    }
