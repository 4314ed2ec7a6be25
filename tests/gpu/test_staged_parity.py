"""The main test with two and three ranks on one GPU, over the back end of tests/helpers/staged.py.

Its CPU twin is tests/distributed/test_staged.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hotrec.types import Tier
from tests.distributed.parity_cases import make_pipeline_cases, run_cases
from tests.distributed.test_staged import COLLECTIVES, Results, check_on_cuda
from tests.helpers.ranks import run_ranks
from tests.helpers.staged import run_staged

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TIERS = [tier for tier in Tier if tier is not Tier.CACHED]  # slots are look-ahead's alone


def check_all(num_cases: int, seed: int) -> tuple[dict[str, str | None], list[str]]:
    """All checks, then generated cases: one spawn of these ranks."""
    verdicts = check_on_cuda(COLLECTIVES)
    each = num_cases // len(TIERS)
    cases = [
        replace(case, device="cuda", tier=TIERS[at // each % len(TIERS)])
        for at, case in enumerate(make_pipeline_cases(num_cases, seed))
    ]
    return verdicts, run_cases(cases)


# Two ranks run each of the eight pipelines once with each tier, three ranks with one of them.
@pytest.fixture(scope="module", params=[(2, 24), (3, 8)], ids=["2 ranks", "3 ranks"])
def results(request: pytest.FixtureRequest) -> Results:
    world_size, num_cases = request.param
    return run_ranks(
        run_staged,
        world_size,
        timeout_s=400,
        # A process that was forked from one with libraries of CUDA may not be able to start it.
        start_method="spawn",
        action=check_all,
        device="cuda",
        num_cases=num_cases,
        seed=40 + world_size,
    )


def test_hot_cold_equals_unsplit_reference(results: Results) -> None:
    for _, failures in results:
        assert not failures, "\n".join(failures)


def test_collectives_of_cuda_tensors(results: Results) -> None:
    verdicts = results[0][0]
    assert verdicts == dict.fromkeys(verdicts)
