"""The configuration of bench."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hotrec.config.fields import key, section
from hotrec.config.groups import ModelConfig, OptimizerConfig, OrderAssign
from hotrec.config.sections import Device, LaunchConfig, PlannerConfig
from hotrec.types import ColdTier, HotExchange, WireType


class BenchCase(Enum):
    """Placements that `hotrec bench` compares; each is a case of that name."""

    hot_cold = "hot_cold"
    all_cold = "all_cold"
    all_hot = "all_hot"
    table_wise = "table_wise"
    planner = "planner"
    hand_tuned = "hand_tuned"


HOT_COLD_CASES = (BenchCase.hot_cold, BenchCase.all_cold, BenchCase.all_hot)


class BenchPipeline(Enum):
    """Pipelines that `hotrec bench` compares; semi_sync is TorchRec's, whose rows are stale."""

    sparse_dist = "sparse_dist"
    base = "base"
    look_ahead = "look_ahead"
    prefetch = "prefetch"
    semi_sync = "semi_sync"


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
    pipeline: BenchPipeline | None = key(
        "sparse_dist, base, look_ahead (hot and cold rows), prefetch (TorchRec's plans in the tier "
        "fused_uvm_caching) or semi_sync (TorchRec's plans; stale)",
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
    pipeline: BenchPipeline = key(
        "of all cases that bench.variants does not give another: sparse_dist or base",
        BenchPipeline.sparse_dist,
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
