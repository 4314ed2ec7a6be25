"""Host memory that devices map."""

from __future__ import annotations

import pytest

from hotrec.calibrate.tables import check_host_tier
from hotrec.doctor.machine import read_memory
from hotrec.runtime.memory import check_mappable


def test_more_than_is_free_is_refused_with_both_numbers() -> None:
    check_mappable("plan host tiers", 100, 100)
    with pytest.raises(ValueError, match=r"^plan host tiers: expected at most 100 bytes.* got 101"):
        check_mappable("plan host tiers", 101, 100)


@pytest.mark.parametrize("tier", ["host", "cached"])
def test_calibration_refuses_tables_that_the_host_cannot_map(tier: str) -> None:
    too_many = read_memory()[0] // (4 * 64) + 1  # rows alone fill the whole host
    with pytest.raises(ValueError, match=rf"^calibrate tables of tier {tier}: expected at most"):
        check_host_tier([too_many], 64, tier)
    check_host_tier([1000], 64, tier)
    check_host_tier([too_many], 64, "device")
