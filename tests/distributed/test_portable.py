"""A checkpoint of any ranks, placement and pipeline goes on under any other, as the unsplit model.

Every world size saves some runs; every world size then loads them, under placements and pipelines
that are drawn, and trains on: two thirds of them as they were, the others into tables where a
fourth of the rows is new and the others have moved, as after new days of data.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hotrec.embedding.canonical import canonical_parts
from hotrec.embedding.initialize import initial_rows
from hotrec.embedding.tables import gather_tables
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.train.checkpoint import (
    Checkpoints,
    Position,
    load_checkpoint,
    load_rows,
    open_tensors,
    save_checkpoint,
)
from hotrec.train.pipelines import make_pipeline
from hotrec.types import (
    Levels,
    OptimizerKind,
    PipelineKind,
    PipelineSpec,
    Placement,
    TablePlacement,
    Tier,
    TorchrecPlan,
)
from tests.distributed import setups
from tests.distributed.setups import make_batch, mean_over_ranks
from tests.helpers.ranks import run_ranks
from tests.helpers.reference import (
    PlainBags,
    PlainLazyAdam,
    PlainRowWiseAdagrad,
    PlainTable,
    TinyClickModel,
    mean_loss,
)
from tests.helpers.samples import is_whole
from tests.helpers.tiny import TinyLoader

WORLD_SIZES = (1, 2, 3, 4)
# By each world size; HOTREC_PORTABLE_CASES=40 makes it 160 in all.
NUM_LOADED = int(os.environ.get("HOTREC_PORTABLE_CASES", "12" if is_whole() else "6"))
SAVED_STEP, LAST_STEP = 3, 8
TOLERANCE = 1e-5
DENSE = OptimizerSpec(OptimizerKind.adam, learning_rate=0.01, eps=1e-3)
SPLIT: dict[str, Any] = {
    **setups.PARTITIONS,
    "placement": setups.PLACEMENT,
    "pooled": setups.ALL_POOLED,
    # With as few slots as the rows of the steps ahead allow.
    "cached": Placement(
        setups.PARTITIONS["mixed"],
        {table: TablePlacement(tier=Tier.CACHED, cache_load_frac=0.7) for table in setups.NUM_ROWS},
    ),
}
SPLIT |= {
    "spread": Placement.alike(setups.PARTITIONS["mixed"]).spread(setups.NUM_ROWS),
    "spread cached": SPLIT["cached"].spread(setups.NUM_ROWS),
}
PLANS: dict[str, Any] = {
    **{plan.value: plan for plan in TorchrecPlan},
    "column_wise": setups.COLUMN_WISE,
}
PIPELINES = ("sparse_dist", "look_ahead")


@dataclass(frozen=True)
class Way:
    """How a model is trained."""

    optimizer: OptimizerKind
    placement: str
    pipeline: str
    levels: Levels = Levels.one


def names_for(optimizer: OptimizerKind) -> list[str]:
    """All placements; FBGEMM's row-wise Adagrad has a sum for each row of each piece of columns."""
    is_rowwise = optimizer is OptimizerKind.rowwise_adagrad
    return [name for name in [*SPLIT, *PLANS] if name != "column_wise" or not is_rowwise]


def draw_way(rng: np.random.Generator, optimizer: OptimizerKind) -> Way:
    """Adam needs all rows hot on CPU; TorchRec's plans have no look-ahead."""
    if optimizer is OptimizerKind.adam:
        return Way(optimizer, "all_hot", str(rng.choice(PIPELINES)))
    placement = str(rng.choice(names_for(optimizer)))
    pipeline = str(rng.choice(PIPELINES)) if placement in SPLIT else "sparse_dist"
    if "cached" in placement:  # look-ahead fills its slots
        pipeline = "look_ahead"
    return Way(optimizer, placement, pipeline)


def saved_ways(world_size: int) -> list[Way]:
    rng = np.random.default_rng(world_size)
    return [draw_way(rng, kind) for kind in OptimizerKind for _ in range(2)]


