"""The optimizer of the hot replicas: updates the rows that some rank touched, and no others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torchrec.optim.keyed import KeyedOptimizer

from hotrec.embedding.hot_exchange import HotReplicas
from hotrec.embedding.update_rules import OptimizerSpec, update_rows


class HotOptimizer(KeyedOptimizer):
    """Same rule as the fused optimizer of the cold rows, on the same lines of state.

    Args:
        replicas: by prefix of the parameter names, the hot rows of each dimension.
        names: by the same prefix, the parameter name of each hot table, in the replica's order.
        spec: the rule and its constants.
    """

    def __init__(
        self,
        replicas: Mapping[str, HotReplicas],
        names: Mapping[str, Sequence[str]],
        spec: OptimizerSpec,
    ) -> None:
        self._replicas = dict(replicas)
        self._spec = spec
        self._states: dict[str, dict[str, torch.Tensor]] = {}
        # A tensor, so that it is saved and loaded in place with the rest of the state.
        self._num_updates = torch.zeros((), dtype=torch.int64)
        params: dict[str, torch.Tensor] = {}
        state: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        for prefix, replica in self._replicas.items():
            weights_HD = replica.rows
            num_hot = weights_HD.shape[0]
            flat = {
                name: torch.zeros(spec.state_shape(num_hot, replica.dim), device=weights_HD.device)
                for name in spec.state_names
            }
            self._states[prefix] = flat
            begin = 0
            for name, num_rows in zip(names[prefix], replica.num_rows_T, strict=True):
                view = weights_HD[begin : begin + num_rows]
                params[name] = view
                state[view] = {
                    key: tensor[begin : begin + num_rows] for key, tensor in flat.items()
                }
                state[view]["step"] = self._num_updates
                begin += num_rows
        group: dict[str, Any] = {"params": list(params.values()), "lr": spec.learning_rate}
        super().__init__(params, state, [group])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update every row whose gradient arrived since the last step."""
        self._num_updates += 1
        learning_rate = next(iter(self.param_groups))["lr"]
        for prefix, replica in self._replicas.items():
            slots_U, grad_UD = replica.take_gradient()
            update_rows(
                self._spec,
                replica.rows,
                self._states[prefix],
                slots_U,
                grad_UD,
                learning_rate=learning_rate,
                num_updates=int(self._num_updates),
            )

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Drop gradients that no ``step`` used; after a ``step`` all rows hold zeros already."""
        for replica in self._replicas.values():
            replica.drop_gradient()
