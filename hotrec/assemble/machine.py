"""The machine to plan for, as configured or as detected."""

from __future__ import annotations

import torch

from hotrec.planner.machine import Machine
from hotrec.runtime.hosts import FoundHosts
from hotrec.runtime.memory import GIB, read_memory

# Device memory that `hotrec plan` assumes without a GPU: an H100's.
ASSUMED_DEVICE_GIB = 80.0


def make_machine(
    *,
    world_size: int,
    ranks_per_host: int,
    device: str,
    batch_size: int,
    hbm_gib: float | None = None,
    host_gib: float | None = None,
    found: FoundHosts | None = None,
) -> Machine:
    """The machine of these ranks.

    Args:
        world_size: World size W.
        ranks_per_host: Ranks of a host.
        device: "cpu" or "cuda".
        batch_size: Batch of a rank.
        hbm_gib: Memory of a device; None for its free memory.
        host_gib: Memory of a host; None for that of this host.
        found: The hosts between which the ranks exchange; None for hosts of ``ranks_per_host``.
    """
    if hbm_gib is None and device == "cuda" and torch.cuda.is_available():
        device_bytes = free_device_bytes()
    else:
        device_bytes = int((hbm_gib or ASSUMED_DEVICE_GIB) * GIB)
    return Machine(
        world_size=world_size,
        local_world_size=ranks_per_host,
        device=device,
        device_bytes=device_bytes,
        host_bytes=read_memory()[0] if host_gib is None else int(host_gib * GIB),
        batch_size=batch_size,
        ranks_per_domain=None if found is None else found.ranks_per_host,
        irregular="" if found is None or found.is_regular else found.why,
    )


def free_device_bytes() -> int:
    """Free memory of this process's CUDA device, including torch's reserved memory.

    Call it before the model is built. The CUDA context and other processes are accounted for.
    """
    free_bytes, _ = torch.cuda.mem_get_info()
    return int(free_bytes + torch.cuda.memory_reserved() - torch.cuda.memory_allocated())
