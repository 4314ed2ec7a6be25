"""Raw columns: what readers hand to the encoders, before ids are rows.

Ids are text in every format, and repeat: they are stored as distinct texts and a code per sample,
so that hashing, splitting and looking up happen once per distinct text of a block.
"""

from __future__ import annotations

import math
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hotrec.config.data import Derive, TimeUnit, time_ms
from hotrec.data.chunks import one_array
from hotrec.data.hashing import Hashes, hash_text
from hotrec.data.value_types import ValueTypes

Codes = npt.NDArray[np.int32] | npt.NDArray[np.int64]
Float64s = npt.NDArray[np.float64]

# Integers as written by programs that store numbers as floats: 1234.0 is the id 1234.
WHOLE_AS_FLOAT = r"^(-?[0-9]+)\.0*$"
_WHOLE_BELOW = 2.0**53  # a larger float stands for several integers
_BRACKETS = r"(?s)^[ \t\r\n]*\[(.*)\][ \t\r\n]*$"
_LABELS = (("0", "false", "f", "no", "n"), ("1", "true", "t", "yes", "y"))
_NO_CODES = np.empty(0, np.int64)
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
        odd: The ``values`` that are numbers but not integers, which are not valid ids.
    """

    values: pa.Array
    codes: Codes
    odd: Codes = field(default_factory=lambda: _NO_CODES)

    @cached_property
    def hashes(self) -> Hashes:
        """The hash of each of ``values``, uint64 (V,); that of a null has no meaning."""
        return hash_text(self.values)


@dataclass(frozen=True)
class Lists:
    """A column of lists of texts.

    Args:
        items: The concatenated items of all distinct lists.
        offsets: int64 (L + 1,): list i is items ``offsets[i]:offsets[i + 1]``.
        codes: Integers (n,), the list of each sample, -1 for a missing one.
    """

    items: Texts
    offsets: npt.NDArray[np.int64]
    codes: Codes


@dataclass(frozen=True)
class NumberLists:
    """A column of lists of numbers.

    Args:
        values: float64 (K,), the concatenated numbers of all distinct lists, NaN where missing.
        offsets: int64 (L + 1,): list i is values ``offsets[i]:offsets[i + 1]``.
        codes: Integers (n,), the list of each sample, -1 for a missing one.
    """

    values: Float64s
    offsets: npt.NDArray[np.int64]
    codes: Codes


@dataclass(frozen=True)
class RawBlock:
    """Samples of one file as they were read.

    Args:
        lines: int64 (n,), the line of each sample, or its row in a file without lines, from 1.
        ids: The columns read as ids, by their name in the log.
        numbers: The columns read as numbers, float64 (n,), NaN for a missing value; of vectors
            float64 (n, width).
        num_skipped: The number of samples skipped because they could not be read.
        kept: Columns to pass through unchanged.
        lists: The columns read as lists of numbers.
        value_types: What the values of columns mean, where types differ in it.
    """

    lines: npt.NDArray[np.int64]
    ids: Mapping[str, Texts | Lists]
    numbers: Mapping[str, Float64s]
    num_skipped: int = 0
    kept: Mapping[str, pa.Array] = field(default_factory=dict)
    lists: Mapping[str, NumberLists] = field(default_factory=dict)
    value_types: ValueTypes = field(default_factory=ValueTypes)

    def __len__(self) -> int:
        return int(self.lines.size)

    def keep(self, is_kept: npt.NDArray[np.bool_]) -> RawBlock:
        """Some of the samples; the others count as skipped."""
        kept = {name: values.filter(pa.array(is_kept)) for name, values in self.kept.items()}
        return self._chosen(is_kept, kept, self.num_skipped + int((~is_kept).sum()))

    def part(self, begin: int, end: int) -> RawBlock:
        """Consecutive samples; those that were skipped count with the first."""
        kept = {name: values.slice(begin, end - begin) for name, values in self.kept.items()}
        return self._chosen(slice(begin, end), kept, 0 if begin else self.num_skipped)

    def _chosen(self, chosen: Any, kept: Mapping[str, pa.Array], num_skipped: int) -> RawBlock:
        return RawBlock(
            self.lines[chosen],
            {n: replace(column, codes=column.codes[chosen]) for n, column in self.ids.items()},
            {name: values[chosen] for name, values in self.numbers.items()},
            num_skipped,
            kept,
            {n: replace(column, codes=column.codes[chosen]) for n, column in self.lists.items()},
            self.value_types,
        )


def offsets_of(lengths: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int64]:
    """Offsets of concatenated bags, including the end."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def is_list(kind: pa.DataType) -> bool:
    """Whether a type of ``stored`` is one of lists, of any kind."""
    is_any = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return bool(is_any or pa.types.is_fixed_size_list(kind))


