"""The union of the rows that the ranks of a host request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from hotrec.embedding.relay import Relay

OWNERS: Any = SimpleNamespace(num_positions=9, sent_type=torch.int32)
# By local rank and host of the owner, the positions that are requested.
requests = st.integers(1, 3).flatmap(
    lambda num_hosts: st.lists(
        st.lists(st.sets(st.integers(0, 8)).map(sorted), min_size=num_hosts, max_size=num_hosts),
        min_size=1,
        max_size=4,
    )
)


@given(requests)
def test_a_row_is_in_the_union_once_and_sums_are_in_the_order_of_ranks(
    requested: list[list[list[int]]],
) -> None:
    flat = [
        (host, position)
        for of_rank in requested
        for host, positions in enumerate(of_rank)
        for position in positions
    ]
    positions = torch.tensor([position for _, position in flat], dtype=torch.int64)
    nums = [[len(positions) for positions in of_rank] for of_rank in requested]
    relay = Relay(positions, nums, OWNERS)
    union = sorted(set(flat))
    assert relay.num_rows == len(union)
    assert relay.positions_U.tolist() == [position for _, position in union]
    assert relay.positions_U.dtype is torch.int32
    num_hosts = len(requested[0])
    assert relay.num_to_H.tolist() == [
        sum(of == host for of, _ in union) for host in range(num_hosts)
    ]
    assert [union[at] for at in relay.index_K.tolist()] == flat

    values = torch.rand(len(flat), 2, generator=torch.Generator().manual_seed(len(flat))) - 0.5
    for some in (range(len(flat)), range(0, len(flat), 2)):
        expected: dict[tuple[int, int], torch.Tensor] = {}
        for at in some:
            expected[flat[at]] = expected.get(flat[at], torch.zeros(2)) + values[at]
        index = torch.tensor([*some], dtype=torch.int64)
        sums = relay.sums_of(index)
        assert sums.rows_U.tolist() == [union.index(key) for key in sorted(expected)]
        found = sums(values.index_select(0, index))
        assert [row.tolist() for row in found] == [
            expected[key].tolist() for key in sorted(expected)
        ]
    assert torch.equal(relay.sums(values), relay.sums_of(torch.arange(len(flat)))(values))
