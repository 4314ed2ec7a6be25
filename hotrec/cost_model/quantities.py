"""The QUANTITIES of a step, from demands and a placement or a plan of TorchRec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from hotrec.cost_model.caches import (
    CachedTable,
    CacheShares,
    num_slots,
    shared_cache_shares,
)
from hotrec.cost_model.costs import Costs, World
from hotrec.cost_model.demand import (
    Floats,
    TableDemand,
    expected_cold_of_any,
    expected_distinct,
    expected_of_host,
    expected_urgent,
)
from hotrec.cost_model.step import (
    BYTES_OF,
    BYTES_PER_FLOAT,
    BYTES_PER_ID,
    QUANTITIES,
    StepPrediction,
    Workload,
    predict_step,
)
from hotrec.types import (
    DEFAULT_LOAD_FRAC,
    STAGES,
    Exchange,
    PipelineSpec,
    Sharding,
    TablePlacement,
    Tier,
)

BYTES_PER_LENGTH = 4
# For tables without a cache; these shares are not read.
ALL_HIT = CacheShares(1.0, 0.0)
REPLICATED = "data_parallel"
# Kinds of TorchRec's sharding (ShardingType), and whether they split rows, and columns.
KINDS: Mapping[str, tuple[bool, bool]] = {
    REPLICATED: (False, False),
    "table_wise": (False, False),
    "row_wise": (True, False),
    "column_wise": (False, True),
    "table_row_wise": (True, False),
    "table_column_wise": (False, True),
    "grid_shard": (True, True),
}


@dataclass(frozen=True)
class TableSharding:
    """How a TorchRec plan shards an unsplit table.

    Args:
        kind: One of KINDS.
        ranks: Owner of each shard, by columns, then by rows; not read if data-parallel.
        tier: Tier of the shards.
        cache_load_frac: Cached fraction of the rows in HOST_CACHED; None for FBGEMM's 0.2.
        is_prefetched: Whether TorchRec's prefetch pipeline fills the cache of HOST_CACHED.

    Raises:
        ValueError: If the kind is unknown, or a table that is not data-parallel has no owner.
    """

    kind: str
    ranks: tuple[int, ...]
    tier: Tier = Tier.DEVICE
    cache_load_frac: float | None = None
    is_prefetched: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"sharding kind: expected one of {sorted(KINDS)}, got {self.kind!r}.")
        if self.kind != REPLICATED and not self.ranks:
            raise ValueError(f"sharding {self.kind}: expected the rank of each shard, got none.")

    @property
    def is_replicated(self) -> bool:
        return self.kind == REPLICATED

    def blocks(self, world: World) -> list[tuple[int, ...]]:
        """Returns the owners of each equal part of the columns, which split its rows."""
        has_rows, has_columns = KINDS[self.kind]
        if not has_columns:
            return [self.ranks]
        size = world.ranks_per_host if has_rows else 1
        return [self.ranks[i : i + size] for i in range(0, len(self.ranks), size)]


def cached_rows(demand: TableDemand, placed: TablePlacement | TableSharding) -> float:
    """Slots of the table's rows, or of its device caches, over all ranks; 0 if it has none.

    Raises:
        ValueError: If a placement with slots lacks their number.
    """
    if placed.tier not in (Tier.HOST_CACHED, Tier.CACHED):
        return 0.0
    load_frac = placed.cache_load_frac
    if load_frac is None and isinstance(placed, TableSharding):
        load_frac = DEFAULT_LOAD_FRAC
    if load_frac is None or not 0 <= load_frac <= 1:
        raise ValueError(
            f"placement table {demand.name} cache_load_frac: expected a fraction in 0..1 with the "
            f"tier {placed.tier.value}, got {load_frac}."
        )
    return load_frac * demand.num_rows


def hot_cold_quantities(
    demands: Sequence[TableDemand],
    num_hot: Mapping[str, int],
    tables: Mapping[str, TablePlacement],
    world: World,
    batch_size: int,
) -> dict[str, float]:
    """Returns the quantities of the mean rank in a step with hot and cold rows.

    The hot rows of a table are its most-read rows. Tables of one dimension share messages: one
    group for tables that exchange rows, hot and cold, and one for tables that exchange pooled
    vectors.

    Args:
        num_hot: Hot rows of each table, 0 where absent.
        tables: The placement of every table.
        batch_size: Batch B of a rank, the one that the demands were built for.

    Returns:
        Every key of QUANTITIES.

    Raises:
        ValueError: If a table has a pooled exchange of unpooled features.
    """
    done = dict.fromkeys(QUANTITIES, 0.0)
    dims: dict[str, set[int]] = {name: set() for name in ("cold", "hot", "pooled")}
    for demand in demands:
        placed, hot = tables[demand.name], num_hot.get(demand.name, 0)
        is_pooled = placed.exchange is Exchange.POOLED
        if is_pooled and not demand.is_pooled:
            raise ValueError(
                f"placement table {demand.name} exchange: expected rows, since its features are "
                "not pooled, got pooled. Use Exchange.ROWS."
            )
        dims["pooled"] |= {demand.dim} if is_pooled else set()
        dims["hot"] |= {demand.dim} if hot else set()
        dims["cold"] |= {demand.dim} if hot < demand.num_rows and not is_pooled else set()
        found = table_quantities(demand, placed, read_rows(demand, hot), world, batch_size)
        for name, number in found.items():
            done[name] += number
    return {**done, **{f"{name}_groups": float(len(of)) for name, of in dims.items()}}


Number = TypeVar("Number", float, Floats)


@dataclass(frozen=True)
class ReadRows(Generic[Number]):
    """Distinct rows of a table that a step reads, of one split or of many (arrays).

    Args:
        hot_of_rank: Hot rows that a rank reads.
        hot_of_any: Hot rows that any rank reads.
        cold: Cold rows that a rank reads.
        cold_of_any: Cold rows that any rank reads.
        urgent: Cold rows that a rank reads, and any rank in the next step.
        hot_of_host: Hot rows that a host reads; 0 with one rank per host, or one host.
        cold_of_host: Cold rows that a host reads; 0 likewise.
        urgent_of_host: Of these, those that any rank reads in the next step; 0 likewise.
    """

    hot_of_rank: Number
    hot_of_any: Number
    cold: Number
    cold_of_any: Number
    urgent: Number
    hot_of_host: Number
    cold_of_host: Number
    urgent_of_host: Number


def read_rows(demand: TableDemand, num_hot: int) -> ReadRows[float]:
    """The rows that a step reads if the ``num_hot`` most-read rows are hot."""
    of_rank, cold, of_any = expected_distinct(demand, num_hot)
    cold_of_any = expected_cold_of_any(demand, num_hot)
    urgent = expected_urgent(demand, num_hot)
    host = expected_of_host(demand, num_hot)
    of_host = (0.0, 0.0, 0.0) if host is None else (host.hot, host.cold, host.urgent)
    return ReadRows(of_rank, of_any, cold, cold_of_any, urgent, *of_host)


def table_quantities(
    demand: TableDemand,
    placed: TablePlacement,
    rows: ReadRows[Number],
    world: World,
    batch_size: int,
) -> dict[str, Number]:
    """Returns the quantities of one table on the mean rank, without the groups that it shares.

    Prediction and search both use these formulas.

    Args:
        demand: The table.
        placed: The placement of its cold rows. Look-ahead fills slots before they are read.
        rows: The rows that a step reads.
        world: Ranks and hosts.
        batch_size: Batch B of a rank.
    """
    num_ids, row_bytes = batch_size * demand.lookups_per_sample, BYTES_PER_FLOAT * demand.dim
    found: dict[str, Any] = {}

    def add(items: str, number: Any) -> None:
        found[items] = number
        found[BYTES_OF[items]] = number * row_bytes

    is_pooled = placed.exchange is Exchange.POOLED
    if is_pooled:  # the mean rank owns a fraction 1 / W of them
        add("pooled_ids_device", num_ids)
        others = (world.num_ranks - 1) / world.num_ranks
        num_bags = batch_size * demand.num_columns
        num_bags *= world.num_ranks if placed.sharding is Sharding.ROW_WISE else 1
        found["pooled_sent_ids"] = others * _with_lengths(num_ids, num_bags)
        found["pooled_sent_bytes"] = others * num_bags * row_bytes
    else:
        add("cold_rows", rows.cold)
        add("lookups", num_ids)
        add("urgent_rows", rows.urgent)
        add("hot_rows", rows.hot_of_rank)
        add("union_rows", rows.hot_of_any)
        add("relayed_rows", rows.cold_of_host / world.ranks_per_host)
        add("relayed_urgent_rows", rows.urgent_of_host / world.ranks_per_host)
        add("relayed_hot_rows", rows.hot_of_host / world.ranks_per_host)
    return found


def between_hosts_bound_bytes(
    demands: Sequence[TableDemand], world: World, num_dense_values: int
) -> float:
    """The minimum bytes between hosts of the mean rank in an exact step.

    It is that of ``lower_bound_between_hosts_bytes`` in ``hotrec.runtime.traffic``, for the
    expected distinct rows of a host: 2 (U D + n) 4 (H-1)/H, which its G ranks share.
    """
    num_values = float(num_dense_values)
    for demand in demands:
        of_host = expected_of_host(demand)
        num_rows = expected_distinct(demand)[1] if of_host is None else of_host.cold
        num_values += demand.dim * num_rows
    rail_frac = (world.num_hosts - 1) / world.num_hosts
    return 2 * num_values * BYTES_PER_FLOAT * rail_frac / world.ranks_per_host


def host_state_bytes(demand: TableDemand) -> int:
    """Bytes of a row's optimizer state in a host tier; 0 if it is one float, on the device."""
    state_bytes = demand.row_bytes - BYTES_PER_FLOAT * demand.dim
    return state_bytes if state_bytes > BYTES_PER_FLOAT else 0


