"""The main test with two and three ranks on one GPU, over the back end of tests/helpers/staged.py.

Its CPU twin is tests/distributed/test_staged.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hotrec.types import Tier
from tests.distributed.parity_cases import make_pipeline_cases, run_cases
from tests.distributed.test_staged import COLLECTIVES, check_on_cuda
from tests.helpers.ranks import run_ranks
from tests.helpers.staged import run_staged

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("world_size", [2, 3])
def test_hot_cold_equals_unsplit_reference(world_size: int) -> None:
    # Each of the eight pipelines once with each tier.
    cases = [
        replace(case, device="cuda", tier=list(Tier)[index // 8 % len(Tier)])
        for index, case in enumerate(make_pipeline_cases(24, seed=40 + world_size))
    ]
    results = run_ranks(
        run_staged,
        world_size,
        timeout_s=400,
        # A process that was forked from one with libraries of CUDA may not be able to start it.
        start_method="spawn",
        action=run_cases,
        device="cuda",
        cases=cases,
    )
    for failures in results:
        assert not failures, "\n".join(failures)


@pytest.mark.parametrize("world_size", [2, 3])
def test_collectives_of_cuda_tensors(world_size: int) -> None:
    verdicts = run_ranks(
        run_staged,
        world_size,
        timeout_s=200,
        start_method="spawn",
        action=check_on_cuda,
        device="cuda",
        checks=COLLECTIVES,
    )
    assert verdicts[0] == dict.fromkeys(verdicts[0])
