"""The machine for TorchRec's planner: memory and measured bandwidths."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torchrec.distributed.planner import Topology

from hotrec.cost_model.costs import Costs, CostsError

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

    @property
    def num_hosts(self) -> int:
        return self.world_size // self.local_world_size

    @property
    def replica_bytes(self) -> int:
        """Memory that a rank's hot rows must fit into."""
        if self.device == "cuda":
            return int((1 - DEVICE_RESERVED_FRAC) * self.device_bytes)
        return self.host_bytes // self.local_world_size

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
            **({} if self.costs is None else self._bandwidths(self.costs)),
        )

    def _bandwidths(self, costs: Costs) -> dict[str, float]:
        """Bytes per ms by ``Topology``'s names.

        Memory is as fast as TorchRec's pooled lookup was measured to be on it. ``inter_host_bw`` is
        a rank's share of what its host sends; within one host it is what makes TorchRec's formula
        for all_reduce (that figure times the ranks of a host) come out at the measured rate.
        """
        if costs.device != self.device:
            raise CostsError(
                f"costs {costs.name} device: expected costs of a {self.device} machine, got "
                f"{costs.device}. Calibrate on the machine that will train."
            )
        inter = costs.intra if self.num_hosts == 1 else costs.inter
        if inter is None:
            raise CostsError(
                f"costs {costs.name}: expected the link between hosts, for {self.num_hosts} hosts, "
                "got costs measured on one. Calibrate under torchrun on two hosts or more."
            )
        rates = {}
        for name in {"pooled_device", "pooled_host"} & set(costs.kernels):
            kernel = costs.kernels[name]
            row_s = kernel.per_item_s + kernel.per_byte_s * TYPICAL_ROW_BYTES
            if row_s <= 0:
                raise CostsError(
                    f"costs {costs.name} kernel {name}: expected above 0 seconds for a row of "
                    f"{TYPICAL_ROW_BYTES} bytes, got {row_s}. Calibrate again."
                )
            rates[name] = TYPICAL_ROW_BYTES / row_s / MS_PER_S
        found = {
            "intra_host_bw": costs.intra.bytes_per_s / MS_PER_S,
            "inter_host_bw": inter.bytes_per_s / self.local_world_size / MS_PER_S,
        }
        if self.device == "cpu":
            return found | {"ddr_mem_bw": rates["pooled_device"]}
        found["hbm_mem_bw"] = rates["pooled_device"]
        if "pooled_host" in rates:
            host = rates["pooled_host"]
            found |= {"ddr_mem_bw": host, "hbm_to_ddr_mem_bw": UVM_SHARE * host}
        return found
