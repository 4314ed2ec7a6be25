"""Two real ranks: the stages of steps in every placement, slow ranks, and traces."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from hotrec.assemble.constraints import hot_cold_constraints, torchrec_constraints
from hotrec.data.batch import Batch
from hotrec.embedding import sharding
from hotrec.embedding.collection import HotColdEmbeddingBagCollection
from hotrec.embedding.fused import fused_params
from hotrec.embedding.optimizers import make_optimizer
from hotrec.embedding.sharding import HotColdSharder
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.models.task import ClickTask
from hotrec.runtime import stages
from hotrec.runtime.stages import EXPOSED_STAGES, StageClock, exposed_s, named_range
from hotrec.train.pipelines import make_pipeline
from hotrec.train.schedule import Schedule, Segment
from hotrec.train.segment import SegmentBatches
from hotrec.train.trace import Tracer, TraceWindow
from hotrec.types import (
    STAGES,
    HotExchange,
    ModelKind,
    OptimizerKind,
    Partition,
    PipelineKind,
    PipelineSpec,
    TorchrecPlan,
)
from tests.distributed.setups import shard_task, this_rank, zoo_batch, zoo_model, zoo_tables
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import TinyLoader, build_tiny
from tests.helpers.traces import read_events
from tests.helpers.training import Cadence, train_model

CPU = torch.device("cpu")
LOADING_S = 0.02
NUM_ROWS = {"a": 200, "b": 12, "c": 90}
BATCH = 8
NUM_STEPS, STEADY = 7, slice(3, 5)  # DDP makes its buckets in the third step
HOT_ROWS = {"a": np.array([3, 1, 0]), "b": np.array([0, 2])}
CASES: dict[str, Any] = {
    "mixed": Partition(NUM_ROWS, HOT_ROWS),
    "all_cold": Partition(NUM_ROWS),
    "all_hot": Partition(NUM_ROWS, {t: np.arange(n) for t, n in NUM_ROWS.items()}),
    "torchrec": TorchrecPlan.hand_tuned,
}


class Clock:
    """Time for ``hotrec.runtime.stages``, moved on by what is said to take some."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


def build(placement: Partition | TorchrecPlan) -> tuple[Any, Any]:
    spec = OptimizerSpec(OptimizerKind.rowwise_adagrad, learning_rate=0.1)
    tables = zoo_tables(NUM_ROWS)
    embeddings: nn.Module
    constraints: Any
    if isinstance(placement, Partition):
        embeddings = HotColdEmbeddingBagCollection(tables, placement, device=torch.device("meta"))
        sharder: Any = HotColdSharder(spec, HotExchange.touched_rows)
        constraints = hot_cold_constraints(tables, placement)
    else:
        embeddings = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        sharder = EmbeddingBagCollectionSharder(fused_params(spec))
        constraints = torchrec_constraints(tables, placement, batch_size=20)
    model = zoo_model(ModelKind.dlrm, embeddings)
    sharded = shard_task(ClickTask(model, dist.get_world_size()), sharder, constraints, seed=1)
    dense = OptimizerSpec(OptimizerKind.sgd, learning_rate=0.1)
    return sharded, make_optimizer(sharded, spec, dense)


def make_batches(num: int) -> Iterator[Batch]:
    rank, size = dist.get_rank(), dist.get_world_size()
    return (zoo_batch(NUM_ROWS, step, rank, BATCH, BATCH * size) for step in range(num))


def measure(model: Any, optimizer: Any, kind: str, source: Iterator[Batch]) -> dict[str, Any]:
    """Seconds by stage of the steady steps, one number where all of them agree."""
    pipeline = make_pipeline(PipelineSpec(PipelineKind[kind]), model, optimizer, CPU)
    batches = SegmentBatches(source, Segment(first_step=1, last_step=NUM_STEPS, is_last=True))
    pipeline.start()
    stage_clock = StageClock(CPU)
    for _ in batches.steps():
        with stage_clock.step():
            pipeline.progress(batches)
    return {stage: seconds[STEADY] for stage, seconds in stage_clock.seconds().items()}


def book_stages() -> dict[str, set[str]]:
    """The stages in which time was spent, by case."""
    booked = {}
    for name, placement in CASES.items():
        for kind in ("sparse_dist", "base"):
            seconds = measure(*build(placement), kind, make_batches(NUM_STEPS))
            booked[f"{name} {kind}"] = {stage for stage, of in seconds.items() if any(of)}
    return booked


def wait_for_slow_peer() -> str:
    """Rank 1 is slow in routing; the stage in which this rank spends the most time."""
    model, optimizer = build(CASES["mixed"])
    route = sharding.route

    def slow(*args: Any) -> Any:
        time.sleep(0.2)
        return route(*args)

    with mock.patch.object(sharding, "route", slow if dist.get_rank() == 1 else route):
        seconds = measure(model, optimizer, "sparse_dist", make_batches(NUM_STEPS))
    return max(seconds, key=lambda stage: float(np.median(seconds[stage])))


class SlowOnOneRank(TinyLoader):
    """Rank 1 waits for its data."""

    def batch(self, index: int) -> Batch:
        if dist.get_rank() == 1:
            time.sleep(LOADING_S)
        return super().batch(index)


