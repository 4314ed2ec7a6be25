"""``hotrec train``: ranks under the watchdog, and a training run on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hotrec.cli.errors import EndedEarly
from hotrec.cli.watched import watched_ranks
from hotrec.config.roots import Config
from hotrec.planning.unsharded import chosen_device
from hotrec.runs.train import run_training
from hotrec.train.watch import STOPPED_EXIT_CODE


def run(config: Config, run_dir: Path) -> dict[str, Any]:
    """Train; the figures are those of summary.json."""
    device = chosen_device(config.trainer.device)
    with watched_ranks(config.trainer, device, run_dir) as ranks:
        result = run_training(config, run_dir, ranks)
    figures = {"command": "train", "run_dir": run_dir, **result.summary}
    if not result.is_finished:
        raise EndedEarly(figures, STOPPED_EXIT_CODE)
    return figures
