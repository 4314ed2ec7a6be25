"""Initial weights are a function of (seed, table, row, column) and look uniform."""

from __future__ import annotations

import math

import pytest
import torch

from hotrec.embedding import initialize
from hotrec.embedding.initialize import initial_rows

DIM = 16


def rows_of(first: int, end: int, *, seed: int = 3, table: str = "t") -> torch.Tensor:
    return initial_rows(seed, table, torch.arange(first, end), DIM, 1000)


def test_any_way_of_asking_gives_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = rows_of(0, 1000)
    assert torch.equal(torch.cat([rows_of(0, 1), rows_of(1, 300), rows_of(300, 1000)]), whole)
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(initial_rows(3, "t", order, DIM, 1000), whole[order])
    assert torch.equal(order.sort().values, torch.arange(1000))  # not changed
    # A wider row begins like a narrow one, so a shard of columns can be made alone.
    assert torch.equal(whole[:10, :4], initial_rows(3, "t", torch.arange(10), 4, 1000))
    assert rows_of(5, 5).shape == (0, DIM)
    for size in (1, DIM, 7 * DIM + 1, initialize._DEVICE_CHUNK_VALUES):
        monkeypatch.setattr(initialize, "_CHUNK_VALUES", size)
        assert torch.equal(rows_of(0, 100), whole[:100])


def test_seeds_and_tables_differ() -> None:
    base = rows_of(0, 200)
    for other in (rows_of(0, 200, seed=4), rows_of(0, 200, table="u"), rows_of(200, 400)):
        assert not torch.equal(base, other)
        correlation = torch.corrcoef(torch.stack([base.flatten(), other.flatten()]))[0, 1]
        assert abs(float(correlation)) < 4 / math.sqrt(base.numel())


def test_values_are_uniform() -> None:
    num_rows = 4000
    values = initial_rows(11, "clicks", torch.arange(num_rows), DIM, num_rows)
    bound = 1 / math.sqrt(num_rows)
    assert values.dtype == torch.float32
    assert float(values.min()) >= -bound
    assert float(values.max()) < bound
    flat, _ = ((values.double().flatten() / bound + 1) / 2).sort()
    n = flat.numel()
    # Kolmogorov-Smirnov at about 1 in 10,000; moments at 4 standard errors.
    distance = (flat - (torch.arange(n) + 0.5) / n).abs().max()
    assert float(distance) < 2.3 / math.sqrt(n)
    assert abs(float(flat.mean()) - 0.5) < 4 * math.sqrt(1 / 12 / n)
    assert abs(float(flat.var()) - 1 / 12) < 4 * math.sqrt(1 / 180 / n)
    by_row, by_column = values / bound, (values / bound).t()
    for matrix in (by_row, by_column):  # neighbours are not alike
        pairs = torch.stack([matrix[:-1].flatten(), matrix[1:].flatten()])
        assert abs(float(torch.corrcoef(pairs)[0, 1])) < 4 / math.sqrt(n)
    assert values.unique(dim=0).shape[0] == num_rows


def test_rows_beyond_32_bits_are_apart() -> None:
    first = 1 << 31
    rows = torch.tensor([0, 1, first, first + 1, 1 << 32, (1 << 32) + 1, 1 << 40])
    values = initial_rows(3, "t", rows, DIM, 1 << 41)
    assert values.unique(dim=0).shape[0] == rows.numel()
    assert torch.equal(initial_rows(3, "t", rows[2:3], DIM, 1 << 41), values[2:3])
    assert float(values.abs().max()) <= 2**-20.5
