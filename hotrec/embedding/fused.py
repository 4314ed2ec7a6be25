"""The update rules in FBGEMM's fused kernels.

On CUDA they sum a row's gradients in pieces of 1,024 ids in no fixed order: two runs are bitwise
equal only for rows that are exchanged, or with ``torch.use_deterministic_algorithms(True)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import optim
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type

from hotrec.embedding.torchrec import kernels
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.runtime.mapped_memory import keep_out_of_forks
from hotrec.types import OptimizerKind

_FBGEMM_OPTIMIZER = {
    OptimizerKind.sgd: EmbOptimType.EXACT_SGD,
    OptimizerKind.adagrad: EmbOptimType.EXACT_ADAGRAD,
    OptimizerKind.rowwise_adagrad: EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    OptimizerKind.adam: EmbOptimType.ADAM,
}
_KIND_OF_FBGEMM = {fbgemm: kind for kind, fbgemm in _FBGEMM_OPTIMIZER.items()}
# These ignore arguments that only FBGEMM supports.
_CLASS_OF_KIND: dict[OptimizerKind, type[torch.optim.Optimizer]] = {
    OptimizerKind.sgd: optim.SGD,
    OptimizerKind.adagrad: optim.Adagrad,
    OptimizerKind.rowwise_adagrad: optim.RowWiseAdagrad,
    OptimizerKind.adam: optim.Adam,
}


def kind_of_kernel(optimizer: EmbOptimType | None) -> OptimizerKind:
    """The update rule of FBGEMM's optimizer; SGD where none is named."""
    return OptimizerKind.sgd if optimizer is None else _KIND_OF_FBGEMM[optimizer]


def rule_of(
    optimizer_class: type[torch.optim.Optimizer], kwargs: Mapping[str, Any]
) -> OptimizerSpec:
    """The update rule of a class and its arguments, as given to ``apply_optimizer_in_backward``.

    TorchRec passes the arguments to FBGEMM, so defaults are FBGEMM's: an eps of 1e-8.

    Raises:
        ValueError: If the rule is not supported for hot rows, or its learning rate is missing.
    """
    kind = _KIND_OF_FBGEMM.get(optimizer_type_to_emb_opt_type(optimizer_class))
    name = optimizer_class.__name__
    if kind is None:
        raise ValueError(
            "embedding optimizer: expected SGD, Adagrad, RowWiseAdagrad or Adam for hot and cold "
            f'rows, got {name}. Choose one of them, or keep TorchRec\'s own plan with hot="off".'
        )
    # TorchRec adds the key optimizer to the arguments itself.
    given = {key: value for key, value in kwargs.items() if key != "optimizer"}
    rate = given.pop("lr", given.pop("learning_rate", None))
    if rate is None:
        raise ValueError(f"embedding optimizer {name}: expected lr, got none. Pass lr.")
    constants = {key: given.pop(key) for key in ("eps", "beta1", "beta2") if key in given}
    unknown = {key: value for key, value in given.items() if value}
    if unknown:
        raise ValueError(
            f"embedding optimizer {name}: expected only lr, eps, beta1 and beta2, got {unknown}. "
            'Remove them, or keep TorchRec\'s own plan with hot="off".'
        )
    return OptimizerSpec(kind, float(rate), **constants)


def optimizer_of(spec: OptimizerSpec) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """TorchRec's class and its arguments of a rule, the inverse of ``rule_of``."""
    kwargs: dict[str, Any] = {"lr": spec.learning_rate}
    if spec.kind is not OptimizerKind.sgd:
        kwargs["eps"] = spec.eps
    if spec.kind is OptimizerKind.adam:
        kwargs |= {"beta1": spec.beta1, "beta2": spec.beta2}
    return _CLASS_OF_KIND[spec.kind], kwargs


def fused_params(spec: OptimizerSpec) -> dict[str, Any]:
    """FBGEMM's arguments for a rule; a new dict each time, since TorchRec modifies it."""
    params: dict[str, Any] = {
        "optimizer": _FBGEMM_OPTIMIZER[spec.kind],
        "learning_rate": spec.learning_rate,
        # Managed memory, the default, can hang a device once it exceeds the free memory.
        "uvm_host_mapped": True,
        # Six counters per cache and step, on the device.
        "gather_uvm_cache_stats": True,
    }
    if spec.kind is not OptimizerKind.sgd:
        params["eps"] = spec.eps
    if spec.kind is OptimizerKind.adam:
        params |= {"beta1": spec.beta1, "beta2": spec.beta2}
    return params


def can_update_tables(kind: OptimizerKind, device: str) -> bool:
    """Whether FBGEMM, which updates the tables that TorchRec shards, has this rule there."""
    return kind is not OptimizerKind.adam or device != "cpu"


def check_optimizer(spec: OptimizerSpec, device: torch.device, *, has_tables: bool) -> None:
    """Raise ValueError if tables are to be updated by a rule that FBGEMM does not have there."""
    if has_tables and not can_update_tables(spec.kind, device.type):
        raise ValueError(
            "optimizer.kind: expected sgd, adagrad or rowwise_adagrad for tables that TorchRec "
            "shards on CPU (FBGEMM has no Adam there), got adam. Choose one of these, a split of "
            "the rows without pooled tables (placement=all_cold), or train on CUDA."
        )


def update_counters(module: nn.Module) -> list[torch.Tensor]:
    """FBGEMM's counts of a fused module's updates, for Adam: on the device and on the host."""
    found = (getattr(module, name, None) for name in ("iter", "iter_cpu"))
    return [counter for counter in found if counter is not None]


def undo_update_count(lookup: nn.Module) -> None:
    """Undo the update that FBGEMM counts in forward for Adam, after a forward without backward."""
    for kernel in kernels(lookup):
        for counter in update_counters(kernel.fbgemm):
            if int(counter) > 0:
                counter.sub_(1)


def leave_out_of_forks(module: nn.Module) -> None:
    """Keep rows and states of a fused module in mapped host memory out of loader workers."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if name.endswith("_uvm"):
            keep_out_of_forks(tensor)
