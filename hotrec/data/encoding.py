"""How samples are encoded: recorded by ``prepare`` in a dataset, for all that reads the same log.

No polars: datasets are trained on where it is not installed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from hotrec.artifact import ArtifactError
from hotrec.config.data import (
    FEATURE_KINDS,
    ColumnKind,
    ColumnSpec,
    Encoding,
    SourceSpec,
    TimeUnit,
    columns_of,
    dense_of,
    tables_of,
)
from hotrec.data.chunks import Dataset
from hotrec.data.value_types import ValueTypes
from hotrec.data.vocabulary import RowEncoder, RowNumbers, read_vocabulary
from hotrec.types import Float64s


def moments_of(dense: Float64s) -> Float64s:
    """Count, sums and sums of squares of the dense columns, float64 (3, N); they add up."""
    count = np.full(dense.shape[1], float(dense.shape[0]))
    return np.stack([count, dense.sum(axis=0), np.square(dense).sum(axis=0)])


def scaling_of(columns: Mapping[str, ColumnSpec], moments: Float64s) -> Float64s:
    """The shift and the divisor of the dense columns, float64 (2, N).

    Columns without ``standardize`` stay as they are.
    """
    is_scaled = np.array([column.standardize for column in dense_columns(columns).values()], bool)
    count = np.maximum(moments[0], 1)
    means = moments[1] / count
    variances = np.maximum(moments[2] / count - np.square(means), 0.0)
    # A constant column becomes 0; its remaining variance is rounding.
    is_constant = variances <= 1e-12 * np.maximum(np.square(means), 1.0)
    deviations = np.where(is_constant, 1.0, np.sqrt(variances))
    return np.where(is_scaled, [means, deviations], [[0.0], [1.0]])


def dense_columns(columns: Mapping[str, ColumnSpec]) -> dict[str, ColumnSpec]:
    """The columns of kind dense, in order; a vector's once for each of its numbers."""
    return {
        place: column
        for name, column in columns.items()
        if column.kind is ColumnKind.dense
        for place in dense_of(name, column)
    }


def feature_columns(columns: Mapping[str, ColumnSpec]) -> dict[str, ColumnSpec]:
    """The categorical columns, in order."""
    return {name: column for name, column in columns.items() if column.kind in FEATURE_KINDS}


def sources_of(columns: Mapping[str, ColumnSpec], kind: ColumnKind) -> dict[str, str]:
    """The log's columns that hold the labels, or the weight, by name."""
    return {name: c.source or name for name, c in columns.items() if c.kind is kind}


def label_names(columns: Mapping[str, ColumnSpec]) -> tuple[str, ...]:
    """The names of the labels in a schema; a single one is named "label"."""
    names = tuple(sources_of(columns, ColumnKind.label))
    return names if len(names) > 1 else ("label",)


def read_times(spec: SourceSpec) -> list[str]:
    """The columns of ``times`` that features are made from, not only the split."""
    used = {column.source or name for name, column in columns_of(spec).items()}
    return sorted(used & spec.times.keys())


def encoding_document(spec: SourceSpec, scaling: Float64s) -> dict[str, Any]:
    """How samples are encoded, as JSON values, recorded by ``prepare`` for ``read_encoding``.

    Args:
        spec: The log.
        scaling: Of ``scaling_of``.

    Returns:
        Columns, tables and times as in the specification; means and deviations of the dense
        columns, in order; and the rules of histories.
    """
    document = {
        "columns": {name: asdict(column) for name, column in columns_of(spec).items()},
        "tables": {name: asdict(table) for name, table in tables_of(spec).items()},
        "times": {name: str(spec.times[name]) for name in read_times(spec)},
        "expr": dict(spec.expr),
        "means": scaling[0].tolist(),
        "deviations": scaling[1].tolist(),
    }
    if spec.histories:
        document["histories"] = {
            name: {**asdict(history), "unit": str(spec.times.get(history.time, TimeUnit.ms))}
            for name, history in spec.histories.items()
        }
    return dict(json.loads(json.dumps(document)))


def value_types_of(dataset: Dataset) -> ValueTypes:
    """What the values of the columns of a dataset's log mean."""
    artifact = dataset.artifact
    with artifact.parsing():
        return ValueTypes.recorded(
            artifact.content["source"]["encoding"]["value_types"], artifact.path
        )


def check_encoding(
    dataset: Dataset, spec: SourceSpec, *, of: str, advice: str, may_grow: bool = False
) -> Float64s:
    """Check that a log would be encoded like a dataset; returns the scaling of its dense columns.

    Args:
        dataset: A dataset that ``prepare`` made from a log.
        spec: This log.
        of: The source of the specification, for messages.
        advice: What to do, for messages.
        may_grow: Whether vocabularies may have another number of rows.

    Returns:
        The scaling, float64 (2, N), see ``scaling_of``.

    Raises:
        ArtifactError: If the dataset has no record of its encoding, or another encoding.
    """
    artifact = dataset.artifact
    with artifact.parsing():
        recorded = artifact.content["source"].get("encoding")
        if recorded is None:
            raise ArtifactError(
                f"{artifact.path}: expected the column encoding in the manifest, got none. "
                "Prepare it from a log, and train again."
            )
        scaling = np.array([recorded["means"], recorded["deviations"]], np.float64)
        wanted = encoding_document(spec, scaling)
        for part in ("columns", "tables", "times", "expr", "histories"):
            asked, saved = wanted.get(part, {}), recorded.get(part, {})  # not all have histories
            for name in sorted(asked.keys() | saved.keys()):
                mine, own = asked.get(name), saved.get(name)
                is_vocabulary = part == "tables" and mine and mine["encoding"] == "vocabulary"
                if may_grow and is_vocabulary and own:
                    own = {**own, "num_rows": mine["num_rows"]}
                if mine != own:
                    raise ArtifactError(
                        f"{artifact.path}: expected data.source.{part}.{name} as {of}, {mine}, got "
                        f"{own} (of the dataset). {advice}"
                    )
    return scaling


def read_encoding(dataset: Dataset, spec: SourceSpec) -> tuple[dict[str, RowEncoder], Float64s]:
    """Encoders and scaling for new samples of a dataset's log.

    Args:
        dataset: A dataset that ``prepare`` made from a log.
        spec: This log.

    Returns:
        The encoder of each table, and the scaling of dense columns, float64 (2, N).

    Raises:
        ArtifactError: If the dataset has no record of its encoding or another encoding, or a
            vocabulary was altered.
    """
    scaling = check_encoding(
        dataset,
        spec,
        of="the run recorded it",
        advice="Train on the dataset again, with the configuration that prepared it.",
    )
    artifact = dataset.artifact
    tables = tables_of(spec)
    encoders: dict[str, RowEncoder] = {}
    for table in dataset.schema.tables:
        match tables[table.name].encoding:
            case Encoding.vocabulary:
                name = f"vocab/{table.name}.arrow"
                artifact.file(name)
                artifact.verify_file(name)
                encoders[table.name] = RowEncoder(
                    vocabulary=read_vocabulary(artifact.path, table.name)
                )
            case Encoding.hashing:
                encoders[table.name] = RowEncoder(table.num_rows)
            case Encoding.rows:
                encoders[table.name] = RowNumbers(table.num_rows)
    return encoders, scaling
