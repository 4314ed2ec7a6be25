"""Load of others, read from /proc/stat, and what is said of it."""

from __future__ import annotations

import pytest

from hotrec.calibrate.noise import doubts_of
from hotrec.runtime.load import HostLoad


def host(cores: int, wanted: float, others: float, stolen: float = 0.0) -> HostLoad:
    return HostLoad(cores, wanted, others, stolen)


@pytest.mark.parametrize(
    ("load", "is_disturbed"),
    [
        (host(2, 2, 0.1), False),
        (host(2, 2, 0.9, 0.3), True),
        (host(2, 2, 0.0, 0.3), True),
        (host(64, 2, 10), False),  # on cores that the ranks leave idle
        (host(64, 64, 10), True),
    ],
)
def test_work_of_others_disturbs_where_no_core_is_idle(load: HostLoad, is_disturbed: bool) -> None:
    doubts = doubts_of([host(8, 1, 0), load], [])
    assert load.is_disturbed == bool(doubts) == is_disturbed
    taken = f"({load.others + load.stolen:.1f} of {load.num_cores} cores busy)"
    assert all(taken in doubt for doubt in doubts)
