"""Whether all ranks call the same collectives in the same order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

from tests.stand_in.log import Entry, Kind

# By group, by thread over all of its groups, and by device over all groups and threads: (operation,
# group, sizes).
Calls = dict[str, list[tuple[str, str, str]]]

# NCCL wants this in one order on every rank; gloo does not.
DEVICE = "device"
_OF_ANY_SIZE = ("alltoall_", "alltoall_base_")  # each rank's message to each other


def calls(entries: Iterable[Entry]) -> Calls:
    """The collectives of one rank, by process group, by thread and of all together."""
    found: Calls = {}
    for entry in entries:
        if entry.kind is not Kind.COLLECTIVE:
            continue
        operation, group, sizes = entry.name.split("|")
        operation = operation.removeprefix("c10d::")
        parts = sizes.split()
        if operation in _OF_ANY_SIZE:
            parts = sorted({part.split("x")[0] for part in parts})
        elif operation == "allgather_":
            parts = parts[:-1]  # the last is the rank's own share
        call = (operation, group, " ".join(parts))
        found.setdefault(f"group {group}", []).append((*call[:2], f"{call[2]} by {entry.thread}"))
        found.setdefault(f"thread {entry.thread}", []).append(call)
        found.setdefault(DEVICE, []).append(call)
    return found


def differences(of_ranks: Sequence[Calls], *, of_device: bool = False) -> list[str]:
    """Where a rank's calls differ from rank 0's: the first place of each group and thread.

    With ``of_device`` only that of all groups and threads together.
    """
    found = []
    for rank, mine in enumerate(of_ranks[1:], 1):
        keys = {DEVICE} if of_device else {*of_ranks[0], *mine} - {DEVICE}
        for key in sorted(keys):
            pairs = zip_longest(of_ranks[0].get(key, []), mine.get(key, []))
            for at, (first, other) in enumerate(pairs):
                if first != other:
                    found.append(f"{key}, call {at}: rank 0 {first}, rank {rank} {other}")
                    break
    return found
