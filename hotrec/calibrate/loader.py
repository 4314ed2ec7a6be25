"""Processor time that a loader worker needs for a batch, on the dataset that will train."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

from hotrec.calibrate.kernels import Point, fit_line, median_and_spread
from hotrec.calibrate.workload import CalibrationWorkload
from hotrec.cost_model.costs import Line
from hotrec.data.chunks import Dataset
from hotrec.data.loader import make_loader
from hotrec.runtime.ranks import Ranks, all_gather_object, barrier

SPLIT = "train"
# Untimed batches, which bring files into memory, and timed ones.
NUM_WARM, NUM_BATCHES = 2, 6
# The smaller batch shows what a batch takes whatever its size.
BATCH_PARTS = (4, 1)


def measure_loader(dataset: Path, workload: CalibrationWorkload) -> dict[str, Line]:
    """What ``Costs.loader`` holds: reading on all ranks at once, and routing; collective.

    Reading is timed with the training loader itself, in this process: what a worker spends on
    handing a batch over is not in it. Time of the processor counts, not of the disk.
    """
    target, ranks = workload.target, workload.ranks
    num_samples = Dataset.open(dataset).num_samples(SPLIT) // ranks.world_size
    largest = min(target.batch_size, num_samples)
    sizes = sorted({max(1, largest // part) for part in BATCH_PARTS})
    read = [_read(dataset, size, ranks, target.seed) for size in sizes] if num_samples else []
    if len(read) < len(BATCH_PARTS):
        return {}
    features = workload.features(workload.samples, workload.num_ids)
    router = workload.router_on_cpu
    turns = cycle(of_rank.to("cpu") for of_rank in features)
    route = _point(features[0].values().numel(), lambda: router(next(turns)))
    return {
        "read": fit_line(read, is_by_bytes=False, is_growing=True),
        "route": Line(0.0, route.seconds / route.num_items, 0.0, route.spread),
    }


def _read(dataset: Path, batch_size: int, ranks: Ranks, seed: int) -> Point:
    loader = make_loader(
        dataset,
        SPLIT,
        batch_size=batch_size,
        rank=ranks.rank,
        world_size=ranks.world_size,
        seed=seed,
    )
    batches = iter(loader)
    return _point(batch_size, lambda: next(batches))


def _point(num_items: float, run: Callable[[], Any]) -> Point:
    """Median processor time of a call on the slowest rank, with all ranks at work; collective."""
    times = []
    barrier()
    for _ in range(NUM_WARM + NUM_BATCHES):
        start_s = time.process_time()
        run()
        times.append(time.process_time() - start_s)
    timings = [median_and_spread(of_rank) for of_rank in all_gather_object(times[NUM_WARM:])]
    slowest = max(timings, key=lambda timing: timing.seconds)
    return Point(num_items, 0.0, slowest.seconds, slowest.spread)
