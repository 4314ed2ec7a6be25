"""The training plan: the placement to train and its predicted step.

``hotrec plan`` and ``hotrec train`` make it from the configuration; a resumed run and
``hotrec evaluate`` read the one that the run recorded.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hotrec.artifact import Artifact, ArtifactError, check_made_from
from hotrec.config.groups import CostPlacement, HotColdConfig, SavedPlacement, TorchrecPlacement
from hotrec.config.roots import Config
from hotrec.cost_model.costs import Costs, CostsError, World
from hotrec.cost_model.forms import PipelineSpec
from hotrec.cost_model.histogram import CountHistogram
from hotrec.cost_model.profile import Profile, read_profile
from hotrec.data.chunks import Dataset
from hotrec.planning.choose import PolicyInputs, choose_partition, policy_parameters
from hotrec.planning.constraints import MissCurve
from hotrec.planning.document import prediction_document, read_prediction
from hotrec.planning.machine import Machine
from hotrec.planning.partition import (
    check_partition,
    read_placement,
    summarize_partition,
    write_partition,
)
from hotrec.planning.predict import (
    BASELINE_PLANS,
    HOST_BASELINE_PLANS,
    HOT_COLD,
    Baseline,
    Decision,
    build_unsplit,
    make_placement,
    miss_curves,
    predict_baselines,
    predict_placement,
    predict_plan,
)
from hotrec.planning.scenario import Scenario, choose_costs, describe_scenario, planned_pipeline
from hotrec.planning.unsharded import as_placement, replica_memory_bytes, row_bytes
from hotrec.runtime.run_dir import PARTITION, PREDICTION
from hotrec.types import Partition, Placement

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingPlan:
    """The placement to train and its prediction.

    Args:
        config: The configuration, with TorchRec's placement where splitting rows does not pay.
        placement: The placement, or None for TorchRec's plans on unsplit tables.
        artifact: The partition's directory, or None without a placement.
        prediction: The document of ``hotrec.planning.document``, or None without a prediction.
        costs: The costs of the prediction.
        curves: Miss curves of the device caches of host tables, by table.
    """

    config: Config
    placement: Placement | None
    artifact: Artifact | None
    prediction: dict[str, Any] | None
    costs: Costs | None = None
    curves: Mapping[str, MissCurve] = field(default_factory=dict)

    def machine(self, machine: Machine) -> Machine:
        """Returns the machine with our costs, but for TorchRec's own plans with TorchRec's."""
        return machine if self.placement is None else replace(machine, costs=self.costs)

    @property
    def partition(self) -> Partition | None:
        return None if self.placement is None else self.placement.partition

    @property
    def predicted(self) -> Mapping[str, Any] | None:
        """The document's entry of the plan to train."""
        if self.prediction is None:
            return None
        entry: Mapping[str, Any] = self.prediction["plans"][self.prediction["chosen"]]
        return entry


@dataclass(frozen=True)
class Profiled:
    """A profile of this dataset."""

    profile: Profile
    artifact: Artifact
    histograms: Mapping[str, CountHistogram]


def make_training_plan(
    config: Config, dataset: Dataset, machine: Machine, *, output: Path, is_plan: bool = False
) -> TrainingPlan:
    """Makes the training plan, on one process.

    Args:
        config: The configuration.
        dataset: The dataset.
        machine: Ranks, memory and batch.
        output: Where a new partition is written. A saved one is not copied.
        is_plan: Whether to also predict TorchRec's plans and the sensitivity, for ``hotrec plan``.

    Raises:
        ArtifactError: If the profile or the saved partition is missing, or of another dataset.
        ValueError: If the policy cannot be satisfied, the rows do not fit the memory, or the costs
            that a cost-based choice needs are of another kind of machine.
    """
    if isinstance(config.placement, CostPlacement):
        return _choose_by_cost(config, dataset, machine, output=output, is_plan=is_plan)
    if isinstance(config.placement, SavedPlacement):
        placement, artifact = read_placement(Path(config.placement.partition_dir))
        num_rows = {table.name: table.num_rows for table in dataset.schema.tables}
        dataset_hash = dataset.artifact.content_hash
        check_partition(artifact, dataset_hash=dataset_hash, num_rows=num_rows)
        profiled = _profile_if_there(config, dataset)
    elif isinstance(config.placement, HotColdConfig):
        profiled = _read_profiled(config, dataset)
        inputs = _policy_inputs(config, dataset, machine)
        partition = choose_partition(config.placement, profiled.profile, inputs)
        placement = as_placement(config.placement, partition, machine.device)
        artifact = _write(config, placement, dataset, profiled, inputs, output)
    else:
        profiled = _profile_if_there(config, dataset)
        predicted = _predict_given(config, dataset, machine, profiled, None, is_plan=is_plan)
        return TrainingPlan(config, None, None, None if predicted is None else predicted[0])
    predicted = _predict_given(config, dataset, machine, profiled, placement, is_plan=is_plan)
    if predicted is None:
        return TrainingPlan(config, placement, artifact, None)
    document, scenario = predicted
    curves = miss_curves(scenario, placement)
    return TrainingPlan(config, placement, artifact, document, scenario.costs, curves)


