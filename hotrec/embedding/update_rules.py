"""Optimizer update rules for the rows that a step touches.

They update the hot replicas, the cold shards on CPU and, under look-ahead, those on CUDA, with the
arithmetic of FBGEMM's fused kernels, which update the cold shards on CUDA otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn.functional import embedding_bag

from hotrec.embedding.flat import put_rows
from hotrec.routing.sorting import sort_keys
from hotrec.types import OptimizerKind


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer and its constants.

    Args:
        kind: The update rule.
        learning_rate: The base learning rate, which a schedule multiplies.
        eps: Added to the root (Adagrad, row-wise Adagrad, Adam).
        beta1: The decay of the first moment (Adam).
        beta2: The decay of the second moment (Adam).
    """

    kind: OptimizerKind
    learning_rate: float
    eps: float = 1e-8
    beta1: float = 0.9
    beta2: float = 0.999

    def __post_init__(self) -> None:
        for name in ("learning_rate", "eps"):
            value = getattr(self, name)
            if not 0.0 <= value < float("inf"):
                raise ValueError(f"optimizer.{name}: expected a number >= 0, got {value}.")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if not 0.0 <= value < 1.0:
                raise ValueError(f"optimizer.{name}: expected 0 <= {name} < 1, got {value}.")

    @property
    def state_names(self) -> tuple[str, ...]:
        """The names of a row's state tensors, as in FBGEMM."""
        return {
            OptimizerKind.sgd: (),
            OptimizerKind.adagrad: ("momentum1",),
            OptimizerKind.rowwise_adagrad: ("momentum1",),
            OptimizerKind.adam: ("momentum1", "momentum2"),
        }[self.kind]

    def state_shape(self, num_rows: int, dim: int) -> tuple[int, ...]:
        """The shape of a state tensor of a table."""
        return (num_rows,) if self.kind is OptimizerKind.rowwise_adagrad else (num_rows, dim)

    def state_bytes_per_row(self, dim: int) -> int:
        """Bytes of fp32 optimizer state per row."""
        num_values = 1 if self.kind is OptimizerKind.rowwise_adagrad else dim
        return 4 * num_values * len(self.state_names)

    def bytes_per_row(self, dim: int) -> int:
        """Bytes of an fp32 row with its optimizer state."""
        return 4 * dim + self.state_bytes_per_row(dim)


@torch.no_grad()
def update_rows(
    spec: OptimizerSpec,
    weights_RD: torch.Tensor,
    states: Mapping[str, torch.Tensor],
    rows_U: torch.Tensor,
    grad_UD: torch.Tensor,
    *,
    learning_rate: float,
    num_updates: int,
) -> None:
    """Apply one update to rows int64 (U,), in place; other rows and their state do not change.

    With w weight, g gradient of the global batch's mean loss, m and v state:

        sgd               w -= lr g
        adagrad           v += g^2;          w -= lr g / (sqrt(v) + eps)
        rowwise_adagrad   v += mean_D(g^2);  w -= lr g / (sqrt(v) + eps)
        adam              m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;
                          w -= lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

    Sources: Duchi et al. 2011 (Adagrad); FBGEMM's EXACT_ROWWISE_ADAGRAD; Kingma, Ba 2015 (Adam;
    lazy as in FBGEMM: a row's moments decay in the steps that touch it, t counts all steps).

    Args:
        spec: The rule and its constants.
        weights_RD: The weights float (R, D).
        states: State tensors by ``spec.state_names``, of shape ``spec.state_shape(R, D)``.
        rows_U: The rows; distinct, or on CUDA repeated with equal gradients.
        grad_UD: Their gradients float (U, D), which are overwritten.
        learning_rate: The learning rate of this step.
        num_updates: The update count t, 1 at the first update.
    """
    if rows_U.numel() == 0:
        return
    match spec.kind:
        case OptimizerKind.sgd:
            direction_UD = grad_UD
        case OptimizerKind.adagrad:
            sum_UD = states["momentum1"].index_select(0, rows_U).addcmul_(grad_UD, grad_UD)
            states["momentum1"].index_copy_(0, rows_U, sum_UD)
            direction_UD = grad_UD.div_(sum_UD.sqrt_().add_(spec.eps))
        case OptimizerKind.rowwise_adagrad:
            sum_U = states["momentum1"].index_select(0, rows_U)
            # The norm reads the gradient once; squaring first would write and read a copy.
            sum_U += torch.linalg.vector_norm(grad_UD, dim=1).square_().div_(grad_UD.shape[1])
            states["momentum1"].index_copy_(0, rows_U, sum_U)
            direction_UD = grad_UD.div_(sum_U.sqrt_().add_(spec.eps)[:, None])
        case OptimizerKind.adam:
            first_UD = states["momentum1"].index_select(0, rows_U)
            first_UD.mul_(spec.beta1).add_(grad_UD, alpha=1 - spec.beta1)
            states["momentum1"].index_copy_(0, rows_U, first_UD)
            second_UD = states["momentum2"].index_select(0, rows_U)
            second_UD.mul_(spec.beta2).addcmul_(grad_UD, grad_UD, value=1 - spec.beta2)
            states["momentum2"].index_copy_(0, rows_U, second_UD)
            second_UD.div_(1 - spec.beta2**num_updates).sqrt_().add_(spec.eps)
            direction_UD = first_UD.div_(1 - spec.beta1**num_updates).div_(second_UD)
    rows_UD = weights_RD.index_select(0, rows_U).add_(direction_UD, alpha=-learning_rate)
    put_rows(weights_RD, rows_U, rows_UD)


