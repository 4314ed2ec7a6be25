"""Tables cut to memory, and the table of costs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hotrec.bench.cases import Subject
from hotrec.bench.job import make_subject
from hotrec.bench.samples import table_per_feature
from hotrec.calibrate.probes import all_probes
from hotrec.calibrate.workload import (
    CalibrationTarget,
    CalibrationWorkload,
    cut_tables,
    group_alone,
)
from hotrec.config.groups import (
    DlrmConfig,
    RowwiseAdagradConfig,
)
from hotrec.runtime.ranks import Ranks


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=30), st.integers(1, 100_000))
def test_tables_are_cut_to_one_height(rows: list[int], most: int) -> None:
    cut = cut_tables(rows, most)
    assert all(1 <= after <= before for after, before in zip(cut, rows, strict=True))
    assert sum(cut) <= max(most, len(rows))
    height = max(cut)
    assert all(after in (before, height) for after, before in zip(cut, rows, strict=True))
    if sum(rows) <= most:
        assert cut == rows
    else:
        assert sum(cut) > most - len(rows) or max(cut) == 1  # no memory is left idle


def subject_of(table_rows: list[int], dim: int, batch_size: int) -> Subject:
    return make_subject(
        DlrmConfig(embedding_dim=dim),
        RowwiseAdagradConfig(learning_rate=0.1),
        table_per_feature(table_rows, num_dense=0),
        batch_size=batch_size,
    )


def test_bags_have_lengths_of_the_data(one_rank: Ranks) -> None:
    """Ids are counted, not bags, and a kernel's work has about the ids that it is asked for."""
    lengths = [np.array([1]), np.array([0, 20, 40])]
    target = CalibrationTarget(subject_of([50, 5000], 8, 512), bag_lengths=lengths)
    workload = CalibrationWorkload(target, one_rank, group_alone(one_rank))
    assert workload.num_ids == 512 * 21
    batches = workload.features(workload.samples, workload.num_ids)
    of_bags = torch.stack([batch.lengths().view(2, -1) for batch in batches])
    assert of_bags.shape == (10, 2, 512)
    assert set(of_bags[:, 0].unique().tolist()) == {1}
    assert set(of_bags[:, 1].unique().tolist()) == {0, 20, 40}
    counts = workload.samples.count(1000)
    assert [of.sum() for of in counts.values()] == [1000, 20_000]
    for probe in all_probes(workload):
        if probe.name in ("route", "pool", "pooled_device"):
            num_ids, dim = probe.sizes[-1]
            work = probe.make(num_ids, dim)
            assert work.num_items == pytest.approx(num_ids, rel=0.1)
            work.run(work.prepare())
    small = target.small(50)
    assert (small.table_rows, small.bag_lengths) == ([50], lengths[:1])
    assert target.small(40).table_rows == [40]
