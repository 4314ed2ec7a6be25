"""Destinations of a plan's lookups: replicas on the rank of the sample, or the rows' owners."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torchrec.distributed.types import ShardingPlan

from hotrec.assemble.torchrec_plan import plan_document, rank_of_shard
from hotrec.types import Placement, RowOrder, Rows


@dataclass(frozen=True)
class Destinations:
    """Shares of all lookups, if every rank's samples are alike.

    Args:
        replicated: Share served by replicas on the rank of the sample: hot rows and data-parallel
            tables.
        owned: Share served by the shards of each rank, for all ranks; with ``replicated`` they
            add up to 1.
    """

    replicated: float
    owned: tuple[float, ...]


def destinations(
    plan: ShardingPlan, placement: Placement | None, counts: Mapping[str, Rows], world_size: int
) -> Destinations:
    """The destinations of a profile's lookups under a plan.

    A lookup of a column-sharded row counts at each of its ranks by that rank's share of columns.

    Args:
        plan: The plan of the tables; one that is not in it is replicated.
        placement: Its hot rows and the order of the others; None for a plan of TorchRec on unsplit
            tables.
        counts: Lookups of each row, int64 (R,) by table.
        world_size: Number of ranks W.
    """
    owned, total = np.zeros(world_size), 0
    shards_of = {
        table: facts["shards"]
        for tables in plan_document(plan).values()
        for table, facts in tables.items()
    }
    for table, by_row in counts.items():
        total += int(by_row.sum())
        order, hot_rows = RowOrder(by_row.size, is_spread=False), np.empty(0, np.int64)
        if placement is not None:
            order, hot_rows = placement.row_order(table), placement.partition.hot(table)
        stored_hot = order.stored(hot_rows)
        shards = shards_of.get(table, ())
        num_columns = max((s["offsets"][1] + s["sizes"][1] for s in shards), default=0)
        for shard in shards:
            (first_row, _), (num_rows, columns) = shard["offsets"], shard["sizes"]
            end_row = first_row + num_rows
            hot = hot_rows[(stored_hot >= first_row) & (stored_hot < end_row)]
            of_shard = by_row[order.rows_at(first_row, end_row)]
            lookups = int(of_shard.sum()) - int(by_row[hot].sum())
            owned[rank_of_shard(shard)] += lookups * columns / num_columns
    if total:
        owned /= total
    return Destinations(1.0 - float(owned.sum()), tuple(float(share) for share in owned))
