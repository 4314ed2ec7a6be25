"""Small logs in memory, with something to learn, as a sample of a file would bring them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from hotrec.config.data import SourceFormat
from hotrec.data.inference.look import Column, look_at
from hotrec.data.sample import Sample

NUM = 6000
RNG = np.random.default_rng(7)
USERS, ITEMS = ((RNG.random(NUM) ** 2 * size).astype(np.int64) for size in (400, 150))
PRICES = np.round(np.exp(RNG.normal(2, 1, NUM)), 2)
TASTE, CHARM = (RNG.normal(0, 1.2, size) for size in (400, 150))
CLICKS = RNG.random(NUM) < 1 / (1 + np.exp(1.2 - TASTE[USERS] - CHARM[ITEMS]))


def sample_of(columns: dict[str, Any], *, is_text: bool = False) -> Sample:
    """The columns as those of a Parquet file, or of a text file where all are texts."""
    table = pa.table(columns)
    if is_text:
        texts = {name: pa.array([str(v) for v in values]) for name, values in columns.items()}
        table = pa.table({name: array.dictionary_encode() for name, array in texts.items()})
    kind = SourceFormat.delimited if is_text else SourceFormat.parquet
    return Sample(["log"], kind, ",", table, table.num_rows, 0)


def look(name: str, values: Any, *, is_text: bool = False) -> Column:
    """What one column is taken for."""
    [column], _ = look_at(sample_of({name: values}, is_text=is_text))
    return column
