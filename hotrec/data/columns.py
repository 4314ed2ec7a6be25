"""Raw columns: what readers hand to the encoders, before ids are rows.

Ids are text in every format. They repeat: what is looked up, hashed or parsed is done once per
distinct text of a block, and polars filters, joins and cuts the numbers of these texts.
"""

from __future__ import annotations

import math
import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from hotrec.config.data import Derive, TimeUnit, time_ms
from hotrec.data.chunks import offsets_of, one_array
from hotrec.data.value_types import ValueTypes
from hotrec.types import Float64s, Rows

Mask = npt.NDArray[np.bool_]
ID, NUMBER, NUMBERS = "id:", "number:", "numbers:"  # prefixes of the columns of a block
LINE = "line"
LARGEST = float(np.finfo(np.float32).max)

# Integers as written by programs that store numbers as floats: 1234.0 is the id 1234.
WHOLE_AS_FLOAT = r"^(-?[0-9]+)\.0*$"
_WHOLE_BELOW = 2.0**53  # a larger float stands for several integers
_BRACKETS = r"(?s)^[ \t\r\n]*\[(.*)\][ \t\r\n]*$"
_LABELS = (("0", "false", "f", "no", "n"), ("1", "true", "t", "yes", "y"))
_NUMBER = r"^[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?$"
_MS_PER_HOUR = 3_600_000
MS_PER_UNIT = {TimeUnit.s: 1e3, TimeUnit.ms: 1.0, TimeUnit.us: 1e-3, TimeUnit.ns: 1e-6}
# 1970-01-01 was a Thursday, day 3 of a week that begins on Monday.
_EPOCH_WEEKDAY = 3


@dataclass(frozen=True)
class Ids:
    """A column of texts, or of lists of texts.

    Args:
        texts: A string array (V,) without nulls; most are different.
        codes: The number of each sample's text, or the list of them; null for a missing one.
    """

    texts: pa.Array
    codes: pl.Series

    @property
    def is_list(self) -> bool:
        return isinstance(self.codes.dtype, pl.List)

    def flat(self) -> tuple[Ids, Rows | None]:
        """All items of lists, with their offsets, int64 (n + 1,); or single ids."""
        if not self.is_list:
            return self, None
        items, offsets = items_of(self.codes)
        return Ids(self.texts, items), offsets

    def used(self) -> tuple[pa.Array, Rows]:
        """For single ids the texts, and the number of each sample's, int (n,), -1 for none."""
        codes = _numbers(self.codes)
        if len(self.texts) <= codes.size:
            return self.texts, codes
        numbers, codes = np.unique(np.append(-1, codes), return_inverse=True)  # of a side table
        return self.texts.take(pa.array(numbers[1:])), codes[1:] - 1

    def values(self) -> pl.Series:
        """The texts of each sample."""
        if not self.is_list:
            return pl.Series(self.texts, dtype=pl.String).gather(self.codes)
        return of_items(self.codes, lambda items: Ids(self.texts, items).values())


@dataclass(frozen=True)
class RawBlock:
    """Samples of one file as they were read.

    Args:
        frame: A row for each sample: its line, or its row in a file without lines, from 1; and the
            columns of the log that are read, named by their use: the codes of ids or of lists of
            them; numbers, float64, null or NaN for a missing one, or arrays of them; and lists of
            numbers.
        texts: Of the columns of ids.
        num_skipped: The number of samples skipped because they could not be read.
        kept: Columns to pass through unchanged.
        value_types: What the values of columns mean, where types differ in it.
    """

    frame: pl.DataFrame
    texts: Mapping[str, pa.Array]
    num_skipped: int = 0
    kept: Mapping[str, pa.Array] = field(default_factory=dict)
    value_types: ValueTypes = field(default_factory=ValueTypes)

    def __len__(self) -> int:
        return len(self.frame)

    @property
    def lines(self) -> Rows:
        return self.frame[LINE].to_numpy()

    def ids(self, name: str) -> Ids:
        return Ids(self.texts[name], self.frame[f"{ID}{name}"])

    def numbers(self, name: str) -> Float64s:
        """A column of numbers, float64 (n,), or vectors, float64 (n, width); NaN where missing."""
        return self.frame[f"{NUMBER}{name}"].to_numpy()

    def lists(self, name: str) -> pl.Series:
        """A column of lists of numbers."""
        return self.frame[f"{NUMBERS}{name}"]

    def keep(self, is_kept: Mask) -> RawBlock:
        """Some of the samples; the others count as skipped."""
        kept = {name: values.filter(pa.array(is_kept)) for name, values in self.kept.items()}
        num_skipped = self.num_skipped + int((~is_kept).sum())
        return replace(self, frame=self.frame.filter(is_kept), num_skipped=num_skipped, kept=kept)

    def part(self, begin: int, size: int) -> RawBlock:
        """Consecutive samples; those that were skipped count with the first."""
        kept = {name: values.slice(begin, size) for name, values in self.kept.items()}
        num_skipped = 0 if begin else self.num_skipped
        return replace(
            self, frame=self.frame[begin : begin + size], num_skipped=num_skipped, kept=kept
        )


