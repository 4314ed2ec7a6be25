"""Costs of machines that are not available, for planning; each number with its source."""

from __future__ import annotations

from collections.abc import Mapping

from hotrec.cost_model.costs import Costs, Line, Link

GIB = 1 << 30
# One kernel launch, and the launches of each kind in a step.
LAUNCH_S = 5e-6
# Fraction of the bus's rate if the device reads single rows of mapped memory: 25 to 28 of 64 GB/s.
MAPPED_FRAC = 0.4
LAUNCH_SOURCE = "assumed: 5 us a launch"
ID_BYTES = 8
_LATENCY = "latency assumed: {} of a small NCCL collective"


def _gpu_kernels(peak: float, bus: float, flops: float, source: str) -> dict[str, Line]:
    """Kernels of a GPU: bytes moved / (bandwidth x efficiency).

    Bytes moved per byte of a row (4 D):

    read                2: the row in, the row out
    update              5: gradient in, out and in again (sum by row), weight in and out; with a
                           row's scalar optimizer state
    pool                4: rows in and vectors out, forward; the same backward
    hot_add             3: message in, gradient in and out

    Costs of an item are its ids and indices, 8 bytes for each access.

    Args:
        peak: bytes/s of the device's memory.
        bus: bytes/s to the host, one way.
        flops: Float32 operations/s without tensor cores, torch's default for float32.
        source: Where these numbers come from.
    """
    # TorchRec's planner constants assume 0.5 of HBM for data-parallel tables and 1.0 for fused ones
    # (torchrec/distributed/planner/constants.py, kernel_bw_lookup); rows of 256 bytes at random
    # reach about half of a memory's peak.
    hbm, pcie = peak / 2, bus / 2

    def moved(rate: float, factor: float, launches: int, touches: int, source: str) -> Line:
        return Line(
            launches * LAUNCH_S,
            touches * ID_BYTES / rate,
            factor / rate,
            source=f"{source}; assumed: half of the peak for rows at random; {LAUNCH_SOURCE}",
        )

    def on_device(factor: float, launches: int, touches: int = 2) -> Line:
        return moved(hbm, factor, launches, touches, source)

    def on_host(factor: float, launches: int) -> Line:
        # Unified memory moves rows over the bus in both directions at once.
        return moved(pcie, factor, launches, 1, f"{source}, over the bus")

    # DynamicEmb's benchmark of TorchRec (NVIDIA recsys-examples, corelib/dynamicemb README): 1.05 M
    # ids of 512 bytes on an H100, forward and backward with SGD, take 13.56 ms in unified memory
    # and 4.15 ms from a full cache: 40 GB/s, close to the result of half of PCIe 5 for 1.3 bytes
    # per byte.
    read, update = on_device(2, 2), on_device(5, 20, 20)

    def in_slots(gather: float) -> Line:
        # A host thread gathers or scatters rows in pinned memory while others cross the bus.
        return Line(
            10 * LAUNCH_S,
            0.0,
            max(1 / gather, 1 / bus),
            source=f"{source}; assumed: a core moves {gather / 1e9:g} GB/s of rows of 512 bytes",
        )

    lines = {
        "fetch_slot": in_slots(6.6e9),
        "return_slot": in_slots(4.3e9),
        "fetch_mapped": Line(
            10 * LAUNCH_S,
            0.0,
            1 / (MAPPED_FRAC * bus),
            source=f"{source}; assumed: single rows at {MAPPED_FRAC:g} of the rate of one copy",
        ),
        "route": moved(hbm, 0, 60, 64, f"{source}; radix sort of 8-byte keys, 8 passes"),
        "read_device": read,
        "update_device": update,
        "pool": on_device(4, 6, 4),
        "hot_add": on_device(3, 8, 20),
        "pooled_device": on_device(1, 2),
        "pooled_host": on_host(1, 2),
        "pooled_hit": on_device(1, 12, 10),
        # Half of the evicted rows were changed and are written back.
        "pooled_miss": on_host(1.5, 12),
        "pooled_update_device": on_device(3, 20, 20),
        "pooled_update_host": on_host(1, 20),
        "pooled_update_hit": on_device(3, 24, 30),
        "order_row": moved(hbm, 0, 10, 12, f"{source}; one pass for each rank's ids, and one back"),
        "order_id": moved(hbm, 0, 8, 4, source),
        "copy": Line(LAUNCH_S, 0.0, 2 / peak, source=f"{source}; in and out, at the peak"),
    }
    dense_rate = 0.4 * flops
    lines["dense"] = Line(
        120 * LAUNCH_S,
        1 / dense_rate,
        source=f"{source}; assumed: 0.4 of the peak, 120 launches; {LAUNCH_SOURCE}",
    )
    lines["dense_update"] = Line(
        20 * LAUNCH_S,
        4 * 6 / (peak * 0.8),
        source=f"{source}; assumed: 6 values moved a parameter, at 0.8 of the peak",
    )
    return lines


def _gpu_costs(
    name: str,
    gpu: tuple[float, float, float, str],
    intra: Link,
    inter: Link | None,
    host_gib: int,
    memory_source: str,
) -> Costs:
    """Costs of GPUs of 80 GiB with the arguments ``gpu`` of their kernels."""
    return Costs(
        name=name,
        origin="built-in",
        device="cuda",
        kernels=_gpu_kernels(*gpu),
        intra=intra,
        inter=inter,
        device_bytes=80 * GIB,
        host_bytes=host_gib * GIB,
        # Sending takes no processor time of the device, but memory bandwidth and some of its cores.
        overlap=0.8,
        overhead_s=2e-3,
        facts={
            "memory": memory_source,
            "overhead_s": "assumed: 2 ms of Python and TorchRec's bookkeeping a step",
            "overlap": "assumed: 0.8 on GPUs, where NCCL uses some of the cores",
        },
    )


