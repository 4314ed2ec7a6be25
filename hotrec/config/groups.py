"""The groups with variants, and a dataclass for each choice: model, optimizer, placement, order.

A field made by ``key`` carries the key's meaning for the configuration reference, and its limits.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Union

from hotrec.types import ColdTier, HotExchange, HugectrLink, ModelKind, OptimizerKind, TorchrecPlan

MISSING: Any = "???"  # OmegaConf's mark of a required value


def key(
    meaning: str,
    default: Any = MISSING,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> Any:
    """A field of the configuration with its meaning, default and limits."""
    limits = {"at_least": at_least, "above": above, "at_most": at_most, "below": below}
    metadata = {"meaning": meaning, "limits": {k: v for k, v in limits.items() if v is not None}}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy.copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(meaning: str, kind: type) -> Any:
    """A field that is itself a dataclass."""
    return field(default_factory=kind, metadata={"meaning": meaning, "limits": {}})


POLICY = "the policy; choose it with placement="
ORDER = "the order; choose it with order="
PROFILER = "what is recorded; choose it with profiler="
MODEL = "the model; choose it with model="
RULE = "the update rule; choose it with optimizer="
OVERRIDES = "for single tables: hot, cold, a number of rows, or a fraction of the table's rows"
MEMORY = "memory for hot rows and their optimizer state, in MiB per device"
AVAILABLE_MEMORY = f"largest {MEMORY}; null: as much as is free"


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
    """Where ids are split into hot and cold."""

    loader = "loader"
    device = "device"


@dataclass
class PlacementConfig:
    """What all placements share."""

    kind: PlacementKind = key(POLICY)


@dataclass
class HotColdConfig(PlacementConfig):
    """What all placements with hot and cold rows share."""

    routing: Routing = key(
        "where ids are split into hot and cold: loader (its workers) or device", Routing.loader
    )


@dataclass
class CostPlacement(HotColdConfig):
    """What the cost model predicts to be fastest."""

    kind: PlacementKind = key(POLICY, PlacementKind.cost)
    hot_budget_mib: float | None = key(
        AVAILABLE_MEMORY,
        None,
        at_least=0,
    )
    overrides: dict[str, Union[str, int, float]] = key(  # noqa: UP007 (OmegaConf reads Union)
        "per table: hot, cold, a number of rows, or a fraction of its rows", {}
    )
    may_pool: bool = key(
        "whether whole tables may exchange pooled vectors where that is cheaper than rows", True
    )
    may_decline: bool = key(
        "whether to train with TorchRec's own plan where no placement with hot and cold rows is "
        "predicted to be faster; false: always use the best such placement",
        True,
    )


@dataclass
class TieredConfig(HotColdConfig):
    """What all placements share in which the user sets the exchange and the cold rows' memory."""

    hot_exchange: HotExchange = key(
        "how gradients of hot rows are reduced: touched_rows (all-gather the rows of this step), "
        "owners (sum at each row's owner, then all-gather), dense (all-reduce all hot rows), or "
        "auto (the one with the fewest bytes in each step)",
        HotExchange.auto,
    )
    cold_tier: ColdTier = key(
        "memory of the cold rows: the device's (fused) or the host's (fused_uvm, "
        "fused_uvm_caching); auto: fused on CPU, fused_uvm_caching on CUDA",
        ColdTier.auto,
    )
    cache_load_frac: float = key(
        "fraction of the cold rows that fused_uvm_caching keeps in GPU memory",
        0.2,
        above=0,
        below=1,
    )


@dataclass
class PolicyConfig(TieredConfig):
    """What all policies that read a profile share."""

    small_table_rows: int = key("make tables of at most this number of rows all hot", 0, at_least=0)
    overrides: dict[str, Union[str, int, float]] = key(  # noqa: UP007 (OmegaConf reads Union)
        "per table: hot, cold, a number of rows, or a fraction of its rows", {}
    )


@dataclass
class FractionPlacement(PolicyConfig):
    """A fixed fraction of the rows."""

    kind: PlacementKind = key(POLICY, PlacementKind.fraction)
    hot_frac: float = key("fraction of the rows that is hot", 0.01, at_least=0, at_most=1)
    per_table: bool = key("apply hot_frac to each table instead of all rows together", False)


@dataclass
class CoveragePlacement(PolicyConfig):
    """The fewest rows that serve a fraction of the lookups."""

    kind: PlacementKind = key(POLICY, PlacementKind.coverage)
    coverage_frac: float = key(
        "fraction of the lookups that the hot rows serve", 0.8, at_least=0, at_most=1
    )
    per_table: bool = key(
        "apply coverage_frac to each table instead of all lookups together", False
    )


