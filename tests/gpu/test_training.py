"""Pipelines, evaluation, resume and TorchRec's host tiers on one GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from hotrec.embedding.adapt import AdaptiveHotSet
from hotrec.embedding.tables import gather_tables
from hotrec.runtime.ranks import Ranks
from hotrec.train.checkpoint import Checkpoints, Position, load_checkpoint, save_checkpoint
from hotrec.types import OptimizerKind, Partition, TorchrecPlan, TorchrecTier
from tests.distributed.setups import (
    GLOBAL_BATCH,
    NUM_ROWS,
    PARTITIONS,
    Setup,
    batches,
    build,
    make_batch,
)
from tests.helpers.tiny import TinyLoader

# Slots are look-ahead's alone; checks.py of the stand-in has evaluation, checkpoints and moves with
# them.
pytestmark = pytest.mark.gpu
NUM_STEPS = 5
ADAM = OptimizerKind.adam


def setup_of(kind: OptimizerKind = ADAM, partition: Any = None, **kwargs: Any) -> Setup:
    chosen = PARTITIONS["mixed"] if partition is None else partition
    return build(kind, chosen, device="cuda", **kwargs)


def steps(setup: Setup, begin: int, end: int, device: torch.device) -> list[float]:
    return [setup.step(make_batch(step).to(device)) for step in range(begin, end)]


def assert_close(first: Setup, second: Setup, tolerance: float) -> None:
    one, two = gather_tables(first.model), gather_tables(second.model)
    for table, weight in one.items():
        assert float((weight - two[table]).abs().max()) <= tolerance, table


def test_pipelined_equals_plain(gpu: Ranks) -> None:
    plain = setup_of()
    expected = steps(plain, 0, NUM_STEPS, gpu.device)
    for is_routed in (False, True):
        setup = setup_of()
        pipeline: Any = TrainPipelineSparseDist(setup.model, setup.optimizer, gpu.device)
        stream = batches(0, NUM_STEPS, route=setup.route if is_routed else None)
        losses = [float(pipeline.progress(stream)[0]) for _ in range(NUM_STEPS)]
        assert len(pipeline._pipelined_modules) == 1
        assert losses == pytest.approx(expected, abs=1e-6)
        assert_close(setup, plain, 1e-6)


def test_evaluation_does_not_count_as_an_update(gpu: Ranks) -> None:
    """Adam's bias correction on cold rows counts FBGEMM's forward passes."""
    plain, evaluated = setup_of(), setup_of()
    expected = steps(plain, 0, NUM_STEPS, gpu.device)
    losses = []
    for step in range(NUM_STEPS):
        with torch.no_grad():
            evaluated.model(make_batch(50 + step).to(gpu.device))
        losses += steps(evaluated, step, step + 1, gpu.device)
    assert losses == pytest.approx(expected, abs=1e-6)
    assert_close(evaluated, plain, 1e-6)


@pytest.mark.parametrize("kind", list(OptimizerKind), ids=lambda kind: kind.value)
def test_a_checkpoint_goes_on(gpu: Ranks, kind: OptimizerKind, tmp_path: Path) -> None:
    """Adam's update count must be saved with the moments, for cold rows as well."""
    first = setup_of(kind)
    steps(first, 0, 3, gpu.device)
    path = save_checkpoint(
        Checkpoints(tmp_path, facts={}),
        Position(3, 3 * GLOBAL_BATCH),
        first.model,
        first.optimizer,
        TinyLoader(num_batches=1),
    )
    second = setup_of(kind, seed=99)
    load_checkpoint(path, model=second.model, optimizer=second.optimizer, facts={})
    assert steps(first, 3, 6, gpu.device) == pytest.approx(
        steps(second, 3, 6, gpu.device), abs=1e-6
    )
    assert_close(first, second, 1e-6)


@pytest.mark.parametrize("kind", list(OptimizerKind), ids=lambda kind: kind.value)
def test_rows_move_between_replica_and_shard(gpu: Ranks, kind: OptimizerKind) -> None:
    last = {table: np.arange(rows - 3, rows) for table, rows in NUM_ROWS.items()}
    kept, moving = (setup_of(kind, Partition(NUM_ROWS, last)) for _ in range(2))
    hot_set, num_moved = AdaptiveHotSet(moving.model, moving.optimizer), 0
    for step in range(NUM_STEPS):
        losses = [steps(setup, step, step + 1, gpu.device) for setup in (kept, moving)]
        assert losses[0] == pytest.approx(losses[1], abs=1e-6)
        num_moved += hot_set.adapt().num_moved
    assert num_moved > 3
    assert_close(kept, moving, 1e-6)


@pytest.mark.parametrize("tier", list(TorchrecTier), ids=lambda tier: tier.value)
@pytest.mark.parametrize("plan", list(TorchrecPlan), ids=lambda plan: plan.value)
def test_torchrec_plans_reach_the_same_losses(
    gpu: Ranks, tier: TorchrecTier, plan: TorchrecPlan
) -> None:
    kind = OptimizerKind.rowwise_adagrad
    hot_cold, unsplit = setup_of(kind), setup_of(kind, plan, tier=tier)
    expected = steps(hot_cold, 0, NUM_STEPS, gpu.device)
    assert steps(unsplit, 0, NUM_STEPS, gpu.device) == pytest.approx(expected, abs=1e-5)
    assert_close(unsplit, hot_cold, 1e-5)
