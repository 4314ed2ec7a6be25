"""Stochastic rounding: to neighbours, on average to the value, by coordinates alone."""

from __future__ import annotations

import torch

from hotrec.embedding.random_bits import random_bits, round_randomly

# Large, ordinary, tiny, and powers of two.
VALUES = (0.0, 1.0, 1.0003, -1.0003, 3e4 + 7.3, 0.01234567, -6.1e-5, 2.3e-6, -1e-7, 2.0**-14)


def test_a_value_becomes_one_of_its_neighbours_and_on_average_itself() -> None:
    num = 40_000
    for value in VALUES:
        given = torch.full((num, 1), value)
        found = round_randomly(given, 7, torch.arange(num)).double()
        nearest = torch.tensor(value).bfloat16()
        both = [torch.nextafter(nearest, torch.tensor(end, dtype=torch.bfloat16)).double().item()
                for end in (-1e4 * abs(value) - 1, 1e4 * abs(value) + 1)]  # fmt: skip
        spacing = max(abs(end - nearest.double().item()) for end in both)
        assert set(found.flatten().tolist()) <= {*both, nearest.double().item()}
        assert (found - value).abs().max() < spacing
        # The standard error is at most half the distance over the root of their number.
        assert abs(found.mean().item() - torch.tensor(value).double().item()) < 0.02 * spacing


def test_what_the_type_holds_stays() -> None:
    values = torch.randn(50, 8).bfloat16().float()
    assert torch.equal(round_randomly(values, 3, torch.arange(50)).float(), values)


def test_too_large_values_become_the_largest() -> None:
    most = torch.finfo(torch.bfloat16).max
    values = torch.tensor([[3.4e38, -3.4e38]])
    found = round_randomly(values, 0, torch.zeros(1, dtype=torch.int64))
    assert found.tolist() == [[most, -most]]


def test_bits_depend_on_key_row_and_column_alone() -> None:
    rows = torch.tensor([5, 2**33 + 5, 9])
    bits = random_bits(1, rows, 4)
    assert torch.equal(bits[[2, 0]], random_bits(1, rows[[2, 0]], 4))
    assert torch.equal(bits[:, :3], random_bits(1, rows, 3))
    assert bits.unique().numel() == 12
    assert not torch.equal(bits, random_bits(2, rows, 4))