@dataclass
class BudgetPlacement(PolicyConfig):
    """The rows that fit in a budget, by accesses per byte."""

    kind: PlacementKind = key(POLICY, PlacementKind.budget)
    hot_budget_mib: float = key(MEMORY, at_least=0)


@dataclass
class BreakEvenPlacement(PolicyConfig):
    """Rows that a step reads at least so often that a replica pays."""

    kind: PlacementKind = key(POLICY, PlacementKind.break_even)
    min_accesses_per_step: float = key(
        "smallest expected lookups per global batch of a hot row", 1.0, above=0
    )


@dataclass
class HugectrPlacement(PolicyConfig):
    """HugeCTR's hybrid embedding: a threshold from datasheet bandwidths."""

    kind: PlacementKind = key(POLICY, PlacementKind.hugectr)
    link: HugectrLink = key(
        "link between the GPUs: ib_nvlink, ib_nvlink_hier (both between hosts) or "
        "nvlink_single_node",
        HugectrLink.nvlink_single_node,
    )
    all_to_all_bytes_per_s: float = key("all-to-all bandwidth; with ib_* links", 1.9e11, above=0)
    all_reduce_bytes_per_s: float = key("all-reduce bandwidth; with ib_* links", 1.3e11, above=0)
    efficiency: float = key(
        "ratio of the efficiencies of all-reduce and all-to-all; with ib_* links", 1.0, above=0
    )
    max_duplicate_prob: float = key(
        "largest probability that a rank's batch reads a cold row twice; with nvlink_single_node",
        0.01,
        above=0,
        at_most=1,
    )


@dataclass
class FaePlacement(PolicyConfig):
    """FAE: one access threshold that fills a memory budget; small tables wholly hot."""

    kind: PlacementKind = key(POLICY, PlacementKind.fae)
    hot_budget_mib: float = key(MEMORY, 256.0, at_least=0)
    small_table_mib: float = key("make tables below this size all hot", 1.0, at_least=0)


@dataclass
class FreqCachePlacement(PolicyConfig):
    """Frequency-aware software cache: a fraction of the embedding parameters."""

    kind: PlacementKind = key(POLICY, PlacementKind.freq_cache)
    cached_frac: float = key(
        "fraction of the embedding parameters that is cached", 0.015, at_least=0, at_most=1
    )


@dataclass
class ScarsPlacement(PolicyConfig):
    """SCARS: shortest mean step of all-hot and mixed batches, without tiers."""

    kind: PlacementKind = key(POLICY, PlacementKind.scars)
    hot_budget_mib: float | None = key(
        AVAILABLE_MEMORY,
        None,
        at_least=0,
    )


@dataclass
class AllHotPlacement(TieredConfig):
    """Every row on every rank."""

    kind: PlacementKind = key(POLICY, PlacementKind.all_hot)


@dataclass
class AllColdPlacement(TieredConfig):
    """No row replicated."""

    kind: PlacementKind = key(POLICY, PlacementKind.all_cold)


@dataclass
class SavedPlacement(HotColdConfig):
    """A partition made before."""

    kind: PlacementKind = key(POLICY, PlacementKind.saved)
    partition_dir: str = key("directory of the partition to train with", "${paths.partition}")


@dataclass
class TorchrecPlacement(PlacementConfig):
    """TorchRec's own sharding of unsplit tables."""

    kind: PlacementKind = key(POLICY, PlacementKind.torchrec)
    plan: TorchrecPlan = key(
        "TorchRec's plan: planner (its own choice), table_wise, or hand_tuned (tables with "
        "fewer rows than the "
        "batch data-parallel, the rest table-wise)",
        TorchrecPlan.planner,
    )
    tier: ColdTier = key(
        "memory of the rows: the device's (fused) or the host's (fused_uvm, fused_uvm_caching); "
        "auto: fused",
        ColdTier.auto,
    )
    cache_load_frac: float = key(
        "fraction of the rows that fused_uvm_caching keeps in GPU memory", 0.2, above=0, at_most=1
    )


class OrderKind(Enum):
    """The order of training samples."""

    shuffled = "shuffled"
    all_hot = "all_hot"


class OrderAssign(Enum):
    """Which rank computes which sample of a global batch."""

    as_read = "as_read"
    by_owner = "by_owner"


@dataclass
class OrderConfig:
    """What all orders share."""

    kind: OrderKind = key(ORDER)
    assign: OrderAssign = key(
        "how samples of a global batch are assigned to ranks: as_read, or by_owner (of their "
        "cold rows)",
        OrderAssign.as_read,
    )


@dataclass
class ShuffledOrder(OrderConfig):
    """All samples shuffled together."""

    kind: OrderKind = key(ORDER, OrderKind.shuffled)


