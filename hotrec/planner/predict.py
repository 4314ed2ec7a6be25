"""Predicts the step of a plan: of split tables, or of TorchRec's own plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hotrec.cost_model.costs import Costs
from hotrec.cost_model.memory import (
    expanded_bytes,
    held_by_relay,
    memory_by_rank,
)
from hotrec.cost_model.quantities import (
    TableSharding,
    hot_cold_quantities,
    predict_torchrec,
    torchrec_quantities,
)
from hotrec.cost_model.step import (
    BYTES_OF,
    BYTES_PER_FLOAT,
    FETCHES,
    MOVEMENTS,
    StepPrediction,
    predict_step,
)
from hotrec.planner.plan import Plan, SplitTables
from hotrec.planner.request import Replayed
from hotrec.planner.search import POOLED_LOADS, pooled_imbalance
from hotrec.planner.situation import Situation
from hotrec.types import Exchange, PipelineSpec, Placement, RowFetch, TablePlacement, WireType

MEMORIES = ("device_bytes", "host_bytes")
Shardings = Mapping[str, TableSharding]


@dataclass(frozen=True)
class Prediction:
    """The predicted time and memory of a plan.

    Args:
        step: Seconds and bytes of a step on the mean rank.
        memory: Bytes of each rank's tables, by MEMORIES.
        quantities: The mean rank's quantities of a step with split tables.
        shardings: How TorchRec's plan shards each table; empty with split tables.
        slots: Rows that look-ahead moves per step, over the slots of all ranks; None without slots.
        beside: Bytes beside the tables on every rank, by MEMORIES: rows that it relays, and the
            rows of sequences.
    """

    step: StepPrediction
    memory: list[dict[str, float]]
    quantities: Mapping[str, float] = field(default_factory=dict)
    shardings: Shardings = field(default_factory=dict)
    slots: Replayed | None = None
    beside: tuple[float, float] = (0.0, 0.0)

    @property
    def step_s(self) -> float:
        return self.step.step_s

    @property
    def max_bytes(self) -> tuple[float, ...]:
        """Memory of the fullest rank, by MEMORIES."""
        tables = [max(rank[of] for rank in self.memory) for of in MEMORIES]
        return tuple(map(sum, zip(tables, self.beside, strict=True)))

    def fits(self, situation: Situation) -> bool:
        """Whether every rank has enough memory."""
        limits = zip(self.max_bytes, situation.memory_bytes, strict=True)
        return all(found <= limit for found, limit in limits)


def predict(
    plan: Plan,
    situation: Situation,
    shardings: Shardings | None = None,
    slots: Replayed | None = None,
) -> Prediction:
    """Predicts a plan.

    Args:
        plan: The plan.
        situation: The situation of the prediction.
        shardings: How TorchRec's plan shards each table; None with split tables.
        slots: Rows that look-ahead moves if rows are in slots.

    Raises:
        CostsError: If the costs lack what the plan needs.
    """
    if isinstance(plan.tables, SplitTables):
        return predict_split(plan.tables, plan.pipeline, situation, slots)
    assert shardings is not None, plan.label
    return predict_shardings(shardings, plan.pipeline, situation)


def predict_shardings(
    shardings: Shardings, pipeline: PipelineSpec, situation: Situation
) -> Prediction:
    """Predicts unsplit tables, sharded by TorchRec."""
    pipeline, costs = pipeline.of_torchrec, situation.costs
    world, workload = situation.world, situation.workload
    per_rank = torchrec_quantities(list(situation.demands), shardings, world, workload.batch_size)
    step = predict_torchrec(costs, world, workload, pipeline, per_rank)
    return Prediction(
        step=situation.beside_loader(step, is_routed=False),
        memory=tables_memory(situation, {}, shardings),
        shardings=shardings,
        beside=_in_memory(
            situation, expanded_bytes(situation.demands, workload.batch_size, by_torchrec=True)
        ),
    )


def predict_split(
    split: SplitTables,
    pipeline: PipelineSpec,
    situation: Situation,
    slots: Replayed | None = None,
) -> Prediction:
    """Predicts split tables, including the traffic of slots, if there are any."""
    world, demands = situation.world, list(situation.demands)
    num_hot, tables = split.num_hot, split.tables
    quantities = hot_cold_quantities(
        demands,
        num_hot,
        tables,
        world,
        batch_size=situation.workload.batch_size,
    )
    pooled = [d for d in demands if tables[d.name].exchange is Exchange.POOLED]
    factor = pooled_imbalance(pooled, world)
    quantities = {n: v * factor if n in POOLED_LOADS else v for n, v in quantities.items()}
    if slots is not None:
        quantities |= _moved(situation, tables, slots)
    step = predict_step(situation.costs, world, situation.workload, pipeline, quantities)
    return Prediction(
        step=situation.beside_loader(step, is_routed=True),
        memory=tables_memory(situation, num_hot, tables),
        quantities=quantities,
        slots=slots,
        beside=bytes_beside(quantities, situation, pipeline),
    )


def bytes_beside(
    quantities: Mapping[str, float], situation: Situation, pipeline: PipelineSpec
) -> tuple[float, float]:
    """``held_by_relay`` and ``expanded_bytes`` by MEMORIES."""
    held = held_by_relay(quantities, situation.world, pipeline)
    expanded = expanded_bytes(situation.demands, situation.workload.batch_size)
    return _in_memory(situation, held + expanded)


def _in_memory(situation: Situation, num_bytes: float) -> tuple[float, float]:
    """Bytes where a step computes, by MEMORIES."""
    return (0.0, num_bytes) if situation.machine.device == "cpu" else (num_bytes, 0.0)


def tables_memory(
    situation: Situation,
    num_hot: Mapping[str, int],
    tables: Mapping[str, TablePlacement] | Shardings,
) -> list[dict[str, float]]:
    """Bytes of each rank's tables, by MEMORIES."""
    return memory_by_rank(
        list(situation.demands),
        num_hot,
        tables,
        situation.world,
        device=situation.machine.device,
        is_routed_on_device=not situation.workload.is_routed_by_loader,
    )


def with_faster_fetch(situation: Situation, placement: Placement, slots: Replayed) -> Placement:
    """Returns the placement with the fastest way of fetching rows by the costs.

    CPU costs have only one way, since slots are host memory there.
    """
    costs: Costs = situation.costs

    def seconds(way: RowFetch) -> float:
        moved = _moved(situation, placement.with_fetch(way).tables, slots)
        items = MOVEMENTS[FETCHES[way]]
        return costs.kernel(FETCHES[way]).seconds(moved[items], moved[BYTES_OF[items]])

    known = [way for way, kernel in FETCHES.items() if kernel in costs.kernels]
    return placement.with_fetch(min(known, key=seconds, default=RowFetch.staged))


def _moved(
    situation: Situation, tables: Mapping[str, TablePlacement], slots: Replayed
) -> dict[str, float]:
    """Returns the rows, and their bytes, that the mean rank moves into slots and back per step."""
    # Slots are of tables of one dimension and one type (see ``SlotReplay``).
    demand = situation.demands[0]
    host_bytes = demand.row_bytes
    if tables[demand.name].row_type is not WireType.fp32:
        host_bytes -= BYTES_PER_FLOAT // 2 * demand.dim
    fetched = MOVEMENTS[FETCHES[tables[demand.name].row_fetch]]
    moved = {fetched: slots.num_in, "returned_rows": slots.num_out}
    moved |= {BYTES_OF[items]: host_bytes * number for items, number in moved.items()}
    return {name: number / situation.world.num_ranks for name, number in moved.items()}
