"""TorchRec's pipelines over real ranks, resume in memory, and TorchRec's own plans as reference."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardedModule

from hotrec.data.batch import Batch
from hotrec.embedding.sharding import ShardedHotColdEmbeddingBagCollection
from hotrec.embedding.tables import gather_tables
from hotrec.runtime.ranks import broadcast_object
from hotrec.train.checkpoint import Checkpoints, Position, load_checkpoint, save_checkpoint
from hotrec.train.pipelines import Pipeline, make_pipeline
from hotrec.types import (
    OptimizerKind,
    PipelineKind,
    PipelineSpec,
    TorchrecPlan,
)
from tests.distributed.setups import (
    ALL_POOLED,
    PARTITIONS,
    PLACEMENT,
    Setup,
    assert_tables_close,
    batches,
    build,
    gather,
    make_batch,
    mean_over_ranks,
)
from tests.helpers.checks import run_checks
from tests.helpers.ranks import run_ranks

CPU = torch.device("cpu")
NUM_STEPS = 6
TWO_COLLECTIONS = (("t0", "t2"), ("t1", "t3"))
ON_CPU = (OptimizerKind.sgd, OptimizerKind.adagrad, OptimizerKind.rowwise_adagrad)


def run_pipeline(pipeline: Any, iterator: Iterator[Batch]) -> list[float]:
    losses = []
    while True:
        try:
            loss, _, _ = pipeline.progress(iterator)
        except StopIteration:
            return losses
        losses.append(mean_over_ranks(loss))


def sparse_dist(setup: Setup) -> TrainPipelineSparseDist[Batch, Any]:
    return TrainPipelineSparseDist(setup.model, setup.optimizer, CPU)


def outermost_sharded(setup: Setup) -> set[int]:
    modules = [m for m in setup.model.modules() if isinstance(m, ShardedModule)]
    inner = {id(child) for m in modules for child in m.modules() if child is not m}
    return {id(module) for module in modules} - inner


def assert_all_pipelined(pipeline: Any, setup: Setup, num_modules: int) -> None:
    pipelined = {id(module) for module in pipeline._pipelined_modules}
    assert len(pipelined) == num_modules
    assert pipelined == outermost_sharded(setup)
    assert all(
        isinstance(module, ShardedHotColdEmbeddingBagCollection)
        for module in pipeline._pipelined_modules
    )


def assert_same_weights(first: Setup, second: Setup, tolerance: float = 0.0) -> None:
    assert_tables_close(gather_tables(first.model), gather_tables(second.model), tolerance)


def train(setup: Setup, num_steps: int = NUM_STEPS) -> list[float]:
    return [setup.step(make_batch(step)) for step in range(num_steps)]


def two_collections() -> None:
    kind = OptimizerKind.rowwise_adagrad
    for placement in (PARTITIONS["mixed"], PLACEMENT):
        whole = build(kind, placement)
        expected = train(whole)
        setup = build(kind, placement, splits=TWO_COLLECTIONS)
        plain = build(kind, placement, splits=TWO_COLLECTIONS)
        pipeline = sparse_dist(setup)
        losses = run_pipeline(pipeline, batches(0, NUM_STEPS))
        assert_all_pipelined(pipeline, setup, 2)
        assert losses == train(plain)
        assert_same_weights(setup, plain)
        assert losses == pytest.approx(expected, abs=1e-6)
        assert_same_weights(setup, whole, 1e-6)


class NoLoader(list[Batch]):
    """What a checkpoint wants of a loader, without batches."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict == {}


def assert_goes_on(first: Setup, second: Setup) -> None:
    """After three steps, and the state of the first loaded into the second, bit for bit."""
    assert_same_weights(first, second)
    for step in range(3, NUM_STEPS):
        assert first.step(make_batch(step)) == second.step(make_batch(step)), step
    assert_same_weights(first, second)


def state_goes_on_bitwise() -> None:
    """Model and optimizer saved in memory and loaded into fresh ones, on the same ranks."""
    cases: list[tuple[OptimizerKind, Any]] = [(OptimizerKind.adam, PARTITIONS["all_hot"])]
    cases += product(ON_CPU, (PARTITIONS["mixed"], PLACEMENT))
    for kind, placement in cases:
        first, second = build(kind, placement), build(kind, placement, seed=99)
        train(first, 3)
        second.step(make_batch(9))  # another history, which loading must wipe out
        second.model.load_state_dict(first.model.state_dict())
        second.optimizer.load_state_dict(first.optimizer.state_dict())
        assert_goes_on(first, second)


def checkpoint_goes_on_bitwise() -> None:
    """Written by both ranks and read into a model that started otherwise."""
    folder = Path(broadcast_object(tempfile.mkdtemp()))
    for kind in ON_CPU:
        first, second = build(kind, PLACEMENT), build(kind, PLACEMENT, seed=99)
        train(first, 3)
        checkpoints = Checkpoints(folder / kind.value, facts={})
        path = save_checkpoint(
            checkpoints, Position(3, 72), first.model, first.optimizer, NoLoader()
        )
        load_checkpoint(
            path, model=second.model, optimizer=second.optimizer, loader=NoLoader(), facts={}
        )
        assert_goes_on(first, second)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)


def every_parameter_has_one_optimizer() -> None:
    for partition in (*PARTITIONS.values(), PLACEMENT, ALL_POOLED, *TorchrecPlan):
        setup = build(OptimizerKind.rowwise_adagrad, partition)
        names = [name.split(".", 1)[1] for name in setup.optimizer.params]
        assert len(names) == len(set(names))
        # A table-wise table is in the optimizer of the rank that holds it.
        assert set().union(*gather(names)) == set(setup.model.state_dict()), partition


