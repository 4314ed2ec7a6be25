"""Pooling against autograd through plain indexing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.embedding import pooling
from hotrec.embedding.pooling import MOST_IDS, pool_rows, sum_in_pieces
from hotrec.routing.features import Column, RoutedGroup
from hotrec.routing.router import Router
from hotrec.types import Partition

COLUMNS = [
    Column("a", "a", "t", is_mean=False),
    Column("b", "b", "t", is_mean=True),
    Column("c", "c", "u", is_mean=False),
]
PARTITION = Partition({"t": 9, "u": 4}, {"t": np.array([5, 0, 2]), "u": np.arange(4)})


def routed_group(*, is_one_hot: bool, is_weighted: bool, batch_size: int = 3) -> RoutedGroup:
    rng = np.random.default_rng(batch_size + 10 * is_one_hot)
    shape = (len(COLUMNS), batch_size)
    lengths = np.ones(shape, np.int64) if is_one_hot else rng.integers(0, 4, shape)
    ids = np.concatenate(
        [
            rng.integers(PARTITION.num_rows[column.table], size=count.sum())
            for column, count in zip(COLUMNS, lengths, strict=True)
        ]
    )
    features = KeyedJaggedTensor(
        keys=[column.feature for column in COLUMNS],
        values=torch.from_numpy(ids),
        lengths=torch.from_numpy(lengths).view(-1),
        weights=torch.from_numpy(rng.uniform(-2, 2, ids.size)).float() if is_weighted else None,
        stride=batch_size,
    )
    return Router({4: COLUMNS}, PARTITION)(features).groups[0]


def pool_by_indexing(rows_UD: torch.Tensor, group: RoutedGroup, num_columns: int) -> torch.Tensor:
    num_bags, num_ids = group.bag_offsets.numel(), group.positions_K.numel()
    lengths = torch.diff(group.bag_offsets, append=torch.tensor([num_ids]))
    bag_of_id = torch.repeat_interleave(torch.arange(num_bags), lengths)
    scales = torch.ones(num_ids) if group.scales_K is None else group.scales_K
    contributions = rows_UD[group.positions_K] * scales[:, None].to(rows_UD.dtype)
    bags = torch.zeros(num_bags, rows_UD.shape[1], dtype=rows_UD.dtype)
    return bags.index_add(0, bag_of_id, contributions).view(-1, num_columns * rows_UD.shape[1])


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("is_one_hot", [False, True])
def test_values_and_gradient_equal_plain_indexing(is_one_hot: bool, is_weighted: bool) -> None:
    group = routed_group(is_one_hot=is_one_hot, is_weighted=is_weighted)
    rows_UD = torch.randn(group.rows.values().numel(), 4, requires_grad=True)
    pooled = pool_rows(rows_UD, group, 3)
    expected = pool_by_indexing(rows_UD, group, 3)
    assert pooled.shape == (3, 12)
    torch.testing.assert_close(pooled, expected, rtol=1e-6, atol=1e-6)
    # Not contiguous, as it comes out of a slice of the interaction layer.
    for seed_gradient in (torch.randn(3, 12), torch.randn(12, 3).t()):
        [gradient] = torch.autograd.grad(pooled, rows_UD, seed_gradient, retain_graph=True)
        [wanted] = torch.autograd.grad(expected, rows_UD, seed_gradient, retain_graph=True)
        torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("batch_size", [0, 2])
def test_a_batch_without_ids(batch_size: int) -> None:
    features = KeyedJaggedTensor(
        keys=["a", "b", "c"],
        values=torch.empty(0, dtype=torch.int64),
        lengths=torch.zeros(3 * batch_size, dtype=torch.int64),
        stride=batch_size,
    )
    group = Router({4: COLUMNS}, PARTITION)(features).groups[0]
    rows_UD = torch.empty(0, 4, requires_grad=True)
    pooled = pool_rows(rows_UD, group, 3)
    pooled.sum().backward()
    assert torch.equal(pooled, torch.zeros(batch_size, 12))
    assert rows_UD.grad is not None
    assert rows_UD.grad.shape == (0, 4)
    assert torch.equal(pool_rows(torch.empty(0, 4), group, 3), torch.zeros(batch_size, 12))


@pytest.mark.parametrize(
    "lengths",
    [
        [0],
        [MOST_IDS + 1],
        [3, 0, 2 * MOST_IDS, 1, 0, MOST_IDS, 700, 0],
        [0, 0, MOST_IDS**2 + 3 * MOST_IDS + 5, 2, 1000],
    ],
)
@pytest.mark.parametrize("is_weighted", [False, True])
def test_no_sum_is_longer_than_a_piece(
    lengths: list[int], is_weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_ids, ends = sum(lengths), torch.tensor(lengths).cumsum(0)
    offsets = ends - torch.tensor(lengths)
    generator = torch.Generator().manual_seed(num_ids)
    source = torch.randn(50, 8, generator=generator, dtype=torch.float64)
    positions = torch.randint(0, 50, (num_ids,), generator=generator)
    scales = torch.rand(num_ids, generator=generator, dtype=torch.float64) if is_weighted else None
    expected = torch.nn.functional.embedding_bag(
        positions, source, offsets, mode="sum", per_sample_weights=scales
    )
    summed: list[int] = []
    embedding_bag = torch.nn.functional.embedding_bag

    def noted(positions: torch.Tensor, source: torch.Tensor, offsets: torch.Tensor, **named: Any):
        ends = torch.cat([offsets[1:], torch.tensor([positions.numel()])])
        summed.append(int((ends - offsets).max()))
        assert int((ends - offsets).min()) >= 0
        return embedding_bag(positions, source, offsets, **named)

    monkeypatch.setattr(pooling.F, "embedding_bag", noted)
    found = sum_in_pieces(source, positions, offsets, scales, max(lengths))
    assert max(summed) <= MOST_IDS
    torch.testing.assert_close(found, expected)
