"""Collectives over sizes: one curve each, and from them the links inside and between hosts.

Byte counts are those of ``hotrec.runtime.traffic`` (n bytes of a rank's tensor, W ranks):

    all_to_all      (W-1)/W n       n: what the rank sends to all, itself included
    all_reduce      2 (W-1)/W n
    all_gather      (W-1) n         n: the rank's own part
    reduce_scatter  (W-1)/W n       n: the whole input
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hotrec.calibrate.kernels import Effort, slowest_rank, time_on_all_ranks
from hotrec.cost_model.costs import COLLECTIVES, CollectiveCurve, CostsError, Link, World
from hotrec.runtime.ranks import Ranks, new_group

BYTES_PER_FLOAT = 4
MIN_BYTES = 1024.0
GROWTH = 4
# On a slow network a size that would take longer is left out: the line is known by then.
MAX_CALL_S = 0.5
MIN_SIZES = 3
# The kinds that links are fitted from: the row exchange, and the ring of the other collectives.
LINK_KINDS = ("all_to_all", "all_reduce")


def num_values(kind: str, sent_bytes: float, num_ranks: int) -> int:
    """Floats of the tensor for which a rank sends about ``sent_bytes``; rounded to whole shares."""
    values = sent_bytes / BYTES_PER_FLOAT
    others = num_ranks - 1
    if kind == "all_gather":
        return max(1, round(values / others))
    per_value = 2 * others / num_ranks if kind == "all_reduce" else others / num_ranks
    return num_ranks * max(1, round(values / per_value / num_ranks))


def sent_bytes(kind: str, values: int, num_ranks: int) -> float:
    """Bytes that a rank sends for a tensor of ``values`` floats, see the module's table."""
    num_bytes, others = BYTES_PER_FLOAT * values, num_ranks - 1
    match kind:
        case "all_to_all" | "reduce_scatter":
            return num_bytes * others / num_ranks
        case "all_reduce":
            return 2 * num_bytes * others / num_ranks
        case "all_gather":
            return float(num_bytes * others)
    raise CostsError(f"collective: expected one of {COLLECTIVES}, got {kind!r}.")


