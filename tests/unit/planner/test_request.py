"""Which pipelines may train what is asked, and which one does without predictions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hotrec.planner.plan import Plan, TorchrecTables
from hotrec.planner.propose import split_of, unpredicted
from hotrec.planner.request import (
    MIN_BATCH_ON_ONE_HOST,
    ByCost,
    GivenTables,
    PlanRequest,
    check_pipeline,
)
from hotrec.types import (
    Partition,
    PipelineKind,
    PipelineSpec,
    Placement,
    TablePlacement,
    Tier,
    TorchrecTier,
)
from tests.unit.planner.situations import NUM_ROWS, machine

AUTO, AHEAD, IN_LINE = PipelineKind.auto, PipelineKind.look_ahead, PipelineKind.sparse_dist
BASE, PREFETCH = PipelineKind.base, PipelineKind.prefetch
CPU = machine("cpu")
LARGE = replace(CPU, batch_size=MIN_BATCH_ON_ONE_HOST)
TWO_HOSTS = replace(CPU, local_world_size=1)
ONE_RANK = replace(LARGE, world_size=1, local_world_size=1)
PARTITION = Partition(NUM_ROWS, {"C2": np.array([4, 1])})


def given(tier: Tier = Tier.DEVICE, **others: Tier) -> GivenTables:
    placement = Placement.alike(PARTITION, tier, 0.5)
    tables = {name: TablePlacement(tier=tier, cache_load_frac=0.5) for name, tier in others.items()}
    return GivenTables(replace(placement, tables={**placement.tables, **tables}))


CACHE = TorchrecTables(tier=TorchrecTier.fused_uvm_caching)


def request(tables: Any, kind: PipelineKind = AUTO, **fields: Any) -> PlanRequest:
    return PlanRequest(tables, PipelineSpec(kind), name="theirs", **fields)


@pytest.mark.parametrize(
    ("asked", "on", "kinds", "default"),
    [
        (request(ByCost()), CPU, [AHEAD, BASE], BASE),
        (request(ByCost()), LARGE, [AHEAD, BASE], AHEAD),
        (request(ByCost()), TWO_HOSTS, [AHEAD, BASE], AHEAD),
        # One rank exchanges nothing, and look-ahead has not been run on CUDA.
        (request(ByCost()), ONE_RANK, [BASE], BASE),
        (request(given()), machine("cuda"), [BASE], BASE),
        (request(given()), CPU, [AHEAD, BASE], BASE),
        # Only look-ahead fills slots, be they of one table, wherever they are.
        (request(given(Tier.CACHED)), machine("cuda"), [AHEAD], AHEAD),
        (request(given(C3=Tier.CACHED)), CPU, [AHEAD], AHEAD),
        (request(TorchrecTables()), LARGE, [IN_LINE], IN_LINE),
        (request(CACHE, PREFETCH), machine("cuda"), [PREFETCH], PREFETCH),
        # A model that only some of them can train.
        (request(ByCost(), kinds=(IN_LINE,)), LARGE, [IN_LINE], IN_LINE),
        (request(ByCost(), kinds=(BASE,)), LARGE, [BASE], BASE),
    ],
)
def test_pipelines_of_a_request(
    asked: PlanRequest, on: Any, kinds: list[PipelineKind], default: PipelineKind
) -> None:
    assert [pipeline.kind for pipeline in asked.pipelines(on)] == kinds
    assert asked.default_pipeline(on).kind is default


@pytest.mark.parametrize(
    ("kind", "kinds", "expected"),
    [
        (AUTO, tuple(PipelineKind), IN_LINE),
        (BASE, tuple(PipelineKind), BASE),
        (AHEAD, tuple(PipelineKind), IN_LINE),
        # A program whose features are only known in line.
        (AHEAD, (AHEAD, BASE), BASE),
    ],
)
def test_the_pipeline_of_torchrecs_plans(
    kind: PipelineKind, kinds: tuple[PipelineKind, ...], expected: PipelineKind
) -> None:
    assert request(ByCost(), kind, kinds=kinds).torchrec_pipeline.kind is expected


def test_the_rest_of_the_pipeline_is_as_requested() -> None:
    asked = PlanRequest(ByCost(), PipelineSpec(AUTO, depth=0, window=5))
    found = [*asked.pipelines(CPU), asked.default_pipeline(CPU), asked.torchrec_pipeline]
    assert {(pipeline.depth, pipeline.window) for pipeline in found} == {(0, 5)}


@pytest.mark.parametrize(
    ("tables", "kind", "device", "expected"),
    [
        (given(Tier.CACHED), BASE, "cuda", "got base"),
        (TorchrecTables(), AHEAD, "cpu", "got look_ahead"),
        (CACHE, PREFETCH, "cpu", "got .* fused_uvm_caching on cpu"),
    ],
)
def test_pipelines_that_cannot_train_the_tables_are_refused(
    tables: Any, kind: PipelineKind, device: str, expected: str
) -> None:
    """By a request, and before there is any data."""
    asked, on = request(tables, kind), machine(device)
    torchrec = tables if isinstance(tables, TorchrecTables) else None
    of_tables: Any = {"has_slots": asked.has_slots, "torchrec": torchrec, "name": "theirs"}
    for check in (
        lambda: asked.pipelines(on),
        lambda: unpredicted(asked, on),
        lambda: check_pipeline(kind, device, **of_tables),
    ):
        with pytest.raises(ValueError, match=rf"^pipeline\.kind: .*{expected}"):
            check()


def test_other_hot_rows_are_another_plan() -> None:
    """As many rows of each table, but not the same ones."""
    placement = given().placement
    other = replace(placement, partition=Partition(NUM_ROWS, {"C2": np.array([4, 2])}))
    ours, theirs = (split_of(request(given()), of) for of in (placement, other))
    assert ours.num_hot == theirs.num_hot
    assert Plan(ours).digest != Plan(theirs).digest
