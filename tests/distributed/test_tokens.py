"""order.assign=by_tokens and with owners on real ranks: the training of one process, and resume."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hotrec.artifact import scratch_directory
from hotrec.assemble.job import order_of, plan_job
from hotrec.assemble.order import check_assign, choose_assign, make_train_loader
from hotrec.assemble.trainable import Trainable, assemble
from hotrec.cli.store import build_config, compose_config
from hotrec.config.groups import TorchrecPlacement
from hotrec.config.roots import Config
from hotrec.data.chunks import Block, ChunkWriter, Jagged, commit_dataset
from hotrec.data.tokens import SampleWork
from hotrec.embedding.tables import gather_tables
from hotrec.planner.machine import Machine
from hotrec.planner.plan import Plan, TorchrecTables
from hotrec.planner.propose import unpredicted
from hotrec.planner.request import GivenTables
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
from tests.distributed.setups import this_rank
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import losses
from tests.helpers.samples import on_ranks
from tests.helpers.training import Cadence, train_model

NUM_ROWS = {"t0": 900, "t1": 300, "t2": 40}
SCHEMA = Schema(
    dense=("d0",),
    features=(
        Feature("user", "t2"),
        Feature("items", "t0", is_multi_hot=True),
        Feature("item", "t0"),
        Feature("words", "t1", is_multi_hot=True),
    ),
    tables=tuple(Table(name, num_rows) for name, num_rows in NUM_ROWS.items()),
    has_weights=True,
)
# As of attention over the items, so that ranks have very different numbers of samples.
WORK = SampleWork(1, {"items": 4, "words": 1}, {"items": 1})
NUM_SAMPLES, EPOCHS, STOP = 109, 2, 5

HOT = Partition(NUM_ROWS, {"t0": np.arange(50), "t2": np.arange(40)}, policy="by hand")
PLACEMENTS = {
    "row_wise": Placement.alike(HOT),
    "mixed": Placement(
        HOT,
        {
            "t0": TablePlacement(sharding=Sharding.TABLE_WISE),
            "t1": TablePlacement(Exchange.POOLED, Sharding.TABLE_WISE),
            "t2": TablePlacement(),
        },
    ),
    "torchrec": None,
}
BY_BOTH = "order.assign=by_tokens_and_owner"
# Samples of a rank's batch: 9 leave one sample for the last step of 2 and of 3 ranks, so that ranks
# are without any; 10 leave 9 and 19.
CASES = (
    ("row_wise", ("pipeline=look_ahead", "pipeline.depth=2", "pipeline.micro_batches=true"), 9),
    ("row_wise", ("pipeline=look_ahead", BY_BOTH), 9),
    ("row_wise", ("pipeline=look_ahead",), 10),
    ("mixed", ("pipeline=look_ahead", BY_BOTH), 10),
    ("row_wise", ("pipeline=base",), 10),
    ("mixed", ("pipeline=sparse_dist", BY_BOTH), 9),
    ("mixed", ("pipeline=base",), 9),
    ("torchrec", ("pipeline=sparse_dist", "placement.plan=hand_tuned"), 10),
    ("torchrec", ("pipeline=sparse_dist", "placement.plan=planner"), 9),
    ("torchrec", ("pipeline=base", "placement.plan=table_wise"), 9),
    ("torchrec", ("pipeline=sparse_dist", "placement.plan=table_wise"), 10),
)


def write_log(path: Path) -> None:
    """Samples of very different lengths, some without any id of a bag, and of different weights."""
    rng = np.random.default_rng(6)
    features: dict[str, np.ndarray | Jagged] = {}
    for feature in SCHEMA.features:
        num_rows = NUM_ROWS[feature.table]
        features[feature.name] = rng.integers(0, num_rows, NUM_SAMPLES)
        if feature.is_multi_hot:
            lengths = rng.lognormal(1.5, 1.2, NUM_SAMPLES).astype(np.int64) % 90
            offsets = np.concatenate([[0], np.cumsum(lengths)])
            ids = (rng.random(offsets[-1]) ** 3 * num_rows).astype(np.int64)
            features[feature.name] = Jagged(ids, offsets)
    label = rng.integers(0, 2, NUM_SAMPLES).astype(np.float32)
    dense = rng.standard_normal((NUM_SAMPLES, 1)).astype(np.float32)
    weight = rng.integers(0, 4, NUM_SAMPLES).astype(np.float32)
    with scratch_directory(path, kind="dataset") as scratch:
        writer = ChunkWriter(scratch, "train", SCHEMA, 40)
        writer.write(Block(label, dense, features, weight))
        commit_dataset(scratch, path, SCHEMA, {"train": writer.close()}, {})


def config_of(folder: Path, words: Sequence[str], assign: str, batch_size: int) -> Config:
    is_torchrec = any(word.startswith("placement.plan=") for word in words)
    given = [f"placement={'torchrec' if is_torchrec else 'coverage'}", f"order.assign={assign}"]
    given += [*words, f"paths.dataset={folder / 'd'}", "optimizer=adagrad"]
    given += ["optimizer.learning_rate=0.1", "optimizer.eps=1e-3", "model.embedding_dim=8"]
    given += ["model.dense_layer_sizes=[8]", "model.over_layer_sizes=[8,1]"]
    given += ["trainer.num_workers=0", "trainer.device=cpu", f"trainer.num_epochs={EPOCHS}"]
    given += [f"trainer.batch_size={batch_size}"]
    config: Config = build_config(compose_config("config", given))
    return config


def make_model(config: Config, placement: Placement | None) -> Trainable:
    torch.manual_seed(1)
    world_size, batch_size = dist.get_world_size(), config.trainer.batch_size
    machine = Machine(world_size, world_size, "cpu", 1 << 30, 1 << 34, batch_size)
    job = plan_job(config, SCHEMA)
    if placement is None:
        assert isinstance(config.placement, TorchrecPlacement)
        plan = Plan(TorchrecTables(config.placement.plan), job.pipeline)
    else:
        plan = unpredicted(job.request_for(GivenTables(placement)), machine)
    return assemble(job.spec, plan, placement, machine, torch.device("cpu"))


def loader_of(config: Config, made: Trainable, placement: Placement | None) -> Any:
    order = order_of(config)
    check_assign(order, placement)
    assign = choose_assign(order, SCHEMA, placement, made.sharding, WORK)
    return make_train_loader(order, this_rank(), made.route, None, None, assign, WORK)


def trained(
    config: Config, placement: Placement | None
) -> tuple[list[float], list[list[int]], dict[str, torch.Tensor]]:
    """The global loss of each step, the samples of each rank in it, and the tables."""
    made = make_model(config, placement)
    batches = [*loader_of(config, made, placement)]
    pipeline, source, found = made.pipeline(), iter(batches), []
    for _ in batches:
        loss, _, _ = pipeline.progress(source)
        found.append(loss.detach().double())
    pipeline.flush()
    total = torch.stack(found)
    dist.all_reduce(total)
    own = torch.tensor([int(batch.weights.numel()) for batch in batches])
    sizes = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, own)
    tables = gather_tables(made.model)
    return (total / len(sizes)).tolist(), torch.stack(sizes).T.tolist(), tables


def run(
    config: Config, placement: Placement, run_dir: Path, num_steps: int, **kwargs: Any
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The summary of a run of so many steps, and the tables."""
    made = make_model(config, placement)
    result = train_model(
        made.model,
        made.optimizer,
        loader_of(config, made, placement),
        this_rank(),
        num_steps=num_steps,
        cadence=Cadence(log_every=1),
        lr_factor=Schedule(),
        pipeline_kind=made.plan.pipeline.kind.value,
        run_dir=run_dir,
        inspect_batch=made.facts,
        **kwargs,
    )
    dist.barrier()
    return dict(result.summary), gather_tables(made.model)