class RowSums:
    """Sums rows by key in input order, bitwise reproducible.

    Args:
        keys_K: Keys int64 (K,), in any order, with repetition.
        limit: The upper bound of the keys.
    """

    def __init__(self, keys_K: torch.Tensor, limit: int) -> None:
        sorted_K, self._order_K = sort_keys(keys_K, limit)
        self.rows_U, self._counts_U = torch.unique_consecutive(sorted_K, return_counts=True)
        self._offsets_U = self._counts_U.cumsum(0) - self._counts_U

    @property
    def tensors(self) -> list[torch.Tensor]:
        """For the streams that use it."""
        return [self.rows_U, self._order_K, self._counts_U, self._offsets_U]

    @property
    def index(self) -> torch.Tensor:
        """The place in ``rows_U`` of each key, int64 (K,)."""
        num_U, num_K = self.rows_U.numel(), self._order_K.numel()
        places_U = torch.arange(num_U, device=self.rows_U.device)
        sorted_K = torch.repeat_interleave(places_U, self._counts_U, output_size=num_K)
        return torch.empty_like(sorted_K).index_copy_(0, self._order_K, sorted_K)

    def __call__(self, values_KD: torch.Tensor) -> torch.Tensor:
        """The sums (U, D) of the distinct keys ``rows_U``, ascending."""
        if self.rows_U.numel() == 0:
            return values_KD
        # Bags are summed front to back and the sort is stable.
        return embedding_bag(self._order_K, values_KD, self._offsets_U, mode="sum")


def sum_by_row(
    rows_K: torch.Tensor, grad_KD: torch.Tensor, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The distinct rows int64 (U,), ascending, and the sums of their gradients float (U, D).

    On CUDA, where the host would wait for U, rows repeat (K,), each time with the full sum.
    """
    if rows_K.numel() == 0:
        return rows_K, grad_KD
    if rows_K.is_cuda:
        return repeat_sums(rows_K, grad_KD)
    sums = RowSums(rows_K, num_rows)
    return sums.rows_U, sums(grad_KD)


def repeat_sums(rows_K: torch.Tensor, grad_KD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows, ascending, and for each the sum of the gradients of its row, in their order."""
    sorted_K, order_K = torch.sort(rows_K, stable=True)
    first_K = torch.searchsorted(sorted_K, sorted_K)
    ends_K = torch.searchsorted(sorted_K, sorted_K, right=True)
    # The first gradient of a row starts a bag of all of them, the others have empty bags after it.
    is_first_K = first_K == torch.arange(rows_K.numel(), device=rows_K.device)
    begins_K = torch.where(is_first_K, first_K, ends_K)
    sums_KD = embedding_bag(order_K, grad_KD, begins_K, mode="sum")
    return sorted_K, sums_KD.index_select(0, first_K)
