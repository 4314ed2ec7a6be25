"""``hotrec train``: a training run on ranks that a watchdog watches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hotrec.assemble.job import chosen_device
from hotrec.cli.launch import RUN_DIR
from hotrec.cli.output import EndedEarly
from hotrec.cli.watched import watched_ranks
from hotrec.config.roots import Config
from hotrec.runs.train import run_training
from hotrec.runtime.run_dir import CHECKPOINTS
from hotrec.train.checkpoint import find_latest


def run(config: Config, run_dir: Path) -> dict[str, Any]:
    """Train; the figures are those of summary.json."""
    device = chosen_device(config.trainer.device)
    trainer = config.trainer
    with watched_ranks(
        run_dir,
        device=device,
        timeout_s=trainer.timeout_s,
        watchdog_s=trainer.watchdog_s,
        advice=lambda: _restart_advice(run_dir),
        memory_stacks=trainer.memory_stacks,
    ) as ranks:
        result = run_training(config, run_dir, ranks)
    figures = {"command": "train", "run_dir": run_dir, **result.summary}
    if not result.is_finished:
        raise EndedEarly(figures, result.exit_code)
    return figures


def _restart_advice(run_dir: Path) -> str:
    try:
        latest = find_latest(run_dir / CHECKPOINTS)
    except (OSError, ValueError):
        latest = None
    again = f"Run the same command again with {RUN_DIR}={run_dir}"
    if latest is None:
        return f"{again}; there is no checkpoint yet, so training starts from the beginning."
    return f"{again}: it resumes from checkpoint {latest.name}."
