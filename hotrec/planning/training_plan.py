"""The training plan: the placement to train and its predicted step.

``hotrec plan`` and ``hotrec train`` make it from the configuration; a resumed run and
``hotrec evaluate`` read the one that the run recorded.
"""

from __future__ import annotations

import json
import logging
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from torchrec.distributed.types import CacheStatistics

from hotrec.artifact import Artifact, ArtifactError, check_made_from, read_record
from hotrec.config.groups import (
    CostPlacement,
    HotColdConfig,
    SavedPlacement,
    ScarsPlacement,
    TieredConfig,
    TorchrecPlacement,
)
from hotrec.config.roots import Config
from hotrec.cost_model.costs import Costs, CostsError
from hotrec.cost_model.histogram import CountHistogram
from hotrec.cost_model.profile import Profile, read_profile
from hotrec.data.chunks import Dataset
from hotrec.planning.document import candidate_names, prediction_document
from hotrec.planning.machine import Machine
from hotrec.planning.names import with_names
from hotrec.planning.optimum import Decision, fastest_of, in_doubt
from hotrec.planning.partition import read_placement, summarize_partition, write_partition
from hotrec.planning.policies import choose_partition, choose_popular_rows, policy_parameters
from hotrec.planning.predict import (
    Predicted,
    SlotsError,
    cache_statistics,
    check_slots,
    is_own,
    make_placement,
    own_name,
    predict_baselines,
    predict_placement,
    predict_torchrec_config,
    torchrec_baselines,
    torchrec_name,
    with_faster_fetch,
    with_pipeline,
)
from hotrec.planning.replay import Replayed, SlotReplay
from hotrec.planning.scenario import (
    Loader,
    Scenario,
    candidate_pipelines,
    choose_costs,
    describe_scenario,
)
from hotrec.planning.trial import Trial, read_trial, trial_file
from hotrec.planning.unsharded import as_placement, row_bytes
from hotrec.runtime.cores import choose_workers
from hotrec.runtime.memory import read_fingerprint
from hotrec.runtime.run_dir import PARTITION, PREDICTION
from hotrec.types import (
    DEFAULT_LOAD_FRAC,
    Partition,
    PipelineKind,
    Placement,
    PopularRows,
    RowFetch,
    Tier,
)

logger = logging.getLogger(__name__)

MEMORIES = ("device_bytes", "host_bytes")
# Slots to choose among, as fractions of the rows, and how much longer a step may take with fewer.
LOAD_FRACS = tuple(0.9 / 2 ** (half / 2) for half in reversed(range(20)))
MOST_LONGER_FRAC = 0.01


