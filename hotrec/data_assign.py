"""Which rank computes which sample, from the configuration and the plan."""

from __future__ import annotations

import logging

from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ShardingPlan,
)

from hotrec.config.groups import OrderAssign
from hotrec.config.roots import Config
from hotrec.data.locality import ByOwner, Shard
from hotrec.types import Exchange, Placement, Schema, Sharding

logger = logging.getLogger(__name__)


def owned_tables(placement: Placement) -> list[str]:
    """Tables with cold rows that travel to the ranks that read them.

    Pooled vectors travel for every sample that is elsewhere, whatever it reads, so tables that are
    exchanged pooled are not among them.
    """
    partition = placement.partition
    return [
        name
        for name, num_rows in partition.num_rows.items()
        if partition.num_hot(name) < num_rows and placement.tables[name].exchange is Exchange.ROWS
    ]


def check_assign(config: Config, placement: Placement | None) -> None:
    """Refuse order.assign=by_owner where no row has an owner.

    Args:
        placement: as settled; None for TorchRec's plans.

    Raises:
        ValueError: the same on every rank.
    """
    if config.order.assign is not OrderAssign.by_owner:
        return
    if placement is not None and owned_tables(placement):
        return
    found = "TorchRec's own plan"
    if placement is not None:
        found = f"{placement.partition.policy}: none"
    raise ValueError(
        "order.assign: expected a placement with cold rows that are exchanged as rows for "
        f"by_owner, got {found}. Choose order.assign=as_read, or a placement such as "
        "placement=coverage."
    )


def choose_assign(
    config: Config, schema: Schema, placement: Placement | None, plan: ShardingPlan
) -> ByOwner | None:
    """What assigns the training samples, None for as they are read.

    Args:
        placement: that passed ``check_assign``.
        plan: by which the tables are sharded.
    """
    if config.order.assign is not OrderAssign.by_owner:
        return None
    assert placement is not None
    logger.info(
        "order.assign=by_owner: each training sample goes to the rank that holds most of its cold "
        "rows; loader workers read the ids of the whole global batch"
    )
    return by_owner(schema, placement, plan)


def by_owner(schema: Schema, placement: Placement, plan: ShardingPlan) -> ByOwner:
    """``ByOwner`` for the tables of a plan.

    Raises:
        RuntimeError: if the plan shards a table neither row-wise nor table-wise.
    """
    shards = {table: _shards(table, plan) for table in owned_tables(placement)}
    hot_rows = {table: placement.partition.hot(table) for table in shards}
    return ByOwner(schema, shards, hot_rows)


def _shards(table: str, plan: ShardingPlan) -> list[Shard]:
    """The shards that hold rows, in the order of the rows."""
    found = [
        (shard, sharding.sharding_type)
        for module_plan in plan.plan.values()
        if isinstance(module_plan, EmbeddingModuleShardingPlan)
        for name, sharding in module_plan.items()
        if name == table and isinstance(sharding.sharding_spec, EnumerableShardingSpec)
        for shard in sharding.sharding_spec.shards
    ]
    types = {sharding_type for _, sharding_type in found}
    if len(types) != 1 or not types <= {Sharding.ROW_WISE.value, Sharding.TABLE_WISE.value}:
        raise RuntimeError(
            f"plan table {table}: expected it row-wise or table-wise once, got "
            f"{sorted(types) or 'no shards'}. Use the pinned torchrec (see `hotrec doctor`)."
        )
    shards = []
    for shard, _ in found:
        assert shard.placement is not None, table
        if shard.shard_sizes[0]:
            shards.append(Shard(shard.shard_offsets[0], shard.placement.rank()))
    return sorted(shards, key=lambda shard: shard.first_row)
