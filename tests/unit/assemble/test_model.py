"""TorchRec's own ways to train the tables, host tiers included, as its planner shards them."""

from __future__ import annotations

import pytest

from hotrec.assemble.job import model_spec
from hotrec.assemble.model import ModelSpec, build_unsharded
from hotrec.assemble.torchrec_plan import shardings_of
from hotrec.bench.samples import ZipfTables
from hotrec.config.groups import DlrmConfig, RowwiseAdagradConfig, TorchrecPlacement
from hotrec.config.roots import Config
from hotrec.planner.machine import Machine
from hotrec.planner.plan import Plan, TorchrecTables
from hotrec.planner.predict import Prediction, Shardings
from hotrec.planner.propose import propose
from hotrec.planner.request import GivenTables, PlanRequest
from hotrec.types import (
    Partition,
    PipelineKind,
    PipelineSpec,
    Placement,
    Tier,
)
from tests.unit.planner.situations import NUM_ROWS, machine, situation

SCHEMA = ZipfTables([*NUM_ROWS.values()], exponent=1.05, num_dense=4, seed=0).schema
PREFETCH = PipelineKind.prefetch
UVM, PREFETCHED = (
    f"torchrec planner {tier}" for tier in ("fused_uvm", "fused_uvm_caching prefetch")
)


pytestmark = pytest.mark.usefixtures("one_rank")


def spec() -> ModelSpec:
    config = Config(
        dataset_name="d",
        run_name="r",
        model=DlrmConfig(embedding_dim=16, dense_layer_sizes=[8, 16]),
        placement=TorchrecPlacement(),
        optimizer=RowwiseAdagradConfig(learning_rate=0.1),
    )
    return model_spec(config, SCHEMA)


def baselines(on: Machine) -> dict[str, Prediction]:
    """TorchRec's own plans, as TorchRec's planner shards the tables."""

    def shardings(tables: TorchrecTables, pipeline: PipelineSpec) -> Shardings | str:
        unsharded = build_unsharded(spec(), Plan(tables, pipeline), None, on)
        try:
            plan = unsharded.plan(on)
        except ValueError as error:
            return str(error)
        is_ahead = pipeline.kind is PREFETCH
        return shardings_of(plan, NUM_ROWS, tables.cache_load_frac, is_prefetched=is_ahead)

    given = GivenTables(Placement.alike(Partition(NUM_ROWS), Tier.DEVICE, None))
    decision = propose(PlanRequest(given), situation(on), shardings, with_baselines=True)
    return {plan.label: of for plan, of in decision.predictions.items() if not plan.is_hotrec}


def test_host_tiers_are_baselines_on_cuda_where_the_tables_do_not_fit() -> None:
    """Rows take 26 MB of 10; TorchRec's own choice may take host tiers too."""
    predicted = baselines(machine(device_bytes=10_000_000))
    assert {UVM, PREFETCHED} <= set(predicted)
    of_tier = {name: {s.tier for s in p.shardings.values()} for name, p in predicted.items()}
    assert of_tier[UVM] == {Tier.HOST}
    assert of_tier[PREFETCHED] == {Tier.HOST_CACHED}
    ahead = predicted[PREFETCHED]
    assert {(s.is_prefetched, s.cache_load_frac) for s in ahead.shardings.values()} == {(True, 0.2)}
    assert ahead.step.hidden_s["row_lookup"] > 0
    assert predicted[UVM].max_bytes[0] < ahead.max_bytes[0]
