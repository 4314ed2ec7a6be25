"""Plans of runs: made for a job, or read from the record of a run.

``hotrec plan`` and ``hotrec train`` make the plan from the job; a resumed run and
``hotrec evaluate`` read the recorded one.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from hotrec.artifact import Artifact, ArtifactError, check_made_from, read_record
from hotrec.assemble.model import build_unsharded
from hotrec.assemble.plan_job import PlanJob, SavedSplit
from hotrec.assemble.torchrec_plan import shardings_of, why_inexact
from hotrec.cost_model.costs import Costs, CostsError
from hotrec.cost_model.histogram import CountHistogram
from hotrec.cost_model.profile import Profile, read_profile
from hotrec.data.chunks import Dataset
from hotrec.planner.document import prediction_document
from hotrec.planner.machine import Machine
from hotrec.planner.partition import (
    most_accessed,
    read_placement,
    summarize_partition,
    write_partition,
)
from hotrec.planner.plan import Plan, SplitTables, TorchrecTables
from hotrec.planner.predict import Shardings
from hotrec.planner.propose import (
    Decision,
    in_doubt,
    propose,
    unpredicted,
)
from hotrec.planner.request import ByCost, GivenTables, PlanRequest
from hotrec.planner.situation import Situation
from hotrec.planner.trial import Trial, read_trial, trial_file
from hotrec.runtime.memory import read_fingerprint
from hotrec.runtime.run_dir import PARTITION, PREDICTION
from hotrec.types import (
    DEFAULT_LOAD_FRAC,
    Partition,
    PipelineKind,
    PipelineSpec,
    Placement,
    TorchrecPlan,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SettledPlan:
    """A plan with everything needed to train it.

    Args:
        plan: The plan.
        placement: The hot rows of split tables and the place of the others; None for TorchRec's
            plans.
        artifact: The partition's directory, or None without a placement.
        prediction: The document of ``hotrec.planner.document``, or None without a prediction.
        costs: The costs of the prediction.
        max_bytes: Predicted memory of the fullest rank, by MEMORIES; empty without a prediction.
        step_s: Predicted seconds of a step.
    """

    plan: Plan
    placement: Placement | None
    artifact: Artifact | None = None
    prediction: dict[str, Any] | None = None
    costs: Costs | None = None
    max_bytes: tuple[float, ...] = ()
    step_s: float = math.nan

    def machine(self, machine: Machine) -> Machine:
        """Returns the machine with hotrec's costs, or TorchRec's for its own plans."""
        return machine if self.placement is None else replace(machine, costs=self.costs)

    @property
    def partition(self) -> Partition | None:
        return None if self.placement is None else self.placement.partition

    @property
    def predicted(self) -> Mapping[str, Any] | None:
        """The prediction document's entry of the plan to train."""
        if self.prediction is None:
            return None
        entry: Mapping[str, Any] = self.prediction["plans"][self.prediction["chosen"]]
        return entry


