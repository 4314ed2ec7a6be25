"""Tables cut to memory, and the table of costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hotrec.bench.cases import Subject
from hotrec.bench.job import make_subject
from hotrec.bench.samples import table_per_feature
from hotrec.calibrate.measure import costs_table
from hotrec.calibrate.probes import all_probes
from hotrec.calibrate.workload import (
    MAX_MOVED_BYTES,
    SAMPLED_IDS,
    CalibrationTarget,
    CalibrationWorkload,
    cut_tables,
    group_alone,
)
from hotrec.config.groups import (
    DinConfig,
    DlrmConfig,
    HstuConfig,
    ModelConfig,
    RowwiseAdagradConfig,
    TwoTowerConfig,
)
from hotrec.cost_model.builtin import BUILTIN
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


def test_the_table_names_every_kernel_and_link() -> None:
    for costs in BUILTIN.values():
        text = costs_table(costs)
        assert all(f"\n{name} " in text for name in costs.kernels)
        assert "link inside a host: " in text
        assert ("link between hosts: " in text) == (costs.inter is not None)
        assert "-40% to +70%" in text
    assert "118 MB/s" in costs_table(BUILTIN["cpu_1gbit"])


@pytest.mark.parametrize(
    "model",
    [
        TwoTowerConfig(embedding_dim=8, item_columns=["item", "price"], tower_layer_sizes=[4]),
        DinConfig(embedding_dim=8, dense_layer_sizes=[8], attention={"seen": "item"}),
    ],
)
def test_models_that_tell_columns_apart_get_those_of_the_dataset(
    model: ModelConfig, one_rank: Ranks
) -> None:
    """With a table that two features share, and one too large to be replicated."""
    schema = Schema(
        dense=("price",),
        features=(Feature("user", "u"), Feature("item", "i"), Feature("seen_1", "i")),
        tables=(Table("i", 500), Table("u", 5)),
    )
    assert model.names_columns
    optimizer, rows = RowwiseAdagradConfig(learning_rate=0.1), [5, 500, 500]
    subject = make_subject(model, optimizer, table_per_feature(rows, 1, schema), batch_size=16)
    target = CalibrationTarget(subject)
    group = group_alone(one_rank)
    probes = {p.name: p for p in all_probes(CalibrationWorkload(target, one_rank, group))}
    for name in ("dense", "replicated_read"):
        work = probes[name].make(*probes[name].sizes[0])
        work.run(work.prepare())
        assert work.num_items > 0
    # By names of its own there is no such column.
    with pytest.raises(ValueError, match=r"^model\.(item_columns|attention): .*'C1', "):
        make_subject(model, optimizer, table_per_feature(rows, 1), batch_size=16)


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


def test_large_batches_are_measured_with_bounded_work(one_rank: Ranks) -> None:
    """A million ids a batch must leave time for whole steps."""
    target = CalibrationTarget(subject_of([500], 64, 8192), bag_lengths=[np.array([160])])
    workload = CalibrationWorkload(target, one_rank, group_alone(one_rank))
    assert max(workload.sizes()) == (workload.num_ids, 64)  # the batch itself, not twice of it
    assert max(workload.moved_rows(256)) * 256 <= MAX_MOVED_BYTES
    assert len(workload.features(workload.samples, SAMPLED_IDS // 4)) == 4
    routed = workload.routed(workload.router, workload.samples, 8192)
    assert workload.routed(workload.router, workload.samples, 8192) is routed
    small = replace(target, subject=subject_of([500], 64, 512))
    of_small = CalibrationWorkload(small, one_rank, group_alone(one_rank)).sizes()
    assert max(of_small) == (2 * 512 * 160, 64)
