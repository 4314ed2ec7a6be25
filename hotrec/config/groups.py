"""The groups with variants, and a dataclass for each choice: model, optimizer, placement, order."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Union

from hotrec.config.fields import key, section
from hotrec.types import ColdTier, HotExchange, HugectrLink, ModelKind, OptimizerKind, TorchrecPlan


class PlacementKind(Enum):
    """How the hot rows are chosen."""

    cost = "cost"
    fraction = "fraction"
    coverage = "coverage"
    budget = "budget"
    break_even = "break_even"
    hugectr = "hugectr"
    fae = "fae"
    freq_cache = "freq_cache"
    scars = "scars"
    all_hot = "all_hot"
    all_cold = "all_cold"
    saved = "saved"
    torchrec = "torchrec"


class Routing(Enum):
    """Where ids are told apart into hot and cold."""

    loader = "loader"
    device = "device"


@dataclass
class PlacementConfig:
    """What all placements share."""

    kind: PlacementKind = key("the policy; choose it with placement=")


@dataclass
class HotColdConfig(PlacementConfig):
    """What all placements with hot and cold rows share."""

    routing: Routing = key(
        "where hot and cold ids are told apart: loader (workers) or device", Routing.loader
    )


@dataclass
class CostPlacement(HotColdConfig):
    """What the cost model predicts to be fastest."""

    kind: PlacementKind = key("the policy; choose it with placement=", PlacementKind.cost)
    hot_budget_mib: float | None = key(
        "most memory for hot rows with optimizer state, MiB per device; null: what there is",
        None,
        at_least=0,
    )
    overrides: dict[str, Union[str, int, float]] = key(  # noqa: UP007 (OmegaConf reads Union)
        "per table: hot, cold, a number of rows, or a fraction of its rows", {}
    )
    may_pool: bool = key(
        "whole tables may be exchanged pooled, where that is cheaper than their distinct rows", True
    )
    may_decline: bool = key(
        "where nothing is predicted to be faster, train by TorchRec's own plan; else the best "
        "placement with hot and cold rows",
        True,
    )


@dataclass
class TieredConfig(HotColdConfig):
    """What all placements share that leave the exchange and the cold rows' memory to the user."""

    hot_exchange: HotExchange = key(
        "gradients of hot rows: touched_rows (those of this step, to all ranks), owners (to the "
        "rows' owners, whose sums go to all), dense (all rows), or auto: least bytes, by step",
        HotExchange.auto,
    )
    cold_tier: ColdTier = key(
        "cold rows in the device's memory (fused) or the host's (fused_uvm, fused_uvm_caching); "
        "auto: fused on CPU, fused_uvm_caching on CUDA",
        ColdTier.auto,
    )
    cache_load_frac: float = key(
        "share of the cold rows that fused_uvm_caching keeps in GPU memory",
        0.2,
        above=0,
        below=1,
    )


@dataclass
class PolicyConfig(TieredConfig):
    """What all policies that read a profile share."""

    small_table_rows: int = key("tables of at most so many rows are wholly hot", 0, at_least=0)
    overrides: dict[str, Union[str, int, float]] = key(  # noqa: UP007 (OmegaConf reads Union)
        "per table: hot, cold, a number of rows, or a fraction of its rows", {}
    )


@dataclass
class FractionPlacement(PolicyConfig):
    """A fixed share of the rows."""

    kind: PlacementKind = key("the policy; choose it with placement=", PlacementKind.fraction)
    hot_frac: float = key("share of the rows that is hot", 0.01, at_least=0, at_most=1)
    per_table: bool = key("the share of each table, not of all rows together", False)


@dataclass
class CoveragePlacement(PolicyConfig):
    """As few rows as take a share of the lookups."""

    kind: PlacementKind = key("the policy; choose it with placement=", PlacementKind.coverage)
    coverage_frac: float = key("share of the lookups that are hot", 0.8, at_least=0, at_most=1)
    per_table: bool = key("the share of each table's lookups, not of all together", False)


@dataclass
class BudgetPlacement(PolicyConfig):
    """As much as fits, by accesses per byte."""

    kind: PlacementKind = key("the policy; choose it with placement=", PlacementKind.budget)
    hot_budget_mib: float = key(
        "memory for hot rows with optimizer state, MiB per device", at_least=0
    )


