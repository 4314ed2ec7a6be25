"""The samples that `benchmarks/locality.py` counts on: drawn by a Zipf law, or prepared ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import yaml
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.bench.samples import ZipfTables
from hotrec.data.chunks import Dataset
from hotrec.data.loader import make_loader, num_steps
from hotrec.types import Schema

ZIPF_CONF = Path(__file__).parent.parent / "conf/bench/criteo_like_b2048.yaml"
ZIPF_EXPONENT = 1.05
NUM_PROFILED = 500_000


@dataclass(frozen=True)
class Source:
    """The source of samples.

    Args:
        name: for the page.
        schema: its tables.
        counts: lookups of each row, by table.
        num_samples: that there are; None: no end.
        read: (W, B, number) -> global batches, as one KJT per rank.
    """

    name: str
    schema: Schema
    counts: Mapping[str, np.ndarray]
    num_samples: int | None
    read: Callable[[int, int, int], Iterator[list[KeyedJaggedTensor]]]

    def hot(self, num_hot: int) -> dict[str, np.ndarray]:
        """bool (N,) by table: the most looked-up rows of all tables together."""
        counts = np.concatenate([self.counts[table.name] for table in self.schema.tables])
        mask = np.zeros(counts.size, bool)
        if num_hot:
            mask[np.argsort(-counts, kind="stable")[:num_hot]] = True
        sizes = [table.num_rows for table in self.schema.tables]
        parts = np.split(mask, np.cumsum(sizes)[:-1])
        return {table.name: part for table, part in zip(self.schema.tables, parts, strict=True)}


def zipf_source() -> Source:
    table_rows = yaml.safe_load(ZIPF_CONF.read_text())["table_rows"]
    tables = ZipfTables(table_rows, exponent=ZIPF_EXPONENT, num_dense=1, seed=0)

    def read(num_ranks: int, size: int, number: int) -> Iterator[list[KeyedJaggedTensor]]:
        ranks = [
            tables.batches(number, batch_size=size, rank=rank, world_size=num_ranks)
            for rank in range(num_ranks)
        ]
        for batches in zip(*ranks, strict=True):
            yield [batch.sparse for batch in batches]

    name = f"Zipf {ZIPF_EXPONENT}, 26 tables"
    return Source(name, tables.schema, tables.count(NUM_PROFILED), None, read)


def dataset_source(path: Path) -> Source:
    dataset = Dataset.open(path)
    num_samples = dataset.num_samples("train")

    def read(num_ranks: int, size: int, number: int) -> Iterator[list[KeyedJaggedTensor]]:
        loaders = [
            make_loader(path, "train", batch_size=size, rank=rank, world_size=num_ranks, epochs=1)
            for rank in range(num_ranks)
        ]
        there_are = num_steps(dataset, "train", size, num_ranks, drop_last=True)
        for batches in islice(zip(*loaders, strict=True), min(number, there_are)):
            yield [batch.sparse for batch in batches]

    counts = {table.name: np.zeros(table.num_rows, np.int64) for table in dataset.schema.tables}
    size = min(1024, num_samples)
    for batch in make_loader(
        path, "train", batch_size=size, rank=0, world_size=1, epochs=1, shuffle=False
    ):
        ids = batch.sparse.to_dict()
        for feature in dataset.schema.features:
            rows = ids[feature.name].values().numpy()
            counts[feature.table] += np.bincount(rows, minlength=counts[feature.table].size)
    return Source(path.parent.name, dataset.schema, counts, num_samples, read)
