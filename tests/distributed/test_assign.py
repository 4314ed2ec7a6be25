"""order.assign=by_owner on real ranks: the same training, fewer bytes, and exact continuation."""

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
from hotrec.embedding.sharding import ShardedHotColdEmbeddingBagCollection
from hotrec.embedding.tables import gather_tables
from hotrec.planner.machine import Machine
from hotrec.planner.propose import unpredicted
from hotrec.planner.request import GivenTables
from hotrec.runtime.hosts import gather_host_of_rank
from hotrec.runtime.ranks import all_gather_object
from hotrec.train.checkpoint import Checkpoints, find_latest
from hotrec.train.loop import TrainResult
from hotrec.train.schedule import Schedule
from hotrec.types import (
    Exchange,
    Feature,
    Partition,
    Placement,
    Rows,
    Schema,
    Sharding,
    Table,
    TablePlacement,
)
from tests.distributed.setups import pretend_hosts, this_rank
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import losses
from tests.helpers.samples import on_ranks, only_whole
from tests.helpers.training import Cadence, train_model

NUM_ROWS = {"t0": 2000, "t1": 1500, "t2": 700, "t3": 5, "t4": 301}
SCHEMA = Schema(
    dense=("d0", "d1"),
    features=(
        *(Feature(f"f{index}", f"t{index}") for index in range(5)),
        Feature("again", "t0"),
        Feature("bag", "t1", is_multi_hot=True),
    ),
    tables=tuple(Table(name, num_rows) for name, num_rows in NUM_ROWS.items()),
)
# One sample in the last step: all ranks but the first have none.
NUM_SAMPLES = 385
BATCH_SIZE = 32
STOP = 3

HOT = {"t0": np.arange(40), "t1": np.arange(20)[::-1].copy(), "t3": np.arange(5)}
PLACEMENTS = {
    "row_wise": Placement.alike(Partition(NUM_ROWS, HOT, policy="by hand")),
    # Of every kind one; t3 is all hot.
    "mixed": Placement(
        Partition(NUM_ROWS, HOT, policy="by hand"),
        {
            "t0": TablePlacement(),
            "t1": TablePlacement(sharding=Sharding.TABLE_WISE),
            "t2": TablePlacement(sharding=Sharding.TABLE_WISE),
            "t3": TablePlacement(),
            "t4": TablePlacement(Exchange.POOLED, Sharding.TABLE_WISE),
        },
    ),
}
PLACEMENTS["spread"] = PLACEMENTS["row_wise"].spread(NUM_ROWS)
CASES = (
    ("row_wise", "look_ahead", "rowwise_adagrad"),
    ("mixed", "sparse_dist", "sgd"),
)


def write_skewed(path: Path) -> None:
    """Rows of low numbers are read most."""
    rng = np.random.default_rng(4)

    def draw(feature: Feature, num: int) -> Rows:
        num_rows = NUM_ROWS[feature.table]
        return (rng.random(num) ** 3 * num_rows).astype(np.int64)

    features: dict[str, Any] = {}
    for feature in SCHEMA.features:
        if feature.is_multi_hot:
            offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 4, NUM_SAMPLES))])
            features[feature.name] = Jagged(draw(feature, int(offsets[-1])), offsets)
        else:
            features[feature.name] = draw(feature, NUM_SAMPLES)
    label = rng.integers(0, 2, NUM_SAMPLES).astype(np.float32)
    dense = rng.standard_normal((NUM_SAMPLES, 2)).astype(np.float32)
    with scratch_directory(path, kind="dataset") as scratch:
        writer = ChunkWriter(scratch, "train", SCHEMA, 100)
        writer.write(Block(label, dense, features))
        commit_dataset(scratch, path, SCHEMA, {"train": writer.close()}, {})


def config_of(
    folder: Path, pipeline: str, optimizer: str, assign: str, levels: str = "auto"
) -> Config:
    words = [f"paths.dataset={folder / 'd'}", "placement=coverage", f"pipeline={pipeline}"]
    words += [f"optimizer={optimizer}", "optimizer.learning_rate=0.1", f"order.assign={assign}"]
    words += ["model.embedding_dim=8", "model.dense_layer_sizes=[8]"]
    words += ["model.over_layer_sizes=[8,1]", "trainer.num_workers=0", "trainer.device=cpu"]
    words += [f"trainer.batch_size={BATCH_SIZE}", "trainer.num_epochs=2"]
    words += ["optimizer.eps=1e-4"] if optimizer != "sgd" else []
    words += [f"pipeline.levels={levels}"]
    config: Config = build_config(compose_config("config", words))
    return config


def make_model(config: Config, placement: Placement) -> Trainable:
    world_size = dist.get_world_size()
    torch.manual_seed(1)
    machine = Machine(world_size, world_size, "cpu", 1 << 30, 1 << 34, BATCH_SIZE)
    job = plan_job(config, SCHEMA)
    plan = unpredicted(job.request_for(GivenTables(placement)), machine)
    return assemble(job.spec, plan, placement, machine, torch.device("cpu"))


