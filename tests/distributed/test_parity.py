"""The main test: any partition, world size, optimizer, batch: the unsplit model's weights."""

from __future__ import annotations

import pytest

from tests.distributed.parity_cases import make_cases, run_cases
from tests.helpers.ranks import run_ranks

NUM_CASES = {1: 36, 2: 48, 3: 36}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_hot_cold_equals_unsplit_reference(world_size: int) -> None:
    cases = make_cases(NUM_CASES[world_size], seed=world_size)
    for failures in run_ranks(run_cases, world_size, timeout_s=240, cases=cases):
        assert not failures, "\n".join(failures)
