"""The root configuration of each command, and its sections of one form."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hotrec.config.data import DataSpec
from hotrec.config.fields import key, section
from hotrec.config.groups import (
    ModelConfig,
    OptimizerConfig,
    OrderAssign,
    OrderConfig,
    PlacementConfig,
    ProfilerConfig,
)
from hotrec.types import ColdTier, HotExchange, PipelineKind, Precision, WireType


@dataclass
class PipelineConfig:
    """How steps overlap."""

    kind: PipelineKind = key(
        "look_ahead (the next batches' rows travel during this step), sparse_dist (only their ids "
        "do), base, prefetch (TorchRec's, with placement=torchrec and its tier fused_uvm_caching), "
        "or auto: look_ahead for hot and cold rows on CPU over several hosts or with 2048 samples "
        "a rank and more, else sparse_dist; pipeline=",
        PipelineKind.auto,
    )
    depth: int = key(
        "of look_ahead: batches whose rows travel ahead; 0: none", 1, at_least=0, at_most=16
    )
    micro_batches: bool = key(
        "of look_ahead: compute the samples first whose rows need not be waited for", False
    )
    wire: WireType = key(
        "type in which rows and gradients travel: fp32 (exact), fp16 or bf16", WireType.fp32
    )


class Device(Enum):
    """Where to compute."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


@dataclass
class TrainerConfig:
    """The training run."""

    batch_size: int = key("samples per rank and step", 2048, at_least=1)
    num_epochs: int = key("passes over the training split", 1, at_least=1)
    max_steps: int | None = key(
        "stop after so many steps, if earlier; null: never", None, at_least=1
    )
    seed: int = key("of weights and of the order of samples", 0, at_least=0)
    device: Device = key("cpu, cuda, or auto: cuda where there is one", Device.auto)
    precision: Precision = key(
        "of the dense layers' products: fp32, tf32 (GPUs), or bf16 (autocast); rows, pooling, loss "
        "and updates are fp32 always",
        Precision.fp32,
    )
    compile: bool = key(
        "compile the dense layers with torch.compile, in the first steps, which warmup_steps "
        "leaves out of all rates; needs a C++ compiler",
        False,
    )
    grad_clip_norm: float | None = key(
        "largest norm of the dense layers' mean gradient, all of them together; null: any. "
        "Gradients of embedding rows are not clipped, nor in the norm: backward updates the rows",
        None,
        above=0,
    )
    num_workers: int = key("loader processes per rank; 0: none", 1, at_least=0)
    eval_splits: list[str] = key(
        "splits to evaluate; the last gives the summary", ["valid", "test"]
    )
    eval_batch_size: int = key("samples per rank and step of evaluation", 4096, at_least=1)
    eval_every_steps: int = key(
        "steps between evaluations of the first split; 0: at the end", 0, at_least=0
    )
    save_every_steps: int = key("steps between checkpoints; 0: at the end", 0, at_least=0)
    keep_checkpoints: int = key("newest checkpoints to keep", 2, at_least=1)
    log_every_steps: int = key("steps between lines of metrics.jsonl", 100, at_least=1)
    check_every_steps: int = key("steps between looks at losses and signals", 10, at_least=1)
    check_replicas_every_steps: int = key(
        "steps between checksum comparisons of the ranks' hot rows; 0: never", 1000, at_least=0
    )
    warmup_steps: int = key("first steps, left out of all rates", 10, at_least=0)
    resume: str = key("latest (of this run directory, if any), none, or a checkpoint", "latest")
    timeout_s: float = key("how long a collective waits for the slowest rank", 600.0, above=0)
    watchdog_s: float = key(
        "how long nothing may move in a step before the run is ended, naming the rank in the way",
        120.0,
        above=0,
    )


@dataclass
class LaunchConfig:
    """Processes on this host."""

    num_ranks: int = key(
        "start so many ranks here, unless torchrun already has", 1, at_least=1, at_most=1024
    )


@dataclass
class PathsConfig:
    """Where the stages read and write."""

    dataset: str = key("dataset directory", "data/${dataset_name}/dataset")
    profile: str = key("profile directory", "data/${dataset_name}/profile")
    partition: str = key("partition directory that plan writes", "data/${dataset_name}/partition")
    costs: str = key("measured costs, of calibrate; of the machine, not of a dataset", "data/costs")


class ProfileMode(Enum):
    """Whether all samples are counted."""

    exact = "exact"
    sample = "sample"


