"""A profile drawn from an outline of the data, for planning before the data is available."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np

from hotrec.artifact import Artifact, commit_artifact, scratch_directory
from hotrec.config.data import OutlineSpec
from hotrec.cost_model.costs import Floats
from hotrec.cost_model.histogram import slices
from hotrec.cost_model.profile import (
    KIND,
    TRAIN_DIRECTORY,
    Profile,
    allocate_counts,
    summarize_profile,
)
from hotrec.data.chunks import DATASET, commit_dataset
from hotrec.runtime.progress import Progress
from hotrec.types import Feature, Rows, Schema, Table

# Ranks of popularity are spread over the rows in steps of about this share of the table.
_GOLDEN = 0.618034


def write_outline(spec: OutlineSpec, dataset: Path, profile: Path) -> None:
    """Write a dataset without samples, and a profile of the lookups that prepare would count.

    The row of rank k is drawn with a probability ~ k^-exponent; counts are Poisson draws, like
    those of independent lookups. It needs 8 bytes per row of all tables, on disk.

    Args:
        dataset: Directory of the dataset.
        profile: Directory of the profile, written last.
    """
    schema = outline_schema(spec)
    with scratch_directory(dataset, kind=DATASET) as scratch:
        artifact = commit_dataset(scratch, dataset, schema, {}, {"outline": asdict(spec)})
    _write_profile(spec, schema, profile, artifact)


def outline_schema(spec: OutlineSpec) -> Schema:
    """One feature for each table, of the same name, and dense columns I1, I2, ..."""
    return Schema(
        dense=tuple(f"I{number}" for number in range(1, spec.num_dense + 1)),
        features=tuple(Feature(name, name) for name in spec.tables),
        tables=tuple(Table(name, table.num_rows) for name, table in spec.tables.items()),
    )


def _write_profile(spec: OutlineSpec, schema: Schema, output: Path, dataset: Artifact) -> None:
    num_rows = sum(table.num_rows for table in schema.tables)
    with (
        scratch_directory(output, kind=KIND) as scratch,
        Progress("outline", num_rows, unit="rows") as bar,
    ):
        counts = allocate_counts(schema, scratch, TRAIN_DIRECTORY)
        for number, (name, table) in enumerate(spec.tables.items()):
            rng = np.random.default_rng([0, number])
            for rows, probs in zipf_rows(table.num_rows, table.zipf_exponent):
                counts[name][rows] = rng.poisson(spec.num_train * probs)
                bar.update(rows.size)
        drawn = Profile(spec.num_train, 0, counts)
        made_from = {"dataset": dataset.content_hash}
        content = summarize_profile(drawn)
        commit_artifact(scratch, output, kind=KIND, content=content, made_from=made_from)


def zipf_rows(num_rows: int, exponent: float) -> Iterator[tuple[Rows, Floats]]:
    """Row numbers and probabilities, most popular rows first, in small slices.

    Popular rows are spread evenly over the table, since row-wise shards are ranges of rows.
    """
    stride = int(_GOLDEN * num_rows) | 1
    while math.gcd(stride, num_rows) > 1:
        stride += 1
    total = sum(float(_weights(part, exponent).sum()) for part in slices(num_rows))
    for part in slices(num_rows):
        ranks = np.arange(part.start, part.stop, dtype=np.int64)
        yield ranks * stride % num_rows, _weights(part, exponent) / total


def _weights(part: slice, exponent: float) -> Floats:
    return np.arange(part.start + 1, part.stop + 1, dtype=np.float64) ** -exponent
