"""Marks around the parts of a step that are TorchRec's: its optimizer call and its lookups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

from hotrec.stages import backward_point, mark, mark_backward


class MarkedOptimizer:
    """What TorchRec's pipelines call of an optimizer, with marks.

    ``register_step_pre_hook`` would do, but KeyedOptimizer never calls the hooks.

    Args:
        optimizer: that does the work.
        clipped: parameters whose gradients are scaled down to ``max_norm`` together before it.
        max_norm: None to leave them as they are.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        clipped: Sequence[nn.Parameter] = (),
        max_norm: float | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._clipped, self._max_norm = clipped, max_norm

    def zero_grad(self) -> None:
        mark("other")
        self._optimizer.zero_grad()
        mark("other")

    def step(self) -> None:
        mark("hot_exchange")  # DDP waited at the end of backward, so gradients are means
        if self._max_norm is not None:
            nn.utils.clip_grad_norm_(self._clipped, self._max_norm)
        self._optimizer.step()
        mark("optimizer")


def mark_lookups(model: nn.Module) -> None:
    """Mark the lookups of TorchRec's sharded ``EmbeddingBagCollection`` modules, both ways.

    To be called once for a model. In backward a sharded lookup updates its rows, and autograd comes
    to it when the gradients have arrived. That of data-parallel tables counts as lookup, both ways.
    """
    for module in model.modules():
        # hotrec's own kinds mark themselves.
        if type(module) is ShardedEmbeddingBagCollection:
            lookups: Any = module._lookups
            for lookup in lookups:
                _mark_lookup(lookup)


def _mark_lookup(lookup: nn.Module) -> None:
    is_replicated = isinstance(lookup, DistributedDataParallel)
    points: list[torch.Tensor | None] = []

    def before(_: nn.Module, inputs: Any) -> None:
        mark("ids_exchange")
        stage = "row_lookup" if is_replicated else "row_update"
        points.append(backward_point(stage, inputs[0].values()))

    def after(_: nn.Module, inputs: Any, pooled: torch.Tensor) -> torch.Tensor:
        mark("row_lookup")
        return mark_backward(pooled, "grads_exchange", points.pop())

    lookup.register_forward_pre_hook(before)
    lookup.register_forward_hook(after)
