"""Probes of routing, pooling, copies and the dense layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from hotrec.calibrate.kernels import Probe, Work
from hotrec.calibrate.workload import CalibrationWorkload, in_turn
from hotrec.config.groups import Dcnv2Config
from hotrec.data.batch import Batch
from hotrec.embedding.optimizers import make_dense
from hotrec.embedding.pooling import pool_rows
from hotrec.models.flops import dense_flops
from hotrec.models.task import ClickTask
from hotrec.models.zoo import build_model
from hotrec.routing.features import RoutedGroup


def layer_probes(bench: CalibrationWorkload) -> list[Probe]:
    """All of them."""
    batch_size = bench.subject.batch_size
    at_dim = [(num_ids, dim) for num_ids, dim in bench.sizes() if dim == bench.dim]
    samples = sorted({max(1, batch_size // part) for part in (8, 2)} | {batch_size, 2 * batch_size})
    work = dense_flops(bench.subject.model, bench.subject.num_dense, bench.num_columns)
    values = [max(1, work.num_dense_values // part) for part in (16, 4, 1)]
    return [
        Probe("route", _route(bench), at_dim, is_by_bytes=False),
        Probe("pool", _pool(bench), bench.sizes()),
        Probe("copy", _copy(bench), at_dim, is_by_items=False),
        Probe("dense", _dense(bench), [(num, bench.dim) for num in samples], is_by_bytes=False),
        Probe(
            "dense_update", _dense_update(bench), [(n, bench.dim) for n in values],
            is_by_bytes=False,
        ),
    ]  # fmt: skip


def _route(bench: CalibrationWorkload) -> Callable[[int, int], Work]:
    def make(num_ids: int, dim: int) -> Work:
        samples = bench.features(bench.samples, num_ids)
        turns = in_turn(samples)
        num_items = samples[0].values().numel()
        return Work(bench.router, num_items, 0, lambda: next(turns))

    return make


def _pool(bench: CalibrationWorkload) -> Callable[[int, int], Work]:
    """Hot and cold rows put together, bags of them, and backward."""

    def make(num_ids: int, dim: int) -> Work:
        samples: list[KeyedJaggedTensor] = bench.features(bench.samples, num_ids)
        turns = in_turn([bench.router(features).groups[0] for features in samples])
        num_bags = samples[0].stride() * bench.num_columns
        grad = torch.randn(samples[0].stride(), bench.num_columns * dim, device=bench.device)
        num_hot_keys = len(next(iter(bench.router.groups.values())).hot_tables)

        def prepare() -> tuple[RoutedGroup, list[torch.Tensor]]:
            routed = next(turns)
            lengths = routed.rows.lengths().view(-1).long()
            halves = [int(lengths[:num_hot_keys].sum()), int(lengths[num_hot_keys:].sum())]
            rows = [torch.randn(n, dim, device=bench.device) for n in halves]
            return routed, [part.requires_grad_() for part in rows]

        def run(prepared: tuple[RoutedGroup, list[torch.Tensor]]) -> None:
            routed, rows = prepared
            pool_rows(torch.cat(rows), routed, bench.num_columns).backward(grad)

        return Work(run, num_bags, 4 * dim * num_bags, prepare)

    return make


def _copy(bench: CalibrationWorkload) -> Callable[[int, int], Work]:
    def make(num_rows: int, dim: int) -> Work:
        source = torch.randn(num_rows, dim, device=bench.device)
        return Work(lambda _: source.clone(), num_rows, 4 * dim * num_rows)

    return make


def build_dense_layers(bench: CalibrationWorkload) -> nn.Module:
    """The configured model, given pooled columns in place of ids."""
    model = bench.subject.model
    names = bench.samples.schema.feature_names
    tables = [
        EmbeddingBagConfig(
            name=name, num_embeddings=1, embedding_dim=model.embedding_dim, feature_names=[name]
        )
        for name in names
    ]
    cross: dict[str, int] = {}
    if isinstance(model, Dcnv2Config):
        cross = {
            "cross_num_layers": model.cross_num_layers,
            "cross_low_rank_dim": model.cross_low_rank_dim,
        }
    built: Any = build_model(
        model.kind,
        EmbeddingBagCollection(tables=tables, device=torch.device("meta")),
        num_dense=bench.subject.num_dense,
        dense_layer_sizes=model.dense_layer_sizes,
        over_layer_sizes=model.over_layer_sizes,
        seed=bench.subject.seed,
        device=bench.device,
        **cross,
    )
    built.sparse_arch.embedding_bag_collection = nn.Identity()
    return ClickTask(built, bench.ranks.world_size)


def _dense(bench: CalibrationWorkload) -> Callable[[int, int], Work]:
    flops = dense_flops(bench.subject.model, bench.subject.num_dense, bench.num_columns).flops

    def make(num_samples: int, dim: int) -> Work:
        task = bench.once("task", 0, lambda: build_dense_layers(bench))
        turns = _pooled_batches(bench, num_samples)

        def prepare() -> Batch:
            task.zero_grad(set_to_none=True)
            return next(turns)

        return Work(lambda batch: task(batch)[0].backward(), flops * num_samples, 0, prepare)

    return make


def _pooled_batches(bench: CalibrationWorkload, num_samples: int) -> Iterator[Batch]:
    names = list(bench.samples.schema.feature_names)
    dims = [bench.dim] * len(names)
    while True:
        values = torch.randn(num_samples, sum(dims), device=bench.device, requires_grad=True)
        pooled: Any = KeyedTensor(names, dims, values)
        yield Batch(
            dense=torch.randn(num_samples, bench.subject.num_dense, device=bench.device),
            sparse=pooled,
            labels=torch.ones(num_samples, device=bench.device),
            weights=torch.ones(num_samples, device=bench.device),
            num_global_samples=num_samples * bench.ranks.world_size,
        )


def _dense_update(bench: CalibrationWorkload) -> Callable[[int, int], Work]:
    """The optimizer of as many tensors as the dense layers have, of any total size."""

    def make(num_values: int, dim: int) -> Work:
        task = bench.once("task", 0, lambda: build_dense_layers(bench))
        shapes = [parameter.numel() for parameter in task.parameters()]
        scale = num_values / sum(shapes)
        params = [torch.randn(max(1, round(n * scale)), device=bench.device) for n in shapes]
        for parameter in params:
            parameter.requires_grad_()
            parameter.grad = torch.randn_like(parameter)
        optimizer = make_dense(bench.specs[1], params)
        return Work(lambda _: optimizer.step(), sum(p.numel() for p in params), 0)

    return make
