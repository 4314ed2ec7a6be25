"""The machine as TorchRec's planner sees it: memory, and the measured speed of its parts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torchrec.distributed.planner import Topology

from hotrec.cost_model.costs import Costs, CostsError, Line

# Of a device's free memory, for what is in no table: the buffers of NCCL, CUDA's libraries,
# activations, messages, ids, fragments. 15% of an 80 GB device's free memory is 12 GB.
DEVICE_RESERVED_FRAC = 0.15
# Of a host's memory, likewise.
HOST_RESERVED_FRAC = 0.05
# TorchRec knows bandwidths only, no cost of an item; a row of this size (64 floats) stands for all.
TYPICAL_ROW_BYTES = 256
MS_PER_S = 1000
# TorchRec's planner/constants.py takes a tenth of the bandwidth between device and host for UVM.
UVM_SHARE = 10


def free_device_bytes() -> int:
    """Free memory of this process's CUDA device, what torch holds in reserve included.

    Asked before the model is built: the context and whatever else runs there are used by then, so
    they need not be guessed from the device's total.
    """
    free_bytes, _ = torch.cuda.mem_get_info()
    return int(free_bytes + torch.cuda.memory_reserved() - torch.cuda.memory_allocated())


@dataclass(frozen=True)
class Machine:
    """What the planner may use.

    Args:
        world_size: W.
        local_world_size: ranks per host.
        device: "cpu" or "cuda".
        device_bytes: free memory of each rank's device; ignored on CPU.
        host_bytes: memory of a host, shared by its ranks.
        batch_size: B.
        costs: measured, or a built-in set; None leaves TorchRec its datasheet figures.
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
            CostsError: if the costs are of another kind of device, or lack the link between hosts.
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
            CostsError: if the costs are of another kind of device, or lack the link between hosts.
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
        CostsError: if it takes no time at all, which no memory does.
    """
    seconds = kernel.per_item_s + kernel.per_byte_s * TYPICAL_ROW_BYTES
    if seconds <= 0:
        raise CostsError(
            f"costs kernel: expected above 0 seconds for a row of {TYPICAL_ROW_BYTES} bytes, got "
            f"{seconds}. Calibrate again."
        )
    return TYPICAL_ROW_BYTES / seconds / MS_PER_S
