"""Unpooled tables, generated: the unsplit model's losses and weights, and the same bits again.

TorchRec's own sharded collection is the second oracle: it sends the row of every id, to and fro.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_modules import EmbeddingCollection

from hotrec.embedding.fused import fused_params
from hotrec.embedding.optimizers import make_optimizer
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.models.task import ClickTask
from hotrec.runtime.hosts import RANKS_PER_HOST
from hotrec.types import Levels, OptimizerKind
from tests.distributed.parity_cases import (
    NUM_DENSE,
    NUM_STEPS,
    SEED,
    TOLERANCE,
    Case,
    gather_weights,
    make_sequence_cases,
    output_names,
    rank_batch,
    run_hot_cold,
    run_twice,
    sequence_configs,
    spec_of,
    train_case,
)
from tests.distributed.setups import mean_over_ranks, shard_task
from tests.helpers.ranks import run_ranks
from tests.helpers.reference import SumsByPlace, TinyClickModel
from tests.helpers.samples import sample

NUM_CASES = {1: 28, 2: 40, 3: 36}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_sequences_train_the_unsplit_model_and_repeat_bit_for_bit(world_size: int) -> None:
    cases = make_sequence_cases(NUM_CASES[world_size], 40 + world_size)
    for failures in run_ranks(run_twice, world_size, timeout_s=400, cases=sample(cases, 3, 4)):
        assert not failures, "\n".join(failures)


def run_in_two_levels(cases: list[Case]) -> list[str]:
    os.environ[RANKS_PER_HOST] = "2"
    return run_twice(cases)


def test_sequences_on_two_hosts_train_the_unsplit_model() -> None:
    cases = [replace(case, levels=Levels.two) for case in make_sequence_cases(20, 44)]
    for failures in run_ranks(run_in_two_levels, 4, timeout_s=400, cases=sample(cases, 1, 4)):
        assert not failures, "\n".join(failures)


def run_torchrec(
    case: Case, sharding: ShardingType, pipeline: str
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The case with TorchRec's own collection, sharded in one way."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tables, spec = sequence_configs(case), spec_of(case)
    collection = EmbeddingCollection(tables, device=torch.device("meta"))
    columns = SumsByPlace(collection, output_names(tables))
    width = sum(table.dim * len(table.features) for table in case.tables)
    kernel = EmbeddingComputeKernel.FUSED.value
    model = shard_task(
        ClickTask(TinyClickModel(columns, NUM_DENSE, width), world_size),
        EmbeddingCollectionSharder(fused_params(spec)),
        {
            table.name: ParameterConstraints(
                sharding_types=[sharding.value], compute_kernels=[kernel], min_partition=4
            )
            for table in tables
        },
        seed=SEED,
    )
    optimizer = make_optimizer(model, spec, OptimizerSpec(OptimizerKind.sgd, learning_rate=0.1))
    batches = [rank_batch(case, step, rank, world_size) for step in range(NUM_STEPS)]
    plain = replace(case, pipeline=pipeline, micro_batches=False)
    losses = train_case(plain, model, optimizer, batches, torch.device("cpu"))
    return [mean_over_ranks(loss) for loss in losses], gather_weights(model)


def compare_with_torchrec(cases: list[Case]) -> list[str]:
    """What differs between hotrec and TorchRec, on this rank."""
    torch.set_num_threads(1)
    found = []
    for at, case in enumerate(cases):
        # Column-wise shards have a state of row-wise Adagrad each, and train other weights.
        is_split = case.optimizer is not OptimizerKind.rowwise_adagrad
        kinds = [ShardingType.ROW_WISE, ShardingType.TABLE_WISE, ShardingType.COLUMN_WISE]
        sharding = kinds[at % (3 if is_split else 2)]
        losses, weights = run_hot_cold(case)
        others, of_torchrec = run_torchrec(case, sharding, ["base", "sparse_dist"][at % 2])
        worst = max(abs(a - b) for a, b in zip(losses, others, strict=True))
        worst = max(worst, *(float((weights[n] - of_torchrec[n]).abs().max()) for n in of_torchrec))
        if weights.keys() != of_torchrec.keys() or not worst <= TOLERANCE:
            found.append(f"{case}, {sharding}: differs by {worst}")
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_sequences_train_the_model_that_torchrec_shards(world_size: int) -> None:
    drawn = [
        replace(case, is_uniform_dim=True)  # which its collection demands
        for case in make_sequence_cases(60, 46)
        # It has no Adam on a CPU.
        if case.optimizer is not OptimizerKind.adam
    ]
    cases = sample(drawn[::4], 0, 3)
    for failures in run_ranks(compare_with_torchrec, world_size, timeout_s=400, cases=cases):
        assert not failures, "\n".join(failures)
