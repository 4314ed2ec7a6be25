"""Small sharded models for the tests of real ranks: named tables, skewed batches, any partition."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.assemble.constraints import (
    hot_cold_constraints,
    placement_constraints,
    torchrec_constraints,
)
from hotrec.assemble.torchrec_plan import make_plan
from hotrec.data.batch import Batch
from hotrec.embedding.collection import HotColdEmbeddingBagCollection
from hotrec.embedding.convert import shard
from hotrec.embedding.fused import fused_params
from hotrec.embedding.initialize import initialize_embeddings
from hotrec.embedding.optimizers import make_optimizer
from hotrec.embedding.sharding import HotColdSharder
from hotrec.embedding.torchrec import ddp_modules
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.models.task import ClickTask
from hotrec.models.zoo import build_architecture
from hotrec.planner.machine import Machine
from hotrec.runtime.codecs import compress_dense, wire_codecs
from hotrec.runtime.ranks import Ranks
from hotrec.types import (
    ColdTier,
    Exchange,
    HotExchange,
    ModelKind,
    OptimizerKind,
    Partition,
    Placement,
    Sharding,
    TablePlacement,
    TorchrecPlan,
    WireType,
)
from tests.helpers.dense import shape_of

NUM_DENSE = 3
NUM_ROWS = {"t0": 40, "t1": 12, "t2": 7, "t3": 90}
DIMS = {"t0": 8, "t1": 8, "t2": 4, "t3": 8}
FEATURES = {"t0": ["a", "b"], "t1": ["c"], "t2": ["d"], "t3": ["e"]}
LIMITS = {"a": 40, "b": 40, "c": 12, "d": 7, "e": 90}
GLOBAL_BATCH = 24


def hot_rows(num: int) -> dict[str, np.ndarray]:
    """The first rows, which the batches read most, in an order of their own."""
    rng = np.random.default_rng(3)
    return {table: rng.permutation(min(num, rows)) for table, rows in NUM_ROWS.items()}


PARTITIONS = {
    "all_cold": Partition(NUM_ROWS),
    "all_hot": Partition(NUM_ROWS, hot_rows(1000)),
    "mixed": Partition(NUM_ROWS, hot_rows(10)),
}

# Of every kind one: hot and row-wise, hot and table-wise, pooled, table-wise.
PLACEMENT = Placement(
    Partition(NUM_ROWS, {table: rows for table, rows in hot_rows(10).items() if table < "t2"}),
    {
        "t0": TablePlacement(),
        "t1": TablePlacement(sharding=Sharding.TABLE_WISE),
        "t2": TablePlacement(Exchange.POOLED, Sharding.TABLE_WISE),
        "t3": TablePlacement(sharding=Sharding.TABLE_WISE),
    },
)
ALL_POOLED = Placement(
    Partition(NUM_ROWS),
    dict.fromkeys(NUM_ROWS, TablePlacement(Exchange.POOLED, Sharding.TABLE_WISE)),
)


def spec_of(kind: OptimizerKind, learning_rate: float = 0.2) -> OptimizerSpec:
    return OptimizerSpec(kind, learning_rate=learning_rate, eps=1e-4)


def configs(
    tables: Sequence[str] = tuple(NUM_ROWS), dims: Mapping[str, int] = DIMS
) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(
            name=table,
            num_embeddings=NUM_ROWS[table],
            embedding_dim=dims[table],
            feature_names=FEATURES[table],
            pooling=PoolingType.MEAN if table == "t1" else PoolingType.SUM,
        )
        for table in tables
    ]


class ClickModel(nn.Module):
    """(dense, sparse) -> logits over one collection or two.

    Columns are taken by name: TorchRec's sharded collections order them by sharding.
    """

    def __init__(self, collections: Sequence[nn.Module], width: int, dropout: float) -> None:
        super().__init__()
        self.first = collections[0]
        self.second = collections[1] if len(collections) > 1 else None
        tables: Any = collections[0].embedding_bag_configs()  # type: ignore[operator]
        self.of_first = {feature for table in tables for feature in table.feature_names}
        self.hidden = nn.Linear(NUM_DENSE + width, 8)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(8, 1)
        generator = torch.Generator().manual_seed(11)
        with torch.no_grad():
            for layer in (self.hidden, self.out):
                layer.weight.uniform_(-0.5, 0.5, generator=generator)
                layer.bias.uniform_(-0.5, 0.5, generator=generator)

    def forward(self, dense: torch.Tensor, sparse: Any) -> torch.Tensor:
        first = self.first(sparse).to_dict()
        second = self.second(sparse).to_dict() if self.second is not None else first
        pooled = [(first if name in self.of_first else second)[name] for name in LIMITS]
        return self.out(self.dropout(torch.tanh(self.hidden(torch.cat([dense, *pooled], dim=1)))))


@dataclass
class Setup:
    """A sharded model and what trains it."""

    model: DistributedModelParallel
    optimizer: CombinedOptimizer
    route: Callable[[KeyedJaggedTensor], Any] | None

    def step(self, batch: Batch) -> float:
        """One update; the global mean loss."""
        self.optimizer.zero_grad()
        loss, _ = self.model(batch)
        loss.backward()
        self.optimizer.step()
        return mean_over_ranks(loss)


def this_rank() -> Ranks:
    rank, size = dist.get_rank(), dist.get_world_size()
    return Ranks(rank, size, rank, size, torch.device("cpu"))


def pretend_hosts(hosts: str) -> None:
    """Set what torchrun would set on this rank, a process of its own, given each rank's host."""
    host = hosts[dist.get_rank()]
    os.environ |= {"GROUP_RANK": host, "LOCAL_WORLD_SIZE": str(hosts.count(host))}


