"""The dense layers' late updates in one process: what is put off, when it is done, what is refused.

That weights equal DDP's is shown in tests/distributed/test_dense.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hotrec.runtime.ranks import Ranks
from hotrec.train.dense_sync import DeferredLinears, DenseSync
from hotrec.types import ModelKind, Precision
from tests.helpers.dense import Clicks, Oddities, loss_of, make_inputs, make_optimizer, weights_of


@pytest.fixture
def clicks(one_rank: Ranks) -> Iterator[tuple[Clicks, DenseSync]]:
    model = Clicks(ModelKind.dlrm, 0)
    dense = DenseSync(model, make_optimizer(model, "adam"))
    yield model, dense
    dense.close()


def make_step(model: nn.Module, dense: DenseSync, step: int = 0) -> None:
    loss = loss_of(model, make_inputs(0, step), 6)
    with dense.backward():
        loss.backward()
    dense.finish_backward()
    dense.step()


def take_grad(tensor: torch.Tensor) -> torch.Tensor:
    grad, tensor.grad = tensor.grad, None
    assert grad is not None
    return grad


def changed(model: nn.Module, before: dict[str, torch.Tensor]) -> set[str]:
    """The parts whose weights are no longer those of ``before``."""
    now = dict(model.named_parameters())
    return {name.split(".")[1] for name in now if not torch.equal(now[name], before[name])}


@pytest.mark.parametrize("shape", [(4, 3), (2, 5, 3), (1, 3), (0, 3), (3,)])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("precision", [Precision.fp32, Precision.bf16])
def test_deferred_gradients_are_autograds_bit_for_bit(
    shape: tuple[int, ...], has_bias: bool, precision: Precision
) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(3, 2, bias=has_bias)
    passes = [torch.randn(shape), torch.randn(shape)]
    weights = torch.randn(*shape[:-1], 2)

    def run(inputs: torch.Tensor) -> torch.Tensor:
        inputs = inputs.clone().requires_grad_()
        # Called three times in a pass: autograd adds these up before it adds to ``grad``.
        with torch.autocast(
            "cpu", torch.bfloat16, enabled=precision is Precision.bf16, cache_enabled=False
        ):
            out = layer(inputs) + layer(2 * inputs).tanh() + layer(inputs.square())
        assert (out.dtype is torch.bfloat16) == (precision is Precision.bf16)
        (out * weights).sum().backward()
        return take_grad(inputs)

    def take_grads() -> list[torch.Tensor]:
        return [take_grad(parameter) for parameter in layer.parameters()]

    expected = [run(inputs) for inputs in passes]
    expected += take_grads()
    deferred = DeferredLinears([layer])
    got = []
    for inputs in passes:
        with deferred.deferring():
            got.append(run(inputs))
        assert all(parameter.grad is None for parameter in layer.parameters())
    deferred.compute(layer)
    got += take_grads()
    at_once = [run(inputs) for inputs in passes]  # outside of deferring() nothing is put off
    at_once += take_grads()
    for one, other, plain in zip(got, at_once, expected, strict=True):
        assert torch.equal(one, plain)
        assert torch.equal(other, plain)


def test_the_update_has_the_settings_of_its_step(clicks: tuple[Clicks, DenseSync]) -> None:
    model, dense = clicks
    optimizer = dense._optimizer
    (group,) = optimizer.param_groups
    group["lr"] = 0.0
    before = weights_of(model)
    make_step(model, dense)
    group["lr"] = 0.5
    dense.flush()
    assert changed(model, before) == set()
    assert group["lr"] == 0.5


class _Bypass(nn.Module):
    """Reads a layer's weight without calling the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(F.linear(inputs, self.first.weight, self.first.bias))


def test_what_would_not_be_exact_is_refused(one_rank: Ranks) -> None:
    model = _Bypass()
    dense = DenseSync(model, make_optimizer(model, "sgd"))
    make_step(model, dense)
    with pytest.raises(RuntimeError, match=r"first\.weight"):
        make_step(model, dense, 1)
    norm = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 1))
    dense = DenseSync(norm, make_optimizer(norm, "sgd"))
    first, second = (loss_of(norm, make_inputs(0, step), 6) for step in range(2))
    with dense.backward():
        first.backward()
        with pytest.raises(RuntimeError, match=r"dense parameter 0\."):
            second.backward()
    for added in (nn.BatchNorm1d(2), nn.Embedding(2, 2, sparse=True)):
        layers = nn.Sequential(nn.Linear(2, 2), added)
        with pytest.raises(ValueError, match="dense layer 1"):
            DenseSync(layers, make_optimizer(layers, "sgd"))


def test_closing_gives_the_model_back(one_rank: Ranks) -> None:
    model, other = Oddities(0), Oddities(0)
    dense = DenseSync(model, make_optimizer(model, "sgd"))
    make_step(model, dense)
    dense.close()
    other.load_state_dict(model.state_dict())
    for one in (model, other):
        loss_of(one, make_inputs(0, 0), 6).backward()
    for found, same in zip(model.parameters(), other.parameters(), strict=True):
        assert (found.grad is None) == (same.grad is None)
        assert found.grad is None or torch.equal(found.grad, same.grad)
