"""One optimizer for the whole model: cold rows (fused), hot rows, dense layers."""

from __future__ import annotations

import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from hotrec.embedding.hot_exchange import HotReplicas
from hotrec.embedding.hot_optimizer import HotOptimizer
from hotrec.embedding.tables import sharded_collections, torchrec_collections
from hotrec.embedding.update_rules import OptimizerKind, OptimizerSpec
from hotrec.routing import hot_name


def hot_replicas(model: nn.Module) -> dict[str, HotReplicas]:
    """All hot replicas of a sharded model, by the prefix of their parameters' names."""
    return {
        f"{path}{prefix}": replica
        for path, module in sharded_collections(model)
        for prefix, replica in module.hot_replicas()
    }


def make_hot_optimizer(model: nn.Module, spec: OptimizerSpec) -> HotOptimizer | None:
    """The optimizer of the hot replicas, or None if no row is hot."""
    replicas = hot_replicas(model)
    names: dict[str, list[str]] = {}
    for path, module in sharded_collections(model):
        for dim, group in module.router.groups.items():
            prefix = f"{path}rows.dim{dim}.embeddings."
            names[prefix] = [f"{prefix}{hot_name(table)}.weight" for table in group.hot_tables]
    return HotOptimizer(replicas, names, spec) if replicas else None


def make_dense(spec: OptimizerSpec, params: list[torch.Tensor]) -> torch.optim.Optimizer:
    """The optimizer of the dense layers: one kernel for all of them, where the device has it."""
    lr, fused = spec.learning_rate, _has_fused(spec.kind, params)
    match spec.kind:
        case OptimizerKind.SGD:
            return torch.optim.SGD(params, lr=lr, fused=fused)
        case OptimizerKind.ADAGRAD | OptimizerKind.ROWWISE_ADAGRAD:
            return torch.optim.Adagrad(params, lr=lr, eps=spec.eps, fused=fused)
        case OptimizerKind.ADAM:
            betas = (spec.beta1, spec.beta2)
            return torch.optim.Adam(params, lr=lr, betas=betas, eps=spec.eps, fused=fused)


def _has_fused(kind: OptimizerKind, params: list[torch.Tensor]) -> bool | None:
    """True if torch has a fused kernel for this device, else None, which is torch's own choice.

    Its optimizers know only which devices have some fused kernel; the dispatcher knows of each.
    """
    keys = {"cpu": "CPU", "cuda": "CUDA"}
    found = {keys.get(param.device.type) for param in params}
    name = {OptimizerKind.SGD: "sgd", OptimizerKind.ADAM: "adam"}.get(kind, "adagrad")
    operator = f"aten::_fused_{name}_"
    is_there = found and all(
        key is not None and torch._C._dispatch_has_kernel_for_dispatch_key(operator, key)
        for key in found
    )
    return True if is_there else None


def make_replicated_tables(
    spec: OptimizerSpec, params: list[torch.Tensor]
) -> torch.optim.Optimizer:
    """For tables that a TorchRec plan makes data-parallel: the same rule over all their rows."""
    if spec.kind is OptimizerKind.ROWWISE_ADAGRAD:
        return RowWiseAdagrad(params, lr=spec.learning_rate, eps=spec.eps)
    if spec.kind is OptimizerKind.ADAM:
        raise ValueError(
            "optimizer.kind: expected sgd, adagrad or rowwise_adagrad for data-parallel tables of "
            "a TorchRec plan (its dense Adam also moves rows that no sample touched), got adam. "
            "Choose one of these, or a plan without data-parallel tables."
        )
    return make_dense(spec, params)


def make_optimizer(
    model: DistributedModelParallel, embedding: OptimizerSpec, dense: OptimizerSpec
) -> CombinedOptimizer:
    """Combine the fused, hot and dense optimizers of a sharded model.

    Take one backward pass per step: fused kernels update cold rows in every backward pass, so over
    several of them (gradient accumulation) cold rows would follow another algorithm than the rest.

    Args:
        model: sharded with ``HotColdSharder``, or by a TorchRec plan.
        embedding: rule of the embedding rows, hot and cold.
        dense: rule of the dense layers. Row-wise Adagrad means Adagrad there.

    Raises:
        ValueError: if a data-parallel TorchRec table cannot follow the rule exactly.
    """
    parts: list[tuple[str, KeyedOptimizer]] = [("fused", model.fused_optimizer)]
    hot = make_hot_optimizer(model, embedding)
    if hot is not None:
        parts.append(("hot", hot))
    hot_names = set() if hot is None else set(hot.params)
    rest = {
        name: parameter
        for name, parameter in in_backward_optimizer_filter(model.named_parameters())
        if name not in hot_names
    }
    prefixes = tuple(f"{path}embedding_bags." for path, _ in torchrec_collections(model))
    tables = {name: p for name, p in rest.items() if name.startswith(prefixes)}
    layers = {name: p for name, p in rest.items() if name not in tables}
    if tables:
        parts.append(
            (
                "tables",
                KeyedOptimizerWrapper(
                    tables, lambda params: make_replicated_tables(embedding, params)
                ),
            )
        )
    if layers:
        parts.append(
            ("dense", KeyedOptimizerWrapper(layers, lambda params: make_dense(dense, params)))
        )
    return CombinedOptimizer(parts)
