"""``python -m hotrec.cli.ranks``: torchrun, with a last line for people instead of its own trace.

Takes torchrun's arguments. Exits with the code of the rank that failed first, so that a run which
SIGTERM ended can be told from one that failed.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import partialmethod

from torch.distributed.elastic.multiprocessing.api import PContext, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import get_args_parser
from torch.distributed.run import main as torchrun

from hotrec.runtime.watchdog import EXIT_CODE

# What follows from another rank's end: the watchdog's verdict, then torchrun's SIGTERM.
CONSEQUENCES = {EXIT_CODE: 1, -signal.SIGTERM: 2}
# Failures this far apart may have come in either order: torchrun notes whole seconds.
SAME_TIME_S = 1


def ended_first(failures: Mapping[int, ProcessFailure]) -> int:
    """The rank that failed first.

    torchrun notes whole seconds, and the others end within milliseconds of a rank that died: their
    watchdog ends them, and torchrun what is left. So of failures at the same time one by itself
    goes before those that follow from it.

    Args:
        failures: by rank, not empty.
    """
    start_s = min(failure.timestamp for failure in failures.values())

    def order(rank: int) -> tuple[int, int, int]:
        failure = failures[rank]
        later_s = failure.timestamp - start_s
        is_later = later_s > SAME_TIME_S
        kind = CONSEQUENCES.get(failure.exitcode, 0)
        return (later_s, 0, rank) if is_later else (0, kind, rank)

    return min(failures, key=order)


def obey_shutdown_timeout(arguments: Sequence[str]) -> list[str]:
    """See to ``--shutdown-timeout`` where torchrun has no such option (torch 2.11).

    Returns:
        What is left for torchrun.
    """
    if "--shutdown-timeout" in get_args_parser().format_help():
        return list(arguments)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--shutdown-timeout", type=int)
    own, others = parser.parse_known_args(arguments)
    if own.shutdown_timeout is not None:
        # What the agent calls to end its ranks, without saying how long it is to wait for them.
        close = partialmethod(PContext.close, timeout=own.shutdown_timeout)
        PContext.close = close  # type: ignore[assignment,method-assign]
    return others


def main() -> int:
    """Run torchrun; the exit code, 128 + n after signal n."""
    # The ranks have said what is wrong; the agent would say it again, with its own trace.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        torchrun(obey_shutdown_timeout(sys.argv[1:]))
    except ChildFailedError as error:
        rank = ended_first(error.failures)
        code = error.failures[rank].exitcode
        print(f"error: rank {rank} ended first, with exit code {code}.", file=sys.stderr)
        return code if code >= 0 else 128 - code
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main())
