"""The sections that have one form only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hotrec.config.fields import key
from hotrec.types import PipelineKind, Precision, WireType


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
