"""Ranks on the processors beside their GPU, so that what they copy does not cross sockets.

torchrun's ``--numa-binding`` does the same but needs the program numactl, and other launchers have
no such thing. What any of them has chosen already is narrowed, never widened.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

_SYSTEM = Path("/sys")


def bind_to_gpu(device: torch.device, system: Path = _SYSTEM) -> None:
    """Keep this process, with the threads and workers that it starts, on its GPU's NUMA node.

    Memory follows: the system takes it from the node of the processor that first writes to it.
    Where the system does not tell the node, or has just one, nothing changes; the log says so.

    Args:
        device: a CUDA device.
        system: where sysfs is mounted.
    """
    about: Any = torch.cuda.get_device_properties(device)
    address = f"{about.pci_domain_id:04x}:{about.pci_bus_id:02x}:{about.pci_device_id:02x}.0"
    try:
        node = int((system / "bus/pci/devices" / address / "numa_node").read_text())
        if node < 0:  # not said, as on most systems with one node
            logger.debug("%s: its NUMA node is not known to the system", device)
            return
        of_node = _read_cpus(system / f"devices/system/node/node{node}/cpulist")
        allowed = os.sched_getaffinity(0)
        near = of_node & allowed
        if not near:
            logger.warning(
                "%s: expected processors of its NUMA node %d, got %s from the launcher, none of "
                "which is. Copies cross sockets; look at the launcher's CPU binding.",
                device,
                node,
                sorted(allowed),
            )
            return
        for thread in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.sched_setaffinity(int(thread), near)
    except OSError as error:
        logger.info("%s: not bound to the processors beside it: %s", device, error)
        return
    logger.info("%s: bound to %d processors of NUMA node %d", device, len(near), node)


def _read_cpus(path: Path) -> set[int]:
    """Processors of a list such as "0-3,8"."""
    cpus: set[int] = set()
    for part in path.read_text().strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cpus |= set(range(int(first), int(last or first) + 1))
    return cpus
