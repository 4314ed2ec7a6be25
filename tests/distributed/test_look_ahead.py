"""The pipelines against the unsplit model, and look-ahead against itself without looking ahead."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.distributed.parity_cases import make_cases, make_pipeline_cases, run_cases, run_hot_cold
from tests.helpers.ranks import run_ranks
from tests.helpers.samples import only_whole

NUM_CASES = 32  # of each world size


def check_all() -> dict[str, list[str]]:
    """What differs on this rank; each world size has a share of the generated cases."""
    torch.set_num_threads(1)
    world_size = dist.get_world_size()
    first = (world_size - 1) * NUM_CASES
    share = make_pipeline_cases(4 * NUM_CASES)[first : first + NUM_CASES]
    return {
        "unsplit model": run_cases(share),
        "depths": compare_depths(num_cases=9) if world_size in (1, 3) else [],
        "plain loop": compare_with_plain_loop() if world_size == 1 else [],
    }


def compare_depths(num_cases: int) -> list[str]:
    """Cases in which looking ahead changes a bit of the weights."""
    found = []
    for case in make_cases(num_cases, seed=7):
        case = replace(case, placement="row_wise", pipeline="look_ahead")
        _, plain = run_hot_cold(replace(case, depth=0))
        for depth in (1, 3):
            _, ahead = run_hot_cold(replace(case, depth=depth))
            found += [f"{case}: {name} at depth {depth}" for name in different(plain, ahead)]
    return found


def compare_with_plain_loop() -> list[str]:
    """Cases of one rank in which look-ahead differs by a bit from TorchRec's own exchange."""
    found = []
    for case in make_cases(18, seed=11):
        case = replace(case, placement="row_wise")
        losses, plain = run_hot_cold(case)
        other_losses, ahead = run_hot_cold(replace(case, pipeline="look_ahead"))
        found += [f"{case}: losses {losses}, {other_losses}"] if losses != other_losses else []
        found += [f"{case}: {name}" for name in different(plain, ahead)]
    return found


def different(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    return [name for name, weight in one.items() if not torch.equal(weight, other[name])]


@pytest.mark.parametrize("world_size", [1, 2, 3, *only_whole(4)])
def test_every_pipeline_trains_the_unsplit_model_and_depth_changes_no_bit(world_size: int) -> None:
    for found in run_ranks(check_all, world_size, timeout_s=280):
        failures = [f"{what}: {line}" for what, lines in found.items() for line in lines]
        assert not failures, "\n".join(failures)
