"""The root configuration of each command, and the sections without variants."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hotrec.config.data import DataSpec
from hotrec.config.groups import (
    ModelConfig,
    OptimizerConfig,
    OrderAssign,
    OrderConfig,
    PlacementConfig,
    ProfilerConfig,
    key,
    section,
)
from hotrec.types import ColdTier, HotExchange, PipelineKind, Precision, WireType


@dataclass
class PipelineConfig:
    """How steps overlap."""

    kind: PipelineKind = key(
        "the train pipeline: look_ahead (exchange the rows of the next batches during this step), "
        "sparse_dist (exchange only their ids), base, prefetch (TorchRec's, with "
        "placement=torchrec and its tier fused_uvm_caching), or auto (look_ahead for hot and cold "
        "rows on CPU over several hosts or with at least 2048 samples per rank, else sparse_dist); "
        "choose it with pipeline=",
        PipelineKind.auto,
    )
    depth: int = key(
        "number of batches whose rows look_ahead exchanges in advance; 0: none",
        1,
        at_least=0,
        at_most=16,
    )
    micro_batches: bool = key(
        "let look_ahead first compute the samples that need no row of another rank", False
    )
    wire: WireType = key(
        "type of rows and gradients in messages: fp32 (exact), fp16 or bf16", WireType.fp32
    )


class Device(Enum):
    """Where to compute."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


@dataclass
class TrainerConfig:
    """The training run."""

    batch_size: int = key("number of samples per rank and step", 2048, at_least=1)
    num_epochs: int = key("number of passes over the training split", 1, at_least=1)
    max_steps: int | None = key(
        "number of steps to stop after, if num_epochs are longer; null: no limit", None, at_least=1
    )
    seed: int = key("seed of the weights and of the order of samples", 0, at_least=0)
    device: Device = key(
        "device to compute on: cpu, cuda, or auto (cuda if available)", Device.auto
    )
    precision: Precision = key(
        "precision of the dense layers' products: fp32, tf32 (GPUs only) or bf16 (autocast); rows, "
        "pooling, loss and updates are always fp32",
        Precision.fp32,
    )
    compile: bool = key(
        "compile the dense layers with torch.compile; needs a C++ compiler, and warmup_steps, "
        "which excludes the steps that compile from rates",
        False,
    )
    grad_clip_norm: float | None = key(
        "largest norm of the mean gradient of all dense layers together; null: no clipping. "
        "Gradients of embedding rows are neither clipped nor part of the norm, because backward "
        "updates the rows",
        None,
        above=0,
    )
    num_workers: int = key(
        "number of loader processes per rank; 0: read in the rank itself", 1, at_least=0
    )
    eval_splits: list[str] = key(
        "splits to evaluate; the summary reports the last one", ["valid", "test"]
    )
    eval_batch_size: int = key(
        "number of samples per rank and step of evaluation", 4096, at_least=1
    )
    eval_every_steps: int = key(
        "steps between evaluations of the first split; 0: only at the end", 0, at_least=0
    )
    save_every_steps: int = key("steps between checkpoints; 0: only at the end", 0, at_least=0)
    keep_checkpoints: int = key("number of newest checkpoints to keep", 2, at_least=1)
    log_every_steps: int = key("steps between lines of metrics.jsonl", 100, at_least=1)
    check_every_steps: int = key(
        "steps between checks for losses that are not finite and for signals", 10, at_least=1
    )
    check_replicas_every_steps: int = key(
        "steps between checks that all ranks hold the same hot rows; 0: never", 1000, at_least=0
    )
    warmup_steps: int = key("number of first steps that all rates exclude", 10, at_least=0)
    resume: str = key(
        "checkpoint to resume: latest (of this run directory, if any), none, or a path", "latest"
    )
    timeout_s: float = key("seconds that a collective waits for the slowest rank", 600.0, above=0)
    watchdog_s: float = key(
        "seconds without progress in a step after which the run ends, naming the rank that hangs",
        120.0,
        above=0,
    )


