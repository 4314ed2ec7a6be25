"""One optimizer for the whole model: cold rows (fused), hot rows, dense layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from hotrec.embedding.hot_rows import HotReplicas
from hotrec.embedding.tables import sharded_collections, torchrec_modules
from hotrec.embedding.torchrec import has_fused_optimizer
from hotrec.embedding.update_rules import OptimizerSpec, update_rows
from hotrec.routing.features import hot_name
from hotrec.types import OptimizerKind


class HotOptimizer(KeyedOptimizer):
    """Updates hot rows by the same rule, with the same state, as the cold rows' fused optimizer.

    Replicas and the parameter names of their tables are keyed by the prefix of these names.
    """

    def __init__(
        self,
        replicas: Mapping[str, HotReplicas],
        names: Mapping[str, Sequence[str]],
        spec: OptimizerSpec,
    ) -> None:
        self._replicas = dict(replicas)
        self._spec = spec
        self._states: dict[str, dict[str, torch.Tensor]] = {}
        # A tensor, so that it is saved and loaded in place with the rest of the state.
        self._num_updates = torch.zeros((), dtype=torch.int64)
        params: dict[str, torch.Tensor] = {}
        state: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        for prefix, replica in self._replicas.items():
            weights_HD, num_rows_T = replica.rows, replica.num_rows_T
            shape = spec.state_shape(weights_HD.shape[0], replica.dim)
            flat = {name: torch.zeros(shape, device=weights_HD.device) for name in spec.state_names}
            self._states[prefix] = flat
            params |= zip(names[prefix], weights_HD.split(num_rows_T), strict=True)
            for at, name in enumerate(names[prefix]):
                parts = {key: tensor.split(num_rows_T)[at] for key, tensor in flat.items()}
                state[params[name]] = {**parts, "step": self._num_updates}
        group: dict[str, Any] = {"params": list(params.values()), "lr": spec.learning_rate}
        super().__init__(params, state, [group])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update every row with a gradient since the last step."""
        self._num_updates += 1
        learning_rate = next(iter(self.param_groups))["lr"]
        for prefix, replica in self._replicas.items():
            slots_U, grad_UD = replica.take_gradient()
            update_rows(
                self._spec,
                replica.rows,
                self._states[prefix],
                slots_U,
                grad_UD,
                learning_rate=learning_rate,
                num_updates=int(self._num_updates),
            )

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Drop unused gradients; ``step`` already clears those that it uses."""
        for replica in self._replicas.values():
            replica.reduced = None


# Key of ``make_optimizer``'s part for tables that TorchRec replicates.
TABLES = "tables"


class ModelOptimizer(CombinedOptimizer):
    """The parts of ``make_optimizer``; a pipeline finishes its updates before the state is read."""

    before_reading: Callable[[], None] | None = None
    before_loading: Callable[[], None] | None = None
    before_step: Callable[[], None] | None = None  # raises if the step would be wrong

    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()  # once: each part would call it again, whose backward updates rows
        if self.before_step is not None:
            self.before_step()
        super().step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        if self.before_reading is not None:
            self.before_reading()
        state: dict[str, Any] = super().state_dict()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        if self.before_loading is not None:
            self.before_loading()
        super().load_state_dict(state_dict)


def hot_replicas(model: nn.Module) -> dict[str, HotReplicas]:
    """All hot replicas of a sharded model, by the prefix of their parameters' names."""
    return {
        f"{path}{prefix}": replica
        for path, module in sharded_collections(model)
        for prefix, replica in module.hot_replicas()
    }


def _make_hot(model: nn.Module, spec: OptimizerSpec) -> HotOptimizer | None:
    """The optimizer of the hot replicas, or None if no row is hot."""
    replicas = hot_replicas(model)
    names: dict[str, list[str]] = {}
    for path, module in sharded_collections(model):
        for dim, group in module.router.groups.items():
            prefix = f"{path}rows.dim{dim}.embeddings."
            names[prefix] = [f"{prefix}{hot_name(table)}.weight" for table in group.hot_tables]
    return HotOptimizer(replicas, names, spec) if replicas else None


