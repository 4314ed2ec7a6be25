"""The groups with variants: model, optimizer, order, profiler; a dataclass for each choice."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hotrec.config.fields import key, section
from hotrec.config.placements import (
    AllColdPlacement,
    AllHotPlacement,
    BreakEvenPlacement,
    BudgetPlacement,
    CostPlacement,
    CoveragePlacement,
    FaePlacement,
    FractionPlacement,
    FreqCachePlacement,
    HugectrPlacement,
    SavedPlacement,
    ScarsPlacement,
    TorchrecPlacement,
)
from hotrec.types import ModelKind, OptimizerKind


class OrderKind(Enum):
    """The order in which training samples come."""

    shuffled = "shuffled"
    all_hot = "all_hot"


class OrderAssign(Enum):
    """Which rank computes which sample of a global batch."""

    as_read = "as_read"
    by_owner = "by_owner"


@dataclass
class OrderConfig:
    """What all orders share."""

    kind: OrderKind = key("the order; choose it with order=")
    assign: OrderAssign = key(
        "samples of a global batch go to ranks as_read, or by_owner: where their cold rows are",
        OrderAssign.as_read,
    )


@dataclass
class ShuffledOrder(OrderConfig):
    """All samples shuffled together."""

    kind: OrderKind = key("the order; choose it with order=", OrderKind.shuffled)


@dataclass
class AllHotOrder(OrderConfig):
    """Blocks of all-hot batches and of mixed batches in turn, longer or shorter by the loss."""

    kind: OrderKind = key("the order; choose it with order=", OrderKind.all_hot)
    start_rate: float = key(
        "share of an epoch's batches of a kind that a block holds at first", 0.5, above=0, at_most=1
    )
    least_rate: float = key(
        "the least share that a block is cut to, when the loss gets worse",
        0.01,
        above=0,
        at_most=1,
    )
    patience: int = key(
        "evaluations in a row with a better loss before blocks grow twice as long", 4, at_least=1
    )


class ProfilerKind(Enum):
    """What is recorded of single steps."""

    none = "none"
    trace = "trace"


@dataclass
class ProfilerConfig:
    """What all profilers share."""

    kind: ProfilerKind = key("what is recorded; choose it with profiler=")


@dataclass
class NoProfiler(ProfilerConfig):
    """Nothing is recorded."""

    kind: ProfilerKind = key("what is recorded; choose it with profiler=", ProfilerKind.none)


@dataclass
class TraceProfiler(ProfilerConfig):
    """A trace of a few steps, a file per rank."""

    kind: ProfilerKind = key("what is recorded; choose it with profiler=", ProfilerKind.trace)
    first_step: int = key(
        "first step to record, counted from this start; those before warm up", 20, at_least=1
    )
    num_steps: int = key("steps to record; they are in no rate", 5, at_least=1, at_most=100)
    warn_of_syncs: bool = key(
        "in these steps CUDA warns of each line that makes the host wait for the device", False
    )


class Pooling(Enum):
    """How the rows of a bag become one vector."""

    sum = "sum"
    mean = "mean"


@dataclass
class ModelConfig:
    """What all models share."""

    kind: ModelKind = key("the model; choose it with model=")
    embedding_dim: int = key(
        "floats per embedding row, a multiple of 4", 64, at_least=4, at_most=1024
    )
    pooling: Pooling = key("pooling of bags: sum or mean", Pooling.sum)
    dense_layer_sizes: list[int] = key(
        "layers over the dense columns; the last must be embedding_dim", [128, 64]
    )
    over_layer_sizes: list[int] = key(
        "layers over the interactions; the last must be 1", [256, 128, 1]
    )


@dataclass
class DlrmConfig(ModelConfig):
    """DLRM: pairwise dot products."""

    kind: ModelKind = key("the model; choose it with model=", ModelKind.dlrm)


@dataclass
class Dcnv2Config(ModelConfig):
    """DCNv2: low-rank cross layers."""

    kind: ModelKind = key("the model; choose it with model=", ModelKind.dcnv2)
    cross_num_layers: int = key("cross layers", 3, at_least=1)
    cross_low_rank_dim: int = key("rank of the cross layers' matrices", 64, at_least=1)


class Decay(Enum):
    """Shape of the learning rate's decay."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"
    polynomial = "polynomial"


