"""Sums of gradients by row, and constants of rules; tests/exact has the updates."""

from __future__ import annotations

import pytest
import torch

from hotrec.embedding.update_rules import OptimizerSpec, repeat_sums, sum_by_row
from hotrec.types import OptimizerKind

DIM = 5


def test_sum_by_row() -> None:
    generator = torch.Generator().manual_seed(4)
    rows = torch.randint(0, 9, (50,), generator=generator) * 3
    grad = torch.randn(50, DIM, generator=generator)
    distinct, sums = sum_by_row(rows, grad, 100)
    assert distinct.tolist() == sorted(set(rows.tolist()))
    dense = torch.zeros(30, DIM).index_add(0, rows, grad)
    torch.testing.assert_close(sums, dense[distinct], rtol=1e-6, atol=1e-6)
    assert torch.equal(sum_by_row(rows, grad, 100)[1], sums)
    repeated, of_each = repeat_sums(rows, grad)
    assert torch.equal(repeated, rows.sort().values)
    assert torch.equal(of_each, sums[torch.searchsorted(distinct, repeated)])
    empty_rows, empty_sums = sum_by_row(rows[:0], grad[:0], 100)
    assert empty_rows.shape == (0,)
    assert empty_sums.shape == (0, DIM)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", -0.1),
        ("learning_rate", float("nan")),
        ("learning_rate", float("inf")),
        ("eps", -1e-8),
        ("beta1", 1.0),
        ("beta2", -0.1),
    ],
)
def test_constants_out_of_range_are_refused(name: str, value: float) -> None:
    constants = {"learning_rate": 0.1, name: value}
    with pytest.raises(ValueError, match=rf"^optimizer\.{name}: .*{value}"):
        OptimizerSpec(OptimizerKind.adam, **constants)
