"""Precision, compiling and clipping of the dense layers, by pipeline, against an unsplit model."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from hotrec.assemble.constraints import hot_cold_constraints
from hotrec.data.batch import Batch
from hotrec.embedding.collection import HotColdEmbeddingBagCollection
from hotrec.embedding.optimizers import make_optimizer
from hotrec.embedding.sharding import HotColdSharder
from hotrec.embedding.tables import gather_tables
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.models.dense import set_up_dense_layers
from hotrec.models.task import ClickTask
from hotrec.train.dense_sync import dense_parameters
from hotrec.train.pipelines import Pipeline, make_pipeline
from hotrec.types import ModelKind, OptimizerKind, Partition, PipelineKind, PipelineSpec, Precision
from tests.distributed.setups import (
    assert_same_on_ranks,
    mean_over_ranks,
    shard_task,
    zoo_batch,
    zoo_model,
    zoo_tables,
)
from tests.helpers.checks import run_checks
from tests.helpers.dense import POOLED_KINDS
from tests.helpers.ranks import run_ranks
from tests.helpers.samples import only_whole

CPU = torch.device("cpu")
NUM_ROWS = {"a": 40, "b": 9, "c": 17}
PARTITION = Partition(NUM_ROWS, {"a": torch.arange(6).numpy(), "c": torch.arange(17).numpy()})
# The last batch is a smaller one.
SIZES = (6, 6, 6, 3)
LR = 0.3
PIPELINES = ("base", "sparse_dist", "look_ahead", "micro_batches")
# Above the norm of some steps and below that of others.
MAX_NORM = 0.13


def make_model(kind: ModelKind, embeddings: nn.Module, **how: Any) -> nn.Module:
    model = zoo_model(kind, embeddings, len(how.get("label_weights", [None])))
    precision = how.get("precision", Precision.fp32)
    set_up_dense_layers(model, CPU, precision, is_compiled=how.get("is_compiled", False))
    return model


def batches(rank: int, world_size: int, *, is_weighted: bool = False) -> Iterator[Batch]:
    """With several labels and weights, if asked."""
    for step, size in enumerate(SIZES):
        batch = zoo_batch(NUM_ROWS, step, rank, size, size * world_size)
        if is_weighted:
            rng = np.random.default_rng([step, rank])
            labels = torch.from_numpy(rng.integers(0, 2, (size, 2)).astype(np.float32))
            weights = torch.from_numpy(rng.random(size).astype(np.float32))
            batch = replace(batch, labels=labels, weights=weights)
        yield batch


def shard_model(kind: ModelKind, pipeline: str, **how: Any) -> tuple[Any, Any, Pipeline]:
    spec = OptimizerSpec(OptimizerKind.sgd, learning_rate=LR)
    tables, meta = zoo_tables(NUM_ROWS), torch.device("meta")
    embeddings = HotColdEmbeddingBagCollection(tables, PARTITION, device=meta)
    layers = make_model(kind, embeddings, **how)
    task = ClickTask(layers, dist.get_world_size(), how.get("label_weights"))
    constraints = hot_cold_constraints(tables, PARTITION)
    is_ahead = pipeline in ("look_ahead", "micro_batches")
    sharder = HotColdSharder(spec)
    model = shard_task(task, sharder, constraints, data_parallel=not is_ahead, seed=1)
    optimizer = make_optimizer(model, spec, spec)
    of_pipeline = PipelineSpec(
        PipelineKind.look_ahead if is_ahead else PipelineKind[pipeline],
        micro_batches=pipeline == "micro_batches",
    )
    made = make_pipeline(of_pipeline, model, optimizer, CPU, how.get("grad_clip_norm"))
    return model, optimizer, made


def train_plainly(
    kind: ModelKind, weights: dict[str, torch.Tensor], **how: Any
) -> tuple[list[float], dict[str, torch.Tensor], list[float]]:
    """The unsplit model on the concatenated batches: losses, weights, norms before clipping."""
    model = make_model(kind, EmbeddingBagCollection(zoo_tables(NUM_ROWS)), **how)
    bags = model.sparse_arch.embedding_bag_collection.embedding_bags
    with torch.no_grad():
        for table, weight in weights.items():
            bags[table].weight.copy_(weight)
    layers = [p for name, p in model.named_parameters() if "embedding_bags" not in name]
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses, norms = [], []
    label_weights = how.get("label_weights", {})
    of_ranks = (
        batches(rank, dist.get_world_size(), is_weighted=bool(label_weights)) for rank in range(2)
    )
    for parts in zip(*of_ranks, strict=True):
        logits = [model(part.dense, part.sparse).squeeze(-1).float() for part in parts]
        labels = torch.cat([part.labels for part in parts])
        optimizer.zero_grad()
        if label_weights:
            by_label = F.binary_cross_entropy_with_logits(
                torch.cat(logits), labels, reduction="none"
            )
            summed = by_label @ torch.tensor([*label_weights.values()])
            loss = (torch.cat([part.weights for part in parts]) * summed).mean()
        else:
            loss = F.binary_cross_entropy_with_logits(torch.cat(logits), labels)
        loss.backward()
        max_norm = how.get("grad_clip_norm") or float("inf")
        norms.append(float(nn.utils.clip_grad_norm_(layers, max_norm)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {table: bags[table].weight.detach() for table in weights} | dense(model), norms


def dense(model: nn.Module) -> dict[str, torch.Tensor]:
    """Dense weights by their names in the click model."""
    return {
        name[name.index(part) :]: parameter.detach().clone()
        for name, parameter in dense_parameters(model).items()
        for part in ("dense_arch", "inter_arch", "over_arch", "layers.")
        if part in name
    }


def train_sharded(
    kind: ModelKind, pipeline: str, **how: Any
) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Losses, weights and the rows before the first step; evaluated in between and afterwards."""
    model, _, made = shard_model(kind, pipeline, **how)
    before = gather_tables(model)
    made.start()
    losses = []
    is_weighted = "label_weights" in how
    iterator = batches(dist.get_rank(), dist.get_world_size(), is_weighted=is_weighted)
    for _ in SIZES:
        loss, logits, _ = made.progress(iterator)
        assert loss.dtype is logits.dtype is torch.float32
        losses.append(mean_over_ranks(loss))
    made.flush()
    weights = gather_tables(model) | dense(model)
    model.eval()
    made.start()
    with torch.no_grad():
        made.progress(batches(dist.get_rank(), dist.get_world_size(), is_weighted=is_weighted))
    model.train()
    made.close()
    assert all(weight.dtype is torch.float32 for weight in weights.values())
    return losses, weights, before


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def clipped_as_unsplit() -> None:
    for kind in POOLED_KINDS:
        for pipeline in PIPELINES:
            got, weights, before = train_sharded(kind, pipeline, grad_clip_norm=MAX_NORM)
            expected, plain, norms = train_plainly(kind, before, grad_clip_norm=MAX_NORM)
            case = f"{kind} {pipeline}"
            assert max(norms) > MAX_NORM > min(norms), norms
            assert got == pytest.approx(expected, abs=1e-5), case
            assert difference(weights, plain) < 1e-5, case
            for weight in weights.values():
                assert_same_on_ranks(weight)


