"""Errors of a run that has lost a rank, and which errors tell of that."""

from __future__ import annotations

import json
import os
import re
import time
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

# Of a process that the watchdog ends, or that ends by LostRank under ``hotrec``: EX_TEMPFAIL of
# sysexits.h, since the same command may well succeed.
EXIT_CODE = os.EX_TEMPFAIL if hasattr(os, "EX_TEMPFAIL") else 75

# In the words of gloo, NCCL, the store and the sockets under them.
_OF_OTHERS = (
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "Socket Timeout",
    "NCCL error",
    "NCCL communicator",
    "ncclRemoteError",
    "ncclSystemError",
)


class LostRank(RuntimeError):  # noqa: N818 (what has happened; the error is another rank's)
    """A rank has died, failed or stopped; the same text on every rank that is left.

    Args:
        message: which rank, where, since when, and what to do.
        ranks: the missing ones; empty if none can be told from the others.
    """

    def __init__(self, message: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks


def is_of_others(error: BaseException) -> bool:
    """Whether an error, or one that caused it, came from an exchange with other ranks."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, dist.DistError):
            return True
        if isinstance(seen, RuntimeError | OSError) and any(w in str(seen) for w in _OF_OTHERS):
            return True
        # SIGTERM, which torchrun sends after a death, may come while the error is under way.
        seen = seen.__context__ if isinstance(seen, SystemExit) else seen.__cause__
    return False


def one_line(error: BaseException) -> str:
    """Type and message on one line, at most 500 characters."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    # gloo adds where in its source, and advice that does not fit here.
    text = text.replace(" This is typically caused by", "\n").split("\n")[0]
    text = re.sub(r"\[/[^\]]*\.(cc|cpp|h):\d+\] ", "", text)
    return " ".join(text.split()).rstrip(".")[:500]


def tell_torchrun(message: str) -> None:
    """Leave a message with its time where torchrun looks, so that it knows who ended first.

    Else the rank that it has to kill afterwards may count as the first, with the code of that.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None or Path(path).exists():
        return
    extra = {"py_callstack": "", "timestamp": str(int(time.time()))}
    with suppress(OSError):
        Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))
