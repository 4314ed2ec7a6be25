"""The training plan: the placement to train and its predicted step.

``hotrec plan`` and ``hotrec train`` make it from the configuration; a resumed run and
``hotrec evaluate`` read the one that the run recorded.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torchrec.distributed.types import CacheStatistics

from hotrec.artifact import Artifact, ArtifactError, check_made_from
from hotrec.config.groups import (
    CostPlacement,
    HotColdConfig,
    SavedPlacement,
    ScarsPlacement,
    TorchrecPlacement,
)
from hotrec.config.roots import Config
from hotrec.cost_model.costs import Costs, CostsError
from hotrec.cost_model.profile import Profile, read_profile
from hotrec.data.chunks import Dataset
from hotrec.planning.document import prediction_document
from hotrec.planning.machine import Machine
from hotrec.planning.partition import read_placement, summarize_partition, write_partition
from hotrec.planning.policies import choose_partition, policy_parameters
from hotrec.planning.predict import (
    HOT_COLD,
    Decision,
    cache_statistics,
    make_placement,
    predict_baselines,
    predict_placement,
    predict_torchrec_config,
    torchrec_baselines,
    torchrec_name,
)
from hotrec.planning.scenario import Scenario, choose_costs, describe_scenario
from hotrec.planning.unsharded import as_placement, row_bytes
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
        cache_stats: Statistics of the device caches of host tables, by table.
    """

    config: Config
    placement: Placement | None
    artifact: Artifact | None
    prediction: dict[str, Any] | None
    costs: Costs | None = None
    cache_stats: Mapping[str, CacheStatistics] = field(default_factory=dict)

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


def make_training_plan(
    config: Config, dataset: Dataset, machine: Machine, *, output: Path, is_plan: bool = False
) -> TrainingPlan:
    """Makes the training plan, on one process.

    Args:
        output: Where a new partition is written. A saved one is not copied.
        is_plan: Whether to also predict TorchRec's plans and the sensitivity, for ``hotrec plan``.

    Raises:
        ArtifactError: If the profile or the saved partition is missing, or of another dataset.
        ValueError: If the policy cannot be satisfied, the rows do not fit the memory, or the costs
            that a cost-based choice needs are of another kind of machine.
    """
    kind, placement, artifact = config.placement, None, None
    if isinstance(kind, SavedPlacement):
        placement, artifact = read_placement(Path(kind.partition_dir))
        check_made_from(artifact, dataset.artifact)
    try:
        profile, profile_artifact = read_profile(Path(config.paths.profile))
        check_made_from(profile_artifact, dataset.artifact)
    except ArtifactError as error:
        if not isinstance(kind, SavedPlacement | TorchrecPlacement):
            raise
        logger.info("no prediction: %s", error)
        return TrainingPlan(config, placement, artifact, None)

    def write(placement: Placement) -> Artifact:
        assert isinstance(kind, HotColdConfig)
        bytes_of_row = row_bytes(dataset.schema, config)
        return write_partition(
            placement,
            output,
            parameters=policy_parameters(kind),
            summary=summarize_partition(placement.partition, profile, bytes_of_row),
            dataset_hash=dataset.artifact.content_hash,
            profile_hash=profile_artifact.content_hash,
        )

    if isinstance(kind, HotColdConfig) and not isinstance(kind, SavedPlacement | CostPlacement):
        placement = _apply_policy(kind, config, dataset, machine, profile)
        artifact = write(placement)
    histograms = profile.build_histograms()

    def describe(machine: Machine) -> Scenario:
        return describe_scenario(
            config,
            dataset.schema,
            histograms,
            profile.num_samples,
            machine,
            costs,
            note,
            profile.locality,
        )

    sensitivity: list[dict[str, Any]] = []
    costs, note = choose_costs(config, machine)
    try:
        scenario = describe(machine)
        if isinstance(kind, CostPlacement):
            # Its solver starts slowly.
            from hotrec.planning.optimum import decide, predict_sensitivity

            decision = decide(config, dataset.schema, scenario)
            if is_plan and config.plan.sensitivity:
                best = decision.predicted[HOT_COLD]
                sensitivity = predict_sensitivity(kind, scenario, best, describe)
        else:
            decision = _predict_given(config, dataset, scenario, placement, is_plan=is_plan)
    except CostsError as error:
        if isinstance(kind, CostPlacement):
            raise
        logger.warning("no prediction: %s", error)
        return TrainingPlan(config, placement, artifact, None)
    if isinstance(kind, CostPlacement):
        logger.info("%s", decision.why)
        if decision.chosen == HOT_COLD:
            best, policy = decision.predicted[HOT_COLD], f"least predicted step, {costs.name}"
            placement = make_placement(best, profile.counts, histograms, policy)
            artifact = write(placement)
    document = prediction_document(
        scenario,
        decision,
        partition=None if placement is None else placement.partition,
        counts=profile.counts,
        sensitivity=sensitivity,
    )
    stats = {} if placement is None else cache_statistics(scenario, placement)
    if isinstance(kind, CostPlacement):
        config = _declined(config, decision.chosen)
    return TrainingPlan(config, placement, artifact, document, costs, stats)


