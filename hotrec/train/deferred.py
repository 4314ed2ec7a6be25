"""Weight gradients of linear layers, computed after the rest of backward.

Backward of a linear layer makes two products: the gradient of its input, for which the layers
before it wait, and that of its weight, which nobody needs until the update. Pipelines without
bubbles (Qi et al. 2023, "Zero Bubble Pipeline Parallelism") put the second off. Here the gradients
of the looked-up rows leave sooner for it, and the weight gradients are computed while they travel.

The products and the order in which they are added up are autograd's, so gradients are bit for bit
the same. Under autocast they are products of its type, as autograd's are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable


class _Linear(torch.autograd.Function):
    """``F.linear`` that computes in backward the gradient of its input and notes the rest."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        layer: nn.Linear,
        owner: DeferredLinears,
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.layer, ctx.owner = layer, owner
        return F.linear(inputs, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        flat_grad = grad.reshape(-1, weight.shape[0])
        flat_inputs = inputs.view(-1, weight.shape[1])
        grad_inputs = None
        if ctx.needs_input_grad[0]:
            grad_inputs = flat_grad.mm(weight).view(inputs.shape)
        if ctx.owner.is_deferring:
            ctx.owner.note(ctx.layer, flat_grad, flat_inputs)
            return grad_inputs, None, None, None, None
        grads = _weight_grads(flat_grad, flat_inputs, has_bias=ctx.needs_input_grad[2])
        return grad_inputs, *grads, None, None


def _weight_grads(
    grad: torch.Tensor, inputs: torch.Tensor, *, has_bias: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Of weight and bias, by the same products as autograd's for ``F.linear``."""
    return grad.t().mm(inputs), grad.sum(0) if has_bias else None


def deferrable_layers(modules: Iterable[nn.Module]) -> list[nn.Linear]:
    """The layers whose weight gradients can be put off, of these modules, in their order.

    Those are plain ``nn.Linear`` layers with both parameters trained and their own: no subclass
    (parametrized ones are subclasses too), none that has been given another ``forward``, none with
    a parameter that another module holds as well.
    """
    distinct = list(dict.fromkeys(modules))
    holders: dict[int, int] = {}
    for module in distinct:
        for parameter in module._parameters.values():
            holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    return [
        module
        for module in distinct
        if type(module) is nn.Linear
        and "forward" not in vars(module)
        and isinstance(module._parameters.get("weight"), nn.Parameter)
        and all(
            parameter is None or (parameter.requires_grad and holders[id(parameter)] == 1)
            for parameter in module._parameters.values()
        )
    ]


class DeferredLinears:
    """Linear layers whose weight gradients are noted during backward and computed later.

    Inside ``deferring()`` a backward pass leaves the ``grad`` of their parameters alone;
    ``compute(layer)`` adds to them what the passes would have added. Outside of it all is as ever.

    Args:
        layers: from ``deferrable_layers``; their ``forward`` is replaced until ``restore``.
    """

    def __init__(self, layers: Iterable[nn.Linear]) -> None:
        self.is_deferring = False
        self._layers = list(layers)
        # By layer, one list per backward pass.
        self._noted: dict[nn.Linear, list[list[tuple[torch.Tensor, torch.Tensor]]]] = {}
        self._pass = 0
        self._last_pass: dict[nn.Linear, int] = {}
        for layer in self._layers:
            layer.forward = partial(self._forward, layer)  # type: ignore[method-assign]

    def _forward(self, layer: nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
        if (
            not torch.is_grad_enabled()
            # Autograd's products differ for other strides.
            or not inputs.is_contiguous()
            or not layer.weight.requires_grad
        ):
            return F.linear(inputs, layer.weight, layer.bias)
        weight: torch.Tensor = layer.weight
        bias: torch.Tensor | None = layer.bias
        device = inputs.device.type
        if torch.is_autocast_enabled(device):
            # What autocast would do inside, where autograd does not see it any more.
            dtype = torch.get_autocast_dtype(device)
            inputs, weight = inputs.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        out: torch.Tensor = _Linear.apply(inputs, weight, bias, layer, self)
        return out

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """One backward pass, whose weight gradients are put off."""
        self._pass += 1
        self.is_deferring = True
        try:
            yield
        except BaseException:
            self._noted.clear()
            raise
        finally:
            self.is_deferring = False

    def note(self, layer: nn.Linear, grad: torch.Tensor, inputs: torch.Tensor) -> None:
        """Called in backward: gradient (B, out) of the layer's output, and its input (B, in)."""
        passes = self._noted.setdefault(layer, [])
        if not passes or self._last_pass[layer] != self._pass:
            passes.append([])
            self._last_pass[layer] = self._pass
        passes[-1].append((grad, inputs))

    def has_noted(self, layer: nn.Linear) -> bool:
        return layer in self._noted

    @torch.no_grad()
    def compute(self, layer: nn.Linear) -> None:
        """Add the noted gradients to those of the layer's parameters, and let go of the inputs."""
        for calls in self._noted.pop(layer, []):
            # Autograd adds up the calls of one pass before it adds to ``grad``.
            totals: list[torch.Tensor | None] = [None, None]
            for grad, inputs in calls:
                parts = _weight_grads(grad, inputs, has_bias=layer.bias is not None)
                for index, raw in enumerate(parts):
                    part = None if raw is None else raw.to(layer.weight.dtype)
                    total = totals[index]
                    totals[index] = part if total is None or part is None else total.add_(part)
            for parameter, total in zip((layer.weight, layer.bias), totals, strict=True):
                if total is not None:
                    _accumulate(parameter, total)

    def restore(self) -> None:
        """Give the layers their own ``forward`` back; what is noted is dropped."""
        self._noted.clear()
        for layer in self._layers:
            vars(layer).pop("forward", None)


def _accumulate(parameter: torch.Tensor, grad: torch.Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = grad
    else:
        parameter.grad.add_(grad)
