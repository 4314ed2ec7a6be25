"""Bytes of collectives, sizes to measure, and links fitted from curves."""

from __future__ import annotations

import pytest

from hotrec.calibrate.collectives import bytes_per_value, link_of, sizes_up_to
from hotrec.cost_model.costs import COLLECTIVES, CollectiveCurve, World

WORLD = World(4, 4)


def curve(latency_s: float, rate: float, kind: str = "all_to_all") -> CollectiveCurve:
    sizes = tuple(sizes_up_to(1 << 24))
    seconds = tuple(latency_s + size / rate for size in sizes)
    return CollectiveCurve(kind, WORLD, sizes, seconds, tuple(0.1 for _ in sizes))


def test_bytes_that_a_rank_sends() -> None:
    expected = {"all_to_all": 3.0, "all_reduce": 6.0, "all_gather": 12.0}
    assert {kind: bytes_per_value(kind, 4) for kind in COLLECTIVES} == expected


def test_a_link_is_the_median_of_its_curves() -> None:
    link = link_of([curve(1e-4, 1e9), curve(3e-4, 3e9, "all_reduce")])
    assert (link.latency_s, link.bytes_per_s) == pytest.approx((2e-4, 2e9))
    assert link.source == "measured"
    assert link_of([curve(1e-4, 1e9)], ranks_sending=8).bytes_per_s == pytest.approx(8e9)
    # A shaped link lets small messages pass at once.
    sizes = tuple(sizes_up_to(1 << 22))
    seconds = tuple(1e-4 + max(1e-10 * size, 8e-8 * (size - 262_144)) for size in sizes)
    shaped = CollectiveCurve("all_to_all", WORLD, sizes, seconds, tuple(0.1 for _ in sizes))
    assert 1 / shaped.line().per_byte_s > 2 / 8e-8
    assert link_of([shaped]).bytes_per_s == pytest.approx(1 / 8e-8, rel=0.1)
    # Without growth it is as fast as the largest size.
    flat = CollectiveCurve("all_to_all", WORLD, (10.0, 20.0, 40.0), (1e-3, 9e-4, 8e-4), (0, 0, 0))
    assert flat.line().per_byte_s == 0
    assert link_of([flat]).bytes_per_s == pytest.approx(40 / 8e-4)
