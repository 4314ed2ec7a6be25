from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotrec.data.order import SampleOrder, StepSequence, num_steps_of

SIZES = st.lists(st.integers(1, 30), min_size=1, max_size=6)


def global_step(sizes, batch_size, world_size, epoch, step, *, seed=3, shuffle=True):
    """The samples of a step over all ranks, as (chunk, row), rank by rank."""
    ranks = []
    for rank in range(world_size):
        order = SampleOrder(sizes, rank=rank, world_size=world_size, seed=seed, shuffle=shuffle)
        drawn = replace(StepSequence((sum(sizes),), batch_size * world_size)[step], epoch=epoch)
        pieces = order.pieces(drawn)
        ranks.append([(piece.chunk, int(row)) for piece in pieces for row in piece.rows])
    return ranks


@settings(max_examples=60, deadline=None)
@given(SIZES, st.integers(1, 9), st.integers(1, 4), st.integers(0, 3))
def test_an_epoch_holds_every_sample_once(sizes, batch_size, world_size, epoch):
    steps = num_steps_of(sum(sizes), batch_size, world_size)
    seen = []
    for step in range(steps):
        ranks = global_step(sizes, batch_size, world_size, epoch, step)
        lengths = [len(samples) for samples in ranks]
        assert max(lengths) - min(lengths) <= 1
        assert max(lengths) <= batch_size
        if step < steps - 1:
            assert lengths == [batch_size] * world_size
        seen += [sample for samples in ranks for sample in samples]
    assert len(seen) == sum(sizes)
    assert set(seen) == {(c, row) for c, size in enumerate(sizes) for row in range(size)}


@settings(max_examples=40, deadline=None)
@given(SIZES, st.integers(1, 5))
def test_global_batches_do_not_depend_on_the_number_of_ranks(sizes, batch_size):
    for step in range(num_steps_of(sum(sizes), 2 * batch_size, 1)):
        [one] = global_step(sizes, 2 * batch_size, 1, 0, step)
        two = global_step(sizes, batch_size, 2, 0, step)
        assert one == two[0] + two[1]


def test_seed_and_epoch_change_the_order_and_nothing_else_does():
    sizes = [20, 20, 20]
    [first] = global_step(sizes, 60, 1, 0, 0)
    assert first == global_step(sizes, 60, 1, 0, 0)[0]
    assert first != global_step(sizes, 60, 1, 1, 0)[0]
    assert first != global_step(sizes, 60, 1, 0, 0, seed=4)[0]
    assert sorted(first) == sorted(global_step(sizes, 60, 1, 1, 0)[0])


def test_rows_are_shuffled_within_chunks_and_chunks_among_each_other():
    orders = [global_step([50] * 8, 400, 1, epoch, 0)[0] for epoch in range(4)]
    for order in orders:
        chunks = [chunk for chunk, _ in order]
        # A chunk's samples stay together: that is the window of the shuffle.
        assert all(len(set(chunks[i : i + 50])) == 1 for i in range(0, 400, 50))
        rows = [row for _, row in order[:50]]
        assert rows != sorted(rows)
    assert len({tuple(chunk for chunk, _ in order) for order in orders}) == 4
    of_first_chunk = [[row for chunk, row in order if chunk == 0] for order in orders]
    assert len(set(map(tuple, of_first_chunk))) == 4


PARTS = st.lists(st.integers(1, 40), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(PARTS, st.integers(1, 50), st.integers(1, 50), st.integers(0, 9), st.booleans())
def test_another_batch_goes_on_after_the_samples_taken(parts, one, other, stop, drop_last):
    """Whatever the batch was before, the samples of two epochs come in the same order, once."""
    if drop_last:
        one, other = min(one, *parts, 40), min(other, *parts, 40)
    first = StepSequence(tuple(parts), one, drop_last=drop_last)
    stop = min(stop, first.count_steps(2))
    then = StepSequence(tuple(parts), other, first.samples_before(stop), drop_last)
    drawn = [first[step] for step in range(stop)]
    drawn += [then[step] for step in range(then.count_steps(2))]
    taken = [(b.epoch, b.first + i) for b in drawn for i in range(b.num_samples)]
    assert taken == sorted(set(taken))
    if not drop_last:
        assert taken == [(epoch, i) for epoch in range(2) for i in range(sum(parts))]
    assert then[then.count_steps(2)].epoch == 2
    ends = np.cumsum(parts)
    days = [{int(np.searchsorted(ends, b.first + i, "right")) for i in (0, b.num_samples - 1)}
            for b in drawn]  # fmt: skip
    assert all(len(parts_of_step) == 1 for parts_of_step in days)


@pytest.mark.parametrize(
    ("first_sample", "expected"),
    [(0, {2: 0, 4: 1, 5: 2}), (3, {1: 0, 3: 1, 4: 2}), (5, {0: 0, 2: 1, 3: 2}), (12, {1: 2})],
)
def test_parts_end_after_their_steps(first_sample, expected):
    """Of 5, 6 and 2 samples, in steps of 4."""
    assert StepSequence((5, 6, 2), 4, first_sample).part_ends() == expected
