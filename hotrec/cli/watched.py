"""The ranks of a command, watched from their first exchange to their last."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hotrec.cli.output import CommandFailed, log_trace, print_error, print_once
from hotrec.cli.store import read_config
from hotrec.config.roots import Config
from hotrec.runtime.postmortem import memory_snapshot, set_up_flight_recorder
from hotrec.runtime.ranks import Ranks, broadcast_object, process_group, same_verdict
from hotrec.runtime.run_dir import CONFIG_FILE, find_trained
from hotrec.runtime.watchdog import EXIT_CODE
from hotrec.runtime.watchdog.watchdog import LostRank, Watchdog


@contextmanager
def watched_ranks(
    run_dir: Path,
    *,
    device: str,
    timeout_s: float = 600.0,
    watchdog_s: float = 120.0,
    advice: Callable[[], str] = lambda: "Run the same command again.",
    memory_stacks: bool = False,
) -> Iterator[Ranks]:
    """Join the process group and watch its ranks.

    Args:
        run_dir: Directory for post-mortem files.
        device: "cpu", "cuda" or "auto".
        timeout_s: Limit of a collective.
        watchdog_s: Limit without progress in a step or an evaluation.
        advice: Returns the last sentence of the message about a lost rank.
        memory_stacks: Whether a snapshot of GPU memory has the stacks of its allocations.

    Raises:
        CommandFailed: If a rank was lost, after printing the message; with the watchdog's code.
    """
    directory = set_up_flight_recorder(run_dir, device)

    def full_advice() -> str:
        return f"{advice()} The last collectives are in {directory}."

    with process_group(device=device, timeout_s=timeout_s) as ranks:
        try:
            with (
                Watchdog(
                    ranks,
                    limit_s=watchdog_s,
                    advice=full_advice,
                    flight_recorder=directory,
                    once=print_once,
                ),
                memory_snapshot(run_dir, ranks, has_stacks=memory_stacks),
            ):
                yield ranks
        except LostRank as lost:
            # Before the process group ends: that may wait for the lost rank.
            log_trace(lost)
            print_error(lost, wants_trace=False)
            raise CommandFailed(EXIT_CODE) from lost


def read_trained(run_dir: str, ranks: Ranks) -> tuple[Path, Config]:
    """The directory of a finished run and its configuration, found by rank 0; collective.

    Raises:
        ValueError: On every rank, if there is no such run.
    """
    found = same_verdict(lambda: find_trained(run_dir) if ranks.is_first else None)
    directory = broadcast_object(found)
    assert directory is not None  # rank 0 has found it
    return directory, same_verdict(lambda: read_config(directory / CONFIG_FILE, Config))
