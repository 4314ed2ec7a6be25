"""The batches of a segment."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from types import SimpleNamespace

from hotrec.train.schedule import Segment
from hotrec.train.segment import SegmentBatches
from tests.conftest import Time


def numbered_batches(time: Time) -> Iterator[SimpleNamespace]:
    for number in range(10):
        time.now_s += 2.0
        yield SimpleNamespace(number=number, num_global_samples=number + 1)


def test_segment_takes_its_batches_and_no_more(time: Time) -> None:
    source = numbered_batches(time)
    batches = SegmentBatches(source, Segment(5, 7, is_last=True))
    assert list(batches.steps()) == [5, 6, 7]
    assert [batch.number for batch in batches] == [0, 1, 2]
    assert [batches.num_samples(step) for step in (5, 6, 7)] == [1, 2, 3]
    assert batches.wait_s == 6.0
    assert next(source).number == 3


def test_an_ended_segment_does_not_hold_the_loader(time: Time) -> None:
    """A pipeline holds its last segment, and workers live as long as what iterates over them."""
    source = numbered_batches(time)
    is_held = weakref.ref(source)
    batches = SegmentBatches(source, Segment(1, 2, is_last=True))
    del source
    next(batches), next(batches)
    assert is_held() is not None
    assert next(batches, None) is None
    assert is_held() is None


def test_cut_segment_ends_with_the_batches_taken_so_far(time: Time) -> None:
    batches = SegmentBatches(numbered_batches(time), Segment(1, 8, is_last=True))
    made = []
    for step in batches.steps():
        if step == 1:
            next(batches), next(batches)  # a pipeline fills itself first
        next(batches, None)
        made.append(step)
        assert batches.batch(step).num_global_samples == batches.num_samples(step) == step
        if step == 3:
            batches.cut()
    # 2 ahead and one in each of the steps 1 to 3: 5 batches that have to be computed.
    assert made == [1, 2, 3, 4, 5]
    assert next(batches, None) is None
