"""The loader is timed on the dataset, in this process and in a worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hotrec.bench.job import make_subject
from hotrec.bench.samples import table_per_feature
from hotrec.calibrate.loader import measure_loader
from hotrec.calibrate.workload import CalibrationTarget, CalibrationWorkload, group_alone
from hotrec.config.groups import DlrmConfig, RowwiseAdagradConfig
from hotrec.cost_model.costs import LOADER_PARTS
from hotrec.runtime.ranks import Ranks
from tests.unit.data.logs import write_dataset

ALONE = Ranks(0, 1, 0, 1, torch.device("cpu"))


def make_workload(batch_size: int) -> CalibrationWorkload:
    subject = make_subject(
        DlrmConfig(embedding_dim=8),
        RowwiseAdagradConfig(learning_rate=0.1),
        table_per_feature([50, 3], num_dense=2),
        batch_size=batch_size,
    )
    target = CalibrationTarget(subject, cap_bytes=1 << 14)
    return CalibrationWorkload(target, ALONE, group_alone(ALONE))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch_size", "parts"), [(16, set(LOADER_PARTS)), (200, set(LOADER_PARTS)), (1, set())]
)
def test_every_part_of_the_loader_takes_time(
    tmp_path: Path, one_rank: Any, batch_size: int, parts: set[str]
) -> None:
    write_dataset(tmp_path / "dataset", {"train": 90})
    found = measure_loader(tmp_path / "dataset", make_workload(batch_size))
    assert set(found) == parts
    seconds = {name: line.seconds(1000) for name, line in found.items()}
    assert all(of_part > 0 for of_part in seconds.values()), seconds
