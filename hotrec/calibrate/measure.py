"""Measure the costs of a machine: kernels, collectives, memory, whole steps."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from hotrec.calibrate.collectives import Network, measure_overlap, start_network
from hotrec.calibrate.loader import measure_loader
from hotrec.calibrate.noise import doubts_of, noise_text
from hotrec.calibrate.probes import all_probes
from hotrec.calibrate.steps import correct_by_steps, measure_steps
from hotrec.calibrate.timing import (
    Budget,
    Point,
    Probe,
    Series,
    fit_line,
    run_rounds,
    slowest_median,
    time_work,
)
from hotrec.calibrate.workload import CalibrationTarget, CalibrationWorkload, group_alone
from hotrec.cost_model.costs import (
    KERNELS,
    Costs,
    CostsError,
    Line,
    Link,
    World,
    interval_text,
)
from hotrec.runtime.cores import cores_per_host
from hotrec.runtime.hosts import gather_hosts
from hotrec.runtime.load import LoadMeter
from hotrec.runtime.memory import read_fingerprint, read_memory
from hotrec.runtime.progress import Progress
from hotrec.runtime.ranks import Ranks, all_gather_object, broadcast_object

# Shares of the budget at which the measurement of messages, and then of kernels, ends; the rest is
# for whole steps.
NETWORK_FRAC, KERNELS_FRAC = 0.25, 0.4


@dataclass
class PointSeries(Series):
    """A kernel at one of its sizes; ``counts`` are its items and bytes."""

    counts: tuple[float, float] = (0.0, 0.0)

    @property
    def point(self) -> Point:
        return Point(*self.counts, self.result.seconds, self.result.spread)


def series_of(probe: Probe, device: torch.device) -> list[PointSeries]:
    """A kernel at each of its sizes. Each round creates the work again, which bounds memory."""
    return [_point_series(probe, size, device) for size in probe.sizes]


def _point_series(probe: Probe, size: tuple[int, int], device: torch.device) -> PointSeries:
    def measure(num_warm: int, num_repeats: int) -> list[list[float]]:
        work = probe.make(*size)
        found.counts = (work.num_items, work.num_bytes)
        return time_work(work, device, num_warm, num_repeats)

    found = PointSeries(slowest_median, measure=measure)
    return found


def measure_costs(
    ranks: Ranks,
    target: CalibrationTarget,
    *,
    name: str | None = None,
    max_bytes: float = float(16 << 20),
    repeats: int = 24,
    budget_s: float = 60.0,
    dataset: Path | None = None,
) -> Costs:
    """Measure all kernels and collectives, on all ranks at the same time; collective.

    Args:
        ranks: Ranks of the process group, which must exist.
        target: Tables, model, optimizer and batch size to measure with.
        name: Name of the costs; None for the device and its processor or GPU.
        max_bytes: Maximum number of bytes that a rank sends in one message.
        repeats: Maximum number of repeats of each size.
        budget_s: Seconds for all measurements. Each is made once even if that takes longer; on a
            slow network messages and the batches of whole steps are smaller.
        dataset: Dataset on which the loader is timed; None omits it.

    Returns:
        The costs, equal on every rank.

    Raises:
        CostsError: If hosts have different numbers of ranks or ranks that are not consecutive, or a
            measured time is not above 0.
        ValueError: If tables in host memory do not fit there.
    """
    budget = Budget(budget_s)
    found = gather_hosts()
    if not found.is_regular:
        raise CostsError(
            "calibrate: expected hosts with equal numbers of consecutive ranks, got ranks that "
            f"exchange {found.why}. Start as many ranks on every host, numbered by host."
        )
    world = World(ranks.world_size, found.ranks_per_host)
    warm_memory(ranks.device, target.cap_bytes)
    with (
        Progress("calibrate", round(budget_s), unit="s", is_shown=ranks.is_first) as bar,
        group_alone(ranks) as alone,
        ExitStack() as stack,
    ):
        workload = CalibrationWorkload(target, ranks, alone, found)
        load, shown = LoadMeter(), BudgetProgress(bar, budget)
        shown("network")
        network = start_network(
            world, ranks.device, max_bytes=max_bytes, max_s=NETWORK_FRAC * budget_s
        )
        stack.callback(network.close)
        overlaps = [measure_overlap(ranks, max_bytes=max_bytes)]

        probes = all_probes(workload)
        series = {probe.name: series_of(probe, ranks.device) for probe in probes}
        every = [*network.series, *(one for of in series.values() for one in of)]
        run_rounds(
            every,
            budget,
            until_s=KERNELS_FRAC * budget_s,
            max_repeats=repeats,
            after_turn=partial(shown, "messages and kernels"),
            after_round=lambda: overlaps.append(measure_overlap(ranks, max_bytes=max_bytes)),
        )
        points = {name: [one.point for one in of] for name, of in series.items()}
        lines = {
            probe.name: fit_line(
                points[probe.name],
                is_by_items=probe.is_by_items,
                is_by_bytes=probe.is_by_bytes,
                is_growing=probe.is_by_items or probe.is_by_bytes,
            )
            for probe in probes
        }
        shown("loader")
        loader = {} if dataset is None else measure_loader(dataset, workload)
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
            loader=loader,
            overlap=float(np.median(overlaps)),
            host=host,
            facts={
                "num_ranks": ranks.world_size,
                "ranks_per_host": world.ranks_per_host,
                "threads_per_rank": torch.get_num_threads(),
                "batch_size": target.batch_size,
                "embedding_dim": workload.dim,
                "optimizer": target.spec.embedding.kind.name,
                "zipf_exponents": list(target.exponents),
                "cores_per_host": cores_per_host(ranks),
                "hosts_differ": any(other != host for other in fingerprints),
                "points": {name: [list(astuple(p)) for p in of] for name, of in points.items()},
            },
        )
        cases, batch_size = measure_steps(
            workload,
            costs,
            budget,
            max_repeats=repeats,
            after_turn=partial(shown, "whole steps"),
        )
        costs, anchors = correct_by_steps(costs, cases)
        hosts = load.hosts(ranks)
        of_steps = [case.repeats for case in cases]
        doubts = [*doubts_of(hosts, [*every, *of_steps]), *costs.doubts]
    # All ranks fitted the same measurements; the broadcast makes the costs equal to the bit.
    more = {
        "elapsed_s": budget.spent_s(),
        "steps": [asdict(anchor) for anchor in anchors],
        "noise": noise_text(hosts, every),
        "cut": cut_text(network, max_bytes, batch_size, target),
    }
    costs = replace(costs, facts={**costs.facts, **more}, doubts=tuple(doubts))
    return Costs.from_json(broadcast_object(costs.to_json()))


@dataclass(frozen=True)
class BudgetProgress:
    """Shows what is measured, and how much of the budget is spent."""

    bar: Progress
    budget: Budget

    def __call__(self, what: str) -> None:
        self.bar.set_postfix_str(what, refresh=False)
        self.bar.update(max(0, min(self.bar.total, round(self.budget.own_s())) - self.bar.n))


def cut_text(
    network: Network,
    max_bytes: float,
    batch_size: int,
    target: CalibrationTarget,
) -> str | None:
    """The measurements that are smaller than configured to stay in the budget; None without any."""
    cut = []
    if network.among_all and network.largest_bytes < 0.9 * max_bytes:
        cut.append(f"messages of up to {network.largest_bytes:,.0f} bytes, not {max_bytes:,.0f}")
    if batch_size < target.batch_size:
        cut.append(f"some whole steps of batches of up to {batch_size}, not {target.batch_size}")
    return f"measured {' and '.join(cut)}, to keep to calibrate.budget_s" if cut else None


def _links(network: Network, copy: Line) -> tuple[Link, Link | None]:
    """The links; with one rank per host, a memory copy represents the link inside a host."""
    intra, inter = network.links()
    if intra is not None:
        return intra, inter
    source = (
        "assumed: a copy in memory; no host had two ranks. Calibrate with as many ranks on a host "
        "as will train"
    )
    return Link(copy.fixed_s, 1 / copy.per_byte_s, source), inter


def measure_memory(device: torch.device) -> tuple[int, int]:
    """Minimum memory of a device (0 on CPU) and of a host or its control group; collective."""
    device_bytes = 0
    if device.type == "cuda":
        device_bytes = torch.cuda.get_device_properties(device).total_memory
    of_ranks = all_gather_object((device_bytes, read_memory()[0]))
    return min(d for d, _ in of_ranks), min(h for _, h in of_ranks)


def warm_memory(device: torch.device, num_bytes: int) -> None:
    """Allocate and free memory once on CPU, so that timed calls get no fresh pages.

    A training run reaches that state after some steps, since freed memory is kept
    (``hotrec.runtime.memory``); otherwise half of a few timed calls would include page faults.
    """
    if device.type == "cpu":
        parts = [torch.zeros(1 << 20, dtype=torch.uint8) for _ in range(num_bytes >> 20)]
        del parts


def costs_table(costs: Costs) -> str:
    """Lines and links of costs as a table for the terminal."""
    lines = {name: costs.kernels[name] for name in KERNELS if name in costs.kernels}
    for curve in costs.curves:
        rails = f" on {curve.num_rails} rails" if curve.num_rails > 1 else ""
        world = f"{curve.world.num_ranks}r/{curve.world.num_hosts}h{rails}"
        lines[f"{curve.kind} {world}"] = curve.line()
    for name, line in costs.loader.items():
        lines[f"loader {name}"] = line
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
    said = (costs.facts.get("noise"), costs.facts.get("cut"), costs.caveat)
    rows += [text for text in said if text]
    rows.append(f"overlap {costs.overlap:.2f}, overhead {_time_text(costs.overhead_s).strip()}")
    return "\n".join(rows)


def _time_text(seconds: float) -> str:
    for factor, unit in ((1e3, "ms"), (1e6, "us"), (1e9, "ns")):
        if seconds * factor >= 1:
            return f"{seconds * factor:7.3g} {unit}"
    return f"{seconds * 1e12:7.3g} ps"