def loaded_ways(world_size: int) -> list[tuple[str, Way, bool]]:
    """What is loaded, by its directory, how it is trained then, and whether into other rows."""
    rng = np.random.default_rng(10 + world_size)
    saved = [
        (directory(size, index), way.optimizer)
        for size in WORLD_SIZES
        for index, way in enumerate(saved_ways(size))
    ]
    chosen = itertools.islice(itertools.cycle(rng.permutation(len(saved)).tolist()), NUM_LOADED)
    return [
        (saved[at][0], draw_way(rng, saved[at][1]), index % 3 == 2)
        for index, at in enumerate(chosen)
    ]


def directory(world_size: int, index: int) -> str:
    return f"{world_size}-{index}"


class Run:
    """A model, trained by a way on these ranks."""

    def __init__(self, way: Way) -> None:
        is_ahead = way.pipeline == "look_ahead"
        placement: Any = SPLIT.get(way.placement) or PLANS[way.placement]
        self.setup = setups.build(
            way.optimizer, placement, dense=DENSE, data_parallel=not is_ahead, levels=way.levels
        )
        model, device = self.setup.model, torch.device("cpu")
        spec = PipelineSpec(PipelineKind[way.pipeline], depth=2, window=0)
        self.make_pipeline = partial(make_pipeline, spec, model, self.setup.optimizer, device)
        self.pipeline: Any = None

    def train(self, first: int, last: int) -> list[float]:
        """The losses of some steps; the pipeline stays open, as between the steps of a run."""
        self.pipeline = self.pipeline or self.make_pipeline()
        self.pipeline.start()
        batches = iter([make_batch(step) for step in range(first, last)])
        losses = [mean_over_ranks(self.pipeline.progress(batches)[0]) for _ in range(first, last)]
        self.pipeline.drain()
        return losses

    def close(self) -> None:
        self.pipeline.close()

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {name.rpartition(".")[2]: t for name, t in gather_tables(self.setup.model).items()}
        for part in canonical_parts(self.setup.model).parts:
            if "hidden" in part.name or "out" in part.name:
                found[part.name.removeprefix("model.")] = part.value.clone()
        return found


def save_all(folder: Path) -> list[list[float]]:
    """Train and save every way of this world size; the losses."""
    losses = []
    for index, way in enumerate(saved_ways(dist.get_world_size())):
        run = Run(way)
        losses.append(run.train(0, SAVED_STEP))
        checkpoints = Checkpoints(folder / directory(dist.get_world_size(), index), facts={})
        position = Position(SAVED_STEP, SAVED_STEP * setups.GLOBAL_BATCH)
        setup = run.setup
        save_checkpoint(
            checkpoints, position, setup.model, setup.optimizer, TinyLoader(num_batches=1)
        )
    return losses


def load_all(folder: Path) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    """Load and train on; losses and weights of every way."""
    found = []
    for name, way, has_moved in loaded_ways(dist.get_world_size()):
        run = Run(way)
        path = folder / name / f"step-{SAVED_STEP:08d}"
        model, optimizer = run.setup.model, run.setup.optimizer
        if has_moved:
            load_rows(path, model=model, optimizer=optimizer, find_rows=map_rows)
        else:
            load_checkpoint(path, model=model, optimizer=optimizer, facts={})
        losses = run.train(SAVED_STEP, LAST_STEP)
        tensors = run.tensors()
        run.close()
        found.append((losses, tensors if dist.get_rank() == 0 else {}))
    return found


