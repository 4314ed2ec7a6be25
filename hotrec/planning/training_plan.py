"""What is trained: the placement's policy, a saved partition or the cost model; and what it costs.

``hotrec plan`` and ``hotrec train`` settle it from the configuration; a resumed run and
``hotrec evaluate`` take what the run recorded.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from hotrec.artifact import Artifact, ArtifactError, check_made_from
from hotrec.config.placements import CostPlacement, HotColdConfig, SavedPlacement, TorchrecPlacement
from hotrec.config.roots import Config
from hotrec.cost_model.costs import Costs, CostsError, World
from hotrec.cost_model.histogram import CountHistogram
from hotrec.cost_model.profile import Profile, read_profile
from hotrec.data.chunks import Dataset
from hotrec.planning.choose import Terms, choose_partition, policy_parameters
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
    HOST_RIVALS,
    HOT_COLD,
    RIVALS,
    Decision,
    Rival,
    make_placement,
    miss_curves,
    predict_placement,
    predict_plan,
    predict_rivals,
)
from hotrec.planning.scenario import Situation, choose_costs, describe_situation, planned_pipeline
from hotrec.planning.unsharded import as_placement, build_unsharded, replica_memory_bytes, row_bytes
from hotrec.runtime.run_dir import PARTITION, PREDICTION
from hotrec.types import Partition, Placement

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settled:
    """What is trained.

    Args:
        config: with TorchRec's placement where the cost model declined to split.
        placement: None for TorchRec's plans on unsplit tables.
        artifact: the partition; None for those.
        prediction: the document of ``hotrec.planning.document``; None where nothing can be
            predicted, which was logged with the reason.
        costs: with which it was predicted.
        curves: misses of the device caches of host tables, by table.
    """

    config: Config
    placement: Placement | None
    artifact: Artifact | None
    prediction: dict[str, Any] | None
    costs: Costs | None = None
    curves: Mapping[str, MissCurve] = field(default_factory=dict)

    def machine(self, machine: Machine) -> Machine:
        """The machine for TorchRec's planner; TorchRec's own plans keep TorchRec's own figures."""
        return machine if self.placement is None else replace(machine, costs=self.costs)

    @property
    def partition(self) -> Partition | None:
        return None if self.placement is None else self.placement.partition

    @property
    def predicted(self) -> Mapping[str, Any] | None:
        """The prediction of what is trained: an entry of the document's plans."""
        if self.prediction is None:
            return None
        entry: Mapping[str, Any] = self.prediction["plans"][self.prediction["chosen"]]
        return entry


@dataclass(frozen=True)
class Profiled:
    """A profile of this dataset, read."""

    profile: Profile
    artifact: Artifact
    histograms: Mapping[str, CountHistogram]


def settle(
    config: Config, dataset: Dataset, machine: Machine, *, output: Path, is_plan: bool = False
) -> Settled:
    """Choose what to train, on one process.

    Args:
        output: where a newly chosen partition is written; a saved one stays where it is.
        is_plan: also predict TorchRec's plans and the sensitivity, for people to compare.

    Raises:
        ArtifactError: if the profile or the saved partition is missing, or of another dataset.
        ValueError: if the policy cannot be followed, the rows do not fit the memory, or the cost
            model is asked and the costs are of another kind of machine.
    """
    if isinstance(config.placement, CostPlacement):
        return _settle_by_cost(config, dataset, machine, output=output, is_plan=is_plan)
    if isinstance(config.placement, SavedPlacement):
        placement, artifact = read_placement(Path(config.placement.partition_dir))
        num_rows = {table.name: table.num_rows for table in dataset.schema.tables}
        dataset_hash = dataset.artifact.content_hash
        check_partition(artifact, dataset_hash=dataset_hash, num_rows=num_rows)
        profiled = _profile_if_there(config, dataset)
    elif isinstance(config.placement, HotColdConfig):
        profiled = _read_profiled(config, dataset)
        terms = _terms(config, dataset, machine)
        partition = choose_partition(config.placement, profiled.profile, terms)
        placement = as_placement(config.placement, partition, machine.device)
        artifact = _write(config, placement, dataset, profiled, terms, output)
    else:
        profiled = _profile_if_there(config, dataset)
        predicted = _predict_given(config, dataset, machine, profiled, None, is_plan=is_plan)
        return Settled(config, None, None, None if predicted is None else predicted[0])
    predicted = _predict_given(config, dataset, machine, profiled, placement, is_plan=is_plan)
    if predicted is None:
        return Settled(config, placement, artifact, None)
    document, situation = predicted
    curves = miss_curves(situation, placement)
    return Settled(config, placement, artifact, document, situation.costs, curves)


def settled_before(config: Config, run_dir: Path) -> Settled:
    """What a run recorded when it started.

    Raises:
        ArtifactError: if its partition is missing or altered.
    """
    prediction = read_prediction(run_dir)
    placement = config.placement
    if isinstance(placement, CostPlacement):
        if prediction is None:
            raise ArtifactError(
                f"{run_dir / PREDICTION}: expected what the run chose to train, got no such file. "
                "Start a new run."
            )
        config = _declined(config, prediction["chosen"])
        placement = config.placement
    if not isinstance(placement, HotColdConfig):
        return Settled(config, None, None, prediction)
    saved = placement.partition_dir if isinstance(placement, SavedPlacement) else None
    found, artifact = read_placement(Path(saved) if saved else run_dir / PARTITION)
    return Settled(config, found, artifact, prediction)


