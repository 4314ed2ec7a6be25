"""The update rules in FBGEMM's fused kernels.

On CUDA, FBGEMM sums the gradients of a row in pieces of 1,024 ids in no fixed order, so two runs
are bitwise equal only if no row is read more often in a step. That holds for rows that are
exchanged, which each rank requests once. It does not hold for tables pooled on their owners and for
TorchRec's own plans, except with ``torch.use_deterministic_algorithms(True)``.
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
    """FBGEMM's arguments for a rule; a new dict each time, since TorchRec modifies it.

    Host tiers use pinned host memory that the device maps: managed memory, FBGEMM's default, can
    hang a device once it exceeds the free memory.
    """
    params: dict[str, Any] = {
        "optimizer": _FBGEMM_OPTIMIZER[spec.kind],
        "learning_rate": spec.learning_rate,
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
    """Check that both halves can follow the optimizer exactly.

    Raises:
        ValueError: for Adam with cold rows on CPU, where FBGEMM has no Adam.
    """
    if spec.kind is OptimizerKind.adam and device.type == "cpu" and has_cold:
        raise ValueError(
            "optimizer.kind: expected sgd, adagrad or rowwise_adagrad for cold rows on CPU (FBGEMM "
            "has no Adam there), got adam. Choose one of these, make all rows hot "
            "(placement=all_hot), or train on CUDA."
        )


def undo_update_count(lookup: nn.Module) -> None:
    """Undo the update that FBGEMM counts in forward for Adam, after a forward without backward.

    Args:
        lookup: TorchRec's lookup of a sharding, with fused kernels.
    """
    kernels: Any = lookup._emb_modules
    for kernel in kernels:
        for counter in ("iter", "iter_cpu"):
            count = getattr(kernel.emb_module, counter, None)
            if count is not None and int(count) > 0:
                count.sub_(1)
