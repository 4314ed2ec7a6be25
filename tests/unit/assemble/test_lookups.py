"""Where the lookups of a plan go: to replicas, or to the ranks that own the rows."""

from __future__ import annotations

import numpy as np
import pytest
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingPlan,
    ShardMetadata,
)

from hotrec.assemble.lookups import destinations
from hotrec.types import Partition, Placement, RowShares

COUNTS = {
    "rows": np.array([40, 10, 0, 20, 30]),  # row-wise, three rows and two
    "whole": np.array([5, 15]),  # on rank 1
    "wide": np.array([60, 20]),  # its columns: three on rank 0, one on rank 1
    "copied": np.array([1, 99]),  # data-parallel
    "hot": np.array([50, 50]),  # not in the plan: all rows are hot
}


def sharding(*shards: tuple[int, int, int, int, int]) -> ParameterSharding:
    """Shards by first row and column, rows, columns, and rank."""
    found = [
        ShardMetadata([row, column], [rows, columns], f"rank:{rank}/cpu")
        for row, column, rows, columns, rank in shards
    ]
    spec = EnumerableShardingSpec(found) if found else None
    return ParameterSharding("any", "fused", [s[4] for s in shards], spec)


PLAN = ShardingPlan(
    {
        "model.ebc": EmbeddingModuleShardingPlan(
            {
                "rows": sharding((0, 0, 3, 4, 0), (3, 0, 2, 4, 1)),
                "whole": sharding((0, 0, 2, 4, 1)),
                "wide": sharding((0, 0, 2, 3, 0), (0, 3, 2, 1, 1)),
                "copied": sharding(),
            }
        )
    }
)


def test_rows_of_torchrecs_plans_are_read_where_their_shard_is() -> None:
    found = destinations(PLAN, None, COUNTS, 2)
    assert found.owned == pytest.approx((110 / 400, 90 / 400))
    assert found.replicated == pytest.approx(200 / 400)


@pytest.mark.parametrize("hot", [{}, {"rows": [0, 4], "wide": [0]}])
def test_cold_rows_are_read_by_their_owners(hot: dict[str, list[int]]) -> None:
    everything = hot | {"hot": [0, 1]}
    partition = Partition(
        {name: counts.size for name, counts in COUNTS.items()},
        {name: np.array(rows) for name, rows in everything.items()},
    )
    expected = np.zeros(2)
    for name, counts in COUNTS.items():
        for row in set(range(counts.size)) - set(everything.get(name, ())):
            expected[RowShares(name, 2).owners(row)] += counts[row]
    found = destinations(PLAN, Placement.alike(partition), COUNTS, 2)
    assert found.owned == pytest.approx(expected / 400)
    assert found.replicated == pytest.approx(1 - expected.sum() / 400)
