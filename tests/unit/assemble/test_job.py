"""What a configuration asks of the planner, and what it asks in vain."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hotrec.assemble.job import Job
from hotrec.assemble.plan_job import make_request, samples_in_flight
from hotrec.cost_model.profile import Profile
from hotrec.data.chunks import Dataset
from hotrec.planner.machine import Machine
from hotrec.planner.request import GivenTables, PlanRequest
from tests.unit.assemble.configs import config_of
from tests.unit.data.logs import ONE_HOT_SCHEMA, write_dataset

NUM_ROWS = {table.name: table.num_rows for table in ONE_HOT_SCHEMA.tables}
COUNTS = {name: np.arange(num_rows)[::-1] + 1 for name, num_rows in NUM_ROWS.items()}
PROFILE = Profile(90, 0, COUNTS)
ON = Machine(2, 2, "cpu", 0, 8 << 30, 32)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    path = tmp_path_factory.mktemp("job") / "dataset"
    write_dataset(path, {"train": 90}, schema=ONE_HOT_SCHEMA)
    return Dataset.open(path)


def request_of(dataset: Dataset, *words: str, **given: Any) -> PlanRequest:
    config = config_of("trainer.batch_size=32", f"paths.dataset={dataset.artifact.path}", *words)
    return make_request(Job(config, dataset), ON, PROFILE, **given)


def test_slots_are_chosen_unless_their_number_is_given(dataset: Dataset) -> None:
    words = ("placement=all_cold", "placement.cold_tier=cached", "trainer.eval_batch_size=64")
    words += ("pipeline.window=0",)
    for given, is_chosen in (((), True), (("placement.cache_load_frac=0.5",), False)):
        tables = request_of(dataset, *words, *given).tables
        assert isinstance(tables, GivenTables)
        assert tables.is_all_in_slots
        assert tables.slots is not None
        assert (tables.slots.place is not None) == is_chosen
        assert tables.slots.samples_in_flight == 2 * 64 * 2
        assert sum(map(len, tables.placement.popular_rows.values())) > 0
    # Without evaluation the batches are those of training.
    config = config_of(*words, "trainer.batch_size=8", "trainer.eval_splits=[]")
    assert samples_in_flight(Job(config, dataset), 2) == 2 * 8 * 2