def torchrec_plans_reach_the_same_losses() -> None:
    for kind in ON_CPU:
        hot_cold = build(kind, PARTITIONS["mixed"])
        expected = train(hot_cold)
        for plan in (*TorchrecPlan, PLACEMENT, ALL_POOLED):
            setup = build(kind, plan)
            losses = train(setup)
            assert losses == pytest.approx(expected, abs=1e-5), (kind, plan)
            assert_same_weights(setup, hot_cold, 1e-5)


def learning_rates_change_at_the_same_step() -> None:
    """A rate set between two steps holds for the next one on hot, cold and dense parameters."""
    for partition in (PARTITIONS["mixed"], PLACEMENT, TorchrecPlan.hand_tuned):
        setup = build(OptimizerKind.sgd, partition)
        reference = build(OptimizerKind.sgd, partition)
        setup.step(make_batch(0))
        reference.step(make_batch(0))
        start, layers = gather_tables(setup.model), dense_weights(setup)
        for group in setup.optimizer.param_groups:
            group["lr"] *= 0.5
        setup.step(make_batch(1))
        reference.step(make_batch(1))
        after, expected = gather_tables(setup.model), gather_tables(reference.model)
        for table, weight in after.items():  # SGD moves in proportion to the rate
            half = (start[table] + expected[table]) / 2
            assert float((weight - half).abs().max()) < 1e-6, (partition, table)
            assert not torch.equal(weight, start[table])
        half = (layers + dense_weights(reference)) / 2
        assert float((dense_weights(setup) - half).abs().max()) < 1e-6


def dense_weights(setup: Setup) -> torch.Tensor:
    parameters = dict(setup.model.named_parameters())
    return parameters["model.hidden.weight"].detach().clone()


def pipeline_of(kind: str) -> tuple[Setup, Pipeline]:
    setup = build(OptimizerKind.adagrad, PARTITIONS["mixed"], data_parallel=kind != "look_ahead")
    spec = PipelineSpec(PipelineKind[kind], depth=2)
    return setup, make_pipeline(spec, setup.model, setup.optimizer, CPU)


def count_threads_and_groups() -> tuple[int, int]:
    """Counted until it stays: a thread that was joined is listed for a moment longer."""
    gc.collect()
    counts = [-1] * 5
    while counts[0] < 0 or len(set(counts)) > 1:
        time.sleep(0.02)
        counts = [*counts[1:], len(os.listdir("/proc/self/task"))]
    return counts[-1], len(dist.distributed_c10d._world.pg_map)


def closed_pipelines_leave_nothing() -> None:
    """No thread and no process group, also of pipelines that live at the same time."""
    before = count_threads_and_groups()
    for kinds in (("look_ahead",), ("sparse_dist",), ("look_ahead", "sparse_dist", "look_ahead")):
        held = [pipeline_of(kind) for kind in kinds]
        for _, pipeline in held:
            batches = iter([make_batch(step) for step in range(3)])
            for _ in range(2):  # with batches, and so exchanges, on their way
                pipeline.progress(batches)
        assert count_threads_and_groups() > before
        for setup, pipeline in held:
            pipeline.close()
            pipeline.close()
            assert setup.optimizer.state_dict()["state"]  # waits for no thread that has ended
        assert count_threads_and_groups() == before, kinds


CHECKS: list[Callable[[], None]] = [
    two_collections,
    state_goes_on_bitwise,
    checkpoint_goes_on_bitwise,
    every_parameter_has_one_optimizer,
    torchrec_plans_reach_the_same_losses,
    learning_rates_change_at_the_same_step,
    closed_pipelines_leave_nothing,
]


@pytest.fixture(scope="module")
def verdicts() -> dict[str, str | None]:
    return run_ranks(run_checks, 2, timeout_s=150, checks=CHECKS)[0]


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_pipelines(verdicts: dict[str, str | None], check: str) -> None:
    assert verdicts[check] is None, verdicts[check]


def fail(*_: Any) -> None:
    raise KeyError("this rank fails")


def fail_at(point: str | None, kind: str) -> None:
    """Train; at a point of the second step this rank fails."""
    with pipeline_of(kind)[1] as pipeline:
        batches = iter([make_batch(step) for step in range(NUM_STEPS)])
        pipeline.progress(batches)
        if point == "forward":
            dict(pipeline.model.named_modules())["module.out"].register_forward_pre_hook(fail)
        elif point == "update":  # the gradients of the dense layers are on their way
            pipeline._rows.wait_for_hot_gradients = fail  # type: ignore[attr-defined]
        for _ in range(2):
            pipeline.progress(batches)


def fail_and_leave(kind: str, points: dict[int, str]) -> None:
    threads, _ = count_threads_and_groups()
    with pytest.raises((KeyError, RuntimeError)):
        fail_at(points.get(dist.get_rank()), kind)
    until_s = time.monotonic() + 20
    while count_threads_and_groups()[0] > threads and time.monotonic() < until_s:
        time.sleep(0.05)
    assert count_threads_and_groups()[0] == threads


@pytest.mark.parametrize("points", [{1: "forward"}, {0: "update", 1: "forward"}])
def test_ranks_leave_a_pipeline_that_failed(points: dict[int, str]) -> None:
    """The limit is that of a collective too: nobody waits for one that nobody joins."""
    run_ranks(fail_and_leave, 2, timeout_s=60, kind="look_ahead", points=points)
