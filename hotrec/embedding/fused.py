"""The update rules in FBGEMM's fused kernels.

On CUDA they sum a row's gradients in pieces of 1,024 ids in no fixed order: two runs are bitwise
equal only for rows that are exchanged, or with ``torch.use_deterministic_algorithms(True)``.
"""

from __future__ import annotations

from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn

from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.types import OptimizerKind

_FBGEMM_OPTIMIZER = {
    OptimizerKind.sgd: EmbOptimType.EXACT_SGD,
    OptimizerKind.adagrad: EmbOptimType.EXACT_ADAGRAD,
    OptimizerKind.rowwise_adagrad: EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    OptimizerKind.adam: EmbOptimType.ADAM,
}


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


def check_optimizer(spec: OptimizerSpec, device: torch.device, *, has_cold: bool) -> None:
    """Raise ValueError for Adam with cold rows on CPU, where FBGEMM has no Adam."""
    if spec.kind is OptimizerKind.adam and device.type == "cpu" and has_cold:
        raise ValueError(
            "optimizer.kind: expected sgd, adagrad or rowwise_adagrad for cold rows on CPU (FBGEMM "
            "has no Adam there), got adam. Choose one of these, make all rows hot "
            "(placement=all_hot), or train on CUDA."
        )


def update_counters(module: nn.Module) -> list[torch.Tensor]:
    """FBGEMM's counts of a fused module's updates, for Adam: on the device and on the host."""
    found = (getattr(module, name, None) for name in ("iter", "iter_cpu"))
    return [counter for counter in found if counter is not None]


def undo_update_count(lookup: nn.Module) -> None:
    """Undo the update that FBGEMM counts in forward for Adam, after a forward without backward."""
    kernels: Any = lookup._emb_modules
    for kernel in kernels:
        for counter in update_counters(kernel.emb_module):
            if int(counter) > 0:
                counter.sub_(1)
