"""Pooling against autograd through plain indexing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hotrec.embedding import pooling
from hotrec.embedding.pooling import MAX_IDS, sum_in_pieces


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
