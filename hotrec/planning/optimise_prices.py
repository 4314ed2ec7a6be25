"""The cheapest plan of every table at given prices, from a few passes over cumulative sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hotrec.cost_model.demand import Floats
from hotrec.planning.optimise_plans import (
    AMOUNTS,
    MODES,
    POOLED_CACHED,
    POOLED_DEVICE,
    POOLED_HOST,
    ROWS_CACHED,
    ROWS_DEVICE,
    ROWS_HOST,
    Integers,
    Mask,
    Problem,
)

NEVER = 1e30  # price of what is not allowed; finite, so that sums of it can be compared


@dataclass(frozen=True)
class Prices:
    """The cheapest plan of each table by what message groups it needs, at given prices.

    Args:
        value_TN: float64 (T, 4), by NEEDS; NEVER where there is no such plan.
        mode_TN: its mode, int64 (T, 4).
        hot_TN: the cut up to which rows are hot.
        held_TN: the cut up to which they are hot or held.
    """

    value_TN: Floats
    mode_TN: Integers
    hot_TN: Integers
    held_TN: Integers


# Message groups that a table can need, as positions in FLAGS: those of no hot row, of hot rows
# only, of both, and pooled.
NEEDS: tuple[tuple[int, ...], ...] = ((0,), (1,), (0, 1), (2,))


def price_plans(problem: Problem, can_TM: Mask, prices_K: Floats) -> Prices:
    """The cheapest plan of every table for each of NEEDS.

    Behind a cache the rows h that are hot and H that are hot or held must have h <= H: the best h
    up to each H is a running minimum.

    Args:
        can_TM: modes to choose from.
        prices_K: of each resource, at least 0.
    """
    units = problem.units_TAK @ prices_K
    u = {name: units[:, a : a + 1] for a, name in enumerate(AMOUNTS)}
    rows, by_rank, by_any, share = (problem.cuts_TJ4[..., i] for i in range(4))
    all_any = by_any[:, -1:]
    all_rank, every, last = by_rank[:, -1:], np.arange(problem.num_tables), rows.shape[1] - 1
    is_in = (rows >= problem.low_T[:, None]) & (rows <= problem.high_T[:, None])
    split = u["routed"] + u["hot"] * by_rank + u["union"] * by_any + u["replica"] * rows
    split = np.where(is_in, split, NEVER)
    shape = (problem.num_tables, len(NEEDS), len(MODES))
    value, hot, held = np.full(shape, NEVER), np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for mode, tier in ((ROWS_DEVICE, "device"), (ROWS_HOST, "host")):
        values = split + u[tier] * (all_rank - by_rank) + u[f"in_{tier}"]
        if tier == "host":
            values = values + u["state"] * (all_any - by_any)
        for need, cut in enumerate((np.zeros_like(every), every * 0 + last, values.argmin(axis=1))):
            value[:, need, mode] = values[every, cut]
            hot[:, need, mode] = held[:, need, mode] = cut
    start = split - u["held"] * rows - u["hit"] * by_rank - u["state"] * by_any
    end = (
        u["held"] * rows
        + (u["hit"] - u["miss"]) * by_rank
        + u["miss"] * all_rank
        + u["state"] * all_any
        + u["in_host_cached"]
    )
    until = np.minimum.accumulate(start, axis=1)
    cut = end.argmin(axis=1)
    value[:, 0, ROWS_CACHED], held[:, 0, ROWS_CACHED] = start[:, 0] + end[every, cut], cut
    value[:, 1, ROWS_CACHED] = start[:, -1] + end[:, -1]
    hot[:, 1, ROWS_CACHED] = held[:, 1, ROWS_CACHED] = last
    cut = (until + end).argmin(axis=1)
    value[:, 2, ROWS_CACHED], held[:, 2, ROWS_CACHED] = (until + end)[every, cut], cut
    hot[:, 2, ROWS_CACHED] = (start == until[every, cut][:, None]).argmax(axis=1)
    for mode, tier in ((POOLED_DEVICE, "device"), (POOLED_HOST, "host")):
        state = u["state"] * all_any if tier == "host" else 0.0
        value[:, 3, mode] = (u["sent"] + u[f"pooled_{tier}"] + u[f"in_{tier}"] + state)[:, 0]
    values = u["held"] * rows + u["pooled_hit"] * share + u["pooled_miss"] * (1 - share)
    held[:, 3, POOLED_CACHED] = values.argmin(axis=1)
    value[:, 3, POOLED_CACHED] = (
        values.min(axis=1) + (u["sent"] + u["in_host_cached"] + u["state"] * all_any)[:, 0]
    )
    value = np.where(can_TM[:, None, :], np.minimum(value, NEVER), NEVER)
    modes = value.argmin(axis=2)

    def pick(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.take_along_axis(array, modes[:, :, None], axis=2)[:, :, 0]

    return Prices(pick(value), modes, pick(hot), pick(held))
