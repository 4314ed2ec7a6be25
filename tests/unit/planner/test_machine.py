"""The hosts of a prediction."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hotrec.cost_model.builtin import BUILTIN
from hotrec.cost_model.costs import World
from hotrec.planner.machine import Machine
from hotrec.planner.situation import choose_costs

MACHINE = Machine(4, 4, "cpu", 0, 32 << 30, 2048)
WHY = "in one level, since the ranks of a host are not consecutive"


@pytest.mark.parametrize(
    ("machine", "shared_by", "why"),
    [
        (replace(MACHINE, ranks_per_domain=2, irregular=WHY), 2, WHY),
        (replace(MACHINE, world_size=5, local_world_size=3), 3, "in one level"),
    ],
)
def test_hosts_that_are_not_alike_are_predicted_by_an_upper_bound(
    machine: Machine, shared_by: int, why: str
) -> None:
    assert machine.world == World(machine.world_size, 1)
    costs, note = choose_costs("cpu_1gbit", Path("none"), machine, {})
    assert f"predicted {why}: an upper bound" in str(note)
    link, whole = costs.inter, BUILTIN["cpu_1gbit"].inter
    assert link is not None
    assert whole is not None
    assert link.bytes_per_s == pytest.approx(whole.bytes_per_s / shared_by)
    # All messages cross on a rank's share of the link: no host of equal ranks takes longer.
    ranks = machine.world_size
    flat = costs.collective("all_to_all", machine.world)
    assert flat.per_byte_s == pytest.approx(shared_by / whole.bytes_per_s)
    equal = World(ranks, shared_by) if ranks % shared_by == 0 else World(2 * shared_by, shared_by)
    alike = BUILTIN["cpu_1gbit"].collective("all_to_all", equal)
    assert alike.per_byte_s <= flat.per_byte_s
