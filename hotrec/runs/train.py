"""A training run from top to bottom: dataset, plan, model, batches, loop."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from hotrec.artifact import ArtifactError, read_record, real_path
from hotrec.assemble.job import Job, make_job, plain_values, schedule_of
from hotrec.assemble.machine import make_machine
from hotrec.assemble.model import ModelSpec
from hotrec.assemble.order import (
    SPLIT,
    Adaptation,
    adapts,
    check_assign,
    choose_assign,
    count_epoch_steps,
    find_all_hot,
    has_lengths,
    make_alternation,
    make_train_loader,
)
from hotrec.assemble.planning import (
    Proposal,
    SettledPlan,
    make_proposal,
    read_settled_plan,
)
from hotrec.assemble.trainable import Trainable, assemble
from hotrec.config.fields import MISSING
from hotrec.config.groups import OrderAssign, PlacementConfig, TimeOrder
from hotrec.config.roots import Config, PathsConfig
from hotrec.config.text import read_yaml
from hotrec.config.validate import validate
from hotrec.data.all_hot import AllHotSamples
from hotrec.data.batch import Batch
from hotrec.data.chunks import Dataset
from hotrec.data.days import days_of
from hotrec.data.generation import generations_of
from hotrec.data.items import ItemColumn, last_samples
from hotrec.data.kept import open_generation
from hotrec.data.loader import Loader, make_loader, step_sequence
from hotrec.data.order import StepSequence
from hotrec.data.tokens import SampleWork
from hotrec.embedding.adapt import AdaptiveHotSet
from hotrec.models.shape import sample_work_of
from hotrec.planner.machine import Machine
from hotrec.planner.plan import Plan, SplitTables
from hotrec.planner.trial import Trial, write_trial
from hotrec.runs.check import check_settings, check_with_data
from hotrec.runs.record import (
    accept_record,
    staged_record,
    write_config,
    write_environment,
    write_plan,
)
from hotrec.runs.suspicious import suspicious_columns
from hotrec.runs.trial import Candidate, run_trial, trial_seconds
from hotrec.runs.warm_start import WarmStart
from hotrec.runtime.cores import num_workers
from hotrec.runtime.hosts import gather_hosts
from hotrec.runtime.ranks import Ranks, broadcast_object, same_verdict
from hotrec.runtime.run_dir import (
    CHECKPOINTS,
    CONFIG_FILE,
    ENVIRONMENT,
    PARTITION,
    SUMMARY,
    TRACES,
    read_finished,
)
from hotrec.train.ahead import DaysAhead, NextDay, read_evaluated
from hotrec.train.alternate import KINDS
from hotrec.train.best import BestQuality
from hotrec.train.checkpoint import Checkpoints, find_latest, lineage_of, read_facts
from hotrec.train.dense_sync import count_dense_values
from hotrec.train.evaluation import Evaluation
from hotrec.train.hot_set import HotSet
from hotrec.train.loop import TrainResult, train
from hotrec.train.metrics import Counts, Metrics, Record
from hotrec.train.metrics_server import serve_metrics
from hotrec.train.parts import Parts
from hotrec.train.ranking import Ranking
from hotrec.train.run_log import Listener, check_records, replace_text
from hotrec.train.saver import Saver
from hotrec.train.schedule import count_steps
from hotrec.train.trace import TraceWindow
from hotrec.train.watch import Watch

logger = logging.getLogger(__name__)


def run_training(config: Config, run_dir: Path, ranks: Ranks) -> TrainResult:
    """Train a configuration, or resume the run of this directory; collective.

    Args:
        config: A validated configuration.
        run_dir: Directory in which rank 0 writes plan, records and checkpoints.
        ranks: Ranks of the process group, which must exist.

    Returns:
        The results of the run, equal on every rank.

    Raises:
        ArtifactError: If the dataset, profile, partition or checkpoint is missing, altered, or
            belongs to another dataset.
        ValueError: If the placement does not fit the machine, or the configuration contradicts the
            dataset.
    """
    config = _with_name(config)
    given = config
    same_verdict(lambda: validate(given))
    same_verdict(lambda: check_records(run_dir))
    resume_from = same_verdict(lambda: _resume_from(given.trainer.resume, run_dir))
    dataset = same_verdict(lambda: open_dataset(given.paths, resume_from))
    config = replace(config, paths=replace(config.paths, dataset=str(dataset.artifact.path)))
    workers = num_workers(config.trainer.num_workers, ranks)
    config = replace(config, trainer=replace(config.trainer, num_workers=workers))
    # Fail early.
    device, world_size = ranks.device.type, ranks.world_size
    same_verdict(lambda: check_settings(config, device=device))
    same_verdict(lambda: check_with_data(config, dataset, world_size=world_size))
    job = same_verdict(lambda: make_job(config, dataset))
    source, names = config.trainer.warm_start, config.trainer.warm_start_names
    warm = None
    if source is not None and resume_from is None:
        optimizer = job.spec.embedding.kind.name
        warm = same_verdict(lambda: WarmStart.open(source, dataset, optimizer, names))
    with ExitStack() as stack:
        listeners = _listeners(stack, config.trainer.metrics_port, ranks)
        staged = stack.enter_context(staged_record(run_dir, is_first=ranks.is_first))
        if ranks.is_first:
            write_config(given, dataset.artifact.content_hash, staged)
        result = _train(job, run_dir, staged, resume_from, warm, listeners, ranks)
    return _with_suspicion(result, dataset, run_dir, ranks)


def _with_suspicion(
    result: TrainResult, dataset: Dataset, run_dir: Path, ranks: Ranks
) -> TrainResult:
    """Add the columns to check to the summary of a run with an implausible AUC; collective."""
    summary = result.summary

    def find() -> dict[str, Any]:
        if not ranks.is_first:
            return {}
        found = suspicious_columns(dataset, summary.get("auc"), summary.get("auc_by_label", {}))
        if found:
            text = json.dumps({**summary, "suspicious": found}, indent=2, allow_nan=False)
            replace_text(run_dir / SUMMARY, f"{text}\n")
        return found

    found = broadcast_object(same_verdict(find))
    return replace(result, summary={**summary, "suspicious": found}) if found else result


def open_dataset(paths: PathsConfig, resume_from: Path | None) -> Dataset:
    """The dataset; a resumed run keeps its generation."""
    if resume_from is None:
        return Dataset.open(paths.dataset)
    resumed_on = read_facts(resume_from, None)["facts"].get("dataset")
    return open_generation(paths.dataset, resumed_on, resume_from)


def _with_name(config: Config) -> Config:
    """The configuration with a name for the run, by default that of its placement."""
    is_named = config.run_name != MISSING
    return config if is_named else replace(config, run_name=config.placement.kind.name)


def _listeners(stack: ExitStack, port: int, ranks: Ranks) -> list[Listener]:
    """The metrics server of rank 0; every rank raises if it cannot start. Collective."""
    if port == 0:
        return []
    listen = same_verdict(
        lambda: stack.enter_context(serve_metrics(port)) if ranks.is_first else None
    )
    return [] if listen is None else [listen]


def _train(
    job: Job,
    run_dir: Path,
    staged: Path,
    resume_from: Path | None,
    warm: WarmStart | None,
    listeners: Sequence[Listener],
    ranks: Ranks,
) -> TrainResult:
    """Train a job; its record is staged in ``staged`` until it is accepted."""
    trainer, order = job.config.trainer, job.order
    machine = make_run_machine(job.config, ranks)
    is_own = resume_from is not None and real_path(resume_from).is_relative_to(real_path(run_dir))
    keeps_plan = is_own and broadcast_object(
        same_verdict(lambda: _is_planned_so(job.config.placement, run_dir, ranks))
    )
    if keeps_plan:
        settled = _read_plan(job, run_dir, machine, ranks)
    else:
        settled = _choose_plan(job, machine, staged, ranks)
    if (partition := settled.partition) is not None:
        num_hot, num_rows = partition.total_hot, partition.total_rows
        logger.info("%s: %d of %d rows hot", partition.policy, num_hot, num_rows)
    check_assign(order, settled.placement)
    adaptive = adapts(job.adaptation, order, settled.placement)
    facts = job.facts(settled.artifact)
    hot = settled.partition, settled.artifact
    all_hot = find_all_hot(order, job.dataset, hot, run_dir, staged, is_resumed=keeps_plan)
    steps = _count_steps(job, ranks, all_hot)
    saved = _skip_seen(job, warm)
    if saved is not None:
        steps = _count_steps(job, ranks, saved=saved)
    # A new run in a directory with checkpoints must keep them usable.
    kept = resume_from or same_verdict(lambda: find_latest(run_dir / CHECKPOINTS))
    if kept is not None:
        found = same_verdict(lambda: _read_kept(kept, facts))
        if resume_from is not None:
            saved = found
            if all_hot is None:
                steps = _count_steps(job, ranks, saved=saved)
        finished = broadcast_object(read_finished(run_dir)) if is_own else None
        if finished is not None and (found["step"] >= steps or _is_stopped_early(job, found)):
            logger.info("%s: already finished with %d steps", run_dir, found["step"])
            return TrainResult(found["step"], is_finished=True, summary=finished)
    alternation = make_alternation(order, all_hot, ranks.world_size)
    trainable = build_plan(job.spec, settled, machine, ranks)
    if warm is not None:
        warm.load(trainable.model, trainable.optimizer)
    work = _work_of_samples(job)
    assign = choose_assign(order, job.spec.schema, settled.placement, work)
    if ranks.is_first:
        write_plan(trainable.sharding, staged, settled.prediction)
        write_environment(
            staged,
            world_size=ranks.world_size,
            num_hosts=ranks.num_hosts,
            device=ranks.device.type,
        )
    loader = make_train_loader(order, ranks, trainable.route, all_hot, alternation, assign, work)
    if saved is not None and resume_from is None:
        loader.load_state_dict({**loader.state_dict(), **saved["loader"]})
    trace = None
    if trainer.trace_step is not None:
        trace = TraceWindow(trainer.trace_step, run_dir / TRACES)
    record = Record(
        run_dir,
        description=_description(job, settled, all_hot),
        prediction=settled.predicted,
        callbacks=trainer.callbacks,
        listeners=listeners,
        trace=trace,
        accept=lambda: accept_record(staged, run_dir) if ranks.is_first else None,
    )
    counts = Counts(
        count_dense_values(trainable.model),
        trainable.facts,
        trainable.memory,
        trainable.cache_counters(),
    )
    metrics = Metrics(
        ranks,
        counts,
        record=record,
        log_every_steps=trainer.log_every_steps,
        warmup_steps=trainer.warmup_steps,
    )
    checkpoints = _checkpoints(
        Checkpoints(run_dir / CHECKPOINTS, facts, trainer.keep_checkpoints, resume_from)
    )
    evaluation = Evaluation(
        metrics,
        _eval_batches(job, trainable, ranks),
        every_steps=trainer.eval_every_steps,
        ahead=_days_ahead(job, trainable, ranks, run_dir, saved),
        best=_best(job),
        alternation=alternation,
        checkpoints=checkpoints,
        ranking=make_ranking(
            job,
            trainable,
            ranks,
            job.config.trainer.eval_batch_size,
            num_workers(job.order.num_workers, ranks),
        ),
    )
    hot_set = _hot_set(adaptive, metrics, trainable)
    saver = Saver(
        metrics,
        evaluation,
        hot_set,
        checkpoints,
        every_steps=trainer.save_every_steps,
        every_s=trainer.save_every_s,
    )
    watch = Watch(
        ranks,
        metrics,
        saver,
        every_steps=trainer.check_every_steps,
        check_replicas=trainable.check_replicas,
    )
    parts = Parts(ranks, metrics, watch, evaluation, saver, between=[hot_set])
    lr_factor = schedule_of(job.config.optimizer.schedule, steps)
    return train(trainable, loader, parts, num_steps=steps, lr_factor=lr_factor)


def _best(job: Job) -> BestQuality | None:
    """The tracker of the best quality; None if it is not needed."""
    trainer = job.config.trainer
    if trainer.early_stop_patience is None and not trainer.keeps_best:
        return None
    return BestQuality(
        trainer.early_stop_patience,
        is_kept=trainer.keeps_best,
        by=trainer.best_by.name,
        split=next(iter(trainer.eval_splits), None),
    )


def _skip_seen(job: Job, warm: WarmStart | None) -> Mapping[str, Any] | None:
    """The position after the samples that the warm start has seen, in a checkpoint's form."""
    order = job.config.order
    if warm is None or not (isinstance(order, TimeOrder) and order.new_only):
        return None
    num_seen = same_verdict(warm.num_seen)
    return {"step": 0, "loader": {"num_samples": num_seen}}