@dataclass
class AllHotOrder(OrderConfig):
    """Alternate blocks of all-hot and of mixed batches, whose length follows the loss."""

    kind: OrderKind = key(ORDER, OrderKind.all_hot)
    start_rate: float = key(
        "length of the first blocks, as a fraction of an epoch's batches of their kind",
        0.5,
        above=0,
        at_most=1,
    )
    least_rate: float = key(
        "shortest length, as the same fraction, that blocks are cut to when the loss rises",
        0.01,
        above=0,
        at_most=1,
    )
    patience: int = key(
        "consecutive evaluations with a lower loss before blocks are doubled", 4, at_least=1
    )


class ProfilerKind(Enum):
    """What is recorded of single steps, if anything."""

    none = "none"
    trace = "trace"


@dataclass
class ProfilerConfig:
    """What all profilers share."""

    kind: ProfilerKind = key(PROFILER)


@dataclass
class NoProfiler(ProfilerConfig):
    """Nothing is recorded."""

    kind: ProfilerKind = key(PROFILER, ProfilerKind.none)


@dataclass
class TraceProfiler(ProfilerConfig):
    """A trace of a few steps, a file per rank."""

    kind: ProfilerKind = key(PROFILER, ProfilerKind.trace)
    first_step: int = key(
        "first step to record, counted from the start of this process; at least 2, to warm up",
        20,
        at_least=2,
    )
    num_steps: int = key(
        "number of steps to record; rates exclude them", 5, at_least=1, at_most=100
    )
    warn_of_syncs: bool = key(
        "warn in these steps about lines that make the host wait for the GPU", False
    )


class Pooling(Enum):
    """How the rows of a bag become one vector."""

    sum = "sum"
    mean = "mean"


@dataclass
class ModelConfig:
    """What all models share."""

    kind: ModelKind = key(MODEL)
    embedding_dim: int = key(
        "dimension of an embedding row; a multiple of 4", 64, at_least=4, at_most=1024
    )
    pooling: Pooling = key("how the rows of a bag become one vector: sum or mean", Pooling.sum)
    dense_layer_sizes: list[int] = key(
        "sizes of the layers over the dense columns; the last must be embedding_dim", [128, 64]
    )
    over_layer_sizes: list[int] = key(
        "sizes of the layers over the interactions; the last must be 1", [256, 128, 1]
    )


@dataclass
class DlrmConfig(ModelConfig):
    """DLRM: pairwise dot products."""

    kind: ModelKind = key(MODEL, ModelKind.dlrm)


@dataclass
class Dcnv2Config(ModelConfig):
    """DCNv2: low-rank cross layers."""

    kind: ModelKind = key(MODEL, ModelKind.dcnv2)
    cross_num_layers: int = key("number of cross layers", 3, at_least=1)
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

    decay: Decay = key("shape of the decay: constant, linear, cosine or polynomial", Decay.constant)
    warmup_steps: int = key("number of steps of linear warm-up", 0, at_least=0)
    decay_start_step: int = key("last step at the full learning rate", 0, at_least=0)
    num_decay_steps: int = key("number of steps of the decay, to end_factor", 0, at_least=0)
    end_factor: float = key(
        "learning rate after the decay, as a fraction of the full one", 0.0, at_least=0, at_most=1
    )
    power: float = key("exponent of the polynomial decay", 2.0, above=0)


@dataclass
class OptimizerConfig:
    """What all optimizers share."""

    kind: OptimizerKind = key(RULE)
    learning_rate: float = key("base learning rate of the embeddings", above=0)
    dense_kind: OptimizerKind | None = key(
        "update rule of the dense layers; null: that of the embeddings, or adagrad for "
        "rowwise_adagrad",
        None,
    )
    dense_learning_rate: float | None = key(
        "base learning rate of the dense layers; null: that of the embeddings", None, above=0
    )
    schedule: ScheduleConfig = section("the learning rate over the steps", ScheduleConfig)


@dataclass
class SgdConfig(OptimizerConfig):
    """Plain SGD."""

    kind: OptimizerKind = key(RULE, OptimizerKind.sgd)


@dataclass
class AdagradConfig(OptimizerConfig):
    """Adagrad."""

    kind: OptimizerKind = key(RULE, OptimizerKind.adagrad)
    eps: float = key("term added to the denominator for stability", 1e-8, at_least=0)


@dataclass
class RowwiseAdagradConfig(AdagradConfig):
    """Adagrad with one sum of squares per row."""

    kind: OptimizerKind = key(RULE, OptimizerKind.rowwise_adagrad)


@dataclass
class AdamConfig(AdagradConfig):
    """Adam on touched rows; needs CUDA where rows are cold."""

    kind: OptimizerKind = key(RULE, OptimizerKind.adam)
    beta1: float = key("decay rate of the first moment", 0.9, at_least=0, below=1)
    beta2: float = key("decay rate of the second moment", 0.999, at_least=0, below=1)


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