def is_text(kind: pa.DataType) -> bool:
    """Whether a type of ``stored`` is one of texts, or a dictionary of them."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def stored(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """A column as one array, of a type for its values, independent of their storage."""
    array = one_array(column)
    kind = array.type
    if kind == pa.uuid():
        texts = [None if v is None else str(uuid.UUID(bytes=v)) for v in array.storage.to_pylist()]
        return pa.array(texts, pa.string())
    if isinstance(kind, pa.BaseExtensionType):
        return stored(array.storage)
    if pa.types.is_run_end_encoded(kind):
        return stored(pc.run_end_decode(array))
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        return array.cast(pa.large_string())
    if pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
        # Arrow's cast loses items where lists are null.
        is_null = array.is_null()
        offsets = offsets_of(pc.list_value_length(array).fill_null(0).to_numpy())
        return pa.LargeListArray.from_arrays(pa.array(offsets), array.flatten(), mask=is_null)
    return array


def ids_from_arrow(column: pa.ChunkedArray | pa.Array) -> Texts | Lists:
    """A column of any scalar type, or of lists of one."""
    array = stored(column)
    return lists_from_arrow(array) if is_list(array.type) else texts_from_arrow(array)


def texts_from_arrow(column: pa.ChunkedArray | pa.Array) -> Texts:
    """A column of any scalar type as texts; numbers in decimal, integers without a point.

    Raises:
        pa.ArrowException: if values are not UTF-8, or of a type without a text form.
    """
    array = stored(column)
    if not pa.types.is_dictionary(array.type):
        array = array.dictionary_encode()
    odd: Codes = _NO_CODES
    values = stored(array.dictionary)
    if pa.types.is_floating(values.type) or pa.types.is_decimal(values.type):
        values, odd = _texts_of_whole(values)
    elif not pa.types.is_string(values.type):
        values = values.cast(pa.string())
    else:
        values.validate(full=True)  # a text column of a file may be invalid
    codes = array.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    return Texts(values, codes, odd)


def _texts_of_whole(values: pa.Array) -> tuple[pa.Array, Codes]:
    """Floats or decimals as texts, and which of them are not exact integers."""
    if pa.types.is_decimal(values.type):
        found = values.to_pylist()
        odd = [i for i, v in enumerate(found) if v is not None and v != v.to_integral_value()]
        is_odd = np.isin(np.arange(len(found)), odd)
        texts = [
            None if v is None else str(v if odd else int(v))
            for v, odd in zip(found, is_odd, strict=True)
        ]
        return pa.array(texts, pa.string()), np.flatnonzero(is_odd)
    numbers = values.cast(pa.float64()).to_numpy(zero_copy_only=False)
    is_whole = (np.abs(numbers) < _WHOLE_BELOW) & (np.floor(numbers) == numbers)
    whole = pa.array(np.where(is_whole, numbers, 0).astype(np.int64)).cast(pa.string())
    texts = pc.if_else(pa.array(is_whole), whole, values.cast(pa.string()))
    is_null = values.is_null().to_numpy(zero_copy_only=False)
    return texts, np.flatnonzero(~is_whole & ~is_null)


def whole_ids(texts: Texts) -> Texts:
    """Ids, with those written as 1234.0 turned into 1234, as in a column of integers."""
    if not pc.any(pc.match_substring(texts.values, ".")).as_py():
        return texts
    return replace(texts, values=pc.replace_substring_regex(texts.values, WHOLE_AS_FLOAT, r"\1"))


def numbers_from_arrow(column: pa.ChunkedArray | pa.Array) -> Float64s:
    """A column of numbers or booleans as float64, NaN where null.

    Infinite where a value is NaN already, to be found by the reader: NaN means missing.

    Raises:
        pa.ArrowInvalid: if a value is not a number.
    """
    array = stored(column)
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    # safe=False: integers beyond 2**53 lose their last digits instead of failing.
    values = array.cast(pa.float64(), safe=pa.types.is_string(array.type))
    if pc.any(pc.is_nan(values)).as_py():
        values = pc.if_else(pc.is_nan(values), math.inf, values)
    found: Float64s = values.to_numpy(zero_copy_only=False).astype(np.float64, copy=False)
    return found


def labels_from_texts(texts: Texts) -> Float64s:
    """Texts as labels 0 and 1; NaN where missing, and infinite where a text is neither.

    Surrounding blanks are ignored, and numbers are compared as numbers.
    """
    of = {name: float(label) for label, names in enumerate(_LABELS) for name in names}
    found = [
        of.get(_label_key(text or "").lower(), math.inf if text else math.nan)
        for text in [*texts.values.to_pylist(), None]
    ]
    return np.array(found)[texts.codes]


def _label_key(text: str) -> str:
    """Normal form of a label's text."""
    text = text.strip(" \t")
    return f"{float(text) + 0.0:g}" if re.fullmatch(_NUMBER, text) else text


