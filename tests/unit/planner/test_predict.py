"""TorchRec's own ways to train the tables, host tiers included, as configurations and predicted."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hotrec.assemble.job import as_placement, build_unsharded
from hotrec.assemble.replay import Replayed
from hotrec.bench.samples import ZipfTables
from hotrec.config.groups import (
    AllColdPlacement,
    CostPlacement,
    DlrmConfig,
    RowwiseAdagradConfig,
    TorchrecPlacement,
)
from hotrec.config.roots import Config, PipelineConfig, TrainerConfig
from hotrec.cost_model.builtin import BUILTIN
from hotrec.cost_model.costs import Line, World
from hotrec.cost_model.forms import PipelineSpec, Workload
from hotrec.planner.document import _expected as expected_of
from hotrec.planner.machine import Machine
from hotrec.planner.predict import (
    check_slots,
    is_another,
    is_own,
    predict_baselines,
    predict_placement,
    predict_shardings,
    torchrec_baselines,
    torchrec_name,
    with_faster_fetch,
)
from hotrec.planner.propose import decide
from hotrec.planner.situation import Scenario, candidate_pipelines, choose_pipeline
from hotrec.types import ColdTier, Partition, PipelineKind, Placement, RowFetch, Tier, TorchrecPlan
from tests.unit.cost_model.samples import make_demand

NUM_ROWS, BATCH, RANKS = (400_000, 5_000, 300), 512, 2
SAMPLES = ZipfTables(NUM_ROWS, exponent=1.05, num_dense=4, seed=0)
SCHEMA = SAMPLES.schema
CACHED = ColdTier.fused_uvm_caching
UVM, PREFETCHED = (
    f"torchrec planner {tier}" for tier in ("fused_uvm", "fused_uvm_caching prefetch")
)


pytestmark = pytest.mark.usefixtures("one_rank")


def configure(placement: Any, pipeline: PipelineKind = PipelineKind.auto) -> Config:
    return Config(
        dataset_name="d",
        run_name="r",
        model=DlrmConfig(embedding_dim=16, dense_layer_sizes=[8, 16]),
        placement=placement,
        optimizer=RowwiseAdagradConfig(learning_rate=0.1),
        pipeline=PipelineConfig(kind=pipeline),
        trainer=TrainerConfig(batch_size=BATCH),
    )


def machine(device: str = "cuda", *, device_bytes: int = 1 << 30) -> Machine:
    return Machine(RANKS, RANKS, device, device_bytes, 64 << 30, BATCH)


def scenario(on: Machine) -> Scenario:
    demands = [
        make_demand(
            np.maximum(4e6 / np.arange(1, table.num_rows + 1), 1).astype(int),
            table.name,
            dim=16,
            batch_size=BATCH,
        )
        for table in SCHEMA.tables
    ]
    costs = BUILTIN["dgx_h100_infiniband" if on.device == "cuda" else "cpu_1gbit"]
    return Scenario(
        costs=costs,
        note=None,
        world=World(RANKS, RANKS),
        workload=Workload(BATCH, 1e6, 0.2, 10_000),
        demands=tuple(demands),
        machine=on,
    )


def test_host_tiers_are_baselines_on_cuda_where_the_tables_do_not_fit() -> None:
    """Rows take 26 MB of 10; TorchRec's own choice may take host tiers too."""
    config = configure(AllColdPlacement())
    predicted = predict_baselines(config, SCHEMA, scenario(machine(device_bytes=10_000_000)))
    assert {UVM, PREFETCHED} <= set(predicted) <= set(torchrec_baselines(config))
    of_tier = {name: {s.tier for s in p.shardings.values()} for name, p in predicted.items()}
    assert of_tier[UVM] == {Tier.HOST}
    assert of_tier[PREFETCHED] == {Tier.HOST_CACHED}
    ahead = predicted[PREFETCHED]
    assert ahead.pipeline.kind.value == "prefetch"
    assert {(s.is_prefetched, s.cache_load_frac) for s in ahead.shardings.values()} == {(True, 0.2)}
    assert ahead.step.hidden_s["row_lookup"] > 0
    bytes_of = {n: max(r["device_bytes"] for r in p.memory) for n, p in predicted.items()}
    assert bytes_of[UVM] < bytes_of[PREFETCHED]


def test_host_tiers_are_no_baselines_where_all_fits_the_devices() -> None:
    predicted = predict_baselines(configure(AllColdPlacement()), SCHEMA, scenario(machine()))
    assert "torchrec planner" in predicted
    assert predicted.keys().isdisjoint({UVM, PREFETCHED})


def test_there_are_no_host_tiers_on_cpu() -> None:
    on = scenario(machine("cpu"))
    # TorchRec's planner replicates the table of 300 rows, as the hand-tuned plan does.
    in_line = ["torchrec planner", "torchrec table_wise"]
    for kind, expected in (
        (PipelineKind.sparse_dist, in_line),
        (PipelineKind.auto, [*in_line, *(f"{name} base" for name in in_line)]),
    ):
        predicted = predict_baselines(configure(AllColdPlacement(), kind), SCHEMA, on)
        assert list(predicted) == expected
    for name in in_line:
        assert predicted[f"{name} base"].shardings == predicted[name].shardings


