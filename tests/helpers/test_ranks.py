"""Watch the watchmen: a failing, a hanging and a dying rank must all be reported."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.helpers.ranks import RanksError, run_ranks


def add_over_ranks(values: list[float]) -> dict[str, object]:
    tensor = torch.tensor(values) * (dist.get_rank() + 1)
    dist.all_reduce(tensor)
    return {
        "sum": tensor,
        "environment": [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")],
        "num_threads": torch.get_num_threads(),
        "backend": dist.get_backend(),
    }


def raise_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise KeyError("the value that was wrong")
    dist.barrier()


def hang_on_rank_0() -> None:
    if dist.get_rank() == 0:
        time.sleep(600)


def die_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os._exit(17)
    time.sleep(600)


def exit_on_rank_0() -> int:
    if dist.get_rank() == 0:
        raise SystemExit(3)
    return 1


def return_what_does_not_pickle() -> object:
    return (i for i in range(3))


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_results_come_back_in_rank_order(start_method: str) -> None:
    results = run_ranks(add_over_ranks, world_size=3, start_method=start_method, values=[1.0, 2.0])
    for rank, result in enumerate(results):
        torch.testing.assert_close(result["sum"], torch.tensor([6.0, 12.0]))
        assert result["environment"] == [str(rank), "3", str(rank)]
        assert result["num_threads"] == 1
        assert result["backend"] == "gloo"


def test_failing_rank_is_named_with_its_traceback() -> None:
    with pytest.raises(RanksError) as caught:
        run_ranks(raise_on_rank_1)
    text = str(caught.value)
    assert "[rank 1] raised" in text
    assert "the value that was wrong" in text
    assert "raise_on_rank_1" in text


def test_hanging_rank_is_killed_at_the_limit() -> None:
    start = time.monotonic()
    with pytest.raises(RanksError, match=r"\[rank 0\] hung: killed after the limit of 12 s"):
        run_ranks(hang_on_rank_0, timeout_s=12)
    assert time.monotonic() - start < 20


def test_dying_rank_is_reported_and_its_peer_is_killed() -> None:
    start = time.monotonic()
    with pytest.raises(RanksError) as caught:
        run_ranks(die_on_rank_1)
    assert "[rank 1] died with exit code 17" in str(caught.value)
    assert "[rank 0] hung" in str(caught.value)
    assert time.monotonic() - start < 30


def test_exit_and_unpicklable_results_are_failures() -> None:
    with pytest.raises(RanksError, match=r"(?s)\[rank 0\] raised.*SystemExit: 3"):
        run_ranks(exit_on_rank_0)
    with pytest.raises(RanksError, match=r"(?s)\[rank 0\] raised.*pickle"):
        run_ranks(return_what_does_not_pickle, world_size=1)
