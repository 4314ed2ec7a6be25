"""Which rank gets a sample changes bytes and work, but no training: the real order on ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hotrec.artifact import scratch_directory
from hotrec.assemble.job import order_of, plan_job
from hotrec.assemble.order import by_owner, check_assign, choose_assign, make_train_loader
from hotrec.assemble.trainable import Trainable, assemble
from hotrec.cli.store import build_config, compose_config
from hotrec.config.roots import Config
from hotrec.data.chunks import Block, ChunkWriter, Jagged, commit_dataset
from hotrec.data.locality import NOBODY
from hotrec.data.tokens import SampleWork
from hotrec.embedding.sharding import ShardedHotColdEmbeddingBagCollection
from hotrec.embedding.tables import gather_tables
from hotrec.planner.machine import Machine
from hotrec.planner.propose import unpredicted
from hotrec.planner.request import GivenTables
from hotrec.runtime.ranks import all_gather_object
from hotrec.train.checkpoint import Checkpoints, find_latest
from hotrec.train.schedule import Schedule
from hotrec.types import (
    Exchange,
    Feature,
    Partition,
    Placement,
    Schema,
    Sharding,
    Table,
    TablePlacement,
)
from tests.distributed.setups import pretend_hosts, this_rank
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import losses
from tests.helpers.samples import only_whole
from tests.helpers.training import Cadence, train_model

NUM_ROWS = {"t0": 2000, "t1": 1500, "t2": 700, "t3": 5}
SCHEMA = Schema(
    dense=("d0",),
    features=(
        *(Feature(f"f{index}", f"t{index}") for index in range(4)),
        Feature("again", "t0"),
        Feature("bag", "t1", is_multi_hot=True),
    ),
    tables=tuple(Table(name, num_rows) for name, num_rows in NUM_ROWS.items()),
    has_weights=True,
)
WORK = SampleWork(1, {"bag": 4}, {"bag": 1})
# One sample in the last step: all ranks but the first have none.
NUM_SAMPLES, BATCH_SIZE, STOP = 385, 32, 3
HOT = Partition(
    NUM_ROWS,
    {"t0": np.arange(40), "t1": np.arange(20)[::-1].copy(), "t3": np.arange(5)},
    policy="by hand",
)
PLACEMENTS = {
    "row_wise": Placement.alike(HOT),
    "spread": Placement.alike(HOT).spread(NUM_ROWS),
    # t3 is all hot.
    "mixed": Placement(
        HOT,
        {
            "t0": TablePlacement(),
            "t1": TablePlacement(sharding=Sharding.TABLE_WISE),
            "t2": TablePlacement(Exchange.POOLED, Sharding.TABLE_WISE),
            "t3": TablePlacement(),
        },
    ),
}
# By the host of each rank: placement, pipeline and order.
CASES = {
    "00": [("mixed", "sparse_dist", "by_owner"), ("row_wise", "look_ahead", "by_tokens")],
    "000": [("row_wise", "look_ahead", "by_owner"), ("mixed", "sparse_dist", "by_tokens")],
    "0011": [("row_wise", "look_ahead", "by_owner")],
    "001": [("row_wise", "look_ahead", "by_owner")],
}


def write_skewed(path: Path) -> None:
    """Rows of low numbers are read most; bags are very different in length."""
    rng = np.random.default_rng(4)
    features: dict[str, Any] = {}
    for feature in SCHEMA.features:
        lengths = np.ones(NUM_SAMPLES, np.int64)
        if feature.is_multi_hot:
            lengths = rng.lognormal(0, 1.2, NUM_SAMPLES).astype(np.int64) % 30
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        ids = (rng.random(offsets[-1]) ** 3 * NUM_ROWS[feature.table]).astype(np.int64)
        features[feature.name] = Jagged(ids, offsets) if feature.is_multi_hot else ids
    label = rng.integers(0, 2, NUM_SAMPLES).astype(np.float32)
    dense = rng.standard_normal((NUM_SAMPLES, 1)).astype(np.float32)
    weight = rng.integers(0, 4, NUM_SAMPLES).astype(np.float32)
    with scratch_directory(path, kind="dataset") as scratch:
        writer = ChunkWriter(scratch, "train", SCHEMA, 100)
        writer.write(Block(label, dense, features, weight))
        commit_dataset(scratch, path, SCHEMA, {"train": writer.close()}, {})


def config_of(folder: Path, pipeline: str, assign: str) -> Config:
    words = [f"paths.dataset={folder / 'd'}", "placement=coverage", f"pipeline={pipeline}"]
    words += [f"order.assign={assign}", "pipeline.levels=auto", "optimizer=rowwise_adagrad"]
    words += ["optimizer.learning_rate=0.1", "optimizer.eps=1e-3", "model.embedding_dim=8"]
    words += ["model.dense_layer_sizes=[8]", "model.over_layer_sizes=[8,1]"]
    words += ["trainer.num_workers=0", "trainer.device=cpu", "trainer.num_epochs=2"]
    words += [f"trainer.batch_size={BATCH_SIZE}"]
    config: Config = build_config(compose_config("config", words))
    return config


def make_model(config: Config, placement: Placement) -> Trainable:
    torch.manual_seed(1)
    world_size = dist.get_world_size()
    machine = Machine(world_size, world_size, "cpu", 1 << 30, 1 << 34, BATCH_SIZE)
    job = plan_job(config, SCHEMA)
    plan = unpredicted(job.request_for(GivenTables(placement)), machine)
    return assemble(job.spec, plan, placement, machine, torch.device("cpu"))


def run(
    config: Config, placement: Placement, run_dir: Path, num_steps: int | None = None, **kwargs: Any
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The summary of two epochs, or of fewer steps, and the tables."""
    order = order_of(config)
    check_assign(order, placement)
    made = make_model(config, placement)
    assign = choose_assign(order, SCHEMA, placement, made.sharding, WORK)
    result = train_model(
        made.model,
        made.optimizer,
        make_train_loader(order, this_rank(), made.route, None, None, assign, WORK),
        this_rank(),
        num_steps=num_steps or 2 * -(-NUM_SAMPLES // (BATCH_SIZE * dist.get_world_size())),
        cadence=Cadence(log_every=1),
        lr_factor=Schedule(),
        pipeline_kind=made.plan.pipeline.kind.value,
        run_dir=run_dir,
        inspect_batch=made.facts,
        **kwargs,
    )
    dist.barrier()
    return dict(result.summary), gather_tables(made.model)


def check_training(folder: Path, placement: str, pipeline: str, order: str, hosts: str) -> None:
    """It trains what samples as they are read train; a run that stops goes on bit for bit."""
    placed, own = PLACEMENTS[placement], folder / f"{order}-{hosts}"
    own.mkdir(exist_ok=True)
    as_read, assigned = (config_of(folder, pipeline, assign) for assign in ("as_read", order))
    plain, plain_tables = run(as_read, placed, own / "as_read")
    whole, tables = run(assigned, placed, own / "assigned")
    expected, found = losses(own / "as_read"), losses(own / "assigned")
    assert found == pytest.approx(expected, abs=1e-6)
    assert whole["num_samples"] == plain["num_samples"] == 2 * NUM_SAMPLES
    for name, table in plain_tables.items():
        torch.testing.assert_close(tables[name], table, rtol=1e-5, atol=1e-6, msg=name)
    if order == "by_tokens":
        assert 1 < whole["work_balance"] < plain["work_balance"] - 0.1, (whole, plain)
    else:  # of one full step, the same in both runs: ids, cold rows and their gradients
        before, after = (of["sent_bytes"]["all_to_all"] for of in (plain, whole))
        assert 0 < after < 0.9 * before, (after, before)
        if len(set(hosts)) > 1:
            before, after = (of["between_hosts_bytes"] for of in (plain, whole))
            assert 0 < after < 0.9 * before, (after, before)

    checkpoints = Checkpoints(own / "checkpoints", facts={})
    run(assigned, placed, own / "cut", STOP, checkpoints=checkpoints)
    again = replace(checkpoints, resume_from=find_latest(checkpoints.directory))
    _, resumed = run(assigned, placed, own / "cut", checkpoints=again)
    assert losses(own / "cut") == found
    for name, table in tables.items():
        assert torch.equal(resumed[name], table), name
    # The samples that remain are the same, whoever gets them.
    run(as_read, placed, own / "other", checkpoints=again)
    left = losses(own / "other")
    assert left == pytest.approx({step: found[step] for step in left}, abs=1e-6)
    assert max(left) == max(found)


def check_owners(folder: Path) -> None:
    """The owners that the plan names are the ranks that hold the rows."""
    for placement in PLACEMENTS.values():
        made = make_model(config_of(folder, "sparse_dist", "by_owner"), placement)
        mine = [
            (shard.table, shard.first_row, shard.num_rows, dist.get_rank())
            for module in made.model.modules()
            if isinstance(module, ShardedHotColdEmbeddingBagCollection)
            for rows in module.sharded_rows()
            for shard in rows.owned.shards
        ]
        expected = {table: np.full(num, NOBODY) for table, num in NUM_ROWS.items()}
        for table, first_row, num, rank in sum(all_gather_object(mine), []):
            rows = placement.row_order(table).rows_at(first_row, first_row + num)
            expected[table][rows] = rank
        for table, owners in expected.items():
            owners[placement.partition.hot(table)] = NOBODY
        found = by_owner(SCHEMA, placement, made.sharding).owners(np.arange(sum(NUM_ROWS.values())))
        assert np.array_equal(found, np.concatenate([*expected.values()]))


def check_hosts(folder: Path, hosts: str) -> None:
    torch.set_num_threads(1)
    pretend_hosts(hosts)
    check_owners(folder)
    for case in CASES[hosts]:
        check_training(folder, *case, hosts)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("hosts", ["00", "000", "0011", *only_whole("001")])
def test_any_order_trains_the_same_samples(tmp_path: Path, hosts: str) -> None:
    write_skewed(tmp_path / "d")
    run_ranks(check_hosts, len(hosts), timeout_s=280, folder=tmp_path, hosts=hosts)
