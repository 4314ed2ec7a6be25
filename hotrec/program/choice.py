"""What a model is trained with: hot rows or TorchRec's own plan, and the pipeline."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.types import CacheStatistics, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from hotrec.config.groups import CostPlacement
from hotrec.cost_model.forms import Workload
from hotrec.cost_model.profile import Profile
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.planning.constraints import torchrec_constraints
from hotrec.planning.machine import Machine
from hotrec.planning.predict import (
    Predicted,
    baseline_name,
    cache_statistics,
    is_another,
    is_own,
    make_placement,
    predict_plan,
)
from hotrec.planning.scenario import (
    LEAST_BATCH_ON_ONE_HOST,
    Scenario,
    TableShape,
    auto_pipelines,
    build_scenario,
    choose_costs,
)
from hotrec.types import DEFAULT_LOAD_FRAC, Partition, PipelineKind, Placement, Tier, TorchrecPlan

logger = logging.getLogger(__name__)

OFF = "off"
# As `hotrec calibrate` writes them by default.
COSTS_PATH = Path("data/costs")
# Forward and backward multiply each weight of a linear layer three times with a sample's values.
FLOPS_PER_WEIGHT = 6
# Plan of TorchRec and pipeline -> its name among the predictions.
BASELINES = {
    (plan, kind): baseline_name(plan, kind)
    for plan in (TorchrecPlan.planner, TorchrecPlan.hand_tuned, TorchrecPlan.table_wise)
    for kind in (PipelineKind.sparse_dist, PipelineKind.base)
}


@dataclass(frozen=True)
class Choice:
    """What ``parallelize`` chose; pass it instead of a profile to get the same again.

    Args:
        name: "hot_cold <pipeline>", "torchrec <plan> <pipeline>" or "off".
        why: The reason as a sentence.
        pipeline: The pipeline.
        placement: Hot rows and the place of the others; None for plans of TorchRec.
        torchrec_plan: Which plan of TorchRec's; None with a placement, and with "off".
        batch_size: Samples of a rank's batch that it was chosen for; None if that is unknown.
        step_s: Predicted seconds of a step; None without a prediction.
        cache_stats: Statistics of the device caches of host tables, by table.
    """

    name: str
    why: str
    pipeline: PipelineKind
    placement: Placement | None = None
    torchrec_plan: TorchrecPlan | None = None
    batch_size: int | None = None
    step_s: float | None = None
    cache_stats: Mapping[str, CacheStatistics] = field(default_factory=dict)

    @property
    def num_hot(self) -> int:
        """Hot rows of all tables."""
        return 0 if self.placement is None else self.placement.partition.total_hot


PLAIN = Choice(OFF, "TorchRec's own plan and pipeline were asked for.", PipelineKind.sparse_dist)


@dataclass(frozen=True)
class Tables:
    """The tables of a model and what a prediction needs to know of the rest.

    Args:
        configs: The tables.
        rule: Their update rule.
        num_dense_values: Parameters of the dense layers.
        kinds: The pipelines that ``auto`` may choose, because they train the model as it is.
        plan: Runs TorchRec's planner on the unsplit model under constraints.
    """

    configs: Sequence[EmbeddingBagConfig]
    rule: OptimizerSpec
    num_dense_values: int
    kinds: Collection[PipelineKind]
    plan: Callable[[Mapping[str, ParameterConstraints] | None], ShardingPlan]

    @property
    def shapes(self) -> list[TableShape]:
        return [
            TableShape(
                name=table.name,
                dim=table.embedding_dim,
                row_bytes=4 * table.embedding_dim
                + self.rule.state_bytes_per_row(table.embedding_dim),
                num_columns=len(table.feature_names),
            )
            for table in self.configs
        ]


def choose_given(
    given: Partition | Placement, kind: PipelineKind, tables: Tables, machine: Machine
) -> Choice:
    """The choice for hot rows that the caller chose; no prediction."""
    placement = given
    if isinstance(placement, Partition):
        tier = Tier.DEVICE if machine.device == "cpu" else Tier.HOST_CACHED
        placement = Placement.alike(placement, tier, DEFAULT_LOAD_FRAC)
    if kind is PipelineKind.auto:
        is_large = machine.num_hosts > 1 or machine.batch_size >= LEAST_BATCH_ON_ONE_HOST
        kinds = _pipelines(tables, machine, is_own=True)
        in_line = [found for found in kinds if found is not PipelineKind.look_ahead]
        kind = kinds[0] if is_large else in_line[0]
    why = f"{placement.partition.total_hot} hot rows are given."
    return Choice(f"hot_cold {kind.value}", why, kind, placement, batch_size=machine.batch_size)


def choose_by_cost(
    counted: Profile,
    settings: CostPlacement,
    kind: PipelineKind,
    tables: Tables,
    machine: Machine,
    costs: str | Path,
) -> Choice:
    """What is predicted to be fastest, on one process.

    Raises:
        ValueError: If the profile is of other tables, or the rows do not fit the memory.
        ArtifactError, CostsError: If the costs are missing, invalid or of another kind of device.
    """
    is_auto = kind is PipelineKind.auto
    kinds = _pipelines(tables, machine, is_own=True) if is_auto else (kind,)
    found = {table.name: table.num_embeddings for table in tables.configs}
    if counted.num_rows != found:
        raise ValueError(
            f"profile: expected the tables {dict(sorted(found.items())[:4])} and their rows, got "
            f"{dict(sorted(counted.num_rows.items())[:4])}. Profile this model."
        )
    name, path = ("measured", costs) if isinstance(costs, Path) else (costs, COSTS_PATH)
    measured, note = choose_costs(name, path, machine)
    histograms = counted.build_histograms()
    scenario = build_scenario(
        tables.shapes,
        Workload(
            batch_size=machine.batch_size,
            dense_flops=FLOPS_PER_WEIGHT * tables.num_dense_values,
            bottom_frac=0.0,
            num_dense_values=tables.num_dense_values,
        ),
        histograms,
        counted.num_samples,
        machine,
        measured,
        note,
        counted.locality,
    )
    if note is not None:
        logger.info("prediction: %s", note)
    # Its solver starts slowly.
    from hotrec.planning.optimum import decide_between

    in_line = _pipelines(tables, machine, is_own=False)
    wanted = in_line if is_auto else [k if k in in_line else in_line[0] for k in kinds]
    baselines = _predict_baselines(tables, machine, wanted, scenario)
    decision = decide_between(settings, scenario, kinds, baselines)
    predicted = decision.predicted[decision.chosen]
    chosen = predicted.pipeline.kind
    if not is_own(decision.chosen):
        of_name = {name: plan for (plan, _), name in BASELINES.items()}
        return Choice(
            decision.chosen,
            decision.why,
            chosen,
            torchrec_plan=of_name[decision.chosen],
            batch_size=machine.batch_size,
            step_s=predicted.step.step_s,
        )
    policy = f"least step, {measured.name}"
    placement = make_placement(predicted, counted.counts, histograms, policy)
    return Choice(
        decision.chosen,
        decision.why,
        chosen,
        placement,
        batch_size=machine.batch_size,
        step_s=predicted.step.step_s,
        cache_stats=cache_statistics(scenario, placement),
    )


def constraints_of(
    plan: TorchrecPlan, tables: Sequence[EmbeddingBagConfig], machine: Machine
) -> dict[str, ParameterConstraints] | None:
    """The constraints of one of TorchRec's plans."""
    return torchrec_constraints(tables, plan, batch_size=machine.batch_size)


def _pipelines(tables: Tables, machine: Machine, *, is_own: bool) -> tuple[PipelineKind, ...]:
    return tuple(k for k in auto_pipelines(machine, is_own=is_own) if k in tables.kinds)


def _predict_baselines(
    tables: Tables, machine: Machine, kinds: Sequence[PipelineKind], scenario: Scenario
) -> dict[str, Predicted]:
    """TorchRec's own plans that differ and fit."""
    predicted = dict[str, Predicted]()
    for plan in dict.fromkeys(plan for plan, _ in BASELINES):
        try:
            sharding = tables.plan(constraints_of(plan, tables.configs, machine))
            for kind in kinds:
                found = predict_plan(scenario.with_pipeline(kind), sharding)
                if is_another(found, predicted.values()):
                    predicted[BASELINES[plan, kind]] = found
        except ValueError as error:
            logger.info("torchrec %s does not fit: %s", plan.name, error)
    return predicted
