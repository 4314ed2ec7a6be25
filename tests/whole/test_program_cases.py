"""Every case of a program under every choice, on one, two and three ranks."""

from __future__ import annotations

import pytest

from tests.distributed.test_program_cases import all_checks, run_all


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_case_under_every_choice(world_size: int) -> None:
    run_all(all_checks(), world_size)