@dataclass
class ProfileConfig:
    """What is counted."""

    mode: ProfileMode = key("exact, or sample (then see sample_frac)", ProfileMode.exact)
    sample_frac: float = key("share of the samples to count", 0.05, above=0, at_most=1)
    seed: int = key("of the sample", 0, at_least=0)
    min_count: int = key("lookups below which a row is never hot", 1, at_least=1)
    confidence: float = key("of the intervals of a sampled profile", 0.95, above=0, below=1)
    heldout_frac: float = key(
        "hold out the last share of the training split; 0: hold out the validation split",
        0.0,
        at_least=0,
        below=1,
    )


@dataclass
class PlannerConfig:
    """The machine that the plan is for."""

    hbm_gib: float | None = key(
        "GPU memory per device; null: what is free of it, or 80", None, above=0
    )
    host_gib: float | None = key("host memory per host; null: as found", None, above=0)
    costs: str = key(
        "measured (at paths.costs), the name of a built-in set, or auto: measured if there and of "
        "this kind of device, else the nearest built-in set",
        "auto",
    )


@dataclass
class PlanConfig:
    """What ``hotrec plan`` plans for."""

    world_size: int = key("ranks", 2, at_least=1)
    ranks_per_host: int | None = key("ranks on a host; null: all", None, at_least=1)
    device: Device = key("cpu, cuda, or auto: cuda where there is one", Device.auto)
    sensitivity: bool = key("also predict with half and twice the budget, batch and ranks", True)
    min_samples_per_s: float | None = key(
        "of a sweep's cheapest machine; null: any that fits", None, above=0
    )
    keep_going: bool = key("in a sweep, write down what does not fit and go on", True)


