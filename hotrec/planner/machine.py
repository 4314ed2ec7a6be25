"""The machine to plan for."""

from __future__ import annotations

from dataclasses import dataclass

from hotrec.cost_model.costs import World

# Fraction of a device's free memory for everything but tables: NCCL and CUDA buffers, activations,
# messages, ids, fragmentation. Of 80 GB it is 12 GB.
DEVICE_RESERVED_FRAC = 0.15
# The same fraction of a host's memory.
HOST_RESERVED_FRAC = 0.05


@dataclass(frozen=True)
class Machine:
    """The ranks to plan for, their memory and their batch.

    Args:
        world_size: World size W.
        local_world_size: Ranks of a host, which share its memory and cores.
        device: "cpu" or "cuda".
        device_bytes: Free memory of each rank's device; ignored on CPU.
        host_bytes: Memory of a host, shared by its ranks.
        batch_size: Batch of a rank.
        ranks_per_domain: Ranks that exchange as one host (``HOTREC_RANKS_PER_HOST``); None for
            those of a host.
        irregular: Why hosts of several ranks exchange in one level; empty if they are alike.
    """

    world_size: int
    local_world_size: int
    device: str
    device_bytes: int
    host_bytes: int
    batch_size: int
    ranks_per_domain: int | None = None
    irregular: str = ""

    @property
    def num_hosts(self) -> int:
        return self.world_size // self.local_world_size

    @property
    def world(self) -> World:
        """Ranks and hosts, as exchanges find them; hosts that are not alike have one rank each.

        Then every message crosses the network in the prediction, where ``ranks_per_link`` share a
        link: an upper bound.
        """
        return World(self.world_size, self._largest_host if self.ranks_per_link == 1 else 1)

    @property
    def ranks_per_link(self) -> int:
        """Ranks that share the link of what ``world`` counts as a host but is a part of one."""
        is_alike = not self.irregular and self.world_size % self._largest_host == 0
        return 1 if is_alike else self._largest_host

    @property
    def _largest_host(self) -> int:
        return self.ranks_per_domain or self.local_world_size

    @property
    def replica_bytes(self) -> int:
        """Memory limit of a rank's hot rows."""
        if self.device == "cuda":
            return int((1 - DEVICE_RESERVED_FRAC) * self.device_bytes)
        return self.host_bytes // self.local_world_size
