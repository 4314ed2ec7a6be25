"""Smaller hot sets out of a given one: candidates where the optimum itself is not searched for.

The optimiser's model is that of a pipeline in line, linear in what a rank does. With look-ahead the
step is not: fewer hot rows make the hot exchange shorter, which joins two steps, while cold rows
travel under computation as long as the link keeps up. So the best hot set is smaller, and is taken
from a few shares of the one that was found, by exact prediction. That proves nothing about others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from hotrec.cost_model.demand import TableDemand, take_rows

# Of the hot rows that were found; what they are now is a candidate anyway.
HOT_SHARES = (0.0, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4)


def hottest_share(
    demands: Sequence[TableDemand],
    num_hot: Mapping[str, int],
    share: float,
    fixed: Collection[str] = (),
) -> dict[str, int]:
    """The rows with most lookups per byte among the hot rows of all tables.

    Args:
        num_hot: hot rows by table.
        share: how many of them to keep, 0..1, rounded down.
        fixed: tables that keep all of theirs and do not count.

    Returns:
        Hot rows by table, of every table.
    """
    kept = {d.name: num_hot.get(d.name, 0) for d in demands}
    free = [d for d in demands if d.name not in fixed]
    rows = [take_rows(d, kept[d.name]) for d in free]
    if not sum(part.size for part in rows):  # no lookup was seen: none of them is hottest
        return kept | dict.fromkeys((d.name for d in free), 0)
    density = np.concatenate([d.probs_G * d.lookups_per_sample / d.row_bytes for d in free])
    table = np.repeat(np.arange(len(free)), [part.size for part in rows])
    order = np.argsort(-density, kind="stable")
    most = int(share * sum(kept[d.name] for d in free))
    ends = np.cumsum(np.concatenate(rows)[order])
    taken = np.diff(np.minimum(ends, most), prepend=0.0)
    by_table = np.bincount(table[order], weights=taken, minlength=len(free))
    return kept | {d.name: int(n) for d, n in zip(free, by_table, strict=True)}