def read_training_plan(config: Config, run_dir: Path) -> TrainingPlan:
    """Reads the plan that a run recorded when it started.

    Raises:
        ArtifactError: If its partition is missing or altered.
    """
    path, prediction = run_dir / PREDICTION, None
    if path.exists():
        try:
            prediction = json.loads(path.read_text())
            chosen = prediction["chosen"]
            prediction["plans"][chosen]
        except (OSError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise ArtifactError(
                f"{path}: expected the plan that the run chose, got {error!r}. Start a new run."
            ) from error
    if isinstance(config.placement, CostPlacement):
        if prediction is None:
            raise ArtifactError(
                f"{path}: expected the plan that the run chose, got no such file. Start a new run."
            )
        config = _declined(config, prediction["chosen"])
    if not isinstance(config.placement, HotColdConfig):
        return TrainingPlan(config, None, None, prediction)
    saved = run_dir / PARTITION
    if isinstance(config.placement, SavedPlacement):
        saved = Path(config.placement.partition_dir)
    placement, artifact = read_placement(saved)
    return TrainingPlan(config, placement, artifact, prediction)


def _declined(config: Config, chosen: str) -> Config:
    """Returns the configuration that trains the chosen plan."""
    return config if chosen == HOT_COLD else torchrec_baselines(config)[chosen]


def _predict_given(
    config: Config,
    dataset: Dataset,
    scenario: Scenario,
    placement: Placement | None,
    *,
    is_plan: bool,
) -> Decision:
    """Predicts the configured placement.

    Raises:
        CostsError: If the costs lack what it needs.
    """
    if placement is None:
        name = torchrec_name(config)
        predicted = predict_torchrec_config(config, dataset.schema, scenario)
    else:
        name = HOT_COLD
        num_hot = {t: placement.partition.num_hot(t) for t in placement.partition.num_rows}
        predicted = predict_placement(
            scenario, num_hot, placement.tables, is_hot_dense=placement.is_hot_dense
        )
    others = predict_baselines(config, dataset.schema, scenario) if is_plan else {}
    why = f"placement={config.placement.kind.name} is configured."
    return Decision(name, why, {**others, name: predicted})


def _apply_policy(
    kind: HotColdConfig, config: Config, dataset: Dataset, machine: Machine, profile: Profile
) -> Placement:
    if isinstance(kind, ScarsPlacement):
        machine = replace(machine, costs=choose_costs(config, machine)[0])
    partition = choose_partition(
        kind,
        profile,
        machine,
        row_bytes=row_bytes(dataset.schema, config),
        dim=config.model.embedding_dim,
    )
    return as_placement(kind, partition, machine.device)
