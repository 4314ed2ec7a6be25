"""The dense layers' optimizer: torch's fused kernel where there is one, with the plain results."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.torch_version import TorchVersion

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


def test_a_device_without_the_kernel_gets_torchs_own_choice() -> None:
    params: list[torch.Tensor] = [torch.nn.Parameter(torch.empty(3, device="meta"))]
    optimizer = make_dense(OptimizerSpec(OptimizerKind.adam, learning_rate=0.1), params)
    assert [group["fused"] for group in optimizer.param_groups] == [None]


@pytest.fixture
def _cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dispatcher says that CUDA has the fused kernels, which do nothing when called."""
    has_kernel: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key

    def has(name: str, key: str) -> bool:
        return name.startswith("aten::_fused_") or has_kernel(name, key)

    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", has)
    for name in ("sgd", "adagrad", "adam"):
        monkeypatch.setattr(torch, f"_fused_{name}_", lambda *_, **__: None)


@pytest.mark.usefixtures("_cuda_build")
@pytest.mark.parametrize("kind", list(OptimizerKind))
def test_torch_takes_the_choice_on_cuda(kind: OptimizerKind) -> None:
    with FakeTensorMode():
        params: list[torch.Tensor] = [torch.nn.Parameter(torch.empty(3, 4, device="cuda"))]
        params[0].grad = torch.empty_like(params[0])
        make_dense(OptimizerSpec(kind, learning_rate=0.1), params).step()


@pytest.mark.usefixtures("_cuda_build")
@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.12.1+cu130", "2.13.0+cu130"])
def test_adagrad_on_cuda_is_fused_from_torch_2_13_on(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    is_refused = version < "2.13"
    with FakeTensorMode():
        params: list[torch.Tensor] = [torch.nn.Parameter(torch.empty(3, 4, device="cuda"))]
        for kind in OptimizerKind:
            optimizer = make_dense(OptimizerSpec(kind, learning_rate=0.1), params)
            is_adagrad = kind in (OptimizerKind.adagrad, OptimizerKind.rowwise_adagrad)
            assert optimizer.defaults["fused"] is (None if is_adagrad and is_refused else True)
