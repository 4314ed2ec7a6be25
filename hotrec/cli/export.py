"""``hotrec export``: a run's model in files that need only PyTorch to read."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from hotrec.cli.store import read_config
from hotrec.config.roots import Config, ExportConfig
from hotrec.runs.export import export_run
from hotrec.runtime.run_dir import CONFIG_FILE, find_trained


def run(config: ExportConfig, run_dir: Path) -> dict[str, Any]:
    """Export the model that the training run recorded."""
    start_s = time.perf_counter()
    trained_dir = find_trained(config.run_dir)
    trained = read_config(trained_dir / CONFIG_FILE, Config)
    return {
        "command": "export",
        "run_dir": trained_dir,
        **export_run(config, trained, trained_dir),
        "elapsed_s": time.perf_counter() - start_s,
    }
