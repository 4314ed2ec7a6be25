"""Hot rows that follow the data: training stays that of the unsplit model, whatever moves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hotrec.embedding.adapt import AdaptiveHotSet, HotSetDecision
from hotrec.embedding.convert import check_replicas
from hotrec.train.checkpoint import Checkpoints, Position, load_checkpoint, save_checkpoint
from hotrec.types import (
    POPULAR_ROW,
    Levels,
    OptimizerKind,
    Partition,
    Placement,
    TablePlacement,
    Tier,
)
from tests.distributed import setups, test_portable
from tests.distributed.test_portable import LAST_STEP, TOLERANCE, Run, Way, train_plain
from tests.helpers.ranks import run_ranks
from tests.helpers.samples import on_ranks, only_whole
from tests.helpers.tiny import TinyLoader

EVERY, SAVED_STEP = 2, 4
KINDS = (OptimizerKind.sgd, OptimizerKind.adagrad, OptimizerKind.rowwise_adagrad)
# The batches read the first rows most, so most of these have to become cold.
STALE = Partition(
    setups.NUM_ROWS,
    {
        table: np.random.default_rng(7).permutation(np.arange(rows // 2, rows))[:6]
        for table, rows in setups.NUM_ROWS.items()
    },
)
STALE_PLACEMENTS = {
    "mixed": Placement.alike(STALE),
    "placement": Placement(
        Partition(setups.NUM_ROWS, {t: STALE.hot_rows[t] for t in ("t0", "t1")}),
        setups.PLACEMENT.tables,
    ),
    "cached": Placement(
        STALE,
        {table: TablePlacement(tier=Tier.CACHED, cache_load_frac=0.9) for table in setups.NUM_ROWS},
        # Some rows begin in slots, also where they are hot.
        popular_rows={
            table: np.array([(0, 0.9), (1, 0.5), (2, 0.5)], POPULAR_ROW)
            for table in setups.NUM_ROWS
        },
    ),
}
STALE_PLACEMENTS |= {
    f"spread {name}": STALE_PLACEMENTS[name].spread(setups.NUM_ROWS) for name in ("mixed", "cached")
}


@dataclass
class Found:
    """What a run of some steps gave on one rank."""

    losses: list[float]
    decisions: list[HotSetDecision]
    tensors: dict[str, torch.Tensor]


def ways() -> list[Way]:
    return [
        Way(kind, placement, pipeline)
        for kind in KINDS
        for placement in STALE_PLACEMENTS
        for pipeline in ("look_ahead", "sparse_dist")
        if "cached" not in placement or pipeline == "look_ahead"
    ]


def make_run(way: Way) -> tuple[Run, AdaptiveHotSet]:
    run = Run(way)
    return run, AdaptiveHotSet(run.setup.model, run.setup.optimizer, decay=0.5, max_rows=9)


def train_on(run: Run, hot_set: AdaptiveHotSet, first: int, last: int) -> Found:
    found = Found([], [], {})
    for step in range(first, last, EVERY):
        found.losses += run.train(step, step + EVERY)
        found.decisions.append(hot_set.adapt())
        check_replicas(run.setup.model)
    found.tensors = run.tensors()
    return found


def run_all(folder: Path) -> list[tuple[Found, Found]]:
    """Every way until it is saved, and on from there."""
    test_portable.SPLIT.update(STALE_PLACEMENTS)
    results = []
    for index, way in enumerate(on_ranks(ways(), dist.get_world_size())):
        run, hot_set = make_run(way)
        before = train_on(run, hot_set, 0, SAVED_STEP)
        save_checkpoint(
            Checkpoints(folder / f"{dist.get_world_size()}-{index}", facts={}),
            Position(SAVED_STEP, SAVED_STEP * setups.GLOBAL_BATCH),
            run.setup.model,
            run.setup.optimizer,
            TinyLoader(num_batches=1),
            hot_set,
        )
        results.append((before, train_on(run, hot_set, SAVED_STEP, LAST_STEP)))
        run.close()
    return results


def resume_all(folder: Path, saved_by: int) -> list[Found]:
    """Every way from the checkpoints of some ranks."""
    test_portable.SPLIT.update(STALE_PLACEMENTS)
    results = []
    for index, way in enumerate(on_ranks(ways(), saved_by)):
        run, hot_set = make_run(way)
        load_checkpoint(
            folder / f"{saved_by}-{index}" / f"step-{SAVED_STEP:08d}",
            model=run.setup.model,
            optimizer=run.setup.optimizer,
            facts={},
            hot_set=hot_set,
        )
        results.append(train_on(run, hot_set, SAVED_STEP, LAST_STEP))
        run.close()
    return results


@pytest.fixture(scope="module")
def plain(one_rank: Any) -> dict[OptimizerKind, tuple[list[float], dict[str, torch.Tensor]]]:
    return {kind: train_plain(kind) for kind in KINDS}


def check(found: Found, losses: list[float], tensors: dict[str, torch.Tensor], what: Any) -> None:
    assert found.losses == pytest.approx(losses, abs=TOLERANCE), what
    for key, value in tensors.items():
        worst = float((found.tensors[key] - value).abs().max())
        assert worst <= TOLERANCE, f"{what}: {key} differs by {worst}"


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_moves_change_nothing(world_size: int, plain: Any, tmp_path: Path) -> None:
    of_ranks = run_ranks(run_all, world_size, timeout_s=280, folder=tmp_path)
    chosen, whole = on_ranks(ways(), world_size), of_ranks[0]
    for way, (before, after), *others in zip(chosen, whole, *of_ranks[1:], strict=True):
        losses, tensors = plain[way.optimizer]
        decisions = [*before.decisions, *after.decisions]
        assert sum(decision.num_moved for decision in decisions) >= 9, way
        assert max(decision.num_moved for decision in decisions) <= 9, way
        assert decisions[-1].hot_share > decisions[0].hot_share, way
        assert all(0 < d.hot_share <= d.best_share <= 1 for d in decisions), way
        assert before.losses == pytest.approx(losses[:SAVED_STEP], abs=TOLERANCE), way
        check(after, losses[SAVED_STEP:], tensors, way)
        for first, second in others:
            moved = [d.num_moved for d in (*first.decisions, *second.decisions)]
            assert moved == [d.num_moved for d in decisions], way

    [again, *_] = run_ranks(
        resume_all, world_size, timeout_s=280, folder=tmp_path, saved_by=world_size
    )
    for way, found, (_, after) in zip(chosen, again, whole, strict=True):
        assert [d.num_moved for d in found.decisions] == [d.num_moved for d in after.decisions]
        assert found.losses == after.losses, way
        assert all(torch.equal(found.tensors[key], after.tensors[key]) for key in after.tensors)
    if world_size == 3:
        [elsewhere, *_] = run_ranks(resume_all, 2, timeout_s=280, folder=tmp_path, saved_by=3)
        for way, found in zip(chosen, elsewhere, strict=True):
            check(found, plain[way.optimizer][0][SAVED_STEP:], plain[way.optimizer][1], way)


def run_on_hosts(hosts: str) -> list[tuple[Way, Found, Found]]:
    """Some ways in two levels, twice."""
    setups.pretend_hosts(hosts)
    test_portable.SPLIT.update(STALE_PLACEMENTS)
    results = []
    for way in [replace(way, levels=Levels.two) for way in ways()[::6]]:
        found = []
        for _ in range(2):
            run, hot_set = make_run(way)
            found.append(train_on(run, hot_set, 0, LAST_STEP))
            run.close()
        results.append((way, found[0], found[1]))
    return results


# The host of each rank; in two levels on the first ones.
HOSTS = ["0011", *only_whole("001122", "001", "0101")]


@pytest.mark.parametrize("hosts", HOSTS)
def test_moves_on_hosts_change_nothing(hosts: str, plain: Any) -> None:
    for of_rank in run_ranks(run_on_hosts, len(hosts), timeout_s=280, hosts=hosts):
        for way, found, again in of_rank:
            losses, tensors = plain[way.optimizer]
            check(found, losses, tensors, way)
            assert sum(decision.num_moved for decision in found.decisions) >= 9, way
            assert found.losses == again.losses, way
            for key, value in found.tensors.items():
                assert torch.equal(again.tensors[key], value), (way, key)