@dataclass
class ScheduleConfig:
    """Learning rate over the steps."""

    decay: Decay = key("constant, linear, cosine or polynomial", Decay.constant)
    warmup_steps: int = key("steps of linear warm-up", 0, at_least=0)
    decay_start_step: int = key("last step at the full rate", 0, at_least=0)
    num_decay_steps: int = key("steps from there to end_factor", 0, at_least=0)
    end_factor: float = key("share of the rate at the end", 0.0, at_least=0, at_most=1)
    power: float = key("exponent of the polynomial", 2.0, above=0)


@dataclass
class OptimizerConfig:
    """What all optimizers share."""

    kind: OptimizerKind = key("the rule; choose it with optimizer=")
    learning_rate: float = key("base learning rate of the embeddings", above=0)
    dense_kind: OptimizerKind | None = key(
        "rule of the dense layers; null: as the embeddings', with Adagrad for row-wise Adagrad",
        None,
    )
    dense_learning_rate: float | None = key(
        "base learning rate of the dense layers; null: as the embeddings'", None, above=0
    )
    schedule: ScheduleConfig = section("learning rate over the steps", ScheduleConfig)


@dataclass
class SgdConfig(OptimizerConfig):
    """Plain SGD."""

    kind: OptimizerKind = key("the rule; choose it with optimizer=", OptimizerKind.sgd)


@dataclass
class AdagradConfig(OptimizerConfig):
    """Adagrad."""

    kind: OptimizerKind = key("the rule; choose it with optimizer=", OptimizerKind.adagrad)
    eps: float = key("added to the root", 1e-8, at_least=0)


@dataclass
class RowwiseAdagradConfig(OptimizerConfig):
    """Adagrad with one sum per row."""

    kind: OptimizerKind = key("the rule; choose it with optimizer=", OptimizerKind.rowwise_adagrad)
    eps: float = key("added to the root", 1e-8, at_least=0)


@dataclass
class AdamConfig(OptimizerConfig):
    """Adam on touched rows; needs CUDA where rows are cold."""

    kind: OptimizerKind = key("the rule; choose it with optimizer=", OptimizerKind.adam)
    eps: float = key("added to the root", 1e-8, at_least=0)
    beta1: float = key("decay of the first moment", 0.9, at_least=0, below=1)
    beta2: float = key("decay of the second moment", 0.999, at_least=0, below=1)


# The options of each group that stand for a dataclass of their own.
VARIANTS: dict[str, dict[str, type]] = {
    "model": {"dlrm": DlrmConfig, "dcnv2": Dcnv2Config},
    "placement": {
        "cost": CostPlacement,
        "fraction": FractionPlacement,
        "coverage": CoveragePlacement,
        "budget": BudgetPlacement,
        "break_even": BreakEvenPlacement,
        "hugectr": HugectrPlacement,
        "fae": FaePlacement,
        "freq_cache": FreqCachePlacement,
        "scars": ScarsPlacement,
        "all_hot": AllHotPlacement,
        "all_cold": AllColdPlacement,
        "saved": SavedPlacement,
        "torchrec": TorchrecPlacement,
    },
    "optimizer": {
        "sgd": SgdConfig,
        "adagrad": AdagradConfig,
        "rowwise_adagrad": RowwiseAdagradConfig,
        "adam": AdamConfig,
    },
    "order": {"shuffled": ShuffledOrder, "all_hot": AllHotOrder},
    "profiler": {"none": NoProfiler, "trace": TraceProfiler},
}
