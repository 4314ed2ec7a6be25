"""``hotrec bench`` on the stand-in for a CUDA device."""

from __future__ import annotations

import pytest

from tests.stand_in.build import why_not
from tests.stand_in.ranks import run_on_device

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.timeout(300),
]


def test_every_case_is_given_pinned_batches() -> None:
    """Else the host would be blocked in each copy of those cases alone that route beforehand."""
    (found,) = run_on_device("tests.stand_in.bench:pageable_copies", timeout_s=200)
    assert len(found) == 14
    assert {name: copies for name, copies in found.items() if copies} == {}
