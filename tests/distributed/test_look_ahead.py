"""The pipelines against the unsplit model, and look-ahead against itself without looking ahead."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.distributed.parity_cases import make_cases, make_pipeline_cases, run_cases, run_hot_cold
from tests.helpers.ranks import run_ranks

NUM_CASES = 32  # of each world size


def _run_share(first: int) -> list[str]:
    torch.set_num_threads(1)
    return run_cases(make_pipeline_cases(4 * NUM_CASES)[first : first + NUM_CASES])


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_pipeline_trains_the_unsplit_model(world_size: int) -> None:
    first = (world_size - 1) * NUM_CASES
    for failures in run_ranks(_run_share, world_size, timeout_s=240, first=first):
        assert not failures, "\n".join(failures)


def _differences(num_cases: int) -> list[str]:
    """Cases in which looking ahead changes a bit of the weights."""
    torch.set_num_threads(1)
    found = []
    for case in make_cases(num_cases, seed=7):
        case = replace(case, placement="row_wise", pipeline="look_ahead")
        _, plain = run_hot_cold(replace(case, depth=0))
        for depth in (1, 3):
            _, ahead = run_hot_cold(replace(case, depth=depth))
            found += [
                f"{case}: {name} at depth {depth}"
                for name, weight in plain.items()
                if not torch.equal(weight, ahead[name])
            ]
    return found


@pytest.mark.parametrize("world_size", [1, 3])
def test_looking_ahead_changes_no_bit(world_size: int) -> None:
    for found in run_ranks(_differences, world_size, timeout_s=180, num_cases=9):
        assert not found, "\n".join(found)


def _differences_in_line() -> list[str]:
    """Cases of one rank in which look-ahead differs by a bit from TorchRec's own exchange."""
    torch.set_num_threads(1)
    assert dist.get_world_size() == 1
    found = []
    for case in make_cases(18, seed=11):
        case = replace(case, placement="row_wise")
        losses, plain = run_hot_cold(case)
        other_losses, ahead = run_hot_cold(replace(case, pipeline="look_ahead"))
        found += [f"{case}: losses {losses}, {other_losses}"] if losses != other_losses else []
        found += [
            f"{case}: {name}"
            for name, weight in plain.items()
            if not torch.equal(weight, ahead[name])
        ]
    return found


def test_look_ahead_of_one_rank_is_bitwise_the_plain_loop() -> None:
    [found] = run_ranks(_differences_in_line, 1, timeout_s=120)
    assert not found, "\n".join(found)
