"""Times of samples: whether a log is ordered by time, and how many samples each day has.

``prepare`` determines both in its first pass, which maps a position in the training split, a number
of samples, to a time. Without a column of times each file of a log counts as a day.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hotrec.artifact import ArtifactError
from hotrec.data.chunks import SPLITS, Dataset, Integers
from hotrec.types import Float64s, Rows

_MS_PER_HOUR, _MS_PER_DAY = 3_600_000, 86_400_000
_LARGEST_DAY = 10**9


@dataclass(frozen=True)
class Times:
    """The times of consecutive samples of a log; instances add up in the order of the log.

    All but the days refer to the training split, the only one whose order matters.

    Args:
        first_ms: The first time, in milliseconds since 1970.
        last_ms: The last time.
        first_at: The file and the line of the first sample.
        unordered_at: The file and the line of the first sample that is earlier than one before it.
        days: Samples of each split by day, int64 (3,), as in SPLITS.
    """

    first_ms: float = math.inf
    last_ms: float = -math.inf
    first_at: str = ""
    unordered_at: str | None = None
    days: Mapping[str, Rows] = field(default_factory=dict)

    @staticmethod
    def of(
        times: Float64s, split_of: Integers, lines: Rows, file: str, utc_offset_h: float
    ) -> Times:
        """The times of a block of a file, one sample or more.

        Args:
            times: float64 (n,), in milliseconds since 1970.
            split_of: integers (n,), the split of each sample.
            lines: int64 (n,), the line of each sample.
            file: The name of the file.
            utc_offset_h: Hours to add to UTC for the days.
        """
        numbers = np.floor((times + utc_offset_h * _MS_PER_HOUR) / _MS_PER_DAY)
        # A split may use other numbers than times.
        numbers = np.clip(numbers, -_LARGEST_DAY, _LARGEST_DAY).astype(np.int64)
        days = {
            str(np.datetime64(int(number), "D")): count_by_split(split_of[numbers == number])
            for number in np.unique(numbers)
        }
        is_train = split_of == SPLITS.index("train")
        if not is_train.any():
            return Times(days=days)
        times, lines = times[is_train], lines[is_train]
        is_back = times[1:] < times[:-1]
        return Times(
            float(times[0]),
            float(times.max()),
            f"{file} line {lines[0]}",
            f"{file} line {lines[1 + int(np.argmax(is_back))]}" if is_back.any() else None,
            days,
        )

    def __add__(self, other: Times) -> Times:
        is_back = other.first_ms < self.last_ms
        days = dict(self.days)
        for day, counts in other.days.items():
            days[day] = days.get(day, 0) + counts
        return Times(
            min(self.first_ms, other.first_ms),
            max(self.last_ms, other.last_ms),
            self.first_at or other.first_at,
            self.unordered_at or (other.first_at if is_back else other.unordered_at),
            days,
        )

    @staticmethod
    def from_json(source: Mapping[str, Any]) -> Times:
        """The times recorded in a dataset, of the training split only."""
        time = {name: value for name, value in source.get("time", {}).items() if name != "column"}
        days = {day["day"]: np.array([day["train"], 0, 0]) for day in source.get("days", ())}
        return Times(**time, days={day: counts for day, counts in days.items() if counts.any()})

    def to_json(self, column: str | None) -> dict[str, Any]:
        """The record of ``prepare``; ``column`` has the times, if there is one."""
        time = {"column": column, "first_ms": self.first_ms, "last_ms": self.last_ms}
        # A list, because JSON in a manifest sorts keys.
        days = [day_document(day, counts) for day, counts in self.days.items()]
        return {
            **({"time": {**time, "unordered_at": self.unordered_at}} if column is not None else {}),
            **({"days": days} if self.unordered_at is None else {}),
        }


def day_document(day: str, counts: Rows) -> dict[str, Any]:
    """A day in a manifest; ``counts`` are its samples by split, as in SPLITS."""
    return {"day": day, **dict(zip(SPLITS, counts.tolist(), strict=True))}


def count_by_split(split_of: Integers) -> Rows:
    """Samples of each split, int64 (3,), as in SPLITS."""
    return np.bincount(split_of, minlength=len(SPLITS))


@dataclass(frozen=True)
class Day:
    """A day of a split, with its samples, 1 or more."""

    name: str
    num_samples: int


def days_of(dataset: Dataset, split: str) -> tuple[Day, ...]:
    """The days of a split, in the order of its samples.

    Raises:
        ArtifactError: If the dataset does not record them.
    """
    with dataset.artifact.parsing():
        recorded = dataset.artifact.content["source"].get("days", [])
        days = tuple(Day(day["day"], day[split]) for day in recorded if day.get(split))
        if sum(day.num_samples for day in days) != dataset.num_samples(split):
            raise ArtifactError(
                f"{dataset.artifact.path}: expected the days of the {dataset.num_samples(split)} "
                f"samples of split {split}, got {len(days)} with "
                f"{sum(day.num_samples for day in days)} samples. Prepare the log again, sorted "
                "by time."
            )
        return days


def check_time_order(dataset: Dataset) -> bool:
    """Check that the dataset's samples are recorded as ordered by time.

    Raises:
        ArtifactError: If they are recorded as unordered.
    """
    with dataset.artifact.parsing():
        time = dataset.artifact.content["source"].get("time", {})
        unordered_at = time.get("unordered_at")
        if unordered_at is not None:
            raise ArtifactError(
                f"{dataset.artifact.path}: expected samples in order of {time['column']}, got an "
                f"earlier one at {unordered_at}. Sort the log by {time['column']}, list its files "
                "in order of time and prepare it again, or set order=shuffled."
            )
        return bool(time) or "days" in dataset.artifact.content["source"]
