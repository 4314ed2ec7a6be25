"""What the map of slots asks of a device, counted on the stand-in."""

from __future__ import annotations

import pytest

from tests.stand_in.build import why_not
from tests.stand_in.ranks import run_on_device
from tests.stand_in.slot_map import Bookkeeping

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


def test_a_step_starts_few_operations_and_waits_once() -> None:
    found: Bookkeeping = run_on_device("tests.stand_in.slot_map:count")[0]
    assert found.num_moved > 50
    assert found.num_operators <= 37, found.operators
    assert found.num_waits == 1
