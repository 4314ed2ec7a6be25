"""``python -m hotrec.cli.ranks``: torchrun, with a last line for people instead of its own trace.

Takes torchrun's arguments. Exits with the code of the rank that failed first, so that a run which
SIGTERM ended can be told from one that failed.
"""

from __future__ import annotations

import logging
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun


def main() -> int:
    """Run torchrun; the exit code, 128 + n after signal n."""
    # The ranks have said what is wrong; the agent would say it again, with its own trace.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        torchrun()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        print(f"error: rank {rank} ended first, with exit code {code}.", file=sys.stderr)
        return code if code >= 0 else 128 - code
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main())