def test_plans_that_are_alike_are_one() -> None:
    """Whichever ranks hold the tables, but not in another tier or pipeline."""
    on = scenario(machine("cpu"))
    config = configure(AllColdPlacement(), PipelineKind.sparse_dist)
    predicted = predict_baselines(config, SCHEMA, on)
    planner, table_wise = predicted.values()
    names = list(planner.shardings)
    elsewhere = {name: replace(s, ranks=(0,)) for name, s in planner.shardings.items()}
    assert not is_another(replace(planner, shardings=elsewhere), [table_wise, planner])
    assert is_another(planner, [table_wise])
    for change in ({"kind": "data_parallel"}, {"tier": Tier.HOST}):
        first = replace(planner.shardings[names[0]], **change)
        other = replace(planner, shardings={**planner.shardings, names[0]: first})
        assert is_another(other, [planner])
    of_base = predict_shardings(on.with_pipeline(PipelineKind.base), planner.shardings)
    assert is_another(of_base, [planner])


def test_a_chosen_baseline_is_a_configuration() -> None:
    """What a prediction names is what is trained where splitting rows does not pay."""
    baselines = torchrec_baselines(configure(AllColdPlacement(), PipelineKind.look_ahead))
    for name, found in baselines.items():
        assert torchrec_name(found) == name
        is_ahead = name.endswith("prefetch")
        expected = PipelineKind.prefetch if is_ahead else PipelineKind.sparse_dist
        assert choose_pipeline(found, machine()) is expected


@pytest.mark.parametrize("may_decline", [True, False])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_fastest_is_chosen(device: str, may_decline: bool) -> None:
    """TorchRec's plan where it is predicted to be as fast, unless the user keeps hot rows."""
    config = configure(CostPlacement(may_decline=may_decline))
    decision = decide(config, SCHEMA, scenario(machine(device)))
    steps = {n: p.step.step_s for n, p in decision.predicted.items() if n != "all_cold"}
    ours = {name: step_s for name, step_s in steps.items() if is_own(name)}
    kinds = {decision.predicted[name].pipeline.kind.value for name in ours}
    assert kinds == {"sparse_dist", "base"} | ({"look_ahead"} if device == "cpu" else set())
    assert decision.chosen == min(steps if may_decline else ours, key=lambda name: steps[name])
    assert decision.why.startswith(f"{decision.chosen} is predicted to take ")


def test_prefetched_tables_are_lru_and_filled_ahead() -> None:
    placement = TorchrecPlacement(plan=TorchrecPlan.table_wise, tier=CACHED, cache_load_frac=0.3)
    config, on = configure(placement, PipelineKind.prefetch), machine()
    unsharded = build_unsharded(config, SCHEMA, None, on)
    for tables in unsharded.plan(on).plan.values():
        for sharding in tables.values():  # type: ignore[attr-defined]
            assert sharding.compute_kernel == "fused_uvm_caching"
            cache = sharding.cache_params
            assert (cache.load_factor, cache.prefetch_pipeline) == (0.3, True)
            assert cache.algorithm.name == "LRU"


@pytest.mark.parametrize(
    ("placement", "device", "found"),
    [
        (AllColdPlacement(), "cuda", "got placement=all_cold on cuda"),
        (TorchrecPlacement(), "cuda", "got placement=torchrec with tier auto on cuda"),
        (TorchrecPlacement(tier=CACHED), "cpu", "tier fused_uvm_caching on cpu"),
    ],
)
def test_prefetch_without_a_cache_is_refused(placement: Any, device: str, found: str) -> None:
    config = configure(placement, PipelineKind.prefetch)
    with pytest.raises(ValueError, match=rf"^pipeline\.kind: expected .* for prefetch.*{found}"):
        choose_pipeline(config, machine(device))


@pytest.mark.parametrize(("depth", "eval_factor"), [(0, 1), (1, 1), (3, 1), (1, 3)])
def test_slots_hold_the_rows_of_all_batches_in_flight(depth: int, eval_factor: int) -> None:
    """The number that would do is named, and does."""
    on = scenario(machine("cpu"))
    on = replace(on, pipeline=PipelineSpec(PipelineKind.look_ahead, "fp32", depth))
    num_rows = {d.name: d.num_rows for d in on.demands}
    num_ranks, num_batches = on.world.num_ranks, eval_factor * (depth + 1)
    read = sum(float(d.rows_G @ (1 - (1 - d.by_any_G) ** num_batches)) for d in on.demands)
    read += 4 * math.sqrt(num_ranks * read)
    samples = num_batches * on.machine.batch_size * num_ranks

    def check(frac: float) -> None:
        check_slots(on, Placement.alike(Partition(num_rows), Tier.CACHED, frac), samples)

    few = 0.5 * read / sum(num_rows.values())
    with pytest.raises(ValueError, match=r"^placement\.cache_load_frac: expected") as error:
        check(few)
    [needed] = re.findall(r"expected (\d+) slots", str(error.value))
    assert int(needed) == math.ceil(read)
    check(1.01 * read / sum(num_rows.values()))


