"""Pooling against autograd through plain indexing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.embedding import pooling
from hotrec.embedding.pooling import MAX_IDS, pool_rows, sum_in_pieces
from hotrec.routing.features import Column
from hotrec.routing.router import Router
from hotrec.types import Partition

COLUMNS = [
    Column("a", "a", "t", is_mean=False),
    Column("b", "b", "t", is_mean=True),
    Column("c", "c", "u", is_mean=False),
]
PARTITION = Partition({"t": 9, "u": 4}, {"t": np.array([5, 0, 2]), "u": np.arange(4)})


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
        [MAX_IDS + 1],
        [3, 0, 2 * MAX_IDS, 1, 0, MAX_IDS, 700, 0],
        [0, 0, MAX_IDS**2 + 3 * MAX_IDS + 5, 2, 1000],
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
    assert max(summed) <= MAX_IDS
    torch.testing.assert_close(found, expected)