@dataclass
class CalibrateConfig:
    """What ``hotrec calibrate`` measures."""

    name: str | None = key("name of the costs; null: device and host", None)
    max_bytes: float = key("largest message that a rank sends", 16777216.0, at_least=4096)
    repeats: int = key("timed calls of each size, at most; 3 at least", 7, at_least=3)
    cap_mib: int = key("memory per rank for the rows that lookups are timed on", 256, at_least=1)
    from_run: str | None = key(
        "do not measure: correct the costs by the stages that this run directory measured", None
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
    """A case of a name of its own; what is null is as in bench."""

    placement: BenchCase = key("the placement")
    pipeline: PipelineKind | None = key(
        "sparse_dist, base, look_ahead (hot and cold rows) or prefetch (TorchRec's plans in the "
        "tier fused_uvm_caching)",
        None,
    )
    tier: ColdTier = key("memory of the rows that are sharded; see placement", ColdTier.auto)
    cache_load_frac: float = key(
        "share of those rows that fused_uvm_caching keeps in GPU memory", 0.2, above=0, below=1
    )
    num_hot_rows: int | None = key("the so many most looked-up rows are hot", None, at_least=0)
    hot_exchange: HotExchange | None = key("gradients of hot rows", None)
    wire: WireType = key("type in which rows and gradients travel", WireType.fp32)
    depth: int = key("of look_ahead: batches whose rows travel ahead", 1, at_least=0, at_most=16)
    micro_batches: bool = key("of look_ahead: compute what need not wait first", False)
    assign: OrderAssign = key(
        "as_read, or by_owner: samples of the same global batches go where their cold rows are",
        OrderAssign.as_read,
    )


@dataclass
class BenchConfig:
    """What is measured; a choice of bench= sets it."""

    name: str = key("title of the page; by default the bench= choice")
    cases: list[str] = key(
        "what takes turns: placements and names of bench.variants",
        [case.name for case in BenchCase],
    )
    variants: dict[str, BenchVariant] = key("further cases by name", {})
    table_rows: list[int] = key("rows of each table; one feature reads each")
    zipf_exponent: float = key("popularity of the k-th row ~ k^-exponent", 1.05, at_least=0)
    num_dense: int = key("dense columns", 13, at_least=1)
    batch_size: int = key("samples per rank and step", 2048, at_least=1)
    rounds: int = key("timed blocks of steps of each case", 5, at_least=1)
    rounds_of: dict[str, int] = key("blocks of single cases, if fewer", {})
    block_steps: int = key("consecutive steps of a case before the next one's turn", 12, at_least=1)
    block_skip: int = key("first steps of a block, not counted", 2, at_least=0)
    warmup_rounds: int = key("steps of each case before the clock", 4, at_least=1)
    counted_steps: int = key("steps whose bytes are counted, not timed", 2, at_least=1)
    hot_rows: HotRowsRule = key(
        "top (num_hot_rows most looked-up rows) or break_even (min_accesses_per_step)",
        HotRowsRule.top,
    )
    num_hot_rows: int = key("hot rows of hot_rows=top", 20000, at_least=0)
    min_accesses_per_step: float = key(
        "expected lookups per global batch from which hot_rows=break_even makes a row hot",
        1.0,
        above=0,
    )
    profile_samples: int = key("samples that the hot rows are chosen from", 1000000, at_least=1)
    hot_exchange: HotExchange = key(
        "gradients of hot rows: touched_rows, owners, dense, or auto: least bytes, by step",
        HotExchange.auto,
    )
    routing: BenchRouting = key(
        "main (inside the timed step) or loader (before the clock)", BenchRouting.main
    )
    pipeline: PipelineKind = key(
        "of all cases that bench.variants does not give another: sparse_dist or base",
        PipelineKind.sparse_dist,
    )
    seed: int = key("of weights, popularity and samples", 0, at_least=0)
    device: Device = key("cpu, cuda, or auto: cuda where there is one", Device.auto)
    loss_tolerance: float = key("largest difference of losses between cases", 1e-4, above=0)
    profile: bool = key("also measure where the time of a step goes, by stage", False)
    profile_steps: int = key("steps of each case under the profiler", 4, at_least=1)
    interface: str | None = key("network interface whose sent bytes are read as well", None)
    network: str = key("what joins the ranks, for the page", "loopback of one host")
    page: str | None = key("write the result page here too; null: to the run directory", None)
    timeout_s: float = key("how long a collective waits for the slowest rank", 600.0, above=0)


@dataclass
class BenchRootConfig:
    """The configuration of bench."""

    bench: BenchConfig = section("what is measured", BenchConfig)
    model: ModelConfig = section("the model", ModelConfig)
    optimizer: OptimizerConfig = section("the update rule of all parameters", OptimizerConfig)
    planner: PlannerConfig = section("the machine that the plan is for", PlannerConfig)
    launch: LaunchConfig = section("processes on this host", LaunchConfig)


@dataclass
class Config:
    """The configuration of prepare, profile, plan and train."""

    dataset_name: str = key("folder of the dataset under data/; by default the data= choice")
    run_name: str = key("the name in reports; by default the placement= choice")
    data: DataSpec = section("the raw log and what to make of it", DataSpec)
    profile: ProfileConfig = section("what is counted", ProfileConfig)
    model: ModelConfig = section("the model", ModelConfig)
    placement: PlacementConfig = section("which rows are hot", PlacementConfig)
    optimizer: OptimizerConfig = section("the update rule of all parameters", OptimizerConfig)
    order: OrderConfig = section("the order of training samples", OrderConfig)
    pipeline: PipelineConfig = section("how steps overlap", PipelineConfig)
    trainer: TrainerConfig = section("the training run", TrainerConfig)
    profiler: ProfilerConfig = section("what is recorded of single steps", ProfilerConfig)
    planner: PlannerConfig = section("the machine that the plan is for", PlannerConfig)
    plan: PlanConfig = section("what `hotrec plan` plans for", PlanConfig)
    calibrate: CalibrateConfig = section("what `hotrec calibrate` measures", CalibrateConfig)
    launch: LaunchConfig = section("processes on this host", LaunchConfig)
    paths: PathsConfig = section("where the stages read and write", PathsConfig)


@dataclass
class EvaluateConfig:
    """The configuration of evaluate."""

    run_dir: str = key("training run; latest: the newest under runs/", "latest")
    checkpoint: str = key("latest, or the name of one in the run's checkpoints/", "latest")
    split: str = key("split of the run's dataset", "test")
    batch_size: int | None = key("samples per rank and step; null: as the run's", None, at_least=1)
    device: Device = key("cpu, cuda, or auto: cuda where there is one", Device.auto)
    num_workers: int = key("loader processes per rank; 0: none", 1, at_least=0)
    timeout_s: float = key("how long a collective waits for the slowest rank", 600.0, above=0)
    launch: LaunchConfig = section("processes on this host", LaunchConfig)


@dataclass
class ReportConfig:
    """The configuration of report."""

    runs: list[str] = key("run directories; latest: the newest under runs/", ["latest"])
    output: str | None = key("directory of the page; null: this run's own", None)
    profile: str | None = key("profile to draw; null: that of the first run", None)
    partition: str | None = key("partition to draw; null: that of the first run", None)
    baseline: str | None = key("name of the run that the others are compared with", None)
    title: str = key("title of the page", "hotrec report")


@dataclass
class DoctorConfig:
    """The configuration of doctor: nothing to set."""


ROOTS: dict[str, type] = {
    "config": Config,
    "bench": BenchRootConfig,
    "evaluate": EvaluateConfig,
    "report": ReportConfig,
    "doctor": DoctorConfig,
}