def gather(value: Any) -> list[Any]:
    """The value of every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def assert_same_on_ranks(value: torch.Tensor) -> None:
    """Bit for bit; all ranks reach the same verdict, or the next collective would hang."""
    assert len(set(gather(value.detach().contiguous().numpy().tobytes()))) == 1


def assert_tables_close(
    first: dict[str, torch.Tensor], second: dict[str, torch.Tensor], tolerance: float = 0.0
) -> None:
    assert first.keys() == second.keys()
    for table, weight in first.items():
        worst = float((weight - second[table]).abs().max())
        assert worst <= tolerance, (table, worst)


def mean_over_ranks(value: torch.Tensor) -> float:
    total = value.detach().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def shard_task(
    task: nn.Module,
    sharder: Any,
    constraints: Any,
    *,
    device: str = "cpu",
    data_parallel: bool = True,
    seed: int | None = None,
) -> DistributedModelParallel:
    """Plan, shard and initialize a model on the ranks of the default group."""
    size, target = dist.get_world_size(), torch.device(device)
    # TorchRec gives each rank of a host a device of its own; ranks of tests may share one.
    is_cuda = target.type == "cuda"
    local_size = len(set(gather(torch.cuda.current_device()))) if is_cuda else size
    machine = Machine(size, local_size, target.type, 1 << 30, 1 << 33, 8)
    plan = make_plan(task, [sharder], machine, constraints)
    model = shard(task, plan, [sharder], target, data_parallel=data_parallel)
    if seed is not None:
        initialize_embeddings(model, seed)
    return model


def build(
    kind: OptimizerKind | OptimizerSpec,
    partition: Partition | Placement | TorchrecPlan,
    *,
    exchange: HotExchange = HotExchange.touched_rows,
    splits: Sequence[Sequence[str]] = (tuple(NUM_ROWS),),
    device: str = "cpu",
    tier: ColdTier = ColdTier.fused,
    dropout: float = 0.0,
    seed: int | None = 5,
    wire_type: WireType = WireType.fp32,
    dims: Mapping[str, int] = DIMS,
    dense_rate: float = 0.1,
    data_parallel: bool = True,
) -> Setup:
    """A model over ``splits`` collections of tables, by a partition or by a TorchRec plan.

    Without a seed the tables keep the weights that they were built with on this rank.
    """
    spec = spec_of(kind) if isinstance(kind, OptimizerKind) else kind
    meta = torch.device("meta" if seed is not None else "cpu")
    width = sum(dims[table] * len(FEATURES[table]) for split in splits for table in split)
    tables, constraints = configs(dims=dims), None
    collections: list[nn.Module]
    if isinstance(partition, Partition | Placement):
        collections = [
            HotColdEmbeddingBagCollection(configs(split, dims), partition, device=meta)
            for split in splits
        ]
        sharder: Any = HotColdSharder(spec, exchange, wire_type)
        if isinstance(partition, Placement):
            constraints = placement_constraints(partition)
        else:
            constraints = hot_cold_constraints(
                tables, partition, cold_tier=tier, cache_load_factor=0.2
            )
    else:
        collections = [EmbeddingBagCollection(tables=configs(s, dims), device=meta) for s in splits]
        codecs = wire_codecs(wire_type)
        sharder = EmbeddingBagCollectionSharder(fused_params(spec), qcomm_codecs_registry=codecs)
        # The batch decides what an expert replicates: tables below 20 rows here.
        constraints = torchrec_constraints(tables, partition, batch_size=20, tier=tier)
    route = getattr(collections[0], "router", None) if len(splits) == 1 else None
    click = ClickModel(collections, width, dropout)
    for layer in (click.hidden, click.out):
        layer.to(device)
    task = ClickTask(click, dist.get_world_size())
    model = shard_task(
        task, sharder, constraints, device=device, data_parallel=data_parallel, seed=seed
    )
    if data_parallel:
        compress_dense(ddp_modules(model), wire_type)
    dense = OptimizerSpec(OptimizerKind.sgd, learning_rate=dense_rate)
    return Setup(model, make_optimizer(model, spec, dense), route)


# Models of ``hotrec.models`` on tables of one dimension, one id of each table in a sample.
ZOO_DIM = 4


def zoo_tables(num_rows: Mapping[str, int]) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(name=t, num_embeddings=n, embedding_dim=ZOO_DIM, feature_names=[t])
        for t, n in num_rows.items()
    ]


def zoo_model(kind: ModelKind, embeddings: nn.Module, num_labels: int = 1) -> nn.Module:
    configs = embeddings.embedding_bag_configs()  # type: ignore[operator]
    shape = shape_of(
        kind,
        NUM_DENSE,
        [(name, table.name) for table in configs for name in table.feature_names],
        ZOO_DIM,
        dense_layer_sizes=[8, ZOO_DIM],
        over_layer_sizes=[8, 1],
        labels=[f"label{number}" for number in range(num_labels)],
    )
    return build_architecture(shape, embeddings, 1, torch.device("cpu"))


def zoo_batch(num_rows: Mapping[str, int], step: int, rank: int, size: int, total: int) -> Batch:
    """The samples of a rank, of ``total`` on all ranks."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    ids = [torch.randint(0, n, (size,), generator=generator) for n in num_rows.values()]
    lengths = torch.ones(size * len(ids), dtype=torch.int64)
    return Batch(
        4 * torch.rand(size, NUM_DENSE, generator=generator),
        KeyedJaggedTensor(list(num_rows), torch.cat(ids), lengths=lengths),
        torch.randint(0, 2, (size,), generator=generator).float(),
        torch.ones(size),
        total,
    )


