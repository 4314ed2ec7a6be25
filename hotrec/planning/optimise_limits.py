"""Memory limits and allowed options of a choice, and what to change where nothing fits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from hotrec.cost_model.costs import Costs, World
from hotrec.cost_model.demand import Floats, TableDemand
from hotrec.planning.optimise_plans import MODES, Mask, table_memory
from hotrec.types import Exchange, Sharding, Tier


class InfeasibleError(ValueError):
    """No choice fits the limits."""


@dataclass(frozen=True)
class Limits:
    """What a choice may use.

    Args:
        device_bytes: of each rank's device, for tables; of no effect on CPU, where all memory is
            the host's.
        host_bytes: of each rank's share of its host, for tables.
        replica_bytes: of each rank, for hot rows with their optimizer state; None for no limit
            beyond memory.
        tiers: where sharded rows may live.
        exchanges: how what is read of a table may travel.
        shardings: of tables; POOLED needs TABLE_WISE.
        hot_exchanges: whether the hot exchange may be touched (False) or dense (True).

    Raises:
        ValueError: if a size is negative or not a number, or nothing is allowed.
    """

    device_bytes: float
    host_bytes: float
    replica_bytes: float | None = None
    tiers: tuple[Tier, ...] = tuple(Tier)
    exchanges: tuple[Exchange, ...] = tuple(Exchange)
    shardings: tuple[Sharding, ...] = tuple(Sharding)
    hot_exchanges: tuple[bool, ...] = (False, True)

    def __post_init__(self) -> None:
        for name in ("device_bytes", "host_bytes", "replica_bytes"):
            size = getattr(self, name)
            if size is not None and not size >= 0:
                raise ValueError(f"limits {name}: expected at least 0, got {size}.")
        for name in ("tiers", "exchanges", "shardings", "hot_exchanges"):
            if not getattr(self, name):
                raise ValueError(f"limits {name}: expected at least one, got none.")

    def sizes(self, is_one_memory: bool) -> Floats:
        """float64 (3,): device, host, replica bytes; infinite where there is no limit."""
        device = np.inf if is_one_memory else self.device_bytes
        replica = np.inf if self.replica_bytes is None else self.replica_bytes
        return np.array([device, self.host_bytes, replica], np.float64)

    def modes(self, costs: Costs) -> Mask:
        """Which of MODES, bool (M,), the options allow and the costs know the times of."""
        return np.array([self._allows(costs, *mode) for mode in MODES])

    def _allows(self, costs: Costs, exchange: Exchange, tier: Tier) -> bool:
        is_pooled = exchange is Exchange.POOLED
        if exchange not in self.exchanges or (
            is_pooled and Sharding.TABLE_WISE not in self.shardings
        ):
            return False
        if costs.device == "cpu":
            return tier is Tier.DEVICE and tier in self.tiers
        read, update = ("pooled", "pooled_update") if is_pooled else ("read", "update")
        needed = {
            Tier.DEVICE: (f"{read}_device", f"{update}_device"),
            Tier.HOST: (f"{read}_host", f"{update}_host"),
            Tier.HOST_CACHED: (f"{read}_hit", f"{read}_miss", f"{update}_hit"),
        }
        return tier in self.tiers and all(name in costs.kernels for name in needed[tier])


def split_tiers(either: Floats, limits_3: Floats, short: str) -> tuple[list[bool], float]:
    """Put whole tables into two tiers so that one memory is short of least.

    Args:
        either: float64 (T, 2, 3), MEMORIES that each table takes in the device tier, in the host's.
        limits_3: of MEMORIES; the last is left out.
        short: "device" or "host", the memory that may be short.

    Returns:
        For each table whether it lies in device memory; bytes per rank that are short, infinite
        where the other memory alone is too small.
    """
    count = len(either)
    total = max(float(either.sum()), 1.0)
    gained = (either[:, 0] - either[:, 1])[:, :2] / total
    rows = np.concatenate([gained.T, np.zeros((2, 1))], axis=1)
    which = 0 if short == "device" else 1
    rows[which, count] = -1.0
    ends = np.minimum((limits_3[:2] - either[:, 1, :2].sum(axis=0)) / total, 1e3)
    answer = milp(
        np.append(np.zeros(count), 1.0),
        integrality=np.append(np.ones(count), 0),
        bounds=Bounds(0, np.append(np.ones(count), np.inf)),
        constraints=LinearConstraint(rows, ub=ends),
        options={"mip_rel_gap": 1e-6, "node_limit": 10_000},
    )
    if answer.x is None:
        return [False] * count, math.inf
    in_device = answer.x[:count] > 0.5
    used = np.where(in_device[:, None], either[:, 0], either[:, 1]).sum(axis=0)
    return in_device.tolist(), max(float(used[which] - limits_3[which]), 0.0)


def explain(
    demands: Sequence[TableDemand],
    world: World,
    limits: Limits,
    can_M: Mask,
    is_one_memory: bool,
    is_routed_on_device: bool,
    low: Mapping[str, int],
) -> InfeasibleError:
    """Why nothing fits: the smallest budgets that would do, and the nearest change.

    Args:
        can_M: allowed modes.
        is_one_memory: device memory is the host's.
        is_routed_on_device: the router's rows are kept on the device too.
        low: fewest hot rows of a table, 0 where absent.
    """
    if not can_M.any():
        return InfeasibleError(
            f"limits: expected a tier and exchange that the costs have times of, got tiers "
            f"{[t.value for t in limits.tiers]} and exchanges "
            f"{[e.value for e in limits.exchanges]}. Allow tier device and exchange rows."
        )
    kept = sum(low.get(d.name, 0) * d.row_bytes for d in demands)
    if limits.replica_bytes is not None and kept > limits.replica_bytes:
        return InfeasibleError(
            f"replica_bytes: expected at least {kept} for the rows fixed hot, got "
            f"{limits.replica_bytes:g}. Raise it to {kept}, or fix fewer rows."
        )
    if not can_M[:3].any():
        budget = limits.host_bytes if is_one_memory else max(limits.device_bytes, limits.host_bytes)
        widest = max(demands, key=lambda d: d.num_rows * d.row_bytes)
        if widest.num_rows * widest.row_bytes > budget:
            return InfeasibleError(
                f"table {widest.name}: expected at most {budget:g} bytes, which one rank can hold, "
                f"got {widest.num_rows * widest.row_bytes}. Allow exchange rows, which spreads it."
            )
    needs = _Needs(demands, world, can_M, is_one_memory, is_routed_on_device, low)
    return _nearest_change(needs, world, limits)


@dataclass(frozen=True)
class _Needs:
    """What tables take at least, however few rows are hot; arguments as those of ``explain``."""

    demands: Sequence[TableDemand]
    world: World
    can_M: Mask
    is_one_memory: bool
    is_routed_on_device: bool
    low: Mapping[str, int]

    def bytes_at(self, limits: Limits) -> tuple[Floats, Floats]:
        """MEMORIES that every choice takes, float64 (3,); ``either`` of ``split_tiers``.

        A pooled table needs no router, but must fit a rank whole, so this depends on the limits.
        """
        tiers = {MODES[m][1] for m in np.flatnonzero(self.can_M)}
        away = Tier.HOST if Tier.HOST in tiers else Tier.HOST_CACHED
        kept_3, either = np.zeros(3), np.zeros((len(self.demands), 2, 3))
        for t, demand in enumerate(self.demands):
            takes = table_memory(demand, self.world, self.is_one_memory, self.is_routed_on_device)
            num_low = self.low.get(demand.name, 0)
            kept_3 += num_low * takes["replica"]
            for side, tier in enumerate((Tier.DEVICE, away)):
                whole = demand.num_rows * demand.row_bytes
                is_host = self.is_one_memory or tier is not Tier.DEVICE
                room = limits.host_bytes if is_host else limits.device_bytes
                can_pool = MODES.index((Exchange.POOLED, tier))
                is_pooled = self.can_M[can_pool] and whole <= room and num_low == 0
                either[t, side] = takes[f"in_{tier.value}"] + (0 if is_pooled else takes["routed"])
        if tiers == {Tier.DEVICE}:
            either[:, 1] = either[:, 0]
        elif Tier.DEVICE not in tiers:
            either[:, 0] = either[:, 1]
        return kept_3, either

    def short_of(self, limits: Limits, name: str) -> float:
        """Bytes that memory ``name`` is short of."""
        kept_3, either = self.bytes_at(limits)
        return split_tiers(either, limits.sizes(self.is_one_memory) - kept_3, name)[1]

    def smallest(self, limits: Limits, name: str) -> int | None:
        """The smallest size of memory ``name`` that does; None where that alone does not help."""
        size = limits.device_bytes if name == "device" else limits.host_bytes
        low, more = math.floor(size), self.short_of(limits, name)
        if not 0 < more < math.inf:
            return None
        high = math.ceil(low + more) + 1
        while high - low > 1:
            middle = (low + high) // 2
            if name == "device":
                changed = replace(limits, device_bytes=float(middle))
            else:
                changed = replace(limits, host_bytes=float(middle))
            is_short = self.short_of(changed, name) > 0
            low, high = (middle, high) if is_short else (low, middle)
        return high


def _nearest_change(needs: _Needs, world: World, limits: Limits) -> InfeasibleError:
    """The memory that is short of least, and the number of ranks that would do."""
    ways = []
    for name in ("host",) if needs.is_one_memory else ("device", "host"):
        size = needs.smallest(limits, name)
        if size is not None:
            ways.append((size - getattr(limits, f"{name}_bytes"), f"{name}_bytes", size))
    kept_3, either = needs.bytes_at(limits)
    needed_2 = either[:, 1, :2].sum(axis=0)
    if not ways:
        need = kept_3[:2] + needed_2
        return InfeasibleError(
            f"device_bytes and host_bytes: expected at least {math.ceil(need[0])} and "
            f"{math.ceil(need[1])} per rank for {len(either)} tables on {world.num_ranks} ranks, "
            f"got {limits.device_bytes:g} and {limits.host_bytes:g}. Raise both."
        )
    more, name, size = min(ways)
    message = (
        f"{name}: expected at least {size} per rank for {len(either)} tables on "
        f"{world.num_ranks} ranks (the smallest that does, all else as it is), got "
        f"{getattr(limits, name):g}. Raise it by {math.ceil(more)}"
    )
    for factor in (2, 4, 8, 16, 32):
        wider = World(factor * world.num_ranks, world.ranks_per_host)
        if replace(needs, world=wider).short_of(limits, "host") == 0:
            return InfeasibleError(f"{message}, or use {wider.num_ranks} ranks of this size.")
    return InfeasibleError(message + ".")