def read_training_plan(config: Config, run_dir: Path) -> TrainingPlan:
    """Reads the plan that a run recorded when it started.

    Raises:
        ArtifactError: If its partition is missing or altered.
    """
    prediction = read_prediction(run_dir)
    placement = config.placement
    if isinstance(placement, CostPlacement):
        if prediction is None:
            raise ArtifactError(
                f"{run_dir / PREDICTION}: expected the plan that the run chose, got no such file. "
                "Start a new run."
            )
        config = _declined(config, prediction["chosen"])
        placement = config.placement
    if not isinstance(placement, HotColdConfig):
        return TrainingPlan(config, None, None, prediction)
    saved = placement.partition_dir if isinstance(placement, SavedPlacement) else None
    found, artifact = read_placement(Path(saved) if saved else run_dir / PARTITION)
    return TrainingPlan(config, found, artifact, prediction)


def _declined(config: Config, chosen: str) -> Config:
    """Returns the configuration that trains the chosen plan."""
    if chosen == HOT_COLD:
        return config
    baseline = next(
        baseline for baseline in (*BASELINE_PLANS, *HOST_BASELINE_PLANS) if baseline.name == chosen
    )
    return baseline.configure(config)


def _choose_by_cost(
    config: Config, dataset: Dataset, machine: Machine, *, output: Path, is_plan: bool
) -> TrainingPlan:
    from hotrec.planning.optimum import decide  # its solver starts slowly

    profiled = _read_profiled(config, dataset)
    scenario = _scenario(config, dataset, machine, profiled)
    decision = decide(config, dataset.schema, scenario)
    placement = artifact = None
    if decision.chosen == HOT_COLD:
        policy = f"least predicted step, {scenario.costs.name}"
        placement = make_placement(
            decision.predicted[HOT_COLD], profiled.profile.counts, profiled.histograms, policy
        )
        inputs = _policy_inputs(config, dataset, machine)
        artifact = _write(config, placement, dataset, profiled, inputs, output)
    document = _document(
        config, dataset, scenario, decision, profiled, placement, with_sensitivity=is_plan
    )
    logger.info("%s", decision.why)
    return TrainingPlan(
        _declined(config, decision.chosen),
        placement,
        artifact,
        document,
        scenario.costs,
        miss_curves(scenario, placement),
    )


def _predict_given(
    config: Config,
    dataset: Dataset,
    machine: Machine,
    profiled: Profiled | None,
    placement: Placement | None,
    *,
    is_plan: bool,
) -> tuple[dict[str, Any], Scenario] | None:
    """Predicts the configured placement, or logs why it cannot and returns None."""
    if profiled is None:
        logger.info("no prediction: no profile of this dataset at %s", config.paths.profile)
        return None
    try:
        scenario = _scenario(config, dataset, machine, profiled)
        name, predicted = HOT_COLD, {}
        if placement is not None:
            num_hot = {t: placement.partition.num_hot(t) for t in placement.partition.num_rows}
            predicted[name] = predict_placement(
                scenario, num_hot, placement.tables, is_hot_dense=placement.is_hot_dense
            )
        else:
            assert isinstance(config.placement, TorchrecPlacement)
            baseline = Baseline.of(config)
            name = baseline.name
            plan = build_unsplit(config, dataset.schema, machine).plan(machine)
            predicted[name] = predict_plan(
                scenario,
                plan,
                config.placement.cache_load_frac,
                is_prefetched=baseline.is_prefetched,
            )
        if is_plan:
            predicted = predict_baselines(config, dataset.schema, scenario) | predicted
    except CostsError as error:
        logger.warning("no prediction: %s", error)
        return None
    why = f"placement={config.placement.kind.name} is configured."
    decision = Decision(name, why, predicted)
    document = _document(
        config, dataset, scenario, decision, profiled, placement, with_sensitivity=False
    )
    return document, scenario


