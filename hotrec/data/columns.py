"""Raw columns: what readers hand to the encoders, before ids are rows.

Ids are text in every format, and repeat: they are stored as distinct texts and a code per sample,
so that hashing, splitting and looking up happen once per distinct text of a block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hotrec.config.data import Derive, TimeUnit, time_ms
from hotrec.data.chunks import one_array

Codes = npt.NDArray[np.int32] | npt.NDArray[np.int64]
Float64s = npt.NDArray[np.float64]

_NUMBER = r"^[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?$"
_MS_PER_HOUR = 3_600_000
MS_PER_UNIT = {TimeUnit.s: 1e3, TimeUnit.ms: 1.0, TimeUnit.us: 1e-3, TimeUnit.ns: 1e-6}
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


@dataclass(frozen=True)
class RawBlock:
    """Samples of one file as they were read.

    Args:
        lines: int64 (n,), the line of each sample, or its row in a file without lines, from 1.
        ids: The columns read as ids, by their name in the log.
        numbers: The columns read as numbers, float64 (n,), NaN for a missing value.
        num_skipped: The number of samples left out because they could not be read.
    """

    lines: npt.NDArray[np.int64]
    ids: Mapping[str, Texts | Lists]
    numbers: Mapping[str, Float64s]
    num_skipped: int = 0

    def __len__(self) -> int:
        return int(self.lines.size)

    def keep(self, is_kept: npt.NDArray[np.bool_]) -> RawBlock:
        """Some of the samples; the others count as skipped."""
        return RawBlock(
            self.lines[is_kept],
            {n: replace(column, codes=column.codes[is_kept]) for n, column in self.ids.items()},
            {name: values[is_kept] for name, values in self.numbers.items()},
            self.num_skipped + int((~is_kept).sum()),
        )


def offsets_of(lengths: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int64]:
    """Where each of some bags that are laid end to end begins and, last, where they end."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def ids_from_arrow(column: pa.ChunkedArray | pa.Array) -> Texts | Lists:
    """A column of any scalar type, or of lists of one."""
    kind = column.type
    is_lists = pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return (
        lists_from_arrow(column) if is_lists or pa.types.is_list(kind) else texts_from_arrow(column)
    )


def texts_from_arrow(column: pa.ChunkedArray | pa.Array) -> Texts:
    """A column of any scalar type as texts; integers in decimal."""
    array = one_array(column)
    if not pa.types.is_dictionary(array.type):
        array = array.dictionary_encode()
    values = array.dictionary
    if not pa.types.is_string(values.type):
        values = values.cast(pa.string())
    return Texts(values, array.indices.fill_null(-1).to_numpy(zero_copy_only=False))


def numbers_from_arrow(column: pa.ChunkedArray | pa.Array) -> Float64s:
    """A column of numbers or booleans as float64, NaN where null.

    Infinite where a value is NaN already, for the reader to find: NaN means missing.

    Raises:
        pa.ArrowInvalid: if a value is not a number.
    """
    array = one_array(column)
    # safe=False: integers beyond 2**53 lose their last digits instead of failing.
    values = array.cast(pa.float64(), safe=pa.types.is_string(array.type))
    if pc.any(pc.is_nan(values)).as_py():
        values = pc.if_else(pc.is_nan(values), math.inf, values)
    found: Float64s = values.to_numpy(zero_copy_only=False).astype(np.float64, copy=False)
    return found


def times_from_arrow(column: pa.ChunkedArray | pa.Array) -> Float64s:
    """A column of Arrow's dates or times as milliseconds since 1970; NaN where null."""
    # safe=False: nanoseconds are cut off.
    times = one_array(column).cast(pa.timestamp("us"), safe=False)
    return numbers_from_arrow(times.cast(pa.int64())) / 1000


def times_from_texts(texts: Texts) -> Float64s:
    """Texts in ISO 8601 as milliseconds since 1970; infinite where one is no date or time."""
    # Arrow wants to know whether there is an offset, and reads six digits of a second at most.
    values = pc.replace_substring_regex(texts.values, r"(\.[0-9]{6})[0-9]+", r"\1")
    has_offset = pc.match_substring_regex(values, r":.*(Z|[+-][0-9:]+)$")
    nothing = pa.scalar(None, pa.string())
    try:
        found = [
            pc.if_else(has_offset, values, nothing).cast(pa.timestamp("us", "UTC")),
            pc.if_else(has_offset, nothing, values).cast(pa.timestamp("us")),
        ]
        since_1970 = pc.coalesce(*(times.cast(pa.int64()) for times in found))
        milliseconds = numbers_from_arrow(since_1970) / 1000
    except pa.ArrowInvalid:  # one by one, to find which; and for forms that Arrow does not know
        milliseconds = np.array([_time_or_inf(text) for text in texts.values.to_pylist()])
    return np.append(milliseconds, np.nan)[texts.codes]