# Arrow's columns.


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


def ids_from_arrow(column: pa.ChunkedArray | pa.Array) -> tuple[Ids, Mask]:
    """A column of any scalar type as texts, or of lists of one as lists of texts.

    Returns:
        Numbers in decimal, integers without a point; and which samples have numbers that are not
        integers, which are no ids.

    Raises:
        pa.ArrowException: If values are not UTF-8, or of a type without a text form.
    """
    array = stored(column)
    if is_list(array.type):
        items, offsets, is_null = _flat(array)
        ids, is_odd = ids_from_arrow(items)
        lists = lists_of(ids.codes, offsets, is_null)
        return Ids(ids.texts, lists), any_of_lists(is_odd, offsets)
    if not pa.types.is_dictionary(array.type):
        array = array.dictionary_encode()
    texts, is_odd = _texts_of(stored(array.dictionary))
    codes = pl.Series(array.indices, dtype=pl.Int32)
    are_odd = np.zeros(len(codes), bool)
    if is_odd.any():
        are_odd = np.append(is_odd, False)[_numbers(codes)]
    if texts.null_count:  # of a dictionary
        return ids_from_arrow(texts.take(array.indices))[0], are_odd
    return Ids(texts, codes), are_odd


def any_of_lists(are: Mask, offsets: Rows) -> Mask:
    """Whether any item of each list is one of those, bool (n,)."""
    found: Mask = np.diff(offsets_of(are)[offsets]) > 0
    return found


def _texts_of(values: pa.Array) -> tuple[pa.Array, Mask]:
    if pa.types.is_floating(values.type) or pa.types.is_decimal(values.type):
        return _texts_of_whole(values)
    if is_text(values.type):
        values.validate(full=True)  # a text column of a file may be invalid
    else:
        values = values.cast(pa.string())
    return values, np.zeros(len(values), bool)


def _texts_of_whole(values: pa.Array) -> tuple[pa.Array, Mask]:
    """Floats or decimals as texts, and which of them are not exact integers."""
    if pa.types.is_decimal(values.type):
        found = values.to_pylist()
        odd = np.array([v is not None and v != v.to_integral_value() for v in found], bool)
        texts = [
            None if v is None else str(v if is_odd else int(v))
            for v, is_odd in zip(found, odd, strict=True)
        ]
        return pa.array(texts, pa.string()), odd
    numbers = values.cast(pa.float64()).to_numpy(zero_copy_only=False)
    is_whole = (np.abs(numbers) < _WHOLE_BELOW) & (np.floor(numbers) == numbers)
    whole_numbers = pa.array(np.where(is_whole, numbers, 0).astype(np.int64)).cast(pa.string())
    texts = pc.if_else(pa.array(is_whole), whole_numbers, values.cast(pa.string()))
    return texts, ~is_whole & values.is_valid().to_numpy(zero_copy_only=False)


def _flat(array: pa.Array) -> tuple[pa.Array, Rows, pl.Series]:
    """The concatenated items of a column of lists, their offsets, and which lists are null."""
    if not pa.types.is_list(array.type):  # large or fixed-size lists
        array = array.cast(pa.list_(array.type.value_type))
    # flatten() omits what nulls and slices hide, so lengths must come from the same view.
    return (
        array.flatten(),
        offsets_of(pc.list_value_length(array).fill_null(0).to_numpy()),
        pl.Series(array.is_null()),
    )


