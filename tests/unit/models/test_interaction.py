"""The interactions against TorchRec's: same outputs, same gradients, whatever the shapes."""

from __future__ import annotations

import pytest
import torch
from torchrec.distributed.train_pipeline.tracing import Tracer
from torchrec.models.dlrm import InteractionArch
from torchrec.modules.crossnet import LowRankCrossNet

from hotrec.models.interaction import CrossNet, DotInteraction


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, dtype=dtype, generator=generator)


def outcome(
    arch: torch.nn.Module, dense: torch.Tensor, sparse: torch.Tensor, weight: torch.Tensor
) -> list[torch.Tensor]:
    """Output and both gradients of a sum weighted by ``weight``."""
    dense, sparse = dense.detach().requires_grad_(), sparse.detach().requires_grad_()
    out = arch(dense_features=dense, sparse_features=sparse)
    (out * weight).sum().backward()
    assert dense.grad is not None
    assert sparse.grad is not None or arch.F == 0
    return [out, dense.grad, torch.zeros_like(sparse) if sparse.grad is None else sparse.grad]


@pytest.mark.parametrize("num_features", [0, 1, 2, 3, 4, 6, 7, 26])
@pytest.mark.parametrize("num_samples", [0, 1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_same_as_torchrec(num_features: int, num_samples: int, dtype: torch.dtype) -> None:
    dim = 5
    dense = draw(num_samples, dim, dtype=dtype)
    sparse = draw(num_samples, num_features, dim, dtype=dtype)
    weight = draw(num_samples, dim + num_features * (num_features + 1) // 2, dtype=dtype)
    expected = outcome(InteractionArch(num_features), dense, sparse, weight)
    got = outcome(DotInteraction(num_features), dense, sparse, weight)
    rtol = 1e-6 if dtype == torch.float32 else 1e-13
    for one, other in zip(got, expected, strict=True):
        assert one.shape == other.shape
        assert one.dtype == dtype
        torch.testing.assert_close(one, other, rtol=rtol, atol=10 * rtol)


def test_views_that_are_not_contiguous() -> None:
    dense, sparse, weight = draw(4, 6).t(), draw(6, 4, 3).transpose(1, 2), draw(10, 6).t()
    assert not any(tensor.is_contiguous() for tensor in (dense, sparse, weight))
    expected = outcome(InteractionArch(3), dense, sparse, weight)
    for one, other in zip(outcome(DotInteraction(3), dense, sparse, weight), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-5)


def test_gradients_by_differences_and_of_one_input() -> None:
    arch = DotInteraction(3)
    dense, sparse = draw(4, 5, dtype=torch.float64), draw(4, 3, 5, dtype=torch.float64)
    both = (dense.clone().requires_grad_(), sparse.clone().requires_grad_())
    assert torch.autograd.gradcheck(arch, both)
    assert torch.autograd.gradcheck(arch, (dense, both[1]))
    assert torch.autograd.gradcheck(arch, (both[0], sparse))


def test_an_infinite_gradient_stays_in_its_sample() -> None:
    """Not what TorchRec's does with zero times infinity, but no NaN in other samples either."""
    arch = DotInteraction(2)
    dense, sparse = draw(3, 4).requires_grad_(), draw(3, 2, 4).requires_grad_()
    weight = torch.ones(3, 7)
    weight[1, 5] = float("inf")
    (arch(dense, sparse) * weight).sum().backward()
    assert dense.grad is not None
    assert sparse.grad is not None
    for grad in (dense.grad, sparse.grad):
        assert grad[[0, 2]].isfinite().all()
        assert not grad[1].isfinite().all()


def test_it_is_torchrecs_arch_without_weights_and_can_be_traced() -> None:
    arch = DotInteraction(3)
    assert isinstance(arch, InteractionArch)
    assert not arch.state_dict()
    graph = Tracer(leaf_modules=[]).trace(arch)
    called = [node.target.__name__ for node in graph.nodes if node.op == "call_function"]
    assert called == ["dot_interaction"]


@pytest.mark.parametrize("num_samples", [0, 1, 5])
def test_cross_net_same_as_torchrecs(num_samples: int) -> None:
    torch.manual_seed(0)
    plain, ours = LowRankCrossNet(12, 3, 4), CrossNet(12, 3, 4)
    with torch.no_grad():
        for bias in plain.bias:
            bias.normal_()
    ours.load_state_dict(plain.state_dict())
    x = draw(num_samples, 12)
    results = []
    for net in (plain, ours):
        out = net(x)
        out.square().sum().backward()
        results.append([out, *(parameter.grad for parameter in net.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
