"""Generated trainings on one GPU: every tier of cold rows with every optimizer, Adam among them."""

from __future__ import annotations

import pytest

from hotrec.runtime.ranks import Ranks
from hotrec.types import OptimizerKind, Tier
from tests.exact.case import PARTITIONS, PLACEMENTS, draw_cases
from tests.exact.training import run_cases

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", [kind.value for kind in OptimizerKind])
def test_hot_cold_equals_unsplit_reference(gpu: Ranks, kind: str) -> None:
    tiers = ("device", "cached")
    cases = draw_cases("0", 60, seed=18, tiers=tiers, device="cuda", optimizer=kind)
    assert {case.tier for case in cases} == {tier.value for tier in Tier}
    assert {case.partition for case in cases} == set(PARTITIONS)
    assert {case.placement for case in cases} == set(PLACEMENTS)
    found = run_cases(cases)
    assert not found.failures, "\n".join(found.failures)
