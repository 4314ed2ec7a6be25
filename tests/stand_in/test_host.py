"""Host memory and calibration of the CUDA path, on a machine without a GPU."""

from __future__ import annotations

import pytest

from tests.stand_in.build import why_not
from tests.stand_in.ranks import run_on_device

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.timeout(300),
]

CHECKS = [
    "slots_need_no_uvm_to_cpu",
    "mapped_tables_are_out_of_forks",
    "calibration_cuts_long_bags",
]


@pytest.fixture(scope="module")
def verdicts() -> dict[str, str | None]:
    found: dict[str, str | None] = run_on_device(
        "tests.stand_in.host_checks:run_all", timeout_s=200, names=CHECKS
    )[0]
    return found


@pytest.mark.parametrize("check", CHECKS)
def test_on_the_device(verdicts: dict[str, str | None], check: str) -> None:
    assert verdicts[check] is None, verdicts[check]
