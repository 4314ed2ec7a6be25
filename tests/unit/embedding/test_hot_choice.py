"""What each way of the hot exchange sends, and which is chosen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotrec.embedding.hot_choice import HotChooser, hot_messages
from hotrec.types import HotExchange

TOUCHED, OWNERS, DENSE, AUTO = (
    HotExchange.touched_rows,
    HotExchange.owners,
    HotExchange.dense,
    HotExchange.auto,
)


def test_bytes_by_hand() -> None:
    """W=4, 100 hot rows of 8 values and 10 of 2; ranks touch 20 and 5, one of them 40 and 10."""
    counts = [[20, 5], [20, 5], [40, 10], [20, 5]]
    found = hot_messages([(100, 8), (10, 2)], counts, [60, 10], 4)
    most, union = 40 * 36 + 10 * 12, 60 * 36 + 10 * 12
    assert found == {
        TOUCHED: {"all_gather": 3 * most},
        OWNERS: {"all_to_all": 0.75 * most, "all_gather": 0.75 * union},
        DENSE: {"all_reduce": 1.5 * (100 * 33 + 10 * 9)},
    }
    halved = hot_messages([(100, 8), (10, 2)], counts, [60, 10], 2)
    assert halved[TOUCHED]["all_gather"] == 3 * (40 * 20 + 10 * 8)
    assert halved[DENSE]["all_reduce"] == 1.5 * (100 * 17 + 10 * 5)


@given(
    world_size=st.integers(2, 16),
    num_touched=st.integers(0, 500),
    overlap=st.floats(0, 1),
    dim=st.sampled_from([1, 8, 64]),
)
def test_owners_send_less_where_enough_ranks_touch_a_row(
    world_size: int, num_touched: int, overlap: float, dim: int
) -> None:
    total = world_size * num_touched
    union = max(num_touched, round(overlap * total))
    counts = [[num_touched]] * world_size
    sent = {
        exchange: sum(messages.values())
        for exchange, messages in hot_messages([(10**6, dim)], counts, [union], 4).items()
    }
    per_row = total * (world_size - 1) - world_size * union
    assert (sent[OWNERS] < sent[TOUCHED] - 1e-6) == (per_row > 0)
    if world_size == 2:
        assert sent[OWNERS] >= sent[TOUCHED]


@pytest.mark.parametrize("exchange", [TOUCHED, OWNERS, DENSE])
def test_a_named_way_is_always_taken(exchange: HotExchange) -> None:
    chooser = HotChooser([(10, 4)], exchange)
    for counts in ([[0], [0]], [[10], [10]], [[1], [0]]):
        assert chooser.choose(counts) is exchange


def test_auto_takes_the_union_for_what_it_can_be_then_for_what_it_was() -> None:
    chooser, counts = HotChooser([(1000, 64)], AUTO), [[200]] * 4
    assert chooser.choose(counts) is TOUCHED  # as if no row had been touched twice
    chooser.note(counts, [250])
    assert chooser.choose(counts) is OWNERS
    chooser.note(counts, [800])
    assert chooser.choose(counts) is TOUCHED
    chooser.note([[0]] * 4, [0])  # a step without hot rows says nothing
    assert chooser.choose(counts) is TOUCHED


def test_auto_knows_the_bounds_of_the_union() -> None:
    """At first at most H rows, and never fewer than one rank touched."""
    counts = [[900]] * 4
    assert HotChooser([(1000, 64)], AUTO).choose(counts) is OWNERS
    # The ratio of a step in which all ranks touched the same cannot hold for one rank's rows.
    chooser = HotChooser([(1000, 64)], AUTO)
    chooser.note([[100]] * 4, [100])
    assert chooser._estimate([[100], [0], [0], [0]]) == [100]


def test_auto_is_dense_where_all_rows_are_touched() -> None:
    assert HotChooser([(1000, 64)], AUTO).choose([[1000]] * 2) is DENSE
    assert HotChooser([(1000, 64)], AUTO).choose([[900]] * 2) is TOUCHED


def test_without_touched_rows_nothing_is_sent() -> None:
    assert HotChooser([(1000, 64), (10, 4)], AUTO).choose([[0, 0]] * 3) is TOUCHED


def test_seconds_decide_where_they_are_given() -> None:
    counts = [[200]] * 4
    seconds = {
        "all_gather": lambda num_bytes: 1e-9 * num_bytes,
        "all_to_all": lambda num_bytes: 1.0 + 1e-9 * num_bytes,
        "all_reduce": lambda num_bytes: 2.0 + 1e-9 * num_bytes,
    }
    chooser = HotChooser([(1000, 64)], AUTO, seconds=seconds)
    chooser.note(counts, [200])
    assert chooser.choose(counts) is TOUCHED
    by_bytes = HotChooser([(1000, 64)], AUTO)
    by_bytes.note(counts, [200])
    assert by_bytes.choose(counts) is OWNERS


def test_missing_seconds_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected the collectives \['all_gather', 'all_reduce'"):
        HotChooser([(10, 4)], AUTO, seconds={"all_gather": lambda num_bytes: 0.0})
