"""The update rules as FBGEMM's fused kernels have them.

On CUDA FBGEMM adds up the gradients of one row in pieces of 1,024 ids, whose order is not fixed, so
two runs are equal bit for bit only where no row is asked for more often in a step. Rows that travel
are: a rank asks for a row once, so its owner has a run of at most W. Tables that are pooled where
they are, and TorchRec's own plans, are not, unless ``torch.use_deterministic_algorithms(True)``.
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
    """FBGEMM's arguments for the same rule; a new dict each time, since TorchRec writes into it.

    Host tiers lie in pinned host memory that the device maps: managed memory, FBGEMM's default, can
    hang a device once it exceeds what is free. Of no effect where nothing is in a host tier.
    """
    params: dict[str, Any] = {
        "optimizer": _FBGEMM_OPTIMIZER[spec.kind],
        "learning_rate": spec.learning_rate,
        "uvm_host_mapped": True,
        # Six numbers a cache and step, on the device; nothing where there is no cache.
        "gather_uvm_cache_stats": True,
    }
    if spec.kind is not OptimizerKind.sgd:
        params["eps"] = spec.eps
    if spec.kind is OptimizerKind.adam:
        params |= {"beta1": spec.beta1, "beta2": spec.beta2}
    return params


def check_optimizer(spec: OptimizerSpec, device: torch.device, *, has_cold: bool) -> None:
    """Refuse an optimizer that a half cannot follow exactly.

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
    """Take back what a forward pass without a backward has counted as an update.

    FBGEMM advances Adam's update count in forward, also in evaluation.

    Args:
        lookup: TorchRec's lookup of a sharding, with fused kernels.
    """
    kernels: Any = lookup._emb_modules
    for kernel in kernels:
        for counter in ("iter", "iter_cpu"):
            count = getattr(kernel.emb_module, counter, None)
            if count is not None and int(count) > 0:
                count.sub_(1)
