"""The items of samples: probabilities, drawn negatives, and the last sample of each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hotrec.config.data import ColumnKind, ColumnSpec, Encoding, SyntheticSpec, TableSpec
from hotrec.data.chunks import Dataset
from hotrec.data.items import (
    ItemColumn,
    Negatives,
    count_items,
    item_column,
    items_to_rank,
    last_samples,
    training_items,
)
from hotrec.data.prepare import prepare
from hotrec.data.synthetic import write_synthetic
from tests.unit.data.logs import delimited_spec, loader
from tests.unit.data.test_groups import prepared


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Several chunks."""
    spec = SyntheticSpec(
        [30, 20], num_dense=2, num_train=500, num_valid=90, num_test=0, rows_per_chunk=64
    )
    path = tmp_path_factory.mktemp("items") / "dataset"
    write_synthetic(spec, path)
    return Dataset.open(path)


def items_in_order(dataset: Dataset, feature: str) -> np.ndarray:
    blocks = [dataset.block("train", at).features for at in range(len(dataset.chunks("train")))]
    return np.concatenate([getattr(of[feature], "values", of[feature]) for of in blocks])


def test_probabilities_are_those_of_the_training_split(dataset: Dataset) -> None:
    ids = items_in_order(dataset, "c1")
    by = item_column(dataset, "c1")
    expected = np.bincount(ids, minlength=20)
    np.testing.assert_array_equal(count_items(dataset, "train", by), expected)
    column = training_items(dataset, "train", Negatives("c1"))
    assert column.log_q_N is not None
    np.testing.assert_allclose(np.exp(column.log_q_N), expected / 500, rtol=1e-6)
    batches = loader(dataset.artifact.path, batch_size=40)
    batches.add_items(column)
    batch = next(iter(batches))
    ids_B = batch.sparse["c1"].values()
    assert batch.items is not None
    torch.testing.assert_close(batch.items.ids, ids_B)
    torch.testing.assert_close(batch.items.log_q, torch.from_numpy(column.log_q_N)[ids_B])
    assert batch.items.is_candidate.all()


SEEN = [[3, 3, 5], [], [1], [0, 2]]


def with_lists(folder: Path) -> Dataset:
    """Items with what was seen before, and tags of another table."""
    lines = ["label,item,seen,tags"]
    lines += [f"1,{item},{' '.join(map(str, seen))},1" for item, seen in enumerate(SEEN)]
    (folder / "log.csv").write_text("\n".join([*lines, ""]))
    columns = {
        "label": ColumnSpec(ColumnKind.label),
        "item": ColumnSpec(ColumnKind.categorical),
        "seen": ColumnSpec(ColumnKind.categorical_list, table="item"),
        "tags": ColumnSpec(ColumnKind.categorical_list),
    }
    tables = {name: TableSpec(Encoding.rows, num_rows=6) for name in ("item", "tags")}
    prepare(delimited_spec([folder / "log.csv"], columns=columns, tables=tables), folder / "made")
    return Dataset.open(folder / "made")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_have_the_items_that_are_left_out(tmp_path: Path, num_workers: int) -> None:
    made = with_lists(tmp_path)
    batches = loader(made.artifact.path, shuffle=False, num_workers=num_workers)
    batches.add_items(items_to_rank(made, "item", "seen"))
    (batch,) = batches
    assert batch.items is not None
    assert batch.items.seen is not None
    assert batch.items.seen.tolist() == [[3, 3, 5], [-1] * 3, [1, -1, -1], [0, 2, -1]]
    for name in ("tags", "item", "sene"):
        with pytest.raises(ValueError, match=r"eval_ranking_without: .* \['seen'\], got '" + name):
            items_to_rank(made, "item", name)


def test_the_catalogue_is_the_last_sample_of_each_item(dataset: Dataset) -> None:
    ids = items_in_order(dataset, "c0")
    last = {int(item): place for place, item in enumerate(ids)}
    by = item_column(dataset, "c0")
    samples = last_samples(dataset, "train", by)
    firsts = np.cumsum([0, *(chunk.num_samples for chunk in dataset.chunks("train"))])
    found = [
        int(firsts[chunk] + row)
        for chunk in range(len(samples.sizes))
        for row in samples.rows(chunk)
    ]
    assert found == sorted(last.values())
    seen = []
    for rank in range(3):
        of_rank = loader(
            dataset.artifact.path, rank=rank, world_size=3, shuffle=False, subset=samples
        )
        of_rank.add_items(ItemColumn(by))
        batches = list(of_rank)
        assert len(batches) == -(-len(last) // 12)
        seen += [int(i) for batch in batches for i in batch.items.ids if i >= 0]
    assert sorted(seen) == sorted(last)


def test_unknown_values_are_trained_but_not_ranked_or_drawn(tmp_path: Path) -> None:
    """Of a vocabulary of nine users, row 0 has the rare and the missing one."""
    dataset = prepared(tmp_path, Encoding.vocabulary)
    by = item_column(dataset, "user")
    assert last_samples(dataset, "train", by).sizes == (9,)
    column = training_items(dataset, "train", Negatives("user"))
    assert column.log_q_N is not None
    assert np.exp(column.log_q_N[0]) == pytest.approx(2 / 92)
    drawn = training_items(dataset, "train", Negatives("user", num_uniform=1)).drawn
    assert drawn is not None
    assert (drawn.rows, drawn.log_q) == (range(1, 10), pytest.approx(np.log(1 / 9)))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_number_of_ranks_draws_the_same_items(dataset: Dataset, world_size: int) -> None:
    """In batches of 60, of which the last has 20 samples: 7 items each."""
    column = training_items(dataset, "train", Negatives("c1", num_uniform=7, seed=3))
    drawn: list[list[int]] = [[] for _ in range(9)]
    for rank in range(world_size):
        given = {"batch_size": 60 // world_size, "rank": rank, "world_size": world_size}
        with_items, plain = (loader(dataset.artifact.path, **given) for _ in range(2))
        with_items.add_items(column)
        for step, (batch, other) in enumerate(zip(with_items, plain, strict=True)):
            size = len(other.labels)
            items = batch.items
            assert items is not None
            is_drawn = torch.arange(len(batch.labels)) >= size
            assert torch.equal(items.is_candidate, is_drawn)
            assert torch.equal(items.log_q, torch.full_like(items.log_q, np.log(7 / 20)))
            assert not batch.weights[size:].any()
            assert not batch.labels[size:].any()
            assert batch.num_global_samples == other.num_global_samples
            for name in ("c0", "c1"):
                bags, others = batch.sparse[name], other.sparse[name]
                assert torch.equal(bags.values()[: others.values().numel()], others.values())
                added = bags.lengths()[size:]
                assert torch.equal(added, torch.full_like(added, int(name == "c1")))
            assert torch.equal(batch.dense[:size], other.dense)
            drawn[step] += items.ids[size:].tolist()
    expected = [
        np.random.default_rng([3, 0, 60 * step]).integers(0, 20, 7).tolist() for step in range(9)
    ]
    assert drawn == expected


def test_a_column_without_items_is_refused(dataset: Dataset) -> None:
    with pytest.raises(ValueError, match="model.item_id: expected a categorical column"):
        item_column(dataset, "nothing")
    by = replace(item_column(dataset, "c1"), skips_first_row=True)
    assert sum(last_samples(dataset, "train", by).sizes) == len(
        np.unique(items_in_order(dataset, "c1")[items_in_order(dataset, "c1") > 0])
    )
