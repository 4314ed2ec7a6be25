"""Lookup and update of cold rows on CPU, in place of FBGEMM's.

FBGEMM's CPU kernel for unpooled rows is a scalar loop and takes three to four times as long
(benchmarks/cpu_rows.py). Its module still owns weights and optimizer state.
"""

from __future__ import annotations

from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.embedding.flat import flat_rows, table_begins
from hotrec.embedding.update_rules import OptimizerSpec, sum_by_row, update_rows
from hotrec.runtime.stages import mark


def _flat_view(flat: torch.Tensor, parts: list[torch.Tensor], what: str) -> torch.Tensor:
    """View FBGEMM's flat buffer as rows, after checking that it concatenates the tables."""
    first = flat.data_ptr()
    for part in parts:
        if part.numel() == 0:  # a rank without rows of a small table
            continue
        if part.data_ptr() != first or not part.is_contiguous():
            raise RuntimeError(
                f"fbgemm {what}: expected tables one after the other in memory, got a table at "
                f"{part.data_ptr() - first} bytes from its place. This version of fbgemm-gpu lays "
                "tables out otherwise; use the pinned one (see `hotrec doctor`)."
            )
        first += part.numel() * part.element_size()
    shape = (-1, *parts[0].shape[1:])
    return flat.detach().view(shape)


class _ReadAndUpdate(torch.autograd.Function):
    """Reads rows; backward updates them. ``anchor`` ties the node into the graph."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, lookup: ColdRowsOnCpu, rows_K: torch.Tensor
    ) -> torch.Tensor:
        ctx.lookup, ctx.rows_K = lookup, rows_K
        return lookup.weights_RD.index_select(0, rows_K)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None, None]:
        mark("grads_exchange")
        ctx.lookup.update(ctx.rows_K, grads[0])
        mark("row_update")
        return None, None, None


class ColdRowsOnCpu:
    """The cold rows of a fused FBGEMM module on CPU; ``optimizer`` has the learning rate."""

    def __init__(
        self,
        module: SplitTableBatchedEmbeddingBagsCodegen,
        optimizer: torch.optim.Optimizer,
        spec: OptimizerSpec,
    ) -> None:
        parts = module.split_embedding_weights()
        self.weights_RD = _flat_view(module.weights_host, parts, "weights_host")
        self.states: dict[str, torch.Tensor] = {}
        for index, name in enumerate(spec.state_names):
            flat, states = getattr(module, f"{name}_host"), module.split_optimizer_states()
            self.states[name] = _flat_view(flat, [part[index] for part in states], f"{name}_host")
        self._begins_T = table_begins([part.shape[0] for part in parts])
        self._optimizer = optimizer
        self._spec = spec
        self._anchor = torch.zeros((), requires_grad=True)

    def __call__(self, features: KeyedJaggedTensor) -> torch.Tensor:
        rows_K = flat_rows(features, self._begins_T)
        out: torch.Tensor = _ReadAndUpdate.apply(self._anchor, self, rows_K)
        return out

    def read(self, rows_K: torch.Tensor) -> torch.Tensor:
        """Copy rows of the module's concatenated tables, float (K, D)."""
        return self.weights_RD.index_select(0, rows_K)

    def update(
        self, rows_K: torch.Tensor, grad_KD: torch.Tensor, learning_rate: float | None = None
    ) -> None:
        """Update rows int64 (K,) once; gradients float (K, D) of the same row are summed in order.

        The learning rate is the optimizer's current one by default.
        """
        rows_U, grad_UD = sum_by_row(rows_K, grad_KD.contiguous(), self.weights_RD.shape[0])
        update_rows(
            self._spec,
            self.weights_RD,
            self.states,
            rows_U,
            grad_UD,
            learning_rate=self.learning_rate if learning_rate is None else learning_rate,
            num_updates=1,  # only used by Adam, which FBGEMM lacks on CPU
        )

    @property
    def learning_rate(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])


def use_cpu_rows(lookup: nn.Module, spec: OptimizerSpec) -> None:
    """Replace the CPU kernels of TorchRec's ``GroupedEmbeddingsLookup``, in place."""
    kernels: Any = lookup._emb_modules
    for kernel in kernels:
        kernel.forward = ColdRowsOnCpu(kernel.emb_module, kernel.fused_optimizer, spec)
