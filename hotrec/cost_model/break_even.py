"""The number of lookups per step above which a replicated row is faster than a sharded one.

A search for the zero of one function, since beyond it all rows are worth a replica.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from hotrec.cost_model.costs import Costs, World
from hotrec.cost_model.forms import BYTES_OF, BYTES_PER_FLOAT, Workload
from hotrec.cost_model.step import StepModel, make_step_model

# Halvings of the logarithm of m: to rounding.
NUM_HALVINGS = 200
LEAST_LOOKUPS = 1e-12


def break_even(
    costs: Costs,
    world: World,
    workload: Workload,
    dim: int,
    quantities: Mapping[str, float] | None = None,
) -> float | None:
    """Expected lookups of a row per step, over all ranks, above which a replica is faster.

    Of m lookups over W ranks, Poisson, a rank makes one with q = 1 - e^(-m/W), any with
    Q = 1 - e^(-m). With the marginal seconds of a distinct cold row of a rank c, a hot one h, a hot
    row of any rank u and a replica r, read or not, a replica is faster where

        (c - h) q - u Q - r > 0

    Q / q falls as m grows, so this falls at first, if at all, and then rises to c - h - u - r.
    Memory and message groups are not considered: the rule is for one row among many.

    Args:
        dim: Embedding dim D of the row.
        quantities: What a rank does in the step that the row joins; its stages' messages count only
            where they are not hidden. None: as if nothing were hidden.

    Returns:
        Lookups per step; 0.0 if a replica is faster however rare the row; None if it never is.

    Raises:
        CostsError: If the costs lack the link between hosts.
    """
    model = make_step_model(costs, world, workload)
    cold, hot, union, replica = (
        marginal_s(model, {items: 1.0, BYTES_OF[items]: BYTES_PER_FLOAT * dim}, quantities)
        for items in ("rows_device", "hot_rows", "union_rows", "replica_rows")
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
    """Marginal seconds of added quantities in a step of ``quantities``.

    Computation counts in all stages; what travels, less what hides it, where it is not hidden. None
    assumes that no communication is hidden.
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
