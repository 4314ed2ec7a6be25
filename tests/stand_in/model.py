"""A small hot/cold DLRM or model of sequences, its batches, its training on the device at hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.assemble.constraints import placement_constraints
from hotrec.assemble.torchrec_plan import make_plan
from hotrec.data.batch import Batch
from hotrec.embedding.collection import (
    HotColdEmbeddingBagCollection,
    HotColdEmbeddingCollection,
    SequenceLayout,
)
from hotrec.embedding.convert import shard
from hotrec.embedding.initialize import initialize_embeddings
from hotrec.embedding.late import LateLinear
from hotrec.embedding.optimizers import make_optimizer
from hotrec.embedding.packed import PackedLayout
from hotrec.embedding.sharding import HotColdSequenceSharder, HotColdSharder
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.models.sequence import sum_rows
from hotrec.models.task import ClickTask
from hotrec.models.zoo import build_architecture
from hotrec.planner.machine import Machine
from hotrec.train.pipelines import make_pipeline
from hotrec.types import (
    Exchange,
    ModelKind,
    OptimizerKind,
    Partition,
    PipelineKind,
    PipelineSpec,
    Placement,
    TablePlacement,
    Tier,
)
from tests.helpers.dense import shape_of

NUM_DENSE, DIM, MOST_IDS = 3, 8, 3
HOT = {"a": 20, "b": 10, "d": 12}
# Of models of sequences; the candidate and the history, with a column beside it, read one table.
FEATURES = {"a": ["of_a", "seen"], "b": ["seen_b"], "c": ["of_c"], "d": ["of_d"]}
HISTORY = ["seen", "seen_b"]


@dataclass(frozen=True)
class Run:
    """One training.

    Args:
        pipeline: its name.
        routing: "loader" (batches come routed and pinned) or "device".
        optimizer: of the rows.
        num_rows: of each table.
        batch_size: of a rank.
        tier: of the cold rows.
        skews: of tables whose low rows are read more or less often than those of the others.
        micro_batches: of look_ahead.
        pooled: a table whose columns its owner sends pooled, in the default group; "" for none.
        kind: dlrm, hstu, sasrec, or packed for ``LateLinear`` over a packed collection.
    """

    pipeline: str = "sparse_dist"
    routing: str = "loader"
    optimizer: str = "sgd"
    num_rows: dict[str, int] = field(default_factory=lambda: {"a": 200, "b": 120, "c": 60, "d": 90})
    batch_size: int = 16
    tier: str = "device"
    skews: dict[str, float] = field(default_factory=dict)
    micro_batches: bool = False
    pooled: str = ""
    kind: str = "dlrm"

    @property
    def reads_sequences(self) -> bool:
        return self.kind != "dlrm"


def configs(run: Run) -> list[Any]:
    if run.reads_sequences:
        return [
            EmbeddingConfig(
                name=table, num_embeddings=num, embedding_dim=DIM, feature_names=FEATURES[table]
            )
            for table, num in run.num_rows.items()
        ]
    return [
        EmbeddingBagConfig(
            name=table,
            num_embeddings=num_rows,
            embedding_dim=DIM,
            feature_names=[f"of_{table}"],
            pooling=PoolingType.MEAN if table == "b" else PoolingType.SUM,
        )
        for table, num_rows in run.num_rows.items()
    ]


class PackedLayers(nn.Module):
    """A logit from ``LateLinear`` over the history, and from the candidate and its context."""

    def __init__(self) -> None:
        super().__init__()
        self.late = LateLinear([DIM, DIM], DIM)
        self.out = nn.Linear(NUM_DENSE + 3 * DIM, 1)

    def forward(self, dense_BN: torch.Tensor, found: Mapping[str, Any]) -> torch.Tensor:
        history = [found[name] for name in HISTORY]
        sums = [sum_rows((self.late(history).relu(), history[0].lengths()))]
        for name in ("of_a", "of_c"):
            expanded = found[name].materialize()
            sums.append(sum_rows((expanded.values(), expanded.lengths())))
        logits: torch.Tensor = self.out(torch.cat((dense_BN, *sums), dim=1))
        return logits


class PackedModel(nn.Module):
    """Packed sequences, and their layers."""

    def __init__(self, sequences: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.sequences = sequences
        torch.manual_seed(1)
        self.layers = PackedLayers().to(device)

    def forward(self, dense_BN: torch.Tensor, sparse: Any) -> torch.Tensor:
        logits: torch.Tensor = self.layers(dense_BN, self.sequences(sparse))
        return logits


def _sequence_model(run: Run, tables: Sequence[Any], sequences: Any, device: torch.device) -> Any:
    if run.kind == "packed":
        return PackedModel(sequences, device)
    features = [(name, table.name) for table in tables for name in table.feature_names]
    shape = shape_of(
        ModelKind[run.kind], NUM_DENSE, features, DIM, dense_layer_sizes=[], over_layer_sizes=[8, 1]
    )
    roles = {"side": HISTORY[1:], "context": ["of_c"], "max_length": MOST_IDS}
    shape = replace(shape, args={**shape.args, **roles})
    return build_architecture(shape, sequences, 1, device)


class Training:
    """A model, its optimizer and its pipeline."""

    def __init__(self, run: Run, device: torch.device) -> None:
        self.run, self.device = run, device
        world_size = dist.get_world_size()
        rng = np.random.default_rng(3)
        hot = {table: rng.permutation(num).astype(np.int64) for table, num in HOT.items()}
        partition = Partition(run.num_rows, hot)
        load = 0.6 if run.tier == "cached" else None
        of_table = TablePlacement(tier=Tier(run.tier), cache_load_frac=load)
        placed = dict.fromkeys(run.num_rows, of_table)
        if run.pooled:
            placed[run.pooled] = replace(of_table, exchange=Exchange.POOLED)
        placement = Placement(partition, placed)
        tables = configs(run)
        make: Any = HotColdEmbeddingBagCollection
        if run.reads_sequences:
            layout = PackedLayout if run.kind == "packed" else SequenceLayout
            make = partial(HotColdEmbeddingCollection, layout=layout)
        embeddings = make(tables, placement, device=torch.device("meta"))
        self.router = embeddings.router
        model: Any
        if run.reads_sequences:
            model = _sequence_model(run, tables, embeddings, device)
        else:
            features = [(name, table.name) for table in tables for name in table.feature_names]
            shape = shape_of(
                ModelKind.dlrm, NUM_DENSE, features, DIM, dense_layer_sizes=[8, DIM],
                over_layer_sizes=[8, 1],
            )  # fmt: skip
            model = build_architecture(shape, embeddings, 1, device)
        task = ClickTask(model, world_size)
        kind = OptimizerKind(run.optimizer)
        spec = OptimizerSpec(kind, learning_rate=0.1, eps=1e-3)
        sharder = HotColdSequenceSharder if run.reads_sequences else HotColdSharder
        sharders: list[Any] = [sharder(spec)]
        machine = Machine(world_size, world_size, device.type, 1 << 30, 1 << 33, 8)
        constraints = placement_constraints(placement, device=device.type)
        plan = make_plan(task, sharders, machine, constraints)
        is_ahead = run.pipeline == "look_ahead"
        self.model = shard(task, plan, sharders, device, data_parallel=not is_ahead)
        initialize_embeddings(self.model, 5)
        dense = OptimizerSpec(OptimizerKind.sgd, learning_rate=0.1)
        self.optimizer = make_optimizer(self.model, spec, dense)
        spec_of = PipelineSpec(
            PipelineKind[run.pipeline], window=0, micro_batches=run.micro_batches
        )
        self.pipeline = make_pipeline(spec_of, self.model, self.optimizer, device)
        self.pipeline.start()

    def batch(self, step: int) -> Batch:
        """This rank's share, on the host; pinned where the device is a GPU."""
        run = self.run
        rng = np.random.default_rng((11, step, dist.get_rank()))
        ids, lengths, keys = [], [], []
        of_history = rng.integers(0, MOST_IDS + 1, run.batch_size)
        for table in configs(run):
            for key in table.feature_names:
                counts = of_history
                if key not in HISTORY:
                    counts = rng.integers(0, MOST_IDS + 1, run.batch_size)
                draws = rng.random(int(counts.sum())) ** run.skews.get(table.name, 2.0)
                ids.append((draws * table.num_embeddings).astype(np.int64))
                lengths.append(counts)
                keys.append(key)
        sparse: Any = KeyedJaggedTensor(
            keys=keys,
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
        self.pipeline.flush()
        self.pipeline.close()