def times_from_arrow(column: pa.ChunkedArray | pa.Array) -> Float64s:
    """A column of Arrow's dates or times as milliseconds since 1970; NaN where null."""
    # safe=False: nanoseconds are cut off.
    times = one_array(column).cast(pa.timestamp("us"), safe=False)
    return numbers_from_arrow(times.cast(pa.int64())) / 1000


def times_from_texts(texts: Texts) -> Float64s:
    """Texts in ISO 8601 as milliseconds since 1970; infinite where one is no date or time."""
    # Arrow needs to know whether there is an offset, and reads at most six digits of a second.
    values = pc.replace_substring_regex(texts.values, r" ?(UTC|GMT)$", "Z")
    values = pc.replace_substring_regex(values, r"(\.[0-9]{6})[0-9]+", r"\1")
    has_offset = pc.match_substring_regex(values, r":.*(Z|[+-][0-9:]+)$")
    nothing = pa.scalar(None, pa.string())
    try:
        found = [
            pc.if_else(has_offset, values, nothing).cast(pa.timestamp("us", "UTC")),
            pc.if_else(has_offset, nothing, values).cast(pa.timestamp("us")),
        ]
        since_1970 = pc.coalesce(*(times.cast(pa.int64()) for times in found))
        milliseconds = numbers_from_arrow(since_1970) / 1000
    except pa.ArrowInvalid:  # to find the bad value; and for forms unknown to Arrow
        found = [_time_or_inf(text) for text in texts.values.to_pylist()]
        milliseconds = np.array(found, np.float64)
    return np.append(milliseconds, np.nan)[texts.codes]


def _time_or_inf(text: str | None) -> float:
    try:
        return math.nan if text is None else time_ms(text)
    except ValueError:
        return math.inf


def numbers_from_texts(texts: Texts) -> Float64s:
    """Texts as numbers; infinite where a text is not a number, to be found by the reader.

    Surrounding blanks are ignored.
    """
    values = pc.utf8_trim(texts.values, " \t")
    is_number = pc.match_substring_regex(values, _NUMBER).fill_null(True)
    numbers = numbers_from_arrow(pc.if_else(is_number, values, "inf"))
    return np.append(numbers, np.nan)[texts.codes]


def lists_from_arrow(column: pa.ChunkedArray | pa.Array) -> Lists:
    """A column of lists of any scalar type; null lists are missing."""
    items, offsets, codes = _flat(column)
    return Lists(texts_from_arrow(items), offsets, codes)


