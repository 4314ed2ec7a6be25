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

from hotrec.calibrate.clock import Effort, slowest_rank, time_on_all_ranks
from hotrec.cost_model.costs import COLLECTIVES, CollectiveCurve, CostsError, Link, World
from hotrec.runtime.ranks import Ranks, new_group

BYTES_PER_FLOAT = 4
LEAST_BYTES = 1024.0
GROWTH = 4
# On a slow network a size that would take longer is left out: the line is known by then.
MOST_CALL_S = 0.5
LEAST_SIZES = 3
# What the links are made of: the row exchange, and the ring that the others go along.
LINK_KINDS = ("all_to_all", "all_reduce")


def num_values(kind: str, sent_bytes: float, num_ranks: int) -> int:
    """Floats of a rank's tensor for which it sends about so many bytes; whole shares for all."""
    values = sent_bytes / BYTES_PER_FLOAT
    others = num_ranks - 1
    if kind == "all_gather":
        return max(1, round(values / others))
    per_value = 2 * others / num_ranks if kind == "all_reduce" else others / num_ranks
    return num_ranks * max(1, round(values / per_value / num_ranks))


def sent_bytes(kind: str, values: int, num_ranks: int) -> float:
    """Bytes that a rank sends for a tensor of ``values`` floats, see the module's table.

    Raises:
        CostsError: if it is none of the four collectives.
    """
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
        values: floats of the rank's tensor.
        group: None for all ranks.
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
    """Bytes to be sent: from 1 KB, times 4, and the largest."""
    sizes: list[float] = []
    size = LEAST_BYTES
    while size < max_bytes and len(sizes) < 16:
        sizes.append(size)
        size *= GROWTH
    return [*sizes, max_bytes] if max_bytes > LEAST_BYTES else [max_bytes]


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
    """Time a collective over sizes; all ranks of all such groups at once; collective.

    Sizes grow until the next would take longer than half a second.

    Args:
        kind: one of ``hotrec.cost_model.COLLECTIVES``.
        world: that the group is.
        group: this rank's; None for all ranks.
        max_bytes: the most that a rank sends.
        advance: called for each size, also those left out.
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
        is_over = len(sizes) >= LEAST_SIZES and timing.seconds * GROWTH > MOST_CALL_S
    return CollectiveCurve(kind, world, tuple(sizes), tuple(seconds), tuple(spreads))


def link_of(curves: Sequence[CollectiveCurve], ranks_sending: int = 1) -> Link:
    """Latency and rate that curves show.

    Medians over the curves. Where a curve's fit shows no growth with the bytes (all its sizes
    small), the rate is that of its largest size, latency included, which no link is slower than.

    Args:
        ranks_sending: ranks that share the link; its rate is what they send together.

    Raises:
        CostsError: if there are no curves.
    """
    if not curves:
        raise CostsError("link: expected at least one measured collective, got none.")
    lines = [curve.line() for curve in curves]
    rates = [
        1 / line.per_byte_s if line.per_byte_s > 0 else curve.sent_bytes[-1] / curve.seconds[-1]
        for line, curve in zip(lines, curves, strict=True)
    ]
    latency_s = float(np.median([line.fixed_s for line in lines]))
    return Link(latency_s, float(np.median(rates)) * ranks_sending)


@dataclass(frozen=True)
class Network:
    """What was measured between the ranks.

    Args:
        curves: of all ranks, and with several hosts of the ranks of one host.
        intra: inside a host; None with one rank per host.
        inter: between hosts; None with one host.
    """

    curves: tuple[CollectiveCurve, ...]
    intra: Link | None
    inter: Link | None


def num_network_points(ranks: Ranks, max_bytes: float) -> int:
    """How often ``measure_network`` calls ``advance``."""
    if ranks.world_size == 1:
        return 0
    num_levels = 2 if ranks.num_hosts > 1 and ranks.local_world_size > 1 else 0
    num_curves = len(COLLECTIVES) + num_levels * len(LINK_KINDS)
    return num_curves * len(sizes_up_to(max_bytes))


def measure_network(
    ranks: Ranks, *, max_bytes: float, effort: Effort, advance: Callable[[], object]
) -> Network:
    """Curves of all ranks, and with several hosts and ranks on each also inside and between.

    Inside: each host's ranks are a group. Between: the ranks of equal local rank are a group, and
    all these groups are at work at once, so that together they send what a whole host can.

    Collective.
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
    """Make all the groups, as every rank must, and return the one that holds this rank."""
    groups: Mapping[int, Any] = {
        member: group
        for ranks_of_group in members
        for group in [new_group(ranks_of_group)]
        for member in ranks_of_group
    }
    own: dist.ProcessGroup = groups[rank]
    return own


def measure_overlap(ranks: Ranks, *, max_bytes: float, effort: Effort) -> float:
    """Share of a computation that hides communication going on meanwhile, 0..1; collective.

    An all_to_all and a matrix product of about the same length: t_both = t_wire + t_compute -
    overlap * min(t_wire, t_compute). Below 1 where sending takes processor time that the
    computation needs. 1 for one rank, which sends nothing.
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