def _time_or_inf(text: str | None) -> float:
    try:
        return math.nan if text is None else time_ms(text)
    except ValueError:
        return math.inf


def item_type(kind: pa.DataType) -> pa.DataType:
    """The type of the ids in a column: of its values, or of the items of its lists."""
    while (
        pa.types.is_dictionary(kind)
        or pa.types.is_list(kind)
        or pa.types.is_large_list(kind)
        or pa.types.is_fixed_size_list(kind)
    ):
        kind = kind.value_type
    return kind


def numbers_from_texts(texts: Texts) -> Float64s:
    """Texts as numbers; infinite where a text is not a number, for the reader to find."""
    is_number = pc.match_substring_regex(texts.values, _NUMBER).fill_null(True)
    values = numbers_from_arrow(pc.if_else(is_number, texts.values, "inf"))
    return np.append(values, np.nan)[texts.codes]


def lists_from_arrow(column: pa.ChunkedArray | pa.Array) -> Lists:
    """A column of lists of any scalar type; null lists are missing."""
    array = one_array(column)
    if not pa.types.is_list(array.type):  # large or fixed-size lists
        array = array.cast(pa.list_(array.type.value_type))
    is_null = array.is_null().to_numpy(zero_copy_only=False)
    # flatten() leaves out what nulls and slices hide, so lengths must come from the same view.
    lengths = np.where(is_null, 0, pc.list_value_length(array).fill_null(0).to_numpy())
    codes = np.where(is_null, -1, np.arange(len(array)))
    return Lists(texts_from_arrow(array.flatten()), offsets_of(lengths), codes)


def lists_from_texts(texts: Texts, separator: str) -> Lists:
    """Split each text at the separator; empty pieces are dropped."""
    pieces = pc.split_pattern(texts.values.fill_null(""), separator)
    flat = pieces.flatten()
    is_item = pc.not_equal(flat, "").to_numpy(zero_copy_only=False)
    lengths = pc.list_value_length(pieces).to_numpy(zero_copy_only=False)
    items = texts_from_arrow(flat.filter(pa.array(is_item)))
    return Lists(items, offsets_of(is_item)[offsets_of(lengths)], texts.codes)


def cut_lists(lists: Lists, max_length: int) -> Lists:
    """Keep the last ``max_length`` items of each list; 0 keeps all."""
    lengths = np.diff(lists.offsets)
    if not max_length or not lengths.size or lengths.max() <= max_length:
        return lists
    end_of_item = np.repeat(lists.offsets[1:], lengths)
    is_kept = np.arange(lists.offsets[-1]) >= end_of_item - max_length
    items = replace(lists.items, codes=lists.items.codes[is_kept])
    return Lists(items, offsets_of(np.minimum(lengths, max_length)), lists.codes)


def derive_numbers(derive: Derive, values: Float64s, utc_offset_h: float) -> Float64s:
    """What ``derive`` makes of a column, see ``hotrec.config.data.ColumnSpec``; NaN stays NaN."""
    match derive:
        case Derive.none:
            return values
        case Derive.hour_of_day:
            return np.floor(values / _MS_PER_HOUR + utc_offset_h) % 24
        case Derive.day_of_week:
            days = np.floor((values / _MS_PER_HOUR + utc_offset_h) / 24)
            return (days + _EPOCH_WEEKDAY) % 7
        case Derive.log_bucket:
            return np.sign(values) * np.floor(4 * np.log2(1 + np.abs(values)))


def texts_from_numbers(values: Float64s) -> Texts:
    """Whole numbers as decimal texts; NaN is missing."""
    is_missing = np.isnan(values)
    whole, codes = np.unique(np.where(is_missing, 0, values).astype(np.int64), return_inverse=True)
    return Texts(pa.array(whole).cast(pa.string()), np.where(is_missing, -1, codes))
