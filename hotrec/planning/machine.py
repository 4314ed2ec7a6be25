"""The machine for TorchRec's planner: memory and measured bandwidths."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torchrec.distributed.planner import Topology

from hotrec.cost_model.costs import Costs, CostsError, Line

# Fraction of a device's free memory for everything but tables: NCCL and CUDA buffers, activations,
# messages, ids, fragmentation. Of 80 GB it is 12 GB.
DEVICE_RESERVED_FRAC = 0.15
# The same of a host's memory.
HOST_RESERVED_FRAC = 0.05
# TorchRec has bandwidths only, no cost of an item: they are those of a row of 64 floats.
TYPICAL_ROW_BYTES = 256
MS_PER_S = 1000
# TorchRec's planner/constants.py takes a tenth of the bandwidth between device and host for UVM.
UVM_SHARE = 10


def free_device_bytes() -> int:
    """Free memory of this process's CUDA device, what torch holds in reserve included.

    Call it before the model is built. The CUDA context and other processes are accounted for.
    """
    free_bytes, _ = torch.cuda.mem_get_info()
    return int(free_bytes + torch.cuda.memory_reserved() - torch.cuda.memory_allocated())


@dataclass(frozen=True)
class Machine:
    """The machine to plan for.

    Args:
        world_size: World size W.
        local_world_size: Ranks of a host.
        device: "cpu" or "cuda".
        device_bytes: Free memory of each rank's device; ignored on CPU.
        host_bytes: Memory of a host, shared by its ranks.
        batch_size: Batch of a rank.
        costs: Measured or built-in costs. None keeps TorchRec's datasheet figures.
    """

    world_size: int
    local_world_size: int
    device: str
    device_bytes: int
    host_bytes: int
    batch_size: int
    costs: Costs | None = None

    def topology(self) -> Topology:
        """TorchRec's description of the machine.

        Raises:
            CostsError: If the costs are of another kind of device, or lack the link between hosts.
        """
        return Topology(
            world_size=self.world_size,
            local_world_size=self.local_world_size,
            compute_device=self.device,
            hbm_cap=self.device_bytes if self.device == "cuda" else 0,
            ddr_cap=self.host_bytes // self.local_world_size,
            **self.bandwidths(),
        )

    def bandwidths(self) -> dict[str, float]:
        """Bytes per ms by ``Topology``'s names; empty without costs.

        Memory is as fast as TorchRec's pooled lookup was measured to be on it. ``inter_host_bw`` is
        a rank's share of what its host sends; within one host it is what makes TorchRec's formula
        for all_reduce (that figure times the ranks of a host) come out at the measured rate.

        Raises:
            CostsError: If the costs are of another kind of device, or lack the link between hosts.
        """
        costs = self.costs
        if costs is None:
            return {}
        if costs.device != self.device:
            raise CostsError(
                f"costs {costs.name} device: expected costs of a {self.device} machine, got "
                f"{costs.device}. Calibrate on the machine that will train."
            )
        inter = costs.intra
        if self.world_size > self.local_world_size:
            if costs.inter is None:
                raise CostsError(
                    f"costs {costs.name}: expected the link between hosts, for "
                    f"{self.world_size} ranks of which a host has {self.local_world_size}, got "
                    "costs measured on one. Calibrate under torchrun on two hosts or more."
                )
            inter = costs.inter
        found = {
            "intra_host_bw": costs.intra.bytes_per_s / MS_PER_S,
            "inter_host_bw": inter.bytes_per_s / self.local_world_size / MS_PER_S,
        }
        device = memory_bytes_per_ms(costs.kernel("pooled_device"))
        if self.device == "cpu":
            return found | {"ddr_mem_bw": device}
        found["hbm_mem_bw"] = device
        if "pooled_host" in costs.kernels:
            host = memory_bytes_per_ms(costs.kernel("pooled_host"))
            found |= {"ddr_mem_bw": host, "hbm_to_ddr_mem_bw": UVM_SHARE * host}
        return found


def memory_bytes_per_ms(kernel: Line) -> float:
    """Bytes per ms at which a kernel handles rows of ``TYPICAL_ROW_BYTES``.

    Raises:
        CostsError: If it takes no time.
    """
    seconds = kernel.per_item_s + kernel.per_byte_s * TYPICAL_ROW_BYTES
    if seconds <= 0:
        raise CostsError(
            f"costs kernel: expected above 0 seconds for a row of {TYPICAL_ROW_BYTES} bytes, got "
            f"{seconds}. Calibrate again."
        )
    return TYPICAL_ROW_BYTES / seconds / MS_PER_S
