"""Reads and updates of cold rows in the memory of FBGEMM's modules, without its kernels.

A batch reads each row once, so FBGEMM's forward pass and the sort of its backward pass have nothing
to do. On CPU its kernel for unpooled rows is a scalar loop and takes three to four times as long.
"""

from __future__ import annotations

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn

from hotrec.embedding.update_rules import OptimizerSpec, sum_by_row, update_rows
from hotrec.runtime.mapped_memory import host_view


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


class FusedRows(RowsInMemory):
    """The rows of a fused FBGEMM module, in memory that the device reads directly."""

    def __init__(
        self,
        module: SplitTableBatchedEmbeddingBagsCodegen,
        optimizer: torch.optim.Optimizer,
        spec: OptimizerSpec,
    ) -> None:
        weights_RD, *states = mapped_rows(module, spec, is_wanted=True)
        assert weights_RD is not None
        of_name = {n: s for n, s in zip(spec.state_names, states, strict=True) if s is not None}
        # On a rank without rows these are empty host tensors.
        super().__init__(weights_RD.to(module.current_device), of_name, optimizer, spec)
        self.module = module
