"""``python -m hotrec.cli.ranks``: torchrun, with a last line for people instead of its own trace.

Takes torchrun's arguments. Exits with the code of the rank that failed first, so that a run which
SIGTERM ended can be told from one that failed.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Mapping

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import main as torchrun

from hotrec.watchdog import EXIT_CODE

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


def main() -> int:
    """Run torchrun; the exit code, 128 + n after signal n."""
    # The ranks have said what is wrong; the agent would say it again, with its own trace.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        torchrun()
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
