"""The types and units of a log's columns, as far as they decide what is read of a value.

A dataset records them, so that every file of a log, files to append or to score, and records keep
those that the model was trained on. Types that are read alike are one: integers of any width,
texts in any storage, times in any unit of a type of times.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hotrec.config.data import TimeUnit
from hotrec.types import Float64s

Mask = npt.NDArray[np.bool_]

# 1990 to 2100, in milliseconds since 1970.
_FROM_MS, _UNTIL_MS = 6.3e11, 4.1e12
_MS_PER_DAY, _MS_PER_YEAR = 8.64e7, 3.15e10
# Times of 1990 to 2100 such as 202405011230, as milliseconds.
_FROM_DIGITS, _UNTIL_DIGITS = 1.99e11, 2.1e11
_UNITS_APART = (1e-9, 1e-6, 1e-3, 1e3, 1e6, 1e9)
_CLOCK, _ZONE = r"[Tt ][0-9]", r":.*(Z|z|UTC|GMT|[+-][0-9:]+)$"
# Texts that are also those of integers, booleans, dates and times of day.
_OF_OTHERS = r"^(0|-?[1-9][0-9]*)(\.0*)?$|^true$|^false$|^[0-9]{4}-[0-9]{2}-|^[0-9]{2}:[0-9]{2}:"


class ValueType(NamedTuple):
    """The type of a column's values, what was seen of it, and the file that has it."""

    name: str
    seen: str
    file: str


class ValueTypes(dict[str, ValueType]):
    """Types by column; adding those of other files checks that they agree.

    A type includes those whose names begin with its own: "time" a "time without zone", "" any.
    """

    def __add__(self, other: ValueTypes) -> ValueTypes:
        self.check(other)
        both = {
            column: min(self[column], other[column], key=lambda of: len(of.name))
            for column in self.keys() & other.keys()
        }
        return ValueTypes({**other, **self, **both})

    def check(self, other: ValueTypes) -> None:
        """Check that the columns of other files have the same types.

        Raises:
            ValueError: If one has another.
        """
        for column in sorted(self.keys() & other.keys()):
            own, found = self[column], other[column]
            if not (own.name.startswith(found.name) or found.name.startswith(own.name)):
                raise ValueError(
                    f"{found.file} column {column}: expected {own.name}, as in {own.file}, got "
                    f"{found.name}{found.seen}. Convert the column: it must keep its type and unit."
                )

    def to_json(self) -> dict[str, str]:
        """Their names, for ``recorded``."""
        return {column: self[column].name for column in sorted(self)}

    @staticmethod
    def recorded(document: Mapping[str, str], path: Path) -> ValueTypes:
        """Those that a dataset recorded."""
        return ValueTypes({of: ValueType(name, "", f"{path}") for of, name in document.items()})


def type_of_ids(kind: pa.DataType, values: pa.Array, *, may_be_lists: bool) -> str | None:
    """The type of ids; None if there are none.

    Args:
        kind: Arrow's type.
        values: The distinct ones, as texts.
        may_be_lists: Whether texts may be lists of ids, which have no type.
    """
    values = values.drop_null()
    if not len(values):
        return None
    if pa.types.is_boolean(kind):
        return "boolean"
    if pa.types.is_temporal(kind):
        return f"{kind}"
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return "integer"
    if may_be_lists:
        return None
    return "" if pc.any(pc.match_substring_regex(values, _OF_OTHERS)).as_py() else "text"


def type_of_times(
    kind: pa.DataType, values: pa.Array | None, times: Float64s, form: str
) -> str | None:
    """The type of times; None if there are none.

    Args:
        kind: Arrow's type.
        values: The distinct ones, if they are texts.
        times: Them in milliseconds since 1970.
        form: See ``hotrec.config.data.SourceSpec``.
    """
    if not np.isfinite(times).any():
        return None
    if pa.types.is_boolean(kind):
        return "boolean"
    if pa.types.is_temporal(kind):
        return _time(not pa.types.is_date(kind), getattr(kind, "tz", None) is not None)
    if form != TimeUnit.iso or values is None:
        if are_epochs(times).any():
            return "time"
        is_number = (np.abs(times) > 1).any()  # and not a mark of missing ones
        return "number" if is_number and not are_older(times).any() else None
    values = values.drop_null()
    clocks, zones = (
        pc.sum(pc.match_substring_regex(values, part)).as_py() for part in (_CLOCK, _ZONE)
    )
    if 0 < clocks < len(values):
        return ""
    return "time" if 0 < zones < len(values) else _time(clocks > 0, zones > 0)


def _time(has_clock: bool, has_zone: bool) -> str:
    return f"time {'with' if has_zone else 'without'} zone" if has_clock else "date"


def are_epochs(times: Float64s) -> Mask:
    """Whether times, in milliseconds since 1970, are of these days."""
    return (times > _FROM_MS) & (times < _UNTIL_MS)


def are_older(times: Float64s) -> Mask:
    """Whether times, in milliseconds since 1970, may be of 1950 to 1990.

    Those of these days in minutes, hours, days or digits would be of 1970 and 1976.
    """
    is_of_digits = (times > _FROM_DIGITS) & (times < _UNTIL_DIGITS)
    return (np.abs(times) > _MS_PER_YEAR) & (np.abs(times) < _FROM_MS) & ~is_of_digits


def times_of_another_unit(times: Float64s) -> Mask:
    """Whether times, in milliseconds since 1970, are of another unit if others are of these days.

    They are if they are of these days in another unit, or within a year of 1970: a day, if others
    are older.
    """
    nearest = _MS_PER_DAY if are_older(times).any() else _MS_PER_YEAR
    is_other = (np.abs(times) > 1) & (np.abs(times) < nearest)
    for factor in _UNITS_APART:
        with np.errstate(over="ignore"):
            is_other |= are_epochs(times * factor)
    return is_other
