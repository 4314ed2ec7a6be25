"""The order in which spread rows are stored."""

from __future__ import annotations

from math import gcd

import numpy as np
import pytest
import torch

from hotrec.types import RowOrder


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 6, 7, 10, 89, 2310, 10_007, 1 << 20])
@pytest.mark.parametrize("table", ["", "item"])
def test_it_is_a_bijection_with_its_inverse(num_rows: int, table: str) -> None:
    order = RowOrder(num_rows, table=table)
    rows = np.arange(num_rows)
    stored = order.stored(rows)
    assert np.array_equal(np.sort(stored), rows)
    assert np.array_equal(order.original(stored), rows)
    assert gcd(order.factor, num_rows) == 1
    assert abs(order.factor - 0.618034 * num_rows) <= 12


# Around the last number of rows whose products fit into int64, and far beyond.
@pytest.mark.parametrize(
    "num_rows", [(1 << 31) - 1, 3_037_000_499, 3_037_000_500, (1 << 33) + 9, (1 << 41) - 1]
)
def test_products_do_not_overflow(num_rows: int) -> None:
    order = RowOrder(num_rows, table="item")
    rows = [0, 1, 2, 12_345_678, num_rows // 2, num_rows - 2, num_rows - 1]
    expected = [(row * order.factor + order.offset) % num_rows for row in rows]
    assert order.stored(np.array(rows)).tolist() == expected
    assert order.stored(torch.tensor(rows)).tolist() == expected
    assert order.original(torch.tensor(expected)).tolist() == rows
    # Those of several tables at once.
    orders = [order, RowOrder(7, table="t"), RowOrder(5, is_spread=False)]
    given = torch.tensor([num_rows - 1, 6, 4])
    facts = zip(*((of.factor, of.offset, of.num_rows) for of in orders), strict=True)
    mapped = RowOrder.mapped(given, *map(torch.tensor, facts), is_wide=True).tolist()
    assert mapped == [expected[-1], int(orders[1].stored(given[1])), 4]


def test_the_first_rows_of_tables_are_stored_at_different_places() -> None:
    places = {int(RowOrder(1000, table=f"C{at}").stored(np.array([0]))[0]) for at in range(26)}
    assert len(places) > 20
    assert RowOrder(1000, is_spread=False, table="C1").offset == 0
