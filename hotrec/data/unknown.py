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
from hotrec.data.columns import Lists, Texts
from hotrec.data.gather import gather_bags
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

    @staticmethod
    def of(column: str, raw: Texts | Lists, rows: Integers | Jagged) -> UnknownIds:
        """The counts of one column, with the arguments of ``show`` of ``encode_inputs``."""
        return UnknownIds({column: count_unknown(raw, rows)})

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


def count_unknown(
    raw: Texts | Lists, rows: Integers | Jagged, is_counted: Mask | None = None
) -> Rows:
    """Count the ids of a column for ``UnknownIds``, int64 (2,).

    Args:
        raw: The column as it was read.
        rows: The rows of its ids; row 0 is for unknown ones.
        is_counted: Whether to count each sample; None for all.
    """
    if isinstance(raw, Lists):
        assert isinstance(rows, Jagged)
        has_id = np.ones(rows.values.size, bool)
        is_item = _is_present(raw.items)
        if not is_item.all():
            bags = Jagged(is_item.astype(np.int64), np.append(raw.offsets, raw.offsets[-1]))
            samples = np.where(raw.codes < 0, raw.offsets.size - 1, raw.codes)
            has_id = gather_bags(bags, samples)[0].astype(bool)
        if is_counted is not None:
            has_id &= np.repeat(is_counted, np.diff(rows.offsets))
        values = rows.values
    else:
        assert not isinstance(rows, Jagged)
        has_id = _is_present(raw)
        if is_counted is not None:
            has_id &= is_counted
        values = rows
    counts = [np.count_nonzero(has_id), np.count_nonzero(has_id & (values == 0))]
    return np.array(counts, np.int64)


def _is_present(texts: Texts) -> Mask:
    """Whether each value is one, and not missing."""
    is_present: Mask = texts.codes >= 0
    if texts.values.null_count:
        is_value = texts.values.is_valid().to_numpy(zero_copy_only=False)
        is_present &= np.append(is_value, False)[texts.codes]
    return is_present


def unknown_ids_of(dataset: Dataset) -> dict[str, UnknownIds]:
    """The counts of ``prepare`` for each held-out split; empty if it recorded none."""
    with dataset.artifact.parsing():
        recorded = dataset.artifact.content["source"].get("unknown_ids", {})
        return {s: UnknownIds.from_json(recorded[s]) for s in HELD_OUT if s in recorded}
