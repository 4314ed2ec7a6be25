"""The check-up of ranks; tests/distributed/test_train.py has it on several processes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hotrec.train.watch import check_up


def test_counts_keep_their_names_and_every_digit() -> None:
    counts = {"must_stop": False, "cache": {"num_rows": 2.0**40 + 1, "wait_s": 0.1}, "line": {}}
    losses = {3: torch.tensor(0.75), 4: torch.tensor([0.5])}
    loss, sums = check_up(losses, counts, world_size=1)
    assert loss == 0.5
    assert sums == counts
    assert [*sums["cache"]] == ["num_rows", "wait_s"]


def test_losses_are_means_over_the_ranks_and_counts_are_sums(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda values: values.mul_(3))  # of ranks alike
    counts = {"must_stop": True, "cache": {"num_rows": 2.0, "wait_s": 0.5}}
    losses = {4: torch.tensor(0.5), 5: torch.tensor(0.25)}
    loss, sums = check_up(losses, counts, world_size=3)
    assert loss == 0.25  # of the last step
    assert sums == {"must_stop": 3.0, "cache": {"num_rows": 6.0, "wait_s": 1.5}}


def test_a_loss_that_is_not_finite_names_its_step() -> None:
    losses = {3: torch.tensor(0.75), 4: torch.tensor(float("nan")), 5: torch.tensor(0.5)}
    with pytest.raises(RuntimeError, match="^step 4: expected a finite loss, got nan"):
        check_up(losses, {}, world_size=1)
