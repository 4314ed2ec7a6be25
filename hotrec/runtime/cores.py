"""The cores that ranks and their loader workers share."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from hotrec.runtime.ranks import Ranks, all_gather_object

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# Cores of a rank on a GPU: of its main (or backward) thread, and of its communication.
OWN_CORES = 2
# Routing a batch of 8,192 samples with 26 ids takes a core tens of milliseconds, a step on a GPU
# a few. More than this many would wait for the thread of the rank that receives all batches.
MAX_WORKERS = 8


def choose_workers(device: str, cores_per_host: float, ranks_per_host: int) -> int:
    """Default number of loader workers of a rank.

    On a GPU one per spare core of the rank, at least one and at most MAX_WORKERS: fewer would be
    too slow. On CPU one, or none without a core for it.

    If the ranks use all cores of a CPU, a worker takes a core from a rank while the others wait for
    that one, and its batches have to be received. On 2 cores a step took 9 to 21% longer with
    workers, and 3 to 5% if it mostly waited for a slow link.
    """
    if device != "cpu":
        spare = int(cores_per_host / ranks_per_host) - OWN_CORES
        return max(1, min(MAX_WORKERS, spare))
    return 0 if cores_per_host <= ranks_per_host else 1


def num_workers(asked: int | None, ranks: Ranks) -> int:
    """The configured number of loader workers, or the one of ``choose_workers``; collective."""
    if asked is not None:
        return asked
    return choose_workers(ranks.device.type, cores_per_host(ranks), ranks.local_world_size)


def cores_per_host(ranks: Ranks) -> float:
    """The cores that each host has for itself, of the host with the fewest; collective.

    Containers and network namespaces that run on one kernel share the cores they are allowed.
    """
    kernel = (
        BOOT_ID.read_text() if BOOT_ID.exists() else f"host {ranks.rank // ranks.local_world_size}"
    )
    of_ranks = all_gather_object((kernel, os.sched_getaffinity(0)))
    return min_cores(of_ranks, ranks.local_world_size)


def min_cores(of_ranks: Sequence[tuple[str, set[int]]], ranks_per_host: int) -> float:
    """The same from the kernel of each rank and the cores that it may use."""
    hosts, cores = defaultdict[str, set[int]](set), defaultdict[str, set[int]](set)
    for rank, (kernel, allowed) in enumerate(of_ranks):
        hosts[kernel].add(rank // ranks_per_host)
        cores[kernel] |= allowed
    return min(len(cores[kernel]) / len(hosts[kernel]) for kernel in hosts)
