"""The FBGEMM modules that TorchRec would make, for one rank alone, to be timed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    DenseTableBatchedEmbeddingBagsCodegen,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from hotrec.runtime.memory import check_mappable, read_memory

# The memory tiers of hotrec.cost_model.costs.KERNELS: "hit" and "miss" share a module, whose host
# memory is behind a cache.
TIERS = ("device", "host", "cached")


def fused_tables(
    table_rows: Sequence[int],
    dim: int,
    *,
    tier: str,
    is_pooled: bool,
    device: torch.device,
    cache_load_frac: float,
    fused_params: Mapping[str, Any],
) -> SplitTableBatchedEmbeddingBagsCodegen:
    """Tables with a fused optimizer, filled with random rows.

    Args:
        table_rows: rows of each table.
        dim: D.
        tier: one of TIERS; on CPU always "device", the only memory there is.
        is_pooled: pools bags, else returns every row.
        cache_load_frac: of the tier "cached", the share of the rows that fit in its cache.
        fused_params: optimizer and its constants.
    """
    check_host_tier(table_rows, dim, tier)
    if device.type == "cpu":
        assert tier == "device", tier
        location, compute = EmbeddingLocation.HOST, ComputeDevice.CPU
    else:
        compute = ComputeDevice.CUDA
        location = {
            "device": EmbeddingLocation.DEVICE,
            "host": EmbeddingLocation.MANAGED,
            "cached": EmbeddingLocation.MANAGED_CACHING,
        }[tier]
    module = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, location, compute) for rows in table_rows],
        cache_load_factor=cache_load_frac,
        pooling_mode=PoolingMode.SUM if is_pooled else PoolingMode.NONE,
        device=device,
        **fused_params,
    )
    for weight in module.split_embedding_weights():
        weight.uniform_(-0.01, 0.01)
    return module


def check_host_tier(table_rows: Sequence[int], dim: int, tier: str) -> None:
    """Refuse tables in a host tier that this host has no free memory for; see ``check_mappable``.

    Raises:
        ValueError: if their rows with two states of the optimizer, the most there are, do not fit.
    """
    if tier == "device":
        return
    rows_bytes = 4 * dim * sum(table_rows)
    check_mappable(f"calibrate tables of tier {tier}", 3 * rows_bytes, read_memory()[1])


def dense_tables(
    table_rows: Sequence[int], dim: int, *, device: torch.device
) -> DenseTableBatchedEmbeddingBagsCodegen:
    """Pooling tables whose gradient is dense, as of TorchRec's data-parallel tables."""
    module = DenseTableBatchedEmbeddingBagsCodegen(
        [(rows, dim) for rows in table_rows],
        pooling_mode=PoolingMode.SUM,
        use_cpu=device.type == "cpu",
    )
    module.weights.data = torch.empty_like(module.weights, device=device).uniform_(-0.01, 0.01)
    return module
