"""Slots on the device for rows of the host: whether they suffice, and what moves through them."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest

from hotrec.planner.plan import SplitTables
from hotrec.planner.propose import Decision, propose
from hotrec.planner.request import GivenTables, PlanRequest, Replayed, SlotRequest
from hotrec.planner.slots import LOAD_FRACS, SlotsError, check_slots
from hotrec.types import Partition, Placement, Tier
from tests.unit.cost_model.samples import LOOK_AHEAD
from tests.unit.planner.situations import NUM_ROWS, machine, situation


def place(load_frac: float) -> Placement:
    return Placement.alike(Partition(NUM_ROWS), Tier.CACHED, load_frac)


@pytest.mark.parametrize(("depth", "eval_factor"), [(0, 1), (1, 1), (1, 3)])
def test_slots_hold_the_rows_of_all_batches_in_flight(depth: int, eval_factor: int) -> None:
    """The number that would do is named, and does."""
    on = situation(machine("cpu"))
    num_rows = {d.name: d.num_rows for d in on.demands}
    num_ranks, num_batches = on.world.num_ranks, eval_factor * (depth + 1)
    read = sum(float(d.rows_G @ (1 - (1 - d.by_any_G) ** num_batches)) for d in on.demands)
    read += 4 * math.sqrt(num_ranks * read)
    samples = num_batches * on.machine.batch_size * num_ranks

    def check(frac: float) -> None:
        check_slots(on, Placement.alike(Partition(num_rows), Tier.CACHED, frac), samples)

    few = 0.5 * read / sum(num_rows.values())
    with pytest.raises(ValueError, match=r"^placement\.cache_load_frac: expected") as error:
        check(few)
    [needed] = re.findall(r"expected at least (\d+) slots", str(error.value))
    assert int(needed) == math.ceil(read)
    check(1.01 * read / sum(num_rows.values()))


def test_slots_that_do_not_fit_beside_the_other_rows_are_refused() -> None:
    """By the fraction that is named they do."""
    on = situation(machine(device_bytes=16 << 20))
    with pytest.raises(SlotsError, match="the device's memory") as error:
        check_slots(on, place(0.9), 512)
    [factor] = re.findall(r"Multiply it by (0\.\d+) or less", str(error.value))
    check_slots(on, place(0.9 * (float(factor) - 0.01)), 512)
    with pytest.raises(SlotsError):
        check_slots(on, place(0.9 * (float(factor) + 0.01)), 512)


class Counted:
    """As many rows move as have no slot."""

    def predict(self, load_frac: float, popular_rows: Any) -> Replayed:
        moved = 1e6 * (1 - load_frac)
        return Replayed(10, load_frac, moved, moved)


def propose_slots(slots: SlotRequest, on: Any, load_frac: float = 0.3) -> Decision:
    request = PlanRequest(GivenTables(place(load_frac), slots), LOOK_AHEAD, name="all_cold")
    return propose(request, on, lambda tables, pipeline: "unasked")


def test_the_fewest_slots_that_are_as_fast_are_chosen() -> None:
    on, read = situation(machine("cpu")), list[float]()

    def replayed(min_load_frac: float) -> Counted:
        read.append(min_load_frac)
        return Counted()

    slots = SlotRequest(1024, replayed, place)
    steps = {}
    for load_frac in LOAD_FRACS:
        given = replace(slots, place=None)
        try:
            steps[load_frac] = propose_slots(given, on, load_frac).prediction.step_s
        except SlotsError:
            assert not steps, "fewer slots suffice"
    assert 3 < len(steps) < len(LOAD_FRACS)
    assert read == pytest.approx(LOAD_FRACS)  # a given number is what is replayed
    fewest = min(f for f in steps if steps[f] <= 1.01 * steps[LOAD_FRACS[-1]])
    decision = propose_slots(slots, on)
    assert read[-1] == LOAD_FRACS[0]
    assert decision.placement == place(fewest)
    assert isinstance(decision.chosen.tables, SplitTables)
    assert decision.chosen.tables.tables == place(fewest).tables
    assert decision.prediction.step_s == steps[fewest]
    assert decision.prediction.slots == Counted().predict(fewest, {})
    assert f"cache_load_frac={fewest:.3f} gives the fewest" in decision.why