def _document(
    config: Config,
    dataset: Dataset,
    scenario: Scenario,
    decision: Decision,
    profiled: Profiled,
    placement: Placement | None,
    *,
    with_sensitivity: bool,
) -> dict[str, Any]:
    sensitivity: list[dict[str, Any]] = []
    if with_sensitivity and config.plan.sensitivity:
        from hotrec.planning.optimum import predict_sensitivity

        assert isinstance(config.placement, CostPlacement)
        sensitivity = predict_sensitivity(
            config.placement,
            scenario,
            decision,
            lambda other: _describe(
                config, dataset, other, profiled, scenario.costs, scenario.note, scenario.pipeline
            ),
        )
    return prediction_document(
        scenario,
        decision,
        partition=None if placement is None else placement.partition,
        counts=profiled.profile.counts,
        sensitivity=sensitivity,
    )


def _scenario(config: Config, dataset: Dataset, machine: Machine, profiled: Profiled) -> Scenario:
    costs, note = choose_costs(config, machine.device)
    if note is not None:
        logger.info("costs: %s", note)
    pipeline = planned_pipeline(config, machine)
    return _describe(config, dataset, machine, profiled, costs, note, pipeline)


def _describe(
    config: Config,
    dataset: Dataset,
    machine: Machine,
    profiled: Profiled,
    costs: Costs,
    note: str | None,
    pipeline: PipelineSpec,
) -> Scenario:
    return describe_scenario(
        config,
        dataset.schema,
        profiled.histograms,
        profiled.profile.num_samples,
        machine,
        costs,
        note,
        profiled.profile.locality,
        pipeline,
    )


def _read_profiled(config: Config, dataset: Dataset) -> Profiled:
    profile, artifact = read_profile(Path(config.paths.profile))
    check_made_from(artifact, dataset.artifact)
    return Profiled(profile, artifact, profile.build_histograms())


def _profile_if_there(config: Config, dataset: Dataset) -> Profiled | None:
    try:
        return _read_profiled(config, dataset)
    except ArtifactError as error:
        logger.info("profile: %s", error)
        return None


def _policy_inputs(config: Config, dataset: Dataset, machine: Machine) -> PolicyInputs:
    bytes_of_row = row_bytes(dataset.schema, config)
    return PolicyInputs(
        row_bytes=bytes_of_row,
        global_batch_size=config.trainer.batch_size * machine.world_size,
        memory_bytes=replica_memory_bytes(machine),
        num_ranks=machine.world_size,
        num_hosts=machine.world_size // machine.local_world_size,
        dims=dict.fromkeys(bytes_of_row, config.model.embedding_dim),
        row_seconds=lambda: _row_seconds(config, machine),
    )


def _row_seconds(config: Config, machine: Machine) -> tuple[float, float]:
    """Seconds to send a cold row and its gradient, and a hot row in a dense all-reduce."""
    costs, _ = choose_costs(config, machine.device)
    world = World(machine.world_size, machine.local_world_size)
    others = (world.num_ranks - 1) / world.num_ranks
    num_bytes = 2 * others * 4 * config.model.embedding_dim
    to_all, reduce = (costs.collective(kind, world) for kind in ("all_to_all", "all_reduce"))
    return num_bytes * to_all.per_byte_s, num_bytes * reduce.per_byte_s


def _write(
    config: Config,
    placement: Placement,
    dataset: Dataset,
    profiled: Profiled,
    inputs: PolicyInputs,
    output: Path,
) -> Artifact:
    assert isinstance(config.placement, HotColdConfig)
    return write_partition(
        placement,
        output,
        parameters=policy_parameters(config.placement),
        summary=summarize_partition(placement.partition, profiled.profile, inputs.row_bytes),
        dataset_hash=dataset.artifact.content_hash,
        profile_hash=profiled.artifact.content_hash,
    )
