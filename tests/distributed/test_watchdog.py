"""The watchdog on real ranks: what each of them says when one fails or is slow."""

from __future__ import annotations

import pickle
import time
from pathlib import Path

import torch
import torch.distributed as dist

from hotrec.runtime.watchdog import MAIN, STEP, enter
from hotrec.runtime.watchdog.watchdog import LostRank, Watchdog
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


def end_of_rank(error_rank: int, folder: Path) -> tuple[str, str]:
    """What a rank ends with when ``error_rank`` raises in step 3, and what caused that."""
    assert slow_steps() == ["run 0", "run 1"]
    ranks = this_rank()
    try:
        with Watchdog(ranks, limit_s=20.0, flight_recorder=folder):
            for step in range(1, 6):
                enter(MAIN, STEP, step)
                if step == 3 and ranks.rank == error_rank:
                    raise ArithmeticError("the model has had enough")
                dist.all_reduce(torch.ones(4))
    except (LostRank, ArithmeticError) as error:
        # Closes the connections, as the end of the process would.
        dist.destroy_process_group()
        return f"{type(error).__name__}: {error}", type(error.__cause__).__name__
    raise AssertionError("nothing has happened")


def test_slow_ranks_are_left_alone_and_an_error_reaches_all(tmp_path: Path) -> None:
    folder = tmp_path / "flight_recorder"
    told = run_ranks(end_of_rank, 3, timeout_s=120, error_rank=1, folder=folder)
    assert told[1] == ("ArithmeticError: the model has had enough", "NoneType")
    for rank in (0, 2):
        message, cause = told[rank]
        assert message == told[0][0]
        assert message.startswith(
            "LostRank: step 3: expected all ranks to continue, got an error on"
        )
        assert "rank 1 in step 3 (at test_watchdog.py:" in message
        assert "ArithmeticError: the model has had enough." in message
        assert cause == "RuntimeError"
    # The ranks that were left alone leave what they waited for, and the stacks of their threads.
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["rank_0", "rank_2", "threads_0.txt", "threads_2.txt"]
    for path in folder.glob("threads_*"):
        assert "in end_of_rank" in path.read_text()
    for path in folder.glob("rank_*"):
        last = pickle.loads(path.read_bytes())["entries"][-1]
        assert last["profiling_name"] == "gloo:all_reduce"
        assert last["input_sizes"] == [[4]]
        frames = [(frame["name"], Path(frame["filename"]).name) for frame in last["frames"]]
        assert ("end_of_rank", "test_watchdog.py") in frames