@dataclass(frozen=True)
class TrainingPlan:
    """The placement to train and its prediction.

    Args:
        config: The configuration, with the chosen pipeline, and with TorchRec's placement where
            splitting rows does not pay.
        placement: The placement, or None for TorchRec's plans on unsplit tables.
        artifact: The partition's directory, or None without a placement.
        prediction: The document of ``hotrec.planning.document``, or None without a prediction.
        costs: The costs of the prediction.
        cache_stats: Statistics of the device caches of host tables, by table.
        most_bytes: Predicted memory of the fullest rank, by MEMORIES.
        step_s: Predicted seconds of a step of a candidate.
    """

    config: Config
    placement: Placement | None
    artifact: Artifact | None
    prediction: dict[str, Any] | None
    costs: Costs | None = None
    cache_stats: Mapping[str, CacheStatistics] = field(default_factory=dict)
    most_bytes: tuple[float, ...] = ()
    step_s: float = math.nan

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
class Proposal:
    """The candidates of a configuration with their predictions, on one process; see ``propose``.

    Args:
        config: The configuration.
        dataset: Its dataset.
        machine: The ranks to plan for.
        placement: The configured placement; None to choose by cost, or for TorchRec's plans.
        artifact: The saved partition that was configured.
        counted: The profile and its artifact; None without one.
        histograms: The profile's histogram of every table.
        scenario: What the predictions are for; None without predictions.
        decision: The choice by prediction; None without predictions.
        sensitivity: Predictions with other budgets, batches and ranks.
    """

    config: Config
    dataset: Dataset
    machine: Machine
    placement: Placement | None
    artifact: Artifact | None
    counted: tuple[Profile, Artifact] | None = None
    histograms: Mapping[str, CountHistogram] = field(default_factory=dict)
    scenario: Scenario | None = None
    decision: Decision | None = None
    sensitivity: Sequence[Mapping[str, Any]] = ()

    @cached_property
    def candidates(self) -> dict[str, TrainingPlan]:
        """The candidates that predictions cannot tell apart, the best first."""
        if self.scenario is None or self.decision is None:
            return {}
        kind = self.config.placement
        names = in_doubt(
            self.decision,
            self.scenario.costs,
            may_decline=isinstance(kind, CostPlacement) and kind.may_decline,
        )
        return {name: self._plan(name) for name in names}

    def _plan(self, name: str) -> TrainingPlan:
        assert self.scenario is not None
        assert self.decision is not None
        assert self.counted is not None
        predicted, placement = self.decision.predicted[name], self.placement
        config = with_pipeline(self.config, predicted.pipeline.kind)
        if isinstance(config.placement, CostPlacement):
            if is_own(name):
                policy = f"least step, {self.scenario.costs.name}"
                placement = make_placement(
                    predicted, self.counted[0].counts, self.histograms, policy
                )
            else:
                config = torchrec_baselines(self.config)[name]
        stats = {} if placement is None else cache_statistics(self.scenario, placement)
        most = tuple(max(rank[of] for rank in predicted.memory) for of in MEMORIES)
        step_s = predicted.step.step_s
        return TrainingPlan(config, placement, None, None, self.scenario.costs, stats, most, step_s)

    def predicted_s(self, num_steps: int) -> tuple[float, float]:
        """Predicted seconds of ``num_steps`` steps of the best candidate, and their upper end."""
        assert self.scenario is not None
        assert self.decision is not None
        run_s = num_steps * self.decision.predicted[self.decision.chosen].step.step_s
        return run_s, self.scenario.costs.interval_s(run_s)[1]

    @property
    def recorded_trial(self) -> Trial | None:
        """The trial of these candidates that an earlier run recorded, if any."""
        if len(self.candidates) < 2:
            return None
        return read_trial(self.trial_file, self.candidates)

    @property
    def trial_file(self) -> Path:
        """Where a trial of these candidates, with this model, data and machine, is recorded."""
        assert self.scenario is not None
        assert self.decision is not None
        config, predicted = self.config, self.decision.predicted
        trainer, optimizer = config.trainer, config.optimizer
        situation = {
            "versions": read_fingerprint(self.scenario.machine.device),
            # New costs are a new machine, or the same one in another state.
            "costs": self.scenario.costs.to_json(),
            "dataset": self.dataset.artifact.content_hash,
            "machine": replace(self.scenario.machine, costs=None, host_bytes=0, device_bytes=0),
            "settings": [config.model, config.pipeline, config.placement],
            "optimizer": [optimizer.kind, optimizer.dense_kind],  # a step takes as long at any rate
            "trainer": [
                *(trainer.batch_size, trainer.precision, trainer.compile, trainer.num_workers),
                trainer.grad_clip_norm,
            ],
            "candidates": [
                [n, predicted[n].num_hot, predicted[n].tables, predicted[n].is_hot_dense]
                for n in sorted(self.candidates)
            ],
        }
        return trial_file(Path(config.paths.trials), situation)

    def settle(self, output: Path, trial: Trial | None = None) -> TrainingPlan:
        """Chooses, by a trial if there was one, and writes a new partition.

        Args:
            output: Where a new partition is written. A saved one is not copied.
            trial: What was measured of the candidates.
        """
        if self.scenario is None or self.decision is None:
            plan, document = TrainingPlan(self.config, self.placement, None, None), None
        else:
            decision = self.decision
            if trial is not None:
                decision = replace(decision, chosen=trial.chosen, why=trial.why)
            logger.info("%s", with_names(decision.why, candidate_names(decision)))
            plan = self._plan(decision.chosen)
            assert self.counted is not None
            document = prediction_document(
                self.scenario,
                decision,
                partition=plan.partition,
                counts=self.counted[0].counts,
                sensitivity=self.sensitivity,
                trial=trial,
            )
        artifact = self.artifact
        if artifact is None and plan.placement is not None:
            artifact = self._write(plan.placement, output)
        return replace(plan, artifact=artifact, prediction=document)

    def _write(self, placement: Placement, output: Path) -> Artifact:
        kind = self.config.placement
        assert isinstance(kind, HotColdConfig)
        assert self.counted is not None
        profile, profile_artifact = self.counted
        bytes_of_row = row_bytes(self.dataset.schema, self.config)
        return write_partition(
            placement,
            output,
            parameters=policy_parameters(kind),
            summary=summarize_partition(placement.partition, profile, bytes_of_row),
            dataset_hash=self.dataset.artifact.content_hash,
            profile_hash=profile_artifact.content_hash,
            planned_for=_situation(self.machine),
        )