def make_dense(spec: OptimizerSpec, params: list[torch.Tensor]) -> torch.optim.Optimizer:
    """The optimizer of the dense layers, with one fused kernel where the device has it."""
    lr, fused = spec.learning_rate, _has_fused(spec.kind, params)
    match spec.kind:
        case OptimizerKind.sgd:
            return torch.optim.SGD(params, lr=lr, fused=fused)
        case OptimizerKind.adagrad | OptimizerKind.rowwise_adagrad:
            return torch.optim.Adagrad(params, lr=lr, eps=spec.eps, fused=fused)
        case OptimizerKind.adam:
            betas = (spec.beta1, spec.beta2)
            return torch.optim.Adam(params, lr=lr, betas=betas, eps=spec.eps, fused=fused)


def _has_fused(kind: OptimizerKind, params: list[torch.Tensor]) -> bool | None:
    """True if torch has this optimizer's fused kernel for the device, else None for its default."""
    devices = {param.device.type for param in params}
    name = {OptimizerKind.sgd: "sgd", OptimizerKind.adam: "adam"}.get(kind, "adagrad")
    return True if devices and has_fused_optimizer(name, devices) else None


def make_replicated_tables(
    spec: OptimizerSpec, params: list[torch.Tensor]
) -> torch.optim.Optimizer:
    """The optimizer of tables that a TorchRec plan makes data-parallel, over all their rows."""
    if spec.kind is OptimizerKind.rowwise_adagrad:
        return RowWiseAdagrad(params, lr=spec.learning_rate, eps=spec.eps)
    if spec.kind is OptimizerKind.adam:
        raise ValueError(
            "optimizer.kind: expected sgd, adagrad or rowwise_adagrad for data-parallel tables of "
            "a TorchRec plan (its dense Adam also updates untouched rows), got adam. Choose one "
            "of these, or a plan without data-parallel tables."
        )
    return make_dense(spec, params)


def replicated_tables(
    model: nn.Module, named: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The parameters without a fused optimizer that are tables of TorchRec's own modules."""
    prefixes = tuple(
        f"{path}{tables}."
        for path, _ in torchrec_modules(model)
        for tables in ("embedding_bags", "embeddings")
    )
    return {name: p for name, p in named.items() if name.startswith(prefixes)}


def make_optimizer(
    model: DistributedModelParallel,
    embedding: OptimizerSpec,
    dense: OptimizerSpec | Callable[[list[torch.Tensor]], torch.optim.Optimizer],
) -> ModelOptimizer:
    """Combine the fused, hot and dense optimizers of a sharded model.

    Run one backward pass per step: fused kernels update cold rows in every backward pass, so
    gradient accumulation would train cold rows differently from the rest.

    Args:
        model: A model sharded with ``HotColdSharder``, or by a TorchRec plan.
        embedding: The rule of the embedding rows.
        dense: The rule of the dense layers, for which row-wise Adagrad means Adagrad; or a factory
            of their optimizer from their parameters, such as ``torch.optim.Adagrad``.

    Raises:
        ValueError: if a data-parallel TorchRec table cannot follow the rule exactly.
    """
    make_layers = partial(make_dense, dense) if isinstance(dense, OptimizerSpec) else dense
    parts: list[tuple[str, KeyedOptimizer]] = [("fused", model.fused_optimizer)]
    hot = _make_hot(model, embedding)
    if hot is not None:
        parts.append(("hot", hot))
    hot_names = set() if hot is None else set(hot.params)
    rest = {
        name: parameter
        for name, parameter in in_backward_optimizer_filter(model.named_parameters())
        if name not in hot_names
    }
    tables = replicated_tables(model, rest)
    layers = {name: p for name, p in rest.items() if name not in tables}
    for part, params, make in (
        (TABLES, tables, partial(make_replicated_tables, embedding)),
        ("dense", layers, make_layers),
    ):
        if params:
            parts.append((part, KeyedOptimizerWrapper(params, make)))
    return ModelOptimizer(parts)
