"""The check-up of all ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hotrec.train.watch import check_up


@pytest.mark.parametrize("world_size", [1, 3])
def test_losses_are_means_over_the_ranks_and_figures_are_sums(
    world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda values: values.mul_(3))  # of ranks alike
    losses = {4: torch.tensor(0.5), 5: torch.tensor(0.25)}
    loss, sums = check_up(losses, {"wait_s": [1.0], "stage_s": [], "cache": [2.0, 3.0]}, world_size)
    assert loss == 0.25  # of the last step
    assert sums == {
        "wait_s": [1.0 * world_size],
        "stage_s": [],
        "cache": [2.0 * world_size, 3.0 * world_size],
    }
