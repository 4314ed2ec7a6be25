"""Probes of sharded rows, TorchRec's pooled tables, and its data-parallel tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.calibrate.kernels import Probe, Work
from hotrec.calibrate.tables import dense_tables, fused_tables
from hotrec.calibrate.workload import CalibrationTarget, CalibrationWorkload, cut_tables, in_turn
from hotrec.embedding.cpu_rows import ColdRowsOnCpu
from hotrec.embedding.fused import fused_params
from hotrec.embedding.optimizers import make_dense, make_replicated_tables
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.types import OptimizerKind

# Messages of so many ranks are told apart in what a rank is asked for.
MOST_ASKING = 8
LEAST_REPLICATED_ROWS = 8192
Lookup = Callable[[KeyedJaggedTensor], torch.Tensor]


def row_probes(bench: CalibrationWorkload) -> list[Probe]:
    """Lookup and update of sharded rows, unpooled and pooled, in every memory of the device."""
    probes = []
    for tier in ("device", "host", "cached") if bench.device.type == "cuda" else ("device",):
        for prefix, is_pooled in (("", False), ("pooled_", True)):
            states = ("hit", "miss") if tier == "cached" else (tier,)
            for state in states:
                read = f"{prefix or 'read_'}{state}"
                probes.append(_probe(bench, read, tier, is_pooled, state, is_update=False))
            update = f"{prefix}update_{states[0]}"
            probes.append(_probe(bench, update, tier, is_pooled, states[0], is_update=True))
    return probes


def _probe(
    bench: CalibrationWorkload,
    name: str,
    tier: str,
    is_pooled: bool,
    state: str,
    *,
    is_update: bool,
) -> Probe:
    def make(num_ids: int, dim: int) -> Work:
        lookup, forget = bench.once(
            "lookup", (tier, is_pooled, dim), lambda: _lookup(bench, tier, is_pooled, dim)
        )
        samples = (
            bench.features(bench.own_samples, num_ids) if is_pooled else _asked_rows(bench, num_ids)
        )
        grads = [torch.randn_like(lookup(features).detach()) for features in samples]
        turns = in_turn(list(zip(samples, grads, strict=True)))

        def prepare() -> Any:
            features, grad = next(turns)
            if state == "miss":
                forget()
            elif state == "hit":
                lookup(features)  # brings the rows into the cache
            return (lookup(features), grad) if is_update else features

        def update(prepared: tuple[torch.Tensor, torch.Tensor]) -> None:
            rows, grad = prepared
            rows.backward(grad)

        num_items = sum(features.values().numel() for features in samples) / len(samples)
        return Work(update if is_update else lookup, num_items, 4 * dim * num_items, prepare)

    return Probe(name, make, bench.sizes())


def _lookup(
    bench: CalibrationWorkload, tier: str, is_pooled: bool, dim: int
) -> tuple[Lookup, Callable[[], object]]:
    """Looks features up as training does; and makes a cache forget what it holds."""
    spec = row_spec(bench)
    num_rows = sum(bench.own_rows)
    module: Any = fused_tables(
        bench.own_rows,
        dim,
        tier=tier,
        is_pooled=is_pooled,
        device=bench.device,
        # Large enough for the rows of the largest batch, or there would be no hits.
        cache_load_frac=min(1.0, max(0.1, 4 * bench.num_ids / num_rows)),
        fused_params=fused_params(spec),
    )
    if bench.device.type == "cpu" and not is_pooled:
        rate = torch.optim.SGD([torch.zeros(1)], lr=spec.learning_rate)
        return ColdRowsOnCpu(module, rate, spec), lambda: None

    def look_up(features: KeyedJaggedTensor) -> torch.Tensor:
        rows: torch.Tensor = module(
            indices=features.values().long(), offsets=features.offsets().long()
        )
        return rows

    def forget() -> None:
        module.flush()
        module.reset_cache_states()

    return look_up, forget


def row_spec(bench: CalibrationWorkload) -> OptimizerSpec:
    """The rule of sharded rows: the configured one, where the device has it."""
    spec, _ = bench.specs
    if spec.kind is OptimizerKind.adam and bench.device.type == "cpu":
        # FBGEMM has none; such a configuration has no sharded rows, but other plans are predicted.
        return OptimizerSpec(OptimizerKind.adagrad, spec.learning_rate, spec.eps)
    return spec


def _asked_rows(bench: CalibrationWorkload, num_ids: int) -> list[KeyedJaggedTensor]:
    """What ranks ask this one for: from each, the distinct rows of its batch, in rising order."""
    num_asking = min(bench.ranks.world_size, MOST_ASKING)
    messages = [
        bench.own_router(features).groups[0].rows
        for features in bench.features(bench.own_samples, num_ids // num_asking)
    ]
    # Each asking rank is at another turn, so that they do not all ask for the same rows.
    return [
        _merge([messages[(turn + asking) % len(messages)] for asking in range(num_asking)])
        for turn in range(len(messages))
    ]


def _merge(messages: list[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    """Several ranks' rows by table, as TorchRec's input distribution hands them over."""
    by_rank = [message.to_dict() for message in messages]
    keys = messages[0].keys()
    values = [rows[key].values() for key in keys for rows in by_rank]
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.cat(values),
        lengths=torch.tensor([rows.numel() for rows in values], device=values[0].device).int(),
        stride=len(messages),
    )


def replicated_probes(bench: CalibrationWorkload) -> list[Probe]:
    """TorchRec's data-parallel tables: those with fewer rows than a batch has samples."""
    most_rows = bench.subject.batch_size
    small = [rows for rows in bench.subject.table_rows if rows <= most_rows]
    table_rows = small or [min(most_rows, min(bench.subject.table_rows))]
    small_bench = CalibrationWorkload(
        subject=_with_tables(bench, table_rows), ranks=bench.ranks, alone=bench.alone
    )
    # Enough rows that they are told apart from the calls.
    total = max(sum(table_rows), 8 * most_rows, LEAST_REPLICATED_ROWS)
    rows = [max(1, total // 16), max(2, total // 4), max(3, total)]
    dims = sorted({dim for _, dim in bench.sizes()})
    return [
        Probe("replicated_read", _replicated_read(small_bench), small_bench.sizes()),
        Probe(
            "replicated_update",
            _replicated_update(bench, len(table_rows)),
            [(num, dim) for dim in dims for num in rows],
        ),
    ]


def _with_tables(bench: CalibrationWorkload, table_rows: list[int]) -> CalibrationTarget:
    return replace(bench.subject, table_rows=table_rows)


def _replicated_read(bench: CalibrationWorkload) -> Callable[[int, int], Work]:
    def make(num_ids: int, dim: int) -> Work:
        rows = [table.num_rows for table in bench.samples.schema.tables]
        module: Any = bench.once("dense", dim, lambda: dense_tables(rows, dim, device=bench.device))
        samples = bench.features(bench.samples, num_ids)
        grad = torch.randn(samples[0].stride(), bench.num_columns * dim, device=bench.device)
        turns = in_turn(samples)

        def prepare() -> KeyedJaggedTensor:
            module.weights.grad = None
            return next(turns)

        def run(features: KeyedJaggedTensor) -> None:
            pooled = module(indices=features.values().long(), offsets=features.offsets().long())
            pooled.backward(grad)

        num_items = samples[0].values().numel()
        return Work(run, num_items, 4 * dim * num_items, prepare)

    return make


def _replicated_update(bench: CalibrationWorkload, num_tables: int) -> Callable[[int, int], Work]:
    def make(num_rows: int, dim: int) -> Work:
        spec, _ = bench.specs
        per_table = cut_tables([num_rows] * num_tables, num_rows)
        params = [torch.randn(rows, dim, device=bench.device) for rows in per_table]
        for parameter in params:
            parameter.requires_grad_()
            parameter.grad = torch.randn_like(parameter)
        make_optimizer = make_dense if spec.kind is OptimizerKind.adam else make_replicated_tables
        optimizer = make_optimizer(spec, params)
        total = sum(per_table)
        return Work(lambda _: optimizer.step(), total, 4 * dim * total)

    return make
