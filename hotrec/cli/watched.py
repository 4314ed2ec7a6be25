"""Ranks under a watchdog, as a command has them: a lost rank is one message and one exit code."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hotrec.cli.environment import RUN_DIR
from hotrec.cli.errors import CommandFailed, print_error
from hotrec.cli.logs import log_trace
from hotrec.config.roots import TrainerConfig
from hotrec.runtime.postmortem import keep_flight_recorder, memory_snapshot
from hotrec.runtime.ranks import Ranks, process_group
from hotrec.runtime.run_dir import CHECKPOINTS
from hotrec.runtime.watchdog import EXIT_CODE, LostRank, watching
from hotrec.train.checkpoint import find_latest


@contextmanager
def watched_ranks(trainer: TrainerConfig, device: str, run_dir: Path) -> Iterator[Ranks]:
    """Join the process group of a training run and watch its ranks until the block ends.

    What helps to find out why it ended is left in the run's directory: see
    ``hotrec.runtime.postmortem``.

    Raises:
        CommandFailed: with the watchdog's exit code, if a rank was lost; that has been printed.
    """
    flight_recorder = keep_flight_recorder(run_dir, device)
    with process_group(device=device, timeout_s=trainer.timeout_s) as ranks:
        try:
            with (
                watching(
                    ranks,
                    limit_s=trainer.watchdog_s,
                    advice=lambda: (
                        f"{restart_advice(run_dir)} The last collectives are in {flight_recorder}."
                    ),
                    flight_recorder=flight_recorder,
                ),
                memory_snapshot(run_dir, ranks),
            ):
                yield ranks
        except LostRank as lost:
            # Before the process group ends: it may wait for the rank that is gone.
            with suppress(ValueError):  # not the main thread
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, after a death
            log_trace(lost)
            print_error(lost, wants_trace=False)
            raise CommandFailed(EXIT_CODE) from lost


def restart_advice(run_dir: Path) -> str:
    """How to go on with the run of this directory."""
    try:
        latest = find_latest(run_dir / CHECKPOINTS)
    except (OSError, ValueError):
        latest = None
    again = f"Start the same command again with {RUN_DIR}={run_dir}"
    if latest is None:
        return f"{again}; there is no checkpoint yet, so it begins anew."
    return f"{again}: it goes on from its checkpoint {latest.name}."
