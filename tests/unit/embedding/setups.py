"""Tables, batches and sharding on one rank, for the tests of collections."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.assemble.constraints import placement_constraints
from hotrec.assemble.torchrec_plan import make_plan
from hotrec.embedding.collection import HotColdEmbeddingBagCollection
from hotrec.embedding.convert import shard
from hotrec.embedding.sharding import HotColdSharder
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.planner.machine import Machine
from hotrec.types import OptimizerKind, Partition, Placement

SUM, MEAN = PoolingType.SUM, PoolingType.MEAN
CPU = torch.device("cpu")
SGD = OptimizerSpec(OptimizerKind.sgd, learning_rate=0.5)
NUM_ROWS = {"t": 12, "u": 5, "v": 9}
PARTITIONS = {
    "all_cold": Partition(NUM_ROWS),
    "all_hot": Partition(NUM_ROWS, {name: np.arange(rows) for name, rows in NUM_ROWS.items()}),
    "mixed": Partition(NUM_ROWS, {"t": np.array([11, 0, 5]), "u": np.array([4, 3, 0, 1, 2])}),
}


def bag(name: str, num_rows: int, features: list[str], dim: int = 4, **kwargs: Any) -> Any:
    return EmbeddingBagConfig(
        name=name, num_embeddings=num_rows, embedding_dim=dim, feature_names=features, **kwargs
    )


def some_tables(pooling: PoolingType = MEAN) -> list[EmbeddingBagConfig]:
    return [
        bag("t", 12, ["a", "b"], pooling=pooling),
        bag("u", 5, ["c"], dim=8, pooling=SUM),
        bag("v", 9, ["a"], pooling=SUM),  # "a" is read from two tables
    ]


def some_features(
    *, is_weighted: bool = False, is_empty: bool = False, batch_size: int = 6
) -> KeyedJaggedTensor:
    rng = np.random.default_rng(2)
    lengths = rng.integers(0, 4, (3, batch_size)) * (not is_empty)
    values = np.concatenate(
        [rng.integers(rows, size=n) for rows, n in zip((9, 12, 5), lengths.sum(1), strict=True)]
    )
    return KeyedJaggedTensor(
        keys=["a", "b", "c"],
        values=torch.from_numpy(values),
        lengths=torch.from_numpy(lengths).view(-1),
        weights=torch.from_numpy(rng.uniform(-1, 2, values.size)).float() if is_weighted else None,
        stride=batch_size,
    )


class Model(nn.Module):
    """A collection, at a path that wrappers use too, and a layer."""

    def __init__(self, collection: nn.Module, name: str = "e") -> None:
        super().__init__()
        self.name = name
        self.add_module(name, nn.ModuleDict({"e": collection}))
        self.out = nn.Linear(20, 1)

    def forward(self, features: Any) -> torch.Tensor:
        return self.out(self.collection(features).values())

    @property
    def collection(self) -> Any:
        holder: Any = getattr(self, self.name)
        return holder["e"]


def shard_here(
    model: nn.Module,
    placement: Partition | Placement,
    spec: OptimizerSpec = SGD,
    constraints: Any = None,
    sharder: Any = None,
) -> Any:
    """Shard a model on one rank by the placement's constraints or by others."""
    sharders: Any = [sharder or HotColdSharder(spec)]
    if isinstance(placement, Partition):
        placement = Placement.alike(placement)
    rules = placement_constraints(placement) if constraints is None else constraints
    plan = make_plan(model, sharders, Machine(1, 1, "cpu", 0, 1 << 33, 8), rules)
    return shard(model, plan, sharders, CPU)


def split_model(placement: Partition | Placement, **kwargs: Any) -> Model:
    return Model(HotColdEmbeddingBagCollection(some_tables(), placement, **kwargs))
