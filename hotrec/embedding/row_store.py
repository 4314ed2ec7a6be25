"""The rows of one embedding dimension that this rank owns: their memory, reads and updates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torchrec.optim.keyed import KeyedOptimizer

from hotrec.embedding.update_rules import OptimizerSpec, sum_by_row, update_rows
from hotrec.runtime.mapped_memory import host_view, keep_out_of_forks
from hotrec.types import Rows


class RowStore:
    """Rows float (R, D) of the ranks' shares, and their state by name, as in ``state_shape``.

    Ranks request rows by position. They are read and updated at a place: the position, or a slot if
    they are cached (``hotrec.embedding.cached_rows``). Batches have increasing numbers: ``reserve``
    gives a batch its places, ``wait`` waits until they are filled, and ``release`` frees the places
    of all batches up to a number. Without slots these have nothing to do.
    """

    def __init__(
        self, weights_RD: torch.Tensor, states: Mapping[str, torch.Tensor], spec: OptimizerSpec
    ) -> None:
        self.weights_RD, self.states = weights_RD, dict(states)
        self._spec = spec
        # A tensor, so that it is saved and loaded in place with the rest of the state.
        self.update_count = torch.zeros((), dtype=torch.int64)

    @property
    def num_places(self) -> int:
        return self.weights_RD.shape[0]

    def memory(self) -> list[torch.Tensor]:
        """All rows and their states, by position."""
        return [self.weights_RD, *self.states.values()]

    def foresee(self, positions_K: torch.Tensor, number: int) -> None:
        """Announce the rows, at positions int64 (K,), of a future batch."""

    def reserve(self, positions_K: torch.Tensor, number: int) -> torch.Tensor:
        """The places int64 (K,) of the rows at positions int64 (K,), until ``release(number)``.

        Raises:
            TooFewSlotsError: if the batches in flight need more slots than there are.
        """
        return positions_K

    def wait(self, number: int) -> None:
        """Wait until the rows of all batches up to a number are in their places."""

    def release(self, number: int, *, is_changed: bool) -> None:
        """Free the places of all batches up to ``number``, once their updates are done."""

    def flush(self) -> None:
        """Write changed rows back to where state dicts read them."""

    def refresh(self, positions: Rows) -> None:
        """Note that rows at positions int64 (K,) were written, with no batch in flight."""

    def restart(self) -> None:
        """Note that any row may have been written; restart batch numbers."""

    def close(self) -> None:
        """Stop the threads."""

    def look_up(self, positions_K: torch.Tensor) -> torch.Tensor:
        """Copy the rows at positions, float (K, D), between steps."""
        return self.read(positions_K)

    def read(self, places_K: torch.Tensor) -> torch.Tensor:
        """Copy the rows at places int64 (K,), float (K, D)."""
        return self.weights_RD.index_select(0, places_K)

    def update(
        self,
        places_K: torch.Tensor,
        grad_KD: torch.Tensor,
        learning_rate: float,
        num_updates: int,
        *,
        is_distinct: bool = False,
    ) -> None:
        """Update rows at places int64 (K,) once.

        Gradients float (K, D) of the same row are summed in order. ``num_updates`` starts at 1, for
        Adam's bias correction. If the rows are known to be distinct, they are not sorted, and the
        gradients are overwritten.
        """
        self.update_count.fill_(num_updates)
        if places_K.numel() == 0:
            return
        rows_U, grad_UD = places_K, grad_KD
        if not is_distinct:
            rows_U, grad_UD = sum_by_row(places_K, grad_KD.contiguous(), self.num_places)
        update_rows(
            self._spec,
            self.weights_RD,
            self.states,
            rows_U,
            grad_UD,
            learning_rate=learning_rate,
            num_updates=num_updates,
        )


class RowOptimizer(KeyedOptimizer):
    """The state and the learning rate of the rows that this rank owns, updated in backward.

    Args:
        params: Their parameters by name.
        states: The state of each by its names, and by "step" the number of updates.
        learning_rate: The first learning rate.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        states: Mapping[str, Mapping[str, torch.Tensor]],
        learning_rate: float,
    ) -> None:
        group: dict[str, Any] = {"params": list(params.values()), "lr": learning_rate}
        super().__init__(params, {params[name]: states[name] for name in params}, [group])

    @property
    def learning_rate(self) -> float:
        return float(next(iter(self.param_groups))["lr"])

    def step(self, closure: Any = None) -> None:
        """Nothing: the rows have been updated."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Nothing: rows have no gradients."""


def host_rows(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeros in host memory, kept out of loader workers: the host's view, and the device's.

    On CUDA the device can read them itself.
    """
    if device.type != "cuda":
        rows = torch.zeros(shape, dtype=dtype)
        return rows, rows
    like = torch.empty(0, dtype=dtype, device=device)
    seen: torch.Tensor = torch.ops.fbgemm.new_unified_tensor(like, [*shape], is_host_mapped=True)
    here = host_view(seen).zero_()
    keep_out_of_forks(here)
    return here, seen