def make_batch(step: int, *, route: Callable[[KeyedJaggedTensor], Any] | None = None) -> Batch:
    """This rank's slice of the step's global batch, which is the same at any world size."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rng = np.random.default_rng((77, step))
    size = GLOBAL_BATCH // world_size
    mine = slice(rank * size, (rank + 1) * size)
    ids, lengths = [], []
    for limit in LIMITS.values():
        counts = rng.integers(0, 4, GLOBAL_BATCH)
        bags = [(rng.random(n) ** 3 * limit).astype(np.int64) for n in counts]  # low rows often
        ids += bags[mine]
        lengths.append(counts[mine])
    sparse = KeyedJaggedTensor(
        keys=list(LIMITS),
        values=torch.from_numpy(np.concatenate(ids)),
        lengths=torch.from_numpy(np.concatenate(lengths)),
    )
    dense = torch.from_numpy(rng.standard_normal((GLOBAL_BATCH, NUM_DENSE)).astype(np.float32))
    labels = torch.from_numpy(rng.integers(0, 2, GLOBAL_BATCH).astype(np.float32))
    return Batch(
        dense[mine],
        sparse if route is None else route(sparse),
        labels[mine],
        torch.ones(size),
        GLOBAL_BATCH,
    )


def batches(begin: int, end: int, **kwargs: Any) -> Iterator[Batch]:
    return (make_batch(step, **kwargs) for step in range(begin, end))
