"""The main test on one GPU: every tier of cold rows with every optimizer, Adam among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from hotrec.runtime.ranks import Ranks
from hotrec.types import OptimizerKind, RowFetch, Tier
from tests.distributed.parity_cases import (
    BATCHES,
    PARTITIONS,
    PLACEMENTS,
    Case,
    make_cases,
    make_pipeline_cases,
    run_cases,
)

pytestmark = pytest.mark.gpu
KINDS = pytest.mark.parametrize("kind", list(OptimizerKind), ids=lambda kind: kind.value)
# Slots are look-ahead's alone.
TIERS = [tier for tier in Tier if tier is not Tier.CACHED]


def in_every_tier(cases: Sequence[Case], kind: OptimizerKind, each: int) -> list[Case]:
    """The cases on the device; ``each`` of them are in one tier, the next ones in the next."""
    return [
        replace(case, device="cuda", optimizer=kind, tier=TIERS[at // each % len(TIERS)])
        for at, case in enumerate(cases)
    ]


@KINDS
def test_hot_cold_equals_unsplit_reference(gpu: Ranks, kind: OptimizerKind) -> None:
    # Each of the six partitions with each tier.
    cases = in_every_tier(make_cases(18, seed=18), kind, len(PARTITIONS))
    assert {(case.tier, case.partition) for case in cases} == {
        (tier, partition) for tier in TIERS for partition in PARTITIONS
    }
    assert {case.batches for case in cases} == set(BATCHES)
    assert {case.placement for case in cases} == set(PLACEMENTS)
    failures = run_cases(cases)
    assert not failures, "\n".join(failures)


@KINDS
def test_pipelines_equal_unsplit_reference(gpu: Ranks, kind: OptimizerKind) -> None:
    # Each of the eight pipelines with each tier.
    failures = run_cases(in_every_tier(make_pipeline_cases(24), kind, 8))
    assert not failures, "\n".join(failures)


@KINDS
def test_rows_behind_slots_equal_unsplit_reference(gpu: Ranks, kind: OptimizerKind) -> None:
    cases = [
        replace(
            case,
            device="cuda",
            optimizer=kind,
            tier=Tier.CACHED,
            cache_load_frac=1.0,
            row_fetch=(RowFetch.staged, RowFetch.mapped)[at % 2],
        )
        for at, case in enumerate(make_pipeline_cases(24))
        if case.pipeline == "look_ahead" and case.placement in ("row_wise", "table_wise")
    ]
    assert len(cases) > 8
    failures = run_cases(cases)
    assert not failures, "\n".join(failures)
