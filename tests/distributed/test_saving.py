"""A checkpoint that is written while training goes on is the one that is written at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from hotrec.artifact import Verify, read_artifact
from hotrec.embedding import snapshot
from hotrec.embedding.adapt import AdaptiveHotSet
from hotrec.embedding.snapshot import Snapshot
from hotrec.runtime.ranks import all_gather_object
from hotrec.train import tensor_files
from hotrec.train.checkpoint import KIND, Checkpoints, Position, Saving, save_checkpoint
from hotrec.types import OptimizerKind
from tests.distributed import setups, test_portable
from tests.distributed.test_adapt import STALE_PLACEMENTS
from tests.distributed.test_portable import PIPELINES, SPLIT, Run, Way, names_for
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import TinyLoader

SAVED_STEP, LAST_STEP, EVERY = 4, 12, 2
CPU_KINDS = [kind for kind in OptimizerKind if kind is not OptimizerKind.adam]
# Rows of the widest table in a piece that is read at once.
PIECE_ROWS = 3


def ways() -> list[tuple[Way, bool]]:
    """Every placement and pipeline with every optimizer, and whether the hot rows follow."""
    found = [
        (Way(kind, placement, pipeline), False)
        for kind in CPU_KINDS
        for placement in names_for(kind)
        if placement not in STALE
        for pipeline in PIPELINES
        if ("cached" not in placement or pipeline == "look_ahead")
        and (placement in SPLIT or pipeline == "sparse_dist")
    ]
    found += [(Way(OptimizerKind.adam, "all_hot", pipeline), False) for pipeline in PIPELINES]
    found += [
        (Way(kind, placement, "look_ahead"), True) for kind in CPU_KINDS for placement in STALE
    ]
    return found


STALE = [f"stale {name}" for name in STALE_PLACEMENTS]


class Turns:
    """Lets the writer read so many pieces between two steps; the rest at the end."""

    def __init__(self) -> None:
        self._left = threading.Semaphore(0)
        self.num_read = 0

    def give(self, num: int) -> None:
        self._left.release(num)

    @contextmanager
    def taken(self) -> Iterator[None]:
        def in_turn(read: Callable[..., Any]) -> Callable[..., Any]:
            def take_turn(*given: Any) -> Any:
                assert self._left.acquire(timeout=60)
                self.num_read += 1
                return read(*given)

            return take_turn

        with (
            mock.patch.object(Snapshot, "_read_piece", in_turn(Snapshot._read_piece)),
            mock.patch.object(Snapshot, "_read_rows", in_turn(Snapshot._read_rows)),
        ):
            yield


def train(run: Run, hot_set: AdaptiveHotSet | None, first: int, last: int) -> int:
    """The number of rows that moved."""
    num_moved = 0
    for step in range(first, last, EVERY):
        run.train(step, step + EVERY)
        num_moved += hot_set.adapt().num_moved if hot_set is not None else 0
    return num_moved


def files_of(path: Path) -> dict[str, Any]:
    return dict(read_artifact(path, kind=KIND, verify=Verify.full).files)


def save_both(folder: Path) -> list[str]:
    """Save in the background and at once; the ways in which the files differ."""
    wrong = []
    # Each world size takes other ways.
    own_ways = ways()[dist.get_world_size() - 1 :: 3]
    for index, (way, is_adaptive) in enumerate(own_ways):
        run = Run(way)
        model, optimizer = run.setup.model, run.setup.optimizer
        hot_set = AdaptiveHotSet(model, optimizer, max_rows=9) if is_adaptive else None
        train(run, hot_set, 0, SAVED_STEP)
        at = Position(SAVED_STEP, SAVED_STEP * setups.GLOBAL_BATCH)
        given = (at, model, optimizer, TinyLoader(num_batches=1), hot_set)
        saved = [
            Checkpoints(folder / f"{dist.get_world_size()}-{index}-{name}", {}, lineage="0" * 32)
            for name in ("at once", "in background")
        ]
        turns = Turns()
        with turns.taken():
            saving = Saving(saved[1], *given, in_background=True)
            at_once = save_checkpoint(saved[0], *given)
            for step in range(SAVED_STEP, LAST_STEP, EVERY):
                turns.give(5)
                moved = train(run, hot_set, step, step + EVERY)
                wrong += [f"{way}: nothing moved"] * (
                    is_adaptive and step == SAVED_STEP and not moved
                )
            turns.give(10_000)
            in_background = saving.finish()
        later = save_checkpoint(saved[0], Position(LAST_STEP, LAST_STEP), *given[1:])
        run.close()
        is_mine = dist.get_rank() == 0
        if is_mine and files_of(at_once) != files_of(in_background):
            wrong.append(f"{way} {is_adaptive}")
        if is_mine and files_of(at_once) == files_of(later):
            wrong.append(f"{way} {is_adaptive}: training changed nothing")
        if not sum(all_gather_object(turns.num_read)) and way.placement != "all_hot":
            wrong.append(f"{way}: no table was read in the background")
    return wrong


def save_all(folder: Path) -> list[str]:
    test_portable.SPLIT.update(dict(zip(STALE, STALE_PLACEMENTS.values(), strict=True)))
    row_bytes = 4 * max(setups.DIMS.values())
    with (
        mock.patch.object(snapshot, "_PIECE_BYTES", PIECE_ROWS * row_bytes),
        mock.patch.object(tensor_files, "_CHUNK_BYTES", 5 * row_bytes),
    ):
        return save_both(folder)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_written_in_the_background_as_at_once(world_size: int, tmp_path: Path) -> None:
    for wrong in run_ranks(save_all, world_size, timeout_s=280, folder=tmp_path):
        assert wrong == []
