"""Choices by cost for models with sequences, beside TorchRec's own plans."""

from __future__ import annotations

from typing import Any

import numpy as np
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection

from hotrec.cost_model.profile import Profile
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.planner.machine import Machine
from hotrec.planner.request import ByCost
from hotrec.program.choice import Choice, Tables, choose_by_cost
from hotrec.types import OptimizerKind, PipelineKind

CONFIG: dict[str, Any] = {"name": "item", "num_embeddings": 5000, "embedding_dim": 256}
SEQUENCES = EmbeddingConfig(**CONFIG, feature_names=["history"])
ON_CPU = Machine(2, 1, "cpu", 0, 8 << 30, 32)
COUNTED = Profile(400, 0, {"item": np.full(5000, 4)})


def choose(sharding: Any, kind: OptimizerKind) -> Choice:
    module = EmbeddingCollection([SEQUENCES])
    plan = construct_module_sharding_plan(
        module,
        {"item": sharding},
        sharder=EmbeddingCollectionSharder(),
        local_size=1,
        world_size=2,
        device_type="cpu",
    )
    tables = Tables(
        configs=[SEQUENCES],
        rule=OptimizerSpec(kind, learning_rate=0.1, eps=1e-8),
        num_dense_values=100,
        kinds=[PipelineKind.sparse_dist],
        plan=lambda *_: ShardingPlan({"": plan}),
    )
    return choose_by_cost(COUNTED, ByCost(), PipelineKind.auto, tables, ON_CPU, "cpu_1gbit")


def test_torchrecs_plans_are_compared_where_they_train_the_same_weights() -> None:
    columns = column_wise(ranks=[0, 1])
    assert "TorchRec" in choose(table_wise(rank=0), OptimizerKind.rowwise_adagrad).why
    assert "TorchRec" in choose(columns, OptimizerKind.sgd).why
    # A state of its own for each part of a row.
    choice = choose(columns, OptimizerKind.rowwise_adagrad)
    assert "TorchRec" not in choice.why
    assert choice.placement is not None
    # The only pipeline that can train the model.
    assert choice.pipeline is PipelineKind.sparse_dist
