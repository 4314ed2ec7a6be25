"""Slots on the device for rows in host memory: whether they suffice, and how many pay off."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache

from hotrec.cost_model.demand import take_rows
from hotrec.cost_model.quantities import cached_rows
from hotrec.planner.plan import SplitTables
from hotrec.planner.predict import predict_split, tables_memory, with_faster_fetch
from hotrec.planner.request import Replayed, SlotRequest
from hotrec.planner.situation import Situation
from hotrec.types import PipelineSpec, Placement, TablePlacement, Tier

# Standard deviations by which the maximum over a run's batches is assumed to exceed their mean.
NUM_DEVIATIONS = 4
# Slots to choose among, as fractions of the rows, and how much longer a step may take with fewer.
LOAD_FRACS = tuple(0.9 / 2 ** (half / 2) for half in reversed(range(20)))
MAX_LONGER_FRAC = 0.01


class SlotsError(ValueError):
    """The slots on the device do not fit, or are too few (``are_too_few``)."""

    def __init__(self, message: str, *, are_too_few: bool) -> None:
        super().__init__(message)
        self.are_too_few = are_too_few


def check_slots(situation: Situation, placement: Placement, samples_in_flight: int) -> None:
    """Checks that the slots of CACHED tables fit, and suffice for the batches of look-ahead.

    They must hold a rank's share of the distinct rows that the batches in flight read. A row is
    read in one of n global batches, assumed independent, with probability 1 - (1 - Q)^n, and the
    maximum is estimated as NUM_DEVIATIONS standard deviations of a Poisson number above the mean.

    Args:
        situation: The ranks, their memory and the demands.
        placement: The placement with its slots.
        samples_in_flight: Maximum number of samples of all ranks whose rows look-ahead keeps at
            once, in training or evaluation.

    Raises:
        SlotsError: If the mean rank is expected to need more, or they do not fit its device.
    """
    num_ranks = situation.world.num_ranks
    num_batches = samples_in_flight / (situation.machine.batch_size * num_ranks)
    needed, num_slots = 0.0, 0.0
    for demand in situation.demands:
        placed, num_hot = placement.tables[demand.name], placement.partition.num_hot(demand.name)
        if placed.tier is not Tier.CACHED or num_hot == demand.num_rows:
            continue
        cold_G = demand.rows_G - take_rows(demand, num_hot)
        needed += float(cold_G @ (1 - (1 - demand.by_any_G) ** num_batches))
        num_slots += cached_rows(demand, placed)
    needed += NUM_DEVIATIONS * math.sqrt(num_ranks * needed)
    free_bytes, num_bytes = _slot_bytes(situation, placement)
    if num_bytes > free_bytes and situation.machine.device == "cuda":
        raise SlotsError(
            "placement.cache_load_frac: expected slots, with optimizer state, of at most "
            f"{int(free_bytes)} bytes, the device's memory, got {math.ceil(num_bytes)}. Multiply "
            f"it by {free_bytes / num_bytes:.2f} or less.",
            are_too_few=False,
        )
    if needed > num_slots:
        raise SlotsError(
            f"placement.cache_load_frac: expected at least {math.ceil(needed)} slots over all "
            f"ranks for the rows of {samples_in_flight} samples in flight, got "
            f"{math.ceil(num_slots)}. Multiply it by {needed / num_slots:.2f} or more, or lower "
            "pipeline.depth or the larger of trainer.batch_size and trainer.eval_batch_size.",
            are_too_few=True,
        )


def _slot_bytes(situation: Situation, placement: Placement) -> tuple[float, float]:
    """Device memory of the fullest rank that is left for slots, and that of its slots."""

    def device_bytes(tables: Mapping[str, TablePlacement]) -> float:
        num_hot = {table: placement.partition.num_hot(table) for table in tables}
        return max(of["device_bytes"] for of in tables_memory(situation, num_hot, tables))

    none = {
        table: replace(of, cache_load_frac=0.0) if of.tier is Tier.CACHED else of
        for table, of in placement.tables.items()
    }
    others = device_bytes(none)
    return max(0.0, situation.memory_bytes[0] - others), device_bytes(placement.tables) - others


def choose_slots(
    request: SlotRequest,
    placement: Placement,
    split: Callable[[Placement], SplitTables],
    pipeline: PipelineSpec,
    situation: Situation,
) -> tuple[Placement, Replayed | None, str]:
    """Chooses the fewest slots with which a step is hardly longer than with the maximum that fits.

    Args:
        request: How to choose them.
        placement: The placement, with a number of slots if that is given.
        split: Returns the plan of the tables of a placement.
        pipeline: The look-ahead pipeline, which fills the slots.
        situation: The situation to choose for.

    Returns:
        The placement, look-ahead's traffic in its slots, and a sentence if there was a choice.

    Raises:
        SlotsError: If the slots do not fit, or are too few for the batches in flight.
    """
    num_rows = placement.partition.num_rows
    num_slots = sum((placement.tables[t].cache_load_frac or 0.0) * n for t, n in num_rows.items())
    given = num_slots / sum(num_rows.values())  # all tables share their slots
    replay = request.read(given if request.place is None else LOAD_FRACS[0])

    @cache
    def place(load_frac: float) -> Placement:
        placed = placement if request.place is None else request.place(load_frac)
        check_slots(situation, placed, request.samples_in_flight)
        return placed

    @cache
    def settle(load_frac: float) -> tuple[Placement, Replayed | None]:
        placed = place(load_frac)
        slots = replay.predict(load_frac, placed.popular_rows)
        if slots is not None and request.is_fetch_open:
            placed = with_faster_fetch(situation, placed, slots)
        return placed, slots

    def step_s(load_frac: float) -> float:
        try:
            placed, slots = settle(load_frac)
        except SlotsError:
            return math.inf
        return predict_split(split(placed), pipeline, situation, slots).step_s

    if request.place is None:
        return *settle(given), ""
    most = _max_that_fits(place)
    max_s = (1 + MAX_LONGER_FRAC) * step_s(most)
    below = LOAD_FRACS[: LOAD_FRACS.index(most)]
    first = bisect_left(below, True, key=lambda load_frac: step_s(load_frac) <= max_s)
    chosen = LOAD_FRACS[first]
    why = (
        f" cache_load_frac={chosen:.3f} gives the fewest slots with which a step is predicted to "
        f"take at most {MAX_LONGER_FRAC:.0%} longer than with the most that fit, {most:.3f}."
    )
    return *settle(chosen), why


def _max_that_fits(place: Callable[[float], Placement]) -> float:
    """Returns the largest of LOAD_FRACS with which a placement is possible.

    Raises:
        SlotsError: If there is none.
    """
    for load_frac in reversed(LOAD_FRACS[1:]):
        try:
            place(load_frac)
        except SlotsError as error:
            if error.are_too_few:
                raise
        else:
            return load_frac
    place(LOAD_FRACS[0])
    return LOAD_FRACS[0]
