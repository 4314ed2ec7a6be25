"""From raw columns to the columns of a chunk: derivations, rows of ids, dense values.

Everything works on whole blocks, and where possible on distinct texts rather than on samples.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hotrec.artifact import ArtifactError
from hotrec.config.data import (
    FEATURE_KINDS,
    ColumnKind,
    ColumnSpec,
    DenseTransform,
    Derive,
    Encoding,
    SourceSpec,
    TimeUnit,
    columns_of,
    dense_of,
    features_of,
    tables_of,
)
from hotrec.data.chunks import Block, Dataset, Floats, Integers, Jagged
from hotrec.data.columns import (
    Float64s,
    Lists,
    RawBlock,
    Texts,
    cut_lists,
    derive_numbers,
    lists_from_texts,
    offsets_of,
    texts_from_numbers,
    whole_ids,
)
from hotrec.data.gather import gather_bags
from hotrec.data.value_types import ValueTypes
from hotrec.data.vocabulary import RowEncoder, RowNumbers, find_rows, read_vocabulary

logger = logging.getLogger(__name__)
# Number of samples or ids above which the share of missing or unknown ones is meaningful.
NUM_TELLING = 20
ShowColumn = Callable[[str, Texts | Lists, Integers | Jagged], None]


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


def labels_of(block: RawBlock, columns: Mapping[str, ColumnSpec]) -> Float64s:
    """The labels, float64 (n, L)."""
    labels = [
        block.numbers[column.source or name]
        for name, column in columns.items()
        if column.kind is ColumnKind.label
    ]
    return np.stack(labels, axis=1)


def needs_numbers(column: ColumnSpec) -> bool:
    """Whether the column is read as a number; else it is read as text, or as a list of numbers."""
    kinds = (ColumnKind.label, ColumnKind.weight, ColumnKind.dense)
    return column.kind in kinds or (column.derive is not Derive.none and not column.is_list)


def raw_feature(block: RawBlock, name: str, column: ColumnSpec) -> Texts | Lists:
    """The raw ids of a categorical column."""
    source = column.source or name
    if column.derive is not Derive.none and column.is_list:
        of = block.lists[source]
        items = texts_from_numbers(derive_numbers(column.derive, of.values, column.utc_offset_h))
        return cut_lists(Lists(items, of.offsets, of.codes), column.max_length)
    if column.derive is not Derive.none:
        numbers = derive_numbers(column.derive, block.numbers[source], column.utc_offset_h)
        return texts_from_numbers(numbers)
    raw = block.ids[source]
    if column.kind is not ColumnKind.categorical:
        lists = lists_from_texts(raw, column.separator) if isinstance(raw, Texts) else raw
        return cut_lists(replace(lists, items=whole_ids(lists.items)), column.max_length)
    assert isinstance(raw, Texts), f"{name}: expected one id per sample, as the reader has checked"
    return whole_ids(raw)


def dense_values(block: RawBlock, columns: Mapping[str, ColumnSpec]) -> Float64s:
    """The dense columns before standardising, float64 (n, N)."""
    values = np.empty((len(dense_columns(columns)), len(block)))
    index = 0
    for name, column in columns.items():
        if column.kind is not ColumnKind.dense:
            continue
        numbers = block.numbers[column.source or name]
        raw = derive_numbers(column.derive, numbers, column.utc_offset_h)
        filled = np.where(np.isnan(raw), column.fill, raw)
        if column.transform is DenseTransform.log1p:
            filled = np.copysign(np.log1p(np.abs(filled)), filled)
        width = column.width or 1
        values[index : index + width] = filled.reshape(-1, width).T
        index += width
    return values.T


def count_missing(block: RawBlock, columns: Mapping[str, ColumnSpec]) -> Counter[str]:
    """The samples of a block without a number or an id, by column; lists may be empty."""
    missing: Counter[str] = Counter()
    for name, column in columns.items():
        source = column.source or name
        if column.is_list:
            continue
        if column.kind is ColumnKind.dense or column.derive is not Derive.none:
            is_nan = np.isnan(block.numbers[source])
            is_missing = is_nan.all(axis=tuple(range(1, is_nan.ndim)))
        elif column.kind is ColumnKind.categorical:
            raw = block.ids[source]
            assert isinstance(raw, Texts), name
            is_null = np.append(raw.values.is_null().to_numpy(zero_copy_only=False), True)
            is_missing = is_null[raw.codes]
        else:
            continue
        missing[name] += int(is_missing.sum())
    return missing


def say_missing(file: Path, missing: Mapping[str, int], num_samples: int) -> None:
    """Warn of the columns that no sample of a file has a value of, such as of a joined table."""
    for name, num_missing in missing.items():
        if num_missing == num_samples >= NUM_TELLING:
            logger.warning("%s column %s: all %d values are missing", file, name, num_missing)


def check_row_numbers(
    block: RawBlock, feature: str, column: ColumnSpec, num_rows: int, file: Path, advice: str
) -> int:
    """The largest id of a feature whose ids are row numbers, -1 without any.

    Raises:
        ValueError: If an id is not a row number below ``num_rows``; it names the line and ends with
            the advice.
    """
    found = find_rows(raw_feature(block, feature, column), num_rows)
    if found.outside is not None:
        sample, text = found.outside
        raise ValueError(
            f"{file} line {block.lines[sample]}: expected a row number below {num_rows} of table "
            f"{column.table or feature} in column {column.source or feature}, got "
            f"{'nothing' if text is None else repr(text)}. Correct the id, {advice}."
        )
    return found.largest


def encode_feature(raw: Texts | Lists, encoder: RowEncoder) -> Integers | Jagged:
    """The rows of a raw column: each distinct text is looked up once."""
    if isinstance(raw, Texts):
        return _rows_of(raw, encoder)
    items = _rows_of(raw.items, encoder)
    # The code -1 of a missing list selects an empty bag at the end.
    bags = Jagged(items, np.append(raw.offsets, raw.offsets[-1]))
    samples = np.where(raw.codes < 0, raw.offsets.size - 1, raw.codes)
    values, lengths = gather_bags(bags, samples)
    return Jagged(values, offsets_of(lengths))


def _rows_of(texts: Texts, encoder: RowEncoder) -> Integers:
    # The code -1 of a missing value selects the last entry, row 0. The type of the chunk, where it
    # is narrower, makes the gather twice as fast.
    rows = np.append(encoder.rows(texts.values), 0)
    if encoder.num_rows < 2**31:
        rows = rows.astype(np.int32)
    return rows[texts.codes]


def encode_block(
    block: RawBlock,
    columns: Mapping[str, ColumnSpec],
    encoders: Mapping[str, RowEncoder],
    scaling: Float64s,
    show: ShowColumn | None = None,
) -> Block:
    """Encode a block of raw columns for a chunk, as ``encode_inputs`` does."""
    labels: Floats = labels_of(block, columns).astype(np.float32)
    label = labels.reshape(-1) if labels.shape[1] == 1 else labels
    sources = sources_of(columns, ColumnKind.weight).values()
    weights = [block.numbers[source].astype(np.float32) for source in sources]
    inputs = encode_inputs(block, columns, encoders, scaling, show)
    return Block(label, *inputs, weights[0] if weights else None)


def encode_inputs(
    block: RawBlock,
    columns: Mapping[str, ColumnSpec],
    encoders: Mapping[str, RowEncoder],
    scaling: Float64s,
    show: ShowColumn | None = None,
) -> tuple[Floats, dict[str, Integers | Jagged]]:
    """Dense columns and features of a chunk, as in ``Block``; the label is not needed.

    Args:
        block: Raw columns.
        columns: How to encode them.
        encoders: Encoders by feature.
        scaling: The scaling of dense columns, see ``scaling_of``.
        show: Called with the name of each column that reads a vocabulary, its raw ids and their
            rows; see ``hotrec.data.unknown``.
    """
    dense = (dense_values(block, columns) - scaling[0]) / scaling[1]
    features: dict[str, Integers | Jagged] = {}
    for name, column in feature_columns(columns).items():
        raw = raw_feature(block, name, column)
        ids = encode_feature(raw, encoders[name])
        if show is not None and encoders[name].has_unknown:
            show(name, raw, ids)
        places: list[Integers | Jagged] = [ids]
        if column.kind is ColumnKind.sequence:
            assert isinstance(ids, Jagged), name
            places = [_at_place(ids, place) for place in range(1, column.max_length + 1)]
        features |= dict(zip(features_of(name, column), places, strict=True))
    return dense.astype(np.float32), features


def _at_place(bags: Jagged, place: int) -> Jagged:
    """Bags of the id at ``place`` from the end of each (1: the last); empty for shorter ones."""
    ends = bags.offsets[1:]
    has_id = np.diff(bags.offsets) >= place
    return Jagged(bags.values[ends[has_id] - place], offsets_of(has_id.astype(np.int32)))


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


def select_samples(block: Block, samples: npt.NDArray[np.int64]) -> Block:
    """Some samples of an encoded block, in the given order."""
    features: dict[str, Integers | Jagged] = {}
    for name, ids in block.features.items():
        if isinstance(ids, Jagged):
            values, lengths = gather_bags(ids, samples)
            features[name] = Jagged(values, offsets_of(lengths))
        else:
            features[name] = ids[samples]
    weight = None if block.weight is None else block.weight[samples]
    return Block(block.label[samples], block.dense[samples], features, weight)
