"""A small hot/cold DLRM, its batches, and its training on the device at hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.assemble.constraints import placement_constraints
from hotrec.assemble.torchrec_plan import make_plan
from hotrec.data.batch import Batch
from hotrec.embedding.collection import HotColdEmbeddingBagCollection
from hotrec.embedding.convert import shard
from hotrec.embedding.initialize import initialize_embeddings
from hotrec.embedding.optimizers import make_optimizer
from hotrec.embedding.sharding import HotColdSharder
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.models.task import ClickTask
from hotrec.models.zoo import build_architecture
from hotrec.planner.machine import Machine
from hotrec.train.pipelines import make_pipeline
from hotrec.types import (
    HotExchange,
    ModelKind,
    OptimizerKind,
    Partition,
    PipelineKind,
    PipelineSpec,
    Placement,
    RowFetch,
    TablePlacement,
    Tier,
)
from tests.helpers.dense import shape_of
from tests.helpers.reference import TinyClickModel

NUM_DENSE = 3
DIM = 8


@dataclass(frozen=True)
class Run:
    """One training.

    Args:
        pipeline: its name.
        routing: "loader" (batches come routed and pinned) or "device".
        optimizer: of the rows.
        dims: embedding dimensions; with 2 the model is an MLP, since a DLRM has one.
        num_rows: of each table.
        hot: hot rows of each table.
        most_ids: of a bag.
        batch_size: of a rank.
        depth: of look_ahead.
        tier: of the cold rows.
        row_fetch: how cold rows in tier cached come to the device.
        skew: power of the uniform draw; the higher, the more often low rows are read.
        skews: of tables that have another.
        exchange: of hot gradients.
        micro_batches: of look_ahead.
    """

    pipeline: str = "sparse_dist"
    routing: str = "loader"
    optimizer: str = "sgd"
    dims: int = 1
    num_rows: dict[str, int] = field(default_factory=lambda: {"a": 200, "b": 120, "c": 60, "d": 90})
    hot: dict[str, int] = field(default_factory=lambda: {"a": 20, "b": 10, "d": 12})
    most_ids: int = 3
    batch_size: int = 16
    depth: int = 1
    tier: str = "device"
    row_fetch: str = "staged"
    skew: float = 2.0
    skews: dict[str, float] = field(default_factory=dict)
    exchange: str = "auto"
    micro_batches: bool = False


def configs(run: Run) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(
            name=table,
            num_embeddings=num_rows,
            embedding_dim=DIM // 2 if run.dims == 2 and table == "c" else DIM,
            feature_names=[f"of_{table}"],
            pooling=PoolingType.MEAN if table == "b" else PoolingType.SUM,
        )
        for table, num_rows in run.num_rows.items()
    ]


class Training:
    """A model, its optimizer and its pipeline."""

    def __init__(self, run: Run, device: torch.device) -> None:
        self.run, self.device = run, device
        world_size = dist.get_world_size()
        rng = np.random.default_rng(3)
        hot = {table: rng.permutation(num).astype(np.int64) for table, num in run.hot.items()}
        partition = Partition(run.num_rows, hot)
        load = {"host_cached": 0.2, "cached": 0.6}.get(run.tier)
        placement = Placement(
            partition,
            dict.fromkeys(
                run.num_rows,
                TablePlacement(
                    tier=Tier(run.tier), cache_load_frac=load, row_fetch=RowFetch(run.row_fetch)
                ),
            ),
        )
        tables = configs(run)
        embeddings = HotColdEmbeddingBagCollection(tables, placement, device=torch.device("meta"))
        self.router = embeddings.router
        if run.dims == 1:
            features = [(name, table.name) for table in tables for name in table.feature_names]
            shape = shape_of(
                ModelKind.dlrm, NUM_DENSE, features, DIM, dense_layer_sizes=[8, DIM],
                over_layer_sizes=[8, 1],
            )  # fmt: skip
            model: Any = build_architecture(shape, embeddings, 1, device)
        else:
            model = TinyClickModel(embeddings, NUM_DENSE, sum(t.embedding_dim for t in tables))
            model.hidden.to(device)
            model.out.to(device)
        task = ClickTask(model, world_size)
        kind = OptimizerKind(run.optimizer)
        spec = OptimizerSpec(kind, learning_rate=0.1, eps=1e-3)
        exchange = HotExchange(run.exchange)
        sharders: list[Any] = [HotColdSharder(spec, exchange)]
        machine = Machine(world_size, world_size, device.type, 1 << 30, 1 << 33, 8)
        constraints = placement_constraints(placement, device=device.type)
        plan = make_plan(task, sharders, machine, constraints)
        is_ahead = run.pipeline == "look_ahead"
        self.model = shard(task, plan, sharders, device, data_parallel=not is_ahead)
        initialize_embeddings(self.model, 5)
        dense = OptimizerSpec(OptimizerKind.sgd, learning_rate=0.1)
        self.optimizer = make_optimizer(self.model, spec, dense)
        self.restart()

    def restart(self) -> None:
        """A new pipeline around the same model."""
        run, device = self.run, self.device
        spec = PipelineSpec(
            PipelineKind[run.pipeline],
            depth=run.depth,
            window=0,
            micro_batches=run.micro_batches,
        )
        exchange = HotExchange(run.exchange)
        self.pipeline = make_pipeline(
            spec, self.model, self.optimizer, device, hot_exchange=exchange
        )
        self.pipeline.start()

    def batch(self, step: int) -> Batch:
        """This rank's share, on the host; pinned where the device is a GPU."""
        run = self.run
        rng = np.random.default_rng((11, step, dist.get_rank()))
        ids, lengths = [], []
        for table, num_rows in run.num_rows.items():
            counts = rng.integers(0, run.most_ids + 1, run.batch_size)
            draws = rng.random(int(counts.sum())) ** run.skews.get(table, run.skew)
            ids.append((draws * num_rows).astype(np.int64))
            lengths.append(counts)
        sparse: Any = KeyedJaggedTensor(
            keys=[f"of_{table}" for table in run.num_rows],
            values=torch.from_numpy(np.concatenate(ids)),
            lengths=torch.from_numpy(np.concatenate(lengths).astype(np.int32)),
            stride=run.batch_size,
        )
        if run.routing == "loader":
            sparse = self.router(sparse)
        batch = Batch(
            torch.from_numpy(rng.standard_normal((run.batch_size, NUM_DENSE)).astype(np.float32)),
            sparse,
            torch.from_numpy(rng.integers(0, 2, run.batch_size).astype(np.float32)),
            torch.ones(run.batch_size),
            run.batch_size * dist.get_world_size(),
        )
        return batch.pin_memory() if self.device.type == "cuda" else batch

    def batches(self, begin: int, end: int) -> Iterator[Batch]:
        return (self.batch(step) for step in range(begin, end))

    def close(self) -> None:
        self.pipeline.drain()
        self.pipeline.close()