def resume_all(folder: Path) -> list[str]:
    """Train on after a checkpoint, and from it; where the two differ in a bit."""
    wrong = []
    kind = OptimizerKind.rowwise_adagrad
    for placement, pipeline in itertools.product([*SPLIT, *PLANS], PIPELINES):
        is_ahead = pipeline == "look_ahead"
        if is_ahead and placement in PLANS or not is_ahead and "cached" in placement:
            continue
        way = Way(kind, placement, pipeline)
        whole, resumed = Run(way), Run(way)
        whole.train(0, SAVED_STEP)
        checkpoints = Checkpoints(folder / f"{placement}-{pipeline}", facts={})
        position = Position(SAVED_STEP, SAVED_STEP * setups.GLOBAL_BATCH)
        model, optimizer = whole.setup.model, whole.setup.optimizer
        path = save_checkpoint(checkpoints, position, model, optimizer, TinyLoader(num_batches=1))
        model, optimizer = resumed.setup.model, resumed.setup.optimizer
        load_checkpoint(path, model=model, optimizer=optimizer, facts={})
        losses = [run.train(SAVED_STEP, LAST_STEP) for run in (whole, resumed)]
        wrong += [f"{way}: losses {losses}"] * (losses[0] != losses[1])
        again = resumed.tensors()
        for key, value in whole.tensors().items():
            wrong += [f"{way}: {key}"] * (not torch.equal(again[key], value))
        whole.close()
        resumed.close()
    return wrong


