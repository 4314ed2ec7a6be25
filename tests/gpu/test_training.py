"""TorchRec's own plans in every memory, on one GPU."""

from __future__ import annotations

import pytest

from hotrec.runtime.ranks import Ranks
from hotrec.types import TorchrecTier
from tests.exact.case import TORCHREC_PLANS, draw_cases
from tests.exact.training import run_cases

pytestmark = pytest.mark.gpu
GIVEN = {"device": "cuda", "output": "bags", "is_weighted": False, "skip": False, "wire": "fp32"}


@pytest.mark.parametrize("tier", list(TorchrecTier), ids=lambda tier: tier.value)
def test_torchrec_plans_train_the_unsplit_model(gpu: Ranks, tier: TorchrecTier) -> None:
    cases = [
        draw_cases("0", 1, 3, ("device",), **GIVEN, placement=plan, torchrec_tier=tier.name)[0]
        for plan in TORCHREC_PLANS[:3]
    ]
    found = run_cases(cases)
    assert not found.failures, "\n".join(found.failures)
