"""The output of a model that every choice trains alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def loss_and_output(model: nn.Module, output: Any) -> tuple[torch.Tensor, Any]:
    """The loss, and the rest: a detached copy if there is only a loss.

    Raises:
        ValueError: If the model returns something else, or a loss without gradient in training.
    """
    parts = [output] if isinstance(output, torch.Tensor) else output
    is_loss = isinstance(parts, tuple | list) and 0 < len(parts) <= 2
    if not is_loss or not isinstance(parts[0], torch.Tensor):
        found = type(output).__name__
        if isinstance(output, tuple | list):
            found += f" of {', '.join(type(part).__name__ for part in output) or 'nothing'}"
        raise ValueError(
            f"model: expected forward to return (loss, anything), or the loss, got {found}. Return "
            "the loss first, and everything else in one value."
        )
    loss = parts[0]
    if model.training and torch.is_grad_enabled():
        if loss.dim() > 1 and loss.numel() > 1:
            raise ValueError(
                f"model: expected a scalar loss, got one of shape {tuple(loss.shape)}. Return its "
                "mean."
            )
        if not loss.requires_grad:
            raise ValueError(
                "model: expected a loss with a gradient, got one without. Return it before "
                "detach(), and compute it outside of torch.no_grad()."
            )
    return loss, parts[1] if len(parts) == 2 else loss.detach()
