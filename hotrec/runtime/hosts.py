"""Which ranks share a host, and the groups of ranks inside hosts and between them.

A rail is the set of ranks with the same local rank, one of each host (NCCL's name). What is summed
or de-duplicated inside a host first crosses the network once per host, on the rail of its owner.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from hotrec.runtime.ranks import all_gather_object, rank

# Number of consecutive ranks that count as a host: a domain of fast links such as NVLink may be
# larger or smaller than a host, and tests pretend hosts.
RANKS_PER_HOST = "HOTREC_RANKS_PER_HOST"


@dataclass(frozen=True)
class Hosts:
    """Hosts of equal size: rank r is local rank r mod G of host r // G.

    Args:
        num_hosts: H.
        ranks_per_host: G.
    """

    num_hosts: int
    ranks_per_host: int

    @property
    def members(self) -> list[list[int]]:
        """The ranks of each host."""
        local = self.ranks_per_host
        return [list(range(host * local, (host + 1) * local)) for host in range(self.num_hosts)]

    @property
    def rails(self) -> list[list[int]]:
        """The ranks of each rail, in the order of hosts."""
        return [list(ranks) for ranks in zip(*self.members, strict=True)]


@dataclass(frozen=True)
class Levels:
    """The hosts between which exchanges have two levels, or why they have one.

    Args:
        hosts: None for one level.
        why: The rule that decided, for a reader.
    """

    hosts: Hosts | None
    why: str


def find_levels(host_of_rank: Sequence[object]) -> Levels:
    """Decide from the host of every rank, in rank order."""
    sizes: dict[object, int] = {}
    for host in host_of_rank:
        sizes[host] = sizes.get(host, 0) + 1
    largest, smallest = max(sizes.values()), min(sizes.values())
    if len(sizes) == 1:
        return Levels(None, "one level: all ranks are on one host")
    if largest == 1:
        return Levels(None, "one level: one rank per host")
    if largest != smallest:
        return Levels(None, f"one level: hosts have {smallest} to {largest} ranks")
    changes = sum(a != b for a, b in zip(host_of_rank, host_of_rank[1:], strict=False))
    if changes != len(sizes) - 1:
        return Levels(None, "one level: the ranks of a host are not consecutive")
    return Levels(Hosts(len(sizes), largest), f"{len(sizes)} hosts of {largest} ranks")


def gather_levels() -> Levels:
    """``find_levels`` for the ranks of the process group; a collective.

    Raises:
        ValueError: if HOTREC_RANKS_PER_HOST does not divide the ranks, or differs between them.
    """
    asked = set(all_gather_object(os.environ.get(RANKS_PER_HOST, "")))
    # torchrun numbers its agents, one per host; hosts of containers may share a name.
    own: object = (os.environ.get("GROUP_RANK", ""), socket.gethostname())
    hosts = all_gather_object(own)
    if asked == {""}:
        return find_levels(hosts)
    text = min(asked)
    if len(asked) > 1 or not text.isdecimal() or not int(text) or len(hosts) % int(text):
        raise ValueError(
            f"environment {RANKS_PER_HOST} of rank {rank()}: expected one divisor of the "
            f"{len(hosts)} ranks on all of them, got {sorted(asked)}. Correct or unset it."
        )
    return find_levels([at // int(text) for at in range(len(hosts))])