@dataclass
class BreakEvenPlacement(PolicyConfig):
    """Rows that a step reads often enough."""

    kind: PlacementKind = key("the policy; choose it with placement=", PlacementKind.break_even)
    min_accesses_per_step: float = key(
        "expected lookups per global batch from which a row is hot", 1.0, above=0
    )


@dataclass
class HugectrPlacement(PolicyConfig):
    """HugeCTR's hybrid embedding: a threshold from datasheet bandwidths."""

    kind: PlacementKind = key("the policy; choose it with placement=", PlacementKind.hugectr)
    link: HugectrLink = key(
        "ib_nvlink, ib_nvlink_hier (both over hosts) or nvlink_single_node",
        HugectrLink.nvlink_single_node,
    )
    all_to_all_bytes_per_s: float = key("bandwidth of all_to_all, of ib_*", 1.9e11, above=0)
    all_reduce_bytes_per_s: float = key("bandwidth of all_reduce, of ib_*", 1.3e11, above=0)
    efficiency: float = key("ratio of the two bandwidths' efficiencies, of ib_*", 1.0, above=0)
    max_duplicate_prob: float = key(
        "of a cold row twice in a rank's batch, of nvlink_single_node", 0.01, above=0, at_most=1
    )


@dataclass
class FaePlacement(PolicyConfig):
    """FAE: one access threshold that fills a memory budget; small tables wholly hot."""

    kind: PlacementKind = key("the policy; choose it with placement=", PlacementKind.fae)
    hot_budget_mib: float = key(
        "memory for hot rows with optimizer state, MiB per device", 256.0, at_least=0
    )
    small_table_mib: float = key("tables below this size are wholly hot", 1.0, at_least=0)


@dataclass
class FreqCachePlacement(PolicyConfig):
    """Frequency-aware software cache: a share of the embedding parameters."""

    kind: PlacementKind = key("the policy; choose it with placement=", PlacementKind.freq_cache)
    cached_frac: float = key("share of the parameters", 0.015, at_least=0, at_most=1)


@dataclass
class ScarsPlacement(PolicyConfig):
    """SCARS: shortest mean step of all-hot and mixed batches, without tiers."""

    kind: PlacementKind = key("the policy; choose it with placement=", PlacementKind.scars)
    hot_budget_mib: float | None = key(
        "most memory for hot rows with optimizer state, MiB per device; null: what there is",
        None,
        at_least=0,
    )


@dataclass
class AllHotPlacement(TieredConfig):
    """Every row on every rank."""

    kind: PlacementKind = key("the policy; choose it with placement=", PlacementKind.all_hot)


@dataclass
class AllColdPlacement(TieredConfig):
    """No row replicated."""

    kind: PlacementKind = key("the policy; choose it with placement=", PlacementKind.all_cold)


@dataclass
class SavedPlacement(HotColdConfig):
    """A partition made before."""

    kind: PlacementKind = key("the policy; choose it with placement=", PlacementKind.saved)
    partition_dir: str = key("partition to train with", "${paths.partition}")


@dataclass
class TorchrecPlacement(PlacementConfig):
    """TorchRec's own sharding of unsplit tables."""

    kind: PlacementKind = key("the policy; choose it with placement=", PlacementKind.torchrec)
    plan: TorchrecPlan = key(
        "planner (TorchRec's choice), table_wise, or hand_tuned (tables with fewer rows than the "
        "batch data-parallel, the rest table-wise)",
        TorchrecPlan.planner,
    )
    tier: ColdTier = key(
        "rows in the device's memory (fused) or the host's (fused_uvm, fused_uvm_caching); "
        "auto: fused",
        ColdTier.auto,
    )
    cache_load_frac: float = key(
        "share of the rows that fused_uvm_caching keeps in GPU memory", 0.2, above=0, at_most=1
    )


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
    """What is recorded of single steps, if anything."""

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
        "first step to record, counted from this start; the profiler warms up in the one before",
        20,
        at_least=2,
    )
    num_steps: int = key(
        "number of steps to record; rates leave them out", 5, at_least=1, at_most=100
    )
    warn_of_syncs: bool = key(
        "whether CUDA warns, in these steps, of lines that make the host wait for the device", False
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
