"""Small sharded models for the tests of real ranks, and what ranks say to one another."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
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

from hotrec.assemble.constraints import placement_constraints, torchrec_constraints
from hotrec.assemble.torchrec_plan import make_plan
from hotrec.data.batch import Batch
from hotrec.embedding.collection import HotColdEmbeddingBagCollection
from hotrec.embedding.convert import shard
from hotrec.embedding.fused import fused_params
from hotrec.embedding.initialize import initialize_embeddings
from hotrec.embedding.optimizers import make_optimizer
from hotrec.embedding.sharding import HotColdSharder
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.models.task import ClickTask
from hotrec.planner.machine import Machine
from hotrec.planner.plan import TorchrecTables
from hotrec.runtime.ranks import Ranks, broadcast_object
from hotrec.types import OptimizerKind, Partition, Placement, TorchrecPlan, TorchrecTier

NUM_DENSE = 3
NUM_ROWS = {"t0": 40, "t1": 12, "t2": 7, "t3": 90}
DIMS = {"t0": 8, "t1": 8, "t2": 4, "t3": 8}
FEATURES = {"t0": ["a", "b"], "t1": ["c"], "t2": ["d"], "t3": ["e"]}
LIMITS = {"a": 40, "b": 40, "c": 12, "d": 7, "e": 90}
GLOBAL_BATCH = 24
# The batches read the first rows most.
_HOT = {table: np.random.default_rng(3).permutation(min(10, n)) for table, n in NUM_ROWS.items()}
PARTITIONS = {
    "all_cold": Partition(NUM_ROWS),
    "all_hot": Partition(NUM_ROWS, {table: np.arange(rows) for table, rows in NUM_ROWS.items()}),
    "mixed": Partition(NUM_ROWS, _HOT),
}


class ClickModel(nn.Module):
    """(dense, sparse) -> logits.

    Columns are taken by name: TorchRec's sharded collections order them by sharding.
    """

    def __init__(self, collection: nn.Module) -> None:
        super().__init__()
        self.collection = collection
        width = sum(DIMS[table] * len(names) for table, names in FEATURES.items())
        self.hidden, self.out = nn.Linear(NUM_DENSE + width, 8), nn.Linear(8, 1)
        generator = torch.Generator().manual_seed(11)
        for parameter in [*self.hidden.parameters(), *self.out.parameters()]:
            parameter.data.uniform_(-0.5, 0.5, generator=generator)

    def forward(self, dense: torch.Tensor, sparse: Any) -> torch.Tensor:
        found = self.collection(sparse).to_dict()
        pooled = [found[name] for name in LIMITS]
        return self.out(torch.tanh(self.hidden(torch.cat([dense, *pooled], dim=1))))


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
    # Every rank would compute the same, as those of a program do (test_program).
    plan = broadcast_object(
        make_plan(task, [sharder], machine, constraints) if dist.get_rank() == 0 else None
    )
    model = shard(task, plan, [sharder], target, data_parallel=data_parallel)
    if seed is not None:
        initialize_embeddings(model, seed)
    return model


def build(
    kind: OptimizerKind,
    partition: Partition | TorchrecPlan,
    *,
    device: str = "cpu",
    tier: TorchrecTier = TorchrecTier.fused,
    seed: int = 5,
) -> Setup:
    """A model by a partition or by a TorchRec plan, whose rows are in a tier."""
    spec, meta = OptimizerSpec(kind, learning_rate=0.2, eps=1e-4), torch.device("meta")
    tables = [
        EmbeddingBagConfig(
            name=table,
            num_embeddings=NUM_ROWS[table],
            embedding_dim=DIMS[table],
            feature_names=FEATURES[table],
            pooling=PoolingType.MEAN if table == "t1" else PoolingType.SUM,
        )
        for table in NUM_ROWS
    ]
    collection: Any
    sharder: Any
    if isinstance(partition, Partition):
        collection = HotColdEmbeddingBagCollection(tables, partition, device=meta)
        sharder = HotColdSharder(spec)
        constraints = placement_constraints(Placement.alike(partition), device)
    else:
        collection = EmbeddingBagCollection(tables=tables, device=meta)
        sharder = EmbeddingBagCollectionSharder(fused_params(spec))
        # The batch decides what an expert replicates: tables below 20 rows here.
        constraints = torchrec_constraints(
            tables, TorchrecTables(partition, tier), batch_size=20, device=device
        )
    click = ClickModel(collection)
    for layer in (click.hidden, click.out):
        layer.to(device)
    task = ClickTask(click, dist.get_world_size())
    model = shard_task(task, sharder, constraints, device=device, seed=seed)
    dense = OptimizerSpec(OptimizerKind.sgd, learning_rate=0.1)
    return Setup(model, make_optimizer(model, spec, dense), getattr(collection, "router", None))


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
