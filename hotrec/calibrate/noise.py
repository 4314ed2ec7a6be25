"""Work of others on the hosts while calibration measures, and whether it can be trusted."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hotrec.calibrate.timing import MAX_ERROR, Repeats
from hotrec.runtime.ranks import Ranks, all_gather_object

STAT = Path("/proc/stat")
# Work of others that takes less than this share of the cores is always there: daemons, the shell.
MAX_OTHERS_FRAC = 0.1
# Medians of two quiet rounds differ by a few percent.
MAX_DRIFT = 0.15


@dataclass(frozen=True)
class CpuTimes:
    """Processor time of a host so far.

    Args:
        wall_s: Time of the reading.
        own_s: Processor time of this process.
        busy_s: Time in which each core ran any process, by core, without interrupts.
        stolen_s: Time in which the hypervisor ran another machine, by core.
    """

    wall_s: float
    own_s: float
    busy_s: Mapping[int, float]
    stolen_s: Mapping[int, float]


def read_cpu_times(stat: Path = STAT) -> CpuTimes | None:
    """Read the cores that this process may use; None where the system does not say (proc(5))."""
    if not stat.exists():
        return None
    tick_s, cores = 1 / os.sysconf("SC_CLK_TCK"), os.sched_getaffinity(0)
    busy_s, stolen_s = {}, {}
    for line in stat.read_text().splitlines():
        name, *values = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cores:
            user, nice, system, _, _, _, _, stolen = (int(value) for value in values[:8])
            busy_s[int(name[3:])] = (user + nice + system) * tick_s
            stolen_s[int(name[3:])] = stolen * tick_s
    own_s = time.process_time()
    return CpuTimes(time.perf_counter(), own_s, busy_s, stolen_s)


@dataclass(frozen=True)
class HostLoad:
    """Mean number of a host's cores that others and the hypervisor took."""

    num_cores: int
    num_wanted: float  # cores that the ranks of this host can use
    others: float
    stolen: float

    @property
    def is_disturbed(self) -> bool:
        """Whether that was more than the cores which the ranks leave idle."""
        free = max(0.0, self.num_cores - self.num_wanted)
        return self.others + self.stolen > free + MAX_OTHERS_FRAC * self.num_cores


class LoadMeter:
    """Measures the load from its creation on."""

    def __init__(self, stat: Path = STAT) -> None:
        self._stat = stat
        self._first = read_cpu_times(stat)

    def hosts(self, ranks: Ranks) -> list[HostLoad]:
        """The load of each host so far; empty where one does not say; collective."""
        own = (self._first, read_cpu_times(self._stat))
        readings = all_gather_object((own, torch.get_num_threads()))
        local = ranks.local_world_size
        hosts = [readings[at : at + local] for at in range(0, len(readings), local)]
        return [found for host in hosts if (found := _load_of(host)) is not None]


def _load_of(readings: Sequence[tuple[Any, int]]) -> HostLoad | None:
    """The load of a host from what its ranks read."""
    pairs = [(first, last) for (first, last), _ in readings if first and last]
    if len(pairs) < len(readings):
        return None
    busy: dict[int, float] = {}
    stolen: dict[int, float] = {}
    for first, last in pairs:
        wall_s = last.wall_s - first.wall_s
        # Ranks that are bound to different cores see each their own.
        busy |= {core: (s - first.busy_s[core]) / wall_s for core, s in last.busy_s.items()}
        stolen |= {core: (s - first.stolen_s[core]) / wall_s for core, s in last.stolen_s.items()}
    own = sum((last.own_s - first.own_s) / (last.wall_s - first.wall_s) for first, last in pairs)
    return HostLoad(
        num_cores=len(busy),
        num_wanted=float(sum(num_threads for _, num_threads in readings)),
        others=max(0.0, sum(busy.values()) - own),
        stolen=sum(stolen.values()),
    )


def doubts_of(hosts: Sequence[HostLoad], series: Sequence[Repeats]) -> list[str]:
    """Why measurements are not to be trusted, each after the words "the costs"."""
    doubts = []
    if disturbed := [host for host in hosts if host.is_disturbed]:
        worst = max(disturbed, key=lambda host: (host.others + host.stolen) / host.num_cores)
        taken = worst.others + worst.stolen
        doubts.append(
            f"were measured beside other work ({taken:.1f} of {worst.num_cores} cores busy)"
        )
    drift = median_drift(series)
    if drift > MAX_DRIFT:
        doubts.append(f"differ by {drift:.0%} from round to round")
    return doubts


def noise_text(hosts: Sequence[HostLoad], series: Sequence[Repeats]) -> str:
    """How quiet the hosts were, and how well the calls are known, in one sentence."""
    errors = np.array([one.error for one in series])
    load = "load of others unknown"
    if hosts:
        worst = max(hosts, key=lambda host: (host.others + host.stolen) / host.num_cores)
        load = f"others took {worst.others + worst.stolen:.1f} of {worst.num_cores} cores"
    return (
        f"noise: {load}; standard error {np.median(errors):.1%} in the median, above "
        f"{MAX_ERROR:.0%} in {np.count_nonzero(errors > MAX_ERROR)} of {errors.size} calls"
    )


def median_drift(series: Sequence[Repeats]) -> float:
    """Median drift of those that were measured in two rounds or more."""
    drifts = [one.drift for one in series if len(one.rounds) > 1]
    return float(np.median(drifts)) if drifts else 0.0
