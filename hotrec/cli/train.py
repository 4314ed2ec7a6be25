"""``hotrec train``: a training run on ranks that a watchdog watches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hotrec.cli.launch import RUN_DIR
from hotrec.cli.output import CommandFailed, EndedEarly, log_trace, print_error
from hotrec.config.roots import Config, TrainerConfig
from hotrec.planning.unsharded import chosen_device
from hotrec.runs.train import run_training
from hotrec.runtime.postmortem import memory_snapshot, set_up_flight_recorder
from hotrec.runtime.ranks import Ranks, process_group
from hotrec.runtime.run_dir import CHECKPOINTS
from hotrec.runtime.watchdog import EXIT_CODE, LostRank, Watchdog
from hotrec.train.checkpoint import find_latest
from hotrec.train.watch import STOPPED_EXIT_CODE


def run(config: Config, run_dir: Path) -> dict[str, Any]:
    """Train; the figures are those of summary.json."""
    device = chosen_device(config.trainer.device)
    with _watched_ranks(config.trainer, device, run_dir) as ranks:
        result = run_training(config, run_dir, ranks)
    figures = {"command": "train", "run_dir": run_dir, **result.summary}
    if not result.is_finished:
        raise EndedEarly(figures, STOPPED_EXIT_CODE)
    return figures


@contextmanager
def _watched_ranks(trainer: TrainerConfig, device: str, run_dir: Path) -> Iterator[Ranks]:
    """Join the process group and watch its ranks.

    Raises:
        CommandFailed: If a rank was lost, after that has been printed; with the watchdog's code.
    """
    directory = set_up_flight_recorder(run_dir, device)

    def advice() -> str:
        return f"{_restart_advice(run_dir)} The last collectives are in {directory}."

    with process_group(device=device, timeout_s=trainer.timeout_s) as ranks:
        try:
            with (
                Watchdog(
                    ranks, limit_s=trainer.watchdog_s, advice=advice, flight_recorder=directory
                ),
                memory_snapshot(run_dir, ranks),
            ):
                yield ranks
        except LostRank as lost:
            # Before the process group ends: it may wait for the rank that is gone.
            log_trace(lost)
            print_error(lost, wants_trace=False)
            raise CommandFailed(EXIT_CODE) from lost


def _restart_advice(run_dir: Path) -> str:
    try:
        latest = find_latest(run_dir / CHECKPOINTS)
    except (OSError, ValueError):
        latest = None
    again = f"Start the same command again with {RUN_DIR}={run_dir}"
    if latest is None:
        return f"{again}; there is no checkpoint yet, so training starts from the beginning."
    return f"{again}: it resumes from checkpoint {latest.name}."