def train_plain(
    kind: OptimizerKind, *, has_moved: bool = False
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of the unsplit model in plain PyTorch, on one rank.

    If the rows have moved, those of the saved step go on elsewhere, with their state, and the new
    ones begin as they began at first.
    """
    tables = [
        PlainTable(name, rows, setups.DIMS[name], tuple(setups.FEATURES[name]), name == "t1")
        for name, rows in setups.NUM_ROWS.items()
    ]
    weights = {
        table.name: initial_rows(
            5, table.name, torch.arange(table.num_rows), table.dim, table.num_rows
        )
        for table in tables
    }
    bags = PlainBags(tables, weights)
    width = sum(table.dim * len(table.features) for table in tables)
    model = TinyClickModel(bags, setups.NUM_DENSE, width)
    rows, spec = list(bags.bags.parameters()), setups.spec_of(kind)
    betas = (spec.beta1, spec.beta2)
    of_rows: dict[OptimizerKind, Any] = {
        OptimizerKind.sgd: partial(torch.optim.SGD, lr=spec.learning_rate),
        OptimizerKind.adagrad: partial(torch.optim.Adagrad, lr=spec.learning_rate, eps=spec.eps),
        OptimizerKind.rowwise_adagrad: partial(
            PlainRowWiseAdagrad, lr=spec.learning_rate, eps=spec.eps
        ),
        OptimizerKind.adam: partial(
            PlainLazyAdam, lr=spec.learning_rate, betas=betas, eps=spec.eps
        ),
    }
    layers = [*model.hidden.parameters(), *model.out.parameters()]
    optimizers = [
        of_rows[kind](rows),
        torch.optim.Adam(layers, lr=DENSE.learning_rate, eps=DENSE.eps),
    ]
    losses = []
    for step in range(LAST_STEP):
        if has_moved and step == SAVED_STEP:
            for table in tables:
                weight = bags.bags[table.name].weight
                found = map_rows(table.name, torch.arange(table.num_rows))
                is_new = found < 0
                state = optimizers[0].state[weight]
                for value in (weight.data, *(v for v in state.values() if v.dim())):
                    value.copy_(value[found])
                    value[is_new] = 0
                weight.data[is_new] = weights[table.name][is_new]
        batch = make_batch(step)
        of_feature = batch.sparse.to_dict()
        ids = {
            name: [(bag.tolist(), None) for bag in f.to_dense()] for name, f in of_feature.items()
        }
        if isinstance(optimizers[0], PlainLazyAdam):
            for table in tables:
                touched = torch.cat([of_feature[name].values() for name in table.features])
                optimizers[0].touched[bags.bags[table.name].weight] = touched.unique()
        loss = mean_loss(model(batch.dense, ids), batch.labels)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=False)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(float(loss.detach()))
    found = {name: bag.weight.detach() for name, bag in bags.bags.items()}
    found |= {
        f"{name}.{kind}": value.detach()
        for name in ("hidden", "out")
        for kind, value in getattr(model, name).named_parameters()
    }
    return losses, found


def map_rows(table: str, rows: torch.Tensor) -> torch.Tensor:
    """Another order of rows, every fourth of which is new."""
    num_rows = setups.NUM_ROWS[table]
    mapped = (rows * 7 + 3) % num_rows if num_rows % 7 else num_rows - 1 - rows
    return torch.where(rows % 4 == 1, -1, mapped)


def start_warm(folder: Path) -> list[str]:
    """Load saved runs with other rows into every kind of placement; what differs on this rank."""
    wrong = []
    for index, way in enumerate(saved_ways(2)):
        path = folder / directory(2, index) / f"step-{SAVED_STEP:08d}"
        with open_tensors(path) as files:
            for placement in (
                ["all_hot"] if way.optimizer is OptimizerKind.adam else names_for(way.optimizer)
            ):
                pipeline = "look_ahead" if "cached" in placement else "sparse_dist"
                run = Run(Way(way.optimizer, placement, pipeline))
                before = run.tensors()
                optimizer = run.setup.optimizer
                num = load_rows(
                    path, model=run.setup.model, optimizer=optimizer, find_rows=map_rows
                )
                for name, found in run.tensors().items():
                    full = f"model.first.embedding_bags.{name}.weight"
                    expected = files.whole(full if name in num else f"model.{name}")
                    if name in num:
                        rows = map_rows(name, torch.arange(len(found)))
                        expected = expected[rows].where(rows[:, None] >= 0, before[name])
                        wrong += [f"{placement} {name}"] * (num[name] != int((rows >= 0).sum()))
                    wrong += [f"{placement} {name}"] * (not torch.equal(found, expected))
                wrong += [f"{placement} tables"] * (num.keys() != setups.NUM_ROWS.keys())
        # Moments of another optimizer start anew, and so does their count of updates.
        run = Run(Way(OptimizerKind.adam, "all_hot", "sparse_dist"))
        model, optimizer = run.setup.model, run.setup.optimizer
        load_rows(path, model=model, optimizer=optimizer, find_rows=map_rows)
        expected_count = SAVED_STEP if way.optimizer is OptimizerKind.adam else 0
        counts = {int(count) for count in canonical_parts(model, optimizer).counters}
        wrong += [f"updates {counts}"] * (counts != {expected_count})
    return wrong


@pytest.fixture(scope="module")
def plain(one_rank: Any) -> dict[Any, tuple[list[float], dict[str, torch.Tensor]]]:
    return {
        (kind, has_moved): train_plain(kind, has_moved=has_moved)
        for kind in OptimizerKind
        for has_moved in (False, True)
    }


def test_a_resumed_run_is_the_undisturbed_one(tmp_path: Path) -> None:
    """Bit for bit; the sums of three ranks depend on the order in which they are made."""
    for wrong in run_ranks(resume_all, 3, timeout_s=280, folder=tmp_path):
        assert not wrong


def test_any_checkpoint_goes_on_as_the_unsplit_model(plain: Any, tmp_path: Path) -> None:
    for size in WORLD_SIZES:
        [losses, *_] = run_ranks(save_all, size, timeout_s=280, folder=tmp_path)
        for way, of_way in zip(saved_ways(size), losses, strict=True):
            assert of_way == pytest.approx(
                plain[way.optimizer, False][0][:SAVED_STEP], abs=TOLERANCE
            ), way
    for wrong in run_ranks(start_warm, 3, timeout_s=280, folder=tmp_path):
        assert not wrong
    for size in WORLD_SIZES:
        [found, *_] = run_ranks(load_all, size, timeout_s=280, folder=tmp_path)
        for (name, way, has_moved), (losses, tensors) in zip(loaded_ways(size), found, strict=True):
            expected_losses, expected = plain[way.optimizer, has_moved]
            what = f"{name} on {size} ranks by {way}, rows moved: {has_moved}"
            assert losses == pytest.approx(expected_losses[SAVED_STEP:], abs=TOLERANCE), what
            assert tensors.keys() == expected.keys(), what
            for key, value in tensors.items():
                worst = float((value - expected[key]).abs().max())
                assert worst <= TOLERANCE, f"{what}: {key} differs by {worst}"
