"""Packed output against the expanded one, and the linear layer on packed rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from hotrec.embedding.late import LateLinear
from hotrec.embedding.packed import PackedJaggedTensor

TOLERANCES = {torch.float32: 1e-6, torch.float64: 1e-12}


def some_packed(
    num_rows: int = 5, num_ids: int = 40, dim: int = 4, dtype: torch.dtype = torch.float32
) -> PackedJaggedTensor:
    generator = torch.Generator().manual_seed(num_rows + num_ids)
    rows = torch.randn(num_rows, dim, generator=generator, dtype=dtype).requires_grad_()
    row_of_K = torch.randint(max(1, num_rows - 1), (num_ids,), generator=generator)  # not the last
    return PackedJaggedTensor(
        rows, row_of_K, torch.tensor([num_ids - 3, 0, 3]), torch.arange(num_ids)
    )


def test_a_packed_tensor_stays_packed() -> None:
    packed = some_packed()
    for expand in (packed.values, packed.to_dense, lambda: packed.expand(torch.zeros(40, 4))):
        with pytest.raises(ValueError, match="5 distinct rows"):
            expand()
    expanded = packed.materialize()
    assert type(expanded) is JaggedTensor
    assert torch.equal(expanded.values(), packed.packed_values()[packed.reverse_indices()])
    assert torch.equal(expanded.offsets(), torch.tensor([0, 37, 37, 40]))
    assert torch.equal(expanded.weights(), packed.weights())
    moved = packed.to(torch.device("meta"))
    assert type(moved) is PackedJaggedTensor
    assert {moved.reverse_indices().device.type, moved.device().type} == {"meta"}


def linear_of(layer: LateLinear) -> nn.Linear:
    plain = nn.Linear(
        layer.in_features, layer.out_features, layer.bias is not None, dtype=layer.weight.dtype
    )
    plain.load_state_dict(layer.state_dict())
    layer.load_state_dict(plain.state_dict())
    return plain


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_ids", [40, 400, 6, 0])  # 6: fewer than the rows of some
def test_late_linear_is_linear_on_the_concatenated_rows(
    num_ids: int, bias: bool, dtype: torch.dtype
) -> None:
    num_rows, dims = [30, 4, 9], [4, 8, 2]
    layer = LateLinear(dims, 5, bias, dtype=dtype)
    plain = linear_of(layer)
    parts = [
        some_packed(num_rows=rows, num_ids=num_ids, dim=dim, dtype=dtype)
        for rows, dim in zip(num_rows, dims, strict=True)
    ]
    leaves = [part.packed_values() for part in parts]
    joined = torch.cat([part.materialize().values() for part in parts], dim=1)
    expected = plain(joined)
    upstream = torch.randn_like(expected)
    expected_grads = torch.autograd.grad(expected, [*leaves, *plain.parameters()], upstream)

    def run(features: list[Any]) -> list[torch.Tensor]:
        found = layer(features)
        return [found, *torch.autograd.grad(found, [*leaves, *layer.parameters()], upstream)]

    late, again = run(parts), run(parts)
    expanded = run([part.materialize() for part in parts])  # as the unsharded model calls it
    for found, repeated, other, wanted in zip(
        late, again, expanded, [expected, *expected_grads], strict=True
    ):
        assert torch.equal(found, repeated)
        # The order of additions differs, so errors are those of the largest sums.
        largest = float(wanted.detach().abs().max()) if wanted.numel() else 0.0
        atol = TOLERANCES[dtype] * max(1.0, largest)
        torch.testing.assert_close(found, wanted, rtol=0, atol=atol)
        torch.testing.assert_close(other, wanted, rtol=0, atol=atol)


@pytest.mark.parametrize(
    "features",
    [
        [],
        [some_packed(num_ids=9)],
        [some_packed(num_ids=9), some_packed(num_ids=9, dim=4)],
        [some_packed(num_ids=9), some_packed(num_ids=8, dim=8)],
        [some_packed(num_ids=9), some_packed(num_ids=8, dim=8).materialize()],
    ],
)
def test_features_of_other_shapes_are_refused(features: list[JaggedTensor]) -> None:
    with pytest.raises(ValueError, match=r"^features of LateLinear: expected dimensions \[4, 8\]"):
        LateLinear([4, 8], 3)(features)
