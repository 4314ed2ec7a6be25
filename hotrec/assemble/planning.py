"""Plans of runs: made for a job, or read from the record of a run.

``hotrec plan`` and ``hotrec train`` make the plan from the job; a resumed run and
``hotrec evaluate`` read the recorded one.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torchrec.distributed.types import ShardingPlan

from hotrec.artifact import Artifact, ArtifactError, check_made_from, read_record
from hotrec.assemble.counted import read_counts
from hotrec.assemble.job import Job, torchrec_tables_of
from hotrec.assemble.model import build_unsharded
from hotrec.assemble.plan_job import (
    costs_on,
    loader_on,
    make_request,
    policy_parameters,
    request_for,
    situation_of,
    trial_facts,
)
from hotrec.assemble.torchrec_plan import shardings_by
from hotrec.config.groups import CostPlacement, SavedPlacement, TorchrecPlacement
from hotrec.cost_model.costs import CostsError
from hotrec.cost_model.histogram import CountHistogram
from hotrec.cost_model.profile import Profile
from hotrec.planner.document import prediction_document
from hotrec.planner.machine import Machine
from hotrec.planner.partition import (
    most_accessed,
    read_placement,
    summarize_partition,
    write_partition,
)
from hotrec.planner.plan import Plan, SplitTables, TorchrecTables
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
    PipelineSpec,
    Placement,
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
        max_bytes: Predicted memory of the fullest rank, by MEMORIES; empty without a prediction.
        step_s: Predicted seconds of a step.
    """

    plan: Plan
    placement: Placement | None
    artifact: Artifact | None = None
    prediction: dict[str, Any] | None = None
    max_bytes: tuple[float, ...] = ()
    step_s: float = math.nan

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
        job: The job.
        request: The request to the planner.
        machine: The ranks.
        saved: The saved partition that was configured.
        counted: The profile and its artifact.
        histograms: The profile's histogram of every table.
        situation: The predicted situation; None without predictions.
        decision: The choice by prediction; None without predictions.
    """

    job: Job
    request: PlanRequest
    machine: Machine
    saved: Artifact | None
    counted: tuple[Profile, Artifact]
    histograms: Mapping[str, CountHistogram]
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
        if self.situation is None or self.decision is None:
            return SettledPlan(plan, getattr(self.request.tables, "placement", None))
        prediction, placement = self.decision.predictions[plan], self.decision.placement
        if placement is None and isinstance(plan.tables, SplitTables):
            policy = f"least step, {self.situation.costs.name}"
            counts = self.counted[0].counts
            placement = most_accessed(plan.tables, counts, self.histograms, policy)
        max_bytes, step_s = prediction.max_bytes, prediction.step_s
        return SettledPlan(plan, placement, max_bytes=max_bytes, step_s=step_s)

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
            **trial_facts(self.job),
            "versions": read_fingerprint(self.situation.machine.device),
            # New costs stand for a new machine, or the same one in another state.
            "costs": self.situation.costs.to_json(),
            "dataset": self.job.dataset.artifact.content_hash,
            "machine": replace(self.situation.machine, host_bytes=0, device_bytes=0),
            "candidates": sorted(self.candidates),
        }
        return trial_file(Path(self.job.config.paths.trials), facts)

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
        decision = self.decision
        if self.situation is None or decision is None:
            settled = self._settled(unpredicted(self.request, self.machine))
        else:
            if trial is not None:
                chosen, why = self.candidates[trial.chosen].plan, trial.why(self._words("title"))
                decision = replace(decision, chosen=chosen, why=why)
            logger.info("%s", decision.why)
            settled = self._settled(decision.chosen)
            document = prediction_document(self.situation, decision, trial=trial)
            settled = replace(settled, prediction=document)
        artifact = self.saved
        if artifact is None and settled.placement is not None:
            artifact = self._write(settled.placement, output)
        return replace(settled, artifact=artifact)

    def _write(self, placement: Placement, output: Path) -> Artifact:
        profile, profile_artifact = self.counted
        return write_partition(
            placement,
            output,
            parameters=policy_parameters(self.job),
            summary=summarize_partition(placement.partition, profile, self.job.spec.row_bytes),
            dataset_hash=self.job.dataset.artifact.content_hash,
            profile_hash=profile_artifact.content_hash,
            planned_for=_planned_for(self.machine),
        )


def make_proposal(job: Job, machine: Machine, *, is_plan: bool = False) -> Proposal:
    """Predicts the candidates of a job, on one process.

    Args:
        job: The job.
        machine: The ranks to plan for.
        is_plan: Whether to also predict TorchRec's plans, for ``hotrec plan``.

    Raises:
        ArtifactError: If the saved partition is missing or of another dataset, or the profile is
            damaged.
        ValueError: If the policy cannot be satisfied, the rows do not fit the memory, or the costs
            for a cost-based choice are of another kind of machine.
    """
    asked, dataset = job.config.placement, job.dataset
    is_by_cost = isinstance(asked, CostPlacement)
    placement, saved = None, None
    if isinstance(asked, SavedPlacement):
        placement, saved = read_placement(Path(job.config.paths.partition))
        check_made_from(saved, dataset.artifact)
        _warn_of_another_situation(saved, machine)
    profile, profile_artifact = read_counts(dataset)
    request, histograms = make_request(job, machine, profile, placement), profile.build_histograms()
    without = Proposal(job, request, machine, saved, (profile, profile_artifact), histograms)
    costs = costs_on(job, machine)
    request = replace(request, num_workers=loader_on(job, machine, costs[0])[0])

    def shard(tables: TorchrecTables, pipeline: PipelineSpec) -> ShardingPlan:
        return build_unsharded(job.spec, Plan(tables, pipeline), None, machine).plan(machine)

    names, rule = job.spec.row_bytes, job.spec.embedding
    try:
        situation = situation_of(job, machine, profile, histograms, costs)
        shardings = shardings_by(shard, names, machine, rule, is_exact=is_by_cost)
        decision = propose(request, situation, shardings, with_baselines=is_plan)
    except CostsError as error:
        if is_by_cost:
            raise
        logger.warning("no prediction: %s", error)
        if (slots := getattr(request.tables, "slots", None)) is not None and slots.place:
            logger.warning(
                "no prediction: using the default placement.cache_load_frac=%s", DEFAULT_LOAD_FRAC
            )
        return without
    return replace(without, request=request, situation=situation, decision=decision)


def read_settled_plan(job: Job, run_dir: Path, machine: Machine) -> SettledPlan:
    """Reads the plan that a run recorded when it started.

    Args:
        job: The job of the run.
        run_dir: Its directory.
        machine: The ranks, in case the run recorded no prediction and its pipeline is auto.

    Raises:
        ArtifactError: If the record or its partition is missing or altered.
    """
    prediction, recorded = _read_recorded(job, run_dir)
    placement, artifact = recorded_partition(job, run_dir)
    tables: GivenTables | TorchrecTables | None = torchrec_tables_of(job.config.placement)
    if placement is not None:
        tables = GivenTables(placement)
    elif tables is None:
        assert recorded is not None, run_dir
        assert isinstance(recorded.tables, TorchrecTables), run_dir
        tables = recorded.tables
    request = request_for(job, tables)
    if recorded is not None:
        request = replace(request, pipeline=request.pipeline.with_kind(recorded.pipeline.kind))
    return SettledPlan(unpredicted(request, machine), placement, artifact, prediction)


def recorded_partition(job: Job, run_dir: Path) -> tuple[Placement, Artifact] | tuple[None, None]:
    """The partition that a run trained, with its place; None and None for TorchRec's plans.

    Raises:
        ArtifactError: If it is missing or altered.
    """
    asked, (_, recorded) = job.config.placement, _read_recorded(job, run_dir)
    is_declined = recorded is not None and isinstance(recorded.tables, TorchrecTables)
    if isinstance(asked, TorchrecPlacement) or (isinstance(asked, CostPlacement) and is_declined):
        return None, None
    if isinstance(asked, SavedPlacement):
        return read_placement(Path(job.config.paths.partition))
    return read_placement(run_dir / PARTITION)


def _read_recorded(job: Job, run_dir: Path) -> tuple[dict[str, Any] | None, Plan | None]:
    """The prediction document of a run and the plan that it chose; None and None without one."""
    path = run_dir / PREDICTION
    if not path.exists() and not isinstance(job.config.placement, CostPlacement):
        return None, None
    try:
        prediction = json.loads(read_record(path))
        return prediction, Plan.from_json(prediction["plan"])
    except (OSError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ArtifactError(
            f"{path}: expected the recorded plan of the run, got {error!r}. Start a new run."
        ) from error


def _planned_for(machine: Machine) -> dict[str, int]:
    return {
        "num_ranks": machine.world_size,
        "ranks_per_host": machine.world.ranks_per_host,
        "batch_size": machine.batch_size,
    }


def _warn_of_another_situation(artifact: Artifact, machine: Machine) -> None:
    with artifact.parsing():
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
