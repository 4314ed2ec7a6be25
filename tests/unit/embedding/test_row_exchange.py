"""Rows that were exchanged, in the order of the requests."""

from __future__ import annotations

import pytest
import torch

from hotrec.embedding.row_exchange import Permuted


@pytest.mark.parametrize("num_rows", [0, 1, 100])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_permutation_has_the_gradient_of_index_select(num_rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    order_U = torch.randperm(num_rows, generator=generator).to(dtype)
    grad_UD = torch.randn(num_rows, 4, generator=generator)
    outputs, grads = [], []
    for put_in_order in (Permuted.apply, lambda rows, order: rows.index_select(0, order)):
        rows_UD = torch.arange(4.0 * num_rows).view(num_rows, 4).requires_grad_()
        outputs.append(put_in_order(rows_UD, order_U))
        outputs[-1].backward(grad_UD)
        grads.append(rows_UD.grad)
    assert torch.equal(*outputs)
    assert torch.equal(*grads)