def _declined(config: Config, chosen: str) -> Config:
    """The configuration of the plan that was chosen, where that is one of TorchRec's."""
    if chosen == HOT_COLD:
        return config
    rival = next(rival for rival in (*RIVALS, *HOST_RIVALS) if rival.name == chosen)
    return rival.configure(config)


def _settle_by_cost(
    config: Config, dataset: Dataset, machine: Machine, *, output: Path, is_plan: bool
) -> Settled:
    from hotrec.planning.optimum import decide  # its solver starts slowly

    profiled = _read_profiled(config, dataset)
    situation = _situation(config, dataset, machine, profiled)
    decision = decide(config, dataset.schema, situation)
    placement = artifact = None
    if decision.chosen == HOT_COLD:
        policy = f"least predicted step, {situation.costs.name}"
        placement = make_placement(
            decision.predicted[HOT_COLD], profiled.profile.counts, profiled.histograms, policy
        )
        terms = _terms(config, dataset, machine)
        artifact = _write(config, placement, dataset, profiled, terms, output)
    document = _document(
        config, dataset, situation, decision, profiled, placement, with_sensitivity=is_plan
    )
    logger.info("%s", decision.why)
    return Settled(
        _declined(config, decision.chosen),
        placement,
        artifact,
        document,
        situation.costs,
        miss_curves(situation, placement),
    )


def _predict_given(
    config: Config,
    dataset: Dataset,
    machine: Machine,
    profiled: Profiled | None,
    placement: Placement | None,
    *,
    is_plan: bool,
) -> tuple[dict[str, Any], Situation] | None:
    """Predict what the user asked for; None, with the reason logged, where that cannot be done."""
    if profiled is None:
        logger.info("no prediction: no profile of this dataset at %s", config.paths.profile)
        return None
    try:
        situation = _situation(config, dataset, machine, profiled)
        name, predicted = HOT_COLD, {}
        if placement is not None:
            num_hot = {t: placement.partition.num_hot(t) for t in placement.partition.num_rows}
            predicted[name] = predict_placement(
                situation, num_hot, placement.tables, is_hot_dense=placement.is_hot_dense
            )
        else:
            assert isinstance(config.placement, TorchrecPlacement)
            rival = Rival.of(config)
            name = rival.name
            plan = build_unsharded(
                config,
                dataset.schema,
                None,
                world_size=machine.world_size,
                compute_device=machine.device,
                dense_device=torch.device("meta"),
            ).plan(machine)
            predicted[name] = predict_plan(
                situation,
                plan,
                config.placement.cache_load_frac,
                is_prefetched=rival.is_prefetched,
            )
        if is_plan:
            predicted = predict_rivals(config, dataset.schema, situation) | predicted
    except CostsError as error:
        logger.warning("no prediction: %s", error)
        return None
    why = f"placement={config.placement.kind.name} was asked for."
    decision = Decision(name, why, None, predicted)
    document = _document(
        config, dataset, situation, decision, profiled, placement, with_sensitivity=False
    )
    return document, situation


def _document(
    config: Config,
    dataset: Dataset,
    situation: Situation,
    decision: Decision,
    profiled: Profiled,
    placement: Placement | None,
    *,
    with_sensitivity: bool,
) -> dict[str, Any]:
    sensitivity: list[dict[str, Any]] = []
    if with_sensitivity and config.plan.sensitivity:
        from hotrec.planning.optimum import predict_sensitivity

        sensitivity = predict_sensitivity(
            config,
            dataset.schema,
            situation,
            decision,
            profiled.histograms,
            profiled.profile.num_samples,
            profiled.profile.locality,
        )
    return prediction_document(
        situation,
        decision,
        partition=None if placement is None else placement.partition,
        counts=profiled.profile.counts,
        sensitivity=sensitivity,
    )


def _situation(config: Config, dataset: Dataset, machine: Machine, profiled: Profiled) -> Situation:
    costs, note = choose_costs(config, machine.device)
    if note is not None:
        logger.info("costs: %s", note)
    return describe_situation(
        config,
        dataset.schema,
        profiled.histograms,
        profiled.profile.num_samples,
        machine,
        costs,
        note,
        profiled.profile.locality,
        planned_pipeline(config, machine),
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


def _terms(config: Config, dataset: Dataset, machine: Machine) -> Terms:
    bytes_of_row = row_bytes(dataset.schema, config)
    return Terms(
        row_bytes=bytes_of_row,
        global_batch_size=config.trainer.batch_size * machine.world_size,
        memory_bytes=replica_memory_bytes(machine),
        num_ranks=machine.world_size,
        num_hosts=machine.world_size // machine.local_world_size,
        dims=dict.fromkeys(bytes_of_row, config.model.embedding_dim),
        row_seconds=lambda: _row_seconds(config, machine),
    )


def _row_seconds(config: Config, machine: Machine) -> tuple[float, float]:
    """Seconds on the wire of a cold row, both ways, and of a hot row in a dense all-reduce."""
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
    terms: Terms,
    output: Path,
) -> Artifact:
    assert isinstance(config.placement, HotColdConfig)
    return write_partition(
        placement,
        output,
        parameters=policy_parameters(config.placement),
        summary=summarize_partition(placement.partition, profiled.profile, terms.row_bytes),
        dataset_hash=dataset.artifact.content_hash,
        profile_hash=profiled.artifact.content_hash,
    )
