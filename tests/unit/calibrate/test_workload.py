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
    HstuConfig,
    RowwiseAdagradConfig,
)
from hotrec.runtime.ranks import Ranks
from hotrec.types import Feature, Schema, Table


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


def test_histories_are_timed_at_full_length_and_drawn_with_their_side_columns(
    one_rank: Ranks,
) -> None:
    schema = Schema(
        dense=(),
        features=(
            Feature("item", "i"),
            Feature("seen", "i", is_multi_hot=True),
            Feature("actions", "a", is_multi_hot=True),
        ),
        tables=(Table("i", 500), Table("a", 5)),
        labels=("click", "like"),
    )
    model = HstuConfig(embedding_dim=8, history={"seen": "item"}, side=["actions"], max_length=6)
    tables, lengths = table_per_feature([500, 500, 5], 0, schema), np.array([0, 3, 9, 9])
    subject = make_subject(
        model, RowwiseAdagradConfig(learning_rate=0.1), tables, batch_size=16, columns=schema
    )
    target = CalibrationTarget(subject, bag_lengths=[np.array([1]), lengths, lengths.copy()])
    workload = CalibrationWorkload(target, one_rank, group_alone(one_rank))
    (dense,) = [probe for probe in all_probes(workload) if probe.name == "dense"]
    work = dense.make(*dense.sizes[0])
    batch = work.prepare()
    num_samples = len(batch.labels)
    assert {name: len(rows.values()) for name, rows in batch.sparse.items()} == {
        "item": num_samples,
        "seen": 6 * num_samples,
        "actions": 6 * num_samples,
    }
    work.run(batch)
    assert work.num_items == pytest.approx(subject.work.flops * num_samples)
    for features in workload.features(workload.samples, 64):
        _, seen, actions = features.lengths().view(3, -1)
        assert torch.equal(seen, actions)


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
