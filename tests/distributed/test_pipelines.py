"""Pipelines leave no thread and no process group, whether they are closed or a rank fails."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from hotrec.data.batch import Batch
from hotrec.embedding.cached_rows import RowMover
from hotrec.embedding.optimizers import HotOptimizer
from hotrec.runtime.ranks import Ranks
from tests.exact.case import Case
from tests.exact.training import Training
from tests.helpers.ranks import run_ranks

CASE = Case(
    hosts="00", seed=8, partition="half", optimizer="adagrad", pipeline="look_ahead",
    steps=6,
)  # fmt: skip


def batches_of(training: Training) -> Iterator[Batch]:
    return (training.batch(step) for step in range(training.case.steps))


def count_threads_and_groups() -> tuple[int, int]:
    """Counted until it stays: a thread that was joined is listed for a moment longer."""
    gc.collect()
    counts = [-1] * 5
    while counts[0] < 0 or len(set(counts)) > 1:
        time.sleep(0.02)
        counts = [*counts[1:], len(os.listdir("/proc/self/task"))]
    return counts[-1], len(dist.distributed_c10d._world.pg_map)


def close_with_batches_in_flight() -> None:
    """Also of pipelines that live at the same time."""
    before = count_threads_and_groups()
    for kinds in (("look_ahead",), ("sparse_dist",), ("look_ahead", "sparse_dist", "look_ahead")):
        held = [Training(replace(CASE, pipeline=kind)) for kind in kinds]
        for training in held:
            batches = batches_of(training)
            for _ in range(2):
                training.pipeline().progress(batches)
        # Rows in line are exchanged by the calling thread, in the groups that are there.
        assert count_threads_and_groups() > before or kinds == ("sparse_dist",)
        for training in held:
            training.pipeline().close()
            training.pipeline().close()
            assert training.optimizer.state_dict()["state"]  # waits for no thread that has ended
        del training, held, batches
        assert count_threads_and_groups() == before, kinds


def test_closed_pipelines_leave_nothing() -> None:
    run_ranks(close_with_batches_in_flight, 2)


def fail(*_: Any) -> None:
    raise KeyError("this rank fails")


def fail_at(point: str | None) -> None:
    """Train; at a point of the second step this rank fails."""
    with Training(CASE) as training:
        batches, pipeline = batches_of(training), training.pipeline()
        pipeline.progress(batches)
        if point == "forward":
            training.model.module.model.layers["out"].register_forward_pre_hook(fail)
        elif point == "update":  # the gradients of the dense layers are on their way
            mock.patch.object(HotOptimizer, "step", fail).start()
        for _ in range(2):
            pipeline.progress(batches)


def fail_and_leave(points: dict[int, str]) -> None:
    threads, _ = count_threads_and_groups()
    with pytest.raises((KeyError, RuntimeError)):
        fail_at(points.get(dist.get_rank()))
    while count_threads_and_groups()[0] > threads:  # until the ranks' limit
        time.sleep(0.05)


@pytest.mark.parametrize("points", [{1: "forward"}, {0: "update", 1: "forward"}])
def test_ranks_leave_a_pipeline_that_failed(points: dict[int, str]) -> None:
    """The limit is that of a collective too: nobody waits for one that nobody joins."""
    run_ranks(fail_and_leave, 2, timeout_s=60, points=points)


@pytest.mark.parametrize(("window", "num_steps"), [(0, 1), (3, 2)])
def test_steps_are_computed_while_rows_of_later_ones_are_moved(
    one_rank: Ranks, monkeypatch: pytest.MonkeyPatch, window: int, num_steps: int
) -> None:
    """They return before the rows have arrived, which with a window are moved a step earlier."""
    gather = RowMover.gather
    is_fetching, may_fetch = threading.Event(), threading.Event()

    def gather_later(*given: Any) -> Any:
        is_fetching.set()
        assert may_fetch.wait(20)
        return gather(*given)

    case = replace(CASE, hosts="0", window=window, tier="cached", slots=1.0, steps=8)
    with Training(replace(case, partition="all_cold", batches="drift")) as training:
        pipeline, batches = training.pipeline(), batches_of(training)
        pipeline.progress(batches)
        pipeline.drain()
        monkeypatch.setattr(RowMover, "gather", gather_later)
        for _ in range(num_steps):
            pipeline.progress(batches)
        assert is_fetching.wait(20)
        may_fetch.set()
        pipeline.progress(batches)
        pipeline.drain()
