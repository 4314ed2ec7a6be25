"""Predictions of sequences against the counts of real steps on two ranks."""

from __future__ import annotations

import functools
from collections.abc import Iterator
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
from hotrec.cost_model.demand import coverage
from hotrec.cost_model.forms import Workload
from hotrec.planner.machine import Machine
from hotrec.planner.plan import SplitTables
from hotrec.planner.predict import predict_shardings, predict_split
from hotrec.planner.situation import Situation, TableShape, build_situation
from hotrec.program.tables import default_sharders
from hotrec.runtime.traffic import count_sent_bytes, find_distinct_rows, lower_bound_bytes
from hotrec.types import (
    Partition,
    PipelineKind,
    PipelineSpec,
    Placement,
    TableOutput,
    TablePlacement,
)
from tests.distributed.test_program_forms import Batch
from tests.helpers.ranks import run_ranks

ROWS, DIM, BATCH, NUM_STEPS, NUM_COUNTED = {"item": 3000, "user": 400}, 16, 48, 40, 20
FEATURES = {"item": ["history", "candidate"], "user": ["who"]}
LONGEST = {"history": 30, "candidate": 1, "who": 1}
HOT = {"item": 60, "user": 40}
FUSED: Any = {"compute_kernel": "fused"}
# Every sharding that TorchRec has for unpooled tables on CPU; FBGEMM's dense kernel, and so
# data-parallel ones, are wrong there.
SHARDINGS: dict[str, dict[str, Any]] = {
    "row_wise": {"item": row_wise(**FUSED), "user": row_wise(**FUSED)},
    "table_wise": {"item": table_wise(rank=1, **FUSED), "user": table_wise(rank=0, **FUSED)},
    "both": {"item": column_wise(ranks=[0, 1], **FUSED), "user": table_wise(rank=0, **FUSED)},
}
# Row-wise Adagrad would have a state for each column-wise part of a row, and so other weights.
RULE = functools.partial(torch.optim.SGD, lr=0.1)


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.sequences = EmbeddingCollection(
            [
                EmbeddingConfig(
                    name=name,
                    num_embeddings=num_rows,
                    embedding_dim=DIM,
                    feature_names=FEATURES[name],
                )
                for name, num_rows in ROWS.items()
            ]
        )
        self.out = nn.Linear(3 * DIM, 1)

    def forward(self, batch: Batch) -> Any:
        found = self.sequences(batch.ids)
        sums = [
            torch.segment_reduce(found[n].values(), "sum", lengths=found[n].lengths(), initial=0.0)
            for n in LONGEST
        ]
        logits = self.out(torch.cat(sums, 1)).squeeze(-1)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)


def batches(rank: int, num: int = NUM_STEPS) -> Iterator[Batch]:
    """Independent lookups by Zipf's law, sequences of 0 to LONGEST ids."""
    rng = np.random.default_rng([3, rank])
    probs = {n: np.arange(1, rows + 1) ** -1.05 for n, rows in ROWS.items()}
    table_of = {feature: name for name, found in FEATURES.items() for feature in found}
    for _ in range(num):
        lengths = [rng.integers(longest == 1, longest + 1, BATCH) for longest in LONGEST.values()]
        ids = [
            rng.choice(ROWS[table_of[n]], of.sum(), p=(p := probs[table_of[n]]) / p.sum())
            for n, of in zip(LONGEST, lengths, strict=True)
        ]
        kjt = KeyedJaggedTensor(
            list(LONGEST),
            torch.from_numpy(np.concatenate(ids)),
            lengths=torch.from_numpy(np.concatenate(lengths).astype(np.int32)),
        )
        labels = torch.from_numpy(rng.integers(0, 2, BATCH).astype(np.float32))
        yield Batch(torch.zeros(BATCH, 0), kjt, labels)


def situation(counted: hotrec.Profile) -> Situation:
    machine = Machine(2, 2, "cpu", 0, 8 << 30, BATCH)
    shapes = [TableShape(n, DIM, 4 * DIM + 4, len(FEATURES[n]), TableOutput.expanded) for n in ROWS]
    num_dense = 3 * DIM + 1
    return build_situation(
        shapes,
        Workload(BATCH, 1.0, 0.0, num_dense),
        counted.build_histograms(),
        counted.num_samples,
        machine,
        (BUILTIN["cpu_1gbit"], None),
        counted.locality,
        counted.reuse,
    )