def make_call(
    kind: str, values: int, group: dist.ProcessGroup | None, device: torch.device
) -> Callable[[Any], object]:
    """One collective in a group, ready to be timed.

    Args:
        kind: One of ``COLLECTIVES``.
        values: Number of floats in the rank's tensor.
        group: Process group; None for all ranks.
        device: Device of the tensors.
    """
    num_ranks = dist.get_world_size(group)
    source = torch.ones(values, device=device)
    match kind:
        case "all_to_all":
            target = torch.empty_like(source)
            return lambda _: dist.all_to_all_single(target, source, group=group)
        case "all_reduce":
            # Ones would grow by W each time, to infinity.
            source.zero_()
            return lambda _: dist.all_reduce(source, group=group)
        case "all_gather":
            target = source.new_empty(values * num_ranks)
            return lambda _: dist.all_gather_into_tensor(target, source, group=group)
        case "reduce_scatter":
            target = source.new_empty(values // num_ranks)
            return lambda _: dist.reduce_scatter_tensor(target, source, group=group)
    raise CostsError(f"collective: expected one of {COLLECTIVES}, got {kind!r}.")


def sizes_up_to(max_bytes: float) -> list[float]:
    """Message sizes to measure, in bytes: from 1 KB in factors of 4, and the largest."""
    sizes: list[float] = []
    size = MIN_BYTES
    while size < max_bytes and len(sizes) < 16:
        sizes.append(size)
        size *= GROWTH
    return [*sizes, max_bytes] if max_bytes > MIN_BYTES else [max_bytes]


def measure_curve(
    kind: str,
    world: World,
    group: dist.ProcessGroup | None,
    device: torch.device,
    *,
    max_bytes: float,
    effort: Effort,
    advance: Callable[[], object] = lambda: None,
) -> CollectiveCurve:
    """Time a collective over sizes, on all groups at the same time; collective.

    Sizes grow until the next would take longer than half a second.

    Args:
        kind: One of ``COLLECTIVES``.
        world: Size of the group in ranks and hosts.
        group: Process group of this rank; None for all ranks.
        device: Device of the tensors.
        max_bytes: Largest number of bytes that a rank sends.
        effort: Number of repeats.
        advance: Called once per size, including those left out.
    """
    sizes: list[float] = []
    seconds: list[float] = []
    spreads: list[float] = []
    is_over = False
    for wanted in sizes_up_to(max_bytes):
        advance()
        if is_over:
            continue
        values = num_values(kind, wanted, world.num_ranks)
        size = sent_bytes(kind, values, world.num_ranks)
        if sizes and size <= sizes[-1]:
            continue
        timing = slowest_rank(
            time_on_all_ranks(make_call(kind, values, group, device), device, effort)
        )
        sizes.append(size)
        seconds.append(timing.seconds)
        spreads.append(timing.spread)
        # The same figures on all ranks, so all stop at the same size.
        is_over = len(sizes) >= MIN_SIZES and timing.seconds * GROWTH > MAX_CALL_S
    return CollectiveCurve(kind, world, tuple(sizes), tuple(seconds), tuple(spreads))


def link_of(curves: Sequence[CollectiveCurve], ranks_sending: int = 1) -> Link:
    """Median latency and rate of measured curves.

    Where the fitted time does not grow with the bytes (all sizes small), the rate is that of the
    largest size, latency included: a lower bound.

    Args:
        curves: Measured collectives, at least one.
        ranks_sending: Number of ranks that share the link; its rate is their sum.
    """
    lines = [curve.line() for curve in curves]
    rates = [
        1 / line.per_byte_s if line.per_byte_s > 0 else curve.sent_bytes[-1] / curve.seconds[-1]
        for line, curve in zip(lines, curves, strict=True)
    ]
    latency_s = float(np.median([line.fixed_s for line in lines]))
    return Link(latency_s, float(np.median(rates)) * ranks_sending)


@dataclass(frozen=True)
class Network:
    """Measurements between the ranks.

    Args:
        curves: Curves of all ranks and, with several hosts, of the ranks of one host.
        intra: Link inside a host; None with one rank per host.
        inter: Link between hosts; None with one host.
    """

    curves: tuple[CollectiveCurve, ...]
    intra: Link | None
    inter: Link | None


def num_network_points(ranks: Ranks, max_bytes: float) -> int:
    """Number of times that ``measure_network`` calls ``advance``."""
    if ranks.world_size == 1:
        return 0
    num_levels = 2 if ranks.num_hosts > 1 and ranks.local_world_size > 1 else 0
    num_curves = len(COLLECTIVES) + num_levels * len(LINK_KINDS)
    return num_curves * len(sizes_up_to(max_bytes))


def measure_network(
    ranks: Ranks, *, max_bytes: float, effort: Effort, advance: Callable[[], object]
) -> Network:
    """Measure all ranks together and, with several on several hosts, each level; collective.

    Inside a host its ranks form a group. Between hosts the ranks of equal local rank form a group,
    and all these groups send at the same time, so that together they saturate the host's link.
    """
    world = World(ranks.world_size, ranks.local_world_size)
    if ranks.world_size == 1:
        return Network((), None, None)

    def measure(kind: str, of: World, group: dist.ProcessGroup | None) -> CollectiveCurve:
        return measure_curve(
            kind, of, group, ranks.device, max_bytes=max_bytes, effort=effort, advance=advance
        )

    curves = {kind: measure(kind, world, None) for kind in COLLECTIVES}
    of_world = [curves[kind] for kind in LINK_KINDS]
    if ranks.num_hosts == 1:
        return Network(tuple(curves.values()), link_of(of_world), None)
    local = ranks.local_world_size
    if local == 1:
        return Network(tuple(curves.values()), None, link_of(of_world))
    hosts = range(ranks.num_hosts)
    inside = _own_group([[h * local + i for i in range(local)] for h in hosts], ranks.rank)
    between = _own_group([[h * local + i for h in hosts] for i in range(local)], ranks.rank)
    in_host = [measure(kind, World(local, local), inside) for kind in LINK_KINDS]
    among = [measure(kind, World(ranks.num_hosts, 1), between) for kind in LINK_KINDS]
    return Network((*curves.values(), *in_host), link_of(in_host), link_of(among, local))


def _own_group(members: Sequence[Sequence[int]], rank: int) -> dist.ProcessGroup:
    """Create all groups, which is a collective, and return this rank's."""
    groups: Mapping[int, Any] = {
        member: group
        for ranks_of_group in members
        for group in [new_group(ranks_of_group)]
        for member in ranks_of_group
    }
    own: dist.ProcessGroup = groups[rank]
    return own


def measure_overlap(ranks: Ranks, *, max_bytes: float, effort: Effort) -> float:
    """Fraction of a transfer that a concurrent computation hides, 0..1; collective.

    From an all_to_all and a matrix product of about the same length: t_both = t_wire + t_compute -
    overlap * min(t_wire, t_compute). Below 1 where sending needs processor time; 1 with one rank.
    """
    if ranks.world_size == 1:
        return 1.0
    values = num_values("all_to_all", min(max_bytes, 1 << 20), ranks.world_size)
    source = torch.ones(values, device=ranks.device)
    target = torch.empty_like(source)
    matrix = torch.ones(256, 256, device=ranks.device)

    def send() -> Any:
        return dist.all_to_all_single(target, source, async_op=True)

    def compute(times: int) -> None:
        for _ in range(times):
            torch.mm(matrix, matrix)

    def seconds(run: Callable[[Any], object]) -> float:
        return slowest_rank(time_on_all_ranks(run, ranks.device, effort)).seconds

    wire_s = seconds(lambda _: send().wait())
    times = max(1, round(wire_s / seconds(lambda _: compute(1))))
    compute_s = seconds(lambda _: compute(times))

    def both(_: Any) -> None:
        work = send()
        compute(times)
        work.wait()

    hidden_s = wire_s + compute_s - seconds(both)
    return float(np.clip(hidden_s / min(wire_s, compute_s), 0.0, 1.0))
