"""Rows that were exchanged, in the order of the requests."""

from __future__ import annotations

import pytest
import torch

from hotrec.embedding.owned_rows import Joined


@pytest.mark.parametrize(("num_hot", "num_cold"), [(0, 0), (0, 5), (3, 0), (3, 100)])
@pytest.mark.parametrize("is_ordered", [False, True])
def test_joined_rows_and_gradients_are_in_their_places(
    num_hot: int, num_cold: int, is_ordered: bool
) -> None:
    generator = torch.Generator().manual_seed(num_cold)
    order_C = torch.randperm(num_cold, generator=generator)
    hot_HD, cold_CD, grad_UD = (
        torch.randn(num, 4, generator=generator) for num in (num_hot, num_cold, num_hot + num_cold)
    )
    hot_HD.requires_grad_()
    cold_CD.requires_grad_()
    joined_UD = Joined.apply(hot_HD, cold_CD, None if is_ordered else order_C)
    place_C = torch.arange(num_cold) if is_ordered else order_C
    assert torch.equal(joined_UD[:num_hot], hot_HD)
    assert torch.equal(joined_UD[num_hot:][place_C], cold_CD)
    joined_UD.backward(grad_UD)
    assert torch.equal(hot_HD.grad, grad_UD[:num_hot])
    assert torch.equal(cold_CD.grad, grad_UD[num_hot:][place_C])