def counted_bytes(
    hot: Any, pipeline: str, plan: ShardingPlan | None = None
) -> tuple[dict[str, float], list[float]]:
    """The bytes that the mean rank sends in a step, by collective, and this rank's losses."""
    model, optimizer = hotrec.parallelize(
        Sequences(),
        hot,
        embedding_optimizer=RULE,
        dense_optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        pipeline=pipeline,
        plan=plan,
        batch_size=BATCH,
    )
    pipe = hotrec.Pipeline(model, optimizer, torch.device("cpu"))
    data = batches(dist.get_rank())
    with pipe as steps:
        losses = [steps.progress(data) for _ in range(4)]  # the pipeline is full
        with count_sent_bytes() as traffic:
            losses += [steps.progress(data) for _ in range(NUM_COUNTED)]
    found = torch.tensor([float(n) for n in traffic.sent_bytes.values()])
    dist.all_reduce(found)
    mean = found / (dist.get_world_size() * NUM_COUNTED)
    return dict(zip(traffic.sent_bytes, mean.tolist(), strict=True)), [float(x) for x in losses]


def compare() -> None:
    torch.set_num_threads(1)
    rank = dist.get_rank()
    counted = hotrec.profile(batches(rank), Sequences())
    on = situation(counted)
    all_losses = []
    for name, kinds in SHARDINGS.items():
        sharder = default_sharders()
        plan = ShardingPlan(
            {
                "sequences": construct_module_sharding_plan(
                    Sequences().sequences,
                    kinds,
                    sharder=next(s for s in sharder if s.module_type is EmbeddingCollection),
                    local_size=2,
                    world_size=2,
                    device_type="cpu",
                )
            }
        )
        sent, losses = counted_bytes("off", "sparse_dist", plan)
        all_losses.append(losses)
        step = predict_shardings(shardings_of(plan, ROWS), PipelineSpec(), on).step
        of = step.sent_bytes
        exchanged = of["ids_exchange"] + of["rows_exchange"] + of["grads_exchange"]
        assert exchanged == pytest.approx(sent["all_to_all"], rel=0.02), name
        assert of["other"] == pytest.approx(sent["all_reduce"]), name
    hot_rows = {name: np.argsort(-counted.counts[name])[:num] for name, num in HOT.items()}
    partition = Partition(ROWS, hot_rows)
    split = SplitTables(HOT, dict.fromkeys(ROWS, TablePlacement()))
    for kind in (PipelineKind.look_ahead, PipelineKind.sparse_dist):
        sent, losses = counted_bytes(Placement.alike(partition), kind.value)
        all_losses.append(losses)
        of = predict_split(split, PipelineSpec(kind), on).step
        assert of.total_sent_bytes == pytest.approx(sum(sent.values()), rel=0.05), kind
    for losses in all_losses[1:]:
        np.testing.assert_allclose(losses, all_losses[0], rtol=1e-5)
    # What a batch reads: as predicted, and the bound of exact training with it.
    tables = {feature: (name, DIM) for name, found in FEATURES.items() for feature in found}
    num_hot, num_ids, bounds = 0, 0, []
    for batch in batches(rank):
        distinct = {d: u.numel() for d, u in find_distinct_rows(batch.ids, tables).items()}
        bounds.append(lower_bound_bytes(distinct, 2, num_dense_values=3 * DIM + 1))
        for feature, of_feature in batch.ids.to_dict().items():
            is_hot = np.isin(of_feature.values().numpy(), hot_rows[tables[feature][0]])
            num_hot, num_ids = num_hot + int(is_hot.sum()), num_ids + is_hot.size
    cold = SplitTables({}, split.tables)
    of_cold = predict_split(cold, PipelineSpec(), on).step.sent_bytes
    predicted = sum(of_cold[stage] for stage in ("rows_exchange", "grads_exchange", "other"))
    assert predicted == pytest.approx(np.mean(bounds), rel=0.02)
    share = sum(coverage(d, HOT[d.name]) * d.lookups_per_sample for d in on.demands)
    share /= sum(d.lookups_per_sample for d in on.demands)
    assert share == pytest.approx(num_hot / num_ids, abs=0.02)


def test_bytes_of_sequences_are_those_of_real_steps() -> None:
    run_ranks(compare, 2, timeout_s=280)
