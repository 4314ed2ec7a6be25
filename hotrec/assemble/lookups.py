"""Destinations of a plan's lookups: replicas on the rank of the sample, or the rows' owners."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torchrec.distributed.types import ShardingPlan

from hotrec.assemble.torchrec_plan import plan_document, rank_of_shard
from hotrec.types import Exchange, Placement, Rows, RowShares


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
        placement: Its hot rows and the exchange of the others; None for a plan of TorchRec on
            unsplit tables.
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
        if placement is not None and placement.tables[table].exchange is Exchange.ROWS:
            share, hot = RowShares(table, world_size), placement.partition.hot(table)
            for rank in range(world_size):
                rows = share.rows_of(rank, by_row.size)
                owned[rank] += int(by_row[rows.start :: rows.step].sum())
            owned -= np.bincount(share.owners(hot), by_row[hot], minlength=world_size)
            continue
        shards = shards_of.get(table, ())
        num_columns = max((s["offsets"][1] + s["sizes"][1] for s in shards), default=0)
        for shard in shards:
            (first_row, _), (num_rows, columns) = shard["offsets"], shard["sizes"]
            lookups = int(by_row[first_row : first_row + num_rows].sum())
            owned[rank_of_shard(shard)] += lookups * columns / num_columns
    if total:
        owned /= total
    return Destinations(1.0 - float(owned.sum()), tuple(float(share) for share in owned))
