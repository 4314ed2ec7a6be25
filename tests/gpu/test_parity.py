"""The main test on one GPU: every tier of cold rows with every optimizer, Adam among them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hotrec.runtime.ranks import Ranks
from hotrec.types import OptimizerKind, Tier
from tests.distributed.parity_cases import (
    BATCHES,
    PARTITIONS,
    PLACEMENTS,
    make_cases,
    make_pipeline_cases,
    run_cases,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", list(OptimizerKind), ids=lambda kind: kind.value)
@pytest.mark.parametrize("tier", list(Tier), ids=lambda tier: tier.value)
def test_hot_cold_equals_unsplit_reference(gpu: Ranks, tier: Tier, kind: OptimizerKind) -> None:
    cases = [
        replace(case, device="cuda", tier=tier, optimizer=kind) for case in make_cases(24, seed=18)
    ]
    assert {case.partition for case in cases} == set(PARTITIONS)
    assert {case.batches for case in cases} == set(BATCHES)
    assert {case.placement for case in cases} == set(PLACEMENTS)
    failures = run_cases(cases)
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("kind", list(OptimizerKind), ids=lambda kind: kind.value)
@pytest.mark.parametrize("tier", list(Tier), ids=lambda tier: tier.value)
def test_pipelines_equal_unsplit_reference(gpu: Ranks, tier: Tier, kind: OptimizerKind) -> None:
    cases = [
        replace(case, device="cuda", tier=tier, optimizer=kind) for case in make_pipeline_cases(16)
    ]
    failures = run_cases(cases)
    assert not failures, "\n".join(failures)
