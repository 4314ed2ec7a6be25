"""Work of others on the hosts while this program measures times."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hotrec.runtime.ranks import Ranks, all_gather_object

STAT = Path("/proc/stat")
# Work of others that takes less than this share of the cores is always there: daemons, the shell.
MAX_OTHERS_FRAC = 0.1


@dataclass(frozen=True)
class CpuTimes:
    """Processor time of a host so far.

    Args:
        wall_s: Time of the reading.
        own_s: Processor time of this process, and of its children, such as loader workers.
        busy_s: Time in which each core ran any process, by core, without interrupts.
        stolen_s: Time in which the hypervisor ran another machine, by core.
    """

    wall_s: float
    own_s: float
    busy_s: Mapping[int, float]
    stolen_s: Mapping[int, float]


def read_cpu_times(stat: Path = STAT) -> CpuTimes | None:
    """Read the cores that this process may use; None if unavailable (proc(5))."""
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
    own_s = time.process_time() + tick_s * _ticks_of_children()
    return CpuTimes(time.perf_counter(), own_s, busy_s, stolen_s)


def _ticks_of_children() -> int:
    """Processor time so far of the processes that this one started and that still run (proc(5))."""
    ticks = 0
    for children in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # a thread or a child may exit meanwhile
            for pid in children.read_text().split():
                # After the name, which may contain spaces: fields 14 and 15 of the line.
                _, _, fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
                user, system = fields.split()[11:13]
                ticks += int(user) + int(system)
    return ticks


@dataclass(frozen=True)
class HostLoad:
    """Mean number of a host's cores used by other processes and the hypervisor."""

    num_cores: int
    num_wanted: float  # cores that the ranks of this host can use
    others: float
    stolen: float

    @property
    def taken(self) -> float:
        """Mean number of cores used by others."""
        return self.others + self.stolen

    @property
    def is_disturbed(self) -> bool:
        """Whether that exceeds the cores that the ranks leave idle."""
        free = max(0.0, self.num_cores - self.num_wanted)
        return self.taken > free + MAX_OTHERS_FRAC * self.num_cores


class LoadMeter:
    """Measures the load from its creation on."""

    def __init__(self, stat: Path = STAT) -> None:
        self._stat = stat
        self._first = read_cpu_times(stat)

    def hosts(self, ranks: Ranks) -> list[HostLoad]:
        """The load of each host so far; empty if unavailable on a host; collective."""
        own = (self._first, read_cpu_times(self._stat))
        readings = all_gather_object((own, torch.get_num_threads()))
        local = ranks.local_world_size
        hosts = [readings[at : at + local] for at in range(0, len(readings), local)]
        return [found for host in hosts if (found := _load_of(host)) is not None]


def _load_of(readings: Sequence[tuple[Any, int]]) -> HostLoad | None:
    """The load of a host from the readings of its ranks."""
    pairs = [(first, last) for (first, last), _ in readings if first and last]
    if len(pairs) < len(readings):
        return None
    busy: dict[int, float] = {}
    stolen: dict[int, float] = {}
    for first, last in pairs:
        wall_s = last.wall_s - first.wall_s
        # Ranks that are bound to different cores each see their own.
        busy |= {core: (s - first.busy_s[core]) / wall_s for core, s in last.busy_s.items()}
        stolen |= {core: (s - first.stolen_s[core]) / wall_s for core, s in last.stolen_s.items()}
    own = sum((last.own_s - first.own_s) / (last.wall_s - first.wall_s) for first, last in pairs)
    return HostLoad(
        num_cores=len(busy),
        num_wanted=float(sum(num_threads for _, num_threads in readings)),
        others=max(0.0, sum(busy.values()) - own),
        stolen=sum(stolen.values()),
    )


def worst_of(hosts: Sequence[HostLoad]) -> HostLoad | None:
    """The host with the largest foreign load; None if unavailable."""
    return max(hosts, key=lambda host: host.taken / host.num_cores, default=None)


def disturbance(hosts: Sequence[HostLoad]) -> str | None:
    """Such as ``with other load (1.3 of 2 cores busy)``; None if the hosts were quiet enough."""
    worst = worst_of([host for host in hosts if host.is_disturbed])
    if worst is None:
        return None
    return f"with other load ({worst.taken:.1f} of {worst.num_cores} cores busy)"