@dataclass
class LaunchConfig:
    """Processes on this host."""

    num_ranks: int = key(
        "number of ranks to start on this host, unless torchrun has started them",
        1,
        at_least=1,
        at_most=1024,
    )


class Verify(Enum):
    """How much of a dataset is checked when it is opened."""

    size = "size"
    full = "full"


@dataclass
class PathsConfig:
    """Where the stages read and write."""

    dataset: str = key("directory of the dataset", "data/${dataset_name}/dataset")
    profile: str = key("directory of the profile", "data/${dataset_name}/profile")
    partition: str = key(
        "directory of the partition that plan writes", "data/${dataset_name}/partition"
    )
    costs: str = key(
        "directory of the costs that calibrate measures; they belong to the machine, not to a "
        "dataset",
        "data/costs",
    )
    verify: Verify = key(
        "which checksums of the dataset to compare when it is opened: size (none; "
        "those of a chunk when it is first read) or full (all)",
        Verify.size,
    )


class ProfileMode(Enum):
    """Which samples are counted."""

    exact = "exact"
    sample = "sample"


@dataclass
class ProfileConfig:
    """How lookups are counted."""

    mode: ProfileMode = key(
        "samples to count: exact (all of them) or sample (a fraction, sample_frac)",
        ProfileMode.exact,
    )
    sample_frac: float = key("fraction of the samples to count", 0.05, above=0, at_most=1)
    seed: int = key("seed of the choice of samples", 0, at_least=0)
    min_count: int = key("smallest number of lookups of a hot row", 1, at_least=1)
    confidence: float = key(
        "confidence level of the intervals of a sampled profile", 0.95, above=0, below=1
    )
    heldout_frac: float = key(
        "fraction at the end of the training split to hold out; 0: hold out the validation split",
        0.0,
        at_least=0,
        below=1,
    )


@dataclass
class PlannerConfig:
    """The machine that the plan is for."""

    hbm_gib: float | None = key(
        "GPU memory per device; null: its free memory, or 80 without a GPU", None, above=0
    )
    host_gib: float | None = key("host memory per host; null: that of this host", None, above=0)
    costs: str = key(
        "costs to predict with: measured (at paths.costs), the name of a built-in set, or auto "
        "(measured if they exist for this kind of device, else the nearest built-in set)",
        "auto",
    )


@dataclass
class PlanConfig:
    """What ``hotrec plan`` plans for."""

    world_size: int = key("number of ranks", 2, at_least=1)
    ranks_per_host: int | None = key("number of ranks per host; null: all on one", None, at_least=1)
    device: Device = key(
        "device to compute on: cpu, cuda, or auto (cuda if available)", Device.auto
    )
    sensitivity: bool = key(
        "also predict with half and twice the memory, batch size and ranks", True
    )
    min_samples_per_s: float | None = key(
        "smallest rate of the machine that a sweep recommends; null: any rate", None, above=0
    )
    keep_going: bool = key(
        "record jobs of a sweep whose plan does not fit, instead of failing", True
    )


@dataclass
class CalibrateConfig:
    """What ``hotrec calibrate`` measures."""

    name: str | None = key("name of the costs; null: named by device and host", None)
    max_bytes: float = key(
        "size of the largest message that a rank sends", 16777216.0, at_least=4096
    )
    repeats: int = key("largest number of timed calls of each size", 7, at_least=3)
    cap_mib: int = key("memory per rank of the tables on which lookups are timed", 256, at_least=1)
    from_run: str | None = key(
        "run directory whose measured stages correct the costs; null: measure the machine", None
    )


class BenchCase(Enum):
    """Placements that `hotrec bench` compares; each is a case of that name."""

    hot_cold = "hot_cold"
    all_cold = "all_cold"
    all_hot = "all_hot"
    table_wise = "table_wise"
    planner = "planner"
    hand_tuned = "hand_tuned"


HOT_COLD_CASES = (BenchCase.hot_cold, BenchCase.all_cold, BenchCase.all_hot)


class HotRowsRule(Enum):
    """How `hotrec bench` chooses the hot rows of hot_cold."""

    top = "top"
    break_even = "break_even"


