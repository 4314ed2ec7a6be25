"""Raw columns: what readers hand to the encoders, before ids are rows.

Ids are text in every format, and repeat: they are stored as distinct texts and a code per sample,
so that hashing, splitting and looking up happen once per distinct text of a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hotrec.config.data import Derive
from hotrec.data.chunks import one_array

Codes = npt.NDArray[np.int32] | npt.NDArray[np.int64]
Float64s = npt.NDArray[np.float64]

_NUMBER = r"^[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?$"
_MS_PER_HOUR = 3_600_000
# 1970-01-01 was a Thursday, day 3 of a week that begins on Monday.
_EPOCH_WEEKDAY = 3


@dataclass(frozen=True)
class Texts:
    """A column of texts.

    Args:
        values: A string array (V,) of distinct texts; nulls are missing values.
        codes: Integers (n,), index into ``values``, -1 for a missing value.
    """

    values: pa.Array
    codes: Codes

    def __len__(self) -> int:
        return int(self.codes.size)

    def keep(self, samples: npt.NDArray[np.bool_]) -> Texts:
        return Texts(self.values, self.codes[samples])


@dataclass(frozen=True)
class Lists:
    """A column of lists of texts.

    Args:
        items: The items of all distinct lists, end to end.
        offsets: int64 (L + 1,): list i is items ``offsets[i]:offsets[i + 1]``.
        codes: Integers (n,), the list of each sample, -1 for a missing one.
    """

    items: Texts
    offsets: npt.NDArray[np.int64]
    codes: Codes

    def __len__(self) -> int:
        return int(self.codes.size)

    def keep(self, samples: npt.NDArray[np.bool_]) -> Lists:
        return Lists(self.items, self.offsets, self.codes[samples])


@dataclass(frozen=True)
class Numbers:
    """A column of numbers.

    Args:
        values: float64 (n,), NaN for a missing value.
    """

    values: Float64s

    def __len__(self) -> int:
        return int(self.values.size)

    def keep(self, samples: npt.NDArray[np.bool_]) -> Numbers:
        return Numbers(self.values[samples])


RawColumn = Texts | Lists | Numbers


@dataclass(frozen=True)
class RawBlock:
    """Samples of one file as they were read.

    Args:
        numbers: int64 (n,), the line of each sample, or its row in a file without lines, from 1.
        columns: The columns, by their name in the log.
        num_skipped: The number of samples left out because they could not be read.
    """

    numbers: npt.NDArray[np.int64]
    columns: Mapping[str, RawColumn]
    num_skipped: int

    def __len__(self) -> int:
        return int(self.numbers.size)


def texts_from_arrow(column: pa.ChunkedArray | pa.Array) -> Texts:
    """A column of any scalar type as texts; integers in decimal."""
    array = one_array(column)
    if not pa.types.is_dictionary(array.type):
        array = array.dictionary_encode()
    values = array.dictionary
    if not pa.types.is_string(values.type):
        values = values.cast(pa.string())
    return Texts(values, array.indices.fill_null(-1).to_numpy(zero_copy_only=False))


def numbers_from_arrow(column: pa.ChunkedArray | pa.Array) -> Numbers:
    """A column of numbers, booleans or times as float64, NaN where null.

    Raises:
        pa.ArrowInvalid: if a value is not a number.
    """
    array = one_array(column)
    if pa.types.is_temporal(array.type):
        array = array.cast(pa.timestamp("ms")).cast(pa.int64())
    # safe=False: integers beyond 2**53 lose their last digits instead of failing.
    values = array.cast(pa.float64(), safe=pa.types.is_string(array.type))
    return Numbers(values.to_numpy(zero_copy_only=False).astype(np.float64, copy=False))


def numbers_from_texts(texts: Texts) -> Numbers:
    """Texts as numbers; infinite where a text is not a number, for the reader to find."""
    is_number = pc.match_substring_regex(texts.values, _NUMBER).fill_null(True)
    values = numbers_from_arrow(pc.if_else(is_number, texts.values, "inf")).values
    return Numbers(np.append(values, np.nan)[texts.codes])


def lists_from_arrow(column: pa.ChunkedArray | pa.Array) -> Lists:
    """A column of lists of any scalar type; null lists are missing."""
    array = one_array(column)
    if not pa.types.is_list(array.type):  # large or fixed-size lists
        array = array.cast(pa.list_(array.type.value_type))
    is_null = array.is_null().to_numpy(zero_copy_only=False)
    # flatten() leaves out what nulls and slices hide, so lengths must come from the same view.
    lengths = np.where(is_null, 0, pc.list_value_length(array).fill_null(0).to_numpy())
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    codes = np.where(is_null, -1, np.arange(len(array)))
    return Lists(texts_from_arrow(array.flatten()), offsets, codes)


def lists_from_texts(texts: Texts, separator: str) -> Lists:
    """Split each text at the separator; empty pieces are dropped."""
    pieces = pc.split_pattern(texts.values.fill_null(""), separator)
    flat = pieces.flatten()
    is_item = pc.not_equal(flat, "").to_numpy(zero_copy_only=False)
    bounds = np.concatenate([[0], np.cumsum(is_item, dtype=np.int64)])
    lengths = pc.list_value_length(pieces).to_numpy(zero_copy_only=False)
    offsets = bounds[np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])]
    items = texts_from_arrow(flat.filter(pa.array(is_item)))
    return Lists(items, offsets, texts.codes)


def cut_lists(lists: Lists, max_length: int) -> Lists:
    """Keep the last ``max_length`` items of each list; 0 keeps all."""
    lengths = np.diff(lists.offsets)
    if not max_length or not lengths.size or lengths.max() <= max_length:
        return lists
    owner = np.repeat(np.arange(lengths.size), lengths)
    is_kept = np.arange(len(lists.items)) >= lists.offsets[1:][owner] - max_length
    offsets = np.concatenate([[0], np.cumsum(np.minimum(lengths, max_length))])
    return Lists(lists.items.keep(is_kept), offsets, lists.codes)


def derive_numbers(derive: Derive, numbers: Numbers, utc_offset_h: float) -> Numbers:
    """What ``derive`` makes of a column, see ``hotrec.config.data.Derive``; NaN stays NaN."""
    values = numbers.values
    match derive:
        case Derive.none:
            return numbers
        case Derive.hour_of_day:
            return Numbers(np.floor(values / _MS_PER_HOUR + utc_offset_h) % 24)
        case Derive.day_of_week:
            days = np.floor((values / _MS_PER_HOUR + utc_offset_h) / 24)
            return Numbers((days + _EPOCH_WEEKDAY) % 7)
        case Derive.log_bucket:
            return Numbers(np.sign(values) * np.floor(4 * np.log2(1 + np.abs(values))))


def texts_from_numbers(numbers: Numbers) -> Texts:
    """Whole numbers as decimal texts; NaN is missing."""
    is_missing = np.isnan(numbers.values)
    whole = np.where(is_missing, 0, numbers.values).astype(np.int64)
    values, codes = np.unique(whole, return_inverse=True)
    return Texts(pa.array(values).cast(pa.string()), np.where(is_missing, -1, codes))