def bf16_by_pipeline() -> None:
    for kind in POOLED_KINDS:
        of_pipeline = {}
        for pipeline in PIPELINES:
            got, weights, before = train_sharded(kind, pipeline, precision=Precision.bf16)
            expected, plain, _ = train_plainly(kind, before, precision=Precision.bf16)
            exact, _, _ = train_plainly(kind, before)
            # The same products, but weight gradients are rounded by rank and by part of a batch.
            assert got == pytest.approx(expected, abs=5e-3), (kind, pipeline)
            assert difference(weights, plain) < 2e-2, (kind, pipeline)
            assert max(abs(a - b) for a, b in zip(got, exact, strict=True)) > 1e-5
            of_pipeline[pipeline] = got, weights
        losses, weights = of_pipeline["base"]
        for pipeline in ("sparse_dist", "look_ahead"):
            assert of_pipeline[pipeline][0] == pytest.approx(losses, abs=1e-6), (kind, pipeline)
            assert difference(of_pipeline[pipeline][1], weights) < 1e-6, (kind, pipeline)


def labels_and_weights_as_unsplit() -> None:
    how = {"label_weights": {"label0": 0.5, "label1": 2.0}}
    for kind in (ModelKind.mmoe, ModelKind.dlrm):
        for pipeline in PIPELINES:
            got, weights, before = train_sharded(kind, pipeline, **how)
            expected, plain, _ = train_plainly(kind, before, **how)
            assert got == pytest.approx(expected, abs=1e-5), (kind, pipeline)
            assert difference(weights, plain) < 1e-5, (kind, pipeline)


def test_clipping_labels_and_bf16_are_the_same_in_every_pipeline() -> None:
    checks = [clipped_as_unsplit, labels_and_weights_as_unsplit, bf16_by_pipeline]
    verdicts = run_ranks(run_checks, 2, timeout_s=240, checks=checks)[0]
    assert verdicts == dict.fromkeys(verdicts), verdicts


def compiled_as_unsplit(kind: ModelKind, pipeline: str) -> None:
    got, weights, before = train_sharded(kind, pipeline, is_compiled=True, grad_clip_norm=MAX_NORM)
    expected, plain, _ = train_plainly(kind, before, grad_clip_norm=MAX_NORM)
    assert got == pytest.approx(expected, abs=1e-5)
    assert difference(weights, plain) < 1e-5


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on CPU")
@pytest.mark.parametrize(
    ("kind", "pipeline"),
    [(ModelKind.dlrm, "sparse_dist"), *only_whole((ModelKind.dcnv2, "micro_batches"))],
)
def test_compiled_layers_train_as_eager_ones(
    kind: ModelKind, pipeline: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Or each rank starts processes to compile in, which import torch first.
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    run_ranks(compiled_as_unsplit, 2, timeout_s=280, kind=kind, pipeline=pipeline)
