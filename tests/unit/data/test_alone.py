"""The AUC of a column alone: high for what holds the answer, chance for what only looks like it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hotrec.artifact import scratch_directory
from hotrec.data.alone import alone_auc, alone_aucs, codes_of_numbers
from hotrec.data.chunks import Block, ChunkWriter, Dataset, Jagged, commit_dataset
from hotrec.types import Feature, Schema, Table

S = 4000
RANDOM = np.random.default_rng(3)
CLICKS = RANDOM.random(S) < 0.2
SECONDS = np.where(CLICKS, RANDOM.exponential(30, S), 0.0)  # how long it was watched


def numbers(values: np.ndarray) -> float:
    auc = alone_auc(codes_of_numbers(values), CLICKS)
    assert auc is not None
    return auc


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [
        (SECONDS, 0.99, 1.0),
        (-SECONDS, 0.99, 1.0),  # the other way round
        (np.where(CLICKS, np.nan, RANDOM.random(S)), 0.99, 1.0),  # missing for a click
        (
            np.abs(RANDOM.random(S) - 0.5) * 2 + CLICKS * np.sign(RANDOM.random(S) - 0.5) * 9,
            0.99,
            1,
        ),
        (RANDOM.random(S), 0.4, 0.6),
        (np.ones(S), 0.5, 0.5),
        (np.full(S, np.nan), 0.5, 0.5),
    ],
)
def test_numbers(values: np.ndarray, low: float, high: float) -> None:
    assert low <= numbers(values) <= high


def test_ids() -> None:
    assert alone_auc(CLICKS.astype(np.int64), CLICKS) == 1.0
    # A value for each sample says nothing about others; nor does one without samples of its own.
    assert alone_auc(np.arange(S), CLICKS) == pytest.approx(0.5, abs=0.03)
    users = RANDOM.integers(0, 50, S)
    rates = RANDOM.random(50)
    likes = RANDOM.random(S) < rates[users]
    truth = alone_auc(users, likes)
    assert truth is not None
    assert 0.7 < truth < 0.95
    assert alone_auc(np.zeros(4, int), np.zeros(4, np.bool_)) is None


def test_lists() -> None:
    # Only a click has tags; empty lists come first, last and in a row.
    lengths = np.where(CLICKS, RANDOM.integers(1, 4, S), 0)
    offsets = np.r_[0, np.cumsum(lengths)]
    tags = RANDOM.integers(0, 9, offsets[-1])
    assert alone_auc(tags, CLICKS, offsets) == 1.0
    given = np.r_[0, np.cumsum(RANDOM.integers(0, 3, S))]
    auc = alone_auc(RANDOM.integers(0, 9, given[-1]), CLICKS, given)
    assert auc == pytest.approx(0.5, abs=0.05)


def test_a_dataset_names_the_column_of_each_label(tmp_path: Path) -> None:
    schema = Schema(
        ("dwell", "noise"),
        (Feature("user", "user"), Feature("tags", "tags", is_multi_hot=True)),
        (Table("user", S + 1), Table("tags", 10)),
        ("clicked", "bought"),
    )
    bought = RANDOM.random(S) < 0.3
    lengths = bought.astype(np.int64)
    block = Block(
        label=np.stack([CLICKS, bought], axis=1).astype(np.float32),
        dense=np.stack([SECONDS, RANDOM.random(S)], axis=1).astype(np.float32),
        features={
            "user": np.arange(S, dtype=np.int32),
            "tags": Jagged(np.ones(lengths.sum(), np.int32), np.r_[0, np.cumsum(lengths)]),
        },
    )
    with scratch_directory(tmp_path / "d", kind="dataset") as scratch:
        writer = ChunkWriter(scratch, "train", schema, 300)
        writer.write(block)
        commit_dataset(scratch, tmp_path / "d", schema, {"train": writer.close()}, {})
    dataset = Dataset.open(tmp_path / "d")
    clicked, of_bought = alone_aucs(dataset, "train"), alone_aucs(dataset, "train", 1)
    assert [name for name, auc in clicked.items() if auc > 0.99] == ["dwell"]
    assert [name for name, auc in of_bought.items() if auc > 0.99] == ["tags"]
    assert set(clicked) == {"dwell", "noise", "user", "tags"}
    assert alone_aucs(dataset, "test") == {}