def train_alone(folder: Path, batch_size: int) -> None:
    """What one process makes of the whole global batches."""
    words = ("pipeline=base", "placement.plan=table_wise")
    found, _, tables = trained(config_of(folder, words, "as_read", batch_size), None)
    torch.save((found, tables), folder / f"alone-{batch_size}.pt")


def check_case(folder: Path, placement: str, words: Sequence[str], batch_size: int) -> None:
    """The training of one process, with even work, and the same again bit for bit."""
    world_size = dist.get_world_size()
    config = config_of(folder, words, "by_tokens", batch_size)
    placed = PLACEMENTS[placement]
    found, sizes, tables = trained(config, placed)
    expected, expected_tables = torch.load(folder / f"alone-{batch_size * world_size}.pt")
    assert found == pytest.approx(expected, abs=1e-6), (words, sizes)
    for name, table in expected_tables.items():
        torch.testing.assert_close(tables[name], table, rtol=1e-5, atol=1e-5, msg=name)
    assert max(map(max, sizes)) > 1.5 * batch_size, sizes
    again, _, tables_again = trained(config, placed)
    assert again == found
    assert all(torch.equal(tables_again[name], table) for name, table in tables.items())


def check_run(folder: Path, pipeline: str) -> None:
    """A stopped run goes on bit for bit, and runs show how even their work is."""
    folder, placed = folder / f"{pipeline}-{dist.get_world_size()}", PLACEMENTS["row_wise"]
    folder.mkdir(exist_ok=True)
    as_read, config = (
        config_of(folder.parent, [f"pipeline={pipeline}"], assign, 10)
        for assign in ("as_read", "by_tokens")
    )
    assert placed is not None
    num_steps = EPOCHS * -(-NUM_SAMPLES // (10 * dist.get_world_size()))
    plain, _ = run(as_read, placed, folder / "as_read", num_steps)
    whole, tables = run(config, placed, folder / "whole", num_steps)
    assert whole["num_samples"] == plain["num_samples"] == EPOCHS * NUM_SAMPLES
    assert losses(folder / "whole") == pytest.approx(losses(folder / "as_read"), abs=1e-6)
    assert 1 < whole["work_balance"] < plain["work_balance"] - 0.1, (whole, plain)
    lines = [*map(json.loads, (folder / "whole" / "metrics.jsonl").read_text().splitlines())]
    assert all(line["work_balance"] >= 1 for line in lines if "loss" in line)

    checkpoints = Checkpoints(folder / "checkpoints", facts={})
    run(config, placed, folder / "cut", STOP, checkpoints=checkpoints)
    path = find_latest(checkpoints.directory)
    assert path is not None
    again = replace(checkpoints, resume_from=path)
    _, resumed = run(config, placed, folder / "cut", num_steps, checkpoints=again)
    assert losses(folder / "cut") == losses(folder / "whole")
    assert all(torch.equal(resumed[name], table) for name, table in tables.items())


def run_checks(folder: Path) -> None:
    torch.set_num_threads(1)
    for case in on_ranks(CASES, dist.get_world_size()):
        dist.barrier()
        check_case(folder, *case)
    check_run(folder, {2: "look_ahead", 3: "sparse_dist"}[dist.get_world_size()])


def run_alone(folder: Path, batch_sizes: Sequence[int]) -> None:
    torch.set_num_threads(1)
    for batch_size in batch_sizes:
        train_alone(folder, batch_size)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks(tmp_path: Path, world_size: int) -> None:
    write_log(tmp_path / "d")
    sizes = [world_size * size for size in sorted({case[2] for case in CASES})]
    run_ranks(run_alone, 1, timeout_s=100, folder=tmp_path, batch_sizes=sizes)
    run_ranks(run_checks, world_size, timeout_s=200, folder=tmp_path)