def test_slots_that_the_device_cannot_hold_are_refused() -> None:
    num_rows = {d.name: d.num_rows for d in scenario(machine()).demands}
    placed = Placement.alike(Partition(num_rows), Tier.CACHED, 0.9)
    row_bytes = [d.row_bytes for d in scenario(machine()).demands][0]
    needed = 0.9 * sum(num_rows.values()) * row_bytes / RANKS
    check_slots(scenario(machine(device_bytes=int(1.5 * needed))), placed, 1)
    on = scenario(machine(device_bytes=int(0.9 * needed)))
    with pytest.raises(ValueError, match=rf"of at most .* got {math.ceil(needed)}\. Set it 0\."):
        check_slots(on, placed, 1)
    check_slots(replace(on, machine=machine("cpu")), placed, 1)


@pytest.mark.parametrize(
    ("mapped_s", "expected"), [(1e-9, RowFetch.mapped), (4e-9, RowFetch.staged), (None, "staged")]
)
def test_rows_come_to_the_device_the_faster_way(mapped_s: float | None, expected: Any) -> None:
    """By the costs of both ways; the prediction is of the chosen one."""
    on = scenario(machine("cuda"))
    lines = {"fetch_slot": Line(1e-3, 0, 2e-9), "return_slot": Line(), "fetch_mapped": None}
    if mapped_s is not None:
        lines["fetch_mapped"] = Line(1e-3, 0, mapped_s)
    kernels = {n: line for n, line in {**on.costs.kernels, **lines}.items() if line is not None}
    pipeline = PipelineSpec(PipelineKind.look_ahead, "fp32", 1)
    on = replace(on, costs=replace(on.costs, kernels=kernels), pipeline=pipeline)
    num_rows = {d.name: d.num_rows for d in on.demands}
    placed = Placement.alike(Partition(num_rows), Tier.CACHED, 0.5)
    slots = Replayed("look_ahead", 10, 0.5, 0.5, 1e6, 1e5)
    found = with_faster_fetch(on, placed, slots)
    assert {table.row_fetch for table in found.tables.values()} == {RowFetch(expected)}
    predicted = predict_placement(on, {}, found.tables, slots=slots)
    row_bytes = on.demands[0].row_bytes
    rate = {RowFetch.staged: 2e-9, RowFetch.mapped: mapped_s}[RowFetch(expected)]
    assert rate is not None
    moved_s = 1e-3 + rate * 1e6 / RANKS * row_bytes
    hidden_s = predicted.step.hidden_s["rows_exchange"]
    without = predict_placement(on, {}, found.tables)
    assert expected_of(on, predicted)["fetched_bytes"] == pytest.approx(1e6 / RANKS * row_bytes)
    assert expected_of(on, predicted)["returned_bytes"] == pytest.approx(1e5 / RANKS * row_bytes)
    assert expected_of(on, without)["fetched_bytes"] is None
    added_s = predicted.step.step_s - without.step.step_s
    assert added_s + hidden_s - without.step.hidden_s["rows_exchange"] == pytest.approx(moved_s)


def test_slots_of_a_cpu_are_not_mapped() -> None:
    placement = AllColdPlacement(cold_tier=ColdTier.cached, row_fetch=RowFetch.mapped)
    partition = Partition({"t": 5})
    with pytest.raises(ValueError, match=r"^placement\.row_fetch: expected staged or auto on CPU"):
        as_placement(placement, partition, "cpu")
    placed = as_placement(placement, partition, "cuda")
    assert placed.tables["t"].row_fetch is RowFetch.mapped


def test_slots_need_look_ahead() -> None:
    """On any device and any number of ranks; predictions choose among no other pipeline."""
    placement = AllColdPlacement(cold_tier=ColdTier.cached)
    for device in ("cuda", "cpu"):
        on = replace(machine(device), world_size=1, local_world_size=1)
        found = configure(placement, PipelineKind.auto)
        assert choose_pipeline(found, on) is PipelineKind.look_ahead
        assert candidate_pipelines(found, on) == (PipelineKind.look_ahead,)
    with pytest.raises(ValueError, match=r"^pipeline\.kind: expected look_ahead .* got base\."):
        choose_pipeline(configure(placement, PipelineKind.base), machine())
    unsplit = configure(TorchrecPlacement(tier=ColdTier.cached))
    with pytest.raises(ValueError, match=r"^placement\.tier: expected .* got cached\."):
        build_unsharded(unsplit, SCHEMA, None, machine())


@pytest.mark.parametrize("tier", [ColdTier.fused_uvm, CACHED])
def test_host_tiers_on_cpu_are_refused_by_their_key(tier: ColdTier) -> None:
    config = configure(TorchrecPlacement(tier=tier))
    with pytest.raises(ValueError, match=rf"^placement\.tier: expected fused .* got {tier.name}\."):
        build_unsharded(config, SCHEMA, None, machine("cpu"))
