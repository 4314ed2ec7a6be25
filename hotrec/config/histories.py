"""Specification of histories: the earlier rows of a user in a log, as lists beside each sample."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hotrec.config.fields import Rules, key


@dataclass
class UserHistorySpec:
    """The last rows of the same user that are earlier than a sample, as columns of lists."""

    by: str = key("column of the log whose rows share a history, such as the user")
    time: str = key(
        "column of the log with the times of rows, see data.source.times. Rows of a user must be "
        "in this order. A history has the rows that are strictly earlier than the sample"
    )
    max_length: int = key("how many of the last rows to keep", ge=1)
    columns: dict[str, str] = key(
        "column of the log or of a joined table whose values of these rows are a list, by the name "
        "of the list",
        {},
    )
    age: str = key(
        "name of the list of the times from these rows to the sample, in milliseconds; empty: none",
        "",
    )
    before: dict[str, str] = key(
        "column of lists, of the log or a joined table, that precedes a list of columns, cut to "
        "max_length together: what the user did before the log begins",
        {},
    )
    fill: dict[str, str] = key(
        "value of the other lists at the places of before, by the name of the list; without an "
        "entry they are missing values",
        {},
    )
    separator: str = key("for before in text files, the character between ids", " ")

    @property
    def lists(self) -> list[str]:
        """The names of its lists, in order."""
        return [*self.columns, *([self.age] if self.age else [])]

    def rules(self) -> Rules:
        names, separator = self.lists, self.separator
        yield bool(names), f"columns: expected at least one list, got {names}. Name a column."
        twice = sorted({name for name in names if names.count(name) > 1})
        yield not twice, f"columns: expected a name for each list, got {twice} twice. Rename one."
        for name in self.before:
            yield (
                name in self.columns,
                f"before.{name}: expected one of the lists of columns {list(self.columns)}, got "
                f"{name!r}. Correct the name.",
            )
        others = [name for name in names if name not in self.before] if self.before else []
        for name in self.fill:
            yield (
                name in others,
                f"fill.{name}: expected one of the lists without an entry in before {others}, got "
                f"{name!r}. Correct the name, or omit it.",
            )
        yield len(separator) == 1, f"separator: expected one character, got {separator!r}."


def fill_number(text: str) -> float:
    """A value of ``fill`` of a list of numbers; infinite if it is no finite number."""
    try:
        number = float(text)
    except ValueError:
        return math.inf
    return math.inf if math.isnan(number) else number
