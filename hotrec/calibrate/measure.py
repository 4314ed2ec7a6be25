"""Measure the costs of a machine: kernels, collectives, memory, whole steps."""

from __future__ import annotations

import time
from dataclasses import asdict, astuple, replace

import torch
from tqdm import tqdm

from hotrec.calibrate.collectives import Network, measure_network, measure_overlap
from hotrec.calibrate.kernels import Effort, Point, fit_line, measure_probe
from hotrec.calibrate.probes import all_probes
from hotrec.calibrate.steps import correct_by_steps
from hotrec.calibrate.workload import CalibrationTarget, CalibrationWorkload, group_alone
from hotrec.cost_model.costs import KERNELS, Costs, Line, Link, World
from hotrec.cost_model.interval import interval_text
from hotrec.runtime.memory import read_fingerprint, read_memory
from hotrec.runtime.ranks import Ranks, all_gather_object, broadcast_object


def measure_costs(
    ranks: Ranks,
    target: CalibrationTarget,
    *,
    name: str | None = None,
    max_bytes: float = float(16 << 20),
    repeats: int = 7,
    budget_s: float = 0.5,
) -> Costs:
    """Measure all kernels and collectives, on all ranks at the same time; collective.

    Args:
        ranks: Ranks of the process group, which must exist.
        target: Tables, model, optimizer and batch size to measure with.
        name: Name of the costs; None for the device and its processor or GPU.
        max_bytes: Largest number of bytes that a rank sends in one message.
        repeats: Repeats per size, fewer if they take longer than ``budget_s``.
        budget_s: Seconds for the repeats of one size.

    Returns:
        The costs, equal on every rank.

    Raises:
        CostsError: If the hosts have different numbers of ranks, or a measured time is not above 0.
        ValueError: If tables in host memory do not fit there.
    """
    start_s = time.perf_counter()
    World(ranks.world_size, ranks.local_world_size)  # validates the number of ranks per host
    effort = Effort(repeats, budget_s)
    warm_memory(ranks.device, target.cap_bytes)
    workload = CalibrationWorkload(target, ranks, group_alone(ranks))
    probes = all_probes(workload)
    points: dict[str, list[Point]] = {}
    lines: dict[str, Line] = {}
    # disable=None: shown on a terminal only.
    disable = None if ranks.is_first else True
    with tqdm(total=len(probes) + 2, desc="calibrate", disable=disable) as bar:
        bar.set_postfix_str("network")
        network = measure_network(ranks, max_bytes=max_bytes, effort=effort)
        overlap = measure_overlap(ranks, max_bytes=max_bytes, effort=effort)
        bar.update()
        for probe in probes:
            bar.set_postfix_str(probe.name)
            points[probe.name] = measure_probe(probe, ranks.device, effort)
            lines[probe.name] = fit_line(
                points[probe.name],
                is_by_items=probe.is_by_items,
                is_by_bytes=probe.is_by_bytes,
                is_growing=probe.is_by_items or probe.is_by_bytes,
            )
            bar.update()
        device_bytes, host_bytes = measure_memory(ranks.device)
        fingerprints = all_gather_object(read_fingerprint(ranks.device.type))
        intra, inter = _links(network, lines["copy"])
        host = fingerprints[0]
        costs = Costs(
            name=name or f"{ranks.device.type} {host['gpu'] or host['processor']}",
            origin="measured",
            device=ranks.device.type,
            kernels=lines,
            intra=intra,
            inter=inter,
            device_bytes=device_bytes,
            host_bytes=host_bytes,
            curves=network.curves,
            overlap=overlap,
            host=host,
            facts={
                "num_ranks": ranks.world_size,
                "ranks_per_host": ranks.local_world_size,
                "threads_per_rank": torch.get_num_threads(),
                "batch_size": target.batch_size,
                "embedding_dim": workload.dim,
                "optimizer": target.optimizer.kind.name,
                "zipf_exponent": target.zipf_exponent,
                "hosts_differ": any(other != host for other in fingerprints),
                "points": {name: [list(astuple(p)) for p in of] for name, of in points.items()},
            },
        )
        bar.set_postfix_str("whole steps")
        costs, anchors = correct_by_steps(workload, costs)
        bar.update()
    # All ranks fitted the same measurements; the broadcast makes the costs equal to the bit.
    more = {"elapsed_s": time.perf_counter() - start_s, "steps": [asdict(a) for a in anchors]}
    costs = replace(costs, facts={**costs.facts, **more})
    return Costs.from_json(broadcast_object(costs.to_json()))


def _links(network: Network, copy: Line) -> tuple[Link, Link | None]:
    """The links; a memory copy stands in for the link inside a host with one rank."""
    if network.intra is not None:
        return network.intra, network.inter
    source = (
        "assumed: a copy in memory; no host had two ranks. Calibrate with as many ranks on a host "
        "as will train"
    )
    return Link(copy.fixed_s, 1 / copy.per_byte_s, source), network.inter


def measure_memory(device: torch.device) -> tuple[int, int]:
    """Least bytes of a device (0 on CPU) and of a host or its control group; collective."""
    device_bytes = 0
    if device.type == "cuda":
        device_bytes = torch.cuda.get_device_properties(device).total_memory
    of_ranks = all_gather_object((device_bytes, read_memory()[0]))
    return min(d for d, _ in of_ranks), min(h for _, h in of_ranks)


def warm_memory(device: torch.device, num_bytes: int) -> None:
    """Allocate and free memory once on CPU, so that timed calls get no fresh pages.

    A training run reaches that state after some steps, since freed memory is kept
    (``hotrec.runtime.memory``); half of a few timed calls would pay for page faults.
    """
    if device.type == "cpu":
        parts = [torch.zeros(1 << 20, dtype=torch.uint8) for _ in range(num_bytes >> 20)]
        del parts


def costs_table(costs: Costs) -> str:
    """Lines and links of costs as a table for the terminal."""
    lines = {name: costs.kernels[name] for name in KERNELS if name in costs.kernels}
    for curve in costs.curves:
        lines[f"{curve.kind} {curve.world.num_ranks}r/{curve.world.num_hosts}h"] = curve.line()
    if costs.look_ahead.source == "measured":
        lines["look_ahead"] = costs.look_ahead  # of the bytes of cold rows, beside its stages
    width = max(map(len, lines))
    rows = [f"costs {costs.name} ({costs.origin}, {costs.device})"]
    rows.append(f"{'kernel':<{width}}  {'per item':>10}  {'per byte':>10}  {'fixed':>10}  spread")
    for name, line in lines.items():
        times = "  ".join(map(_time_text, (line.per_item_s, line.per_byte_s, line.fixed_s)))
        rows.append(f"{name:<{width}}  {times}  {line.spread:5.0%}")
    for level, link in (("inside a host", costs.intra), ("between hosts", costs.inter)):
        if link is not None:
            rate = f"{link.bytes_per_s / 1e6:,.0f} MB/s"
            rows.append(f"link {level}: {rate}, latency {_time_text(link.latency_s).strip()}")
    rows.append(f"a predicted step holds within {interval_text(costs.ratio_interval)}")
    rows.append(f"overlap {costs.overlap:.2f}, overhead {_time_text(costs.overhead_s).strip()}")
    return "\n".join(rows)


def _time_text(seconds: float) -> str:
    for factor, unit in ((1e3, "ms"), (1e6, "us"), (1e9, "ns")):
        if seconds * factor >= 1:
            return f"{seconds * factor:7.3g} {unit}"
    return f"{seconds * 1e12:7.3g} ps"