def _flat(
    column: pa.ChunkedArray | pa.Array,
) -> tuple[pa.Array, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The concatenated items of a column of lists, their offsets, and the list of each sample."""
    array = stored(column)
    if not pa.types.is_list(array.type):  # large or fixed-size lists
        array = array.cast(pa.list_(array.type.value_type))
    is_null = array.is_null().to_numpy(zero_copy_only=False)
    # flatten() omits what nulls and slices hide, so lengths must come from the same view.
    lengths = np.where(is_null, 0, pc.list_value_length(array).fill_null(0).to_numpy())
    return array.flatten(), offsets_of(lengths), np.where(is_null, -1, np.arange(len(array)))


def lists_from_texts(texts: Texts, separator: str) -> Lists:
    """Split each text at the separator; empty pieces are dropped.

    A text in brackets, such as [1, 2] or ['a', 'b'], is read without them, and its pieces without
    surrounding blanks and quotes. It is split at commas if it has any and the separator is a blank.
    """
    values = texts.values.fill_null("")
    in_brackets = pc.match_substring_regex(values, _BRACKETS)
    if pc.any(in_brackets).as_py():
        inner = pc.replace_substring_regex(values, _BRACKETS, r"\1")
        inner = pc.replace_substring_regex(inner, r"[\t\n\v\f\r]", " ")  # NumPy breaks long lines
        if separator == " ":
            swapped = pc.replace_substring(pc.replace_substring(inner, " ", "\v"), ",", " ")
            inner = pc.if_else(pc.match_substring(inner, ","), swapped, inner)
        values = pc.if_else(in_brackets, inner, values)
    pieces = pc.split_pattern(values, separator)
    flat = pieces.flatten()
    lengths = pc.list_value_length(pieces).to_numpy(zero_copy_only=False)
    if pc.any(in_brackets).as_py():
        is_inside = pa.array(np.repeat(in_brackets.to_numpy(zero_copy_only=False), lengths))
        bare = pc.replace_substring(pc.utf8_trim(flat, " \v'\""), "\v", " ")
        flat = pc.if_else(is_inside, bare, flat)
    is_item = pc.not_equal(flat, "").to_numpy(zero_copy_only=False)
    items = texts_from_arrow(flat.filter(pa.array(is_item)))
    return Lists(items, offsets_of(is_item)[offsets_of(lengths)], texts.codes)


def number_lists_from_arrow(column: pa.ChunkedArray | pa.Array) -> NumberLists:
    """A column of lists of numbers; infinite where an item is not a number."""
    items, offsets, codes = _flat(column)
    return NumberLists(_numbers_of_items(items), offsets, codes)


def number_lists_from_texts(texts: Texts, separator: str) -> NumberLists:
    """Texts that ``lists_from_texts`` splits as lists of numbers; infinite where one is none."""
    lists = lists_from_texts(texts, separator)
    return NumberLists(numbers_from_texts(lists.items), lists.offsets, lists.codes)


def _numbers_of_items(items: pa.Array) -> Float64s:
    items = stored(items)
    if is_text(items.type):
        return numbers_from_texts(texts_from_arrow(items))
    return numbers_from_arrow(items)


def vectors_from_arrow(column: pa.ChunkedArray | pa.Array, width: int) -> Float64s:
    """A column of lists of numbers as float64 (n, width); NaN where a list or a number is null.

    Infinite where a list has another length, or an item is not a number.
    """
    lists = number_lists_from_arrow(column)
    return _vectors(lists.values, lists.offsets, lists.codes, width)


def vectors_from_texts(texts: Texts, separator: str, width: int) -> Float64s:
    """Texts that ``lists_from_texts`` splits as vectors, see ``vectors_from_arrow``."""
    lists = number_lists_from_texts(texts, separator)
    return _vectors(lists.values, lists.offsets, lists.codes, width)


def _vectors(
    numbers: Float64s, offsets: npt.NDArray[np.int64], codes: Codes, width: int
) -> Float64s:
    is_fit = np.diff(offsets) == width
    vectors = np.full((is_fit.size + 1, width), math.inf)
    vectors[-1] = math.nan  # of the code -1
    vectors[:-1][is_fit] = numbers[offsets[:-1][is_fit, None] + np.arange(width)]
    return vectors[codes]


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
    """A column after ``derive``, see ``hotrec.config.data.ColumnSpec``; NaN stays NaN."""
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
    """Integers as decimal texts; NaN is missing, and what a skipped sample has of inf."""
    is_missing = ~np.isfinite(values)
    whole, codes = np.unique(np.where(is_missing, 0, values).astype(np.int64), return_inverse=True)
    return Texts(pa.array(whole).cast(pa.string()), np.where(is_missing, -1, codes))
