"""Smaller hot sets: the rows with most lookups per byte of all tables."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotrec.cost_model.demand import build_demand
from hotrec.cost_model.histogram import build_histogram
from hotrec.planning.optimise_shares import HOT_SHARES, hottest_share


def make_demand(name, counts, dim=4, lookups=1.0):
    return build_demand(
        name,
        build_histogram(np.asarray(counts)),
        dim=dim,
        row_bytes=4 * dim,
        lookups_per_sample=lookups,
        num_columns=1,
        batch_size=4,
        world_size=2,
    )


# Lookups per byte, the same in all tables: 8, 4, 2, 1, 1 of 16 and 5, 5, 4, 2 of 16.
DEMANDS = [make_demand("a", [1, 8, 4, 1, 2]), make_demand("b", [5, 2, 5, 4])]


@pytest.mark.parametrize(
    ("share", "found"),
    [
        (0.0, {"a": 0, "b": 0}),
        (0.2, {"a": 1, "b": 0}),
        (0.5, {"a": 1, "b": 2}),
        (1.0, {"a": 4, "b": 3}),
    ],
)
def test_the_hottest_of_all_tables_are_kept(share, found):
    assert hottest_share(DEMANDS, {"a": 4, "b": 3}, share) == found


def test_fixed_tables_keep_theirs():
    assert hottest_share(DEMANDS, {"a": 4, "b": 3}, 0.0, {"b"}) == {"a": 0, "b": 3}
    assert hottest_share(DEMANDS, {"a": 4}, 0.5, {"a", "b"}) == {"a": 4, "b": 0}


def test_wide_rows_count_by_byte():
    demands = [make_demand("a", [8, 8], dim=16), make_demand("b", [6, 6, 4])]
    assert hottest_share(demands, {"a": 2, "b": 2}, 0.5) == {"a": 0, "b": 2}


def test_rows_never_seen_go_first():
    demands = [make_demand("a", [3, 0, 0, 0])]
    assert hottest_share(demands, {"a": 4}, 0.5) == {"a": 1}


def test_without_lookups_nothing_is_hottest():
    demands = [make_demand("a", [0, 0]), make_demand("b", [0])]
    assert hottest_share(demands, {"a": 2, "b": 1}, 0.75, {"b"}) == {"a": 0, "b": 1}


@given(
    st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=12), min_size=1, max_size=4),
    st.sampled_from([*HOT_SHARES, 1.0]),
    st.data(),
)
def test_shares_are_nested(tables, share, data):
    demands = [make_demand(str(i), counts) for i, counts in enumerate(tables)]
    num_hot = {d.name: data.draw(st.integers(0, d.num_rows)) for d in demands}
    kept = hottest_share(demands, num_hot, share)
    assert set(kept) == set(num_hot)
    assert all(0 <= kept[name] <= num_hot[name] for name in num_hot)
    assert sum(kept.values()) <= share * sum(num_hot.values())
    more = hottest_share(demands, num_hot, 1.0)
    assert all(kept[name] <= more[name] for name in num_hot)
