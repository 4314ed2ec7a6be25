"""How the dense layers compute: what the device must have, and what stays float32."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hotrec.models.dense import check_compiler, set_up_dense_layers, use_precision
from hotrec.types import ModelKind, Precision
from tests.helpers.dense import POOLED_KINDS, Clicks, loss_of, make_inputs

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _precision_as_before() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("precision", "capability", "expected"),
    [
        (Precision.fp32, (9, 0), "highest"),
        (Precision.tf32, (8, 0), "high"),
        (Precision.tf32, (7, 5), None),
        (Precision.bf16, (7, 0), None),
    ],
)
@pytest.mark.filterwarnings("error")
def test_on_gpus_the_process_multiplies_as_asked(
    monkeypatch: pytest.MonkeyPatch,
    precision: Precision,
    capability: tuple[int, int],
    expected: str | None,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    torch.set_float32_matmul_precision("medium")
    if expected is None:
        with pytest.raises(ValueError, match=precision.name):
            use_precision(precision, torch.device("cuda", 0))
        return
    use_precision(precision, torch.device("cuda", 0))
    assert torch.get_float32_matmul_precision() == expected


def test_what_the_machine_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"^trainer\.precision"):
        use_precision(Precision.tf32, CPU)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(RuntimeError, match=r"^trainer\.compile"):
        check_compiler(CPU)


@pytest.mark.parametrize("kind", POOLED_KINDS)
def test_bf16_multiplies_in_bf16_and_keeps_weights_in_fp32(kind: ModelKind) -> None:
    model, exact = Clicks(kind, 0), Clicks(kind, 0)
    set_up_dense_layers(model.model, CPU, Precision.bf16, is_compiled=False)
    inputs = make_inputs(0, 0, size=32)
    assert model(inputs).dtype is torch.bfloat16
    for clicks in (model, exact):
        loss_of(clicks, inputs, 32).backward()
    for (name, got), (_, expected) in zip(
        model.named_parameters(), exact.named_parameters(), strict=True
    ):
        assert got.dtype is torch.float32
        if expected.grad is None:
            assert got.grad is None
            continue
        assert got.grad is not None
        assert got.grad.dtype is torch.float32
        assert not torch.equal(got.grad, expected.grad), name
        torch.testing.assert_close(got.grad, expected.grad, rtol=0.1, atol=5e-3, msg=name)