@dataclass(frozen=True)
class Proposal:
    """The candidates of a run with their predictions, on one process; see ``make_proposal``.

    Args:
        job: The planner's inputs from the job.
        request: The request to the planner, with the profile.
        dataset: The dataset.
        machine: The ranks.
        placement: The configured placement; None to choose by cost, or for TorchRec's plans.
        artifact: The saved partition that was configured.
        counted: The profile and its artifact; None without one.
        histograms: The profile's histogram of every table.
        situation: The predicted situation; None without predictions.
        decision: The choice by prediction; None without predictions.
    """

    job: PlanJob
    request: PlanRequest
    dataset: Dataset
    machine: Machine
    placement: Placement | None
    artifact: Artifact | None
    counted: tuple[Profile, Artifact] | None = None
    histograms: Mapping[str, CountHistogram] = field(default_factory=dict)
    situation: Situation | None = None
    decision: Decision | None = None

    @cached_property
    def candidates(self) -> dict[str, SettledPlan]:
        """The candidates with overlapping predictions, by digest, the best first."""
        if self.situation is None or self.decision is None:
            return {}
        tables = self.request.tables
        may_decline = isinstance(tables, ByCost) and tables.may_decline
        plans = in_doubt(self.decision, self.situation.costs, may_decline=may_decline)
        return {plan.digest: self._settled(plan) for plan in plans}

    def _settled(self, plan: Plan) -> SettledPlan:
        assert self.situation is not None
        assert self.decision is not None
        assert self.counted is not None
        prediction, placement = self.decision.predictions[plan], self.decision.placement
        if placement is None and isinstance(plan.tables, SplitTables):
            policy = f"least step, {self.situation.costs.name}"
            counts = self.counted[0].counts
            placement = most_accessed(plan.tables, counts, self.histograms, policy)
        return SettledPlan(
            plan,
            placement,
            costs=self.situation.costs,
            max_bytes=prediction.max_bytes,
            step_s=prediction.step_s,
        )

    def predicted_s(self, num_steps: int) -> tuple[float, float]:
        """Predicted seconds of ``num_steps`` steps of the best candidate, and their upper end."""
        assert self.situation is not None
        assert self.decision is not None
        run_s = num_steps * self.decision.prediction.step_s
        return run_s, self.situation.costs.interval_s(run_s)[1]

    @property
    def recorded_trial(self) -> Trial | None:
        """The trial of these candidates that an earlier run recorded, if any."""
        if len(self.candidates) < 2:
            return None
        return read_trial(self.trial_file, self._words("label"))

    @property
    def trial_file(self) -> Path:
        """The file for a trial of these candidates with this model, data and machine."""
        assert self.situation is not None
        facts = {
            **self.job.trial_facts,
            "versions": read_fingerprint(self.situation.machine.device),
            # New costs stand for a new machine, or the same one in another state.
            "costs": self.situation.costs.to_json(),
            "dataset": self.dataset.artifact.content_hash,
            "machine": replace(self.situation.machine, costs=None, host_bytes=0, device_bytes=0),
            "candidates": sorted(self.candidates),
        }
        return trial_file(self.job.folders["trials"], facts)

    def _words(self, name: str) -> dict[str, str]:
        """The label or the title of every plan, by digest."""
        assert self.decision is not None
        return {plan.digest: getattr(plan, name) for plan in self.decision.predictions}

    def settle(self, output: Path, trial: Trial | None = None) -> SettledPlan:
        """Chooses the plan, by the trial if there was one, and writes a new partition.

        Args:
            output: Directory for a new partition. A saved one is not copied.
            trial: Measurements of the candidates.
        """
        if self.situation is None or self.decision is None:
            plan = unpredicted(self.request, self.machine)
            settled = SettledPlan(plan, self.placement)
        else:
            decision = self.decision
            if trial is not None:
                decision = replace(
                    decision,
                    chosen=self.candidates[trial.chosen].plan,
                    why=trial.why(self._words("title")),
                )
            logger.info("%s", decision.why)
            settled = self._settled(decision.chosen)
            assert self.counted is not None
            document = prediction_document(
                self.situation,
                decision,
                partition=settled.partition,
                counts=self.counted[0].counts,
                trial=trial,
            )
            settled = replace(settled, prediction=document)
        artifact = self.artifact
        if artifact is None and settled.placement is not None:
            artifact = self._write(settled.placement, output)
        return replace(settled, artifact=artifact)

    def _write(self, placement: Placement, output: Path) -> Artifact:
        assert self.counted is not None
        profile, profile_artifact = self.counted
        return write_partition(
            placement,
            output,
            parameters=self.job.parameters,
            summary=summarize_partition(placement.partition, profile, self.job.spec.row_bytes),
            dataset_hash=self.dataset.artifact.content_hash,
            profile_hash=profile_artifact.content_hash,
            planned_for=_planned_for(self.machine),
        )


def make_proposal(
    job: PlanJob, dataset: Dataset, machine: Machine, *, is_plan: bool = False
) -> Proposal:
    """Predicts the candidates of a job, on one process.

    Args:
        job: The planner's inputs from the job.
        dataset: Its dataset.
        machine: The ranks to plan for.
        is_plan: Whether to also predict TorchRec's plans, for ``hotrec plan``.

    Raises:
        ArtifactError: If the profile or the saved partition is missing, or of another dataset.
        ValueError: If the policy cannot be satisfied, the rows do not fit the memory, or the costs
            for a cost-based choice are of another kind of machine.
    """
    placement, artifact = None, None
    if isinstance(job.tables, SavedSplit):
        placement, artifact = read_placement(job.tables.directory)
        check_made_from(artifact, dataset.artifact)
        _warn_of_another_situation(artifact, machine)

    def proposal(request: PlanRequest, **of_profile: Any) -> Proposal:
        placed = getattr(request.tables, "placement", None)
        return Proposal(job, request, dataset, machine, placed, artifact, **of_profile)

    try:
        profile, profile_artifact = read_profile(job.folders["profile"])
        check_made_from(profile_artifact, dataset.artifact)
    except ArtifactError as error:
        if not isinstance(job.tables, SavedSplit | TorchrecTables):
            raise
        # As text: the traceback of an error in a kept log record would keep the dataset open.
        logger.info("no prediction: %s", str(error))
        return proposal(job.request(dataset, machine, None, placement))
    request = job.request(dataset, machine, profile, placement)
    histograms = profile.build_histograms()
    without = proposal(request, counted=(profile, profile_artifact), histograms=histograms)
    costs = job.costs_on(machine)
    workers, _ = job.loader_on(machine, costs[0])
    request = replace(request, num_workers=workers)

    reads_sequences = job.spec.architecture.reads_sequences

    def describe(machine: Machine) -> Situation:
        return job.situation(machine, profile, histograms, costs)

    def shardings(tables: TorchrecTables, pipeline: PipelineSpec) -> Shardings | str:
        is_theirs, is_by_hand = tables == job.tables, tables.plan is TorchrecPlan.hand_tuned
        if reads_sequences and is_by_hand and machine.device == "cpu" and not is_theirs:
            return "FBGEMM looks its data-parallel tables up in another order on a CPU"
        # An optimizer that the device cannot train is an error, tables that do not fit are not.
        unsharded = build_unsharded(job.spec, Plan(tables, pipeline), None, machine)
        try:
            sharding = unsharded.plan(machine)
        except ValueError as error:
            return str(error)
        found = shardings_of(
            sharding,
            {table.name for table in dataset.schema.tables},
            tables.cache_load_frac,
            is_prefetched=pipeline.kind is PipelineKind.prefetch,
        )
        inexact = why_inexact(found, machine, job.spec.embedding)
        # Who asks for a plan of TorchRec's gets it; a choice must not change what is trained.
        return inexact if inexact is not None and isinstance(job.tables, ByCost) else found

    try:
        situation = describe(machine)
        decision = propose(request, situation, shardings, with_baselines=is_plan)
    except CostsError as error:
        if isinstance(job.tables, ByCost):
            raise
        logger.warning("no prediction: %s", error)
        if (slots := getattr(request.tables, "slots", None)) is not None and slots.place:
            logger.warning(
                "no prediction: using the default placement.cache_load_frac=%s", DEFAULT_LOAD_FRAC
            )
        return without
    return replace(
        without,
        request=request,
        placement=decision.placement,
        situation=situation,
        decision=decision,
    )


