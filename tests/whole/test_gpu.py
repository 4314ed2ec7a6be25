"""All of tests/gpu, on the stand-in for a CUDA device."""

from __future__ import annotations

from tests.stand_in.test_gpu import pytestmark as pytestmark
from tests.stand_in.test_gpu import run_on_the_stand_in


def test_all_tests_of_a_gpu_pass() -> None:
    run_on_the_stand_in()
