"""The planner and calibration take the hosts that exchanges find."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hotrec.calibrate import measure
from hotrec.cli.store import build_config, compose_config
from hotrec.cost_model.costs import CostsError, World
from hotrec.runs import train
from hotrec.runtime.hosts import find_hosts
from hotrec.runtime.ranks import Ranks

FOUR = Ranks(0, 4, 0, 4, torch.device("cpu"))


@pytest.mark.parametrize(
    ("host_of_rank", "world"), [("aabb", World(4, 2)), ("abab", World(4, 1)), ("aaaa", World(4, 4))]
)
def test_a_run_is_planned_for_the_hosts_of_its_exchange(
    host_of_rank: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = find_hosts(host_of_rank)
    monkeypatch.setattr(train, "gather_hosts", lambda: found)
    machine = train.make_run_machine(build_config(compose_config("config", ())), FOUR)
    assert machine.world == world
    assert machine.local_world_size == 4
    assert machine.irregular == ("" if found.is_regular else found.why)


def test_hosts_that_are_not_alike_are_not_calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "gather_hosts", lambda: find_hosts("aaab"))
    target: Any = None
    with pytest.raises(CostsError, match="consecutive ranks, got .* hosts have 1 to 3 ranks"):
        measure.measure_costs(FOUR, target)
