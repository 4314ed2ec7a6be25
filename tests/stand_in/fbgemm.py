"""FBGEMM's operators that exist for CUDA alone, computed on the values underneath.

The lookup of a fused table is one operator, and so is its update; that of a replicated table has a
gradient instead. A UVM cache holds nothing here: rows are read from, and written to, the memory
behind it.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import fbgemm_gpu.split_embedding_codegen_lookup_invokers as invokers
import torch

from tests.stand_in.operators import REPLACED

NONE, MEAN = 2, 1  # PoolingMode
_ops = torch.library.Library("stand_in", "DEF")
_ops.define(
    "lookup(Tensor dev, Tensor uvm, Tensor placements, Tensor starts, Tensor dim_offsets, "
    "Tensor indices, Tensor offsets, int pooling, Tensor? scales) -> Tensor"
)
_ops.define(
    "update(Tensor(a!) dev, Tensor(b!) uvm, Tensor placements, Tensor starts, Tensor dim_offsets, "
    "Tensor indices, Tensor offsets, int pooling, Tensor? scales, Tensor grad, str rule, "
    "Tensor learning_rate, float[] numbers, Tensor(c!)[] states, Tensor[] state_places) -> ()"
)
_ops.define(
    "gradient(Tensor weights, Tensor starts, Tensor dim_offsets, Tensor indices, Tensor offsets, "
    "int pooling, Tensor? scales, Tensor grad) -> Tensor"
)


@dataclass
class _Feature:
    """The ids of one feature: where its table is, its rows, and the bag of each id."""

    weights_RD: torch.Tensor
    rows_K: torch.Tensor
    bags_K: torch.Tensor
    columns: slice
    ids: slice
    at: int


def _features(
    dev: torch.Tensor,
    uvm: torch.Tensor,
    placements: torch.Tensor,
    starts: torch.Tensor,
    dim_offsets: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
) -> list[_Feature]:
    num = dim_offsets.numel() - 1
    batch = (offsets.numel() - 1) // max(num, 1)
    ends = offsets.tolist()
    found = []
    for at in range(num):
        begin, end = ends[at * batch], ends[(at + 1) * batch]
        dim = int(dim_offsets[at + 1] - dim_offsets[at])
        memory = dev if int(placements[at]) == 0 else uvm
        start = int(starts[at])
        num_rows = (memory.numel() - start) // dim
        lengths = offsets[at * batch : (at + 1) * batch + 1].diff().long()
        found.append(
            _Feature(
                memory[start : start + num_rows * dim].view(num_rows, dim),
                indices[begin:end].long(),
                torch.repeat_interleave(torch.arange(batch), lengths),
                slice(int(dim_offsets[at]), int(dim_offsets[at + 1])),
                slice(begin, end),
                at,
            )
        )
    return found


def _all_on_device(starts: torch.Tensor) -> torch.Tensor:
    return torch.zeros(starts.shape, dtype=torch.int32, device=starts.device)


def _factors(
    feature: _Feature, batch: int, pooling: int, scales: torch.Tensor | None
) -> torch.Tensor | None:
    factors = None if scales is None else scales[feature.ids]
    if pooling == MEAN:
        lengths = torch.bincount(feature.bags_K, minlength=batch).clamp(min=1)
        mean = 1.0 / lengths[feature.bags_K]
        factors = mean if factors is None else factors * mean
    return factors


def _gradients(
    features: list[_Feature],
    batch: int,
    pooling: int,
    scales: torch.Tensor | None,
    grad: torch.Tensor,
) -> Iterator[tuple[_Feature, torch.Tensor]]:
    """Of each feature the gradients of its ids."""
    for feature in features:
        if pooling == NONE:
            yield feature, grad[feature.ids]
            continue
        grads = grad[feature.bags_K, feature.columns]
        factors = _factors(feature, batch, pooling, scales)
        yield feature, grads if factors is None else grads * factors[:, None]


@torch.no_grad()
def _lookup(
    dev: torch.Tensor,
    uvm: torch.Tensor,
    placements: torch.Tensor,
    starts: torch.Tensor,
    dim_offsets: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    pooling: int,
    scales: torch.Tensor | None,
) -> torch.Tensor:
    features = _features(dev, uvm, placements, starts, dim_offsets, indices, offsets)
    if pooling == NONE:
        dim = int(dim_offsets[1] - dim_offsets[0])
        out = dev.new_empty(indices.numel(), dim)
        for feature in features:
            out[feature.ids] = feature.weights_RD[feature.rows_K]
        return out
    batch = (offsets.numel() - 1) // max(len(features), 1)
    out = dev.new_zeros(batch, int(dim_offsets[-1]))
    for feature in features:
        rows = feature.weights_RD[feature.rows_K]
        factors = _factors(feature, batch, pooling, scales)
        if factors is not None:
            rows = rows * factors[:, None]
        out[:, feature.columns] = torch.zeros(batch, rows.shape[1]).index_add_(
            0, feature.bags_K, rows
        )
    return out


@torch.no_grad()
def _update(
    dev: torch.Tensor,
    uvm: torch.Tensor,
    placements: torch.Tensor,
    starts: torch.Tensor,
    dim_offsets: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    pooling: int,
    scales: torch.Tensor | None,
    grad: torch.Tensor,
    rule: str,
    learning_rate: torch.Tensor,
    numbers: list[float],
    states: list[torch.Tensor],
    state_places: list[torch.Tensor],
) -> None:
    features = _features(dev, uvm, placements, starts, dim_offsets, indices, offsets)
    batch = (offsets.numel() - 1) // max(len(features), 1)
    tables: dict[tuple[int, int], list[tuple[_Feature, torch.Tensor]]] = {}
    for feature, grads in _gradients(features, batch, pooling, scales, grad):
        key = (int(placements[feature.at]), int(starts[feature.at]))
        tables.setdefault(key, []).append((feature, grads))
    for parts in tables.values():
        feature = parts[0][0]
        rows_K = torch.cat([part.rows_K for part, _ in parts])
        grad_KD = torch.cat([grads for _, grads in parts])
        rows_U, at_K = torch.unique(rows_K, return_inverse=True)
        grad_UD = torch.zeros(rows_U.numel(), grad_KD.shape[1]).index_add_(0, at_K, grad_KD)
        _step(feature, rows_U, grad_UD, rule, float(learning_rate), numbers, states, state_places)


def _step(
    feature: _Feature,
    rows_U: torch.Tensor,
    grad_UD: torch.Tensor,
    rule: str,
    learning_rate: float,
    numbers: list[float],
    states: list[torch.Tensor],
    state_places: list[torch.Tensor],
) -> None:
    """One update of distinct rows, as FBGEMM's kernels make it."""
    weights = feature.weights_RD
    num_rows, dim = weights.shape

    def state(number: int, width: int) -> torch.Tensor:
        dev, uvm = states[2 * number : 2 * number + 2]
        placements, starts = state_places[2 * number : 2 * number + 2]
        memory = dev if int(placements[feature.at]) == 0 else uvm
        start = int(starts[feature.at])
        available = min(num_rows, (memory.numel() - start) // width)
        return memory[start : start + available * width].view(available, width)

    eps, beta1, beta2, iteration = numbers
    if rule == "sgd":
        weights[rows_U] -= learning_rate * grad_UD
    elif rule in ("adagrad", "rowwise_adagrad"):
        is_rowwise = rule == "rowwise_adagrad"
        sums = state(0, 1 if is_rowwise else dim)
        square = grad_UD**2
        sums[rows_U] += square.mean(1, keepdim=True) if is_rowwise else square
        weights[rows_U] -= learning_rate * grad_UD / (sums[rows_U].sqrt() + eps)
    else:
        first, second = state(0, dim), state(1, dim)
        first[rows_U] = beta1 * first[rows_U] + (1 - beta1) * grad_UD
        second[rows_U] = beta2 * second[rows_U] + (1 - beta2) * grad_UD**2
        mean = first[rows_U] / (1 - beta1**iteration)
        deviation = (second[rows_U] / (1 - beta2**iteration)).sqrt()
        weights[rows_U] -= learning_rate * mean / (deviation + eps)


@torch.no_grad()
def _gradient(
    weights: torch.Tensor,
    starts: torch.Tensor,
    dim_offsets: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    pooling: int,
    scales: torch.Tensor | None,
    grad: torch.Tensor,
) -> torch.Tensor:
    found = torch.zeros_like(weights)
    places = _all_on_device(starts)
    features = _features(found, found, places, starts, dim_offsets, indices, offsets)
    batch = (offsets.numel() - 1) // max(len(features), 1)
    for feature, grads in _gradients(features, batch, pooling, scales, grad):
        feature.weights_RD.index_add_(0, feature.rows_K, grads)
    return found


_ops.impl("lookup", _lookup, "CPU")
_ops.impl("update", _update, "CPU")
_ops.impl("gradient", _gradient, "CPU")


def _keep_nothing(*args: Any) -> None:
    """The cache stays empty: what is behind it is read and written."""


_fbgemm = torch.library.Library("fbgemm", "IMPL")


def _implement(name: str, function: Any, key: str) -> None:
    assert name in REPLACED, name  # so that a test knows whether every release has it
    _fbgemm.impl(name, function, key)


for _name in (
    "lru_cache_populate", "lfu_cache_populate", "lxu_cache_flush",
    "lxu_cache_locking_counter_decrement", "lxu_cache_locations_update",
):  # fmt: skip
    _implement(_name, _keep_nothing, "CPU")


# Of unified memory, whether it is host memory that the device maps, by where it begins.
_is_mapped: dict[int, bool] = {}


def _unified_tensor(like: torch.Tensor, sizes: list[int], is_host_mapped: bool) -> torch.Tensor:
    made = torch.empty(sizes, dtype=like.dtype, device=like.device)
    storage = made.untyped_storage()
    _is_mapped[storage.data_ptr()] = is_host_mapped
    weakref.finalize(storage, _is_mapped.pop, storage.data_ptr())
    return made


def _on_the_host(uvm: torch.Tensor) -> torch.Tensor:
    """A tensor of the host that shares managed memory, as FBGEMM below 1.8 has it."""
    if _is_mapped.get(uvm.untyped_storage().data_ptr()) is not False:
        raise RuntimeError(
            "fbgemm::uvm_to_cpu: expected managed memory, got host-mapped or device memory, which "
            "no release below 1.8 takes. Share the memory without it."
        )
    size = uvm.numel() * uvm.element_size()
    if size == 0:
        return torch.empty(uvm.shape, dtype=uvm.dtype)
    memory = (ctypes.c_char * size).from_address(uvm.data_ptr())
    return torch.frombuffer(memory, dtype=uvm.dtype).view(uvm.shape)


_implement("uvm_to_cpu", _on_the_host, "CUDA")
_implement("new_unified_tensor", _unified_tensor, "CUDA")


class _Replicated(torch.autograd.Function):
    """Looks rows up in a table that TorchRec replicates; backward makes its whole gradient."""

    @staticmethod
    def forward(ctx: Any, weights: torch.Tensor, *where: Any) -> torch.Tensor:
        ctx.save_for_backward(weights)
        ctx.where = where
        rows: torch.Tensor = torch.ops.stand_in.lookup(
            weights, weights, _all_on_device(where[0]), *where
        )
        return rows

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient = torch.ops.stand_in.gradient(
            *ctx.saved_tensors, *ctx.where, grads[0].contiguous()
        )
        return gradient, *[None] * len(ctx.where)


def _look_replicas_up(
    weights: torch.Tensor,
    starts: torch.Tensor,
    dim_offsets: torch.Tensor,
    total_dim: int,
    most_dim: int,
    row_sums: torch.Tensor,
    row_bits: int,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    pooling: int,
    scales: torch.Tensor | None,
    *others: Any,
) -> torch.Tensor:
    rows: torch.Tensor = _Replicated.apply(
        weights, starts, dim_offsets, indices, offsets, pooling, scales
    )
    return rows


_implement("dense_embedding_codegen_lookup_function", _look_replicas_up, "AutogradCUDA")


class _Fused(torch.autograd.Function):
    """Looks rows up; backward updates them and gives no gradient on."""

    @staticmethod
    def forward(
        ctx: Any,
        placeholder: torch.Tensor,
        args: Any,
        rule: str,
        numbers: list[float],
        moments: Any,
    ) -> torch.Tensor:
        ctx.where = (
            args.dev_weights, args.uvm_weights, args.weights_placements, args.weights_offsets,
            args.D_offsets, args.indices, args.offsets, args.pooling_mode, args.indice_weights,
        )  # fmt: skip
        ctx.rule, ctx.numbers, ctx.moments = rule, numbers, moments
        ctx.learning_rate = args.learning_rate_tensor
        ctx.placeholder = placeholder
        rows: torch.Tensor = torch.ops.stand_in.lookup(*ctx.where)
        return rows

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        torch.ops.stand_in.update(
            *ctx.where, grads[0].contiguous(), ctx.rule, ctx.learning_rate, ctx.numbers,
            [part for moment in ctx.moments for part in (moment.dev, moment.uvm)],
            [part for moment in ctx.moments for part in (moment.placements, moment.offsets)],
        )  # fmt: skip
        return torch.zeros_like(ctx.placeholder), None, None, None, None


def _invoker(rule: str, invoke: Any) -> Any:
    def on_device(
        common_args: Any, optimizer_args: Any, *moments: Any, **kwargs: Any
    ) -> torch.Tensor:
        if common_args.dev_weights.device.type != "cuda":
            found: torch.Tensor = invoke(common_args, optimizer_args, *moments, **kwargs)
            return found
        iteration = kwargs.get("iter", next((m for m in moments if isinstance(m, int)), 0))
        numbers = [
            optimizer_args.eps, optimizer_args.beta1, optimizer_args.beta2, float(iteration),
        ]  # fmt: skip
        kept = [m for m in moments if isinstance(m, invokers.lookup_args.Momentum)]
        placeholder = common_args.placeholder_autograd_tensor
        rows: torch.Tensor = _Fused.apply(placeholder, common_args, rule, numbers, kept)
        return rows

    return on_device


for _rule in ("sgd", "adagrad", "rowwise_adagrad", "adam"):
    assert f"split_embedding_codegen_lookup_{_rule}_function_pt2" in REPLACED
    _module = getattr(invokers, f"lookup_{_rule}")
    _module.invoke = _invoker(_rule, _module.invoke)
