"""The calls and the outputs of a sharded model that every choice trains alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torchrec.distributed.types import ShardedModule

from hotrec.embedding.torchrec import name_of_user


def allow_one_call(model: nn.Module) -> None:
    """Refuse a second call of an embedding module in one forward of the model.

    Its kernels would update rows once per call, each time with a part of the gradient.
    """
    calls: dict[nn.Module, int] = {}

    def count(name: str, module: nn.Module, _: Any) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        calls[module] = calls.get(module, 0) + 1
        if calls[module] > 1:
            raise RuntimeError(
                f"embedding module {name}: expected one call in a forward of the model, got a "
                "second, and rows would be updated twice. Look all features up in one call."
            )

    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if isinstance(module, ShardedModule) and module not in inside:
            inside.update(module.modules())
            module.register_forward_pre_hook(partial(count, name_of_user(name)))
    model.register_forward_pre_hook(lambda *_: calls.clear())


def take_losses(model: nn.Module) -> None:
    """Adapts a model that only returns the loss to a pipeline, which expects (loss, anything)."""

    def pair(module: nn.Module, _: Any, output: Any) -> Any:
        return _loss_and_output(module, output) if vars(module).get(_IN_PIPELINE) else None

    model.register_forward_hook(pair)


_IN_PIPELINE = "hotrec_in_pipeline"


@contextmanager
def in_pipeline(model: nn.Module) -> Iterator[None]:
    """Allow a pipeline to call the model inside the block."""
    setattr(model, _IN_PIPELINE, True)
    try:
        yield
    finally:
        setattr(model, _IN_PIPELINE, False)


def _loss_and_output(model: nn.Module, output: Any) -> tuple[torch.Tensor, Any]:
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