def _cpu_kernels() -> dict[str, Line]:
    """Lines in nanoseconds per item, picoseconds per byte, and microseconds per call."""
    source = (
        "measured with hotrec calibrate: 2 ranks on 2 cores of an Intel Xeon virtual machine, "
        "D = 64, row-wise Adagrad, corrected by whole steps; rounded"
    )
    figures = {
        "route": (47, 0, 620),
        "read_device": (12, 280, 300),
        "update_device": (140, 840, 800),
        "pool": (4.5, 165, 190),
        "hot_add": (43, 520, 270),
        "pooled_device": (15, 330, 550),
        "pooled_update_device": (165, 140, 970),
        "order_row": (14, 0, 400),
        "order_id": (5, 0, 400),
        "copy": (0, 90, 30),
        "dense_update": (1.1, 0, 400),
        # 70 Gflop/s per core: small layers, and the interactions between them.
        "dense": (0.0142, 0, 0),
    }
    lines = {
        name: Line(fixed * 1e-6, item * 1e-9, byte * 1e-12, source=source)
        for name, (item, byte, fixed) in figures.items()
    }
    in_slots = Line(
        1e-4, 0.0, 530e-12, source="assumed: a row read as by read_device, and written at 4 GB/s"
    )
    return lines | {"fetch_slot": in_slots, "return_slot": in_slots}


_CPU = Costs(
    name="cpu_1gbit",
    origin="built-in",
    device="cpu",
    kernels=_cpu_kernels(),
    intra=Link(
        2e-4,
        1.6e9,
        "measured with hotrec calibrate: gloo over the loopback of a 2-core Intel Xeon, rounded",
    ),
    inter=Link(
        3e-4,
        0.94 * 1e9 / 8,
        "1 Gbit/s Ethernet; TCP carries 1448 of the 1538 bytes of a full frame on the wire "
        "(IEEE 802.3, RFC 9293 with time stamps); latency assumed: 0.3 ms of a gloo collective",
    ),
    device_bytes=0,
    host_bytes=32 * GIB,
    overlap=0.5,
    overhead_s=5e-3,
    facts={
        "memory": "assumed: 32 GiB a host",
        "overhead_s": "measured: 3 ms a step, and 2 ms of waiting for ids; rounded",
        "overlap": "measured: 0 to 0.5 on loopback, 0.9 to 1 at 1 Gbit/s; 0.5 between",
    },
)

_H100 = (
    3.35e12,
    64e9,
    67e12,
    "NVIDIA H100 data sheet, SXM5: 3.35 TB/s HBM3, PCIe 5 x16 64 GB/s each way, 67 TFLOP/s fp32",
)
_NVLINK_4 = Link(
    3e-5,
    370e9,
    "NCCL over NVLink 4 reaches about 370 of its 450 GB/s each way (an NCCL developer in "
    "github.com/NVIDIA/nccl-tests/issues/212); " + _LATENCY.format("30 us"),
)
_NVLINK_3 = Link(
    3e-5,
    230e9,
    "NVIDIA A100 data sheet: NVLink 3, 300 GB/s each way; nccl-tests measure 200 to 235 GB/s "
    "(github.com/NVIDIA/nccl-tests/issues/149 and 178); " + _LATENCY.format("30 us"),
)

BUILTIN: Mapping[str, Costs] = {
    costs.name: costs
    for costs in (
        _gpu_costs(
            "dgx_h100_infiniband",
            _H100,
            intra=_NVLINK_4,
            inter=Link(
                4e-5,
                0.9 * 8 * 50e9,
                "NVIDIA DGX H100 data sheet: 8 ConnectX-7 of 400 Gbit/s; assumed: 0.9 of it; "
                + _LATENCY.format("40 us"),
            ),
            host_gib=2048,
            memory_source="NVIDIA DGX H100 data sheet: 8 x 80 GB, 2 TB of host memory",
        ),
        _gpu_costs(
            "dgx_a100",
            (
                2.039e12,
                32e9,
                19.5e12,
                "NVIDIA A100 80GB data sheet, SXM4: 2,039 GB/s HBM2e, PCIe 4 x16 32 GB/s each way, "
                "19.5 TFLOP/s fp32",
            ),  # fmt: skip
            intra=_NVLINK_3,
            inter=Link(
                4e-5,
                0.9 * 8 * 25e9,
                "NVIDIA DGX A100 data sheet: 8 HDR InfiniBand adapters of 200 Gbit/s; assumed: "
                "0.9 of it; " + _LATENCY.format("40 us"),
            ),
            host_gib=2048,
            memory_source="NVIDIA DGX A100 640GB data sheet: 8 x 80 GB, 2 TB of host memory",
        ),
        _gpu_costs(
            "one_gpu_pcie",
            (
                2.0e12,
                64e9,
                51e12,
                "NVIDIA H100 PCIe product brief PB-11133: 2.0 TB/s HBM2e, PCIe 5 x16 64 GB/s each "
                "way, 51 TFLOP/s fp32",
            ),  # fmt: skip
            intra=Link(
                3e-5,
                0.8 * 64e9,
                "PCIe 5 x16, 64 GB/s each way, for more than one card; assumed: 0.8 of it; "
                + _LATENCY.format("30 us"),
            ),
            inter=None,
            host_gib=256,
            memory_source="H100 PCIe: 80 GB; assumed: 256 GB of host memory",
        ),
        _CPU,
    )
}
# Sets used instead of unmeasured costs, by device; each has a link between hosts.
NEAREST_BUILTIN: Mapping[str, str] = {"cpu": "cpu_1gbit", "cuda": "dgx_h100_infiniband"}
