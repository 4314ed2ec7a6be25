"""Memory by tier: what a model's tables take, to the byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from hotrec.embedding.collection import HotColdEmbeddingBagCollection
from hotrec.embedding.convert import shard
from hotrec.embedding.fused import fused_params
from hotrec.embedding.optimizers import make_optimizer
from hotrec.embedding.sharding import HotColdSharder
from hotrec.embedding.table_memory import _tensors_of, memory_by_tier
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.planning.constraints import hot_cold_constraints, torchrec_constraints
from hotrec.planning.machine import Machine
from hotrec.planning.torchrec_plan import make_plan
from hotrec.runtime.ranks import Ranks
from hotrec.types import ColdTier, OptimizerKind, Partition, TorchrecPlan

NUM_ROWS = {"t": 50, "u": 30}
DIM = 8
STATE_FLOATS = {OptimizerKind.sgd: 0, OptimizerKind.adagrad: DIM, OptimizerKind.rowwise_adagrad: 1}


class Model(nn.Module):
    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.out = nn.Linear(2 * DIM, 1)


def tables() -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(name=t, num_embeddings=n, embedding_dim=DIM, feature_names=[t])
        for t, n in NUM_ROWS.items()
    ]


def build(embeddings: nn.Module, sharder: Any, constraints: Any, spec: OptimizerSpec) -> Any:
    machine = Machine(1, 1, "cpu", 1 << 30, 1 << 33, 8)
    model = Model(embeddings)
    plan = make_plan(model, [sharder], machine, constraints)
    sharded = shard(model, plan, [sharder], torch.device("cpu"))
    return sharded, make_optimizer(sharded, spec, spec)


@pytest.mark.parametrize("kind", list(STATE_FLOATS))
def test_hot_and_cold_rows(one_rank: Ranks, kind: OptimizerKind) -> None:
    partition = Partition(NUM_ROWS, {"t": np.arange(7), "u": np.arange(30)})
    spec = OptimizerSpec(kind, learning_rate=0.1)
    embeddings = HotColdEmbeddingBagCollection(tables(), partition, device=torch.device("meta"))
    constraints = hot_cold_constraints(tables(), partition, cold_tier=ColdTier.fused)
    model, optimizer = build(embeddings, HotColdSharder(spec), constraints, spec)
    found = memory_by_tier(model, optimizer)
    assert all(places["device"] == 0 for places in found.values())
    host = {name: places["host"] for name, places in found.items()}
    num_hot, num_cold = 37, 50  # the cold table keeps all its rows; a wholly hot one has none
    assert host["hot_rows"] == 4 * DIM * num_hot
    assert host["cold_rows"] == 4 * DIM * num_cold
    counters = 8  # of the hot rows' updates
    state_bytes = 4 * STATE_FLOATS[kind] * (num_hot + num_cold)
    assert state_bytes <= host["optimizer_state"] <= state_bytes + counters
    assert 4 * 80 <= host["router"] <= 4 * 80 + 1024
    weight = next(iter(embeddings_of(model).hot_replicas()))[1].weight
    weight.grad = torch.zeros_like(weight)
    assert memory_by_tier(model, optimizer)["hot_rows"]["host"] == 2 * 4 * DIM * num_hot


def embeddings_of(model: Any) -> Any:
    return model.module.embeddings


def test_tables_of_a_torchrec_plan(one_rank: Ranks) -> None:
    spec = OptimizerSpec(OptimizerKind.rowwise_adagrad, learning_rate=0.1)
    embeddings = EmbeddingBagCollection(tables=tables(), device=torch.device("meta"))
    constraints = torchrec_constraints(
        tables(), TorchrecPlan.table_wise, batch_size=8, tier=ColdTier.fused
    )
    sharder = EmbeddingBagCollectionSharder(fused_params(spec))
    model, optimizer = build(embeddings, sharder, constraints, spec)
    host = {name: places["host"] for name, places in memory_by_tier(model, optimizer).items()}
    assert host["cold_rows"] == 4 * DIM * 80
    assert host["hot_rows"] == host["router"] == 0
    assert host["optimizer_state"] == 4 * 80


def test_fbgemms_names_say_what_lies_where() -> None:
    """A module's buffers on a GPU, by name alone."""
    kernel = nn.Module()
    for name in ("weights_dev", "weights_uvm", "momentum1_dev", "momentum2_uvm"):
        kernel.register_buffer(name, torch.zeros(1))
    for name in ("lxu_cache_weights", "lxu_state", "cache_hash_size_cumsum", "rows_per_table"):
        kernel.register_buffer(name, torch.zeros(1))
    assert {(kind, place) for kind, _, place in _tensors_of(kernel)} == {
        ("cold_rows", "device"),
        ("cold_rows", "host"),
        ("optimizer_state", "device"),
        ("optimizer_state", "host"),
        ("cache", None),
    }
