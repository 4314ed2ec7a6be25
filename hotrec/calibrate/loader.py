"""Processor time that a loader worker needs for a batch, on the dataset that will train."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import cycle
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import torch

from hotrec.calibrate.timing import Point, fit_line, median_and_spread
from hotrec.calibrate.workload import CalibrationWorkload
from hotrec.cost_model.costs import Line
from hotrec.data.chunks import Dataset
from hotrec.data.loader import make_loader
from hotrec.data.packing import pack
from hotrec.runtime.ranks import Ranks, all_gather_object, barrier

SPLIT = "train"
# Untimed batches, which load files into memory and start the worker, and timed ones.
NUM_WARM, NUM_BATCHES = 4, 6
# Read between batches, so that they are not in the caches; a core's own are a few MB.
EVICTING_BYTES = 64 << 20
# Batches of a worker: its time is known to 10 ms (proc(5)), so fewer batches suffice if they are
# slow.
MIN_HANDED_OVER, MAX_HANDED_OVER, HANDED_OVER_S = 10, 60, 0.5
# The smaller batch shows the cost of a batch that does not depend on its size.
BATCH_PARTS = (4, 1)


def measure_loader(dataset: Path, workload: CalibrationWorkload) -> dict[str, Line]:
    """Measure ``Costs.loader`` on all ranks at once; collective.

    The training loader itself makes the batches, in this process and in a worker, which needs as
    much time again to transfer them. Only processor time counts, not that of the disk.
    """
    target, ranks = workload.target, workload.ranks
    num_samples = Dataset.open(dataset).num_samples(SPLIT) // ranks.world_size
    largest = min(target.batch_size, num_samples)
    sizes = sorted({max(1, largest // part) for part in BATCH_PARTS})
    if num_samples == 0 or len(sizes) < len(BATCH_PARTS):
        return {}
    read = [_read(dataset, size, ranks, target.seed) for size in sizes]
    handed = [_hand_over(dataset, point, ranks, target.seed) for point in read]
    receive, work = zip(*handed, strict=True)
    features = workload.features(workload.samples, workload.num_ids)
    router = workload.router_on_cpu
    turns = cycle(of_rank.to("cpu") for of_rank in features)
    # The result of routing is transferred too, besides the ids of the batches above.
    route = _point(features[0].values().numel(), lambda: pack(router(next(turns))))
    return {
        "read": fit_line(read, is_by_bytes=False, is_growing=True),
        "work": fit_line(work, is_by_bytes=False, is_growing=True),
        "receive": fit_line(receive, is_by_bytes=False),
        "route": Line(0.0, route.seconds / route.num_items, 0.0, route.spread),
    }


def _make(dataset: Path, batch_size: int, ranks: Ranks, seed: int, num_workers: int) -> Any:
    return make_loader(
        dataset,
        SPLIT,
        batch_size=batch_size,
        rank=ranks.rank,
        world_size=ranks.world_size,
        seed=seed,
        num_workers=num_workers,
    )


def _read(dataset: Path, batch_size: int, ranks: Ranks, seed: int) -> Point:
    batches = iter(_make(dataset, batch_size, ranks, seed, num_workers=0))
    return _point(batch_size, lambda: next(batches))


def _hand_over(dataset: Path, read: Point, ranks: Ranks, seed: int) -> tuple[Point, Point]:
    """Processor time of this process and of its worker for batches as read, of the slowest rank."""
    batch_size = round(read.num_items)
    num_batches = int(HANDED_OVER_S / max(read.seconds, 1e-6))
    num_batches = max(MIN_HANDED_OVER, min(MAX_HANDED_OVER, num_batches))
    others = {process.pid for process in active_children()}
    batches = iter(_make(dataset, batch_size, ranks, seed, num_workers=1))
    for _ in range(NUM_WARM):
        next(batches)
    [worker] = [process for process in active_children() if process.pid not in others]
    barrier()
    start_s = (time.process_time(), cpu_seconds(worker.pid))
    for _ in range(num_batches):
        next(batches)
    end_s = (time.process_time(), cpu_seconds(worker.pid))
    # The worker is as many batches ahead at the end as at the start.
    own = [(end - start) / num_batches for start, end in zip(start_s, end_s, strict=True)]
    receive_s, work_s = map(max, zip(*all_gather_object(own), strict=True))
    tick_s = 1 / os.sysconf("SC_CLK_TCK") / num_batches
    return (
        Point(batch_size, 0.0, max(receive_s, tick_s), 0.0),
        Point(batch_size, 0.0, max(work_s, tick_s), 0.0),
    )


def cpu_seconds(pid: int | None) -> float:
    """Processor seconds of all threads of a process so far, in ticks of 10 ms (proc(5), stat)."""
    # The name, in brackets, may hold spaces.
    values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    user, system = values[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _point(num_items: float, run: Callable[[], Any]) -> Point:
    """Median processor time of a call on the slowest rank, with all ranks at work; collective.

    Before each call the caches are filled with other data, as a training step fills them.
    """
    times, other = [], torch.zeros(EVICTING_BYTES, dtype=torch.uint8)
    barrier()
    for _ in range(NUM_WARM + NUM_BATCHES):
        other.add_(1)
        start_s = time.process_time()
        run()
        times.append(time.process_time() - start_s)
    timings = [median_and_spread(of_rank) for of_rank in all_gather_object(times[NUM_WARM:])]
    slowest = max(timings, key=lambda timing: timing.seconds)
    return Point(num_items, 0.0, slowest.seconds, slowest.spread)
