"""From raw columns to the columns of a chunk: derivations, rows of ids, dense values.

Everything works on whole blocks, and where possible on distinct texts rather than on samples.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from hotrec.config.data import MAX_ROWS, ColumnKind, ColumnSpec, DenseTransform, Derive, features_of
from hotrec.data.chunks import Block, Floats, Integers, Jagged, offsets_of
from hotrec.data.columns import (
    Ids,
    RawBlock,
    derive_numbers,
    items_of,
    lists_from_texts,
    lists_of,
    texts_from_numbers,
    whole_ids,
)
from hotrec.data.encoding import dense_columns, feature_columns, sources_of
from hotrec.data.gather import gather_bags
from hotrec.data.vocabulary import RowEncoder, RowNumbers
from hotrec.types import Float64s, Rows

logger = logging.getLogger(__name__)
# Number of samples or ids above which the share of missing or unknown ones is meaningful.
NUM_TELLING = 20
ShowColumn = Callable[[str, Ids, Integers | Jagged], None]


def labels_of(block: RawBlock, columns: Mapping[str, ColumnSpec]) -> Float64s:
    """The labels, float64 (n, L)."""
    labels = [
        block.numbers(column.source or name)
        for name, column in columns.items()
        if column.kind is ColumnKind.label
    ]
    return np.stack(labels, axis=1)


def raw_feature(block: RawBlock, name: str, column: ColumnSpec) -> Ids:
    """The raw ids of a categorical column, or lists of them."""
    source = column.source or name

    def derived(values: Float64s) -> Ids:
        return texts_from_numbers(derive_numbers(column.derive, values, column.utc_offset_h))

    if column.derive is not Derive.none and not column.is_list:
        return derived(block.numbers(source))
    if column.derive is not Derive.none:
        items, offsets = items_of(block.lists(source))
        found = derived(items.to_numpy())
        ids = Ids(found.texts, lists_of(found.codes, offsets))
    else:
        ids = block.ids(source)
        if column.is_list and not ids.is_list:
            ids = lists_from_texts(ids, column.separator)
        ids = whole_ids(ids)
    if column.is_list and column.max_length:
        ids = Ids(ids.texts, ids.codes.list.tail(column.max_length))
    return ids


def dense_values(block: RawBlock, columns: Mapping[str, ColumnSpec]) -> Float64s:
    """The dense columns before standardising, float64 (n, N)."""
    values = np.empty((len(dense_columns(columns)), len(block)))
    index = 0
    for name, column in columns.items():
        if column.kind is not ColumnKind.dense:
            continue
        numbers = block.numbers(column.source or name)
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
            is_nan = np.isnan(block.numbers(source))
            missing[name] += int(is_nan.all(axis=tuple(range(1, is_nan.ndim))).sum())
        elif column.kind is ColumnKind.categorical:
            missing[name] += block.ids(source).codes.null_count()
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
    items, offsets = raw_feature(block, feature, column).flat()
    rows = rows_of(items, RowNumbers(MAX_ROWS), missing=-1)
    is_outside = (rows < 0) | (rows >= num_rows)
    if is_outside.any():
        at = int(np.argmax(is_outside))
        found = Ids(items.texts, items.codes[at : at + 1]).values()[0]
        sample = at if offsets is None else int(np.searchsorted(offsets, at, "right")) - 1
        raise ValueError(
            f"{file} line {block.lines[sample]}: expected a row number below {num_rows} of table "
            f"{column.table or feature} in column {column.source or feature}, got "
            f"{'nothing' if found is None else repr(found)}. Correct the id, {advice}."
        )
    return int(rows.max(initial=-1))


def rows_of(ids: Ids, encoder: RowEncoder, missing: int = 0) -> Integers:
    """The row of each id: each distinct one is looked up once."""
    texts, codes = ids.used()
    rows = np.append(encoder.rows(texts), missing)
    # The type of the chunk, where it is narrower, makes the gather twice as fast.
    return rows.astype(np.int32)[codes] if encoder.num_rows < 2**31 else rows[codes]


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
    weights = [block.numbers(source).astype(np.float32) for source in sources]
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
        show: Called with the name of each column that reads a vocabulary, its ids or all items
            of its lists, and their rows; see ``hotrec.data.unknown``.
    """
    dense = (dense_values(block, columns) - scaling[0]) / scaling[1]
    features: dict[str, Integers | Jagged] = {}
    for name, column in feature_columns(columns).items():
        items, offsets = raw_feature(block, name, column).flat()
        rows = rows_of(items, encoders[name])
        ids = rows if offsets is None else Jagged(rows, offsets)
        if show is not None and encoders[name].has_unknown:
            show(name, items, ids)
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


def select_samples(block: Block, samples: Rows) -> Block:
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
