"""Compare the plans of several runs: interleaved training from the same weights and batches."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hotrec.artifact import ArtifactError, read_record
from hotrec.assemble.counted import read_counts
from hotrec.assemble.job import Job, make_job
from hotrec.assemble.lookups import Destinations, destinations
from hotrec.assemble.planning import SettledPlan, read_settled_plan
from hotrec.assemble.trainable import Trainable
from hotrec.config.groups import AllHotOrder
from hotrec.config.roots import Config
from hotrec.data.batch import Batch
from hotrec.planner.machine import Machine
from hotrec.planner.predict import MEMORIES
from hotrec.planner.trial import Trial
from hotrec.runs.train import make_candidate, make_run_machine, open_dataset
from hotrec.runs.trial import Candidate, run_trial
from hotrec.runtime.cores import num_workers
from hotrec.runtime.load import LoadMeter, disturbance
from hotrec.runtime.ranks import Ranks, same_verdict
from hotrec.runtime.run_dir import CHECKPOINTS, ENVIRONMENT
from hotrec.train.checkpoint import find_latest

# Settings of the trainer that change a step of the same plan.
_TRAINER = ("batch_size", "seed", "precision", "compile", "grad_clip_norm")


@dataclass(frozen=True)
class _RecordedRun:
    """A recorded run.

    Args:
        run_dir: Its directory.
        job: The run as plain values.
        plan: The recorded plan.
        facts: Facts that runs must share for a comparison of their plans.
    """

    run_dir: Path
    job: Job
    plan: SettledPlan
    facts: Mapping[str, Any]

    @classmethod
    def read(cls, run_dir: Path, config: Config, machine: Machine) -> _RecordedRun:
        recorded = run_dir / ENVIRONMENT
        try:
            world_size = json.loads(read_record(recorded))["world_size"]
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ArtifactError(
                f"{recorded}: expected the environment that the run recorded, got {error!r}. "
                "Compare another run."
            ) from error
        if world_size != machine.world_size:
            raise ValueError(
                f"launch.num_ranks: expected {world_size}, as {run_dir} had, got "
                f"{machine.world_size}. Set launch.num_ranks={world_size}."
            )
        if isinstance(config.order, AllHotOrder):
            raise ValueError(
                f"{run_dir}: expected order=shuffled or order=time, got all_hot (its batches "
                "depend on the plan). Compare other runs."
            )
        dataset = open_dataset(config.paths, find_latest(run_dir / CHECKPOINTS))
        paths = replace(config.paths, dataset=str(dataset.artifact.path))
        job = make_job(replace(config, paths=paths), dataset)
        trainer = {name: getattr(config.trainer, name) for name in _TRAINER}
        order = {name: getattr(of, "name", of) for name, of in vars(config.order).items()}
        del order["assign"]  # of the samples of the same batches
        facts = {**job.facts(None), **trainer, "order": order}
        return cls(run_dir, job, read_settled_plan(job, run_dir, machine), facts)

    def candidate(
        self, machine: Machine, ranks: Ranks, places: dict[str, Destinations]
    ) -> Candidate:
        """The candidate of its plan; stores the destinations of its lookups in ``places``."""
        made = make_candidate(self.job, self.plan, machine, ranks)
        profile, _ = read_counts(self.job.dataset)

        def build() -> tuple[Trainable, Iterable[Batch]]:
            trainable, loader = made.build()
            places[str(self.run_dir)] = destinations(
                trainable.sharding, self.plan.placement, profile.counts, ranks.world_size
            )
            return trainable, loader

        predicted = self.plan.predicted or {}
        memory = predicted.get("memory") or [dict.fromkeys(MEMORIES, 0.0)]
        max_bytes = tuple(max(rank[of] for rank in memory) for of in MEMORIES)
        step_s = float(predicted.get("step_s", 0.0))
        return replace(
            made, build=build, num_bytes=max_bytes, step_s=step_s, title=str(self.run_dir)
        )


def compare_runs(runs: Mapping[Path, Config], ranks: Ranks, *, seconds: float) -> dict[str, Any]:
    """Train the recorded plans of runs in interleaved blocks, on their data; collective.

    Args:
        runs: Configurations by run directory, as recorded.
        ranks: The process group, with the runs' number of ranks.
        seconds: Seconds of interleaved training.

    Returns:
        The content of ``compare.json``, equal on every rank.

    Raises:
        ArtifactError: If the dataset or a recorded plan is missing, or one of them or the profile
            is altered.
        ValueError: If the runs differ in more than their plans.
    """
    # Collective, so not inside code that can fail on a single rank.
    workers = [num_workers(config.trainer.num_workers, ranks) for config in runs.values()]
    configs = [
        replace(config, trainer=replace(config.trainer, num_workers=number))
        for config, number in zip(runs.values(), workers, strict=True)
    ]
    machine = make_run_machine(configs[0], ranks)
    read = same_verdict(
        lambda: [_RecordedRun.read(*of_run, machine) for of_run in zip(runs, configs, strict=True)]
    )
    same_verdict(lambda: _check_alike(read))
    # Counted on one rank, if at all.
    same_verdict(lambda: [read_counts(r.job.dataset) for r in read if ranks.is_first])
    places: dict[str, Destinations] = {}
    candidates = same_verdict(
        lambda: {str(run.run_dir): run.candidate(machine, ranks, places) for run in read}
    )
    load = LoadMeter()
    trial = run_trial(candidates, ranks, limit_s=seconds, compares_all=True)
    doubts = _doubts(trial, read[0].plan, disturbance(load.hosts(ranks)))
    return _document(trial, places, doubts)


def _check_alike(runs: list[_RecordedRun]) -> None:
    expected = runs[0].facts
    for run in runs[1:]:
        for name, value in run.facts.items():
            if value != expected[name]:
                raise ValueError(
                    f"{run.run_dir} {name}: expected {expected[name]}, as in {runs[0].run_dir}, "
                    f"got {value}. Compare runs that differ only in their plans."
                )


def _doubts(trial: Trial, chosen: SettledPlan, disturbed: str | None) -> list[str]:
    """Reasons why the measurement is inconclusive, in sentences."""
    doubts = []
    if not trial.took_turns:
        doubts.append("The plans do not fit into memory together, so they were not interleaved.")
    if disturbed is not None:
        doubts.append(f"They were measured {disturbed}.")
    costs = (chosen.prediction or {}).get("costs") or {}
    if not costs.get("is_trusted", True):
        doubts.append("The plan is based on untrusted costs: calibrate again.")
    return doubts


def _document(
    trial: Trial, places: Mapping[str, Destinations], doubts: list[str]
) -> dict[str, Any]:
    """The measurements, and the reasons why they are inconclusive, if any."""
    return {
        "seconds": trial.seconds,
        "doubts": doubts,
        "plans": {
            name: {
                "step_s": trial.step_s(name),
                "block_s": list(blocks),
                "ratios": {other: trial.ratio(name, other) for other in trial.block_s},
                "replicated_frac": places[name].replicated,
                "owned_fracs": places[name].owned,
            }
            for name, blocks in trial.block_s.items()
        },
    }
