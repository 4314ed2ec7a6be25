"""``python -m hotrec.cli.ranks``: torchrun, with one last line instead of its own trace.

Takes torchrun's arguments. Exits with the code of the rank that failed first, which distinguishes
a run that SIGTERM ended from one that failed.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partialmethod
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing.api import PContext, SignalException
from torch.distributed.elastic.multiprocessing.errors import (
    ChildFailedError,
    ProcessFailure,
)
from torch.distributed.elastic.rendezvous import RendezvousError, c10d_rendezvous_backend
from torch.distributed.run import get_args_parser
from torch.distributed.run import main as torchrun

from hotrec.cli.launch import end_with_parent
from hotrec.cli.print_once import note_of, notes_folder
from hotrec.runtime.watchdog import EXIT_CODE

# Exit codes caused by another rank's end: the watchdog's, then those of torchrun's SIGTERM, before
# a rank handles it and after.
CONSEQUENCES = {EXIT_CODE: 1, -signal.SIGTERM: 2, 128 + signal.SIGTERM: 2}
# Failures this close may have happened in either order: torchrun records whole seconds.
SAME_TIME_S = 1
# How long host 0 may take to start, and the seconds between two attempts and two lines.
JOIN_S, _PAUSE_S, _SAY_S, _LOOK_S = 300.0, 0.5, 10.0, 5.0


def ended_first(failures: Mapping[int, ProcessFailure]) -> int:
    """The rank that failed first, of failures by rank.

    When a rank dies, the watchdog or torchrun ends the others within milliseconds. So among
    simultaneous failures, an independent one precedes those that it may have caused.
    """
    start_s = min(failure.timestamp for failure in failures.values())

    def order(rank: int) -> tuple[int, int, int]:
        later_s = failures[rank].timestamp - start_s
        if later_s > SAME_TIME_S:
            return later_s, 0, rank
        return 0, CONSEQUENCES.get(failures[rank].exitcode, 0), rank

    return min(failures, key=order)


def was_printed(rank: int, failure: ProcessFailure) -> bool:
    """Whether the rank failed in a controlled way, with its error printed."""
    notes = notes_folder(failure.error_file)
    return failure.exitcode == 1 and notes is not None and note_of(notes, rank).exists()


def take_shutdown_timeout(arguments: Sequence[str]) -> list[str]:
    """Apply ``--shutdown-timeout`` if torchrun has no such option (torch 2.11).

    Returns:
        The remaining arguments for torchrun.
    """
    if "--shutdown-timeout" in get_args_parser().format_help():
        return list(arguments)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--shutdown-timeout", type=int)
    own, others = parser.parse_known_args(arguments)
    if own.shutdown_timeout is not None:
        # The agent calls this method without a timeout.
        close = partialmethod(PContext.close, timeout=own.shutdown_timeout)
        PContext.close = close  # type: ignore[assignment,method-assign]
    return others


def hand_on_later_interrupts() -> None:
    """While the agent waits for its ranks to end, send them each further SIGINT.

    torchrun's own handler would raise in the middle of that, and leave the ranks to save.
    """
    close = PContext.close

    def close_and_hand_on(context: PContext, *given: Any, **options: Any) -> None:
        def hand_on(number: int, _frame: FrameType | None) -> None:
            for pid in context.pids().values():
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

        previous = signal.signal(signal.SIGINT, hand_on)
        try:
            close(context, *given, **options)
        finally:
            signal.signal(signal.SIGINT, previous)

    PContext.close = close_and_hand_on  # type: ignore[method-assign, assignment]


class LoopbackStore(TCPStore):
    """A store whose server only listens on this host's loopback address.

    torchrun's listens on all addresses of the host, even for ranks of one host, and accepts anyone.
    """

    def __init__(self, host_name: str, port: int, *, is_master: bool, **options: Any) -> None:
        if is_master:
            listener = socket.create_server(("127.0.0.1", port))
            port = listener.getsockname()[1]
            options["master_listen_fd"] = listener.detach()
        super().__init__(host_name, port, is_master=is_master, **options)


def listen_on_loopback() -> None:
    """Keep the stores of this agent, and gloo in its ranks, on the loopback interface."""
    # The rendezvous makes one store, and from torch.distributed's name another for the ranks.
    c10d_rendezvous_backend.TCPStore = LoopbackStore  # type: ignore[assignment,misc]
    dist.TCPStore = LoopbackStore  # type: ignore[assignment,misc]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def wait_for_host_0(given: argparse.Namespace) -> None:
    """Wait for the rendezvous on another host and print a line.

    torchrun itself would be silent for a minute and then print a C++ stack.

    Raises:
        OSError: If the rendezvous is unreachable for JOIN_S.
    """
    endpoint = str(given.rdzv_endpoint)
    host, _, port = endpoint.rpartition(":")
    if "is_host=false" not in str(given.rdzv_conf).lower() or not port.isdecimal():
        return
    start_s = said_s = time.monotonic()
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=_LOOK_S).close()
            return
        except OSError:
            now_s = time.monotonic()
            if now_s - start_s > JOIN_S:
                raise
            if now_s - said_s > _SAY_S:
                said_s = now_s
                print(f"waiting for host 0 at {endpoint}", file=sys.stderr, flush=True)
        time.sleep(_PAUSE_S)


def main() -> int:
    """Run torchrun; the exit code, 128 + n after signal n."""
    end_with_parent()
    if "--standalone" in sys.argv:
        listen_on_loopback()
    # The ranks have printed the error, which the agent would repeat with its own trace. By level,
    # since many of torch's loggers have their own levels.
    logging.disable(logging.ERROR)
    arguments = take_shutdown_timeout(sys.argv[1:])
    hand_on_later_interrupts()
    given, _ = get_args_parser().parse_known_args([*arguments, "x"])
    try:
        wait_for_host_0(given)
        torchrun(arguments)
    except ChildFailedError as error:
        rank = ended_first(error.failures)
        code = error.failures[rank].exitcode
        if not was_printed(rank, error.failures[rank]):
            print(f"error: rank {rank} ended first, with exit code {code}.", file=sys.stderr)
        return code if code >= 0 else 128 - code
    except SignalException as error:
        return 128 + int(error.sigval)
    except (RendezvousError, dist.DistError, OSError) as error:
        reason = str(error).split("\n")[0].removesuffix(".")
        print(
            "error: rendezvous: expected all hosts at "
            f"{given.rdzv_endpoint or 'a common endpoint'}, got {reason}. Check that host 0 has "
            "started and is reachable.",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
