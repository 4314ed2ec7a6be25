"""Checks that fail on one rank or on all of them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.helpers.checks import run_checks
from tests.helpers.ranks import RanksError, run_ranks


def passes() -> None:
    dist.all_reduce(torch.ones(3))


def fails_everywhere() -> None:
    raise KeyError(f"on rank {dist.get_rank()}")


def fails_at_its_end_on_one() -> None:
    passes()
    if dist.get_rank() == 1:
        raise KeyError("one rank alone")


def is_left_by_one() -> None:
    if dist.get_rank() == 1:
        raise KeyError("one rank alone")
    passes()


def test_the_checks_after_a_failed_one_run() -> None:
    checks = [fails_everywhere, passes, fails_at_its_end_on_one]
    for found in run_ranks(run_checks, 2, timeout_s=60, checks=checks):
        assert list(found) == [check.__name__ for check in checks]
        assert found["passes"] is None
        assert "on rank 0" in found["fails_everywhere"]
        assert "on rank 1" in found["fails_everywhere"]
        assert "one rank alone" in found["fails_at_its_end_on_one"]


def test_a_check_that_one_rank_leaves_says_why() -> None:
    with pytest.raises(RanksError, match="one rank alone"):
        run_ranks(run_checks, 2, timeout_s=60, checks=[is_left_by_one, passes])
