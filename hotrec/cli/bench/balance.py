"""How evenly a plan spreads the work of serving rows over the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torchrec.distributed.types import ShardingPlan

from hotrec.planner import plan_document


def served_values(
    plan: ShardingPlan, rows_by_table: Mapping[str, Sequence[np.ndarray]], world_size: int
) -> list[int]:
    """Floats that each rank looks up for others and itself in one step.

    Args:
        plan: of the case.
        rows_by_table: by sharded table one int64 array per asking rank: the rows it asks for. Each
            is served once; for unsplit (pooled) tables these are all ids, with repetition.

    Returns:
        One number per rank; replicated tables are served by nobody.
    """
    served = [0] * world_size
    for tables in plan_document(plan).values():
        for table, facts in tables.items():
            for shard in facts["shards"]:
                (first_row, _), (num_rows, num_columns) = shard["offsets"], shard["sizes"]
                rank = _rank(shard["placement"])
                for rows in rows_by_table.get(table, ()):
                    is_here = (rows >= first_row) & (rows < first_row + num_rows)
                    served[rank] += int(is_here.sum()) * num_columns
    return served


def _rank(placement: str) -> int:
    """``rank:1/cpu`` -> 1."""
    return int(placement.split("/")[0].removeprefix("rank:"))


def imbalance(served: Sequence[int]) -> float | None:
    """Largest over mean; 1 is even; None where nothing is served."""
    mean = sum(served) / len(served)
    return max(served) / mean if mean else None
