"""The main test with two ranks on one GPU, over the back end of tests/helpers/staged.py.

Its CPU twin is tests/distributed/test_staged.py.
"""

from __future__ import annotations

import pytest
import torch

from tests.distributed.test_staged import COLLECTIVES, Results, check_on_cuda
from tests.exact.case import draw_cases
from tests.exact.training import run_cases
from tests.helpers.ranks import run_ranks
from tests.helpers.staged import run_staged

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def check_all(num_cases: int, seed: int) -> tuple[dict[str, str | None], list[str]]:
    """All checks, then generated cases: one spawn of these ranks."""
    verdicts = check_on_cuda(COLLECTIVES)
    hosts = "0" * torch.distributed.get_world_size()
    cases = draw_cases(hosts, num_cases, seed, tiers=("device",), device="cuda")
    return verdicts, run_cases(cases).failures


@pytest.fixture(scope="module")
def results() -> Results:
    return run_ranks(
        run_staged,
        2,
        timeout_s=400,
        # A process that was forked from one with libraries of CUDA may not be able to start it.
        start_method="spawn",
        action=check_all,
        device="cuda",
        num_cases=16,
        seed=42,
    )


def test_hot_cold_equals_unsplit_reference(results: Results) -> None:
    for _, failures in results:
        assert not failures, "\n".join(failures)


def test_collectives_of_cuda_tensors(results: Results) -> None:
    verdicts = results[0][0]
    assert verdicts == dict.fromkeys(verdicts)
