"""Steps at sizes where CUDA's kernels divide their work, which the parity cases never reach.

A row that is read thousands of times in a step, tables of more distinct rows than a bag may hold,
two dimensions. The oracle is TorchRec's unsharded collection on CPU with plain optimizers.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.gpu_day.kernels import check_tables
from benchmarks.gpu_day.tbe import DEVICE, UVM, UVM_CACHE, Tables
from hotrec.assemble.constraints import placement_constraints
from hotrec.assemble.torchrec_plan import make_plan
from hotrec.data.batch import Batch
from hotrec.embedding.canonical import gather_tables
from hotrec.embedding.collection import HotColdEmbeddingBagCollection
from hotrec.embedding.convert import shard
from hotrec.embedding.initialize import initial_rows, initialize_embeddings
from hotrec.embedding.optimizers import make_optimizer
from hotrec.embedding.pooling import MAX_IDS
from hotrec.embedding.sharding import HotColdSharder
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.models.task import ClickTask
from hotrec.planner.machine import Machine
from hotrec.runtime.ranks import Ranks
from hotrec.train.pipelines import make_pipeline
from hotrec.types import (
    OptimizerKind,
    Partition,
    PipelineKind,
    PipelineSpec,
    Placement,
    Tier,
)
from tests.exact.reference import EPS, RATE, update_rows

pytestmark = pytest.mark.gpu
# name -> rows, dimension
TABLES = {"few": (40, 8), "many": (6000, 8), "wide": (900, 16)}
BATCH_SIZE, NUM_DENSE, NUM_STEPS, SEED, TOLERANCE = 8192, 4, 3, 9, 1e-5
RUN_OF_TBE = 1024  # equal ids that FBGEMM's backward adds up without splitting them
KINDS = list(OptimizerKind)


def configs() -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[name])
        for name, (rows, dim) in TABLES.items()
    ]


def make_batch(step: int) -> Batch:
    generator = torch.Generator().manual_seed(100 + step)
    ids = [
        # Cubed: the first rows are read by most samples.
        (torch.rand(BATCH_SIZE, generator=generator) ** 3 * rows).long()
        for rows, _ in TABLES.values()
    ]
    return Batch(
        dense=torch.randn(BATCH_SIZE, NUM_DENSE, generator=generator),
        sparse=KeyedJaggedTensor(
            keys=list(TABLES),
            values=torch.cat(ids),
            lengths=torch.ones(len(TABLES) * BATCH_SIZE, dtype=torch.int32),
        ),
        labels=torch.rand(BATCH_SIZE, generator=generator).round(),
        weights=torch.ones(BATCH_SIZE),
        num_global_samples=BATCH_SIZE,
    )


class Click(nn.Module):
    """(dense, sparse) -> logits."""

    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.out = nn.Linear(NUM_DENSE + sum(dim for _, dim in TABLES.values()), 1)
        generator = torch.Generator().manual_seed(11)
        with torch.no_grad():
            self.out.weight.uniform_(-0.5, 0.5, generator=generator)
            self.out.bias.zero_()

    def forward(self, dense: torch.Tensor, sparse: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.embeddings(sparse).to_dict()
        return self.out(torch.cat([dense, *[pooled[name] for name in TABLES]], dim=1))


@cache
def reference(kind: OptimizerKind) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of the unsplit model on CPU."""
    embeddings = EmbeddingBagCollection(tables=configs())
    weights = {name: embeddings.embedding_bags[name].weight for name in TABLES}
    for name, (rows, dim) in TABLES.items():
        weights[name].data.copy_(initial_rows(SEED, name, torch.arange(rows), dim, rows))
    model, losses = Click(embeddings), []
    states: dict[str, dict[str, torch.Tensor]] = {name: {} for name in TABLES}
    dense = torch.optim.SGD(model.out.parameters(), lr=0.1)
    for step in range(NUM_STEPS):
        batch = make_batch(step)
        model.zero_grad()
        logits = model(batch.dense, batch.sparse).squeeze(-1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        loss.backward()
        with torch.no_grad():
            for name, jagged in batch.sparse.to_dict().items():
                given = (jagged.values().unique(), step + 1, RATE)
                update_rows(kind.value, weights[name], states[name], *given)
        dense.step()
        losses.append(float(loss.detach()))
    return losses, {name: weight.detach() for name, weight in weights.items()}


def train(
    kind: OptimizerKind, tier: Tier, pipeline_kind: str, device: torch.device, num_hot: int = 10
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same with hotrec on the device."""
    num_rows = {name: rows for name, (rows, _) in TABLES.items()}
    # Every third row: popular ones are hot and cold.
    hot = {name: 3 * np.arange(num_hot, dtype=np.int64) for name in TABLES}
    # Slots must hold the rows of some batches, which read most of these tables.
    placement = Placement.alike(
        Partition(num_rows, hot), tier, 1.0 if tier is Tier.CACHED else None
    )
    embeddings = HotColdEmbeddingBagCollection(configs(), placement, device=torch.device("meta"))
    task, spec = ClickTask(Click(embeddings), 1), OptimizerSpec(kind, RATE, EPS)
    task.model.out.to(device)
    is_ahead = pipeline_kind == "look_ahead"
    sharders = [HotColdSharder(spec)]
    machine = Machine(1, 1, device.type, 1 << 30, 1 << 33, BATCH_SIZE)
    plan = make_plan(task, sharders, machine, placement_constraints(placement))
    model = shard(task, plan, sharders, device, data_parallel=not is_ahead)
    initialize_embeddings(model, SEED)
    optimizer = make_optimizer(model, spec, OptimizerSpec(OptimizerKind.sgd, learning_rate=0.1))
    of_pipeline = PipelineSpec(PipelineKind[pipeline_kind], window=0)
    pipeline = make_pipeline(of_pipeline, model, optimizer, device)
    pipeline.start()
    stream = (make_batch(step) for step in range(NUM_STEPS))
    losses = [pipeline.progress(stream)[0] for _ in range(NUM_STEPS)]
    pipeline.flush()
    pipeline.close()
    return [float(loss) for loss in losses], gather_tables(model)


def test_the_batches_are_large_enough() -> None:
    for name, jagged in make_batch(0).sparse.to_dict().items():
        rows, counts = jagged.values().unique(return_counts=True)
        assert int(counts.max()) > MAX_IDS, name
        if name != "few":
            assert rows.numel() > 512
    assert int(make_batch(0).sparse["few"].values().bincount().max()) > RUN_OF_TBE


WAYS = [(kind, Tier.DEVICE) for kind in ("base", "sparse_dist", "look_ahead")]
WAYS.append(("look_ahead", Tier.CACHED))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("pipeline", "tier"), WAYS)
def test_steps_equal_the_unsplit_reference(
    gpu: Ranks, pipeline: str, tier: Tier, kind: OptimizerKind
) -> None:
    losses, weights = train(kind, tier, pipeline, gpu.device)
    expected_losses, expected = reference(kind)
    assert losses == pytest.approx(expected_losses, abs=TOLERANCE)
    for name, weight in expected.items():
        assert float((weights[name] - weight).abs().max()) <= TOLERANCE, name


@pytest.mark.parametrize("kind", KINDS)
def test_cold_rows_repeat_bit_for_bit(gpu: Ranks, kind: OptimizerKind) -> None:
    """No flag is needed: an owner is asked for a row at most once by each rank."""
    losses, weights = train(kind, Tier.DEVICE, "sparse_dist", gpu.device, num_hot=0)
    again, weights_again = train(kind, Tier.DEVICE, "sparse_dist", gpu.device, num_hot=0)
    assert losses == again
    for name, weight in weights.items():
        assert torch.equal(weight, weights_again[name]), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tier", [DEVICE, UVM, UVM_CACHE])
@pytest.mark.parametrize("is_pooled", [False, True], ids=["rows", "pooled"])
def test_one_step_of_fbgemm_follows_the_rule(
    gpu: Ranks, is_pooled: bool, tier: str, kind: OptimizerKind
) -> None:
    """A row that is read 3,000 times, one 200 times, one 20 times and thousands once."""
    tables = Tables(3, 5000, 128, OptimizerSpec(kind, RATE, EPS), tier, is_pooled=is_pooled)
    assert check_tables(tables, gpu.device)["largest_difference"] <= TOLERANCE