def propose(
    config: Config, dataset: Dataset, machine: Machine, *, is_plan: bool = False
) -> Proposal:
    """Predicts the candidates of a configuration, on one process.

    Args:
        config: The configuration.
        dataset: Its dataset.
        machine: The ranks to plan for.
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
        _warn_of_another_situation(artifact, machine)
    try:
        profile, profile_artifact = read_profile(Path(config.paths.profile))
        check_made_from(profile_artifact, dataset.artifact)
    except ArtifactError as error:
        if not isinstance(kind, SavedPlacement | TorchrecPlacement):
            raise
        # The text: a handler that keeps records would keep the dataset open by the traceback.
        logger.info("no prediction: %s", str(error))
        return Proposal(config, dataset, machine, placement, artifact)
    counted, histograms = (profile, profile_artifact), profile.build_histograms()
    if isinstance(kind, HotColdConfig) and not isinstance(kind, SavedPlacement | CostPlacement):
        placement = _apply_policy(kind, config, dataset, machine, profile)
    without = Proposal(config, dataset, machine, placement, artifact, counted, histograms)
    costs, note = _choose_costs(config, machine)
    cores = costs.facts.get("cores_per_host") or costs.host.get("num_cores")
    if config.trainer.num_workers is None and cores:
        workers = choose_workers(machine.device, cores, machine.local_world_size)
        config = replace(config, trainer=replace(config.trainer, num_workers=workers))

    def describe(machine: Machine) -> Scenario:
        scenario = describe_scenario(
            config,
            dataset.schema,
            histograms,
            profile.num_samples,
            machine,
            costs,
            note,
            profile.locality,
        )
        workers = config.trainer.num_workers
        loader = Loader(workers, cores) if cores and workers is not None else None
        return replace(scenario, loader=loader)

    sensitivity: list[dict[str, Any]] = []
    try:
        scenario = describe(machine)
        if isinstance(kind, CostPlacement):
            # Its solver starts slowly.
            from hotrec.planning.optimum import decide, predict_sensitivity

            decision = decide(config, dataset.schema, scenario)
            if is_plan and config.plan.sensitivity is not False:
                best = fastest_of({n: p for n, p in decision.predicted.items() if is_own(n)})
                sensitivity = predict_sensitivity(
                    kind, scenario, decision.predicted[best], describe
                )
        elif placement is None:
            decision = _predict_torchrec(config, dataset, scenario, is_plan=is_plan)
        else:
            placement, decision = _predict_given(
                config, dataset, scenario, placement, profile, is_plan=is_plan
            )
    except CostsError as error:
        if isinstance(kind, CostPlacement):
            raise
        logger.warning("no prediction: %s", error)
        if _are_slots_open(config, placement):
            logger.warning("placement.cache_load_frac is %s without one", DEFAULT_LOAD_FRAC)
        return without
    return replace(
        without,
        placement=placement,
        scenario=scenario,
        decision=decision,
        sensitivity=sensitivity,
    )


def read_training_plan(config: Config, run_dir: Path) -> TrainingPlan:
    """Reads the plan that a run recorded when it started.

    Raises:
        ArtifactError: If its partition is missing or altered.
    """
    path, prediction = run_dir / PREDICTION, None
    if path.exists():
        try:
            prediction = json.loads(read_record(path))
            chosen = prediction["chosen"]
            pipeline = PipelineKind(prediction["plans"][chosen]["pipeline"])
            if isinstance(config.placement, CostPlacement) and not is_own(chosen):
                config = torchrec_baselines(config)[chosen]
        except (OSError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise ArtifactError(
                f"{path}: expected the plan that the run chose, got {error!r}. Start a new run."
            ) from error
        config = with_pipeline(config, pipeline)
    elif isinstance(config.placement, CostPlacement):
        raise ArtifactError(
            f"{path}: expected the plan that the run chose, got no such file. Start a new run."
        )
    if not isinstance(config.placement, HotColdConfig):
        return TrainingPlan(config, None, None, prediction)
    saved = run_dir / PARTITION
    if isinstance(config.placement, SavedPlacement):
        saved = Path(config.placement.partition_dir)
    placement, artifact = read_placement(saved)
    return TrainingPlan(config, placement, artifact, prediction)


def _choose_costs(config: Config, machine: Machine) -> tuple[Costs, str | None]:
    return choose_costs(config.planner.costs, Path(config.paths.costs), machine)


def _situation(machine: Machine) -> dict[str, int]:
    return {
        "num_ranks": machine.world_size,
        "ranks_per_host": machine.local_world_size,
        "batch_size": machine.batch_size,
    }


def _warn_of_another_situation(artifact: Artifact, machine: Machine) -> None:
    # Partitions of earlier versions do not say what they were planned for.
    planned_for = artifact.content.get("planned_for") or {}
    differences = ", ".join(
        f"{name} {value} instead of {planned_for[name]}"
        for name, value in _situation(machine).items()
        if planned_for.get(name, value) != value
    )
    if differences:
        logger.warning(
            "%s was planned for another situation: %s. Another choice may be faster",
            *(artifact.path, differences),
        )


def _predict_torchrec(
    config: Config, dataset: Dataset, scenario: Scenario, *, is_plan: bool
) -> Decision:
    """Predicts the configured plan of TorchRec.

    Raises:
        CostsError: If the costs lack what it needs.
    """
    name = torchrec_name(config)
    given = {name: predict_torchrec_config(config, dataset.schema, scenario)}
    others = predict_baselines(config, dataset.schema, scenario) if is_plan else {}
    why = f"placement={config.placement.kind.name} is configured."
    return Decision(name, why, {**others, **given})


def _predict_given(
    config: Config,
    dataset: Dataset,
    scenario: Scenario,
    placement: Placement,
    profile: Profile,
    *,
    is_plan: bool,
) -> tuple[Placement, Decision]:
    """Predicts the configured placement in each pipeline that may train it.

    Returns:
        The placement, with the number of slots chosen if none is configured, and the decision.

    Raises:
        CostsError: If the costs lack what it needs.
    """
    why, slots = f"placement={config.placement.kind.name} is configured.", None
    if _is_cached(placement):
        placement, slots, chosen_slots = _choose_slots(
            config, dataset, scenario, placement, profile
        )
        why = f"{why}{chosen_slots}"
        if scenario.machine.device == "cuda":  # else slots are host memory, too
            ways = {table.row_fetch.value for table in placement.tables.values()}
            why = f"{why} Rows come to the device by row_fetch={' and '.join(sorted(ways))}."
    else:
        check_slots(scenario, placement, samples_in_flight(config, scenario.world.num_ranks))
    given = {
        own_name(kind): _predict(scenario.with_pipeline(kind), placement, slots)
        for kind in candidate_pipelines(config, scenario.machine)
    }
    chosen = fastest_of(given)
    if len(given) > 1:
        why = f"{why} Of its pipelines {given[chosen].pipeline.kind.value} is predicted to be best."
    others = predict_baselines(config, dataset.schema, scenario) if is_plan else {}
    return placement, Decision(chosen, why, {**others, **given})


def _predict(scenario: Scenario, placement: Placement, slots: Replayed | None) -> Predicted:
    num_hot = {t: placement.partition.num_hot(t) for t in placement.partition.num_rows}
    return predict_placement(
        scenario, num_hot, placement.tables, is_hot_dense=placement.is_hot_dense, slots=slots
    )


def _choose_slots(
    config: Config, dataset: Dataset, scenario: Scenario, placement: Placement, profile: Profile
) -> tuple[Placement, Replayed | None, str]:
    """Chooses the fewest slots with which a step is hardly longer than with the most that fit.

    Returns:
        The placement, what look-ahead does in its slots, and a sentence if there was a choice.

    Raises:
        ValueError: If the slots do not fit, or do not suffice for the batches in flight.
    """
    kind, machine = config.placement, scenario.machine
    num_rows = placement.partition.num_rows
    num_slots = sum((placement.tables[t].cache_load_frac or 0.0) * n for t, n in num_rows.items())
    given = num_slots / sum(num_rows.values())  # all tables share their slots
    is_open = _are_slots_open(config, placement)
    replay = SlotReplay.read(
        config,
        dataset,
        profile,
        placement.partition,
        machine.world_size,
        least_load_frac=LOAD_FRACS[0] if is_open else given,
    )
    ahead = scenario.with_pipeline(PipelineKind.look_ahead)

    @cache
    def place(load_frac: float) -> Placement:
        placed = placement
        if is_open:
            assert isinstance(kind, TieredConfig)
            with_slots = replace(kind, cache_load_frac=load_frac)
            placed = _place(with_slots, placement.partition, config, machine, profile)
        check_slots(scenario, placed, samples_in_flight(config, machine.world_size))
        return placed

    @cache
    def replayed(load_frac: float) -> Replayed | None:
        return replay.predict(load_frac, place(load_frac).popular_rows)

    @cache
    def settle(load_frac: float) -> tuple[Placement, Replayed | None]:
        placed, slots = place(load_frac), replayed(load_frac)
        if slots is not None and getattr(kind, "row_fetch", None) is RowFetch.auto:
            placed = with_faster_fetch(scenario, placed, slots)
        return placed, slots

    def step_s(load_frac: float) -> float:
        try:
            return _predict(ahead, *settle(load_frac)).step.step_s
        except SlotsError:
            return math.inf

    if not is_open:
        return *settle(given), ""
    most = _most_that_fit(place)
    most_s = (1 + MOST_LONGER_FRAC) * step_s(most)
    below = LOAD_FRACS[: LOAD_FRACS.index(most)]
    first = bisect_left(below, True, key=lambda load_frac: step_s(load_frac) <= most_s)
    chosen = LOAD_FRACS[first]
    why = (
        f" cache_load_frac={chosen:.3f} gives the fewest slots with which a step is predicted to "
        f"take at most {MOST_LONGER_FRAC:.0%} longer than with the most that fit, {most:.3f}."
    )
    return *settle(chosen), why


def _is_cached(placement: Placement) -> bool:
    return {table.tier for table in placement.tables.values()} == {Tier.CACHED}


def _are_slots_open(config: Config, placement: Placement | None) -> bool:
    """Whether the planner is to choose the number of slots."""
    kind = config.placement
    is_open = isinstance(kind, TieredConfig) and kind.cache_load_frac is None
    return is_open and placement is not None and _is_cached(placement)


def _most_that_fit(place: Callable[[float], Placement]) -> float:
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


def _apply_policy(
    kind: HotColdConfig, config: Config, dataset: Dataset, machine: Machine, profile: Profile
) -> Placement:
    if isinstance(kind, ScarsPlacement):
        machine = replace(machine, costs=_choose_costs(config, machine)[0])
    partition = choose_partition(
        kind,
        profile,
        machine,
        row_bytes=row_bytes(dataset.schema, config),
        dim=config.model.embedding_dim,
    )
    return _place(kind, partition, config, machine, profile)


def _place(
    kind: HotColdConfig, partition: Partition, config: Config, machine: Machine, profile: Profile
) -> Placement:
    def popular(load_frac: float) -> dict[str, PopularRows]:
        return choose_popular_rows(
            partition,
            profile,
            load_frac=load_frac,
            global_batch_size=config.trainer.batch_size * machine.world_size,
            world_size=machine.world_size,
        )

    return as_placement(kind, partition, machine.device, popular)


def samples_in_flight(config: Config, world_size: int) -> int:
    """Most samples of all ranks whose rows look-ahead holds at once, in training and evaluation."""
    trainer = config.trainer
    of_rank = max(trainer.batch_size, trainer.eval_batch_size if trainer.eval_splits else 0)
    return of_rank * world_size * config.pipeline.batches_in_slots