def read_settled_plan(job: PlanJob, run_dir: Path, machine: Machine) -> SettledPlan:
    """Reads the plan that a run recorded when it started.

    Args:
        job: The planner's inputs from the job of the run.
        run_dir: Its directory.
        machine: The ranks, in case the run recorded no prediction and its pipeline is auto.

    Raises:
        ArtifactError: If its partition is missing or altered.
    """
    recorded = _read_recorded(job, run_dir)
    placement, artifact = _partition_of(recorded, job, run_dir)
    tables = recorded.torchrec if placement is None else GivenTables(placement)
    assert tables is not None, run_dir
    request = job.request_for(tables)
    if recorded.kind is not None:
        request = replace(request, pipeline=request.pipeline.with_kind(recorded.kind))
    plan = unpredicted(request, machine)
    return SettledPlan(plan, placement, artifact, recorded.prediction)


def recorded_partition(
    job: PlanJob, run_dir: Path
) -> tuple[Placement, Artifact] | tuple[None, None]:
    """The partition that a run trained, with its place; None and None for TorchRec's plans.

    Raises:
        ArtifactError: If it is missing or altered.
    """
    return _partition_of(_read_recorded(job, run_dir), job, run_dir)


def _partition_of(
    recorded: _Recorded, job: PlanJob, run_dir: Path
) -> tuple[Placement, Artifact] | tuple[None, None]:
    if recorded.torchrec is not None:
        return None, None
    asked = job.tables
    saved = asked.directory if isinstance(asked, SavedSplit) else run_dir / PARTITION
    return read_placement(saved)


@dataclass(frozen=True)
class _Recorded:
    """A run's record of its plan.

    Args:
        prediction: The prediction document; None if the run made none.
        kind: The chosen pipeline; None without a prediction.
        torchrec: The plan of TorchRec that it trained; None for split tables.
    """

    prediction: dict[str, Any] | None
    kind: PipelineKind | None
    torchrec: TorchrecTables | None


def _read_recorded(job: PlanJob, run_dir: Path) -> _Recorded:
    path, is_by_cost = run_dir / PREDICTION, isinstance(job.tables, ByCost)
    torchrec = job.tables if isinstance(job.tables, TorchrecTables) else None
    if not path.exists():
        if is_by_cost:
            raise ArtifactError(
                f"{path}: expected the recorded plan of the run, got no such file. Start a new run."
            )
        return _Recorded(None, None, torchrec)
    try:
        prediction = json.loads(read_record(path))
        kind, chosen = _recorded_plan(prediction)
    except (OSError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ArtifactError(
            f"{path}: expected the recorded plan of the run, got {error!r}. Start a new run."
        ) from error
    return _Recorded(prediction, kind, chosen if is_by_cost else torchrec)


def _recorded_plan(prediction: Mapping[str, Any]) -> tuple[PipelineKind, TorchrecTables | None]:
    """The pipeline that a run chose, and the plan of TorchRec, if it chose one."""
    plan = Plan.from_json(prediction["plan"])
    tables = plan.tables if isinstance(plan.tables, TorchrecTables) else None
    return plan.pipeline.kind, tables


def _planned_for(machine: Machine) -> dict[str, int]:
    return {
        "num_ranks": machine.world_size,
        "ranks_per_host": machine.world.ranks_per_host,
        "batch_size": machine.batch_size,
    }


def _warn_of_another_situation(artifact: Artifact, machine: Machine) -> None:
    # Partitions of earlier versions do not record what they were planned for.
    planned_for = artifact.content.get("planned_for") or {}
    differences = ", ".join(
        f"{name} {value} instead of {planned_for[name]}"
        for name, value in _planned_for(machine).items()
        if planned_for.get(name, value) != value
    )
    if differences:
        logger.warning(
            "%s was planned for different conditions: %s. Another plan may be faster",
            *(artifact.path, differences),
        )
