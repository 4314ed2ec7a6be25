"""The process group of a training run, with its watchdog."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hotrec.cli.environment import RUN_DIR
from hotrec.cli.errors import CommandFailed, print_error
from hotrec.cli.logs import log_trace
from hotrec.config.roots import TrainerConfig
from hotrec.runtime.postmortem import memory_snapshot, set_up_flight_recorder
from hotrec.runtime.ranks import Ranks, process_group
from hotrec.runtime.run_dir import CHECKPOINTS
from hotrec.runtime.watchdog import EXIT_CODE, LostRank, Watchdog
from hotrec.train.checkpoint import find_latest


@contextmanager
def watched_ranks(trainer: TrainerConfig, device: str, run_dir: Path) -> Iterator[Ranks]:
    """Join the process group and watch its ranks; ``runtime.postmortem`` says what is recorded.

    Raises:
        CommandFailed: with the watchdog's exit code, if a rank was lost; that has been printed.
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
        return f"{again}; there is no checkpoint yet, so it begins anew."
    return f"{again}: it goes on from its checkpoint {latest.name}."
