"""Unknown ids, by column: in held-out samples and in files to score.

A value that is not in the vocabulary reads row 0, because it was unseen or too rare in training. A
few are normal; if most of a column are unknown, its values have another format, or belong to other
users and items. Missing values do not count, and hashed ids and row numbers always have rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hotrec.data.chunks import HELD_OUT, Dataset, Integers, Jagged
from hotrec.types import Rows

# Minimum shares for which columns are named in a line of text.
NOTABLE_FRAC = 0.05
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class UnknownIds:
    """Counts of the ids of each column that reads a vocabulary; instances add up.

    Args:
        counts: The number of ids and of unknown ones, int64 (2,), by column.
    """

    counts: Mapping[str, Rows] = field(default_factory=dict)

    def __add__(self, other: UnknownIds) -> UnknownIds:
        counts = dict(self.counts)
        for column, more in other.counts.items():
            counts[column] = counts.get(column, np.zeros(2, np.int64)) + more
        return UnknownIds(counts)

    @property
    def fracs(self) -> dict[str, float]:
        """The share of unknown ids, by column that has ids, the largest first."""
        found = {n: int(unknown) / int(ids) for n, (ids, unknown) in self.counts.items() if ids}
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def text(self, where: str, least: float = NOTABLE_FRAC) -> str | None:
        """A line that names the columns with notable shares; None if there are none.

        Args:
            where: The source of the ids, such as "valid" or the name of a file.
            least: The minimum share for which a column is named.
        """
        shares = [f"{name} {share:.1%}" for name, share in self.fracs.items() if share >= least]
        if not shares:
            return None
        return f"{where}: unknown ids (unseen or rare in training): {', '.join(shares)}"

    def to_json(self) -> dict[str, dict[str, int | float]]:
        """The form in manifests and in the lines of commands, by column."""
        return {
            column: {
                "num_ids": int(ids),
                "num_unknown": int(unknown),
                "unknown_frac": int(unknown) / int(ids) if ids else 0.0,
            }
            for column, (ids, unknown) in self.counts.items()
        }

    @staticmethod
    def from_json(document: Mapping[str, Mapping[str, int | float]]) -> UnknownIds:
        """From the result of ``to_json``."""
        names = ("num_ids", "num_unknown")
        return UnknownIds(
            {
                column: np.array([int(of[name]) for name in names], np.int64)
                for column, of in document.items()
            }
        )


def count_unknown(is_id: Mask, rows: Integers | Jagged, is_counted: Mask | None = None) -> Rows:
    """Count the ids of a column for ``UnknownIds``, int64 (2,).

    Args:
        is_id: Whether each id, or each item of all lists, is one, and not missing.
        rows: Their rows; row 0 is for unknown ones.
        is_counted: Whether to count each sample; None for all.
    """
    values = rows.values if isinstance(rows, Jagged) else rows
    if is_counted is not None:
        is_id = is_id & np.repeat(
            is_counted, np.diff(rows.offsets) if isinstance(rows, Jagged) else 1
        )
    counts = [np.count_nonzero(is_id), np.count_nonzero(is_id & (values == 0))]
    return np.array(counts, np.int64)


def unknown_ids_of(dataset: Dataset) -> dict[str, UnknownIds]:
    """The counts of ``prepare`` for each held-out split; empty if it recorded none."""
    with dataset.artifact.parsing():
        recorded = dataset.artifact.content["source"].get("unknown_ids", {})
        return {s: UnknownIds.from_json(recorded[s]) for s in HELD_OUT if s in recorded}