def numbers_from_arrow(column: pa.ChunkedArray | pa.Array) -> Float64s:
    """A column of numbers or booleans as float64, NaN where null.

    Infinite where a value is NaN already, to be found by the reader: NaN means missing.

    Raises:
        pa.ArrowInvalid: if a value is not a number.
    """
    array = stored(column)
    if is_text(array.type):
        return numbers_from_texts(ids_from_arrow(array)[0])
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    # safe=False: integers beyond 2**53 lose their last digits instead of failing.
    values = array.cast(pa.float64(), safe=False)
    if pc.any(pc.is_nan(values)).as_py():
        values = pc.if_else(pc.is_nan(values), math.inf, values)
    found: Float64s = values.to_numpy(zero_copy_only=False)
    return found


def number_lists_from_arrow(column: pa.ChunkedArray | pa.Array) -> pl.Series:
    """A column of lists of numbers; infinite where an item is not a number."""
    items, offsets, is_null = _flat(stored(column))
    return lists_of(pl.Series(numbers_from_arrow(items)), offsets, is_null)


def times_from_arrow(column: pa.ChunkedArray | pa.Array) -> Float64s:
    """A column of Arrow's dates or times as milliseconds since 1970; NaN where null."""
    # safe=False: nanoseconds are cut off.
    times = one_array(column).cast(pa.timestamp("us"), safe=False)
    return numbers_from_arrow(times.cast(pa.int64())) / 1000


# Texts.


def whole_ids(ids: Ids) -> Ids:
    """Ids with those written as 1234.0 turned into 1234, as in a column of integers."""
    if not pc.any(pc.match_substring(ids.texts, ".")).as_py():
        return ids
    return Ids(pc.replace_substring_regex(ids.texts, WHOLE_AS_FLOAT, r"\1"), ids.codes)


def items_of(lists: pl.Series) -> tuple[pl.Series, Rows]:
    """The concatenated items of lists, with their offsets, int64 (n + 1,)."""
    lengths = lists.list.len().fill_null(0).to_numpy()
    return lists.explode(empty_as_null=False, keep_nulls=False), offsets_of(lengths)


def lists_of(items: pl.Series, offsets: Rows, is_null: pl.Series | None = None) -> pl.Series:
    """Items as lists."""
    mask = None if is_null is None else is_null.to_arrow()
    lists = pa.LargeListArray.from_arrays(pa.array(offsets), items.to_arrow(), mask=mask)
    return pl.Series(items.name, lists, pl.List(items.dtype))


def of_items(lists: pl.Series, read: Callable[[pl.Series], pl.Series]) -> pl.Series:
    """Lists with what a function makes of all their items."""
    items, offsets = items_of(lists)
    return lists_of(read(items), offsets, lists.is_null())


def _numbers(codes: pl.Series) -> Rows:
    """Codes, with -1 for null ones."""
    return codes.to_arrow().fill_null(-1).to_numpy(zero_copy_only=False)


def _each(read: Callable[[pa.Array], Float64s], ids: Ids) -> Float64s:
    """The numbers of texts, each different one read once."""
    return np.append(read(ids.texts), np.nan)[_numbers(ids.codes)]


def labels_from_texts(texts: Ids) -> Float64s:
    """Texts as labels 0 and 1; NaN where missing, and infinite where a text is neither.

    Surrounding blanks are ignored, and numbers are compared as numbers.
    """
    of = {name: float(label) for label, names in enumerate(_LABELS) for name in names}

    def read(different: pa.Array) -> Float64s:
        found = different.to_pylist()
        return np.array([of.get(_label_key(t).lower(), math.inf) if t else np.nan for t in found])

    return _each(read, texts)


def _label_key(text: str) -> str:
    """Normal form of a label's text."""
    text = text.strip(" \t")
    return f"{float(text) + 0.0:g}" if re.fullmatch(_NUMBER, text) else text


def times_from_texts(texts: Ids) -> Float64s:
    """Texts in ISO 8601 as milliseconds since 1970; infinite where one is no date or time."""
    return _each(_times_of, texts)


