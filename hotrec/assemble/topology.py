"""The machine as input of TorchRec's planner: memory and measured bandwidths."""

from __future__ import annotations

from torchrec.distributed.planner import Topology

from hotrec.cost_model.costs import Costs, CostsError
from hotrec.planner.machine import Machine

# TorchRec only has bandwidths, no cost of an item: they are those of a row of 64 floats.
TYPICAL_ROW_BYTES = 256
MS_PER_S = 1000
# TorchRec's planner/constants.py assumes a tenth of the bandwidth between device and host for UVM.
UVM_SHARE = 10


def topology_of(machine: Machine) -> Topology:
    """TorchRec's description of a machine.

    Raises:
        CostsError: If its costs are of another kind of device, or lack the link between hosts.
    """
    return Topology(
        world_size=machine.world_size,
        local_world_size=machine.local_world_size,
        compute_device=machine.device,
        hbm_cap=machine.device_bytes if machine.device == "cuda" else 0,
        ddr_cap=machine.host_bytes // machine.local_world_size,
        **({} if machine.costs is None else _bandwidths(machine, machine.costs)),
    )


def _bandwidths(machine: Machine, costs: Costs) -> dict[str, float]:
    """Bytes per ms by ``Topology``'s names.

    The bandwidths of memory are those measured for TorchRec's pooled lookup. ``inter_host_bw`` is a
    rank's share of what its host sends; within one host it is what makes TorchRec's formula for
    all_reduce (that figure times the ranks of a host) come out at the measured rate.
    """
    if costs.device != machine.device:
        raise CostsError(
            f"costs {costs.name} device: expected costs of a {machine.device} machine, got "
            f"{costs.device}. Calibrate on the machine that will train."
        )
    inter = costs.intra if machine.num_hosts == 1 else costs.inter
    if inter is None:
        raise CostsError(
            f"costs {costs.name}: expected the link between hosts, for {machine.num_hosts} hosts, "
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
        "inter_host_bw": inter.bytes_per_s / machine.local_world_size / MS_PER_S,
    }
    if machine.device == "cpu":
        return found | {"ddr_mem_bw": rates["pooled_device"]}
    found["hbm_mem_bw"] = rates["pooled_device"]
    if "pooled_host" in rates:
        host = rates["pooled_host"]
        found |= {"ddr_mem_bw": host, "hbm_to_ddr_mem_bw": UVM_SHARE * host}
    return found
