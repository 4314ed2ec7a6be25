"""The AUC of a column alone: high for what holds the answer, chance for what only looks like it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hotrec.artifact import scratch_directory
from hotrec.data.alone import alone_auc, alone_aucs
from hotrec.data.chunks import Block, ChunkWriter, Dataset, Jagged, commit_dataset
from hotrec.types import Feature, Schema, Table

S = 4000
RANDOM = np.random.default_rng(3)
CLICKS = RANDOM.random(S) < 0.2
SECONDS = np.where(CLICKS, RANDOM.exponential(30, S), 0.0)  # how long it was watched


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
