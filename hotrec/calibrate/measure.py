"""Costs of a machine, measured: all kernels and collectives, on all ranks at the same time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
from tqdm import tqdm

from hotrec.calibrate.clock import Effort
from hotrec.calibrate.collectives import (
    Network,
    measure_network,
    measure_overlap,
    num_network_points,
)
from hotrec.calibrate.kernels import Point, fit_line, largest_error, measure_probe
from hotrec.calibrate.memory import measure_memory, warm_memory
from hotrec.calibrate.probes import CalibrationTarget, CalibrationWorkload, all_probes, group_alone
from hotrec.calibrate.steps import correct_by_steps, num_step_points
from hotrec.cost_model.costs import KERNELS, Costs, Line, Link, World
from hotrec.runtime.fingerprint import read_fingerprint
from hotrec.runtime.ranks import (
    Ranks,
    all_gather_object,
    broadcast_object,
)


def measure_costs(
    ranks: Ranks,
    subject: CalibrationTarget,
    *,
    name: str | None = None,
    max_bytes: float = float(16 << 20),
    repeats: int = 7,
    budget_s: float = 0.5,
) -> Costs:
    """Measure all kernels and collectives, on all ranks at the same time; collective.

    Args:
        ranks: of the process group, which exists already.
        subject: tables, model and optimizer to measure with.
        name: of the costs; None: device and processor or GPU.
        max_bytes: largest message of a rank.
        repeats: of each size, fewer if they would take longer than ``budget_s``.
        budget_s: for the repeats of one size.

    Returns:
        The same costs on every rank.
    """
    start_s = time.perf_counter()
    World(ranks.world_size, ranks.local_world_size)  # refuses uneven hosts before any work
    effort = Effort(repeats, budget_s)
    warm_memory(ranks.device, subject.cap_bytes)
    bench = CalibrationWorkload(subject, ranks, group_alone(ranks))
    probes = all_probes(bench)
    num_points = sum(len(probe.sizes) for probe in probes)
    num_points += num_network_points(ranks, max_bytes)
    lines: dict[str, Line] = {}
    points: dict[str, list[Point]] = {}
    with _progress(ranks, num_points) as bar:
        advance: Callable[[], object] = bar.update
        network = measure_network(ranks, max_bytes=max_bytes, effort=effort, advance=advance)
        overlap = measure_overlap(ranks, max_bytes=max_bytes, effort=effort)
        for probe in probes:
            bar.set_postfix_str(probe.name)
            found = measure_probe(probe, ranks.device, effort, advance)
            points[probe.name] = found
            lines[probe.name] = fit_line(
                found,
                is_by_items=probe.is_by_items,
                is_by_bytes=probe.is_by_bytes,
                is_growing=probe.is_by_items or probe.is_by_bytes,
            )
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
            "batch_size": subject.batch_size,
            "embedding_dim": bench.dim,
            "optimizer": subject.optimizer.kind.name,
            "zipf_exponent": subject.zipf_exponent,
            "hosts_differ": any(other != host for other in fingerprints),
            "elapsed_s": time.perf_counter() - start_s,
            "largest_fit_error": {n: largest_error(lines[n], points[n]) for n in lines},
            "points": {
                n: [[p.num_items, p.num_bytes, p.seconds, p.spread] for p in found]
                for n, found in points.items()
            },
        },
    )
    costs = _corrected(bench, costs, ranks)
    # Each rank has fitted the same figures; rank 0's make sure that they are the same to the bit.
    return Costs.from_json(broadcast_object(costs.to_json()))


def _corrected(bench: CalibrationWorkload, costs: Costs, ranks: Ranks) -> Costs:
    with _progress(ranks, num_step_points(bench)) as bar:
        bar.set_postfix_str("whole steps")
        corrected, anchors = correct_by_steps(bench, costs, bar.update)
    return replace(corrected, facts={**costs.facts, "steps": [asdict(a) for a in anchors]})


def _progress(ranks: Ranks, num_points: int) -> tqdm[Any]:
    # disable=None: shown on a terminal only.
    disable = None if ranks.is_first else True
    return tqdm(total=num_points, desc="calibrate", unit="size", disable=disable)


def _links(network: Network, copy: Line) -> tuple[Link, Link | None]:
    """The links; one inside a host where no two ranks share one is a copy in memory."""
    if network.intra is not None:
        return network.intra, network.inter
    rate = 1 / copy.per_byte_s if copy.per_byte_s > 0 else 1 / copy.seconds(0, 1)
    source = (
        "assumed: a copy in memory; no host had two ranks. Calibrate with as many ranks on a host "
        "as will train"
    )
    return Link(copy.fixed_s, rate, source), network.inter


def costs_table(costs: Costs) -> str:
    """The lines and links for people."""
    width = max(len(name) for name in costs.kernels)
    header = f"{'kernel':<{width}}  {'per item':>10}  {'per byte':>10}  {'fixed':>10}  spread"
    rows = [f"costs {costs.name} ({costs.origin}, {costs.device})", header]
    for name in KERNELS:
        line = costs.kernels.get(name)
        if line is not None:
            rows.append(
                f"{name:<{width}}  {_time_text(line.per_item_s)}  {_time_text(line.per_byte_s)}  "
                f"{_time_text(line.fixed_s)}  {line.spread:5.0%}"
            )
    for curve in costs.curves:
        line = curve.line()
        kind = f"{curve.kind} {curve.world.num_ranks}r/{curve.world.num_hosts}h"
        rows.append(
            f"{kind:<{width}}  {'':>10}  {_time_text(line.per_byte_s)}  "
            f"{_time_text(line.fixed_s)}  {line.spread:5.0%}"
        )
    for level, link in (("inside a host", costs.intra), ("between hosts", costs.inter)):
        if link is not None:
            rate = f"{link.bytes_per_s / 1e6:,.0f} MB/s"
            rows.append(f"link {level}: {rate}, latency {_time_text(link.latency_s).strip()}")
    rows.append(f"overlap {costs.overlap:.2f}, overhead {_time_text(costs.overhead_s).strip()}")
    ahead = costs.look_ahead
    rows.append(
        f"look-ahead ({ahead.source}): {_time_text(ahead.fixed_s).strip()} a step and "
        f"{_time_text(1e6 * ahead.per_byte_s).strip()} a megabyte of cold rows, beside its stages"
    )
    return "\n".join(rows)


def _time_text(seconds: float) -> str:
    for factor, unit in ((1e3, "ms"), (1e6, "us"), (1e9, "ns")):
        if seconds * factor >= 1:
            return f"{seconds * factor:7.3g} {unit}"
    return f"{seconds * 1e12:7.3g} ps"
