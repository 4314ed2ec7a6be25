"""Curves as lines: exact at the size that is asked about, never falling, never negative."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotrec.cost_model.costs import CollectiveCurve, World


def curve(sizes: list[float], seconds: list[float]) -> CollectiveCurve:
    spreads = (0.0,) * len(sizes)
    return CollectiveCurve("all_to_all", World(2, 1), tuple(sizes), tuple(seconds), spreads)


def test_line_is_exact_at_measured_sizes_and_between_them() -> None:
    shaped = curve([1e3, 1e5, 1e6, 4e6], [2e-4, 2e-4, 8e-3, 32e-3])
    for size, seconds in zip(shaped.sent_bytes, shaped.seconds, strict=True):
        assert shaped.line_at(size).seconds(num_bytes=size) == pytest.approx(seconds)
    assert shaped.line_at(2.5e6).seconds(num_bytes=2.5e6) == pytest.approx(20e-3)
    # Beyond the largest the last two go on: 8 ns a byte.
    assert shaped.line_at(8e6).seconds(num_bytes=8e6) == pytest.approx(64e-3)
    assert shaped.line_at(10.0).seconds(num_bytes=10.0) == pytest.approx(2e-4)


def test_a_disturbed_small_message_does_not_count() -> None:
    disturbed = curve([1e3, 1e4, 1e6], [5e-3, 1e-4, 1e-2])
    assert disturbed.line_at(1e4).fixed_s == pytest.approx(1e-4)
    assert disturbed.line_at(5e5).seconds(num_bytes=5e5) < 1e-2


@given(
    st.lists(st.floats(1e-6, 1.0), min_size=2, max_size=6),
    st.floats(1.0, 1e8),
)
def test_no_line_has_a_negative_part(seconds: list[float], size: float) -> None:
    found = curve([10.0 ** (3 + n) for n in range(len(seconds))], seconds).line_at(size)
    assert found.fixed_s > 0
    assert found.per_byte_s >= 0
