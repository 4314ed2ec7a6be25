"""The dense layers' optimizer: torch's fused kernel where there is one, with the plain results."""

from __future__ import annotations

import pytest
import torch

from hotrec.embedding.optimizers import make_dense
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.types import OptimizerKind

NUM_STEPS = 20


def train(optimizer: torch.optim.Optimizer, params: list[torch.Tensor]) -> None:
    generator = torch.Generator().manual_seed(1)
    for step in range(NUM_STEPS):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        if step % 3 == 2:
            params[-1].grad = None  # not used in this step
        optimizer.step()


@pytest.mark.parametrize("kind", list(OptimizerKind))
def test_fused_on_cpu_and_equal_to_the_plain_loop(kind: OptimizerKind) -> None:
    spec = OptimizerSpec(kind, learning_rate=0.1, eps=1e-6)
    weights = []
    for is_plain in (False, True):
        generator = torch.Generator().manual_seed(0)
        shapes = [(37, 19), (19,), (3, 5)]
        params: list[torch.Tensor] = [
            torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes
        ]
        optimizer = make_dense(spec, params)
        assert all(group["fused"] is True for group in optimizer.param_groups)
        if is_plain:
            known = ("lr", "betas", "eps")
            plain = {key: value for key, value in optimizer.defaults.items() if key in known}
            optimizer = type(optimizer)(params, **plain, foreach=False)
        train(optimizer, params)
        weights.append([param.detach() for param in params])
    for fused, plain in zip(*weights, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-6)