class BenchRouting(Enum):
    """Whether routing is inside the timed step."""

    main = "main"
    loader = "loader"


@dataclass
class BenchVariant:
    """A case with its own name; null keys are as in bench."""

    placement: BenchCase = key("placement of the case")
    pipeline: PipelineKind | None = key(
        "pipeline: sparse_dist, base, look_ahead (with hot and cold rows) or prefetch (with "
        "TorchRec's plans in the tier fused_uvm_caching)",
        None,
    )
    tier: ColdTier = key("memory of the sharded rows, as in placement", ColdTier.auto)
    cache_load_frac: float = key(
        "fraction of the sharded rows that fused_uvm_caching keeps in GPU memory",
        0.2,
        above=0,
        below=1,
    )
    num_hot_rows: int | None = key("number of hot rows, those looked up most", None, at_least=0)
    hot_exchange: HotExchange | None = key("how gradients of hot rows are reduced", None)
    wire: WireType = key("type of rows and gradients in messages", WireType.fp32)
    depth: int = key(
        "number of batches whose rows look_ahead exchanges in advance", 1, at_least=0, at_most=16
    )
    micro_batches: bool = key(
        "let look_ahead first compute the samples that need no row of another rank", False
    )
    assign: OrderAssign = key(
        "how samples of a global batch are assigned to ranks: as_read, or by_owner (of their "
        "cold rows)",
        OrderAssign.as_read,
    )


@dataclass
class BenchConfig:
    """The measurement; a choice of bench= sets it."""

    name: str = key("title of the page; by default the bench= choice")
    cases: list[str] = key(
        "cases to compare in turn: placements, and names of bench.variants",
        [case.name for case in BenchCase],
    )
    variants: dict[str, BenchVariant] = key("more cases by name", {})
    table_rows: list[int] = key("number of rows of each table; each is read by one feature")
    zipf_exponent: float = key(
        "exponent of the popularity of the k-th row, k^-exponent", 1.05, at_least=0
    )
    num_dense: int = key("number of dense columns", 13, at_least=1)
    batch_size: int = key("number of samples per rank and step", 2048, at_least=1)
    rounds: int = key("number of timed blocks of steps of each case", 5, at_least=1)
    rounds_of: dict[str, int] = key("number of blocks of single cases, if fewer than rounds", {})
    block_steps: int = key("number of consecutive steps of a case in a block", 12, at_least=1)
    block_skip: int = key("number of first steps of a block that are not timed", 2, at_least=0)
    warmup_rounds: int = key(
        "number of steps of each case before the first timed block", 4, at_least=1
    )
    counted_steps: int = key(
        "number of steps whose bytes are counted; they are not timed", 2, at_least=1
    )
    hot_rows: HotRowsRule = key(
        "rule for hot rows: top (num_hot_rows rows) or break_even (min_accesses_per_step)",
        HotRowsRule.top,
    )
    num_hot_rows: int = key(
        "number of hot rows with hot_rows=top, those looked up most", 20000, at_least=0
    )
    min_accesses_per_step: float = key(
        "smallest expected lookups per global batch of a hot row with hot_rows=break_even",
        1.0,
        above=0,
    )
    profile_samples: int = key(
        "number of samples from which the hot rows are chosen", 1000000, at_least=1
    )
    hot_exchange: HotExchange = key(
        "how gradients of hot rows are reduced: touched_rows, owners, dense, or auto (fewest "
        "bytes)",
        HotExchange.auto,
    )
    routing: BenchRouting = key(
        "where ids are routed: main (inside the timed step) or loader (before it)",
        BenchRouting.main,
    )
    pipeline: PipelineKind = key(
        "pipeline of all cases without one in bench.variants: sparse_dist or base",
        PipelineKind.sparse_dist,
    )
    seed: int = key("seed of weights, popularity and samples", 0, at_least=0)
    device: Device = key(
        "device to compute on: cpu, cuda, or auto (cuda if available)", Device.auto
    )
    loss_tolerance: float = key("largest allowed difference of losses between cases", 1e-4, above=0)
    profile: bool = key("also profile the operators of some steps", False)
    profile_steps: int = key("number of steps of each case to profile", 4, at_least=1)
    interface: str | None = key(
        "network interface whose sent bytes are also read; null: none", None
    )
    network: str = key(
        "name of the network between the ranks, for the page", "loopback of one host"
    )
    page: str | None = key(
        "path of another copy of the result page; null: only in the run directory", None
    )
    timeout_s: float = key("seconds that a collective waits for the slowest rank", 600.0, above=0)


