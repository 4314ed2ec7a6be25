"""Steps at sizes where CUDA's kernels divide their work, which other trainings never reach.

A row that is read thousands of times in a step, and tables of more distinct rows than a bag may
hold.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.gpu_day.kernels import check_tables
from benchmarks.gpu_day.tbe import DEVICE, UVM, UVM_CACHE, Tables
from hotrec.embedding.pooling import MAX_IDS
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.runtime.ranks import Ranks
from hotrec.types import OptimizerKind
from tests.exact.case import LARGE, Case, draw_cases, draw_samples
from tests.exact.reference import EPS, RATE
from tests.exact.training import TOLERANCE, Training, run_cases

pytestmark = pytest.mark.gpu
RUN_OF_TBE = 1024  # equal ids that FBGEMM's backward adds up without splitting them
KINDS = list(OptimizerKind)


def large_cases(kind: OptimizerKind) -> list[Case]:
    given = {"batches": LARGE, "more_rows": 6000, "slots": 1.0, "adapt": False, "evaluate": False}
    given |= {"device": "cuda", "skip": False, "optimizer": kind.value, "wire": "fp32"}
    cases = draw_cases("0", 6, 21, ("device", "cached"), **given, precision="fp32")
    return [replace(case, steps=3) for case in cases]


def test_the_batches_are_large_enough() -> None:
    for case in large_cases(KINDS[0]):
        samples, _ = draw_samples(case, 0)
        counts = [
            np.unique(np.concatenate(bags), return_counts=True)[1] for bags in samples.ids.values()
        ]
        assert max(int(of.max()) for of in counts) > RUN_OF_TBE
        assert max(of.size for of in counts) > 2 * MAX_IDS


@pytest.mark.parametrize("kind", KINDS)
def test_steps_equal_the_unsplit_reference(gpu: Ranks, kind: OptimizerKind) -> None:
    cases = large_cases(kind)
    assert {case.tier for case in cases} == {"device", "cached"}
    found = run_cases(cases)
    assert not found.failures, "\n".join(found.failures)


@pytest.mark.parametrize("kind", KINDS)
def test_cold_rows_repeat_bit_for_bit(gpu: Ranks, kind: OptimizerKind) -> None:
    """No flag is needed: an owner is asked for a row at most once by each rank."""
    case = replace(
        large_cases(kind)[0], partition="all_cold", pipeline="sparse_dist", tier="device",
        placement="row_wise", output="bags", micro_batches=False,
    )  # fmt: skip
    found = []
    for _ in range(2):
        with Training(case) as training:
            found.append((training.train(), training.weights()))
    (losses, weights), (again, weights_again) = found
    assert losses == again
    for name in (table.name for table in case.tables()):
        assert torch.equal(weights[name], weights_again[name]), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tier", [DEVICE, UVM, UVM_CACHE])
@pytest.mark.parametrize("is_pooled", [False, True], ids=["rows", "pooled"])
def test_one_step_of_fbgemm_follows_the_rule(
    gpu: Ranks, is_pooled: bool, tier: str, kind: OptimizerKind
) -> None:
    """A row that is read 3,000 times, one 200 times, one 20 times and thousands once."""
    tables = Tables(3, 5000, 128, OptimizerSpec(kind, RATE, EPS), tier, is_pooled=is_pooled)
    assert check_tables(tables, gpu.device)["largest_difference"] <= TOLERANCE
