"""Collectives over sizes: a curve for each, and the links inside and between hosts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hotrec.calibrate.timing import (
    MIN_REPEATS,
    REPEATS_A_ROUND,
    SLOW_CALL_S,
    Series,
    slowest_rank,
    time_on_all_ranks,
)
from hotrec.cost_model.costs import COLLECTIVES, CollectiveCurve, Link, World
from hotrec.runtime.ranks import Group, Ranks

BYTES_PER_FLOAT = 4
MIN_BYTES = 1024.0
GROWTH = 4
# On a slow network, sizes that would take longer are omitted: the line is known by then.
MAX_CALL_S = 0.5
# Shaped links send a burst at full speed after a pause, but training never pauses. So this many
# bytes are sent before a size is timed, in at most this many calls.
BURST_BYTES, MAX_WARM = 512e3, 32
# Calls of a size in two rounds with warm-up, times a factor for the smaller sizes.
CALLS_OF_LARGEST = 8
MIN_SIZES = 3
# The kinds that links are fitted from: the row exchange, and the ring of the other collectives.
LINK_KINDS = ("all_to_all", "all_reduce")


def bytes_per_value(kind: str, num_ranks: int) -> float:
    """Bytes that each of W ranks sends for a float of its tensor (``hotrec.runtime.traffic``).

    For ``all_gather`` the tensor is the rank's own part, else the message to all ranks, including
    itself, or the whole input.
    """
    others = num_ranks - 1
    values = {
        "all_to_all": others / num_ranks,
        "all_reduce": 2 * others / num_ranks,
        "all_gather": float(others),
    }
    return BYTES_PER_FLOAT * values[kind]


def num_values(kind: str, sent_bytes: float, num_ranks: int) -> int:
    """Floats of the tensor for which a rank sends about ``sent_bytes``; rounded to whole shares."""
    share = 1 if kind == "all_gather" else num_ranks
    return share * max(1, round(sent_bytes / bytes_per_value(kind, num_ranks) / share))


def make_call(
    kind: str, values: int, group: dist.ProcessGroup | None, device: torch.device
) -> Callable[[Any], object]:
    """One collective on a tensor of ``values`` floats in a group, ready to be timed."""
    num_ranks = dist.get_world_size(group)
    # Ones would grow by W with each all_reduce, to infinity.
    source = torch.zeros(values, device=device)
    match kind:
        case "all_to_all":
            target = torch.empty_like(source)
            return lambda _: dist.all_to_all_single(target, source, group=group)
        case "all_reduce":
            return lambda _: dist.all_reduce(source, group=group)
        case _:
            target = source.new_empty(values * num_ranks)
            return lambda _: dist.all_gather_into_tensor(target, source, group=group)


def sizes_up_to(max_bytes: float) -> list[float]:
    """Message sizes to measure, in bytes: from 1 KB in factors of 4, and the largest."""
    sizes = [MIN_BYTES * GROWTH**power for power in range(16)]
    return [*(size for size in sizes if size < max_bytes), max_bytes]


@dataclass
class CurveSeries:
    """A collective that is measured over sizes, in rounds."""

    kind: str
    world: World
    num_rails: int = 1
    sent_bytes: list[float] = field(default_factory=list)
    series: list[Series] = field(default_factory=list)

    @property
    def curve(self) -> CollectiveCurve:
        results = [one.result for one in self.series]
        return CollectiveCurve(
            self.kind,
            self.world,
            tuple(self.sent_bytes),
            tuple(result.seconds for result in results),
            tuple(result.spread for result in results),
            self.num_rails,
        )


def start_curve(
    kind: str,
    world: World,
    group: dist.ProcessGroup | None,
    device: torch.device,
    *,
    num_rails: int,
    max_bytes: float,
    max_call_s: float,
) -> CurveSeries:
    """Time a collective over sizes for the first time, on all groups at once; collective.

    Sizes grow to ``max_bytes`` a rank, or until the next would take longer than ``max_call_s``.
    """
    found = CurveSeries(kind, world, num_rails)
    for wanted in sizes_up_to(max_bytes):
        values = num_values(kind, wanted, world.num_ranks)
        size = values * bytes_per_value(kind, world.num_ranks)
        if found.sent_bytes and size <= found.sent_bytes[-1]:
            continue

        def measure(
            num_warm: int, num_repeats: int, values: int = values, size: float = size
        ) -> list[list[float]]:
            call = make_call(kind, values, group, device)
            num_burst = min(MAX_WARM, math.ceil(BURST_BYTES / size))
            return time_on_all_ranks(call, device, max(num_warm, num_burst), num_repeats)

        one = Series(slowest_rank, measure=measure)
        one.run_round()
        found.sent_bytes.append(size)
        found.series.append(one)
        # The same figures on all ranks, so all stop at the same size.
        if len(found.series) >= MIN_SIZES and one.result.seconds * GROWTH > max_call_s:
            break
    return found


def link_of(curves: Sequence[CollectiveCurve], ranks_sending: int = 1) -> Link:
    """Median latency and rate of curves; ``ranks_sending`` share the link, its rate is their sum.

    The rate is that of the largest messages, since smaller ones may pass a shaped link in a burst.
    If the time does not grow with the bytes (all sizes small), it includes the latency: a lower
    bound.
    """
    latencies_s = [curve.line().fixed_s for curve in curves]
    rates = []
    for latency_s, curve in zip(latencies_s, curves, strict=True):
        seconds = curve.seconds[-1]
        travels_s = seconds - latency_s if seconds > latency_s else seconds
        rates.append(curve.sent_bytes[-1] / travels_s)
    return Link(float(np.median(latencies_s)), float(np.median(rates)) * ranks_sending)


@dataclass(frozen=True)
class Network:
    """Measurements between the ranks, all of them and, with several hosts, those of one host.

    Args:
        world: Ranks and hosts.
        among_all: Collectives of all ranks.
        in_host: Those of the ranks of a host, with several ranks on several hosts.
        among_hosts: Those of ranks of different hosts, in the same case.
        groups: The process groups of ``in_host`` and ``among_hosts``.
    """

    world: World
    among_all: Sequence[CurveSeries] = ()
    in_host: Sequence[CurveSeries] = ()
    among_hosts: Sequence[CurveSeries] = ()
    groups: Sequence[Group] = ()

    def close(self) -> None:
        """Close the groups after the last measurement."""
        for group in self.groups:
            group.close()

    @property
    def series(self) -> list[Series]:
        of_all = (*self.among_all, *self.in_host, *self.among_hosts)
        return [one for curve in of_all for one in curve.series]

    @property
    def curves(self) -> tuple[CollectiveCurve, ...]:
        """The collectives that represent the links in a world like the measured one."""
        of_all = (*self.among_all, *self.in_host, *self.among_hosts)
        return tuple(found.curve for found in of_all)

    @property
    def largest_bytes(self) -> float:
        """Largest message of which every collective of all ranks has a measurement."""
        return min((found.sent_bytes[-1] for found in self.among_all), default=0.0)

    def links(self) -> tuple[Link | None, Link | None]:
        """Inside a host, None with one rank per host, and between hosts, None with one host."""
        if not self.among_all:
            return None, None
        if self.in_host:
            in_host, among = ([c.curve for c in cs] for cs in (self.in_host, self.among_hosts))
            return link_of(in_host), link_of(among, self.world.ranks_per_host)
        link = link_of([found.curve for found in self.among_all if found.kind in LINK_KINDS])
        return (link, None) if self.world.num_hosts == 1 else (None, link)


def start_network(world: World, device: torch.device, *, max_bytes: float, max_s: float) -> Network:
    """Measure all ranks together and, with several on several hosts, each level once; collective.

    Inside a host its ranks form a group. Between hosts the ranks of equal local rank form a group,
    and all these groups send at the same time, so that together they saturate the host's link.

    Args:
        world: Ranks of the process group, and their hosts.
        device: Device of this rank.
        max_bytes: Maximum number of bytes that a rank sends in one message.
        max_s: Maximum seconds of two rounds; on a slow network messages are smaller.
    """
    if world.num_ranks == 1:
        return Network(world)
    local, hosts = world.ranks_per_host, range(world.num_hosts)
    num_curves = len(COLLECTIVES) + (2 * len(LINK_KINDS) if world.has_levels else 0)
    max_call_s = min(MAX_CALL_S, max_s / num_curves / CALLS_OF_LARGEST)

    def start(
        kinds: Sequence[str], of: World, group: dist.ProcessGroup | None, num_rails: int = 1
    ) -> list[CurveSeries]:
        return [
            start_curve(
                *(kind, of, group, device),
                num_rails=num_rails,
                max_bytes=max_bytes,
                max_call_s=max_call_s,
            )
            for kind in kinds
        ]

    among_all = start(COLLECTIVES, world, None)
    if not world.has_levels:
        return Network(world, among_all)
    inside = Group("in a host", [[h * local + i for i in range(local)] for h in hosts])
    between = Group("between hosts", [[h * local + i for h in hosts] for i in range(local)])
    in_host = start(LINK_KINDS, World(local, local), inside.group)
    among_hosts = start(LINK_KINDS, World(len(hosts), 1), between.group, local)
    return Network(world, among_all, in_host, among_hosts, (inside, between))


def measure_overlap(ranks: Ranks, *, max_bytes: float) -> float:
    """Fraction of a transfer that a concurrent computation hides, 0..1; collective.

    From an all_to_all and a matrix product of about the same length: t_both = t_wire + t_compute -
    overlap * min(t_wire, t_compute). Below 1 if sending needs processor time; 1 with one rank.
    """
    if ranks.world_size == 1:
        return 1.0
    values = num_values("all_to_all", min(max_bytes, 1 << 20), ranks.world_size)
    source = torch.ones(values, device=ranks.device)
    target = torch.empty_like(source)
    matrix = torch.ones(256, 256, device=ranks.device)

    def seconds(times: int, *, sends: bool, num_repeats: int = 1) -> float:
        def run(_: Any) -> None:
            work: Any = sends and dist.all_to_all_single(target, source, async_op=True)
            for _ in range(times):
                torch.mm(matrix, matrix)
            if work:
                work.wait()

        return slowest_rank(time_on_all_ranks(run, ranks.device, 1, num_repeats)).seconds

    wire_s = seconds(0, sends=True, num_repeats=REPEATS_A_ROUND)
    times = max(1, round(wire_s / seconds(1, sends=False, num_repeats=REPEATS_A_ROUND)))
    # Interleaved, since a shaped link may be faster or slower for a while.
    turns = [
        (seconds(0, sends=True), seconds(times, sends=False), seconds(times, sends=True))
        for _ in range(REPEATS_A_ROUND if wire_s < SLOW_CALL_S else MIN_REPEATS)
    ]
    hidden = [(wire + compute - both) / min(wire, compute) for wire, compute, both in turns]
    return float(np.clip(np.median(hidden), 0.0, 1.0))
