"""Generated trainings on one GPU: every tier of cold rows with every optimizer, Adam among them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hotrec.runtime.ranks import Ranks
from hotrec.types import OptimizerKind
from tests.exact.case import PARTITIONS, PLACEMENTS, draw_cases, fit
from tests.exact.test_checkpoints import Route, draw_routes, run_routes
from tests.exact.training import run_cases

pytestmark = pytest.mark.gpu
TIERS = ("device", "cached")


@pytest.mark.parametrize("kind", [kind.value for kind in OptimizerKind])
def test_hot_cold_equals_unsplit_reference(gpu: Ranks, kind: str) -> None:
    cases = draw_cases("0", 45, seed=18, tiers=TIERS, device="cuda", optimizer=kind)
    assert {case.tier for case in cases} == {*TIERS}
    assert {case.partition for case in cases} == set(PARTITIONS)
    assert {case.placement for case in cases} == set(PLACEMENTS)
    found = run_cases(cases)
    assert not found.failures, "\n".join(found.failures)


def device_routes(hosts: str, device: str, num: int) -> dict[int, Route]:
    """Routes of checkpoints from every memory of a device into others."""
    routes: dict[int, Route] = {}
    for route in draw_routes(6 * num):
        if len(routes) == num or route.saved.is_torchrecs or route.loaded.is_torchrecs:
            continue
        tier = TIERS[len(routes) % len(TIERS)]
        more = {"hosts": hosts, "levels": "one", "device": device, "tier": tier, "row_type": "fp32"}
        saved, loaded = (fit(replace(side, **more)) for side in (route.saved, route.loaded))  # type: ignore[arg-type]
        if route.kind == "as_it_was":
            loaded = saved
        loaded = replace(loaded, first=saved.steps)
        routes[len(routes)] = replace(route, saved=saved, loaded=loaded)
    return routes


def test_any_checkpoint_goes_on_as_the_unsplit_model(gpu: Ranks, tmp_path: Path) -> None:
    routes = device_routes("0", "cuda", 12)
    for is_saved in (True, False):
        found = run_routes(routes, tmp_path, is_saved=is_saved)
        assert not found.failures, "\n".join(found.failures)