def train_with_prediction() -> dict[str, Any]:
    """The summary of a short run of the loop."""
    model, optimizer = build_tiny()
    result = train_model(
        model,
        optimizer,
        SlowOnOneRank(num_batches=12),
        this_rank(),
        num_steps=12,
        cadence=Cadence(log_every=4),
        lr_factor=Schedule(),
        prediction={"step_s": 1.0, "stage_s": {"dense": 1.0}, "total_sent_bytes": 10.0},
        first_compared_step=5,
    )
    return dict(result.summary)


Results = list[tuple[dict[str, Any], str, dict[str, Any]]]


def run_all() -> tuple[dict[str, Any], str, dict[str, Any]]:
    return book_stages(), wait_for_slow_peer(), train_with_prediction()


@pytest.fixture(scope="module")
def results() -> Results:
    return run_ranks(run_all, 2, timeout_s=150)


ALWAYS = {"dense", "optimizer", "hot_exchange", "other"}  # dense layers are reduced as hot rows are
OF_COLD = {"ids_exchange", "rows_exchange", "grads_exchange", "row_lookup", "row_update"}
EXPECTED: dict[str, set[str]] = {
    "mixed": {*ALWAYS, *OF_COLD, "route", "pool"},
    "all_cold": {*ALWAYS, *OF_COLD, "route", "pool"},
    # Exchanges that are empty take a moment.
    "all_hot": {*ALWAYS, *OF_COLD - {"row_update"}, "route", "pool"},
    "torchrec": {*ALWAYS, *OF_COLD},
}


@pytest.mark.parametrize("kind", ["sparse_dist", "base"])
@pytest.mark.parametrize("case", list(CASES))
def test_time_is_booked_under_the_stages_of_a_placement(
    results: Results, case: str, kind: str
) -> None:
    for booked, _, _ in results:
        assert booked[f"{case} {kind}"] == EXPECTED[case]


def test_a_slow_peer_shows_in_an_exchange(results: Results) -> None:
    (_, of_first, _), (_, of_second, _) = results
    assert of_first in ("ids_exchange", "rows_exchange")
    assert of_second == "route"


def test_the_summary_is_that_of_all_ranks(results: Results) -> None:
    first, second = (summary for _, _, summary in results)
    for name in ("measured_stage_s", "slowest_rank_stage_s", "measured_step_s", "step_error_frac"):
        assert first[name] == second[name], name
    mean, slowest = first["measured_stage_s"], first["slowest_rank_stage_s"]
    assert list(mean) == list(STAGES)
    assert all(mean[stage] <= slowest[stage] for stage in STAGES)
    assert slowest["other"] >= LOADING_S
    assert mean["other"] < slowest["other"]  # rank 0 has its data at hand
    assert first["measured_step_s"] >= LOADING_S
    assert first["step_error_frac"] == pytest.approx(1 / first["measured_step_s"] - 1)
    sent = first["sent_bytes_total"]
    assert first["sent_bytes_error_frac"] == pytest.approx((10 - sent) / sent)


# --- traces of both pipelines, and what exposed communication is made of

KINDS = ("sparse_dist", "base")
TRACED = (("sparse_dist", "mixed"), ("base", "torchrec"))
NUM_TRACED_STEPS, FIRST, NUM_TRACED = 6, 3, 2
WAIT_S = 1000.0


def segment_batches() -> SegmentBatches:
    segment = Segment(first_step=1, last_step=NUM_TRACED_STEPS, is_last=True)
    return SegmentBatches(make_batches(NUM_TRACED_STEPS), segment)


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
    pipeline, batches = (
        make_pipeline(PipelineSpec(PipelineKind[kind]), model, optimizer, CPU),
        segment_batches(),
    )
    thread = threading.Thread(target=communicate, name="hotrec communication")
    window = TraceWindow(FIRST, NUM_TRACED, directory)
    pipeline.start()
    thread.start()
    try:
        with Tracer(window, this_rank(), start_step=0, num_steps=NUM_TRACED_STEPS) as tracer:
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
    result = train_model(
        model,
        optimizer,
        TinyLoader(num_batches=4),
        this_rank(),
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
    pipeline, batches = (
        make_pipeline(PipelineSpec(PipelineKind[kind]), model, optimizer, CPU),
        segment_batches(),
    )
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


def trace_all(directory: Path) -> dict[str, Any]:
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
def traced(directory: Path) -> list[dict[str, Any]]:
    return run_ranks(trace_all, 2, timeout_s=150, directory=directory)


@pytest.mark.parametrize(("kind", "case"), TRACED)
def test_traces_of_both_ranks(
    traced: list[dict[str, Any]], directory: Path, kind: str, case: str
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
    traced: list[dict[str, Any]], directory: Path
) -> None:
    for rank, result in enumerate(traced):
        events = read_events(directory / "train" / f"rank{rank}.json.gz")
        assert [name for _, name in events["step"]] == [f"step {step}" for step in range(2, 5)]
        for name in ("step_p50_s", "samples_per_s", "measured_step_s", "exposed_communication_s"):
            assert result["summary"][name] is None, name
        assert result["summary"]["num_steps"] == 4


@pytest.mark.parametrize("kind", KINDS)
def test_waiting_for_dense_gradients_is_exposed(traced: list[dict[str, Any]], kind: str) -> None:
    for result in traced:
        seconds = result["waits"][kind]
        (first, second) = seconds["exposed"]
        assert first == second > 0
        assert first % WAIT_S == 0
        waited = {name for name in STAGES if any(seconds[name])}
        assert waited == {"hot_exchange"} <= set(EXPOSED_STAGES)
