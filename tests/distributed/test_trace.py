"""Two real ranks: traces of both pipelines, and what exposed communication is made of."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from hotrec.runtime import stages
from hotrec.runtime.ranks import Ranks
from hotrec.runtime.stages import EXPOSED_STAGES, StageClock, exposed_s, named_range
from hotrec.train.loop import train
from hotrec.train.pipelines import make_pipeline
from hotrec.train.run_log import SegmentBatches
from hotrec.train.schedule import Cadence, Schedule, Segment
from hotrec.train.trace import Tracer, TraceWindow
from hotrec.types import STAGES
from tests.distributed.test_stages import CASES, Clock, build, make_batches
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import TinyLoader, build_tiny
from tests.helpers.traces import read_events

CPU = torch.device("cpu")
KINDS = ("sparse_dist", "base")
TRACED = (("sparse_dist", "mixed"), ("base", "torchrec"))
NUM_STEPS, FIRST, NUM_TRACED = 6, 3, 2
WAIT_S = 1000.0


def ranks() -> Ranks:
    return Ranks(dist.get_rank(), dist.get_world_size(), dist.get_rank(), 2, CPU)


def segment_batches() -> SegmentBatches:
    segment = Segment(first_step=1, last_step=NUM_STEPS, evaluate=False, save=False)
    return SegmentBatches(make_batches(NUM_STEPS), segment)


def trace_pipeline(kind: str, case: str, directory: Path) -> None:
    """Trace two steps of a pipeline while another thread communicates in groups of its own."""
    group: Any = dist.new_group()
    stop = threading.Event()

    def communicate() -> None:
        values = torch.zeros(1)
        while values[0] == 0:
            values[0] = float(stop.is_set())
            with named_range("late gradients"):
                dist.all_reduce(values, group=group)

    model, optimizer = build(CASES[case])
    pipeline, batches = make_pipeline(kind, model, optimizer, CPU), segment_batches()
    thread = threading.Thread(target=communicate, name="hotrec communication")
    window = TraceWindow(FIRST, NUM_TRACED, directory)
    pipeline.start()
    thread.start()
    try:
        with Tracer(window, ranks(), start_step=0, num_steps=NUM_STEPS) as tracer:
            for step in batches.steps():
                with tracer.step(step):
                    pipeline.progress(batches)
                tracer.end_step(step)
    finally:
        stop.set()
        thread.join()


def train_traced(directory: Path) -> dict[str, Any]:
    """Run the loop; the profiler warms up in the first step and records all the others."""
    model, optimizer = build_tiny()
    result = train(
        model,
        optimizer,
        TinyLoader(num_batches=4),
        ranks(),
        num_steps=4,
        cadence=Cadence(warmup_steps=0),
        lr_factor=Schedule(),
        first_compared_step=0,
        trace=TraceWindow(2, 3, directory),
    )
    return dict(result.summary)


def wait_for_dense_gradients(kind: str) -> dict[str, list[float]]:
    """Seconds by stage of the steady steps, where DDP's buckets take time and nothing else does.

    The time passes when backward is over but for what it waits for: the engine calls what was
    queued in it in order, and a hook of the loss queues before DDP does.
    """
    time = Clock()
    model, optimizer = build(CASES["torchrec"])
    pipeline, batches = make_pipeline(kind, model, optimizer, CPU), segment_batches()
    is_over = threading.Event()
    threads: list[threading.Thread] = []

    def arrive(bucket: dist.GradBucket, future: Any) -> None:
        is_over.wait()
        time.now_s += WAIT_S
        future.set_result(bucket.buffer())

    # DDP reads annotations of hooks, and takes no text for them.
    def slow_hook(state, bucket):  # type: ignore[no-untyped-def]
        future: Any = torch.futures.Future()
        threads.append(threading.Thread(target=arrive, args=(bucket, future)))
        threads[-1].start()
        return future

    def queue_the_end(loss: torch.Tensor) -> None:
        loss.register_hook(
            lambda _: Variable._execution_engine.queue_callback(is_over.set)  # type: ignore[attr-defined]
        )

    dense = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
    dense[0].register_comm_hook(None, slow_hook)
    model.register_forward_hook(lambda _, __, output: queue_the_end(output[0]))
    clock = StageClock(CPU)
    pipeline.start()
    with mock.patch.object(stages, "time", time):
        for _ in batches.steps():
            is_over.clear()
            with clock.step():
                pipeline.progress(batches)
            for thread in threads:
                thread.join()
    seconds = clock.seconds()
    found = {name: values[2:4].tolist() for name, values in seconds.items()}
    return {**found, "exposed": exposed_s(seconds)[2:4].tolist()}


def run_all(directory: Path) -> dict[str, Any]:
    for kind, case in TRACED:
        trace_pipeline(kind, case, directory / f"{kind}-{case}")
    return {
        "summary": train_traced(directory / "train"),
        "waits": {kind: wait_for_dense_gradients(kind) for kind in KINDS},
    }


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def results(directory: Path) -> list[dict[str, Any]]:
    return run_ranks(run_all, 2, timeout_s=150, directory=directory)


@pytest.mark.parametrize(("kind", "case"), TRACED)
def test_traces_of_both_ranks(
    results: list[dict[str, Any]], directory: Path, kind: str, case: str
) -> None:
    folder = directory / f"{kind}-{case}"
    assert sorted(path.name for path in folder.iterdir()) == ["rank0.json.gz", "rank1.json.gz"]
    for rank in range(2):
        events = read_events(folder / f"rank{rank}.json.gz")
        assert events["step"] == [("main thread", "step 3"), ("main thread", "step 4")]
        # Forward and backward; what a placement does not do has no mark.
        wanted = set(STAGES) if case == "mixed" else set(STAGES) - {"route", "pool"}
        assert set(events["stage"]) == {("stages", stage) for stage in wanted}
        # The thread communicates all the time.
        assert set(events["range"]) == {("hotrec communication", "late gradients")}
        annotated = events["user_annotation"]
        assert any(thread == "main thread" for thread, _ in annotated)
        behind = {name for thread, name in annotated if thread != "main thread"}
        assert {"gloo:all_to_all", "gloo:all_reduce"} <= behind


def test_the_loop_traces_and_leaves_the_steps_out(
    results: list[dict[str, Any]], directory: Path
) -> None:
    for rank, result in enumerate(results):
        events = read_events(directory / "train" / f"rank{rank}.json.gz")
        assert [name for _, name in events["step"]] == [f"step {step}" for step in range(2, 5)]
        for name in ("step_p50_s", "samples_per_s", "measured_step_s", "exposed_communication_s"):
            assert result["summary"][name] is None, name
        assert result["summary"]["num_steps"] == 4


@pytest.mark.parametrize("kind", KINDS)
def test_waiting_for_dense_gradients_is_exposed(results: list[dict[str, Any]], kind: str) -> None:
    for result in results:
        seconds = result["waits"][kind]
        (first, second) = seconds["exposed"]
        assert first == second > 0
        assert first % WAIT_S == 0
        waited = {name for name in STAGES if any(seconds[name])}
        assert waited == {"hot_exchange"} <= set(EXPOSED_STAGES)
