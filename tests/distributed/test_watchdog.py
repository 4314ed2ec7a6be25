"""The watchdog on ranks that are slow; tests/e2e/test_faults.py has those that fail."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from hotrec.runtime.watchdog import MAIN, STEP, enter
from hotrec.runtime.watchdog.watchdog import Watchdog
from tests.distributed.setups import this_rank
from tests.helpers.ranks import run_ranks


def slow_steps() -> list[str]:
    """Two runs after one another; ranks that are slow in a step and leave at different times."""
    ranks = this_rank()
    done = []
    for run in range(2):
        with Watchdog(ranks, limit_s=1.0):
            for step in range(1, 3):
                enter(MAIN, STEP, step)
                if ranks.rank == 1:  # longer than the limit in all, but never without a sign
                    for part in range(8):
                        time.sleep(0.2)
                        enter("work", f"part {part}", step)
                dist.all_reduce(torch.ones(4))
            enter(MAIN, "evaluation", step)
            time.sleep(1.5 if ranks.rank == 0 else 0)  # the others leave, which is no death
        done.append(f"run {run}")
    return done


def test_slow_ranks_are_left_alone() -> None:
    assert run_ranks(slow_steps, 3, timeout_s=120) == [["run 0", "run 1"]] * 3