@dataclass
class BenchRootConfig:
    """The configuration of bench."""

    bench: BenchConfig = section("the measurement", BenchConfig)
    model: ModelConfig = section("the model", ModelConfig)
    optimizer: OptimizerConfig = section("the update rule of all parameters", OptimizerConfig)
    planner: PlannerConfig = section("the machine that the plan is for", PlannerConfig)
    launch: LaunchConfig = section("the processes on this host", LaunchConfig)


@dataclass
class Config:
    """The configuration of prepare, profile, plan and train."""

    dataset_name: str = key("directory of the dataset under data/; by default the data= choice")
    run_name: str = key("name of the run in reports; by default the placement= choice")
    data: DataSpec = section("the raw log and how to prepare it", DataSpec)
    profile: ProfileConfig = section("how lookups are counted", ProfileConfig)
    model: ModelConfig = section("the model", ModelConfig)
    placement: PlacementConfig = section("the choice of hot rows", PlacementConfig)
    optimizer: OptimizerConfig = section("the update rule of all parameters", OptimizerConfig)
    order: OrderConfig = section("the order of training samples", OrderConfig)
    pipeline: PipelineConfig = section("how steps and communication overlap", PipelineConfig)
    trainer: TrainerConfig = section("the training run", TrainerConfig)
    profiler: ProfilerConfig = section("the recording of single steps", ProfilerConfig)
    planner: PlannerConfig = section("the machine that the plan is for", PlannerConfig)
    plan: PlanConfig = section("the machine size that `hotrec plan` plans for", PlanConfig)
    calibrate: CalibrateConfig = section("what `hotrec calibrate` measures", CalibrateConfig)
    launch: LaunchConfig = section("the processes on this host", LaunchConfig)
    paths: PathsConfig = section("the directories of each stage", PathsConfig)


@dataclass
class EvaluateConfig:
    """The configuration of evaluate."""

    run_dir: str = key("directory of the training run; latest: the newest under runs/", "latest")
    checkpoint: str = key(
        "checkpoint to evaluate: latest, or a name in the run's checkpoints/", "latest"
    )
    split: str = key("split of the run's dataset to evaluate on", "test")
    batch_size: int | None = key(
        "number of samples per rank and step; null: that of the run", None, at_least=1
    )
    device: Device = key(
        "device to compute on: cpu, cuda, or auto (cuda if available)", Device.auto
    )
    num_workers: int = key(
        "number of loader processes per rank; 0: read in the rank itself", 1, at_least=0
    )
    timeout_s: float = key("seconds that a collective waits for the slowest rank", 600.0, above=0)
    launch: LaunchConfig = section("the processes on this host", LaunchConfig)


@dataclass
class ReportConfig:
    """The configuration of report."""

    runs: list[str] = key(
        "run directories to report on; latest: the newest under runs/", ["latest"]
    )
    output: str | None = key("directory of the page; null: the run directory of this command", None)
    profile: str | None = key("profile to draw; null: that of the first run", None)
    partition: str | None = key("partition to draw; null: that of the first run", None)
    baseline: str | None = key("name of the run that the others are compared with", None)
    title: str = key("title of the page", "hotrec report")


@dataclass
class DoctorConfig:
    """The configuration of doctor, which has no keys."""


ROOTS: dict[str, type] = {
    "config": Config,
    "bench": BenchRootConfig,
    "evaluate": EvaluateConfig,
    "report": ReportConfig,
    "doctor": DoctorConfig,
}
