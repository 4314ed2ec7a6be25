"""What a configuration asks of the planner, and what it asks in vain."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hotrec.assemble.job import (
    check_placement,
    plan_job,
)
from hotrec.cost_model.profile import Profile, Sampling
from hotrec.data.chunks import Dataset
from hotrec.planner.machine import Machine
from hotrec.planner.request import ByCost, GivenTables, PlanRequest
from hotrec.types import (
    Levels,
    Partition,
    PipelineKind,
    PipelineSpec,
    Placement,
    WireType,
)
from tests.unit.assemble.configs import config_of
from tests.unit.data.logs import ONE_HOT_SCHEMA, write_dataset

NUM_ROWS = {table.name: table.num_rows for table in ONE_HOT_SCHEMA.tables}
COUNTS = {name: np.arange(num_rows)[::-1] + 1 for name, num_rows in NUM_ROWS.items()}
PROFILE = Profile(90, 0, 90, Sampling(), COUNTS)
ON = Machine(2, 2, "cpu", 0, 8 << 30, 32)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    path = tmp_path_factory.mktemp("job") / "dataset"
    write_dataset(path, {"train": 90}, schema=ONE_HOT_SCHEMA)
    return Dataset.open(path)


def request_of(dataset: Dataset, *words: str, **given: Any) -> PlanRequest:
    config = config_of("trainer.batch_size=32", f"paths.dataset={dataset.artifact.path}", *words)
    return plan_job(config, dataset.schema).request(dataset, ON, PROFILE, **given)


def test_a_choice_by_cost(dataset: Dataset) -> None:
    table, num_rows = next(iter(NUM_ROWS.items()))
    asked = request_of(
        dataset,
        "placement=cost",
        "placement.hot_budget_mib=3",
        "placement.may_pool=false",
        f"++placement.overrides={{{table}:hot}}",
        "pipeline.wire=bf16",
        "trainer.num_workers=2",
    )
    limits = ByCost(3 << 20, may_pool=False, may_decline=True, fixed_hot={table: num_rows})
    assert asked == PlanRequest(
        limits,
        PipelineSpec(PipelineKind.auto, WireType.bf16, levels=Levels.auto),
        num_workers=2,
        name="cost",
        is_routed_by_loader=True,
    )
    assert request_of(dataset, "placement=cost").tables == ByCost()


@pytest.mark.parametrize(
    ("word", "expected"), [("null", ["t_a"]), ("false", []), ("true", sorted(NUM_ROWS))]
)
@pytest.mark.parametrize("kind", ["cost", "all_cold", "saved"])
def test_rows_are_spread_in_tables_of_row_numbers(
    dataset: Dataset, kind: str, word: str, expected: list[str]
) -> None:
    words, saved = [f"placement={kind}", f"placement.spread_rows={word}"], None
    if kind == "saved":
        words.append("placement.partition_dir=p")
        saved = Placement.alike(Partition(NUM_ROWS)).spread(["t_b"])
        expected = ["t_b"] if word == "null" else expected  # as it was saved
    asked = plan_job(config_of(*words), dataset.schema, ["t_a"])
    tables = asked.request(dataset, ON, PROFILE, saved=saved).tables
    if isinstance(tables, ByCost):
        assert sorted(tables.spread) == expected
    else:
        assert isinstance(tables, GivenTables)
        placed = tables.placement.tables
        assert sorted(name for name, table in placed.items() if table.is_spread) == expected


def test_a_policy_decides_the_rows(dataset: Dataset) -> None:
    all_hot = request_of(dataset, "placement=all_hot", "placement.routing=device")
    assert isinstance(all_hot.tables, GivenTables)
    assert all_hot.tables.placement.partition.total_hot == sum(NUM_ROWS.values())
    assert all_hot.tables.slots is None
    assert not all_hot.is_routed_by_loader


def test_slots_are_chosen_unless_their_number_is_given(dataset: Dataset) -> None:
    words = ("placement=all_cold", "placement.cold_tier=cached", "trainer.eval_batch_size=64")
    words += ("pipeline.depth=2", "pipeline.window=0")
    for given, is_chosen in (((), True), (("placement.cache_load_frac=0.5",), False)):
        tables = request_of(dataset, *words, *given).tables
        assert isinstance(tables, GivenTables)
        assert tables.is_all_in_slots
        assert tables.slots is not None
        assert (tables.slots.place is not None) == is_chosen
        assert tables.slots.samples_in_flight == 2 * 64 * 3
        assert sum(map(len, tables.placement.popular_rows.values())) > 0
    # Without evaluation the batches are those of training.
    config = config_of(*words, "trainer.batch_size=8", "trainer.eval_splits=[]")
    assert plan_job(config, dataset.schema).samples_in_flight(2) == 2 * 8 * 3


def test_pipelines_are_checked_before_there_is_data() -> None:
    config = config_of("placement=torchrec", "pipeline=look_ahead")
    with pytest.raises(ValueError, match=r"^pipeline\.kind: expected .* got look_ahead"):
        check_placement(config, "cpu")
    check_placement(config_of("placement=torchrec"), "cpu")
