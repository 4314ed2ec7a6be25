"""The columns of a sample: the kind of their values, independent of the stored type."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hotrec.config.data import NumberForm, SourceFormat, TimeUnit
from hotrec.data.chunks import Jagged, one_array
from hotrec.data.columns import (
    MS_PER_UNIT,
    Float64s,
    Lists,
    Texts,
    ids_from_arrow,
    is_list,
    lists_from_texts,
    numbers_from_texts,
    offsets_of,
    stored,
    texts_from_arrow,
    times_from_arrow,
    times_from_texts,
    whole_ids,
)
from hotrec.data.gather import gather_bags
from hotrec.data.inference.names import names_ids, names_times, names_vectors
from hotrec.data.sample import Sample
from hotrec.data.value_types import are_epochs

_NULL_TEXTS = ("NULL", "null", "\\N", "N/A", "NaN", "nan", "None")
_NULLS_AMONG_NUMBERS = (*_NULL_TEXTS, "NA", "na", "none", "-", "?")
# Texts that mean "missing" in any column, or only among numbers.
KNOWN_NULLS = ("", *_NULLS_AMONG_NUMBERS)
_INTEGER = r"^[+-]?[0-9]+$"
_LEADING_ZERO, _HEX_WITH_E = r"^[+-]?0[0-9]", r"^[0-9]+[eE][0-9]+$"
_ITEM = r"^[\w:.\-]{1,40}$"
_BRACKETS = r"^\s*\[.*\]\s*$"
_LIST_SEPARATORS = ("|", ";", ",", " ")
# Signs beside a number; and its decimal sign with that between groups of three digits.
_BESIDE = "$\u20ac\u00a3\u00a5\u20b9%"
_SIGNS = (
    *((decimal, thousands) for thousands in ",.' \u00a0\u202f" for decimal in ".,"),
    (",", ""),
)
_HAS_DIGIT = r"[0-9]"
_FORMS_OF_DIGITS = ("%Y%m%d", "%y%m%d%H", "%Y%m%d%H", "%Y%m%d%H%M", "%Y%m%d%H%M%S", "%y%m%d")
# Only a day after the 12th distinguishes the members of the first two pairs.
_DAYS = (
    *("%m/%d/%Y", "%d/%m/%Y", "%m-%d-%Y", "%d-%m-%Y"),
    *("%Y/%m/%d", "%d.%m.%Y", "%d %b %Y", "%b %d, %Y"),
)
_CLOCKS = ("", " %H:%M", " %H:%M:%S", " %H:%M:%S.%f", " %I:%M %p", " %I:%M:%S %p")
_FORMS_OF_TEXT = (
    *(day + clock for day in _DAYS for clock in _CLOCKS),
    *("%d/%b/%Y:%H:%M:%S %z", "%d/%b/%Y:%H:%M:%S", "%a %b %d %H:%M:%S %Y"),
    *("%a %b %d %H:%M:%S %z %Y", "%a, %d %b %Y %H:%M:%S %z", "%a, %d %b %Y %H:%M:%S"),
)
_SWAPPED = "ambiguous dates (day or month first): set their format in times"
_FEW, _FEW_WORDS, _LONG_TEXT, _MOST_EXACT = 200, 3, 60, 2.0**53


@dataclass(frozen=True)
class Column:
    """A column of the sample.

    Args:
        name: Its name in the log.
        kind: "integer", "number", "time", "text", "list", "vector", or a description of an
            unsupported one.
        num_rows: Rows of the sample.
        values: The distinct values as texts (V,), or the distinct items of lists.
        codes: Integers (n,), the value of each row, -1 if it has none; for lists, of each item.
        offsets: For lists, the offsets of the items of each row, int64 (n + 1,).
        numbers: The distinct values as numbers, times in milliseconds since 1970, float64 (V,).
        num_missing: Rows without a value.
        num_total: Estimated number of distinct values in the whole log.
        form: The form of times that are not of one of Arrow's types, see ``SourceSpec.times``.
        separator: The separator of the items of a list or vector in text.
        number_form: Keys of the entry of a column of specially written numbers.
        width: Length of a vector.
        guess: What may be wrong, for a remark.
    """

    name: str
    kind: str
    num_rows: int
    values: pa.Array = field(default_factory=lambda: pa.array([], pa.string()))
    codes: Any = field(default_factory=lambda: np.empty(0, np.int64))
    offsets: Any = None
    numbers: Float64s = field(default_factory=lambda: np.empty(0))
    num_missing: int = 0
    num_total: int = 0
    form: str = ""
    separator: str = ""
    number_form: Mapping[str, str] = field(default_factory=dict)
    width: int = 0
    guess: str = ""

    def at(self, rows: Any) -> Column:
        """Some of its rows, int64 (m,)."""
        if self.is_unread or self.kind == "vector":
            return replace(self, num_rows=rows.size)
        if self.offsets is None:
            codes = self.codes[rows]
            return replace(
                self, num_rows=rows.size, codes=codes, num_missing=int((codes < 0).sum())
            )
        codes, lengths = gather_bags(Jagged(self.codes, self.offsets), rows)
        return replace(self, num_rows=rows.size, codes=codes, offsets=offsets_of(lengths))

    @cached_property
    def counts(self) -> Any:
        """How often each value occurs, int64 (V,)."""
        return np.bincount(self.codes[self.codes >= 0], minlength=len(self.values))

    @property
    def num_values(self) -> int:
        return len(self.values)

    @property
    def num_present(self) -> int:
        return self.num_rows - self.num_missing

    @property
    def is_numeric(self) -> bool:
        return self.kind in ("integer", "number")

    @property
    def is_unread(self) -> bool:
        """Whether the kind is an unsupported one."""
        return self.kind not in ("integer", "number", "time", "text", "list", "vector")

    @property
    def longest(self) -> int:
        """Items of the longest list."""
        return 0 if self.offsets is None else int(np.diff(self.offsets).max(initial=0))


def look_at(sample: Sample) -> tuple[list[Column], list[str]]:
    """The columns of a sample, and the texts in it that mean "missing"."""
    found: list[Column] = []
    is_text = sample.format not in (SourceFormat.parquet, SourceFormat.arrow)
    nulls = {""} if is_text else set()
    growth = sample.num_rows / max(1, sample.table.num_rows)
    for name in sample.table.column_names:
        array = one_array(sample.table.column(name))
        if name in sample.unread:
            found.append(Column(name, f"not supported: {sample.unread[name]}", len(array)))
            continue
        column, used = _look(name, array, growth, is_text)
        found.append(column)
        nulls |= used
    return found, sorted(nulls)


def _look(name: str, array: pa.Array, growth: float, is_text: bool) -> tuple[Column, set[str]]:
    array = stored(array)
    kind = array.type
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return _of_times(name, array), set()
    if pa.types.is_floating(kind) and not pc.all(pc.is_finite(array)).as_py():
        why = "not supported: numbers with NaN or infinity (write null)"
        return Column(name, why, len(array)), set()
    try:
        if is_list(kind) and (width := _width_of(name, array)):
            return Column(name, "vector", len(array), width=width), set()
        raw = ids_from_arrow(array)
    except pa.ArrowException:
        return Column(name, f"not supported: type {kind}", len(array)), set()
    if isinstance(raw, Lists):
        if raw.items.odd.size:
            why = "not supported: lists of numbers of different lengths"
            return Column(name, why, len(array)), set()
        return _of_lists(name, raw, growth, ""), set()
    texts = _compact(raw)
    nulls = _nulls_of(name, texts.values) if is_text else set()
    return _of_texts(name, _without(texts, {"", *nulls} if is_text else set()), growth), nulls


def _width_of(name: str, array: pa.Array) -> int:
    """The length of the vectors in a column of lists; 0 if they are ids, or lengths differ."""
    item = stored(array.flatten()).type
    lengths = pc.min_max(pc.list_value_length(array)).as_py()
    if pa.types.is_floating(item) or pa.types.is_decimal(item):
        few = texts_from_arrow(array.flatten()[: _FEW * 100])
        are_numbers = names_vectors(name) or bool(few.odd.size)
    else:
        are_numbers = names_vectors(name) and pa.types.is_integer(item)
    return lengths["max"] or 0 if are_numbers and lengths["min"] == lengths["max"] else 0


def _compact(texts: Texts) -> Texts:
    """The same, with distinct values and without unused ones."""
    encoded = texts.values.dictionary_encode()
    place = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    codes = np.append(place, -1)[texts.codes]
    is_used = np.bincount(codes[codes >= 0], minlength=len(encoded.dictionary)) > 0
    renumbered = np.append(np.where(is_used, np.cumsum(is_used) - 1, -1), -1)
    return Texts(encoded.dictionary.filter(pa.array(is_used)), renumbered[codes])


def _without(texts: Texts, nulls: set[str]) -> Texts:
    """The same with some of the values missing."""
    if not nulls:
        return texts
    is_null = pc.is_in(texts.values, pa.array(sorted(nulls), pa.string()))
    values = pc.if_else(is_null, pa.scalar(None, pa.string()), texts.values)
    return _compact(Texts(values, texts.codes))


def _nulls_of(name: str, values: pa.Array) -> set[str]:
    """The values that mean "missing"; some do so only among numbers or times."""
    candidates = {*_NULLS_AMONG_NUMBERS} & {*values.to_pylist()}
    others = values.filter(pc.invert(pc.is_in(values, pa.array(["", *candidates]))))
    if names_ids(name) is not True and len(others) > _FEW_WORDS * 10:
        # A few words among many numbers, such as "free" among prices.
        words = others.filter(pc.invert(pc.match_substring_regex(others, _HAS_DIGIT)))
        if len(words) <= _FEW_WORDS:
            candidates |= {*words.to_pylist()}
            others = others.filter(pc.invert(pc.is_in(others, words)))
    are_measured = candidates and (
        _are_numbers(others, NumberForm())
        or _number_form(name, others) is not None
        or _times_of(name, others, False) is not None
    )
    return candidates if are_measured else candidates & {*_NULL_TEXTS}


def _all_match(values: pa.Array, pattern: str) -> bool:
    return bool(pc.all(pc.match_substring_regex(values, pattern)).as_py())


def _any_matches(values: pa.Array, pattern: str) -> bool:
    return bool(pc.any(pc.match_substring_regex(values, pattern)).as_py())


def _num_total(codes: Any, growth: float) -> int:
    """Distinct values of ``growth`` times as many rows, by the power law of its two halves."""
    codes = codes[codes >= 0]
    num_values, num_half = (
        max(1, int(np.count_nonzero(np.bincount(some))))
        for some in (codes, codes[: codes.size // 2])
    )
    exponent = min(1.0, max(0.0, math.log2(num_values / num_half)))
    return round(num_values * growth**exponent) if codes.size else 0


def _of_times(name: str, array: pa.Array) -> Column:
    encoded = array.dictionary_encode()
    codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    return Column(
        *(name, "time", len(array), encoded.dictionary.cast(pa.string()), codes),
        numbers=times_from_arrow(encoded.dictionary),
        num_missing=array.null_count,
    )


def _of_texts(name: str, texts: Texts, growth: float) -> Column:
    """A column of one value in each row, by its distinct values."""
    is_plain = _are_numbers(texts.values, NumberForm()) and not _are_hashes(texts.values)
    texts = _compact(whole_ids(texts)) if is_plain else texts
    values, codes = texts.values, texts.codes
    num_missing = int((codes < 0).sum())
    total = _num_total(codes, growth)

    def column(kind: str, **more: Any) -> Column:
        known = {"num_missing": num_missing, "num_total": total, **more}
        return Column(name, kind, codes.size, values, codes, **known)

    if not len(values):
        return column("text")
    if (as_times := _times_of(name, values, is_plain)) is not None:
        time_form, times = as_times
        swapped = re.sub("^%m(.)%d", r"%d\1%m", time_form)
        if swapped != time_form and _are_plausible(_times(values, swapped), False):
            return column(_SWAPPED)
        return column("time", numbers=times, form=time_form)
    if is_plain:
        numbers = _numbers(values, NumberForm())
        if not _all_match(values, _INTEGER):
            return column("number", numbers=numbers)
        is_exact = np.abs(numbers).max() < _MOST_EXACT and not _any_matches(values, _LEADING_ZERO)
        # As numbers, some of them would be equal.
        return column("integer", numbers=numbers) if is_exact else column("text")
    if (form := _number_form(name, values)) is not None:
        keys = {k: v for k, v in form._asdict().items() if v != getattr(NumberForm(), k)}
        return column("number", numbers=_numbers(values, form), number_form=keys)
    if _all_match(values, r"^\s*\{"):
        return column("not supported: JSON in text (convert it to columns)")
    for separator in _LIST_SEPARATORS:
        if width := _width_in_text(values, separator):
            return column("vector", separator=separator, width=width)
        if (found := _as_list(name, texts, separator, growth)) is not None:
            return found
    length = pc.mean(pc.utf8_length(values)).as_py() or 0
    if length > _LONG_TEXT:
        return column(f"free text of {length:.0f} characters")
    blanks = values.filter(pc.match_substring_regex(values, r"^\s|\s$"))
    if not len(blanks):
        return column("text")
    guess = f"{len(blanks):,} of {len(values):,} ids have blanks at an end, such as "
    guess += f"{blanks[0].as_py()!r:.80}, which are others than those without"
    return column("text", guess=guess)


def _numbers(values: pa.Array, form: NumberForm) -> Float64s:
    return numbers_from_texts(Texts(values, np.arange(len(values))), form)


def _are_numbers(values: pa.Array, form: NumberForm) -> bool:
    """Whether all values are numbers of this form; a sample rules out most columns early."""
    return len(values) > 0 and all(
        bool(np.isfinite(_numbers(some, form)).all())
        for some in (values[:1], values[:_FEW], values)
    )


def _are_hashes(values: pa.Array) -> bool:
    """Whether they are hexadecimal and of one length, even if each looks like a number: 12e4567."""
    lengths = pc.min_max(pc.binary_length(values)).as_py()
    return lengths["min"] == lengths["max"] > 5 and _any_matches(values, _HEX_WITH_E)


def _number_form(name: str, values: pa.Array) -> NumberForm | None:
    """The form of numbers with signs, groups of digits or a decimal comma.

    A list of ids has commas, too. A number has a 0 after one, or a decimal point, or the name.
    """
    if names_ids(name) is True or not _all_match(values[:_FEW], _HAS_DIGIT):
        return None
    ignore = "".join(sign for sign in _BESIDE if _any_matches(values, re.escape(sign)))
    if ignore and _are_numbers(values, NumberForm(ignore=ignore)):
        return NumberForm(ignore=ignore)
    is_sure = bool(ignore) or names_ids(name) is False
    for decimal, thousands in (pair for pair in _SIGNS if pair[0] != pair[1]):
        sign = re.escape(thousands or decimal)
        form = NumberForm(decimal, thousands, ignore)
        is_likely = _any_matches(values, sign) and (
            is_sure
            or _any_matches(values, f"{sign}0")
            or (thousands and _any_matches(values, re.escape(decimal)))
        )
        begins_with_0 = thousands and _any_matches(values, rf"^\D?0{sign}")
        if is_likely and not begins_with_0 and _are_numbers(values, form):
            return form
    return None


def _times_of(name: str, values: pa.Array, are_numbers: bool) -> tuple[str, Float64s] | None:
    """The form of values that are times, and the times; numbers need a name of times."""
    if not len(values):
        return None
    forms: tuple[str, ...] = (TimeUnit.iso, *_FORMS_OF_TEXT)
    if are_numbers:
        if not names_times(name):
            return None
        forms = _FORMS_OF_DIGITS
    for form in forms:
        for some in (values[:1], values[:_FEW], values):
            times = _times(some, form)
            if not _are_plausible(times, are_numbers):
                break
        else:
            return form, times
    if are_numbers:
        numbers = _numbers(values, NumberForm())
        for unit, ms in MS_PER_UNIT.items():
            if _are_plausible(numbers * ms, True):
                return unit, numbers * ms
    return None


def _times(values: pa.Array, form: str) -> Float64s:
    return times_from_texts(Texts(values, np.arange(len(values))), form)


def _are_plausible(times: Float64s, are_numbers: bool) -> bool:
    return bool((are_epochs(times) if are_numbers else np.isfinite(times)).all())


def _width_in_text(values: pa.Array, separator: str) -> int:
    """The length of the vectors in texts: equally many numbers in each, some with fractions."""
    few = values[:_FEW]
    lists = lists_from_texts(Texts(few, np.arange(len(few))), separator)
    lengths = np.diff(lists.offsets)
    if lengths.min() != lengths.max() or lengths.min() < 2:
        return 0
    items = lists.items.values
    are_numbers = _are_numbers(items, NumberForm()) and not _all_match(items, _INTEGER)
    return int(lengths[0]) if are_numbers else 0


def _as_list(name: str, texts: Texts, separator: str, growth: float) -> Column | None:
    """The column as lists in text, if the items are shorter than the lists and repeat in them."""
    values = texts.values
    num_several = pc.sum(pc.match_substring(values, separator)).as_py()
    is_sure = num_several > 0 and _all_match(values, _BRACKETS)
    if not is_sure and num_several < 0.2 * len(values):
        return None
    lists = lists_from_texts(texts, separator)
    items = lists.items.values
    # A separator at an end, such as a blank behind an id, separates nothing.
    is_several = np.diff(lists.offsets) > 1
    if not is_sure and is_several.sum() < 0.2 * len(values):
        return None
    if not is_sure and (not _all_match(items, _ITEM) or len(items) >= 0.8 * len(values)):
        return None
    if not len(items):
        return None
    found = _of_lists(name, lists, growth, separator)
    if is_sure:
        return found
    example = values[int(np.argmax(is_several))].as_py()
    guess = f"read as lists of ids, separated by {separator!r}, such as {example!r:.80}; if these "
    return replace(found, guess=guess + "are single ids, set its kind to categorical")


def _of_lists(name: str, lists: Lists, growth: float, separator: str) -> Column:
    """A column of lists of ids."""
    items = _compact(lists.items)
    # An additional empty list for the rows without one.
    bags = Jagged(items.codes, np.append(lists.offsets, lists.offsets[-1]))
    is_missing = lists.codes < 0
    codes, lengths = gather_bags(bags, np.where(is_missing, len(bags) - 1, lists.codes))
    return Column(
        *(name, "list", lists.codes.size, items.values, codes, offsets_of(lengths)),
        num_missing=int(is_missing.sum()),
        num_total=_num_total(codes, growth),
        separator=separator,
    )