def run(
    config: Config, placement: Placement, run_dir: Path, num_steps: int | None = None, **kwargs: Any
) -> tuple[TrainResult, dict[str, torch.Tensor]]:
    """Train two epochs, or fewer steps; the result and the tables."""
    ranks, world_size = this_rank(), dist.get_world_size()
    order = order_of(config)
    check_assign(order, placement)
    made = make_model(config, placement)
    assign = choose_assign(order, SCHEMA, placement, made.sharding)
    result = train_model(
        made.model,
        made.optimizer,
        make_train_loader(order, ranks, made.route, None, None, assign),
        ranks,
        num_steps=num_steps or 2 * -(-NUM_SAMPLES // (BATCH_SIZE * world_size)),
        cadence=Cadence(log_every=1),
        lr_factor=Schedule(),
        pipeline_kind=made.plan.pipeline.kind.value,
        run_dir=run_dir,
        inspect_batch=made.facts,
        **kwargs,
    )
    dist.barrier()
    return result, gather_tables(made.model)


def check_training(
    folder: Path, placement: str, pipeline: str, optimizer: str, levels: str = "auto"
) -> dict[str, Any]:
    """By owner trains what as read trains, with fewer bytes; a stopped run goes on bitwise.

    Returns the summary as read.
    """
    placed = PLACEMENTS[placement]
    folder = folder / f"{placement}-{dist.get_world_size()}"
    folder.mkdir(exist_ok=True)
    as_read = config_of(folder.parent, pipeline, optimizer, "as_read", levels)
    assigned = config_of(folder.parent, pipeline, optimizer, "by_owner", levels)
    plain, plain_tables = run(as_read, placed, folder / "as_read")
    whole, tables = run(assigned, placed, folder / "by_owner")
    expected, found = losses(folder / "as_read"), losses(folder / "by_owner")
    assert len(expected) > 6
    assert found == pytest.approx(expected, abs=1e-6)
    assert found.keys() == expected.keys()
    for name, table in plain_tables.items():
        torch.testing.assert_close(tables[name], table, rtol=1e-5, atol=1e-6, msg=name)
    # Of one full step, the same in both runs: ids, cold rows and their gradients.
    before, after = (result.summary["sent_bytes"]["all_to_all"] for result in (plain, whole))
    assert 0 < after < 0.9 * before, (after, before)
    if len(set(gather_host_of_rank())) > 1:
        before, after = (result.summary["between_hosts_bytes"] for result in (plain, whole))
        assert 0 < after < 0.9 * before, (after, before)

    checkpoints = Checkpoints(folder / "checkpoints", facts={})
    run(assigned, placed, folder / "cut", num_steps=STOP, checkpoints=checkpoints)
    path = find_latest(checkpoints.directory)
    assert path is not None
    again = replace(checkpoints, resume_from=path)
    _, resumed = run(assigned, placed, folder / "cut", checkpoints=again)
    assert losses(folder / "cut") == found
    for name, table in tables.items():
        assert torch.equal(resumed[name], table), name
    # The samples that remain are the same, whoever gets them.
    run(as_read, placed, folder / "other", checkpoints=again)
    left = losses(folder / "other")
    assert left == pytest.approx({step: found[step] for step in left}, abs=1e-6)
    assert max(left) == max(found)
    return dict(plain.summary)


def check_owners(folder: Path) -> None:
    """The owners that the plan names are the ranks that hold the rows."""
    for placement in PLACEMENTS.values():
        config = config_of(folder, "sparse_dist", "sgd", "by_owner")
        made = make_model(config, placement)
        mine = [
            (shard.table, shard.first_row, shard.num_rows, dist.get_rank())
            for module in made.model.modules()
            if isinstance(module, ShardedHotColdEmbeddingBagCollection)
            for rows in module.sharded_rows()
            for shard in rows.owned.shards
        ]
        held = sum(all_gather_object(mine), [])
        found = by_owner(SCHEMA, placement, made.sharding).owners(np.arange(sum(NUM_ROWS.values())))
        begin = 0
        for table, num_rows in NUM_ROWS.items():
            expected = np.full(num_rows, NOBODY)
            for name, first_row, num, rank in held:
                if name == table:
                    stored = placement.row_order(table)
                    expected[stored.rows_at(first_row, first_row + num)] = rank
            expected[placement.partition.hot(table)] = NOBODY
            assert np.array_equal(found[begin : begin + num_rows], expected), table
            begin += num_rows


def run_checks(folder: Path) -> None:
    torch.set_num_threads(1)
    check_owners(folder)
    for case in on_ranks(CASES, dist.get_world_size()):
        dist.barrier()
        check_training(folder, *case)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks(tmp_path: Path, world_size: int) -> None:
    write_skewed(tmp_path / "d")
    run_ranks(run_checks, world_size, timeout_s=200, folder=tmp_path)


def run_on_hosts(folder: Path, hosts: str) -> None:
    torch.set_num_threads(1)
    pretend_hosts(hosts)
    summaries = []
    for case, levels in zip(CASES, ("two", "auto"), strict=True):
        dist.barrier()
        summaries.append(check_training(folder, *case, levels))
    # Of the same step's batch, however far ahead a pipeline reads.
    bounds = {(of["bound_bytes"], of["between_hosts_bound_bytes"]) for of in summaries}
    assert len(bounds) == 1, bounds


# The host of each rank; in two levels on the first ones.
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("hosts", ["0011", *only_whole("001", "0101")])
def test_ranks_on_hosts(tmp_path: Path, hosts: str) -> None:
    write_skewed(tmp_path / "d")
    run_ranks(run_on_hosts, len(hosts), timeout_s=280, folder=tmp_path, hosts=hosts)
