"""What the group placement chooses from: a dataclass for each choice."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Union

from hotrec.config.fields import key
from hotrec.types import ColdTier, HotExchange, HugectrLink, TorchrecPlan


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