def _shares(tier: Tier, shares: CacheShares) -> dict[str, float]:
    """The share of TorchRec's reads from each of TIERS."""
    if tier is Tier.HOST_CACHED:
        return {"hit": shares.hit, "miss": shares.miss, "host": shares.conflict}
    return {tier.value: 1.0}


def _with_lengths(num_ids: float, num_lengths: float) -> float:
    """Ids and bag lengths, in units of ids."""
    return num_ids + num_lengths * BYTES_PER_LENGTH / BYTES_PER_ID


def _add(done: dict[str, float], items: str, number: float, item_bytes: float) -> None:
    done[items] += number
    done[BYTES_OF[items]] += number * item_bytes


def torchrec_quantities(
    demands: Sequence[TableDemand],
    shardings: Mapping[str, TableSharding],
    world: World,
    batch_size: int,
) -> list[dict[str, float]]:
    """Returns the quantities of each rank with TorchRec's collections on unsplit tables.

    Ids are sent without deduplication, 8 bytes each, with the lengths of their bags, 4 bytes each,
    counted as half an id. A shard, of some columns or some rows, sends W - 1 times its pooled
    vectors of a batch, B F D 4 bytes, in forward, and receives the same in backward:

        table-wise      all_to_all: one batch of vectors to each of the other ranks
        row-wise        reduce_scatter of W batches of vectors, (W-1)/W of them sent; all_gather
        table-row-wise  on m ranks of a host: reduce_scatter, (m-1)/m W, then all_to_all between
                        hosts, W/m - 1: together W - 1 again
        column-wise     as table-wise, with a part of D; the ids go to every part
        data-parallel   nothing but the gradient of the whole table, all-reduced

    A shard of an ``EmbeddingCollection`` sends a row for every id instead: W - 1 times its share of
    the K ids of a batch, D 4 bytes each, by all_to_all. Rows are reordered before they are sent,
    and also afterwards if several shards sent them. ``use_index_dedup``, which is off by default
    and needs CUDA, is not predicted.

    Row-wise shards are assumed to serve equal shares of the lookups. Tables of one kind of sharding
    share messages across dimensions, those of bags and of sequences each their own.

    Returns:
        By rank, every key of QUANTITIES.
    """
    per_rank = [dict.fromkeys(QUANTITIES, 0.0) for _ in range(world.num_ranks)]
    kinds = {(shardings[d.name].kind, d.is_pooled) for d in demands}
    caches = torchrec_caches(demands, shardings, world)
    for demand in demands:
        sharding = shardings[demand.name]
        row_bytes = BYTES_PER_FLOAT * demand.dim
        num_ids = batch_size * demand.lookups_per_sample
        if sharding.is_replicated:
            for done in per_rank:
                _add(done, "replicated_ids", num_ids, row_bytes)
                _add(done, "replicated_rows", demand.num_rows, row_bytes)
                done["replicated_groups"] = 1.0
            continue
        blocks = sharding.blocks(world)
        for owners in blocks:  # owners of some columns, with the rows split over them
            of_shard = num_ids / len(owners)
            for owner in owners:
                done, shares = per_rank[owner], caches.get((owner, demand.name), ALL_HIT)
                num_sent = batch_size * demand.num_columns if demand.is_pooled else of_shard
                of_batch = num_sent * row_bytes / len(blocks)
                done["pooled_sent_bytes"] += (world.num_ranks - 1) * of_batch
                number = world.num_ranks * of_shard
                columns_bytes = row_bytes / len(blocks)
                if not demand.is_pooled:
                    done["permuted_bytes"] += number * columns_bytes
                for kernel, share in _shares(sharding.tier, shares).items():
                    _add(done, f"pooled_ids_{kernel}", number * share, columns_bytes)
                if sharding.tier in (Tier.HOST, Tier.HOST_CACHED):
                    touched = expected_cold_of_any(demand) / (len(owners) * len(blocks))
                    done["state_bytes_host"] += touched * host_state_bytes(demand)
            for rank, done in enumerate(per_rank):
                requested = _with_lengths(of_shard, batch_size * demand.num_columns)
                done["pooled_sent_ids"] += sum(owner != rank for owner in owners) * requested
        if not demand.is_pooled and len(sharding.ranks) > 1:
            for done in per_rank:
                done["permuted_bytes"] += num_ids * row_bytes
    for done in per_rank:
        done["pooled_groups"] = float(sum(kind != REPLICATED for kind, _ in kinds))
    return per_rank


