"""Which ranks share a host, and the groups of ranks inside hosts and between them.

A rail is the set of ranks with the same local rank, one of each host (NCCL's name). What is summed
or de-duplicated inside a host first crosses the network once per host, on the rail of its owner.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hotrec.runtime.ranks import Group, all_gather_object, rank
from hotrec.runtime.wire import Wire
from hotrec.types import WireType

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
class FoundHosts:
    """The hosts between which exchanges have two levels, or why they have one.

    Args:
        hosts: None for one level.
        why: The rule that decided, for a reader.
    """

    hosts: Hosts | None
    why: str


def find_hosts(host_of_rank: Sequence[object]) -> FoundHosts:
    """Decide from the host of every rank, in rank order."""
    sizes: dict[object, int] = {}
    for host in host_of_rank:
        sizes[host] = sizes.get(host, 0) + 1
    largest, smallest = max(sizes.values()), min(sizes.values())
    if len(sizes) == 1:
        return FoundHosts(None, "in one level, since all ranks are on one host")
    if largest == 1:
        return FoundHosts(None, "in one level, since each host has one rank")
    if largest != smallest:
        return FoundHosts(None, f"in one level, since hosts have {smallest} to {largest} ranks")
    changes = sum(a != b for a, b in zip(host_of_rank, host_of_rank[1:], strict=False))
    if changes != len(sizes) - 1:
        return FoundHosts(None, "in one level, since the ranks of a host are not consecutive")
    why = f"in two levels, on {len(sizes)} hosts of {largest} ranks"
    return FoundHosts(Hosts(len(sizes), largest), why)


def gather_hosts() -> FoundHosts:
    """``find_hosts`` for the ranks of the process group; a collective.

    Raises:
        ValueError: if HOTREC_RANKS_PER_HOST does not divide the ranks, or differs between them.
    """
    asked = set(all_gather_object(os.environ.get(RANKS_PER_HOST, "")))
    # torchrun numbers its agents, one per host; hosts of containers may share a name.
    own: object = (os.environ.get("GROUP_RANK", ""), socket.gethostname())
    hosts = all_gather_object(own)
    if asked == {""}:
        return find_hosts(hosts)
    text = min(asked)
    if len(asked) > 1 or not text.isdecimal() or not int(text) or len(hosts) % int(text):
        raise ValueError(
            f"environment {RANKS_PER_HOST} of rank {rank()}: expected one divisor of the "
            f"{len(hosts)} ranks on all of them, got {sorted(asked)}. Correct or unset it."
        )
    return find_hosts([at // int(text) for at in range(len(hosts))])


class TwoLevelWire:
    """Sums over all ranks of which each host sends every value once, in the wire's type.

    Inside a host values are summed in fp32, in the order of local ranks. Call it from one thread,
    in the same order on every rank.

    Args:
        hosts: The hosts; all ranks take part.
        wire_type: Type in which float32 values are sent between hosts.
        name: Its purpose, shown by torch's flight recorder.
    """

    def __init__(self, hosts: Hosts, wire_type: WireType, name: str) -> None:
        self.hosts = hosts
        self._groups = [
            Group(f"{name} inside hosts", hosts.members),
            Group(f"{name} between hosts", hosts.rails),
        ]
        self.inside, self.rail = Wire(self._groups[0]), Wire(self._groups[1], wire_type)

    def all_reduce(self, values: torch.Tensor) -> None:
        """Add up over all ranks, in place; the same bits on all ranks.

        Of n values a rank sends (G-1)/G n inside its host, then 2 (H-1)/H n/G on its rail, then
        (G-1)/G n inside again: a host sends what one rank of a flat all-reduce over hosts would.
        """
        flat, local = values.view(-1), self.inside.world_size
        length = -(-flat.numel() // local)
        sizes = [max(0, min(length, flat.numel() - length * at)) for at in range(local)]
        own = sizes[self.inside.rank]
        share = self.inside.all_to_all(flat, sizes, [own] * local).view(local, own).sum(0)
        self.rail.all_reduce(share)
        flat.copy_(self.inside.all_gather_joined(share, sizes))

    def close(self, after: Callable[[], None] | None = None) -> None:
        """Leave its groups; see ``Group.close``."""
        for group in self._groups:
            group.close(after)


def make_two_levels(wire_type: WireType, name: str) -> TwoLevelWire | None:
    """A ``TwoLevelWire`` over all ranks, None where one level is the rule; a collective."""
    hosts = gather_hosts().hosts
    return None if hosts is None else TwoLevelWire(hosts, wire_type, name)
