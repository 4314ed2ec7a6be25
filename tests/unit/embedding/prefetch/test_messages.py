"""Rows of several groups in one message."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from hotrec.embedding.messages import message_sizes, pack, row_counts, unpack
from hotrec.embedding.prefetch.classes import REST, URGENT, RowsByClass, sort_by_class

counts_of_ranks = st.integers(1, 3).flatmap(
    lambda num_groups: st.lists(
        st.lists(st.integers(0, 4), min_size=num_groups, max_size=num_groups),
        min_size=1,
        max_size=4,
    )
)


@given(counts=counts_of_ranks)
def test_unpack_undoes_pack(counts: list[list[int]]) -> None:
    dims = [2, 3, 5][: len(counts[0])]
    parts = []
    for group, dim in enumerate(dims):
        num_rows = sum(row[group] for row in counts)
        parts.append(torch.arange(num_rows * dim).view(-1, dim).float() + 1000 * group)
    message = pack(parts, counts, dims)
    assert row_counts([num for row in counts for num in row], len(dims)) == counts
    assert message.numel() == sum(message_sizes(counts, dims))
    for part, found in zip(parts, unpack(message, counts, dims), strict=True):
        assert torch.equal(part, found)


@given(counts=counts_of_ranks, data=st.data())
def test_classes_are_chosen_in_the_same_order_by_rank(
    counts: list[list[int]], data: st.DataObject
) -> None:
    classes = []
    for group in range(len(counts[0])):
        num_rows = sum(row[group] for row in counts)
        drawn = data.draw(
            st.lists(st.sampled_from((URGENT, REST)), min_size=num_rows, max_size=num_rows)
        )
        classes.append(torch.tensor(drawn, dtype=torch.uint8))
    rows, again = RowsByClass(classes, counts), RowsByClass(classes, counts)
    sort_by_class([rows, again])
    for wanted in (URGENT, REST):
        chosen = rows.select(wanted)
        assert chosen.counts == again.select(wanted).counts
        for group, of_group in enumerate(classes):
            pieces = of_group.split([row[group] for row in counts])
            expected = []
            for rank, piece in enumerate(pieces):
                begin = sum(row[group] for row in counts[:rank])
                expected.append((piece == wanted).nonzero()[:, 0] + begin)
                assert chosen.counts[rank][group] == expected[-1].numel()
            index = torch.cat([*expected, torch.empty(0, dtype=torch.int64)])
            assert torch.equal(chosen.of(group, torch.arange(of_group.numel())), index)
