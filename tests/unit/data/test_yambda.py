"""Histories of Yambda's events."""

from __future__ import annotations

import numpy as np
import pytest

from hotrec.data.yambda import HistoryRule, find_histories, pool_bits


def test_pools() -> None:
    types = np.array([0, 0, 1, 2, 3, 4, 0], np.uint8)
    played = np.array([50, 49, 0, 100, 100, 0, 0], np.uint16)
    assert pool_bits(types, played).tolist() == [1, 4, 2, 0, 0, 0, 4]


@pytest.mark.parametrize(
    "rule", [HistoryRule(), HistoryRule(per_pool=3), HistoryRule(per_pool=5, max_events=12)]
)
def test_histories_are_the_last_events_of_each_pool(
    rule: HistoryRule,
) -> None:
    pools = np.random.default_rng(0).choice([0, 1, 2, 4], 200, p=[0.1, 0.5, 0.1, 0.3])
    samples = np.array([0, 1, 5, 5, 60, 199])
    positions, begins = find_histories(pools, samples, rule)
    for number, sample in enumerate(samples.tolist()):
        near = [e for e in range(sample) if e >= sample - rule.max_events]
        kept = [
            e for bit in (1, 2, 4) for e in [e for e in near if pools[e] == bit][-rule.per_pool :]
        ]
        assert positions[begins[number] : begins[number + 1]].tolist() == sorted(kept)
