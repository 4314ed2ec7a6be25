"""``python -m hotrec.cli.ranks``: torchrun, with one last line instead of its own trace.

Takes torchrun's arguments. Exits with the code of the rank that failed first, which distinguishes
a run that SIGTERM ended from one that failed.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Mapping

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.run import get_args_parser
from torch.distributed.run import main as torchrun

from hotrec.cli.launch import end_with_parent
from hotrec.runtime.watchdog import EXIT_CODE

# Exit codes caused by another rank's end: the watchdog's, then those of torchrun's SIGTERM, before
# a rank handles it and after.
CONSEQUENCES = {EXIT_CODE: 1, -signal.SIGTERM: 2, 128 + signal.SIGTERM: 2}
# Failures this close may have happened in either order: torchrun records whole seconds.
SAME_TIME_S = 1
SHUTDOWN = "--shutdown-timeout"  # which torch 2.11 does not have


def ended_first(failures: Mapping[int, ProcessFailure]) -> int:
    """The rank that failed first, of failures by rank.

    When a rank dies, the watchdog or torchrun ends the others within milliseconds. So among
    simultaneous failures, an independent one precedes those that it may have caused.
    """
    start_s = min(failure.timestamp for failure in failures.values())

    def order(rank: int) -> tuple[int, int, int]:
        later_s = failures[rank].timestamp - start_s
        is_later = later_s > SAME_TIME_S
        return is_later * later_s, CONSEQUENCES.get(failures[rank].exitcode, 0), rank

    return min(failures, key=order)


def main() -> int:
    """Run torchrun; the exit code, 128 + n after signal n."""
    end_with_parent()
    # The ranks have printed the error, which the agent would repeat with its own trace. By level,
    # since many of torch's loggers have their own levels.
    logging.disable(logging.ERROR)
    arguments = sys.argv[1:]
    if SHUTDOWN in arguments and SHUTDOWN not in get_args_parser().format_help():
        at = arguments.index(SHUTDOWN)
        del arguments[at : at + 2]
    try:
        torchrun(arguments)
    except ChildFailedError as error:
        rank = ended_first(error.failures)
        code = error.failures[rank].exitcode
        if code not in (1, EXIT_CODE):  # the rank, or one that lost it, has printed its error
            print(f"error: rank {rank} ended first, with exit code {code}.", file=sys.stderr)
        return code if code >= 0 else 128 - code
    except SignalException as error:
        return 128 + int(error.sigval)
    except (RendezvousError, DistError, OSError) as error:
        reason = str(error).split("\n")[0].removesuffix(".")
        print(
            f"error: rendezvous: expected all hosts, got {reason}. Check that host 0 has started "
            "and is reachable.",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
