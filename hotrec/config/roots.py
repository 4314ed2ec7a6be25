"""The root configuration of each command, and the sections without variants."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePath
from typing import Any

from hotrec.config.data import DataSpec
from hotrec.config.fields import VARIANTS, Rules, key, section
from hotrec.config.groups import (
    ASSIGN,
    CACHE_LOAD,
    AllHotOrder,
    ModelConfig,
    NegativesKind,
    OptimizerConfig,
    OrderAssign,
    OrderConfig,
    PlacementConfig,
    RetrievalConfig,
    RetrievalLoss,
    SequenceConfig,
    TimeOrder,
)
from hotrec.types import (
    DEFAULT_LOAD_FRAC,
    ColdTier,
    Levels,
    PipelineKind,
    Precision,
    TorchrecTier,
    WireType,
)

Device = StrEnum("Device", "auto cpu cuda")
# Keys of hotrec.runtime.figures that every evaluation has, and those that it has on request.
BestBy = StrEnum("BestBy", "log_loss auc gauc recall_at ndcg_at")
# The stages of `hotrec run` that can be repeated.
Stage = StrEnum("Stage", "prepare calibrate plan train evaluate compare report")
BenchCase = StrEnum("BenchCase", "hot_cold all_cold all_hot table_wise planner hand_tuned")
BenchRouting = StrEnum("BenchRouting", "main loader")
RowType = StrEnum("RowType", "fp32 fp16 int8")
Split = StrEnum("Split", "train valid test")
HOT_COLD_CASES = (BenchCase.hot_cold, BenchCase.all_cold, BenchCase.all_hot)

# Meanings of keys that several sections have.
# torch counts milliseconds in 64 bits and seconds of a timer in 32.
MAX_SECONDS = 1e6
DEVICE = "device to compute on: cpu, cuda, or auto (cuda if available)"
BATCH_SIZE = "number of samples per rank and step"
FINISHED_RUN = "directory of the finished training run; latest: the newest under runs/"
CHECKPOINT = "checkpoint: best, latest, a name in checkpoints/, or auto (best if the run keeps it)"
SCORED_AT_ONCE = "number of samples to score at once"
NUM_WORKERS = "number of loader processes per rank; 0: it reads by itself; null: by its cores"
WINDOW = "further batches whose rows are announced, to choose which stay in cached slots"
DEPTH = "1: look_ahead exchanges the rows of the next batch during this step; 0: it does not"
LEVELS = "how unpooled rows travel: one, or two (each crosses the network once for a host){}"
MICRO_BATCHES = "in look_ahead, first compute the samples that need no row of another rank"
WIRE = "type of rows and gradients in messages: fp32 (exact) or bf16"


@dataclass
class PipelineConfig:
    """How steps overlap."""

    kind: PipelineKind = key(
        "look_ahead exchanges the next batch's rows during a step; choose it by pipeline=",
        PipelineKind.auto,
    )
    depth: int = key(DEPTH, 1, ge=0, le=1)
    window: int = key(WINDOW, 32, ge=0, le=32)
    micro_batches: bool = key(MICRO_BATCHES, False)
    wire: WireType = key(WIRE, WireType.fp32)
    levels: Levels = key(LEVELS.format(", or auto (by prediction)"), Levels.auto)


@dataclass
class TrainerConfig:
    """The training run."""

    batch_size: int = key(BATCH_SIZE, 2048, ge=1)
    num_epochs: int = key("number of passes over the training split", 1, ge=1)
    max_steps: int | None = key("upper bound on steps; null: no limit", None, ge=1)
    seed: int = key("seed of the weights and of the order of samples", 0, ge=0)
    device: Device = key(DEVICE, Device.auto)
    precision: Precision = key(
        "precision of the dense layers' products: fp32, tf32 (GPUs only) or bf16; all else is fp32",
        Precision.fp32,
    )
    compile: bool = key(
        "compile the dense layers with torch.compile; needs a C++ compiler and warmup_steps", False
    )
    grad_clip_norm: float | None = key(
        "maximum norm of the dense layers' mean gradient, without rows; null: no clipping",
        None,
        gt=0,
    )
    num_workers: int | None = key(NUM_WORKERS, None, ge=0, le=256)
    label_weights: dict[str, float] = key(
        "weight of each label in the loss, if there are several; 1 if omitted", {}, ge=0
    )
    eval_splits: list[str] = key("splits to evaluate; the last is reported", ["valid", "test"])
    eval_batch_size: int = key("number of samples per rank and step of evaluation", 4096, ge=1)
    eval_every_steps: int = key(
        "steps between evaluations of the first split; 0: only at the end", 0, ge=0
    )
    eval_group_by: str | None = key(
        "categorical column by whose values the AUC is averaged too (GAUC); null: none", None
    )
    eval_ranking: list[int] = key(
        "lengths k for recall@k and NDCG@k among all items of training; needs item_id", [], ge=1
    )
    eval_ranking_without: str | None = key(
        "categorical_list of seen items that eval_ranking leaves out; null: ranks all", None
    )
    save_every_steps: int = key("steps between checkpoints; 0: not by steps", 0, ge=0)
    save_every_s: float = key(
        "seconds between checkpoints, read at each check-up; 0: not by time",
        600.0,
        ge=0,
        le=MAX_SECONDS,
    )
    best_by: BestBy = key(
        "figure of the first split by which evaluations are compared", BestBy.log_loss
    )
    early_stop_patience: int | None = key(
        "end after this many evaluations in a row without a new best value; null: never", None, ge=1
    )
    keep_best: bool | None = key(
        "keep, report and export the checkpoint of the best value; null: if stopped early", None
    )
    callbacks: list[str] = key(
        "import paths of classes derived from hotrec.train.callbacks.Callback", []
    )
    keep_checkpoints: int = key("number of latest checkpoints to keep", 2, ge=1)
    log_every_steps: int = key("steps between lines of metrics.jsonl", 100, ge=1)
    metrics_port: int = key(
        "port on which rank 0's host serves /metrics for Prometheus; 0: none", 0, ge=0, le=65535
    )
    trace_step: int | None = key(
        "first of five steps to record with torch.profiler, from this start; null: none", None, ge=2
    )
    memory_stacks: bool = key(
        "record which lines allocate GPU memory, for when it runs out; slows every step", False
    )
    check_every_steps: int = key(
        "steps between check-ups for non-finite losses and signals", 10, ge=1
    )
    warmup_steps: int = key("number of first steps that are excluded from all rates", 10, ge=0)
    resume: str = key(
        "checkpoint to resume from: latest (of this directory), none, or a path", "latest"
    )
    warm_start: str | None = key(
        "run or checkpoint of the first weights, whose rows match by raw id; null: none", None
    )
    warm_start_names: dict[str, str | None] = key(
        "names in warm_start of tables, parameters or modules, with this model's, or null", {}
    )
    timeout_s: float = key(
        "seconds that a collective waits for the slowest rank", 600.0, gt=0, le=MAX_SECONDS
    )
    watchdog_s: float = key(
        "seconds without progress after which the run fails and names the rank",
        120.0,
        gt=0,
        le=MAX_SECONDS,
    )

    @property
    def keeps_best(self) -> bool:
        """Whether the best checkpoint is kept, which is then the one that is meant."""
        return self.early_stop_patience is not None if self.keep_best is None else self.keep_best

    def rules(self) -> Rules:
        yield (
            not self.compile or self.warmup_steps >= 1,
            "warmup_steps: expected at least 1 with trainer.compile, whose first step compiles, "
            f"got {self.warmup_steps}. Set trainer.warmup_steps=10.",
        )
        yield (
            not self.warm_start_names or self.warm_start is not None,
            "warm_start_names: expected names only with trainer.warm_start, got "
            f"{self.warm_start_names}. Set trainer.warm_start, or leave the names out.",
        )
        yield (
            self.precision is not Precision.tf32 or self.device is not Device.cpu,
            "precision: expected fp32 or bf16 with trainer.device=cpu, got tf32, which only GPUs "
            "have. Set trainer.precision=fp32.",
        )
        for name, is_set in (
            ("early_stop_patience", self.early_stop_patience is not None),
            ("keep_best", bool(self.keep_best)),
        ):
            yield (
                not is_set or bool(self.eval_every_steps and self.eval_splits),
                f"{name}: expected evaluations on the way, got eval_every_steps "
                f"{self.eval_every_steps} and eval_splits {self.eval_splits}. Set "
                "trainer.eval_every_steps.",
            )
        yield (
            self.best_by is not BestBy.gauc or self.eval_group_by is not None,
            "best_by: expected log_loss or auc without trainer.eval_group_by, got gauc. Set "
            "trainer.eval_group_by.",
        )
        is_by_rank = self.best_by in (BestBy.recall_at, BestBy.ndcg_at)
        yield (
            not is_by_rank or bool(self.eval_ranking),
            f"best_by: expected log_loss, auc or gauc without trainer.eval_ranking, got "
            f"{self.best_by.name}. Set trainer.eval_ranking.",
        )
        yield (
            self.eval_ranking_without is None or bool(self.eval_ranking),
            f"eval_ranking_without: expected none without trainer.eval_ranking, got "
            f"{self.eval_ranking_without!r}. Set trainer.eval_ranking.",
        )
        unknown = sorted(set(self.eval_splits) - set(Split))
        yield not unknown, f"eval_splits: expected some of train, valid and test, got {unknown}."


@dataclass
class RunConfig:
    """Settings of ``hotrec run`` besides its stages."""

    compare: bool = key(
        "also train with TorchRec's planner and the other kind of plan, and compare speed", False
    )
    from_: Stage | None = key(
        "repeat this stage and those after it, even if current; null: none", None
    )


@dataclass
class LaunchConfig:
    """Processes on this host."""

    num_ranks: int = key(
        "number of ranks to start on this host, unless torchrun started them", 1, ge=1, le=1024
    )


def _directory_rules(name: str, path: str) -> Rules:
    """What is written is on this host; only a log may be in a store."""
    path = str(path)  # a Path from Python
    # An empty path would be the working directory.
    yield bool(path), f"{name}: expected a directory, got an empty path."
    yield (
        "://" not in path,
        f"{name}: expected a directory of this host, got {path!r}. Name one, and copy it to the "
        "store afterwards.",
    )


@dataclass
class PathsConfig:
    """The paths that the stages read and write."""

    dataset: str = key("directory of the dataset", "data/${dataset_name}/dataset")
    partition: str = key("directory of the planned partition", "data/${dataset_name}/partition")
    costs: str = key("directory of the costs that calibrate measured on this machine", "data/costs")
    trials: str = key("directory in which runs record their trials", "data/trials")

    def rules(self) -> Rules:
        for name in ("dataset", "partition", "costs", "trials"):
            yield from _directory_rules(name, getattr(self, name))


@dataclass
class PlannerConfig:
    """The machine that the plan is for."""

    hbm_gib: float | None = key(
        "GPU memory per device; null: the free memory, or 80 without a GPU", None, gt=0
    )
    host_gib: float | None = key(
        "memory per host; null: of this host, or of the one that built-in costs are of", None, gt=0
    )
    costs: str = key("costs to predict with: measured, the name of a built-in set, or auto", "auto")


@dataclass
class PlanConfig:
    """What ``hotrec plan`` plans for, and how a run chooses between plans."""

    world_size: int = key("number of ranks", 2, ge=1, le=2**20)
    ranks_per_host: int | None = key("number of ranks per host; null: all on one", None, ge=1)
    device: Device = key(DEVICE, Device.auto)
    min_samples_per_s: float | None = key(
        "minimum rate of the machine that a sweep recommends; null: any rate", None, gt=0
    )
    trial: bool = key(
        "train candidates too close to call on the first batches; false: trust predictions", True
    )
    trial_s: float | None = key(
        "time budget of a trial in seconds; null: 1% of the predicted run, from 5 to 60 s",
        None,
        gt=0,
        le=MAX_SECONDS,
    )


@dataclass
class CalibrateConfig:
    """What ``hotrec calibrate`` measures."""

    max_bytes: float = key("maximum size of a message that a rank sends", 16777216.0, ge=4096)
    budget_s: float = key(
        "time budget of all measurements in seconds; each is made at least once", 60.0, gt=0
    )
    repeats: int = key("maximum number of timed calls of each size", 24, ge=3)
    cap_mib: int = key("memory per rank for the tables whose lookups are timed", 256, ge=1)
    from_run: str | None = key(
        "run directory whose measured stages correct the costs; null: measure the machine", None
    )


@dataclass
class BenchVariant:
    """A case with its own name; null keys are as in bench."""

    placement: BenchCase = key("placement of the case")
    pipeline: PipelineKind | None = key("pipeline of the case, as in pipeline.kind", None)
    tier: TorchrecTier = key("memory of TorchRec's rows, as in placement", TorchrecTier.fused)
    cold_tier: ColdTier = key("memory of the cold rows, as in placement", ColdTier.fused)
    cache_load_frac: float = key(
        CACHE_LOAD.format("fused_uvm_caching or cached"), DEFAULT_LOAD_FRAC, gt=0, lt=1
    )
    num_hot_rows: int | None = key("number of hot rows, the most-read ones", None, ge=0)
    wire: WireType = key(WIRE, WireType.fp32)
    depth: int = key(DEPTH, 1, ge=0, le=1)
    micro_batches: bool = key(MICRO_BATCHES, False)
    levels: Levels = key(LEVELS.format(""), Levels.one)
    assign: OrderAssign = key(ASSIGN, OrderAssign.as_read)

    def rules_in(self, bench: BenchConfig) -> Rules:
        """The rules for a variant of a benchmark."""
        placement, tier, pipeline = self.placement, self.tier, self.pipeline or bench.pipeline
        is_hot_cold, name = placement in HOT_COLD_CASES, pipeline.name
        is_cached = tier is TorchrecTier.fused_uvm_caching and not is_hot_cold
        expected = {
            PipelineKind.auto: "sparse_dist, base, look_ahead or prefetch in a benchmark",
            PipelineKind.look_ahead: "another than look_ahead with TorchRec's plan",
            PipelineKind.prefetch: "prefetch only with TorchRec's plans and fused_uvm_caching",
        }.get(pipeline)
        can_run = {PipelineKind.look_ahead: is_hot_cold, PipelineKind.prefetch: is_cached}
        yield (
            expected is None or can_run.get(pipeline, False),
            f"pipeline: expected {expected}, got {name} with the placement {placement.name} and "
            f"the tier {tier.name}. Set pipeline=sparse_dist.",
        )
        yield (
            self.cold_tier is ColdTier.fused
            or (is_hot_cold and pipeline is PipelineKind.look_ahead),
            f"cold_tier: expected fused with the placement {placement.name} and the "
            f"pipeline {name}, got cached. Give it pipeline=look_ahead and hot and cold rows.",
        )
        yield (
            tier is TorchrecTier.fused or not is_hot_cold,
            f"tier: expected fused with the placement {placement.name}, got {tier.name}. It is of "
            "TorchRec's plans; cold rows have cold_tier.",
        )
        yield (
            (self.depth == 1 and not self.micro_batches) or pipeline is PipelineKind.look_ahead,
            f": expected depth 1 and no micro_batches with the pipeline {name}, got depth "
            f"{self.depth}, micro_batches {self.micro_batches}. They are look_ahead's.",
        )
        yield (
            self.levels is not Levels.auto,
            "levels: expected one or two in a benchmark, got auto. Set levels=one.",
        )
        yield (
            self.num_hot_rows is None or placement is BenchCase.hot_cold,
            f"num_hot_rows: expected null with the placement {placement.name}, got "
            f"{self.num_hot_rows}. Set placement=hot_cold.",
        )
        has_cold = placement in (BenchCase.hot_cold, BenchCase.all_cold)
        yield (
            self.assign in (OrderAssign.as_read, OrderAssign.by_owner),
            "assign: expected as_read or by_owner in a benchmark, whose bags have one id each, got "
            f"{self.assign.name}. Compare two runs with `hotrec compare`.",
        )
        yield (
            has_cold or self.assign is OrderAssign.as_read,
            f"assign: expected as_read with the placement {placement.name}, which has no cold rows "
            "that travel, got by_owner. Set placement=hot_cold.",
        )


@dataclass
class BenchConfig:
    """Plans on generated or prepared samples; a choice of plans= sets them."""

    name: str | None = key("title of the page; by default the plans= choice")
    cases: list[str] = key(
        "cases to compare: placements or names in plans.variants", [*map(str, BenchCase)], size=1
    )
    variants: dict[str, BenchVariant] = key("additional cases by name", {})
    dataset: str | None = key(
        "directory of a dataset to train on; null: samples drawn for table_rows", None
    )
    table_rows: list[int] = key(
        "rows of each table, read by one feature; by default of the plans= choice", [], ge=1
    )
    zipf_exponent: float = key("exponent of the k-th row's popularity, k^-exponent", 1.05, ge=0)
    rows_by_popularity: bool = key("number rows by popularity instead of at random", False)
    num_dense: int = key("number of dense columns", 13, ge=0)
    batch_size: int = key(BATCH_SIZE, 2048, ge=1)
    rounds: int = key("number of timed blocks of steps of each case", 5, ge=1)
    block_steps: int = key("number of consecutive steps of a case in a block", 12, ge=1)
    block_skip: int = key("number of first steps of a block that are not timed", 2, ge=0)
    warmup_rounds: int = key("number of steps of each case before the first timed block", 4, ge=1)
    counted_steps: int = key("number of steps whose bytes are counted; they are not timed", 2, ge=1)
    num_hot_rows: int = key("number of hot rows: those that are accessed most", 20000, ge=0)
    profile_samples: int = key(
        "number of samples from which the hot rows are chosen", 1000000, ge=1
    )
    routing: BenchRouting = key(
        "where ids are routed: main (timed) or loader (before the step)", BenchRouting.main
    )
    pipeline: PipelineKind = key(
        "pipeline of cases that set none: sparse_dist or base", PipelineKind.sparse_dist
    )
    seed: int = key("seed of weights, popularity and samples", 0, ge=0)
    loss_tolerance: float = key("maximum difference of losses between cases", 1e-4, gt=0)
    interface: str | None = key(
        "network interface whose sent bytes are also read; null: none", None
    )
    network: str = key(
        "description of the network between the ranks, for the page", "loopback of one host"
    )
    page: str | None = key("path of a second copy of the page; null: none", None)

    @property
    def is_chosen(self) -> bool:
        """Whether there is something to train on."""
        return bool(self.table_rows) or self.dataset is not None

    def rules(self) -> Rules:
        cases, placements = self.cases, [*map(str, BenchCase)]
        known = [*placements, *self.variants]
        yield (
            not self.table_rows or self.dataset is None,
            "table_rows: expected rows of tables, or none and a prepared dataset in plans.dataset, "
            f"got {self.table_rows} and dataset {self.dataset}.",
        )
        yield len(set(cases)) == len(cases), f"cases: expected each at most once, got {cases}."
        for case in cases:
            yield case in known, f"cases: expected some of {known}, got {case!r}."
        yield (
            self.pipeline in (PipelineKind.sparse_dist, PipelineKind.base),
            "pipeline: expected sparse_dist or base, which every placement has, got "
            f"{self.pipeline.name}. Give single cases another pipeline by plans.variants.",
        )
        expected, skip = f"below plans.block_steps {self.block_steps}", self.block_skip
        yield skip < self.block_steps, f"block_skip: expected {expected}, got {skip}."
        for name, variant in self.variants.items():
            expected = f": expected a name other than {placements}"
            for holds, message in (
                (name not in placements, f"{expected}, got {name!r}."),
                *variant.rules_in(self),
            ):
                dot = "" if message[0] == ":" else "."
                yield holds, f"variants.{name}{dot}{message}"


@dataclass
class Config:
    """The configuration of run, prepare, calibrate, plan and train."""

    dataset_name: str | None = key(
        "directory of the dataset under data/; by default the data= choice"
    )
    run_name: str = key("name of the run in reports; by default the placement= choice")
    data: DataSpec = section("the raw log and how to prepare it", DataSpec)
    append: list[str] = key(
        "for `hotrec prepare`, files that extend the dataset at paths.dataset", []
    )
    overwrite: bool = key(
        "allow to prepare a dataset with appended files from scratch, without them", False
    )
    prune: int | None = key(
        "for `hotrec prepare`, number of earlier generations to keep; null: all", None, ge=0
    )
    model: ModelConfig = section("the model", ModelConfig)
    placement: PlacementConfig = section("the choice of hot rows", PlacementConfig)
    optimizer: OptimizerConfig = section("the update rule of all parameters", OptimizerConfig)
    order: OrderConfig = section("the order of training samples", OrderConfig)
    pipeline: PipelineConfig = section("how steps and communication overlap", PipelineConfig)
    trainer: TrainerConfig = section("the training run", TrainerConfig)
    planner: PlannerConfig = section("the machine that the plan is for", PlannerConfig)
    plan: PlanConfig = section("the machine for `hotrec plan`, and trials of plans", PlanConfig)
    calibrate: CalibrateConfig = section("what `hotrec calibrate` measures", CalibrateConfig)
    run: RunConfig = section("additional settings of `hotrec run`", RunConfig)
    launch: LaunchConfig = section("the processes on this host", LaunchConfig)
    paths: PathsConfig = section("the directories of each stage", PathsConfig)

    def rules(self) -> Rules:
        name = self.dataset_name or ""
        parts = PurePath(name).parts
        is_name = bool(parts) and name.isprintable() and not {"/", ".."} & set(parts)
        yield (
            is_name or (self.dataset_name is None and not self.data.is_chosen),
            "dataset_name: expected the name of a directory below data/, got "
            f"{self.dataset_name!r}. Set paths.dataset for a directory elsewhere.",
        )
        yield (
            not self.append or self.data.source is not None,
            f"append: expected no files for a synthetic log, got {self.append}. Draw more samples "
            "with data.synthetic.num_train.",
        )
        yield (
            not self.trainer.compile or not isinstance(self.model, SequenceConfig),
            "trainer.compile: expected false for models of histories, whose layers depend on the "
            f"longest history of a batch, got true for {self.model.kind.name}. Remove it.",
        )
        is_new_only = isinstance(self.order, TimeOrder) and self.order.new_only
        yield (
            not is_new_only or self.trainer.warm_start is not None,
            "order.new_only: expected trainer.warm_start with it, got none. Name the run that the "
            "samples are new to.",
        )
        is_ahead = isinstance(self.order, TimeOrder) and self.order.evaluate_ahead
        yield (
            not is_ahead or self.trainer.num_epochs == 1,
            "trainer.num_epochs: expected 1 with order.evaluate_ahead, which evaluates a day "
            f"before training on it, got {self.trainer.num_epochs}. Set trainer.num_epochs=1.",
        )
        yield from _retrieval_rules(self)
        if self.trainer.max_steps is not None:
            for holds, message in self.optimizer.schedule.rules_in(self.trainer.max_steps):
                yield holds, f"optimizer.schedule.{message}"
        for group, variants in VARIANTS.items():
            chosen = getattr(self, group)
            expected = next(name for name, kind in variants.items() if type(chosen) is kind)
            yield (
                chosen.kind.name == expected,
                f"{group}.kind: expected {expected}, which {group}={expected} chose, got "
                f"{chosen.kind.name}. Choose with {group}={chosen.kind.name}.",
            )


def _retrieval_rules(config: Config) -> Rules:
    """Rules of losses and metrics that compare items."""
    model = config.model
    has_items = isinstance(model, RetrievalConfig) and model.item_id is not None
    ks = config.trainer.eval_ranking
    yield (
        not ks or has_items,
        f"trainer.eval_ranking: expected none without model.item_id, got {ks}. Choose a model that "
        "has it, such as two_tower, and set it.",
    )
    yield (
        not ks or not isinstance(model, RetrievalConfig) or model.multiplies_vectors,
        f"trainer.eval_ranking: expected none for {model.kind.name} with model.loss=cross_entropy, "
        f"whose scores are no products of vectors, got {ks}. Set model.loss=sampled_softmax.",
    )
    if not isinstance(model, RetrievalConfig) or model.loss is RetrievalLoss.cross_entropy:
        return
    yield (
        not config.pipeline.micro_batches,
        f"pipeline.micro_batches: expected false with model.loss={model.loss.name}, which compares "
        "all samples of a batch, got true. Set pipeline.micro_batches=false.",
    )
    yield (
        model.negatives is NegativesKind.in_batch or not isinstance(config.order, AllHotOrder),
        "model.negatives: expected in_batch with order=all_hot, since drawn items are rarely hot, "
        f"got {model.negatives.name}. Set model.negatives=in_batch, or order=shuffled.",
    )


@dataclass
class EvaluateConfig:
    """The configuration of evaluate."""

    run_dir: str = key("directory of the training run; latest: the newest under runs/", "latest")
    checkpoint: str = key(CHECKPOINT, "auto")
    split: Split = key("split of the run's dataset to evaluate on", Split.test)
    batch_size: int | None = key(f"{BATCH_SIZE}; null: as in the run", None, ge=1)
    device: Device = key(DEVICE, Device.auto)
    num_workers: int | None = key(NUM_WORKERS, None, ge=0, le=256)
    launch: LaunchConfig = section("the processes on this host", LaunchConfig)


@dataclass
class CompareConfig:
    """The configuration of compare."""

    runs: list[str] = key(
        "training runs with the same data, model and batch; `hotrec compare DIRECTORY ...`", []
    )
    seconds: float = key(
        "seconds of interleaved training, at least three blocks of each plan",
        20.0,
        gt=0,
        le=MAX_SECONDS,
    )
    device: Device = key(DEVICE, Device.auto)
    plans: BenchConfig = section("plans to compare instead of runs", BenchConfig)
    model: ModelConfig = section("the model of plans", ModelConfig)
    optimizer: OptimizerConfig = section("the update rule of all parameters", OptimizerConfig)
    planner: PlannerConfig = section("the machine that the plan is for", PlannerConfig)
    launch: LaunchConfig = section("the processes on this host", LaunchConfig)

    def rules(self) -> Rules:
        yield (
            bool(self.runs) != self.plans.is_chosen,
            f"runs: expected training runs, or a choice of plans= instead, got {self.runs} and "
            f"plans={self.plans.name}. Name two runs, or choose plans=criteo_like_b2048.",
        )


@dataclass
class ExportConfig:
    """The configuration of export."""

    output: str = key("directory of the exported model")
    run_dir: str = key(FINISHED_RUN, "latest")
    checkpoint: str = key(CHECKPOINT, "auto")
    rows: RowType = key(
        "type of the embedding rows: fp32 (exact), fp16, or int8 with a scale for each row",
        RowType.fp32,
    )

    def rules(self) -> Rules:
        yield from _directory_rules("output", self.output)


@dataclass
class PredictConfig:
    """The configuration of predict."""

    input: list[str] = key(
        "files to score, in the format of the run's log: paths, directories or patterns", size=1
    )
    output: str = key("directory of the scores, with a Parquet file for each input file")
    run_dir: str = key(FINISHED_RUN, "latest")
    checkpoint: str = key(CHECKPOINT, "auto")
    joins: dict[str, list[str]] = key(
        "files of side tables by name, instead of those in the run's data.source.joins", {}
    )
    keep: list[str] = key("columns of the input files to copy to the scores, such as ids", [])
    max_unknown_frac: float = key(
        "maximum share of unknown ids in a column, of those usually known; 1: any", 0.5, ge=0, le=1
    )
    batch_size: int = key(SCORED_AT_ONCE, 4096, ge=1)
    launch: LaunchConfig = section("the processes on this host", LaunchConfig)

    def rules(self) -> Rules:
        yield from _directory_rules("output", self.output)


@dataclass
class ReportConfig:
    """The configuration of report."""

    runs: list[str] = key(
        "directories of runs or sweeps; latest: the newest run; `hotrec report DIRECTORY ...`",
        ["latest"],
    )
    text: bool = key("also print the page on standard error, without charts", False)
    output: str | None = key("directory of the page; null: the run directory of this command", None)
    compared: str | None = key(
        "directory of a `hotrec compare` of these runs; null: no verdict on speed", None
    )

    def rules(self) -> Rules:
        if self.output:
            yield from _directory_rules("output", self.output)


@dataclass
class InitConfig:
    """The configuration of init."""

    path: str | None = key(
        "the log: a file, a directory or a pattern; `hotrec init PATH` sets it", None
    )
    name: str | None = key("name of the dataset; null: that of the file", None)
    label: Any = key(
        "column of 0 and 1 to predict, or several as [clicked,bought]; null: detected by name", None
    )
    time: str | None = key("column of times to split by; null: the first one", None)
    directory: str = key(
        "directory of your configuration, in which data/<name>.yaml is created", "conf"
    )


@dataclass
class DoctorConfig:
    """The configuration of doctor, which has no keys."""


ROOTS: dict[str, type] = {
    "config": Config,
    "evaluate": EvaluateConfig,
    "compare": CompareConfig,
    "export": ExportConfig,
    "predict": PredictConfig,
    "report": ReportConfig,
    "doctor": DoctorConfig,
    "init": InitConfig,
}