def _times_of(texts: pa.Array) -> Float64s:
    # Arrow needs to know whether there is an offset, and reads at most six digits of a second.
    values = pc.replace_substring_regex(texts, r" ?(UTC|GMT)$", "Z")
    values = pc.replace_substring_regex(values, r"(\.[0-9]{6})[0-9]+", r"\1")
    has_offset = pc.match_substring_regex(values, r":.*(Z|[+-][0-9:]+)$")
    nothing = pa.scalar(None, values.type)
    try:
        found = [
            pc.if_else(has_offset, values, nothing).cast(pa.timestamp("us", "UTC")),
            pc.if_else(has_offset, nothing, values).cast(pa.timestamp("us")),
        ]
        since_1970 = pc.coalesce(*(times.cast(pa.int64()) for times in found))
        return numbers_from_arrow(since_1970) / 1000
    except pa.ArrowInvalid:  # to find the bad value; and for forms unknown to Arrow
        return np.array([_time_or_inf(text) for text in texts.to_pylist()], np.float64)


def _time_or_inf(text: str) -> float:
    try:
        return time_ms(text)
    except ValueError:
        return math.inf


def numbers_from_texts(texts: Ids) -> Float64s:
    """Texts as numbers; infinite where a text is not a number, to be found by the reader.

    Surrounding blanks are ignored.
    """
    return _each(_numbers_of, texts)


def _numbers_of(texts: pa.Array) -> Float64s:
    values = pc.utf8_trim(texts, " \t")
    is_number = pc.match_substring_regex(values, _NUMBER)
    numbers = pc.if_else(is_number, values, "inf").cast(pa.float64())
    found: Float64s = numbers.to_numpy(zero_copy_only=False)
    return found


def lists_from_texts(ids: Ids, separator: str) -> Ids:
    """Split each text at the separator; empty pieces are dropped.

    A text in brackets, such as [1, 2] or ['a', 'b'], is read without them, and its pieces without
    surrounding blanks and quotes. It is split at commas if it has any and the separator is a blank.
    """
    texts = pl.Series("text", ids.texts, pl.String)
    split = pl.col("text").str.split(separator)
    if texts.str.contains(_BRACKETS).any():
        # NumPy breaks long lines.
        inner = pl.col("text").str.extract(_BRACKETS).str.replace_all(r"[\t\n\v\f\r]", " ")
        has_comma = inner.str.contains(",", literal=True) if separator == " " else pl.lit(False)
        pieces = pl.when(has_comma).then(inner.str.split(",")).otherwise(inner.str.split(separator))
        pieces = pieces.list.eval(pl.element().str.strip_chars(" '\""))
        split = pl.when(inner.is_null()).then(split).otherwise(pieces)
    pieces = split.list.eval(pl.element().filter(pl.element() != ""))
    items, offsets = items_of(texts.to_frame().select(pieces).to_series())
    found, _ = ids_from_arrow(items.to_arrow())
    return Ids(found.texts, lists_of(found.codes, offsets).gather(ids.codes))


def number_lists_from_texts(ids: Ids, separator: str) -> pl.Series:
    """Texts that ``lists_from_texts`` splits as lists of numbers; infinite where one is none."""
    lists = lists_from_texts(ids, separator)
    of = numbers_from_texts
    return of_items(lists.codes, lambda items: pl.Series(of(Ids(lists.texts, items))))


# Numbers.


def vectors_of(lists: pl.Series, width: int) -> Float64s:
    """Lists of numbers as float64 (n, width); NaN where a list or a number is null.

    Infinite where a list has another length.
    """
    lengths = lists.list.len()
    vectors = np.where(lengths.is_null().to_numpy(), math.nan, math.inf)
    vectors = np.repeat(vectors[:, None], width, axis=1)
    is_fit = (lengths == width).fill_null(False)
    items = lists.filter(is_fit).explode().to_numpy()
    vectors[is_fit.to_numpy()] = items.reshape(-1, width)
    return vectors


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


def texts_from_numbers(values: Float64s) -> Ids:
    """Integers as decimal texts; NaN is missing, and what a skipped sample has of inf."""
    is_missing = ~np.isfinite(values)
    whole = pa.array(np.where(is_missing, 0, values).astype(np.int64), mask=is_missing)
    return ids_from_arrow(whole)[0]
