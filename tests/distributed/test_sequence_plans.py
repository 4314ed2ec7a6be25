"""Predicted bytes of sequences against the counts of real steps on two ranks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import hotrec
from hotrec.assemble.torchrec_plan import shardings_of
from hotrec.cost_model.builtin import BUILTIN
from hotrec.cost_model.step import Workload
from hotrec.data.batch import Batch
from hotrec.planner.machine import Machine
from hotrec.planner.plan import SplitTables
from hotrec.planner.predict import predict_shardings, predict_split
from hotrec.planner.situation import Situation, TableShape, build_situation
from hotrec.program.tables import default_sharders
from hotrec.runtime.traffic import count_sent_bytes
from hotrec.types import (
    Partition,
    PipelineKind,
    PipelineSpec,
    Placement,
    TableOutput,
    TablePlacement,
)
from tests.helpers.ranks import run_ranks

ROWS, DIM, BATCH, NUM_STEPS, NUM_COUNTED = {"item": 3000, "user": 400}, 16, 48, 40, 20
FEATURES = {"item": ["history", "candidate"], "user": ["who"]}
LONGEST = {"history": 30, "candidate": 1, "who": 1}
HOT = {"item": 60, "user": 40}
NUM_DENSE = 3 * DIM + 1
FUSED: Any = {"compute_kernel": "fused"}
# Every sharding that TorchRec has for unpooled tables on CPU; FBGEMM's dense kernel, and so
# data-parallel ones, are wrong there.
SHARDINGS: dict[str, dict[str, Any]] = {
    "row_wise": {"item": row_wise(**FUSED), "user": row_wise(**FUSED)},
    "table_wise": {"item": table_wise(rank=1, **FUSED), "user": table_wise(rank=0, **FUSED)},
    "both": {"item": column_wise(ranks=[0, 1], **FUSED), "user": table_wise(rank=0, **FUSED)},
}


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.sequences = EmbeddingCollection(
            [
                EmbeddingConfig(
                    name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=FEATURES[name]
                )
                for name, rows in ROWS.items()
            ]
        )
        self.out = nn.Linear(3 * DIM, 1)

    def forward(self, batch: Batch) -> torch.Tensor:
        found = self.sequences(batch.sparse)
        sums = [
            torch.segment_reduce(found[n].values(), "sum", lengths=found[n].lengths(), initial=0.0)
            for n in LONGEST
        ]
        logits = self.out(torch.cat(sums, 1)).squeeze(-1)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)


def batches(rank: int) -> Iterator[Batch]:
    """Independent lookups by Zipf's law, sequences of 0 to LONGEST ids."""
    rng = np.random.default_rng([3, rank])
    probs = {n: np.arange(1, rows + 1) ** -1.05 for n, rows in ROWS.items()}
    table_of = {feature: name for name, found in FEATURES.items() for feature in found}
    for _ in range(NUM_STEPS):
        lengths = [rng.integers(longest == 1, longest + 1, BATCH) for longest in LONGEST.values()]
        ids = [
            rng.choice(ROWS[table_of[n]], of.sum(), p=(p := probs[table_of[n]]) / p.sum())
            for n, of in zip(LONGEST, lengths, strict=True)
        ]
        sparse = KeyedJaggedTensor(
            list(LONGEST),
            torch.from_numpy(np.concatenate(ids)),
            lengths=torch.from_numpy(np.concatenate(lengths).astype(np.int32)),
        )
        labels = torch.from_numpy(rng.integers(0, 2, BATCH).astype(np.float32))
        yield Batch(torch.zeros(BATCH, 0), sparse, labels, torch.ones(BATCH), 2 * BATCH)


def situation(counted: hotrec.Profile) -> Situation:
    shapes = [TableShape(n, DIM, 4 * DIM + 4, len(FEATURES[n]), TableOutput.expanded) for n in ROWS]
    return build_situation(
        shapes, Workload(BATCH, 1.0, 0.0, NUM_DENSE), counted.build_histograms(),
        counted.num_samples, Machine(2, 2, "cpu", 0, 8 << 30, BATCH), (BUILTIN["cpu_1gbit"], None),
        counted.locality, counted.reuse,
    )  # fmt: skip


def counted_bytes(hot: Any, pipeline: str, plan: ShardingPlan | None = None) -> dict[str, float]:
    """The bytes that the mean rank sends in a step, by collective."""
    rule = partial(torch.optim.SGD, lr=0.1)
    model, optimizer = hotrec.parallelize(
        Sequences(), hot, embedding_optimizer=rule, dense_optimizer=rule, pipeline=pipeline,
        plan=plan, batch_size=BATCH,
    )  # fmt: skip
    data = batches(dist.get_rank())
    with hotrec.Pipeline(model, optimizer, torch.device("cpu")) as steps:
        for _ in range(4):  # the pipeline is full
            steps.progress(data)
        with count_sent_bytes() as traffic:
            for _ in range(NUM_COUNTED):
                steps.progress(data)
    found = torch.tensor([float(n) for n in traffic.sent_bytes.values()])
    dist.all_reduce(found)
    mean = found / (dist.get_world_size() * NUM_COUNTED)
    return dict(zip(traffic.sent_bytes, mean.tolist(), strict=True))


def compare() -> None:
    torch.set_num_threads(1)
    counted = hotrec.profile(batches(dist.get_rank()), Sequences())
    on = situation(counted)
    sharder = next(s for s in default_sharders() if s.module_type is EmbeddingCollection)
    for name, kinds in SHARDINGS.items():
        of_module = construct_module_sharding_plan(
            Sequences().sequences, kinds, sharder=sharder, local_size=2, world_size=2,
            device_type="cpu",
        )  # fmt: skip
        plan = ShardingPlan({"sequences": of_module})
        sent = counted_bytes("off", "sparse_dist", plan)
        of = predict_shardings(shardings_of(plan, ROWS), PipelineSpec(), on).step.sent_bytes
        exchanged = of["ids_exchange"] + of["rows_exchange"] + of["grads_exchange"]
        assert exchanged == pytest.approx(sent["all_to_all"], rel=0.02), name
        assert of["other"] == pytest.approx(sent["all_reduce"]), name
    hot_rows = {name: np.argsort(-counted.counts[name])[:num] for name, num in HOT.items()}
    placement = Placement.alike(Partition(ROWS, hot_rows))
    tables = dict.fromkeys(ROWS, TablePlacement())
    for kind in (PipelineKind.look_ahead, PipelineKind.sparse_dist):
        sent = counted_bytes(placement, kind.value)
        predicted = predict_split(SplitTables(HOT, tables), PipelineSpec(kind), on).step
        assert predicted.total_sent_bytes == pytest.approx(sum(sent.values()), rel=0.05), kind


def test_bytes_of_sequences_are_those_of_real_steps() -> None:
    run_ranks(compare, 2, timeout_s=280)