def torchrec_caches(
    demands: Sequence[TableDemand], shardings: Mapping[str, TableSharding], world: World
) -> dict[tuple[int, str], CacheShares]:
    """Returns the cache hits of a plan of TorchRec by rank and table.

    A rank's tables, or parts of them, with one kind of sharding share a cache; with prefetch, only
    those of one dimension.
    """
    shared: dict[tuple[int, str, int, bool], list[tuple[CachedTable, float]]] = {}
    for demand in demands:
        sharding = shardings[demand.name]
        if sharding.tier is not Tier.HOST_CACHED or sharding.is_replicated:
            continue
        blocks = sharding.blocks(world)
        dim = demand.dim // len(blocks) if sharding.is_prefetched else 0
        for owners in blocks:
            part = CachedTable(demand, share=1 / len(owners))
            cached = cached_rows(demand, sharding) / len(owners)
            for owner in owners:
                key = (owner, sharding.kind, dim, sharding.is_prefetched)
                shared.setdefault(key, []).append((part, cached))
    found: dict[tuple[int, str], CacheShares] = {}
    for (owner, _, _, is_prefetched), members in shared.items():
        parts = [part for part, _ in members]
        slots = num_slots(sum(cached for _, cached in members))
        shares = shared_cache_shares(parts, slots, is_prefetched=is_prefetched)
        found |= {(owner, p.demand.name): share for p, share in zip(parts, shares, strict=True)}
    return found


def predict_torchrec(
    costs: Costs,
    world: World,
    workload: Workload,
    pipeline: PipelineSpec,
    per_rank: Sequence[Mapping[str, float]],
) -> StepPrediction:
    """Predicts the step of ranks with different quantities.

    Stages are separated by collectives, so each takes as long as on its slowest rank. An owner of
    tables receives in backward as much as it sends in forward, so the busiest rank is the same for
    both.

    Bytes are those of the mean rank.
    """
    quantities = {name: np.array([of[name] for of in per_rank]) for name in QUANTITIES}
    of_ranks = predict_step(costs, world, workload, pipeline, quantities)
    stage_s, hidden_s, sent = {}, {}, {}
    for stage in STAGES:
        seconds, hidden = np.broadcast_arrays(of_ranks.stage_s[stage], of_ranks.hidden_s[stage])
        slowest = int(np.argmax(seconds))
        stage_s[stage], hidden_s[stage] = float(seconds.flat[slowest]), float(hidden.flat[slowest])
        sent[stage] = float(np.mean(of_ranks.sent_bytes[stage]))
    between = float(np.mean(of_ranks.between_hosts_bytes))
    return StepPrediction(sum(stage_s.values()), stage_s, hidden_s, sent, between)
