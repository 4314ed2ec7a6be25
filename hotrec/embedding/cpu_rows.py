"""Lookup and update of cold rows on CPU, in place of FBGEMM's.

FBGEMM's CPU kernel for unpooled rows is a scalar loop and takes three to four times as long
(cpu_rows.py of benchmarks, commit f7bfb0d5). Its module still owns weights and optimizer state.
"""

from __future__ import annotations

from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn

from hotrec.embedding.torchrec import kernels
from hotrec.embedding.update_rules import OptimizerSpec, sum_by_row, update_rows
from hotrec.runtime.mapped_memory import host_view
from hotrec.runtime.stages import mark


def _flat_view(
    module: nn.Module, name: str, parts: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """FBGEMM's flat buffer as rows: a view of the host and one of the device.

    Raises:
        RuntimeError: if the tables are not contiguous in the buffer.
    """
    size = sum(part.numel() for part in parts)
    buffers = {f"{name}_{place}": getattr(module, f"{name}_{place}") for place in _PLACES}
    what, flat = next((item for item in buffers.items() if item[1].numel() == size), ("host", None))
    first = 0 if flat is None else flat.data_ptr()
    for part in parts:
        if part.numel() == 0:  # a rank without rows of a small table
            continue
        if flat is None or part.data_ptr() != first or not part.is_contiguous():
            raise RuntimeError(
                f"fbgemm {what}: expected contiguous tables in memory, got a table "
                f"{part.data_ptr() - first} bytes from its expected address. This version of "
                "fbgemm-gpu has another layout; use the pinned one (see `hotrec doctor`)."
            )
        first += part.numel() * part.element_size()
    assert flat is not None
    here = host_view(flat) if what.endswith("uvm") else flat
    width = parts[0].shape[1:]
    return here.detach().view(-1, *width), flat.detach().view(-1, *width)


# The memory of a module's tables: host, host memory that the device maps, device.
_PLACES = ("host", "uvm", "dev")


def _rows_and_states(
    module: SplitTableBatchedEmbeddingBagsCodegen, spec: OptimizerSpec
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    of_tables = module.split_optimizer_states() if spec.state_names else []
    return [
        _flat_view(module, "weights", module.split_embedding_weights()),
        *(
            _flat_view(module, name, [part[index] for part in of_tables])
            for index, name in enumerate(spec.state_names)
        ),
    ]


def fbgemm_rows(
    module: SplitTableBatchedEmbeddingBagsCodegen, spec: OptimizerSpec
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Views of the weights (R, D) and the states, by name, of a module's concatenated tables.

    Those in mapped host memory are host tensors.
    """
    (weights_RD, _), *states = _rows_and_states(module, spec)
    return weights_RD, dict(zip(spec.state_names, (here for here, _ in states), strict=True))


def mapped_rows(
    module: SplitTableBatchedEmbeddingBagsCodegen, spec: OptimizerSpec, *, is_wanted: bool
) -> list[torch.Tensor | None]:
    """Their device views; None for host tensors, unless ``is_wanted``."""
    return [
        seen if is_wanted or here.is_cuda else None for here, seen in _rows_and_states(module, spec)
    ]


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


class RowsInMemory:
    """Rows float (R, D) and their state by name; ``optimizer`` provides the learning rate."""

    def __init__(
        self,
        weights_RD: torch.Tensor,
        states: dict[str, torch.Tensor],
        optimizer: torch.optim.Optimizer,
        spec: OptimizerSpec,
    ) -> None:
        self.weights_RD = weights_RD
        self.states = states
        self._optimizer = optimizer
        self._spec = spec

    def read(self, rows_K: torch.Tensor) -> torch.Tensor:
        """Copy rows, float (K, D)."""
        return self.weights_RD.index_select(0, rows_K)

    def update(
        self,
        rows_K: torch.Tensor,
        grad_KD: torch.Tensor,
        learning_rate: float | None = None,
        num_updates: int = 1,
        *,
        is_distinct: bool = False,
    ) -> None:
        """Update rows int64 (K,) once; gradients float (K, D) of the same row are summed in order.

        The learning rate is the optimizer's current one by default; ``num_updates`` starts at 1 and
        is only used by Adam. If the rows are known to be distinct, they are not sorted, and the
        gradients are overwritten.
        """
        rows_U, grad_UD = rows_K, grad_KD
        if not is_distinct:
            rows_U, grad_UD = sum_by_row(rows_K, grad_KD.contiguous(), self.weights_RD.shape[0])
        update_rows(
            self._spec,
            self.weights_RD,
            self.states,
            rows_U,
            grad_UD,
            learning_rate=self.learning_rate if learning_rate is None else learning_rate,
            num_updates=num_updates,
        )

    @property
    def learning_rate(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])


class ColdRowsOnCpu(RowsInMemory):
    """The cold rows of a fused FBGEMM module on CPU."""

    def __init__(
        self,
        module: SplitTableBatchedEmbeddingBagsCodegen,
        optimizer: torch.optim.Optimizer,
        spec: OptimizerSpec,
    ) -> None:
        super().__init__(*fbgemm_rows(module, spec), optimizer, spec)
        self._anchor = torch.zeros((), requires_grad=True)

    def look_up(self, rows_K: torch.Tensor) -> torch.Tensor:
        """Read rows float (K, D); backward updates them, at the optimizer's learning rate."""
        out: torch.Tensor = _ReadAndUpdate.apply(self._anchor, self, rows_K)
        return out


def use_cpu_rows(lookup: nn.Module, spec: OptimizerSpec) -> None:
    """Replace the CPU kernels of TorchRec's ``GroupedEmbeddingsLookup``, in place."""
    for kernel in kernels(lookup):
        kernel.replace(ColdRowsOnCpu(kernel.fbgemm, kernel.optimizer, spec))
