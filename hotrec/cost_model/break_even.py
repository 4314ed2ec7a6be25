"""The number of lookups per step above which a replicated row is faster than a sharded one.

Marginal prices of the step model, in seconds a row: what one row more adds to the computation of
all stages, and, in the stages whose messages are not hidden, to what travels less what hides it.

Symbols: m expected lookups of the row per step, over all ranks; W ranks; Poisson lookups:

    q = 1 - e^(-m / W)      a rank reads the row          Q = 1 - e^(-m)     any rank reads it
    c  a distinct cold row of a rank                       h  a distinct hot row of a rank
    u  a hot row of any rank                               r  a replica, read or not

    a replica is faster where   gain(m) = (c - h) q - u Q - r  > 0

Q / q falls as m grows, so gain falls at first, if at all, and then rises: it crosses 0 upwards at
one m at most. Beyond that m all rows are worth a replica; as m grows, gain nears c - h - u - r.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from hotrec.cost_model.costs import Costs, World
from hotrec.cost_model.forms import BYTES_PER_FLOAT, Workload
from hotrec.cost_model.step import StepModel, make_step_model
from hotrec.types import Tier

# Halvings of the logarithm of m: to rounding.
NUM_HALVINGS = 200
LEAST_LOOKUPS = 1e-12


def break_even(
    costs: Costs,
    world: World,
    workload: Workload,
    dim: int,
    *,
    is_hot_dense: bool = False,
    tier: Tier = Tier.DEVICE,
    quantities: Mapping[str, float] | None = None,
) -> float | None:
    """Expected lookups of a row per step, over all ranks, above which a replica is faster.

    Memory and message groups are not considered: the rule is for one row among many.

    Args:
        dim: Embedding dim D of the row.
        is_hot_dense: Whether hot gradients are exchanged by a dense all-reduce.
        tier: Tier of the shard; with HOST_CACHED the row misses the cache.
        quantities: What a rank does in the step that the row joins; its stages' messages count only
            where they are not hidden. None: as if nothing were hidden.

    Returns:
        Lookups per step; 0.0 if a replica is faster however rare the row; None if it never is.

    Raises:
        ValueError: If ``dim`` is below 1.
        CostsError: If the costs lack the link between hosts, or the tier.
    """
    if dim < 1:
        raise ValueError(f"dim: expected at least 1, got {dim}.")
    name = {Tier.DEVICE: "device", Tier.HOST: "host", Tier.HOST_CACHED: "miss"}[tier]
    costs.kernel(f"read_{name}")
    model = make_step_model(costs, world, workload, is_hot_dense=is_hot_dense)
    row_bytes = BYTES_PER_FLOAT * dim
    cold, hot, union, replica = (
        marginal_s(model, {items: 1.0, num_bytes: row_bytes}, quantities)
        for items, num_bytes in (
            (f"rows_{name}", f"bytes_{name}"),
            ("hot_rows", "hot_bytes"),
            ("union_rows", "union_bytes"),
            ("replica_rows", "replica_bytes"),
        )
    )

    def gain(lookups: float) -> float:
        by_rank, by_any = -math.expm1(-lookups / world.num_ranks), -math.expm1(-lookups)
        return (cold - hot) * by_rank - union * by_any - replica

    if cold - hot - union - replica <= 0:
        return None
    if gain(LEAST_LOOKUPS) > 0:
        return 0.0
    # At this number of lookups a rank is certain to read the row, and gain is at its limit.
    low, high = math.log(LEAST_LOOKUPS), math.log(50.0 * world.num_ranks)
    if gain(math.exp(high)) <= 0:
        return None
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if gain(math.exp(middle)) > 0 else (middle, high)
    return math.exp(high)


def marginal_s(
    model: StepModel, added: Mapping[str, float], quantities: Mapping[str, float] | None
) -> float:
    """Marginal seconds of added quantities in a step.

    Args:
        model: The model of the step.
        added: What is added to each quantity.
        quantities: Quantities of the step. None assumes that no communication is hidden.
    """
    total = 0.0
    for form in model.stages.values():
        total += sum(form.compute.terms.get(q, 0.0) * n for q, n in added.items())
        hides = 0.0
        if quantities is not None:
            hides = model.overlap
            if form.wire.value(quantities) <= hides * form.cover.value(quantities):
                continue
        total += sum(form.wire.terms.get(q, 0.0) * n for q, n in added.items())
        total -= hides * sum(form.cover.terms.get(q, 0.0) * n for q, n in added.items())
    return total