def _is_stopped_early(job: Job, saved: Mapping[str, Any]) -> bool:
    """Whether early stopping ended the run that saved a checkpoint."""
    if (best := _best(job)) is None or "best" not in saved:
        return False
    best.load_state_dict(saved["best"])
    return best.must_stop


def _read_kept(path: Path, facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """As ``read_facts``, for a run with a loader of samples."""
    content = read_facts(path, facts)
    loader = content["loader"]
    # With order=all_hot there is one for each kind of samples, besides the alternation.
    loaders = [loader[kind] for kind in KINDS.values() if kind in loader] or [loader]
    for position in loaders:
        found = position.get("num_samples") if isinstance(position, dict) else position
        if type(found) is not int or found < 0:
            raise ArtifactError(
                f"{path}: expected the number of samples that the loader has returned, got "
                f"{found!r}. Use another checkpoint."
            )
    return content


def _checkpoints(checkpoints: Checkpoints) -> Checkpoints:
    """With the lineage of the run, if it resumes from its newest checkpoint."""
    source = checkpoints.resume_from
    is_newest = source is not None and source == find_latest(checkpoints.directory)
    lineage = lineage_of(source) if is_newest and source is not None else None
    return checkpoints if lineage is None else replace(checkpoints, lineage=lineage)


def _is_planned_so(settings: PlacementConfig, run_dir: Path, ranks: Ranks) -> bool:
    """Whether the run recorded a plan for these ranks and this placement, to continue with.

    Args:
        settings: The settings of the placement.
        run_dir: Directory of the run.
        ranks: Ranks of the process group.

    Raises:
        ValueError: If its record cannot be read.
    """
    recorded = run_dir / CONFIG_FILE
    if not recorded.exists():  # a run started from Python
        return True
    try:
        placement = dict(yaml.safe_load(read_yaml(recorded))["placement"])
        world_size = json.loads(read_record(run_dir / ENVIRONMENT))["world_size"]
    except (OSError, ValueError, LookupError, TypeError, yaml.YAMLError) as error:
        raise ValueError(
            f"{recorded}: expected the run's recorded configuration and {ENVIRONMENT}, got "
            f"{error!r}. Start a new run."
        ) from error
    if (placement, world_size) == (plain_values(asdict(settings)), ranks.world_size):
        return True
    logger.info(
        "replanning the resumed run: it had the placement %s on %s ranks", placement, world_size
    )
    return False


def make_run_machine(config: Config, ranks: Ranks) -> Machine:
    """The machine as detected by rank 0, so that all ranks get the same plan; collective."""
    machine = make_machine(
        world_size=ranks.world_size,
        ranks_per_host=ranks.local_world_size,
        device=ranks.device.type,
        batch_size=config.trainer.batch_size,
        hbm_gib=config.planner.hbm_gib,
        host_gib=config.planner.host_gib,
        found=gather_hosts(),
    )
    return broadcast_object(machine)


def placement_name(asked: str, plan: Plan) -> str:
    """The placement for reports: as configured, or the chosen plan of TorchRec."""
    return asked if plan.torchrec_plan is None else f"torchrec {plan.torchrec_plan.name}"


def build_plan(spec: ModelSpec, settled: SettledPlan, machine: Machine, ranks: Ranks) -> Trainable:
    """The sharded model of a plan, with the first weights of its run; collective."""
    torch.manual_seed(spec.seed)
    return assemble(
        spec,
        settled.plan,
        settled.placement,
        machine,
        ranks.device,
    )


def _read_plan(job: Job, run_dir: Path, machine: Machine, ranks: Ranks) -> SettledPlan:
    """The plan of a run that resumes its own checkpoint, even if costs were measured since."""
    read = same_verdict(
        lambda: read_settled_plan(job, run_dir, machine) if ranks.is_first else None
    )
    settled = broadcast_object(read)
    assert settled is not None
    return settled


def _choose_plan(job: Job, machine: Machine, staged: Path, ranks: Ranks) -> SettledPlan:
    """Predict the candidates on rank 0, try undecided ones on all ranks, choose; collective."""
    proposal = same_verdict(lambda: make_proposal(job, machine) if ranks.is_first else None)
    trial = _try_candidates(job, machine, proposal, ranks)

    def settle() -> SettledPlan | None:
        return None if proposal is None else proposal.settle(staged / PARTITION, trial)

    settled = broadcast_object(same_verdict(settle))
    assert settled is not None
    return settled


def _try_candidates(
    job: Job, machine: Machine, proposal: Proposal | None, ranks: Ranks
) -> Trial | None:
    """A trial of the candidates, if predictions are undecided and it can pay; collective.

    Args:
        job: The run.
        machine: The machine of the ranks.
        proposal: The candidates, on rank 0.
        ranks: Ranks of the process group.
    """
    trial_s = job.config.plan.trial_s if job.config.plan.trial else 0.0
    if trial_s == 0 or job.order.blocks is not None:
        return None
    if job.order.assign is OrderAssign.by_owner:
        return None

    def describe() -> tuple[dict[str, SettledPlan], Trial | None, float, float]:
        if proposal is None or len(proposal.candidates) < 2:
            return {}, None, 0.0, 0.0
        run_s, longest_s = proposal.predicted_s(_count_steps(job, ranks))
        return proposal.candidates, proposal.recorded_trial, run_s, longest_s

    # An error on rank 0 must reach the others before a collective.
    plans, recorded, run_s, longest_s = broadcast_object(same_verdict(describe))
    if len(plans) < 2 or recorded is not None:
        return recorded
    candidates = {
        digest: make_candidate(job, plan, machine, ranks) for digest, plan in plans.items()
    }
    limit_s, least_s = trial_seconds(trial_s, run_s, candidates.values())
    needed_s = max(limit_s, least_s)
    if trial_s is None and longest_s < needed_s:
        logger.info(
            "skipping the trial of %d plans with overlapping predictions: the run is predicted "
            "to take %.3g s, at most %.3g s, a trial %.3g s",
            *(len(plans), run_s, longest_s, needed_s),
        )
        return None
    titles = "; ".join(candidate.title for candidate in candidates.values())
    logger.info("trial of plans with overlapping predictions, about %.0f s: %s", needed_s, titles)
    found = run_trial(candidates, ranks, limit_s=limit_s)
    same_verdict(lambda: None if proposal is None else write_trial(found, proposal.trial_file))
    return found


def make_candidate(job: Job, settled: SettledPlan, machine: Machine, ranks: Ranks) -> Candidate:
    """The trial candidate of a plan, with the initial weights and batches of its run."""

    def build() -> tuple[Trainable, Iterable[Batch]]:
        trainable = build_plan(job.spec, settled, machine, ranks)
        placed, work = settled.placement, _work_of_samples(job)
        assign = choose_assign(job.order, job.spec.schema, placed, work)
        return trainable, make_train_loader(job.order, ranks, trainable.route, None, None, assign)

    plan = settled.plan
    held = 2 * num_workers(job.order.num_workers, ranks) + plan.pipeline.depth
    if isinstance(plan.tables, SplitTables) and plan.tables.has_slots:
        held += plan.pipeline.window  # a window of batches is kept only for slots
    return Candidate(build, settled.max_bytes, held, settled.step_s, plan.title)


def _work_of_samples(job: Job) -> SampleWork | None:
    """The work of a sample; None if all samples have the same lengths."""
    spec = job.spec
    return sample_work_of(spec.architecture) if has_lengths(spec.schema) else None


def _count_steps(
    job: Job,
    ranks: Ranks,
    all_hot: AllHotSamples | None = None,
    saved: Mapping[str, Any] | None = None,
) -> int:
    """Updates of the whole run; ``saved`` is the content of the checkpoint to resume from."""
    epochs, max_steps = job.order.num_epochs, job.config.trainer.max_steps
    if saved is None:
        per_epoch = count_epoch_steps(job.order, job.dataset, all_hot, ranks.world_size)
        return count_steps(per_epoch, epochs=epochs, max_steps=max_steps)
    # With other ranks or another batch size the remaining samples need another number of steps.
    remaining = _remaining_steps(job, ranks, saved)
    steps = int(saved["step"]) + remaining.count_steps(epochs)
    return steps if max_steps is None else min(steps, max_steps)


def _remaining_steps(job: Job, ranks: Ranks, saved: Mapping[str, Any] | None) -> StepSequence:
    return step_sequence(
        job.dataset,
        SPLIT,
        job.order.batch_size * ranks.world_size,
        by_day=job.order.by_day,
        first_sample=0 if saved is None else int(saved["loader"]["num_samples"]),
    )


def _days_ahead(
    job: Job,
    trainable: Trainable,
    ranks: Ranks,
    run_dir: Path,
    saved: Mapping[str, Any] | None,
) -> DaysAhead | None:
    """The days still to be evaluated before they are trained on, or None; collective."""
    if not job.order.by_day:
        return None
    start_step = 0 if saved is None else int(saved["step"])
    recorded = same_verdict(
        lambda: read_evaluated(run_dir / "eval.jsonl", start_step) if ranks.is_first else []
    )
    evaluated = broadcast_object(recorded)
    days, known = days_of(job.dataset, SPLIT), {line["day"] for line in evaluated}
    steps = _remaining_steps(job, ranks, saved)
    due = {
        start_step + step: part + 1
        for step, part in steps.part_ends().items()
        if part + 1 < len(days) and days[part + 1].name not in known
    }
    first_sample = sum(day.num_samples for day in days[: min(due.values(), default=len(days))])
    loader = same_verdict(
        lambda: _make_eval_loader(job, SPLIT, trainable, ranks, by_day_from=first_sample)
    )
    num_batches = loader.dataset.steps.count_part_steps
    return DaysAhead(
        {step: NextDay(days[part].name, num_batches(part)) for step, part in due.items()},
        loader,
        evaluated,
    )


def _eval_batches(job: Job, trainable: Trainable, ranks: Ranks) -> dict[str, Iterable[Batch]]:
    return same_verdict(
        lambda: {
            split: _make_eval_loader(job, split, trainable, ranks)
            for split in job.config.trainer.eval_splits
        }
    )


def _make_eval_loader(
    job: Job, split: str, trainable: Trainable, ranks: Ranks, *, by_day_from: int | None = None
) -> Loader:
    """A loader to evaluate with: of a split, or of its days from a sample on."""
    by_day, workers = by_day_from is not None, num_workers(job.order.num_workers, ranks)
    given = {
        "batch_size": job.config.trainer.eval_batch_size,
        "keep_workers": not by_day,
        "by_day": by_day,
    }
    loader = make_eval_loader(job, split, trainable, ranks, num_workers=workers, **given)
    loader.add_groups(job.group_by)
    loader.add_items(job.item)
    if by_day:
        loader.load_state_dict({**loader.state_dict(), "num_samples": by_day_from})
    return loader


def make_eval_loader(
    job: Job, split: str, trainable: Trainable, ranks: Ranks, *, batch_size: int, **given: Any
) -> Loader:
    """This rank's share of a split, once and in order, in batches that are padded to one size."""
    loader = make_loader(
        job.dataset.artifact.path,
        split,
        batch_size=batch_size,
        rank=ranks.rank,
        world_size=ranks.world_size,
        epochs=1,
        shuffle=False,
        transform=trainable.route,
        pin_memory=ranks.device.type == "cuda",
        **given,
    )
    loader.pad(batch_size)
    return loader


def make_ranking(
    job: Job, trainable: Trainable, ranks: Ranks, batch_size: int, workers: int
) -> Ranking | None:
    """The items that evaluations rank, None for none; collective.

    Args:
        job: The run.
        trainable: Its model.
        ranks: Ranks of the process group.
        batch_size: Items of a rank's batch.
        workers: Loader workers of a rank.

    Raises:
        ValueError: If the training split has no items.
    """
    item = job.item
    if item is None:
        return None
    samples = last_samples(job.dataset, SPLIT, item.by)
    given: dict[str, Any] = {"num_workers": workers, "keep_workers": True, "subset": samples}
    loader = same_verdict(
        lambda: make_eval_loader(job, SPLIT, trainable, ranks, batch_size=batch_size, **given)
    )
    loader.add_items(ItemColumn(item.by))
    return Ranking(tuple(job.config.trainer.eval_ranking), loader)


def _hot_set(adaptive: Adaptation | None, metrics: Metrics, trainable: Trainable) -> HotSet:
    if adaptive is None:
        return HotSet(metrics)
    of_model = AdaptiveHotSet(
        trainable.model,
        trainable.optimizer,
        decay=adaptive.decay,
        max_rows=adaptive.max_rows,
    )
    return HotSet(metrics, of_model, adaptive.every_steps)


def _resume_from(resume: str, run_dir: Path) -> Path | None:
    if resume == "none":
        return None
    if resume == "latest":
        path = find_latest(run_dir / CHECKPOINTS)
    else:
        path = Path(resume)
        if not path.is_dir():
            raise ValueError(
                "trainer.resume: expected latest, none or a checkpoint's directory, "
                f"got {resume!r}."
            )
    return path


def _description(job: Job, settled: SettledPlan, all_hot: AllHotSamples | None) -> dict[str, Any]:
    partition, plan, spec, order = settled.partition, settled.plan, job.spec, job.order
    hot_rows = 0 if partition is None else partition.total_hot
    total_rows = sum(table.num_rows for table in spec.schema.tables)
    return {
        "name": job.config.run_name,
        "dataset": job.dataset.artifact.content_hash,
        "dataset_name": job.config.dataset_name,
        "generation": len(generations_of(job.dataset)),
        "label_weights": spec.label_weights or {},
        "placement": placement_name(job.config.placement.kind.name, plan),
        "policy": None if partition is None else partition.policy,
        "model": spec.architecture.kind,
        "optimizer": spec.embedding.kind.name,
        "pipeline": plan.pipeline.kind.name,
        "wire": plan.pipeline.wire.name,
        "order": order.kind.name,
        "assign": order.assign.name,
        "all_hot_samples_frac": None if all_hot is None else all_hot.frac,
        "batch_size": order.batch_size,
        "precision": spec.precision.name,
        "compile": spec.is_compiled,
        "grad_clip_norm": spec.grad_clip_norm,
        "hot_rows": hot_rows,
        "total_rows": total_rows,
        "hot_rows_frac": hot_rows / total_rows,
    }
