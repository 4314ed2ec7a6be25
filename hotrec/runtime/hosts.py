"""Which ranks share a host, and the groups of ranks inside hosts and between them.

A rail is the set of ranks with the same local rank, one of each host (NCCL's name). What is summed
or de-duplicated inside a host first crosses the network once per host, on the rail of its owner.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hotrec.runtime.ranks import Group, all_gather_object, finish_others, rank
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
        ranks_per_host: Ranks of the largest host.
        is_regular: Whether all hosts have as many consecutive ranks.
    """

    hosts: Hosts | None
    why: str
    ranks_per_host: int
    is_regular: bool = True


def find_hosts(host_of_rank: Sequence[object]) -> FoundHosts:
    """Decide from the host of every rank, in rank order."""
    sizes: dict[object, int] = {}
    for host in host_of_rank:
        sizes[host] = sizes.get(host, 0) + 1
    largest, smallest = max(sizes.values()), min(sizes.values())

    def one_level(why: str, *, is_regular: bool) -> FoundHosts:
        return FoundHosts(None, f"in one level, since {why}", largest, is_regular)

    if len(sizes) == 1:
        return one_level("all ranks are on one host", is_regular=True)
    if largest == 1:
        return one_level("each host has one rank", is_regular=True)
    if largest != smallest:
        return one_level(f"hosts have {smallest} to {largest} ranks", is_regular=False)
    changes = sum(a != b for a, b in zip(host_of_rank, host_of_rank[1:], strict=False))
    if changes != len(sizes) - 1:
        return one_level("the ranks of a host are not consecutive", is_regular=False)
    why = f"in two levels, on {len(sizes)} hosts of {largest} ranks"
    return FoundHosts(Hosts(len(sizes), largest), why, largest)


def gather_host_of_rank() -> list[Hashable]:
    """The host of every rank of the process group, in rank order; a collective.

    Raises:
        ValueError: if HOTREC_RANKS_PER_HOST does not divide the ranks, or differs between them.
    """
    # torchrun numbers its agents, one per host; hosts of containers may share a name.
    own: Hashable = (os.environ.get("GROUP_RANK", ""), socket.gethostname())
    gathered = all_gather_object((os.environ.get(RANKS_PER_HOST, ""), own))
    asked = {text for text, _ in gathered}
    if asked == {""}:
        return [host for _, host in gathered]
    text, num_ranks = min(asked), len(gathered)
    if len(asked) > 1 or not text.isdecimal() or not int(text) or num_ranks % int(text):
        raise ValueError(
            f"environment {RANKS_PER_HOST} of rank {rank()}: expected one divisor of the "
            f"{num_ranks} ranks on all of them, got {sorted(asked)}. Correct or unset it."
        )
    return [at // int(text) for at in range(num_ranks)]


def gather_hosts() -> FoundHosts:
    """``find_hosts`` for the ranks of the process group; a collective."""
    return find_hosts(gather_host_of_rank())


def count_host_rows(
    rows_U: torch.Tensor, host_of_rank: Sequence[object], device: torch.device
) -> int:
    """This rank's part of the distinct rows that its host reads; a collective.

    The parts of the ranks of a host add up to the number of its distinct rows: each rank sends
    those of its rows whose number is l modulo the ranks of its host to local rank l.

    Args:
        rows_U: This rank's distinct rows, int64 (U,), numbered alike on all ranks.
        host_of_rank: The host of every rank.
        device: Device of the process group's tensors.
    """
    if len(host_of_rank) == 1:
        return rows_U.numel()
    finish_others()
    own = host_of_rank[rank()]
    members = [at for at, host in enumerate(host_of_rank) if host == own]
    local_U = rows_U.to(device) % len(members)
    num_of_local = torch.bincount(local_U, minlength=len(members))
    num_to = num_of_local.new_zeros(len(host_of_rank))
    num_to[members] = num_of_local
    num_from = torch.empty_like(num_to)
    dist.all_to_all_single(num_from, num_to)
    sizes_to, sizes_from = num_to.tolist(), num_from.tolist()
    received = local_U.new_empty(sum(sizes_from))
    sent = rows_U.to(device)[local_U.argsort(stable=True)]
    dist.all_to_all_single(received, sent, sizes_from, sizes_to)
    return received.unique().numel()


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
