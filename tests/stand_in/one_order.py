"""Whether all collectives of a rank, of every thread and group, are called in one order.

Ranks with the stand-in run ``train``; ``tests/stand_in/test_order.py`` compares them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hotrec.runtime.comm_thread import CommunicationThread
from hotrec.runtime.ranks import all_gather_object
from hotrec.train.watch import check_up
from hotrec.types import Exchange, Partition, Placement, Sharding, TablePlacement
from tests.stand_in.checks import device
from tests.stand_in.log import recording
from tests.stand_in.model import Run, Training
from tests.stand_in.order import Calls, calls

SLOW_S = 0.01


def train(runs: Sequence[dict[str, Any]], num_steps: int) -> list[tuple[list[float], Calls]]:
    """The losses of the trainings, one after the other, and this rank's collectives in each.

    A run is a ``Run``, with "pooled" for a table whose owner pools it.
    """
    return [
        _train(Run(**{k: v for k, v in run.items() if k != "pooled"}), num_steps, run.get("pooled"))
        for run in runs
    ]


def _train(run: Run, num_steps: int, pooled: str | None) -> tuple[list[float], Calls]:
    losses = []
    with pytest.MonkeyPatch.context() as patch:
        _keep_apart(patch)
        if pooled is not None:
            patch.setattr("tests.stand_in.model.Placement", partial(_with_pooled, pooled))
        training = Training(run, device())
        with recording() as log:
            stream = training.batches(0, num_steps + 4)
            for step in range(num_steps):
                loss: torch.Tensor = training.pipeline.progress(stream)[0]
                losses.append(loss)
                if step % 2:  # the main thread's own
                    check_up({step: loss}, {}, dist.get_world_size())
                    all_gather_object(step)
            training.pipeline.flush()
        training.close()
    return [float(loss) for loss in losses], calls(log.entries)


def _with_pooled(table: str, partition: Partition, tables: dict[str, TablePlacement]) -> Placement:
    """A placement with one table whose columns its owner sends pooled, in the default group."""
    of_table = replace(tables[table], exchange=Exchange.POOLED, sharding=Sharding.TABLE_WISE)
    return Placement(partition, {**tables, table: of_table})


def _keep_apart(patch: pytest.MonkeyPatch) -> None:
    """Slow down the threads of one rank, and the main thread of the other."""
    submit = CommunicationThread.submit

    def late(self: CommunicationThread, task: Callable[[], Any]) -> Any:
        if dist.get_rank():
            time.sleep(SLOW_S)
            return submit(self, task)

        def run() -> Any:
            time.sleep(SLOW_S)
            return task()

        return submit(self, run)

    patch.setattr(CommunicationThread, "submit", late)
