"""Packed output against the expanded one, and the linear layer on packed rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor

from hotrec.embedding.collection import HotColdEmbeddingCollection
from hotrec.embedding.convert import use_hot_cold
from hotrec.embedding.late import LateLinear
from hotrec.embedding.packed import (
    PackedJaggedTensor,
    use_packed_jagged_tensor,
)
from tests.unit.embedding.setups import NUM_ROWS, PARTITIONS, some_features
from tests.unit.embedding.test_sequences import (
    Output,
    assert_same,
    gradient,
    scores,
    some_tables,
)

TOLERANCES = {torch.float32: 1e-6, torch.float64: 1e-12}


def materialized(found: Any) -> Output:
    for of_feature in found.values():
        assert type(of_feature) is PackedJaggedTensor
    return {name: of_feature.materialize() for name, of_feature in found.items()}


@pytest.mark.parametrize("need_indices", [False, True])
@pytest.mark.parametrize("partition", list(PARTITIONS))
def test_materialized_equals_the_expanded_output(partition: str, need_indices: bool) -> None:
    plain = EmbeddingCollection(tables=some_tables(), need_indices=need_indices)
    expanded = use_hot_cold(plain, PARTITIONS[partition])
    packed = use_hot_cold(use_packed_jagged_tensor(plain), PARTITIONS[partition])
    assert isinstance(packed, HotColdEmbeddingCollection)
    features = some_features()
    expected, found = expanded(features), packed(features)
    assert_same(materialized(found), expected)
    assert_same(materialized(packed(packed.router(features))), expected)
    # The rows of the table that some id reads, once.
    read = torch.cat([features["a"].values(), features["b"].values()]).unique()
    assert found["b"].packed_values() is found["a@t"].packed_values()
    assert found["b"].packed_values().shape == (read.numel(), 4)
    scores(expected, 1).backward()
    scores(materialized(found), 1).backward()
    for name in NUM_ROWS:
        torch.testing.assert_close(
            gradient(packed, name), gradient(expanded, name), rtol=1e-6, atol=1e-6
        )


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
    assert isinstance(packed, JaggedTensor)
    with pytest.raises(ValueError, match=r"^values of a packed .* got 5 distinct rows for 40 ids"):
        packed.values()
    with pytest.raises(ValueError, match=r"^values of a packed"):
        packed.to_dense()
    with pytest.raises(ValueError, match=r"^rows to expand: .* the 5 distinct rows, got 40\."):
        packed.expand(torch.zeros(40, 4))
    expanded = packed.materialize()
    assert type(expanded) is JaggedTensor
    assert torch.equal(expanded.values(), packed.packed_values()[packed.reverse_indices()])
    assert torch.equal(expanded.offsets(), torch.tensor([0, 37, 37, 40]))
    assert torch.equal(expanded.weights(), packed.weights())
    moved = packed.to(torch.device("meta"))
    assert type(moved) is PackedJaggedTensor
    assert {moved.reverse_indices().device.type, moved.device().type} == {"meta"}
    assert moved.reverse_indices().shape == (40,)
    assert packed.size_in_bytes() == 5 * 16 + 8 * (40 + 40 + 3) + 8 * 4
    assert str(packed) == "PackedJaggedTensor(40 ids of 5 distinct rows of 4, 3 samples)"


def test_gradients_of_features_are_added_from_the_last_used_to_the_first() -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(7, 4, generator=generator)
    index = [torch.randint(7, (2000,), generator=generator) for _ in range(3)]
    upstream = [torch.randn(2000, 4, generator=generator) for _ in range(3)]

    def grads_of(used: list[int]) -> torch.Tensor:
        leaf = rows.clone().requires_grad_()
        total = torch.zeros(())
        for at in used:
            packed = PackedJaggedTensor(leaf, index[at], torch.tensor([2000]))
            total = total + (packed.materialize().values() * upstream[at]).sum()
        total.backward()
        assert leaf.grad is not None
        return leaf.grad

    alone = [grads_of([at]) for at in range(3)]
    assert torch.equal(grads_of([0, 1, 2]), (alone[2] + alone[1]) + alone[0])
    assert torch.equal(grads_of([2, 0, 1]), (alone[1] + alone[0]) + alone[2])
    # Of one feature in the order of its ids.
    in_order = torch.zeros(7, 4)
    for row, of_id in zip(index[0].tolist(), upstream[0], strict=True):
        in_order[row] += of_id
    assert torch.equal(alone[0], in_order)


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
