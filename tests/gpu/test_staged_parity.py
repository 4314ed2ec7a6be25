"""The main test with two and three ranks on one GPU, over the back end of tests/helpers/staged.py.

Its CPU twin is tests/distributed/test_staged.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from hotrec.types import Tier
from tests.distributed.parity_cases import make_pipeline_cases, run_cases
from tests.distributed.test_staged import COLLECTIVES
from tests.helpers.checks import run_checks
from tests.helpers.ranks import run_ranks
from tests.helpers.staged import run_staged

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("tier", list(Tier), ids=lambda tier: tier.value)
def test_hot_cold_equals_unsplit_reference(tier: Tier, world_size: int) -> None:
    cases = [
        replace(case, device="cuda", tier=tier)
        for case in make_pipeline_cases(24, seed=40 + world_size)
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


def _check_on_cuda(checks: list[Callable[[], None]]) -> dict[str, str | None]:
    torch.set_default_device("cuda")  # of the tensors that the checks make
    return run_checks(checks)


@pytest.mark.parametrize("world_size", [2, 3])
def test_collectives_of_cuda_tensors(world_size: int) -> None:
    verdicts = run_ranks(
        run_staged,
        world_size,
        timeout_s=200,
        start_method="spawn",
        action=_check_on_cuda,
        device="cuda",
        checks=COLLECTIVES,
    )
    assert verdicts[0] == dict.fromkeys(verdicts[0])
