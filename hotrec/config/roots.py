"""The root configuration of each command."""

from __future__ import annotations

from dataclasses import dataclass

from hotrec.config.bench import BenchRootConfig
from hotrec.config.data import DataSpec
from hotrec.config.fields import key, section
from hotrec.config.groups import ModelConfig, OptimizerConfig, OrderConfig, ProfilerConfig
from hotrec.config.placements import PlacementConfig
from hotrec.config.sections import (
    CalibrateConfig,
    Device,
    LaunchConfig,
    PathsConfig,
    PipelineConfig,
    PlanConfig,
    PlannerConfig,
    ProfileConfig,
    TrainerConfig,
)


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
