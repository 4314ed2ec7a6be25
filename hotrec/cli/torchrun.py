"""``launch.num_ranks=N``: run the command again as N ranks, in a child torchrun.

The child gets the job's own overrides and directory, so each job of a sweep has its ranks and its
directory. Signals are passed on and the exit code comes back.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

from hotrec.cli.environment import RUN_DIR

FORWARDED = (signal.SIGTERM, signal.SIGINT)


def torchrun_command(command: str, overrides: Sequence[str], *, num_ranks: int) -> list[str]:
    """The command line of the child."""
    launcher = [sys.executable, "-m", "hotrec.cli.ranks", "--standalone"]
    # Else the ranks get this host's own name, and wait for minutes where it has no address.
    launcher += ["--local-addr", "localhost"]
    return [*launcher, "--nproc-per-node", str(num_ranks), "-m", "hotrec", command, *overrides]


def run_under_torchrun(
    command: str,
    overrides: Sequence[str],
    *,
    num_ranks: int,
    run_dir: str,
    environment: Mapping[str, str],
) -> int:
    """Run the command as ``num_ranks`` processes on this host and wait for them.

    Args:
        overrides: the job's own words, without those of the sweep.
        environment: of the child, which gets HOTREC_RUN_DIR besides.

    Returns:
        The exit code; 128 + n after signal n.

    Raises:
        SystemExit: if a signal ended this process's part too, so that a sweep stops.
    """
    variables = {**environment, RUN_DIR: run_dir}
    # torchrun would set 1 with a warning; here it is a decision: ranks share the host's cores.
    variables.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))
    # A session of its own: the terminal's Ctrl-C must reach the ranks once, through us.
    child = subprocess.Popen(
        torchrun_command(command, overrides, num_ranks=num_ranks),
        env=variables,
        start_new_session=True,
    )
    with _forwarding(child) as received:
        exit_code = child.wait()
    if received:
        raise SystemExit(exit_code if exit_code >= 0 else 128 - exit_code)
    return exit_code if exit_code >= 0 else 128 - exit_code


@contextmanager
def _forwarding(child: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """Send the signals that this process gets to the child instead; yields those received."""
    received: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        if child.poll() is None:
            child.send_signal(number)

    previous = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
